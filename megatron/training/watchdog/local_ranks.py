"""The processes of the other ranks on this host: whether they live, and how the last one of them is ended.

Which processes these are is asked of the kernel. What stands in the store may have been written by anybody who reaches
its port, and a process number from there could be any process of this user.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.training.start.rendezvous import Arrival, Place

ABORT_SECONDS = 2.0
"""For a process to write its stacks; a core dump may take longer than anybody wants to wait."""
CREDENTIALS = struct.Struct("3i")
"""Process, user and group of a socket's other end."""


@dataclass(frozen=True)
class Process:
    """One process, never another that was given the same number later."""

    pid: int
    started: str
    """When, in the kernel's words."""
    handle: int | None
    """Its file descriptor: readable the moment the process ends, also while nobody has collected it."""

    @classmethod
    def open(cls, pid: int) -> Process:
        """``OSError`` if there is none."""
        started, handle = _stat(pid)[1], None
        with contextlib.suppress(OSError, AttributeError):  # an old kernel: number and start tell which process it is
            handle = os.pidfd_open(pid)
        return cls(pid, started, handle)

    @property
    def alive(self) -> bool:
        """Whether it runs; one that has ended and waits for its parent does not."""
        if self.handle is not None:
            poll = select.poll()
            poll.register(self.handle, select.POLLIN)
            return not poll.poll(0)
        try:
            state, started = _stat(self.pid)
        except OSError:
            return False
        return started == self.started and state not in ("Z", "X")

    def send(self, number: signal.Signals) -> None:
        """Sends a signal, if the process still runs."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.handle is not None:
                signal.pidfd_send_signal(self.handle, number)
            elif self.alive:
                os.kill(self.pid, number)

    def close(self) -> None:
        """Gives the descriptor back."""
        if self.handle is not None:
            os.close(self.handle)


def _stat(pid: int) -> tuple[str, str]:
    """State and start time."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


class Presence:
    """Proof of which process this rank is, for the others of its host: the kernel tells a process that connects to this
    socket the process and the user that listen. Its name is made of what the launcher has said, not of what is in the
    store; it is in no folder and ends with the process."""

    def __init__(self, place: Place) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(OSError):  # elsewhere than on Linux, ranks watch each other by heartbeats alone
            self._socket.bind(_presence_name(place, place.rank))
            self._socket.listen(4096)

    def close(self) -> None:
        """The other ranks cannot find this one any more."""
        self._socket.close()


def _presence_name(place: Place, rank: int) -> str:
    job = hashlib.sha256(f"{place.host} {place.port} {place.attempt}".encode()).hexdigest()[:16]
    return f"\0megatron-{os.getuid()}-{job}-{rank}"


def find_process(place: Place, rank: int) -> Process | None:
    """The process of a rank on this host; None if no process of this user is that rank of this job."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, contextlib.suppress(OSError, AttributeError):
        connection.settimeout(5.0)
        connection.connect(_presence_name(place, rank))
        known = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        pid, user, _ = CREDENTIALS.unpack(known)
        return Process.open(pid) if user == os.getuid() else None
    return None


def find_local_ranks(arrivals: Sequence[Arrival], place: Place) -> LocalRanks:
    """Every other rank that says that it is on this machine, and is."""
    here = arrivals[place.rank].machine
    candidates = [rank for rank, each in enumerate(arrivals) if rank != place.rank and each.machine == here]
    found = {rank: process for rank in candidates if (process := find_process(place, rank)) is not None}
    return LocalRanks(found, place.rank)


class LocalRanks:
    """The other ranks of this host."""

    def __init__(self, processes: Mapping[int, Process], rank: int) -> None:
        self.processes = dict(processes)
        self.is_first = rank < min(self.processes, default=rank + 1)
        """Whether this rank speaks for its host."""

    def __contains__(self, rank: object) -> bool:
        return rank in self.processes

    @property
    def descriptors(self) -> list[int]:
        """Readable as soon as a process has ended."""
        return [each.handle for each in self.processes.values() if each.handle is not None]

    def dead(self) -> list[int]:
        """The ranks whose processes have ended."""
        return [rank for rank, process in self.processes.items() if not process.alive]

    def end(self, rank: int, patience: float) -> None:
        """Ends a rank's process: it may go on if it is stopped and leave by itself within ``patience`` seconds; then
        SIGABRT has C code write its stacks, which needs no interpreter, and SIGKILL leaves nothing."""
        process = self.processes[rank]
        process.send(signal.SIGCONT)
        for number in (signal.SIGABRT, signal.SIGKILL):
            limit = time.monotonic() + patience
            while process.alive and time.monotonic() < limit:
                time.sleep(0.05)
            if process.alive:
                process.send(number)
            patience = ABORT_SECONDS

    def close(self) -> None:
        """Gives the descriptors back."""
        for process in self.processes.values():
            process.close()
        self.processes.clear()
