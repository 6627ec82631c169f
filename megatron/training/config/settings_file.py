"""The settings of a run as YAML, which ``--yaml-cfg`` reads: ``settings.yaml`` in the folder of --save."""

from __future__ import annotations

import json
import os
from enum import Enum
from pathlib import Path

from megatron.core.config import cli
from megatron.core.config.errors import UserError
from megatron.training.config.flat import FlatConfig

SETTINGS_FILE = "settings.yaml"
_LEFT_OUT = {"yaml_cfg", "model"}
"""Fields whose effect is in the other settings."""


def settings_text(cfg: FlatConfig) -> str:
    """Return YAML with the settings that command line, file and model chose, as resolved in ``cfg``, one per line in
    the order of --help; other settings that differ from their defaults follow from these, and are comments. Values are
    JSON, which YAML contains. Reading the text as --yaml-cfg on as many ranks gives the same run."""
    defaults = type(cfg)(model_family=cfg.model_family)
    lines, derived = [], []
    for spec in cfg.flags.values():
        value = getattr(cfg, spec.field)
        if spec.field in _LEFT_OUT:
            continue
        if spec.field in cfg.explicit:
            lines.append(f"{spec.field}: {_as_json(value)}")
        elif value != getattr(defaults, spec.field):
            derived.append(f"# {spec.field}: {_as_json(value)}")
    title = f"# {cfg.model_family}, {cfg.world_size} ranks; read by --yaml-cfg"
    return "\n".join([title, *lines, "# derived:" if derived else "#", *derived]) + "\n"


def _as_json(value: object) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_as_json, value)) + "]"
    is_number = isinstance(value, bool | int | float) and not isinstance(value, Enum)
    return json.dumps(value if value is None or is_number else cli.show(value))


def write_settings(cfg: FlatConfig, folder: str) -> None:
    """Write ``settings.yaml`` to ``folder``, which is created. Replaces the file of an earlier start in one step.
    Raises UserError if the folder cannot be written."""
    path = Path(folder) / SETTINGS_FILE
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(settings_text(cfg), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise UserError(f"--save {folder}: cannot be written ({error.strerror}); choose another folder") from error
