"""Safe reading of small untrusted files (regular files of bounded size only), and the checkpoint tracker file, which
has Megatron-LM's format."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.safe_files import parse_json, read_file

MAX_JSON = 2**30
MAX_ASSET_BYTES = 2**31
TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
MAX_TRACKER_BYTES = 4096
CHECKPOINT_FILE = re.compile(
    r"iter_|latest_|release$|non_persistent$|mp_rank_|\.metadata$|metadata\.json$|config\.json$|.*\.(safetensors|bin|pt)$"
)
"""Names in folders of checkpoints: native, of Megatron-LM, and of Hugging Face."""


def read_regular_file(path: str | os.PathLike, limit: int, *, follow: bool = False) -> bytes:
    """Return the bytes of ``path``; ``follow`` also allows a symbolic link. Raises FileNotFoundError, or
    CheckpointDamagedError if it is not a regular file, a link, over ``limit`` bytes, or unreadable."""
    try:
        return read_file(path, limit, follow=follow)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointDamagedError(f"{path}: cannot be read ({error.strerror})") from error


def read_json(path: str | os.PathLike) -> dict[str, Any]:
    """Read an untrusted JSON file with an object; follows a symbolic link. Raises FileNotFoundError, or
    CheckpointDamagedError if it is unreadable, not a regular file, over 1 GiB, not JSON, or not an object."""
    data = read_regular_file(path, MAX_JSON, follow=True)
    try:
        value = parse_json(data)
    except ValueError as error:
        raise CheckpointDamagedError(f"{path}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointDamagedError(f"{path}: not a table")
    return value


def may_hold_checkpoint(path: str | os.PathLike) -> bool:
    """Whether ``path`` is not a readable folder, or has an entry with a name as checkpoints of any format have."""
    try:
        return any(CHECKPOINT_FILE.match(name) for name in os.listdir(path))
    except OSError:
        return True


def get_checkpoint_name(checkpoints_path: str | os.PathLike, iteration: int, release: bool = False) -> str:
    """Return ``<path>/iter_0001000``, or ``<path>/release`` if ``release`` is set."""
    return os.path.join(checkpoints_path, RELEASE if release else f"iter_{iteration:07d}")


def checkpoint_directory(folder: str | os.PathLike, which: int | str) -> str:
    """Return the checkpoint directory for a result of :func:`read_tracker`."""
    return get_checkpoint_name(folder, 0 if which == RELEASE else int(which), which == RELEASE)


def read_tracker(folder: str | os.PathLike) -> int | str:
    """Return the iteration in the tracker file of ``folder``, or ``"release"``. Raises CheckpointError for other
    content or a file that is not small and regular, FileNotFoundError without tracker."""
    path = Path(folder) / TRACKER
    text = read_regular_file(path, MAX_TRACKER_BYTES, follow=True).decode("utf-8", errors="replace").strip()
    if text == RELEASE:
        return RELEASE
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise CheckpointError(f"{path} holds {text[:40]!r} instead of an iteration or 'release'")
    return int(text)
