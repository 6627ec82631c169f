"""Monitor thread: publish this rank's heartbeat, read the failure store, judge other ranks and end the process.

A thread cannot watch a process that is stopped or whose interpreter is locked. The heartbeat then ends, the other ranks
declare the failure, and another rank on the same host kills the process. If this host has no other rank, a C-level
timer that the thread re-arms in every round ends a locked process."""

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

from megatron.training.exits.endings import notify_launcher
from megatron.training.start.rendezvous import Arrival
from megatron.training.watchdog import stacks
from megatron.training.watchdog.failure_store import Answer, Failure, FailureStore, Report
from megatron.training.watchdog.local_ranks import LocalRanks
from megatron.training.watchdog.progress import STARTING, Heartbeat, RankProgress

logger = logging.getLogger(__name__)

EXIT_CODE = 1
UNHEARD = Heartbeat(0, 0, 0, STARTING, silence=0.0, allowed=float("inf"))
"""Default state of a rank without a heartbeat so far, so that a rank that never sends one is also declared dead."""


@dataclass(frozen=True)
class Limits:
    """Time limits in seconds, derived from --watchdog-timeout-seconds; every rank detects a lost rank in that time."""

    heartbeat: float
    """Maximum time without a heartbeat of a rank or an answer of the store."""
    interval: float
    """Time between two rounds."""
    grace: float
    """Wait for a rank that may be about to report the same problem itself, or to exit without help."""

    @classmethod
    def of(cls, timeout: float) -> Limits:
        return cls(heartbeat=timeout * 2 / 3, interval=min(max(timeout / 20, 0.1), 3.0), grace=min(timeout / 20, 2.0))

    @property
    def spreading(self) -> float:
        """Time until every rank has read a declared failure."""
        return 2 * self.interval + self.grace


