"""One rank's failure ends the whole run soon, loudly and with its reason first.

A thread on every rank publishes a heartbeat through the run's store and looks at the others. A rank fails when it
raises, when its process is gone (seen at once on the same host), when its heartbeat stops, or when its main thread
makes no progress. The first failure is written once, by whoever sees it first; every other rank then writes the
failing rank and its reason, then its own Python stacks, to stderr and ``<save>/stacks/rank-N.txt``, and leaves with
exit code 1.

Progress is a call of the task's ``get_batch`` or ``forward_step``, or an event of the training loop. A silence may last
--watchdog-timeout-seconds, or three times the longest silence of the run so far. Work of unknown length announces
itself: before the first iteration nothing but death is looked for, and the first iteration, the first evaluation and
checkpoints get --distributed-timeout-minutes.

A thread cannot watch a process whose interpreter is locked or which is stopped: its heartbeat ends, and a process on
the same host kills it after the others have been told.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.hooks.base import Hook, RunInfo
from megatron.training.metrics import EvalResult, StepMetrics
from megatron.training.rendezvous import Arrival, Place, open_store, roll_call
from megatron.training.tasks.base import Task
from megatron.training.train_state import TrainState
from megatron.training.trainer import Components

logger = logging.getLogger(__name__)

EXIT_CODE = 1
DATA = "waiting for data"
GRACE_SECONDS = 2.0
"""How long a rank may go on after another one failed: it may be about to report the same problem itself."""


class Progress:
    """What the main thread is doing; written there, read by the watchdog's thread."""

    def __init__(self, timeout: float, long_timeout: float) -> None:
        self.timeout, self.long_timeout = timeout, long_timeout
        self.phase, self.iteration, self.ticks = "starting", 0, 0
        self.allowed = float("inf")
        self.ordinary = False
        self.longest = 0.0
        self.last = time.monotonic()

    def mark(self, phase: str, *, long: bool = False) -> None:
        """The main thread got here; ``long`` work follows."""
        now = time.monotonic()
        if self.ordinary:
            self.longest = max(self.longest, now - self.last)
        self.last, self.phase = now, phase
        self.ticks += 1
        self.ordinary = not long
        self.allowed = max(self.long_timeout if long else self.timeout, 3 * self.longest)

    @property
    def silence(self) -> float:
        return time.monotonic() - self.last


class ProgressHook(Hook):
    """Marks the events of the training loop."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def on_train_start(self, run: RunInfo) -> None:
        self.progress.iteration = run.state.iteration
        self.progress.mark("first iteration", long=True)

    def on_step(self, state: TrainState, metrics: StepMetrics) -> None:
        self.progress.iteration = state.iteration
        self.progress.mark("between iterations")

    def on_evaluate(self, state: TrainState, results: Sequence[EvalResult]) -> None:
        self.progress.mark("after evaluation")

    def on_save(self, state: TrainState) -> None:
        self.progress.mark("saving a checkpoint", long=True)

    def on_saved(self, state: TrainState) -> None:
        self.progress.mark("after saving")


def mark_task(task: Task, progress: Progress) -> None:
    """Lets the task's ``get_batch`` and ``forward_step`` mark progress, on this object only."""
    get_batch, forward_step = task.get_batch, task.forward_step
    first = {True: True, False: True}  # by whether gradients are wanted: either may compile

    def marked_get_batch(*args: Any, **kwargs: Any) -> Any:
        progress.mark(DATA, long=first[torch.is_grad_enabled()])
        batch = get_batch(*args, **kwargs)
        progress.mark("computing", long=first[torch.is_grad_enabled()])
        return batch

    def marked_forward_step(*args: Any, **kwargs: Any) -> Any:
        progress.mark("computing", long=first[torch.is_grad_enabled()])
        result = forward_step(*args, **kwargs)
        starting = first[torch.is_grad_enabled()] and progress.iteration == 0
        first[torch.is_grad_enabled()] = False
        progress.mark("computing", long=starting)
        return result

    task.get_batch = marked_get_batch  # type: ignore[method-assign]
    task.forward_step = marked_forward_step  # type: ignore[method-assign]


@dataclass(frozen=True)
class Failure:
    """The first thing that went wrong in the run."""

    rank: int
    reason: str
    detail: str = ""
    """Its traceback or stack, if it could still say."""

    def __str__(self) -> str:
        return f"rank {self.rank} failed first: {self.reason}"


@dataclass
class Beat:
    """What a rank publishes in every round."""

    count: int
    iteration: int
    ticks: int
    phase: str
    silence: float
    allowed: float


