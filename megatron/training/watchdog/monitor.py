"""The thread that publishes this rank's heartbeat, reads the failure store, judges the others and ends the process.

A thread cannot watch a process whose interpreter is locked or which is stopped: then the heartbeat ends, the others
declare the failure, and another rank of its host kills it. Where there is none, C code that the thread sets up in every
round ends a locked process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.training.exits.endings import tell_launcher
from megatron.training.start.rendezvous import Arrival
from megatron.training.watchdog import stacks
from megatron.training.watchdog.failure_store import Answer, Failure, FailureStore, Report
from megatron.training.watchdog.local_ranks import LocalRanks
from megatron.training.watchdog.progress import STARTING, Heartbeat, Progress

logger = logging.getLogger(__name__)

EXIT_CODE = 1
UNHEARD = Heartbeat(0, 0, 0, STARTING, silence=0.0, allowed=float("inf"))
"""The state of a rank that has not sent a heartbeat yet: it is as dead as any other if none comes."""


@dataclass(frozen=True)
class Limits:
    """Seconds, all from --watchdog-timeout-seconds: a rank without a heartbeat is gone everywhere by then."""

    heartbeat: float
    """Without a heartbeat, or without an answer of the store."""
    interval: float
    """Between rounds."""
    grace: float
    """For a rank that may be about to report the same problem itself, or to leave by itself."""

    @classmethod
    def of(cls, timeout: float) -> Limits:
        return cls(heartbeat=timeout * 2 / 3, interval=min(max(timeout / 20, 0.1), 3.0), grace=min(timeout / 20, 2.0))

    @property
    def spreading(self) -> float:
        """Until every rank has read what was declared."""
        return 2 * self.interval + self.grace


class Monitor(threading.Thread):
    """Rounds until the run ends or fails."""

    def __init__(
        self, store: FailureStore, arrivals: Sequence[Arrival], progress: Progress, limits: Limits, *,
        local_ranks: LocalRanks, agent_holds_store: bool, folder: Path | None,
    ) -> None:  # fmt: skip
        super().__init__(name="watchdog", daemon=True)
        self.store, self.rank, self.arrivals = store, store.rank, arrivals
        self.progress, self.limits = progress, limits
        self.local_ranks = local_ranks
        self.agent_holds_store = agent_holds_store
        self.stacks_path = None if folder is None else folder / f"rank-{store.rank}.txt"
        self.main_thread = threading.main_thread().ident
        self._guards_itself = len(arrivals) > 1 and not local_ranks.processes
        """No rank of this host can end this process where its interpreter is locked. (Of a run of one process the timer
        could not tell Ctrl-Z.)"""
        self.wake = threading.Event()
        """Set to have a round now."""
        self.finishing = self.stopped = False
        self.own_error = ""
        """The traceback by which the main thread is leaving."""
        self.told = self.leaving = False
        """The run's failure was heard; the main thread leaves by an error that needs no more words."""
        self.round_began: float | None = None
        self.ending = False
        self._one_ends = threading.Lock()
        self.rounds = 0
        self._heard: dict[int, tuple[int, float]] = {}
        self._store_lost: float | None = None

    @property
    def blocked(self) -> float:
        """Seconds that the present round has waited for the store."""
        began = self.round_began
        return 0.0 if began is None else time.monotonic() - began

    def finish(self) -> None:
        """Nothing that happens to other ranks from now on is a failure."""
        self.finishing = True
        with contextlib.suppress(RuntimeError, OSError):
            self.store.finish()

    def stop(self) -> None:
        """Ends the thread; called by the main thread."""
        self.stopped = True
        self.wake.set()
        self.join(5.0)
        if self._guards_itself:
            faulthandler.cancel_dump_traceback_later()

    def run(self) -> None:
        last = time.monotonic()
        while not self.stopped:
            self.round_began = now = time.monotonic()
            if now - last > self.limits.heartbeat / 2:  # this process itself stood still: judge nobody by old news
                self._heard.clear()
                self.progress.forgive(now - last)
            last = now
            self._attempt_round()
            self.round_began = None
            self.wake.wait(self.limits.interval)
            self.wake.clear()

    def _attempt_round(self) -> None:
        try:
            self._round()
            self._store_lost = None
        except (RuntimeError, OSError) as error:
            now = time.monotonic()
            self._store_lost = self._store_lost or now
            self._store_is_gone(error, now - self._store_lost)
        except Exception:
            logger.exception("the watchdog made a mistake; training goes on")

    def _round(self) -> None:
        self.rounds += 1
        self.store.publish(self.progress.heartbeat(self.rounds))
        if self._guards_itself:  # later than the others' judgement, so that they name this rank and its reason
            stacks.leave_if_locked(self.limits.heartbeat + self.limits.spreading)
        failure = self.store.failure()
        if failure is not None:
            self.told = True
            self.store.acknowledge()
            self.end(failure)
        elif self.store.inquired():
            self.store.answer(self._answer())
        if failure is None and not self.finishing and (found := self._judge_everybody()) is not None:
            self.store.declare(found)
            self.wake.set()

    # ---- judging

    def _judge_everybody(self) -> Failure | None:
        """LocalRanks by their processes, and over hosts rank 0 everybody, everybody rank 0."""
        for rank in self.local_ranks.dead():
            if not self.store.finished(rank):
                return self._death(rank, self.store.heartbeat(rank))
        for rank in range(1, len(self.arrivals)) if self.rank == 0 else [0]:
            if (found := self._judge(rank)) is not None:
                return found
        one = self.progress.heartbeat()
        if self.rank > 0 or one.silence <= one.allowed or stacks.is_debugged(self.main_thread):
            return None
        return self._find_culprit()

    def _death(self, rank: int, heartbeat: Heartbeat | None) -> Failure:
        words = "" if heartbeat is None else f", {heartbeat.where}"
        return Failure(rank, f"its process {self.arrivals[rank].pid} died{words}")

    def _judge(self, rank: int) -> Failure | None:
        """A failure if ``rank``'s heartbeat has stopped or its main thread is stuck."""
        heartbeat = self.store.heartbeat(rank) or UNHEARD
        if self.store.finished(rank):
            return None
        now = time.monotonic()
        count, since = self._heard.setdefault(rank, (heartbeat.count, now))
        if heartbeat.count != count:
            self._heard[rank] = (heartbeat.count, now)
        elif now - since > self.limits.heartbeat:
            place = self.arrivals[rank]
            reason = f"{heartbeat.where}: process {place.pid} on {place.host} is stopped, locked or out of reach"
            return Failure(rank, f"{reason}: no sign of life for {now - since:.0f} s")
        return self._find_culprit() if heartbeat.silence > heartbeat.allowed else None

    def _find_culprit(self) -> Failure:
        """A rank makes no progress: the one that got least far, and of these one that does not wait in a collective."""
        self.store.inquire()
        self.store.answer(self._answer())
        limit = time.monotonic() + self.limits.spreading
        while time.monotonic() < limit and not self.store.all_answered():
            time.sleep(0.05)
        heartbeats = dict.fromkeys(self.store.ranks, UNHEARD) | self.store.heartbeats()
        answers = self.store.answers()

        def order(rank: int) -> tuple[bool, int, bool, bool, int, float]:
            last, waits = heartbeats[rank], rank in answers and answers[rank].waits
            return rank in answers, last.iteration, not last.waits_for_data, waits, last.ticks, -last.silence

        rank = min(heartbeats, key=order)
        silent = "" if rank in answers else "; it answers nothing"
        stack = answers[rank].stack if rank in answers else ""
        last = heartbeats[rank]
        return Failure(rank, f"{last.where}: no progress for {last.silence:.0f} s{silent}", stack)

    def _answer(self) -> Answer:
        if self.own_error:  # the main thread has left the collective that failed
            return Answer(True, self.own_error)
        return stacks.where_is(self.main_thread)

    # ---- the main thread is leaving by an error

    def main_thread_raised(self, own: Report, *, consequence: bool, speak: Callable[[Failure], None]) -> None:
        """Called by the main thread. Tells the others and waits until they know, since this process may hold the store.

        If the error may only say that another rank is gone (``consequence``), that rank gets the time to be found; if
        none is, the one furthest behind is named. Where another rank failed first, the process ends in here; otherwise
        ``speak`` is called before anybody else hears of the failure, as a launcher may end this process right after.
        """
        self.own_error = own.failure.detail
        self.wake.set()
        if consequence:
            self.progress.mark("lost another rank", long=True)
            dies_meanwhile = 0.0 if stacks.has_timed_out(own.what) else self.limits.heartbeat
            self._wait(dies_meanwhile + self.limits.spreading, lambda: self.store.failure() is not None)
        with contextlib.suppress(RuntimeError, OSError):
            if self.store.failure() is None:
                found = self._find_culprit() if consequence else self._first_of_all(own)
                if found.together or found.rank == self.rank:
                    speak(found)
                self.store.declare(found)
            self.wake.set()
            first = self.store.failure()
            if first is not None and not first.together and first.rank != self.rank:
                self._wait(self.limits.heartbeat, lambda: False)
        self._wait(self.limits.spreading, self.store.others_know)

    def _first_of_all(self, own: Report) -> Failure:
        """Which of the errors that ranks raise at about the same time is the cause. Who is quickest says nothing: the
        same error of all ranks is nobody's, and one that points to another rank waits for that rank's."""
        self.store.report(own)
        patience = self.limits.heartbeat if own.elsewhere else self.limits.grace
        self._wait(patience, lambda: self.store.failure() is not None or self.store.all_reported())
        reports = self.store.reports()
        if len(reports) == len(self.arrivals) and len({each.what for each in reports.values()}) == 1:
            return dataclasses.replace(own.failure, reason=own.what, together=True)
        return min(reports.values(), key=lambda each: (each.elsewhere, each.failure.rank)).failure

    def _wait(self, seconds: float, condition: Callable[[], bool]) -> None:
        """Until ``condition`` holds; where it asks a store that is gone, that is for the monitor to find out."""
        limit = time.monotonic() + seconds
        while time.monotonic() < limit and not self.leaving:
            with contextlib.suppress(RuntimeError, OSError):
                if condition():
                    return
            time.sleep(0.05)

    # ---- the end

    def store_is_silent(self, reason: str) -> Failure:
        """Without the store nobody can be heard: its holder is gone, and with it the run."""
        for rank in self.local_ranks.dead():
            return self._death(rank, None)
        if self.agent_holds_store:
            return Failure(None, f"the launcher holds it and is gone or out of reach ({reason})")
        if 0 in self.local_ranks:  # not gone: it would stay where it is, with its memory and the lock of --save
            return Failure(0, f"its process holds the run's store and is stopped or locked ({reason})")
        return Failure(None, f"rank 0 on {self.arrivals[0].host} holds it and is gone or out of reach ({reason})")

    def _store_is_gone(self, error: Exception, seconds: float) -> None:
        if self.told and self.own_error:  # the holder raised the same error and left first: no further failure
            self.leaving = True
            return
        holder_died = bool(self.local_ranks.dead())
        if not self.finishing and (holder_died or seconds > max(self.limits.grace, self.limits.heartbeat / 3)):
            self.end(self.store_is_silent(str(error).splitlines()[0]))

    def end(self, failure: Failure) -> None:
        """Says what happened and leaves; a rank that fails by itself says it in its own words. Called by any thread."""
        self.ending = True
        self._wait(self.limits.grace, lambda: self.stopped or bool(self.own_error))
        if self.stopped or self.own_error and (failure.together or failure.rank == self.rank):
            self.ending = False
            return
        with self._one_ends:
            tell_launcher(str(failure))
            if not failure.for_user:
                stacks.write_stacks(self._report(failure), self.stacks_path)
            elif failure.rank not in self.local_ranks and self.local_ranks.is_first:
                stacks.write_line(f"watchdog: {failure}")  # the rank that failed has said it on its own host
            if failure.rank in self.local_ranks:
                assert failure.rank is not None
                self.local_ranks.end(failure.rank, self.limits.spreading)
            for child in multiprocessing.active_children():  # of a data loader, which may hang itself
                child.kill()
            os._exit(EXIT_CODE)

    def _report(self, failure: Failure) -> str:
        own = failure.rank == self.rank
        head = f"watchdog: {failure}\n"
        if failure.detail and (own or self.local_ranks.is_first):
            head += failure.detail.rstrip() + "\n"
        if self.own_error and not own:
            head += f"watchdog: rank {self.rank} noticed it by this error:\n{self.own_error.rstrip()}\n"
        return head + f"watchdog: rank {self.rank} stops at {self.progress.heartbeat().where}; its Python stacks:\n"