class Monitor(threading.Thread):
    """Daemon thread that runs one round per ``limits.interval`` until the run ends or fails. Each round publishes the
    heartbeat, reads the failure, answers inquiries and judges other ranks."""

    def __init__(
        self,
        store: FailureStore,
        arrivals: Sequence[Arrival],
        progress: RankProgress,
        limits: Limits,
        *,
        local_ranks: LocalRanks,
        agent_holds_store: bool,
        folder: Path | None,
    ) -> None:
        """Create the thread of the rank of ``store``; it must be started. ``arrivals``: all ranks. ``folder``: the
        stacks file ``rank-<rank>.txt`` is written there; None: stacks go to stderr only. ``agent_holds_store``: whether
        the launcher hosts the store, not rank 0."""
        super().__init__(name="watchdog", daemon=True)
        self.store, self.rank, self.arrivals = store, store.rank, arrivals
        self.progress, self.limits = progress, limits
        self.local_ranks = local_ranks
        self.agent_holds_store = agent_holds_store
        self.stacks_path = None if folder is None else folder / f"rank-{store.rank}.txt"
        self.main_thread = threading.main_thread().ident
        self._guards_itself = len(arrivals) > 1 and not local_ranks.processes
        """Whether this rank needs the C-level timer: no other rank on this host can end it if its interpreter is
        locked. Off for single-process runs, where the timer could not distinguish a lock from Ctrl-Z."""
        self.wake = threading.Event()
        """Event that starts the next round immediately."""
        self.finishing = self.stopped = False
        self.error_here = ""
        """Traceback of the error on which the main thread is exiting, or an empty string."""
        self.knows_failure = self.leaving = False
        """A failure of the run was received; the main thread is exiting on an error that is already reported."""
        self.round_began: float | None = None
        self.ending = False
        self._one_ends = threading.Lock()
        self.rounds = 0
        self._heard: dict[int, tuple[int, float]] = {}
        self._store_lost: float | None = None

    @property
    def blocked(self) -> float:
        """Seconds that the current round has waited for the store; 0 between rounds."""
        began = self.round_began
        return 0.0 if began is None else time.monotonic() - began

    def finish(self) -> None:
        """Mark this rank as finished in the store; from now on no event on other ranks counts as a failure."""
        self.finishing = True
        with contextlib.suppress(RuntimeError, OSError):
            self.store.finish()

    def stop(self) -> None:
        """Stop the thread, join it for at most 5 s and cancel the C-level timer; call from the main thread."""
        self.stopped = True
        self.wake.set()
        self.join(5.0)
        if self._guards_itself:
            faulthandler.cancel_dump_traceback_later()

    def run(self) -> None:
        """Run one round per interval until `stop` is called; an earlier `wake` starts the next round at once. After a
        suspension of the process, clear the seen heartbeats of other ranks and forgive this rank's silence."""
        last = time.monotonic()
        while not self.stopped:
            self.round_began = now = time.monotonic()
            if now - last > self.limits.heartbeat / 2:  # was suspended: seen heartbeats are stale
                self._heard.clear()
                self.progress.forgive(now - last)
            last = now
            self._attempt_round()
            self.round_began = None
            self.wake.wait(self.limits.interval)
            self.wake.clear()

    def _attempt_round(self) -> None:
        """Pass an error of the store (RuntimeError, OSError) to `_store_is_gone` with the seconds since its first
        failure; log any other error and let training continue. Never raises."""
        try:
            self._round()
            self._store_lost = None
        except (RuntimeError, OSError) as error:
            now = time.monotonic()
            self._store_lost = self._store_lost or now
            self._store_is_gone(error, now - self._store_lost)
        except Exception:
            logger.exception("the watchdog failed; training continues")

    def _round(self) -> None:
        """Publish the heartbeat, re-arm the C-level timer, read the failure: end if one is declared. Else answer an
        inquiry, judge other ranks and declare the result, which the next round reads."""
        self.rounds += 1
        # before the first request: in a request this process may be suspended, which is no silence
        now, heartbeat = time.monotonic(), self.progress.heartbeat(self.rounds)
        self.store.publish(heartbeat)
        if self._guards_itself:  # later than the limit of other ranks, so that they report this rank and its reason
            stacks.leave_if_locked(self.limits.heartbeat + self.limits.spreading)
        failure = self.store.failure()
        if failure is not None:
            self.knows_failure = True
            self.store.acknowledge()
            self.end(failure)
        elif self.store.inquired():
            self.store.answer(self._answer())
        failure_here = None if failure or self.finishing else self._judge_everybody(now, heartbeat)
        if failure_here is not None:
            self.store.declare(failure_here)
            self.wake.set()

    # ---- judging

    def _judge_everybody(self, now: float, local: Heartbeat) -> Failure | None:
        """Return the first failure at the time ``now``. Local ranks are checked by their processes; by heartbeats, rank
        0 checks all ranks, others check rank 0. Rank 0 also checks its ``local`` one, unless at a debugger prompt."""
        for rank in self.local_ranks.dead():
            if not self.store.finished(rank):
                return self._death(rank, self.store.heartbeat(rank))
        for rank in range(1, len(self.arrivals)) if self.rank == 0 else [0]:
            if (failure := self._judge(rank, now)) is not None:
                return failure
        if self.rank > 0 or local.silence <= local.allowed or stacks.is_debugged(self.main_thread):
            return None
        return self._find_culprit()

    def _death(self, rank: int, heartbeat: Heartbeat | None) -> Failure:
        words = "" if heartbeat is None else f", {heartbeat.where}"
        return Failure(rank, f"its process {self.arrivals[rank].pid} died{words}")

    def _judge(self, rank: int, now: float) -> Failure | None:
        """Return a failure if the heartbeat of ``rank`` stopped before ``now``. Without progress of its main thread,
        all ranks are asked for stacks (blocks up to ``limits.spreading`` s): the failure may name another rank."""
        heartbeat = self.store.heartbeat(rank) or UNHEARD
        if self.store.finished(rank):
            return None
        count, since = self._heard.setdefault(rank, (heartbeat.count, now))
        if heartbeat.count != count:
            self._heard[rank] = (heartbeat.count, now)
        elif now - since > self.limits.heartbeat:
            place = self.arrivals[rank]
            reason = f"{heartbeat.where}: process {place.pid} on {place.host} is stopped, locked or out of reach"
            return Failure(rank, f"{reason}: no sign of life for {now - since:.0f} s")
        return self._find_culprit() if heartbeat.silence > heartbeat.allowed else None

    def _find_culprit(self) -> Failure:
        """Ask for all stacks (up to ``limits.spreading`` s) and name the one most likely to block all others: without
        an answer, at the lowest iteration, waiting for data, then waiting neither for a collective nor the GPU."""
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
        silent = "" if rank in answers else "; it does not answer"
        stack = answers[rank].stack if rank in answers else ""
        last = heartbeats[rank]
        return Failure(rank, f"{last.where}: no progress for {last.silence:.0f} s{silent}", stack)

    def _answer(self) -> Answer:
        if self.error_here:  # the main thread has already left the failed collective
            return Answer(True, self.error_here)
        return stacks.thread_stack(self.main_thread)

    # ---- the main thread exits on an error

    def main_thread_raised(self, report: Report, *, consequence: bool, speak: Callable[[Failure], None]) -> None:
        """Report the main thread's error and wait until other ranks know, since this process may host the store. Called
        by the main thread; blocks. If the error may only be a ``consequence`` of another rank's failure, wait until
        that rank is found, else declare the rank with the least progress. If another rank failed first, the process
        ends in this call. If the failure is this rank's or common to all, call ``speak`` before declaring it: a
        launcher may end this process right after."""
        self.error_here = report.failure.detail
        self.wake.set()
        if consequence:
            self.progress.mark("lost another rank", long=True)
            report = dataclasses.replace(report, elsewhere=True)
            with contextlib.suppress(RuntimeError, OSError):
                self.store.report(report)
            dies_meanwhile = 0.0 if stacks.has_timed_out(report.what) else self.limits.heartbeat
            self._wait(
                dies_meanwhile + self.limits.spreading, lambda: self.store.failure() is not None or self._same_error()
            )
        with contextlib.suppress(RuntimeError, OSError):
            if self.store.failure() is None:
                if consequence and not self._same_error():
                    failure = self._find_culprit()
                else:
                    failure = self._first_failure(report)
                if failure.together or failure.rank == self.rank:
                    speak(failure)
                self.store.declare(failure)
            self.wake.set()
            first = self.store.failure()
            if first is not None and not first.together and first.rank != self.rank:
                self._wait(self.limits.heartbeat, lambda: False)
        self._wait(self.limits.spreading, self.store.others_know)

    def _first_failure(self, report: Report) -> Failure:
        """Publish ``report`` and return the first failure after ``limits.grace`` s (``limits.heartbeat`` s if its cause
        is elsewhere); declares nothing. An error of all ranks is attributed to none (``together``). Else the lowest
        rank, errors with their cause elsewhere last: the order of arrival is no evidence."""
        self.store.report(report)
        patience = self.limits.heartbeat if report.elsewhere else self.limits.grace
        self._wait(patience, lambda: self.store.failure() is not None or self.store.all_reported())
        reports = self.store.reports()
        if self._same_error():
            return dataclasses.replace(report.failure, reason=report.what, together=True)
        return min(reports.values(), key=lambda candidate: (candidate.elsewhere, candidate.failure.rank)).failure

    def _same_error(self) -> bool:
        """No rank is the cause of an error that all raised."""
        reports = self.store.reports()
        return len(reports) == len(self.arrivals) and len({report.what for report in reports.values()}) == 1

    def _wait(self, seconds: float, condition: Callable[[], bool]) -> None:
        """Poll every 0.05 s until ``condition`` holds, ``seconds`` have passed or ``leaving`` is set."""
        limit = time.monotonic() + seconds
        while time.monotonic() < limit and not self.leaving:
            with contextlib.suppress(RuntimeError, OSError):
                if condition():
                    return
            time.sleep(0.05)

    # ---- the end

    def store_is_silent(self, reason: str) -> Failure:
        """Return the failure for a store that does not answer; without its host the run cannot continue. Names a dead
        local rank if there is one, else the host of the store: the launcher (``rank`` None), rank 0 if it runs on this
        host, so that `end` kills it, or rank 0 elsewhere (``rank`` None)."""
        for rank in self.local_ranks.dead():
            return self._death(rank, None)
        if self.agent_holds_store:
            return Failure(None, f"the launcher holds it and is gone or out of reach ({reason})")
        if 0 in self.local_ranks:  # still exists: it would otherwise keep its memory and the lock of --save
            return Failure(0, f"its process holds the run's store and is stopped or locked ({reason})")
        return Failure(None, f"rank 0 on {self.arrivals[0].host} holds it and is gone or out of reach ({reason})")

    def _store_is_gone(self, error: Exception, seconds: float) -> None:
        """End the process if a local rank is dead or the error has lasted longer than ``limits.heartbeat`` / 3 and
        ``limits.grace``, but not while the run is finishing. If this rank is already exiting, only set ``leaving``."""
        if (
            self.knows_failure and self.error_here
        ):  # the store's host raised the same error and exited first: not a new failure
            self.leaving = True
            return
        holder_died = bool(self.local_ranks.dead())
        if not self.finishing and (holder_died or seconds > max(self.limits.grace, self.limits.heartbeat / 3)):
            self.end(self.store_is_silent(str(error).splitlines()[0]))

    def end(self, failure: Failure) -> None:
        """Report ``failure`` to the launcher, write the stacks (for a user error at most one line), kill the failed
        rank if it is local and this process's children, and end this process with exit code 1; callable from any
        thread. First waits ``limits.grace`` seconds. Returns instead if the run has stopped, or if the main thread is
        exiting on the failing error and reports it itself."""
        self.ending = True
        self._wait(self.limits.grace, lambda: self.stopped or bool(self.error_here))
        if self.stopped or self.error_here and (failure.together or failure.rank == self.rank):
            self.ending = False
            return
        with self._one_ends:
            notify_launcher(str(failure))
            if not failure.for_user:
                stacks.write_stacks(self._report(failure), self.stacks_path)
            elif failure.rank not in self.local_ranks and self.local_ranks.is_first:
                stacks.write_line(f"watchdog: {failure}")  # the failing rank has already reported it on its host
            if failure.rank in self.local_ranks:
                assert failure.rank is not None
                self.local_ranks.end(failure.rank, self.limits.spreading)
            for child in multiprocessing.active_children():  # data-loader workers, which may hang as well
                child.kill()
            os._exit(EXIT_CODE)

    def _report(self, failure: Failure) -> str:
        """Return the text above the stacks: the failure, its traceback (on the failing rank and once per host), the
        error of this rank if it is a consequence, and the state of its main thread."""
        is_this_rank = failure.rank == self.rank
        head = f"watchdog: {failure}\n"
        if failure.detail and (is_this_rank or self.local_ranks.is_first):
            head += failure.detail.rstrip() + "\n"
        if self.error_here and not is_this_rank:
            head += f"watchdog: rank {self.rank} noticed it by this error:\n{self.error_here.rstrip()}\n"
        return head + f"watchdog: rank {self.rank} stops at {self.progress.heartbeat().where}; its Python stacks:\n"
