"""The processes of the other ranks on this host: whether they live, and how the last one of them is ended.

A process file descriptor becomes readable the moment its process ends, also while nobody has collected it, and never
means another process that was given the same number later.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from megatron.training.rendezvous import Arrival

ABORT_SECONDS = 2.0
"""For a process to write its stacks; a core dump may take longer than anybody wants to wait."""


class Neighbours:
    """Every other rank that signed in from this machine."""

    def __init__(self, arrivals: Sequence[Arrival], rank: int) -> None:
        self.pids = {
            other: each.pid
            for other, each in enumerate(arrivals)
            if other != rank and each.machine == arrivals[rank].machine
        }
        self.is_first = rank < min(self.pids, default=rank + 1)
        """Whether this rank speaks for its host."""
        self._handles: dict[int, int] = {}
        for other, pid in self.pids.items():
            with contextlib.suppress(OSError, AttributeError):  # elsewhere than on Linux: `alive` asks about the number
                self._handles[other] = os.pidfd_open(pid)

    def __contains__(self, rank: object) -> bool:
        return rank in self.pids

    @property
    def descriptors(self) -> list[int]:
        """Readable as soon as a process has ended."""
        return list(self._handles.values())

    def alive(self, rank: int) -> bool:
        """Whether the rank's process runs."""
        if rank not in self._handles:
            return alive(self.pids[rank])
        poll = select.poll()
        poll.register(self._handles[rank], select.POLLIN)
        return not poll.poll(0)

    def dead(self) -> list[int]:
        """The ranks whose processes have ended."""
        return [rank for rank in self.pids if not self.alive(rank)]

    def end(self, rank: int, patience: float) -> None:
        """Ends a rank's process: it may go on if it is stopped and leave by itself within ``patience`` seconds; then
        SIGABRT has C code write its stacks, which needs no interpreter, and SIGKILL leaves nothing."""
        self._send(rank, signal.SIGCONT)
        for number in (signal.SIGABRT, signal.SIGKILL):
            limit = time.monotonic() + patience
            while self.alive(rank) and time.monotonic() < limit:
                time.sleep(0.05)
            if self.alive(rank):
                self._send(rank, number)
            patience = ABORT_SECONDS

    def _send(self, rank: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pids[rank], number)

    def close(self) -> None:
        """Gives the descriptors back."""
        for descriptor in self._handles.values():
            os.close(descriptor)
        self._handles.clear()


def alive(pid: int) -> bool:
    """Whether a process of this host runs; one that has ended and waits for its parent does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with contextlib.suppress(OSError, IndexError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in ("Z", "X")
    return True
