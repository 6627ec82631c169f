"""Guards for cuDNN attention: lengths with correct gradients, and a single cuDNN per process. Torch-free."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.core.config.errors import UserError
from megatron.core.extensions.installed import loaded_libraries

CUDNN_LENGTHS = 128
"""Required divisor of the numbers of queries and keys: tiles that end beyond the keys were reported to return NaN
gradients for small scores (NVIDIA/cudnn-frontend#160 and #1072, pytorch/pytorch#196678) and illegal accesses
(pytorch/pytorch#171627)."""


def cudnn_supports_lengths(num_queries: int, num_keys: int) -> bool:
    """Return whether cuDNN's attention gradients are reliable for these lengths."""
    return num_queries % CUDNN_LENGTHS == 0 and num_keys % CUDNN_LENGTHS == 0


def loaded_cudnn() -> dict[Path, str]:
    """Return the directories from which this process has loaded cuDNN, with the name of one library of each."""
    return {path.parent: path.name for path in loaded_libraries("libcudnn")}


def require_one_cudnn() -> None:
    """Raise UserError if this process has loaded libraries of several cuDNN installations (folders), which call each
    other. None or one passes; on systems without /proc always."""
    if len(homes := sorted(map(str, loaded_cudnn()))) > 1:
        raise UserError(
            f"this process has loaded cuDNN from {' and '.join(homes)}, whose parts call each other: wrong numbers "
            "or crashes; load only the one that torch brings: import torch first, and unset CUDNN_HOME, CUDNN_PATH, "
            "LD_PRELOAD and LD_LIBRARY_PATH where they name another"
        )


@contextmanager
def one_cudnn() -> Iterator[None]:
    """If exactly one cuDNN is loaded on entry (torch loads it on first use; else nothing is done), load all its
    libraries and set CUDNN_HOME to its folder until exit, so that packages imported in this context use it, not a
    system-wide one. After the body raises UserError if libraries of several installations are loaded."""
    before = os.environ.get("CUDNN_HOME")
    if len(loaded := loaded_cudnn()) == 1:
        ((home, name),) = loaded.items()
        major = name.split(".so.")[-1].split(".")[0]
        for part in sorted(home.glob(f"libcudnn*.so.{major}")):
            ctypes.CDLL(str(part))  # later loads of this library name resolve to this file
        os.environ["CUDNN_HOME"] = str(home)
    try:
        yield
    finally:
        if before is not None:
            os.environ["CUDNN_HOME"] = before
        else:
            os.environ.pop("CUDNN_HOME", None)
    require_one_cudnn()
