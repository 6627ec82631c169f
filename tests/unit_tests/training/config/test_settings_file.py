"""A run's settings.yaml, read by --yaml-cfg, gives the settings of the run."""

import shlex

import pytest

from megatron.core.config.cli import ConfigError
from megatron.training.arguments import parse_args, validate_args
from megatron.training.config.settings_file import settings_text, write_settings
from tests.test_utils.flag_effects import table
from tests.test_utils.flag_effects.observe import MODEL
from tests.test_utils.flag_effects.rows import Probe

ROWS = [
    row
    for row in table.TABLE
    if "{" not in row.base + row.changed and "--dry-run" not in row.base + row.changed and not (row.drop or row.without)
]


def resolved(argv, family, ranks):
    return validate_args(parse_args(argv, model_family=family), ranks, announce=False).flat


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.changed[:50])
def test_settings_are_equal_after_a_round_trip(row, tmp_path):
    family = row.family if isinstance(row, Probe) else "gpt"
    base = MODEL if family == "gpt" else ""
    try:
        cfg = resolved(shlex.split(f"{base} {row.base} {row.changed}"), family, row.ranks)
    except ConfigError:
        pytest.skip("a run that is rejected")
    write_settings(cfg, str(tmp_path / "run"))
    repeated = resolved(["--yaml-cfg", str(tmp_path / "run" / "settings.yaml")], family, row.ranks)
    read = repeated.values()
    unequal = {name: (value, read[name]) for name, value in cfg.values().items() if value != read[name]}
    assert unequal.keys() <= {"yaml_cfg", "explicit", "model", "extra"}, unequal


def test_derived_settings_are_comments():
    flags = f"{MODEL} --swiglu --moe-layer-freq ([0]*1+[1]*1) --num-experts 2"
    lines = settings_text(resolved(shlex.split(flags), "gpt", 1)).splitlines()
    assert lines[0] == "# gpt, 1 ranks; read by --yaml-cfg"
    assert "swiglu: true" in lines and "moe_layer_freq: [0, 1]" in lines
    assert any(line.startswith("# ffn_hidden_size: ") for line in lines)
    assert "model_family" not in "\n".join(lines)
