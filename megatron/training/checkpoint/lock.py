"""Lock of a --save folder: only one job writes to it."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.writer import make_durable_folder

logger = logging.getLogger(__name__)

LOCK = ".lock"
RECORD_BYTES = 200
"""Fixed length of a record, so that a new record overwrites a longer old one without truncating the file."""
RECORD_START = b'{"host"'


class SaveLock:
    """Exclusive lock that keeps a second job from writing to the same --save folder. Raises ``CheckpointError`` if
    another job holds it or the folder is not writable. A POSIX record lock on ``<folder>/.lock``: the kernel releases
    it when the process ends, however it ends, so a dead job leaves no stale lock. The file's text names the holder.
    Release removes folders that the lock created if they are still empty."""

    def __init__(self, folder: str | os.PathLike, flag: str = "--save") -> None:
        self.flag = flag
        self.path = Path(folder) / LOCK
        self._created = [path for path in (Path(folder), *Path(folder).parents) if not os.path.lexists(path)]
        self._is_locked = False
        self._open(folder)
        assert self._descriptor is not None
        while not os.fstat(self._descriptor).st_nlink:  # removed by a job that ended in the meantime
            os.close(self._descriptor)
            self._open(folder)

    def _open(self, folder: str | os.PathLike) -> None:
        """Raises CheckpointError if the file is a symbolic link, cannot be written, or :meth:`_take` fails."""
        try:
            make_durable_folder(Path(folder))
            # O_NOFOLLOW: a planted link would make this job write into the file that it points to
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            self._descriptor: int | None = os.open(self.path, flags, 0o644)
        except OSError as error:
            if self.path.is_symlink():
                raise CheckpointError(f"{self.path}: is a symbolic link; remove it, or choose another --save") from None
            reason = f"cannot be written ({error.strerror}); choose another"
            raise CheckpointError(f"{self.flag} {folder}: {reason}") from None
        try:
            self._take(self._descriptor, folder)
        except BaseException:
            self.release()
            raise

    def _take(self, descriptor: int, folder: str | os.PathLike) -> None:
        """Take the lock without waiting, and write host and process ID. Raises CheckpointError if the file is no lock
        file or another job holds it. Continues without lock on file systems without locks, with a warning."""
        status = os.fstat(descriptor)
        text = os.pread(descriptor, RECORD_BYTES, 0) if stat.S_ISREG(status.st_mode) else b""
        # a hard link to a foreign file passes O_NOFOLLOW: never write into a file that is not a training lock
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1 or (text and not text.startswith(RECORD_START)):
            raise CheckpointError(f"{self.path}: is not a lock file of training; remove it, or choose another --save")
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._is_locked = True
        except (BlockingIOError, PermissionError):
            holder = text.decode("utf-8", errors="replace").strip()
            raise CheckpointError(
                f"{self.flag} {folder}: another job writes there ({holder}); wait for it, stop it, or choose another"
                " folder"
            ) from None
        except OSError as error:  # the file system has no locks: train without protection
            logger.warning("--save %s: cannot be locked (%s): let no other job use it", folder, error.strerror)
        record = json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode()
        with suppress(OSError):  # on a full disk the lock works, without its holder's name
            os.pwrite(descriptor, record[: RECORD_BYTES - 1].ljust(RECORD_BYTES - 1) + b"\n", 0)

    def release(self) -> None:
        """Release the lock; remove its file and the folders that it created, if empty. Repeatable."""
        if self._descriptor is not None:
            with suppress(OSError):
                if self._is_locked and os.listdir(self.path.parent) == [LOCK]:
                    self.path.unlink()
                    for folder in self._created:
                        folder.rmdir()
            os.close(self._descriptor)
            self._descriptor = None
