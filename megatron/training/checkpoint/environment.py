"""Software versions and hardware of a run, for logs and checkpoints."""

from __future__ import annotations

import functools
import platform
import socket

import torch

from megatron.version import __version__, git_commit


def software_versions() -> dict[str, str]:
    """Return the versions of Python and torch; a change may alter rounding, so a resumed run warns."""
    return {"python": platform.python_version(), "torch": str(torch.__version__)}


@functools.cache
def environment() -> dict[str, str | None]:
    """Return versions, git commit, host name and GPUs of this process (cached). Initializes CUDA if there is a GPU."""
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    gpus = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return {
        "version": __version__,
        "commit": git_commit(),
        "host": socket.gethostname(),
        **software_versions(),
        "cuda": torch.version.cuda,
        "gpus": gpus or None,
    }
