"""Processes of the other ranks on this host: liveness checks and termination.

The kernel identifies these processes. The store could be written by anyone who reaches its port, so that a process ID
read from it could be any process of this user."""

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

from megatron.training.start.rendezvous import Arrival, LaunchInfo

ABORT_SECONDS = 2.0
"""Seconds for a process to write its stacks after SIGABRT; a core dump would take too long to wait for."""
CREDENTIALS = struct.Struct("3i")
"""Layout of ``SO_PEERCRED``: process, user and group ID of a socket's peer."""


@dataclass(frozen=True)
class Process:
    """Handle of one process, safe against reuse of its process ID."""

    pid: int
    started: str
    """Start time as reported by the kernel (clock ticks since boot)."""
    handle: int | None
    """pidfd, readable as soon as the process ends, even as a zombie; None on kernels without pidfd."""

    @classmethod
    def open(cls, pid: int) -> Process:
        """Return a handle of the running process ``pid``. Raises ``OSError`` if it does not exist."""
        started, handle = _stat(pid)[1], None
        with contextlib.suppress(OSError, AttributeError):  # no pidfd: ID and start time identify it
            handle = os.pidfd_open(pid)
        return cls(pid, started, handle)

    @property
    def alive(self) -> bool:
        """Whether the process is running; False for zombies. Uses the pidfd; without one, the state and start time in
        /proc, so that another process with the same ID counts as not running. Never raises OSError."""
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
        """Send a signal if the process is still running; ignore missing permission."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.handle is not None:
                signal.pidfd_send_signal(self.handle, number)
            elif self.alive:
                os.kill(self.pid, number)

    def close(self) -> None:
        if self.handle is not None:
            os.close(self.handle)


def _stat(pid: int) -> tuple[str, str]:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


class Presence:
    """Listening Unix socket that proves to other ranks on this host which process this rank is. The kernel reports the
    process and user ID of the listener to each process that connects. The socket is abstract (in no folder) and ends
    with the process. Its name derives from launcher settings, not from the store."""

    def __init__(self, place: LaunchInfo) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(OSError):  # outside Linux, ranks are watched by heartbeats only
            self._socket.bind(_presence_name(place, place.rank))
            self._socket.listen(4096)

    def close(self) -> None:
        self._socket.close()


def _presence_name(place: LaunchInfo, rank: int) -> str:
    job = hashlib.sha256(f"{place.host} {place.port} {place.attempt}".encode()).hexdigest()[:16]
    return f"\0megatron-{os.getuid()}-{job}-{rank}"


def find_process(place: LaunchInfo, rank: int) -> Process | None:
    """Connect to the socket of ``rank`` (waits up to 5 s) and return the process that the kernel reports as its owner.
    Returns None, never an error, if no process of this user holds that rank of this job on this host."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, contextlib.suppress(OSError, AttributeError):
        connection.settimeout(5.0)
        connection.connect(_presence_name(place, rank))
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        pid, user, _ = CREDENTIALS.unpack(credentials)
        return Process.open(pid) if user == os.getuid() else None
    return None


def find_local_ranks(arrivals: Sequence[Arrival], place: LaunchInfo) -> LocalRanks:
    """Return the other ranks that claim to run on this machine and whose process is verified by the kernel."""
    machine = arrivals[place.rank].machine
    candidates = [rank for rank, arrival in enumerate(arrivals) if rank != place.rank and arrival.machine == machine]
    processes = {rank: process for rank in candidates if (process := find_process(place, rank)) is not None}
    return LocalRanks(processes, place.rank)


class LocalRanks:
    """The verified processes of the other ranks on this host, by rank."""

    def __init__(self, processes: Mapping[int, Process], rank: int) -> None:
        self.processes = dict(processes)
        self.is_first = rank < min(self.processes, default=rank + 1)
        """Whether this rank is the lowest on its host, which reports common failures once per host."""

    def __contains__(self, rank: object) -> bool:
        return rank in self.processes

    @property
    def descriptors(self) -> list[int]:
        """File descriptors that become readable as soon as a process ends."""
        return [process.handle for process in self.processes.values() if process.handle is not None]

    def dead(self) -> list[int]:
        return [rank for rank, process in self.processes.items() if not process.alive]

    def end(self, rank: int, patience: float) -> None:
        """End the process of ``rank``; blocks until it ended or SIGKILL was sent. First resume it with SIGCONT, so that
        it can exit within ``patience`` seconds. Then send SIGABRT, on which C code writes its stacks without the
        interpreter, and after ``ABORT_SECONDS`` SIGKILL."""
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
        for process in self.processes.values():
            process.close()
        self.processes.clear()