class Watchdog:
    """Use as a context around everything that a run does; without a launcher of several ranks it does nothing."""

    def __init__(self, cfg: PretrainConfig) -> None:
        self.timeout = cfg.watchdog_timeout_seconds
        self.place = Place.from_environment() if self.timeout > 0 and not dist.is_initialized() else None
        self.progress = Progress(self.timeout, max(60.0 * cfg.distributed_timeout_minutes, self.timeout))
        self.folder = None if cfg.save is None else Path(cfg.save) / "stacks"
        self.catches_sigterm = not (cfg.exit_signal_handler and cfg.exit_signal == signal.SIGTERM)
        self.store: dist.Store | None = None
        """For the process groups; None: torch finds its own."""
        self._thread: _Thread | None = None

    def __enter__(self) -> Watchdog:
        if self.place is None:
            return self
        if not faulthandler.is_enabled():
            faulthandler.enable(_stderr())  # a crash in native code shows where
        patience = max(self.timeout, 1.0)
        self.store = dist.PrefixStore("groups", open_store(self.place, patience))
        own = dist.PrefixStore("watchdog", open_store(self.place, patience))
        arrivals = roll_call(own, self.place, patience)
        self._thread = _Thread(self, own, self.place.rank, arrivals)
        self._thread.start()
        return self

    def watch(self, parts: Components) -> None:
        """Counts the task's micro-batches and the events of the loop as progress."""
        if self._thread is not None:
            mark_task(parts.task, self.progress)
            parts.hooks = [ProgressHook(self.progress), *parts.hooks]

    def finish(self) -> None:
        """The run is complete: from here on, other ranks may leave at any time."""
        if self._thread is not None:
            self._thread.finish()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        thread = self._thread
        if thread is None:
            return
        if error is None or (isinstance(error, SystemExit) and not error.code):
            thread.finish()
        else:
            thread.failed(error)
        thread.stop()


