"""Registry of model families: programs by name, names from files, which import nothing, and declared properties."""

import sys
from types import SimpleNamespace

import pytest
import torch

from megatron.core.models.registry import default_family, families, find_program, get_family, known_family, programs
from megatron.training.arguments import parse_args
from megatron.training.config.resolve import resolve
from megatron.training.tasks.language_model import task_class
from tests.unit_tests.training.config.test_resolve import TINY

MODULE = "from megatron.core.models.registry import get_family\nFAMILY = get_family('gpt')\n"


def test_default_family_comes_first():
    assert default_family() == "gpt" and list(families()) == ["gpt", "bert", "t5", "vlm"]
    assert list(programs()) == ["gpt", "moe", "hybrid", "bert", "t5", "vlm"]


@pytest.mark.parametrize("name", [None, 3, ["gpt"], {}, "nothing", "no.such.module", "tests"])
def test_odd_names_are_no_families(name):
    assert known_family(name) is None


def test_names_in_files_import_nothing(tmp_path, monkeypatch):
    (tmp_path / "planted_family.py").write_text(MODULE)
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "family.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("planted_family", "planted.family"):
        assert known_family(name) is None and name not in sys.modules
    family = get_family("planted.family")  # as a command line names it
    assert known_family("planted.family") is family is get_family("gpt")


@pytest.mark.parametrize("name", ["moe", "pretrain_moe", "pretrain_moe.py"])
def test_programs_are_found_by_name_and_script(name):
    family, program = find_program(name)
    assert family.name == "gpt" and program.name == "moe" and program.required == ("num_moe_experts",)


def test_first_program_of_a_module_is_meant(tmp_path, monkeypatch):
    (tmp_path / "several").mkdir()
    (tmp_path / "several" / "family.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    assert find_program("several.family")[1].name == "gpt"


@pytest.mark.parametrize("name", families())
def test_logits_of_causal_families_ignore_later_tokens(name):
    flags = f"{TINY} --decoder-seq-length 16" if name == "t5" else TINY
    cfg = resolve(parse_args(flags.split(), model_family=name), 1)
    model = task_class(name)(cfg, SimpleNamespace(vocab_size=100)).model_provider().eval()
    tokens = torch.arange(8)[None]
    other = torch.cat([tokens[:, :-1], tokens[:, -1:] + 50], dim=1)
    with torch.no_grad():
        first, second = (cfg.family.logits(model, cfg, x)[:, :-1] for x in (tokens, other))
    assert torch.equal(first, second) == cfg.family.is_causal
