"""Reads small files that anybody may have put there: only regular ones, only up to a size. Among them the tracker of a
folder of checkpoints, which is that of Megatron-LM too."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError

MAX_JSON = 2**30
TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
MAX_TRACKER_BYTES = 4096


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


def get_checkpoint_name(checkpoints_path: str | os.PathLike, iteration: int, release: bool = False) -> str:
    """``<path>/iter_0001000``, or ``<path>/release``."""
    return os.path.join(checkpoints_path, RELEASE if release else f"iter_{iteration:07d}")


def directory_of(folder: str | os.PathLike, which: int | str) -> str:
    """The path of the checkpoint that :func:`read_tracker` found named."""
    return get_checkpoint_name(folder, 0 if which == RELEASE else int(which), which == RELEASE)


def read_tracker(folder: str | os.PathLike) -> int | str:
    """The iteration that the tracker names, or ``"release"``.

    Raises:
        CheckpointError: it is empty, not a number, negative, or no small regular file.
        FileNotFoundError: there is none.
    """
    path = Path(folder) / TRACKER
    text = read_regular_file(path, MAX_TRACKER_BYTES, follow=True).decode("utf-8", errors="replace").strip()
    if text == RELEASE:
        return RELEASE
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise CheckpointError(f"{path} holds {text[:40]!r} instead of an iteration or 'release'")
    return int(text)
