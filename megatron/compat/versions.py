"""Versions of installed packages, for programs that ask before they use a feature."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import torch
from torch.torch_version import TorchVersion

from megatron.core.extensions.installed import is_installed

MEGATRON_CORE = "0.16.0"
"""The release of Megatron Core whose names and calls this library follows; programs choose their calls by it."""


def get_te_version() -> Any:
    """The version of Transformer Engine; None without it."""
    try:
        return _version(metadata.version("transformer_engine"))
    except metadata.PackageNotFoundError:
        return None


def get_torch_version() -> Any:
    """The version of torch."""
    return _version(str(torch.__version__))


def is_te_min_version(version: str, check_equality: bool = True) -> bool:
    """Whether Transformer Engine is newer than ``version``, or equal with ``check_equality``; False without it."""
    installed = get_te_version()
    return installed is not None and _reaches(str(installed), version, check_equality)


def is_fa_min_version(version: str, check_equality: bool = True) -> bool:
    """Whether flash-attn is newer than ``version``, or equal with ``check_equality``; False without it."""
    try:
        return _reaches(metadata.version("flash-attn"), version, check_equality)
    except metadata.PackageNotFoundError:
        return False


def is_torch_min_version(version: str, check_equality: bool = True) -> bool:
    """Whether torch is newer than ``version``, or equal with ``check_equality``."""
    return _reaches(str(torch.__version__), version, check_equality)


def _reaches(installed: str, version: str, check_equality: bool) -> bool:
    parsed = TorchVersion(installed)
    return parsed >= version if check_equality else parsed > version


def _version(text: str) -> Any:
    """Programs compare it with their own; torch's where ``packaging`` is missing."""
    if not is_installed("packaging"):
        return TorchVersion(text)
    from packaging.version import Version

    return Version(text)
