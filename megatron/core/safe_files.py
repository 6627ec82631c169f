"""Files in folders to which other users may write: planted links, pipes, devices, endless JSON. Torch-free.

Readers open regular files only: opening a pipe that no process writes to never returns. They follow symbolic links, of
which data folders and model hubs are full. Writers do not follow a link at the name that they write: the bytes would
end up in any file of this user. Every failure is an ``OSError`` (a ``ValueError`` for JSON) that names the path."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from contextlib import suppress
from typing import Any, BinaryIO, TypeAlias

Path: TypeAlias = str | os.PathLike
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
}
CHUNK_BYTES = 1 << 20
MAX_TEXT_BYTES = 1 << 30


def fsync_path(path: Path) -> None:
    """Fsync a file, or a directory (which makes creations and renames in it durable)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_regular(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        number = errno.EISDIR if stat.S_ISDIR(status.st_mode) else errno.EINVAL
        raise OSError(number, f"not a regular file but {kind}", os.fspath(path))


def _open_checked(path: Path, flags: int, mode: str, buffering: int) -> BinaryIO:
    """Open ``path`` with the ``os.open`` ``flags``, creating files with mode 0o666, without waiting for the other end
    of a pipe. Raises OSError, with the kind of file, unless it is a regular file; closes the descriptor then."""
    # without O_NONBLOCK, opening a pipe waits for its other end
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link that is not followed, a pipe without a reader
            _check_regular(os.lstat(path), path)
        raise
    try:
        _check_regular(os.fstat(descriptor), path)
        return open(descriptor, mode, buffering)  # type: ignore[return-value]
    except OSError:
        os.close(descriptor)
        raise


def open_regular(path: Path, *, follow: bool = True, buffering: int = -1) -> BinaryIO:
    """Open an existing regular file for reading bytes. Looks at its kind before it opens it.

    Args:
        follow: accept a symbolic link to a regular file.
        buffering: 0: unbuffered; as for ``open``.

    Raises:
        OSError: missing (FileNotFoundError), unreadable, or a pipe, device, folder or (unless ``follow``) link."""
    _check_regular(os.stat(path, follow_symlinks=follow), path)  # first: opening a device may have effects
    return _open_checked(path, os.O_RDONLY | (0 if follow else os.O_NOFOLLOW), "rb", buffering)


def read_file(path: Path, limit: int, *, follow: bool = True) -> bytes:
    """Return the bytes of a regular file. Raises OSError as :func:`open_regular`, or, before reading, if it has more
    than ``limit`` bytes; of a file that grows meanwhile only the first ``limit`` bytes are returned."""
    with open_regular(path, follow=follow, buffering=0) as file:
        # before anything is read: a sparse file of a terabyte costs its owner nothing
        if (size := os.fstat(file.fileno()).st_size) > limit:
            raise OSError(errno.EFBIG, f"has {size} bytes, at most {limit} are expected", os.fspath(path))
        return b"".join(iter(lambda: file.read(CHUNK_BYTES), b""))[:limit]


def read_text(path: Path, limit: int = MAX_TEXT_BYTES) -> str:
    """Return the text of a regular UTF-8 file. Raises OSError as :func:`read_file` (missing, not regular, too large),
    UnicodeDecodeError, a ValueError, for other bytes."""
    return read_file(path, limit).decode()


def parse_json(data: str | bytes, *, unique: bool = False) -> Any:
    """Return the value of JSON text, any type. Raises ValueError for invalid JSON, and for nesting deeper than Python's
    stack. Without ``unique`` the last of equal keys wins, as in ``json.loads``.

    Args:
        unique: reject a key that a table has twice, and NaN and infinities, which are not JSON."""
    try:
        if unique:
            return json.loads(data, object_pairs_hook=_unique_keys, parse_constant=_reject_constant)
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return the JSON object of ``pairs`` as a dictionary. Raises ValueError for the first key that occurs twice."""
    table = dict(pairs)
    if len(table) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r:.100} is there twice")
    return table


def _reject_constant(text: str) -> object:
    raise ValueError(f"{text} is not a JSON number")


def create_file(path: Path, mode: str = "xb", buffering: int = -1) -> BinaryIO:
    """Create an empty file and open it for writing; ``mode`` as for ``open``, default exclusive bytes. First deletes a
    file or link of that name, so that nothing is written through a link. Raises OSError for a folder of that name or a
    missing parent."""
    with suppress(FileNotFoundError):
        os.unlink(path)
    return open(path, mode, buffering)  # type: ignore[return-value]


def open_to_append(path: Path, buffering: int = -1) -> BinaryIO:
    """Open a regular file for appending bytes; created if missing. Raises OSError for a link, pipe, device or folder of
    that name."""
    return _open_checked(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, "ab", buffering)


def open_private(path: Path) -> BinaryIO:
    """Open a work file of this user for reading and appending bytes; created if missing. The position is at the end.
    Raises OSError: a link, pipe or device, a file with a second name (hard link), or one of another user."""
    file = _open_checked(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, "a+b", -1)
    status = os.fstat(file.fileno())
    if status.st_uid != os.geteuid() or status.st_nlink > 1:
        file.close()
        raise OSError(errno.EPERM, "a file of another user, or with a second name", os.fspath(path))
    return file


def make_folder(path: Path, *, private: bool = False) -> None:
    """Create a folder for files of this program, or accept the existing one, whose permissions are not changed.

    Args:
        private: keep other users from replacing the files in it: a new folder is writable by this user only, for any
            umask, and the folder of another user is rejected.

    Raises:
        OSError: a link, even to a folder; a file; missing parents."""
    with suppress(FileExistsError):
        os.mkdir(path, 0o755 if private else 0o777)
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "a file")
        raise OSError(errno.ENOTDIR, f"not a folder but {kind}", os.fspath(path))
    if private and status.st_uid != os.geteuid():
        raise OSError(errno.EPERM, "a folder of another user", os.fspath(path))


def why_not_creatable(path: Path) -> str | None:
    """Return why the folder ``path`` cannot be created or filled (None: it can); changes nothing."""
    folder = os.path.abspath(path)
    while True:
        try:
            is_folder = stat.S_ISDIR(os.stat(folder).st_mode)
            break
        except (FileNotFoundError, NotADirectoryError):
            folder = os.path.dirname(folder)
        except OSError as error:  # such as a name that is too long
            return error.strerror
    if not is_folder:
        return f"{folder} is no folder"
    is_kernels = os.path.realpath(folder).split(os.sep)[1] in ("proc", "sys")  # root may write, nobody may create
    can_write = os.access(folder, os.W_OK | os.X_OK) and not is_kernels
    return None if can_write else f"{folder} cannot be written"


def remove(path: Path) -> None:
    """Remove a file, a link itself, or a folder with its contents (links in it are not followed). Ignores every
    OSError, also a missing path; something may remain."""
    with suppress(OSError):
        if stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)
