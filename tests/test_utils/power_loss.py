"""Simulate a loss of power at every moment of a program that writes files.

Only synced data is sure to survive: the bytes of a file after an ``fsync`` of the file, the names in a folder after an
``fsync`` of the folder. Everything else may or may not survive: each creation, deletion and rename that was not synced,
in any combination, and the unsynced bytes of all files together. A rename is atomic, as on file systems with a journal.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

MAX_SUBSETS_OF = 5
"""Largest number of pending changes to try in every combination; of more: none, all, each single one, all minus one."""

Names = dict[int, dict[str, int]]
"""Folder -> name -> file or folder, by inode."""


class PowerLoss:
    """Call ``check(folder, promise)`` on every state in which a loss of power may leave ``root``.

    ``folder`` is a copy of that state; ``promise`` is what the program had been promised by then (see :attr:`promise`).
    What is below ``root`` at the beginning is durable. ``check`` raises if the state is a wrong one.
    """

    def __init__(self, root: Path, scratch: Path, check: Callable[[Path, object], None]) -> None:
        self.root, self.scratch, self.check = root, scratch, check
        self.promise: object = None
        """Set by the test when a call has returned: what outlives a loss of power from now on."""
        self.num_states = 0
        self._seen: set[object] = set()
        self._held: dict[int, int] = {}
        """Open descriptors by inode: the number of a deleted file is not given to another."""
        self._folders: set[int] = set()
        self._lock = threading.RLock()
        self._inside = False
        self._root = self._hold(str(root))
        self._synced_names, self._synced_bytes = self._look()

    # ---- what is there now

    def _hold(self, path: str) -> int:
        descriptor = os.open(path, os.O_RDONLY)
        inode = os.fstat(descriptor).st_ino
        if self._held.setdefault(inode, descriptor) != descriptor:
            os.close(descriptor)
        return inode

    def _look(self) -> tuple[Names, dict[int, bytes]]:
        names: Names = {}
        data: dict[int, bytes] = {}
        todo = [(self._root, str(self.root))]
        while todo:
            folder, path = todo.pop()
            names[folder] = {}
            self._folders.add(folder)
            for entry in os.scandir(path):
                if entry.name != ".lock":  # says who writes, and is taken again at every start
                    inode = names[folder][entry.name] = self._hold(entry.path)
                    if entry.is_dir():
                        todo.append((inode, entry.path))
                    else:
                        data[inode] = Path(entry.path).read_bytes()
        return names, data

    # ---- what may be left of it

    def _observe(self) -> None:
        """Check every state that a loss of power may leave at this moment."""
        names, data = self._look()
        before, after = _places(self._synced_names), _places(names)
        occupied = {place for places in after.values() for place in places}
        pending = [
            inode for inode in before.keys() | after.keys()
            if before.get(inode) != after.get(inode)
            # the name of a file that another one replaces changes hands in one step, the other's
            and not (inode not in after and before[inode] <= occupied)
        ]  # fmt: skip
        for chosen in _choices(sorted(pending)):
            state = _apply(self._synced_names, chosen, before, after)
            for contents in (self._synced_bytes, {**self._synced_bytes, **data}) if state is not None else ():
                self._check_state(state, contents)

    def _check_state(self, names: Names, data: dict[int, bytes]) -> None:
        tree = self._tree(names, data, self._root)
        if (self.promise, tree) in self._seen:
            return
        self._seen.add((self.promise, tree))
        folder = self.scratch / f"state-{self.num_states:04d}"
        self.num_states += 1
        _build(folder, tree)
        try:
            self.check(folder, self.promise)
        except Exception as error:
            listed = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
            raise AssertionError(f"{error!r} after a loss of power that leaves {listed}") from error

    def _tree(self, names: Names, data: dict[int, bytes], inode: int) -> object:
        """A folder's state as nested tuples; unsynced files of the synced state are empty."""
        if inode in self._folders:
            return tuple((name, self._tree(names, data, item)) for name, item in sorted(names.get(inode, {}).items()))
        return data.get(inode, b"")

    # ---- recording

    def _wrapped(self, function: Callable, *, syncs: bool = False) -> Callable:
        def call(*args, **kwargs):
            with self._lock:
                if self._inside:  # of a check
                    return function(*args, **kwargs)
                self._inside = True
                try:
                    self._observe()
                    result = function(*args, **kwargs)
                    if syncs:
                        self._sync(args[0])
                    self._observe()
                    return result
                finally:
                    self._inside = False

        return call

    def _sync(self, descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if not (path == str(self.root) or path.startswith(f"{self.root}/")):
            return
        inode = self._hold(path)
        if os.path.isdir(path):
            self._synced_names[inode] = self._look()[0][inode]
        else:
            self._synced_bytes[inode] = Path(path).read_bytes()

    @contextmanager
    def recording(self):
        """Watch the program inside."""
        calls = ("rename", "replace", "unlink", "remove", "mkdir", "rmdir")
        with mock.patch.multiple(os, fsync=self._wrapped(os.fsync, syncs=True),
                                 **{name: self._wrapped(getattr(os, name)) for name in calls}):  # fmt: skip
            yield self
        self._observe()
        for descriptor in self._held.values():
            os.close(descriptor)


def _places(names: Names) -> dict[int, set[tuple[int, str]]]:
    places: dict[int, set[tuple[int, str]]] = {}
    for folder, entries in names.items():
        for name, inode in entries.items():
            places.setdefault(inode, set()).add((folder, name))
    return places


def _choices(pending: list[int]):
    if len(pending) <= MAX_SUBSETS_OF:
        sizes = range(len(pending) + 1)
    else:
        sizes = (0, 1, len(pending) - 1, len(pending))
    return itertools.chain.from_iterable(itertools.combinations(pending, size) for size in sizes)


def _apply(synced: Names, chosen: tuple[int, ...], before: dict, after: dict) -> Names | None:
    """The synced names with the changes of the ``chosen`` files; None where one would need another, not chosen."""
    names = {folder: dict(entries) for folder, entries in synced.items()}
    for inode in chosen:
        for folder, name in before.get(inode, ()):
            if names[folder].get(name) == inode:
                del names[folder][name]
    for inode in chosen:
        for folder, name in after.get(inode, ()):
            other = names.setdefault(folder, {}).get(name)
            if other is not None and other in after:  # it was moved out of the way first
                return None
            names[folder][name] = inode
    return names


def _build(folder: Path, tree: object) -> None:
    folder.mkdir()
    for name, content in tree:
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            _build(folder / name, content)
