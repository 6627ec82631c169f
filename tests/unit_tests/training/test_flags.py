"""Every core flag of Megatron-LM exists with its spellings, type, choices and default; the reference is current."""

import ast
import contextlib
import csv
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron.core.config import absent
from megatron.core.config.cli import flag_table, normalize
from megatron.training.arguments import flag_specs
from megatron.training.config.flat import FlatConfig

ROOT = Path(__file__).resolve().parents[3]
TABLE = flag_table([*flag_specs(), *absent.specs()])
FIELDS = {spec.field for spec in flag_specs()}

with open(Path(__file__).with_name("core_flags.tsv"), encoding="utf-8") as file:
    CORE = list(csv.DictReader(file, delimiter="\t"))

# flag -> reason why a column differs on purpose
DIFFERENT = {
    "--num-query-groups default": "None: 1 means nothing until --group-query-attention makes it the default",
    "--tokenizer-type choices": "one more tokenizer, ByteLevelTokenizer; others are not available yet",
    "--transformer-impl default": "runs without optional packages",
    "--distributed-backend default": "None: gloo where there is no GPU",
    "--local-rank default": "LOCAL_RANK is read when settings are parsed",
    "--cp-comm-type choices": "the known ones are named",
    "--attention-backend type": "an enumeration there",
    "--optimizer choices": "others are not available yet",
    "--position-embedding-type choices": "others are not available yet",
    "--fp8-recipe choices": "in another order",
    "--rope-type choices": "none: latent attention without positions",
    "--transformer-impl choices": "others are not available yet",
    "--rotary-base type": "bases of published models are not always whole",
    "--moe-layer-freq type": "a pattern of layers, as of --window-attn-skip-freq",
    "--cuda-graph-impl choices": "others are not available yet",
}


def same(text, value):
    """Whether a default of the table equals this library's."""
    if isinstance(value, list) and not text.startswith("["):
        value = value[0] if value else ""
    if text in ("", "False") and value in (None, False, ""):
        return True
    with contextlib.suppress(ValueError, SyntaxError):
        text = ast.literal_eval(text)
    return text == value


@pytest.mark.parametrize("row", CORE, ids=[row["flag"] for row in CORE])
def test_core_flag_exists_as_known(row):
    name = row["flag"]
    older = absent.by_name().get(normalize(name))
    if older and older.status == "means":
        return  # read as a flag of this table
    spec = TABLE[normalize(name)]
    for spelling in row["spellings"].split():
        assert TABLE[normalize(spelling)] is spec
    if spec.is_bool:
        assert row["type"] == "bool-flag" and spec.default is (row["default"] == "True")
        return
    if spec.field in FIELDS and f"{name} type" not in DIFFERENT:
        assert spec.type_name == row["type"]
    if spec.field in FIELDS:
        absent_values = [word for word in row["choices"].split() if f"{spec.names[0]}={word}" in absent.by_name()]
        registered = [str(choice) for choice in spec.choices] + absent_values
        if f"{name} choices" in DIFFERENT:
            assert set(row["choices"].split()) <= set(registered)
        else:
            assert registered == row["choices"].split()
    assert str(spec.nargs or "") == row["nargs"]
    if f"{name} default" not in DIFFERENT:
        assert same(row["default"], spec.default)


def test_every_flag_has_a_help_text():
    assert [spec.field for spec in flag_specs() if len(spec.help) < 8] == []


def test_defaults_of_flags_are_defaults_of_fields():
    cfg = FlatConfig()
    assert [spec.field for spec in flag_specs() if getattr(cfg, spec.field) != spec.default] == []


def test_no_spelling_is_used_twice():
    names = [normalize(name) for spec in flag_specs() for name in dict.fromkeys(map(normalize, spec.names))]
    assert len(names) == len(set(names))


def test_flag_reference_is_current(warm_python):
    result = subprocess.run(
        [warm_python, str(ROOT / "tools" / "generate_docs.py"), "--check"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("flag, code", [("--help", 0), ("-h", 0), ("--chek", 2)])
def test_help_of_the_documentation_writer_writes_no_page(warm_python, tmp_path, flag, code):
    """From a copy whose pages it would write."""
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    (tmp_path / "docs" / "reference").mkdir(parents=True)
    (tmp_path / "megatron").symlink_to(ROOT / "megatron")
    result = subprocess.run(
        [warm_python, str(tmp_path / "tools" / "generate_docs.py"), flag], capture_output=True, text=True
    )
    assert result.returncode == code and "usage: generate_docs.py" in result.stdout + result.stderr
    assert list((tmp_path / "docs" / "reference").iterdir()) == []


ONLY_CHECKED = {
    "add_position_embedding": "--position-embedding-type chooses learned positions; a rule refuses contradictions",
    "use_precision_aware_optimizer": "the formats themselves are read; a rule wants this flag with them",
    "main_grads_dtype": "a rule wants --grad-reduce-in-bf16, which chooses it",
    "main_params_dtype": "a rule refuses all but one",
}
"""Available flags that nothing but a rule reads."""


def names_read_by_the_program():
    """Attributes read, and names in strings, in all files but those that declare or check settings (or list them)."""
    result = set()
    for path in (ROOT / "megatron").rglob("*.py"):
        place = path.relative_to(ROOT)
        computes = path.name in ("resolve.py", "mup.py", "model_settings.py")
        if {"config", "rules"} & set(place.parts) and not computes:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                result.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and place.name != "settings.py":
                result.update(node.value.split() if len(node.value) < 80 else ())
    return result


def test_every_available_flag_is_read_by_the_program():
    """A flag that parses has an effect, gives a notice that it has no effect, or is rejected."""
    assert sorted(FIELDS - set(ONLY_CHECKED) - names_read_by_the_program()) == []
