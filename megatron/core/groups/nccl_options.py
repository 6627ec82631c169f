"""NCCL settings per process group, from a YAML file as Megatron-LM reads it:

    tp: {cga_cluster_size: 2, max_ctas: 8, min_ctas: 2}
    dp: {max_ctas: 4}

Keys are axes (fields of ``ProcessGroups``), values fields of NCCL's communicator configuration. Axes that the file does
not name keep ``DEFAULTS``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping
from typing import Any

from megatron.core.config.errors import UserError

SETTINGS = ("cga_cluster_size", "max_ctas", "min_ctas", "split_share", "blocking", "net_name")

DEFAULTS: dict[str, dict[str, Any]] = {"pp_up": {"max_ctas": 4}, "pp_down": {"max_ctas": 4}}
"""Messages between pipeline stages wait on the GPU for each other, for most of a micro-batch's time. What they occupy
while waiting is lost to the GEMMs beside them, and a few thread blocks carry them fast enough."""


def read_nccl_settings(path: str, axes: Collection[str]) -> dict[str, dict[str, Any]]:
    """Settings by axis. ValueError naming every axis and setting that does not exist, and where PyYAML is missing."""
    if importlib.util.find_spec("yaml") is None:
        raise UserError("nccl_communicator_config_path needs the package PyYAML: pip install pyyaml")
    import yaml

    with open(path, encoding="utf-8") as file:
        content = yaml.safe_load(file)
    if not isinstance(content, Mapping) or not all(isinstance(value, Mapping) for value in content.values()):
        raise UserError(f"{path}: must hold lines such as `tp: {{max_ctas: 8}}`")
    problems = [f"{axis}: no such group, choose from {', '.join(sorted(axes))}" for axis in content if axis not in axes]
    for axis, settings in content.items():
        problems += [f"{axis}.{name}: choose from {', '.join(SETTINGS)}" for name in settings if name not in SETTINGS]
    if problems:
        raise UserError(f"{path}: {'; '.join(problems)}")
    return {axis: dict(settings) for axis, settings in content.items()}


def group_options(settings: Mapping[str, Any]) -> Any:
    """``pg_options`` of ``torch.distributed.new_group`` over NCCL; None without settings."""
    if not settings:
        return None
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    for name, value in settings.items():
        setattr(options.config, name, value)
    return options
