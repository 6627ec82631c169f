"""The files of a checkpoint folder: ``iter_0001000/``, the tracker ``latest_checkpointed_iteration.txt``, the lock.

The tracker moves last and in one rename, and a reader never depends on it: whatever it says, the newest complete
checkpoint is found. All of this is for one process, the first rank.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.manifest import read_manifest
from megatron.core.dist_checkpointing.writer import TEMPORARY, Fault, no_fault, recover, write_file_atomically

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
LOCK = ".lock"
RELEASE = "release"


def get_checkpoint_name(checkpoints_path: str | os.PathLike, iteration: int, release: bool = False) -> str:
    """``<path>/iter_0001000``, or ``<path>/release``."""
    return os.path.join(checkpoints_path, RELEASE if release else f"iter_{iteration:07d}")


def get_checkpoint_tracker_filename(checkpoints_path: str | os.PathLike) -> str:
    """``<path>/latest_checkpointed_iteration.txt``."""
    return os.path.join(checkpoints_path, TRACKER)


def saved_iterations(folder: str | os.PathLike) -> list[int]:
    """Iterations for which a directory exists, newest first; complete or not."""
    names = [path.name for path in Path(folder).glob("iter_*")]
    return sorted({int(match[1]) for name in names if (match := re.fullmatch(r"iter_(\d{7,})", name))}, reverse=True)


def read_tracker(folder: str | os.PathLike) -> int | str:
    """The iteration that the tracker names, or ``"release"``.

    Raises:
        CheckpointError: it is empty, not a number, or negative.
        FileNotFoundError: there is none.
    """
    path = Path(folder) / TRACKER
    text = path.read_bytes()[:100].decode("utf-8", errors="replace").strip()
    if text == RELEASE:
        return RELEASE
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise CheckpointError(f"{path} holds {text!r} instead of an iteration or 'release'")
    return int(text)


def write_tracker(folder: str | os.PathLike, iteration: int, fault: Fault = no_fault) -> None:
    """Atomically."""
    write_file_atomically(Path(folder) / TRACKER, str(iteration).encode(), fault)


@dataclass(frozen=True)
class Found:
    """A complete checkpoint."""

    directory: str
    iteration: int
    """0 for a release."""
    release: bool = False


def find_checkpoint(
    folder: str | os.PathLike | None, step: int | None = None, *, repair: bool = False
) -> Found | None:
    """What --load (and --ckpt-step) means; None if ``folder`` holds no checkpoint at all.

    A tracker that is missing, unreadable or points to something incomplete is reported, and the newest complete
    checkpoint is taken instead. ``repair`` (for one process alone) brings back a checkpoint whose replacement died.

    Raises:
        CheckpointError: ``step`` was asked for and is not complete, or nothing in ``folder`` is.
    """
    if folder is None or not Path(folder).is_dir():
        if step is not None:
            raise CheckpointError(f"--ckpt-step {step}: there is no folder {folder}")
        return None
    if repair and os.access(folder, os.W_OK):
        recover(folder)
    if step is not None:
        directory = get_checkpoint_name(folder, step)
        read_manifest(directory)
        return Found(directory, step)
    try:
        latest = read_tracker(folder)
        directory = get_checkpoint_name(folder, 0 if latest == RELEASE else int(latest), latest == RELEASE)
        read_manifest(directory)
        return Found(directory, 0 if latest == RELEASE else int(latest), latest == RELEASE)
    except FileNotFoundError:
        problem = f"{Path(folder) / TRACKER} is missing"
    except CheckpointError as error:
        problem = str(error)
    return _newest_complete(folder, problem)


def _newest_complete(folder: str | os.PathLike, problem: str) -> Found | None:
    candidates = saved_iterations(folder)
    for iteration in candidates:
        directory = get_checkpoint_name(folder, iteration)
        try:
            read_manifest(directory)
        except CheckpointError as error:
            logger.warning("%s", error)
            continue
        logger.warning("%s; falling back to the newest complete checkpoint, %s", problem, directory)
        return Found(directory, iteration)
    if not candidates and not (Path(folder) / TRACKER).exists():
        return None
    raise CheckpointError(f"{problem}, and {folder} holds no complete checkpoint: restore one or choose another --load")


def delete_checkpoint(folder: str | os.PathLike, iteration: int, fault: Fault = no_fault) -> None:
    """In two steps, so that a half-deleted directory never looks like a checkpoint."""
    directory = Path(get_checkpoint_name(folder, iteration))
    condemned = directory.with_name(f".{directory.name}{TEMPORARY}deleted")
    shutil.rmtree(condemned, ignore_errors=True)
    os.rename(directory, condemned)
    fault("mid_delete")
    shutil.rmtree(condemned, ignore_errors=True)


class SaveLock:
    """Keeps a second job from writing to the same --save.

    A POSIX record lock on ``<folder>/.lock``: the system drops it when its process ends, however it ends, so that a
    dead job's lock never needs cleaning. The file's text says who holds it.
    """

    def __init__(self, folder: str | os.PathLike) -> None:
        self.path = Path(folder) / LOCK
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._descriptor: int | None = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise CheckpointError(f"--save {folder}: cannot be written ({error.strerror}); choose another") from None
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            holder = os.read(self._descriptor, 200).decode("utf-8", errors="replace").strip()
            os.close(self._descriptor)
            self._descriptor = None
            raise CheckpointError(
                f"--save {folder}: another job writes there ({holder}); wait for it, stop it, or choose another folder"
            ) from None
        except OSError as error:  # a file system without locks: better no protection than no training
            logger.warning("--save %s: cannot be locked (%s): let no other job use it", folder, error.strerror)
        os.ftruncate(self._descriptor, 0)
        with suppress(OSError):  # a full disk keeps the lock and loses the name of its holder
            os.write(self._descriptor, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode())

    def release(self) -> None:
        """Lets the next job in."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
