"""Reads small files that anybody may have put there: only regular ones, only up to a size."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError

MAX_JSON = 2**30


def read_regular_file(path: str | os.PathLike, limit: int, *, follow: bool = False) -> bytes:
    """The bytes of ``path``, at most ``limit``. ``follow``: a symbolic link to a regular file will do.

    Raises:
        FileNotFoundError: there is none.
        CheckpointDamagedError: a pipe, device, directory or (unless ``follow``) link; too large; unreadable.
    """
    path = Path(path)
    # without O_NONBLOCK, opening a pipe that nobody writes to never returns
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        if not stat.S_ISREG((path.stat() if follow else path.lstat()).st_mode):
            raise CheckpointDamagedError(f"{path}: not a regular file")
        with open(os.open(path, flags), "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):  # replaced since
                raise CheckpointDamagedError(f"{path}: not a regular file")
            # the size is checked first: a sparse file of a terabyte costs nobody anything but its reader's memory
            if status.st_size > limit:
                raise CheckpointDamagedError(f"{path}: has {status.st_size} bytes, at most {limit} are expected")
            return b"".join(iter(lambda: file.read(1 << 20), b""))[:limit]
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointDamagedError(f"{path}: cannot be read ({error.strerror})") from error


def read_json(path: str | os.PathLike) -> dict[str, Any]:
    """The table in a JSON file of anybody's.

    Raises:
        FileNotFoundError: there is none.
        CheckpointDamagedError: it holds anything else, or is no regular file.
    """
    data = read_regular_file(path, MAX_JSON, follow=True)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointDamagedError(f"{path}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointDamagedError(f"{path}: not a table")
    return value