class _Thread(threading.Thread):
    """Publishes, looks, and ends the process when the run has failed."""

    def __init__(self, owner: Watchdog, store: dist.Store, rank: int, arrivals: Sequence[Arrival]) -> None:
        super().__init__(name="watchdog", daemon=True)
        self.store, self.rank, self.arrivals = store, rank, arrivals
        self.timeout, self.progress, self.folder = owner.timeout, owner.progress, owner.folder
        self.interval = min(max(owner.timeout / 20, 0.1), 3.0)
        self.main_thread = threading.main_thread().ident
        self.finishing = self.stopped = False
        self.beats = 0
        self.own_error = ""
        self.seen: dict[int, tuple[int, float]] = {}
        self.neighbours = [
            rank for rank, each in enumerate(arrivals) if each.host == arrivals[self.rank].host and rank != self.rank
        ]
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        self._catch_sigterm(owner.catches_sigterm)

    def _catch_sigterm(self, wanted: bool) -> None:
        """A launcher ends the other ranks by SIGTERM as soon as one is gone: they shall say why before they follow."""
        self.previous: Any = None
        in_main = threading.current_thread() is threading.main_thread()
        if wanted and in_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            self.previous = signal.signal(signal.SIGTERM, _nothing)
            signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)

    def finish(self) -> None:
        """Nothing that happens to other ranks from now on is a failure."""
        self.finishing = True
        with contextlib.suppress(RuntimeError, OSError):
            self.store.set(f"done/{self.rank}", "1")

    def failed(self, error: BaseException) -> None:
        """The main thread is ending by ``error``. If that may only tell that another rank is gone, that rank gets the
        time to be found, which ends the process from here."""
        self.own_error = "".join(traceback.format_exception(error))
        reason = f"{self.where()}: {type(error).__name__}: {error}"
        if is_consequence(error):
            self.progress.mark("lost another rank", long=True)
            time.sleep(self.timeout + 2 * self.interval)
        self.declare(Failure(self.rank, reason, self.own_error))
        limit = time.monotonic() + GRACE_SECONDS  # this may be the process that holds the store
        others = [f"told/{rank}" for rank in range(len(self.arrivals)) if rank != self.rank]
        with contextlib.suppress(RuntimeError, OSError):
            while time.monotonic() < limit and not self.store.check(others):
                time.sleep(0.05)

    def stop(self) -> None:
        """Ends the thread; called by the main thread."""
        self.stopped = True
        with contextlib.suppress(OSError):
            os.write(self.writer, b"\0")
        self.join(5.0)
        faulthandler.cancel_dump_traceback_later()
        if self.previous is not None:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, self.previous)

    # ---- the thread

    def run(self) -> None:
        """Rounds until the run ends or fails."""
        polled = time.monotonic()
        lost_since: float | None = None
        while not self.stopped:
            ready, _, _ = select.select([self.reader], [], [], self.interval)
            if self.stopped:
                return
            if ready and signal.SIGTERM in os.read(self.reader, 64):
                self._terminated()
            now = time.monotonic()
            if now - polled > max(self.timeout / 2, 5 * self.interval):
                self.seen.clear()  # this process itself was stopped for a while: judge nobody by old news
            polled = now
            try:
                self._round()
                lost_since = None
            except (RuntimeError, OSError) as error:
                lost_since = now if lost_since is None else lost_since
                self._store_is_gone(error, now - lost_since)

    def _round(self) -> None:
        self.beats += 1
        one = self.progress
        beat = Beat(self.beats, one.iteration, one.ticks, one.phase, one.silence, one.allowed)
        self.store.set(f"beat/{self.rank}", json.dumps(asdict(beat)))
        self._dump_if_locked()
        if self.store.check(["failure"]):
            failure = self._first_failure()
            self.store.set(f"told/{self.rank}", "1")
            self._end(failure)
        if self.store.check(["inquiry"]):
            self._answer()
        for rank in self.neighbours:
            if not self.finishing and not alive(self.arrivals[rank].pid) and not self.store.check([f"done/{rank}"]):
                self.declare(Failure(rank, f"its process {self.arrivals[rank].pid} died{self._last_words(rank)}"))
                return
        # rank 0 looks at everybody, everybody at rank 0
        for rank in range(1, len(self.arrivals)) if self.rank == 0 else [0]:
            if not self.finishing and (found := self._judge(rank)):
                self.declare(found)
                return
        if self.rank == 0 and not self.finishing and self.progress.silence > self.progress.allowed:
            self.declare(self._find_culprit())

    def _dump_if_locked(self) -> None:
        """If this thread cannot run any more, C code writes the stacks."""
        faulthandler.dump_traceback_later(2 * self.timeout, file=_stderr())

    def _judge(self, rank: int) -> Failure | None:
        """A failure if ``rank``'s heart has stopped or its main thread is stuck."""
        if self.store.check([f"done/{rank}"]) or not self.store.check([f"beat/{rank}"]):
            return None
        beat = Beat(**json.loads(self.store.get(f"beat/{rank}")))
        now = time.monotonic()
        count, since = self.seen.get(rank, (-1, now))
        if beat.count != count:
            self.seen[rank] = (beat.count, now)
        elif now - since > self.timeout:
            place = self.arrivals[rank]
            reason = f"{describe(beat)}: process {place.pid} on {place.host} is stopped, locked or out of reach"
            return Failure(rank, f"{reason}: no sign of life for {now - since:.0f} s")
        return self._find_culprit() if beat.silence > beat.allowed else None

    def _find_culprit(self) -> Failure:
        """Somebody makes no progress: whoever got least far, and of these one that does not wait in a collective."""
        self.store.set("inquiry", "1")
        self._answer()
        limit = time.monotonic() + max(GRACE_SECONDS, 3 * self.interval)
        ranks = range(len(self.arrivals))
        while time.monotonic() < limit and not all(self.store.check([f"answer/{rank}"]) for rank in ranks):
            time.sleep(0.05)
        beats = {rank: Beat(**json.loads(self.store.get(f"beat/{rank}"))) for rank in ranks
                 if self.store.check([f"beat/{rank}"])}  # fmt: skip
        answers = {rank: json.loads(self.store.get(f"answer/{rank}")) for rank in ranks
                   if self.store.check([f"answer/{rank}"])}  # fmt: skip

        def order(rank: int) -> tuple[bool, int, bool, bool, int, float]:
            beat, waits = beats[rank], answers.get(rank, {"waits": False})["waits"]
            return rank in answers, beat.iteration, beat.phase != DATA, waits, beat.ticks, -beat.silence

        rank = min(beats, key=order)
        stack = answers[rank]["stack"] if rank in answers else ""
        silent = "" if rank in answers else "; it answers nothing"
        return Failure(rank, f"{describe(beats[rank])}: no progress for {beats[rank].silence:.0f} s{silent}", stack)

    def _answer(self) -> None:
        """Where this rank's main thread is."""
        if not self.store.check([f"answer/{self.rank}"]):
            frame = sys._current_frames().get(self.main_thread or 0)
            stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
            self.store.set(f"answer/{self.rank}", json.dumps({"waits": waits_for_others(frame), "stack": stack}))

    def where(self) -> str:
        """This rank's phase, for a message."""
        return describe(Beat(0, self.progress.iteration, 0, self.progress.phase, 0.0, 0.0))

    def _last_words(self, rank: int) -> str:
        if not self.store.check([f"beat/{rank}"]):
            return ""
        return ", " + describe(Beat(**json.loads(self.store.get(f"beat/{rank}"))))

    # ---- the end

    def declare(self, failure: Failure) -> None:
        """Writes the failure down unless there is one already."""
        with contextlib.suppress(RuntimeError, OSError):
            self.store.compare_set("failure", "", json.dumps(asdict(failure)))

    def _first_failure(self) -> Failure:
        return Failure(**json.loads(self.store.get("failure")))

    def _terminated(self) -> None:
        """SIGTERM: either somebody failed and a launcher cleans up, or somebody wants the run to end."""
        limit = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < limit:
            with contextlib.suppress(RuntimeError, OSError):
                self._round()
            time.sleep(0.05)
        os._exit(128 + signal.SIGTERM)

    def _store_is_gone(self, error: Exception, seconds: float) -> None:
        """Without the store nobody can be heard: its holder is gone, and with it the run."""
        for rank in [] if self.finishing else self.neighbours:
            if not alive(self.arrivals[rank].pid):
                self._end(Failure(rank, f"its process {self.arrivals[rank].pid} died"))
        if seconds > max(GRACE_SECONDS, self.timeout / 4) and not self.finishing:
            reason = f"the store of the run does not answer: its holder (rank 0 or the launcher) is gone ({error})"
            self._end(Failure(0, reason.splitlines()[0]))

    def _end(self, failure: Failure) -> None:
        """Says what happened and leaves; a rank that fails by itself says it in its own words."""
        faulthandler.cancel_dump_traceback_later()
        limit = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < limit and not self.stopped and not self.own_error:
            time.sleep(0.05)
        if self.stopped or failure.rank == self.rank and self.own_error:
            return
        self._report(failure)
        place = self.arrivals[failure.rank]
        if failure.rank in self.neighbours and alive(place.pid):
            time.sleep(GRACE_SECONDS)  # it may still leave by itself, with its own stack
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(place.pid, signal.SIGKILL)
        os._exit(EXIT_CODE)

    def _report(self, failure: Failure) -> None:
        own = failure.rank == self.rank
        head = f"watchdog: {failure}\n"
        if failure.detail and (own or self.rank == 0 or self.rank == min(self.neighbours, default=0)):
            head += failure.detail.rstrip() + "\n"
        if self.own_error and not own:
            head += f"watchdog: rank {self.rank} noticed it by this error:\n{self.own_error.rstrip()}\n"
        head += f"watchdog: rank {self.rank} stops at {self.where()}; its Python stacks:\n"
        files = [_stderr()]
        if self.folder is not None:
            with contextlib.suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
                files.append(open(self.folder / f"rank-{self.rank}.txt", "w", encoding="utf-8"))  # noqa: SIM115
        for file in files:
            with contextlib.suppress(OSError, ValueError):
                file.write(head)
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
                file.flush()


