"""NCCL communicator settings per process group, from a YAML file in Megatron-LM's format:

    tp: {cga_cluster_size: 2, max_ctas: 8, min_ctas: 2}
    dp: {max_ctas: 4}

Keys are axes (fields of ``ProcessGroups``), values are fields of NCCL's communicator configuration. Axes that are not
in the file keep ``DEFAULTS``."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping

from megatron.core.config.errors import UserError

SETTINGS = ("cga_cluster_size", "max_ctas", "min_ctas", "split_share", "blocking", "net_name")

DEFAULTS: dict[str, dict[str, object]] = {"pp_up": {"max_ctas": 4}, "pp_down": {"max_ctas": 4}}
"""Settings by axis without a file. Pipeline p2p kernels wait on the GPU for most of a micro-batch and occupy SMs that
concurrent GEMMs then lack; 4 thread blocks give enough bandwidth."""


def read_nccl_settings(path: str, axes: Collection[str]) -> dict[str, dict[str, object]]:
    """Return {axis: {setting: value}} from a YAML file. Raises UserError if PyYAML is missing; if the file cannot be
    read, is empty or has another structure; or with all axes that are not in ``axes`` and all settings that are not in
    ``SETTINGS``. Does not check values, and does not add ``DEFAULTS``."""
    if importlib.util.find_spec("yaml") is None:
        raise UserError("nccl_communicator_config_path needs the package PyYAML: pip install pyyaml")
    import yaml

    from megatron.core.safe_files import read_text

    try:
        content = yaml.safe_load(read_text(path))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, Mapping) or not all(isinstance(value, Mapping) for value in content.values()):
        raise UserError(f"{path}: must hold lines such as `tp: {{max_ctas: 8}}`")
    problems = [f"{axis}: no such group, choose from {', '.join(sorted(axes))}" for axis in content if axis not in axes]
    for axis, settings in content.items():
        problems += [f"{axis}.{name}: choose from {', '.join(SETTINGS)}" for name in settings if name not in SETTINGS]
    if problems:
        raise UserError(f"{path}: {'; '.join(problems)}")
    return {axis: dict(settings) for axis, settings in content.items()}


def group_options(settings: Mapping[str, object]) -> object:
    """Return ``pg_options`` for ``torch.distributed.new_group`` over NCCL, with ``settings`` as attributes of its
    ``config``; None for empty ``settings``. Does not check names or values."""
    if not settings:
        return None
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    for name, value in settings.items():
        setattr(options.config, name, value)
    return options
