"""The whole program against an independent definition of it (``tests/reference``): data order, initial weights,
dropout masks, losses, gradients, updates, schedules, loss scales and evaluations of many settings, step by step.

The layout table compares layouts with one rank of the same program, so that a bug which is the same on every layout
escapes it. The reference is written from the papers and from Megatron-LM's documented behaviour, and imports nothing
of the program.
"""

import ast
import sys
from pathlib import Path

import pytest

from tests.reference import fp8, random_numbers, settings, training
from tests.test_utils import masked_runs, masked_table, reference_runs
from tests.test_utils.reference_table import ROWS

REFERENCE = Path(settings.__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora")
    reference_runs.write_corpora(folder)
    return folder


@pytest.mark.parametrize("name", ROWS)
def test_the_program_is_the_reference(gloo_pool, folder, tmp_path, name, monkeypatch):
    monkeypatch.setattr(fp8, "EXPERT_WIDTH", 96)  # as in the program: narrow_fp8_experts
    flags, precision = ROWS[name]
    argv = reference_runs.command_line(flags)
    words = [*argv, *reference_runs.TOKENIZER]
    actual = gloo_pool.run(reference_runs.program, 1, words, precision == "fp64", str(folder), str(tmp_path))[0]
    overflows = reference_runs.overflows(actual[0]) if precision == "fp16" else []
    assert len(overflows) <= 12 and bool(overflows) == (precision == "fp16" and "--loss-scale" not in flags)
    expected = training.train(settings.read(argv), reference_runs.corpora(), overflows)
    differences = reference_runs.compare(actual, expected, precision)
    assert not differences, "\n".join(differences[:8])
    if name == "fp16-patient":  # overflows after one to three clean iterations, in the middle of a window of 4
        assert {2, 3, 4} & {later - before for before, later in zip(overflows, overflows[1:])}


def test_every_setting_takes_another_value_than_its_default():
    rows = [settings.read(reference_runs.command_line(flags)) for flags, _ in ROWS.values()]
    for kind, remaining in masked_table.ROWS.items():
        rows += [settings.read(masked_runs.command_line(kind, flags)) for flags, _ in remaining.values()]
    for name, default in settings.DEFAULTS.items():
        values = {repr(getattr(row, name)) for row in rows}
        assert len(values) > 1 or values != {repr(default)}, f"no row sets {name}"


def imported(tree):
    """Yield every module that a file imports, by statement or call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        assert not (isinstance(node, ast.Name) and node.id in ("__import__", "importlib", "exec", "eval"))


def test_the_reference_imports_nothing_of_the_program():
    files = list(REFERENCE.glob("*.py"))
    assert len(files) >= 5
    for file in files:
        for name in imported(ast.parse(file.read_text())):
            top = name.split(".")[0]
            assert name.startswith("tests.reference.") or top in sys.stdlib_module_names | {"numpy", "torch"}, name
            assert top != "importlib"


def test_the_reference_stays_short_enough_to_be_read_as_documentation():
    """650 lines for dense models, 350 for experts, latent attention and further prediction, 460 for BERT and T5, 170
    for fp8, 120 for Muon, Lion and adaptive Muon."""
    lines = [line for file in REFERENCE.glob("*.py") for line in file.read_text().splitlines()]
    assert sum(bool(line.strip()) for line in lines) <= 1760


def test_philox_gives_the_published_numbers():
    """kat_vectors of Random123 1.14."""
    ones = 0xFFFFFFFF
    vectors = {
        (0, 0, 0, 0, 0, 0): (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        (ones, ones, ones, ones, ones, ones): (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0):
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    }  # fmt: skip
    for (*counter, low, high), expected in vectors.items():
        assert tuple(int(word) for word in random_numbers.philox(*counter, low | high << 32)) == expected
