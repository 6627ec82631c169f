"""Installed flash-attn versions and install commands. Torch-free; imports none of the packages.

Tri Dao, "FlashAttention-2", 2023; Shah et al., "FlashAttention-3", 2024. Called by ``core/attention/kernels/``."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from megatron.core.extensions.installed import is_installed

MODULES = {2: "flash_attn", 3: "flash_attn_interface", 4: "flash_attn.cute.interface"}
INSTALL = {
    2: "pip install flash-attn --no-build-isolation",
    3: "build hopper/ of github.com/Dao-AILab/flash-attention: python setup.py install",
    4: "pip install 'flash-attn-4[cu13]'",
}


def installed_versions() -> tuple[int, ...]:
    """Return the installed versions (of 2, 3, 4) without importing them."""
    return tuple(number for number in MODULES if (_has_version_4() if number == 4 else is_installed(MODULES[number])))


def _has_version_4() -> bool:
    """Return whether the package flash-attn-4 is installed. Looks up its distribution name: other versions may contain
    a folder with its module's name but without its dependencies."""
    try:
        version("flash-attn-4")
    except PackageNotFoundError:
        return False
    return True
