"""The health of all ranks of a run, as they tell it each other through the run's store.

Every call may block for as long as the store's host does not answer, and raises RuntimeError or OSError when the store
is gone.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from megatron.training.watchdog.progress import Heartbeat


@dataclass(frozen=True)
class Failure:
    """The first thing that went wrong in the run."""

    rank: int | None
    """None: no rank, but the store through which all of this goes."""
    reason: str
    detail: str = ""
    """Its traceback or stack, if it could still say."""
    for_user: bool = False
    """A ``UserError``: the reason says everything, and no stack is needed."""
    together: bool = False
    """Every rank raised it: ``rank`` is only the one that speaks first."""

    def __str__(self) -> str:
        if self.together:
            return f"all ranks failed together: {self.reason}"
        who = "the run's store" if self.rank is None else f"rank {self.rank}"
        return f"{who} failed first: {self.reason}"


@dataclass(frozen=True)
class Report:
    """An error that a rank's main thread has raised."""

    what: str
    """The message without the rank and the place: equal where ranks raise the same error."""
    failure: Failure
    elsewhere: bool
    """Another rank has the cause."""


@dataclass(frozen=True)
class Answer:
    """Where a rank's main thread is."""

    waits: bool
    """In a collective, or for the GPU: then another rank is the cause."""
    stack: str


class FailureStore:
    """The store as seen by one rank."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._store, self.rank, self.ranks = store, rank, range(world_size)

    def _read(self, key: str) -> dict[str, Any] | None:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    # ---- heartbeats

    def publish(self, heartbeat: Heartbeat) -> None:
        """This rank's heartbeat."""
        self._store.set(f"heartbeat/{self.rank}", json.dumps(asdict(heartbeat)))

    def heartbeat(self, rank: int) -> Heartbeat | None:
        """A rank's last heartbeat; None before its first one."""
        found = self._read(f"heartbeat/{rank}")
        return None if found is None else Heartbeat(**found)

    def heartbeats(self) -> dict[int, Heartbeat]:
        """The last heartbeat of every rank that has sent one."""
        return {rank: heartbeat for rank in self.ranks if (heartbeat := self.heartbeat(rank)) is not None}

    def finish(self) -> None:
        """This rank has done its work: it may leave at any time."""
        self._store.set(f"done/{self.rank}", "1")

    def finished(self, rank: int) -> bool:
        return self._store.check([f"done/{rank}"])

    # ---- the first failure

    def report(self, report: Report) -> None:
        """This rank's main thread has raised an error of its own."""
        self._store.set(f"raised/{self.rank}", json.dumps(asdict(report)))

    def all_reported(self) -> bool:
        return self._store.check([f"raised/{rank}" for rank in self.ranks])

    def reports(self) -> dict[int, Report]:
        """Reports that have come so far."""
        found = {rank: self._read(f"raised/{rank}") for rank in self.ranks}
        return {
            rank: Report(each["what"], Failure(**each["failure"]), each["elsewhere"])
            for rank, each in found.items()
            if each is not None
        }

    def declare(self, failure: Failure) -> None:
        """Writes the failure down unless there is one already."""
        self._store.compare_set("failure", "", json.dumps(asdict(failure)))

    def failure(self) -> Failure | None:
        """The first failure, if anything has failed."""
        found = self._read("failure")
        return None if found is None else Failure(**found)

    def acknowledge(self) -> None:
        """This rank has read the failure."""
        self._store.set(f"told/{self.rank}", "1")

    def others_know(self) -> bool:
        """Whether every other rank has read the failure."""
        return self._store.check([f"told/{rank}" for rank in self.ranks if rank != self.rank])

    # ---- where is everybody?

    def inquire(self) -> None:
        """Asks every rank where it is."""
        self._store.set("inquiry", "1")

    def inquired(self) -> bool:
        """Whether a rank has asked and this rank has not answered yet."""
        return self._store.check(["inquiry"]) and not self._store.check([f"answer/{self.rank}"])

    def answer(self, answer: Answer) -> None:
        """This rank's answer."""
        self._store.set(f"answer/{self.rank}", json.dumps(asdict(answer)))

    def all_answered(self) -> bool:
        return self._store.check([f"answer/{rank}" for rank in self.ranks])

    def answers(self) -> dict[int, Answer]:
        """Answers that have come so far."""
        found = {rank: self._read(f"answer/{rank}") for rank in self.ranks}
        return {rank: Answer(**each) for rank, each in found.items() if each is not None}