def _nothing(number: int, frame: FrameType | None) -> None:
    """The main thread's part of SIGTERM: the watchdog's thread does the rest."""


def _stderr() -> Any:
    """A stderr with a file descriptor, even where sys.stderr was replaced."""
    return sys.__stderr__ if sys.__stderr__ is not None else open(2, "w", closefd=False)


def describe(beat: Beat) -> str:
    """``iteration 7, waiting for data``."""
    if beat.phase == "starting":
        return "before the first iteration"
    current = beat.iteration + (beat.phase in (DATA, "computing", "first iteration"))
    return f"iteration {current}, {beat.phase}"


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


def waits_for_others(frame: FrameType | None) -> bool:
    """Whether a stack ends in torch.distributed, or in a wait for work that it started."""
    if frame is None:
        return False
    line = traceback.extract_stack(frame, limit=1)[0].line or ""
    while frame is not None:
        if "torch/distributed/" in frame.f_code.co_filename.replace(os.sep, "/"):
            return True
        frame = frame.f_back
    return any(word in line for word in (".wait(", "synchronize(", ".item("))


def is_consequence(error: BaseException) -> bool:
    """Whether an error may only say that another rank is gone: it comes from a collective or from the store."""
    words = ("gloo", "NCCL", "onnection closed by peer", "onnection reset by peer", "roken pipe")
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(w in str(error) for w in words)
    )
