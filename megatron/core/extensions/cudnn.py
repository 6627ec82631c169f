"""Guards for cuDNN's attention: lengths that it computes right, and one cuDNN in a process. Torch-free."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.core.config.errors import UserError
from megatron.core.extensions.installed import loaded_libraries

CUDNN_LENGTHS = 128
"""Queries and keys must be multiples of this: tiles that end beyond the keys were reported to give NaN gradients where
scores are small (NVIDIA/cudnn-frontend#160 and #1072, pytorch/pytorch#196678), and illegal accesses
(pytorch/pytorch#171627)."""


def cudnn_takes_lengths(num_queries: int, num_keys: int) -> bool:
    """Whether gradients of attention of such lengths can be trusted."""
    return num_queries % CUDNN_LENGTHS == 0 and num_keys % CUDNN_LENGTHS == 0


def loaded_cudnn() -> dict[Path, str]:
    """Directories from which this process has loaded cuDNN, and the name of a library from each."""
    return {path.parent: path.name for path in loaded_libraries("libcudnn")}


def require_one_cudnn() -> None:
    """Raises ValueError where this process has loaded parts of several, which call each other."""
    if len(homes := sorted(map(str, loaded_cudnn()))) > 1:
        raise UserError(
            f"this process has loaded cuDNN from {' and '.join(homes)}, whose parts call each other: wrong numbers "
            "or crashes; load only the one that torch brings: import torch first, and unset CUDNN_HOME, CUDNN_PATH, "
            "LD_PRELOAD and LD_LIBRARY_PATH where they name another"
        )


@contextmanager
def one_cudnn() -> Iterator[None]:
    """Let imports in here get the cuDNN that torch has loaded, not another one that the system may have.

    Torch loads the parts of cuDNN when it first needs them, by name. A package that is linked with all of them would
    load the system's, and torch then take those beside its own.

    Raises:
        ValueError: parts of several are loaded in the end.
    """
    before = os.environ.get("CUDNN_HOME")
    if len(loaded := loaded_cudnn()) == 1:
        ((home, name),) = loaded.items()
        major = name.split(".so.")[-1].split(".")[0]
        for part in sorted(home.glob(f"libcudnn*.so.{major}")):
            ctypes.CDLL(str(part))  # who asks for this name from now on gets this file
        os.environ["CUDNN_HOME"] = str(home)
    try:
        yield
    finally:
        if before is not None:
            os.environ["CUDNN_HOME"] = before
        else:
            os.environ.pop("CUDNN_HOME", None)
    require_one_cudnn()
