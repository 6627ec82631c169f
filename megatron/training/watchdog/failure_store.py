"""Health of all ranks of a run, exchanged through the run's store.

Every call may block as long as the store's host does not answer, and raises RuntimeError or OSError if the store is
lost."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from megatron.training.watchdog.progress import Heartbeat


@dataclass(frozen=True)
class Failure:
    """The first failure of the run."""

    rank: int | None
    """Rank that failed; None: the store itself was lost."""
    reason: str
    detail: str = ""
    """Traceback or stack of the failing rank, if it could still send one."""
    for_user: bool = False
    """Whether it is a ``UserError``: the reason is sufficient and no stack is printed."""
    together: bool = False
    """Whether every rank raised it; ``rank`` is then only the reporting rank."""

    def __str__(self) -> str:
        if self.together:
            return f"all ranks failed together: {self.reason}"
        who = "the run's store" if self.rank is None else f"rank {self.rank}"
        return f"{who} failed first: {self.reason}"


@dataclass(frozen=True)
class Report:
    """Error that a rank's main thread raised."""

    what: str
    """Message without rank and phase, so that equal errors of several ranks compare equal."""
    failure: Failure
    elsewhere: bool
    """Whether the cause is on another rank."""


@dataclass(frozen=True)
class Answer:
    """Answer of a rank to an inquiry: the state of its main thread."""

    waits: bool
    """Whether the main thread is in a collective or waits for the GPU; another rank is then the cause."""
    stack: str


class FailureStore:
    """Access of one rank to the shared failure state in the store."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._store, self.rank, self.ranks = store, rank, range(world_size)

    def _read(self, key: str) -> dict[str, Any] | None:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    # ---- heartbeats

    def publish(self, heartbeat: Heartbeat) -> None:
        self._store.set(f"heartbeat/{self.rank}", json.dumps(asdict(heartbeat)))

    def heartbeat(self, rank: int) -> Heartbeat | None:
        """Return the last heartbeat of ``rank``; None before the first one."""
        stored = self._read(f"heartbeat/{rank}")
        return None if stored is None else Heartbeat(**stored)

    def heartbeats(self) -> dict[int, Heartbeat]:
        """Return the last heartbeat of every rank that has sent one, by rank."""
        return {rank: heartbeat for rank in self.ranks if (heartbeat := self.heartbeat(rank)) is not None}

    def finish(self) -> None:
        """Record that this rank completed its work and may exit at any time."""
        self._store.set(f"done/{self.rank}", "1")

    def finished(self, rank: int) -> bool:
        return self._store.check([f"done/{rank}"])

    # ---- the first failure

    def report(self, report: Report) -> None:
        self._store.set(f"raised/{self.rank}", json.dumps(asdict(report)))

    def all_reported(self) -> bool:
        return self._store.check([f"raised/{rank}" for rank in self.ranks])

    def reports(self) -> dict[int, Report]:
        """Return the main-thread errors that ranks have reported so far, by rank; ranks without a report are absent.
        One request per rank. Does not wait for missing reports."""
        stored = {rank: self._read(f"raised/{rank}") for rank in self.ranks}
        return {
            rank: Report(report["what"], Failure(**report["failure"]), report["elsewhere"])
            for rank, report in stored.items()
            if report is not None
        }

    def declare(self, failure: Failure) -> None:
        """Store ``failure`` unless one is already stored (atomic compare-and-set)."""
        # an expected value of "" matches only a missing key: later failures do not replace the first
        self._store.compare_set("failure", "", json.dumps(asdict(failure)))

    def failure(self) -> Failure | None:
        """Return the run's first failure, or None."""
        stored = self._read("failure")
        return None if stored is None else Failure(**stored)

    def acknowledge(self) -> None:
        """Record that this rank has read the failure."""
        self._store.set(f"told/{self.rank}", "1")

    def others_know(self) -> bool:
        """Whether every other rank has read the failure."""
        return self._store.check([f"told/{rank}" for rank in self.ranks if rank != self.rank])

    # ---- stack inquiries

    def inquire(self) -> None:
        """Ask every rank for the stack of its main thread."""
        self._store.set("inquiry", "1")

    def inquired(self) -> bool:
        """Whether an inquiry is open that this rank has not answered."""
        return self._store.check(["inquiry"]) and not self._store.check([f"answer/{self.rank}"])

    def answer(self, answer: Answer) -> None:
        self._store.set(f"answer/{self.rank}", json.dumps(asdict(answer)))

    def all_answered(self) -> bool:
        return self._store.check([f"answer/{rank}" for rank in self.ranks])

    def answers(self) -> dict[int, Answer]:
        """Return the answers received so far, by rank."""
        stored = {rank: self._read(f"answer/{rank}") for rank in self.ranks}
        return {rank: Answer(**answer) for rank, answer in stored.items() if answer is not None}
