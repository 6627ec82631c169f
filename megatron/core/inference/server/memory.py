"""Memory of the C library that is returned to the system after large answers. Torch-free; no effect without glibc."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

M_ARENA_MAX = -8
"""Parameter of glibc's ``mallopt``."""


def limit_arenas() -> None:
    """Let all threads allocate from one arena. Call it before there are threads.

    ``malloc_trim`` returns the free end of the main arena only: each thread that wrote a part of an answer of 36 MB
    kept up to 65 MB in its own arena."""
    if (set_option := _function("mallopt")) is not None:
        set_option(M_ARENA_MAX, 1)


def release_memory() -> None:
    """Return unused memory to the system."""
    if (trim := _function("malloc_trim")) is not None:
        trim(0)


@cache
def _function(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None)
