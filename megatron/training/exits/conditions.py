"""Decisions when to log, evaluate, save and stop.

The first part consists of pure functions of flags and iteration, so that a resumed run decides like an uninterrupted
one. The second part adds inputs that differ between ranks, a signal or a clock, and agrees on them: one small
all-reduce between the hosts per iteration, unless --no-save-on-signal is passed."""

import atexit
import contextlib
import ctypes
import functools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Literal

import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.config.errors import EXIT_BAD_INPUT, UserError
from megatron.core.schedules import batch_size as batch_sizes
from megatron.training.config.launcher import is_first_rank
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.train_state import TrainState

EXIT_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Batch systems send the first two before the time limit; the third is Ctrl-C."""
DOUBLE_DELIVERY_SECONDS = 0.5
"""Interval in which a terminal and a launcher may both deliver one Ctrl-C."""


@dataclass(frozen=True)
class ExitReason:
    """Reason to stop training, and the exit code of the process."""

    kind: Literal["train_iters", "train_samples", "signal", "duration", "interval", "data", "unsaved"]
    message: str
    exit_code: int = 0

    @property
    def finished(self) -> bool:
        """Whether the run is complete and the final evaluation follows. Otherwise the process saves and exits."""
        return self.kind in ("train_iters", "train_samples")


def every(interval: int | None, iteration: int) -> bool:
    """Whether ``iteration`` (counted from 1) is a multiple of ``interval``; never for None or 0."""
    return bool(interval) and iteration > 0 and iteration % interval == 0  # type: ignore[operator]


def is_log_iteration(log_interval: int, iteration: int, first_iteration: int) -> bool:
    """Whether ``iteration`` is a multiple of --log-interval or the first iteration of the process."""
    return iteration == first_iteration or every(log_interval, iteration)


def is_eval_iteration(eval_interval: int | None, iteration: int, start_eval_at_iter: int | None = None) -> bool:
    """Whether ``iteration`` is a multiple of --eval-interval, not before --start-eval-at-iter; False for None."""
    return every(eval_interval, iteration) and iteration >= (start_eval_at_iter or 0)


def is_save_iteration(save_interval: int | None, iteration: int, reason: ExitReason | None) -> bool:
    """Whether ``iteration`` is a multiple of --save-interval or training stops; ignores whether --save is set."""
    return every(save_interval, iteration) or reason is not None


def is_complete(cfg: PretrainConfig, iteration: int, consumed: int) -> bool:
    """Whether ``iteration``, which ends with ``consumed`` samples, is the last: --train-iters, or no further batch fits
    into --train-samples (``train_iters`` is then derived from a start at sample 0, with today's batch size)."""
    iterations, samples = cfg.training.train_iters, cfg.training.train_samples
    if samples is None:
        return iterations is not None and iteration >= iterations
    return consumed + batch_sizes.running_global_batch_size(cfg.flat, consumed, cfg.data_parallel_size) > samples


def last_iteration(cfg: PretrainConfig, iteration: int, consumed: int) -> int | None:
    """Return the last iteration of a run that continues after ``iteration`` and ``consumed`` samples. None: no end."""
    if (samples := cfg.training.train_samples) is None:
        return cfg.training.train_iters
    return iteration + batch_sizes.train_iters_from_samples(cfg.flat, samples, cfg.data_parallel_size, consumed)


def decide(
    cfg: PretrainConfig, state: TrainState, elapsed: float, received: signal.Signals | None, first_iteration: int = 1
) -> ExitReason | None:
    """Return the first reason to stop after ``state.iteration``, or None. --exit-interval is ignored before
    ``first_iteration`` of this process, else no job would pass a multiple of it. Exit code: 128 + signal with neither
    --save nor --exit-signal-handler, else 0. ``elapsed``: seconds since process start, maximum over ranks;
    ``received``: signal of any rank. Signal and time limit take precedence, because the final evaluation would exceed
    the time slice."""
    training = cfg.training
    if received is not None:
        # 0 if saved or if --exit-signal-handler scripts expect it; else the code of a process ended by the signal
        code = 0 if cfg.checkpoint.save is not None or training.exit_signal_handler else 128 + received
        return ExitReason("signal", f"exiting program after receiving {received.name}.", code)
    if training.exit_duration_in_mins is not None and elapsed > 60 * training.exit_duration_in_mins:
        return ExitReason("duration", f"exiting program after {elapsed / 60} minutes")
    if is_complete(cfg, state.iteration, state.consumed_train_samples):
        if training.train_samples is None:
            return ExitReason("train_iters", f"training is complete after iteration {state.iteration}")
        return ExitReason("train_samples", f"training is complete after {state.consumed_train_samples} samples")
    if every(training.exit_interval, state.iteration) and state.iteration >= first_iteration:
        return ExitReason("interval", f"exiting program at iteration {state.iteration}")
    return None


def after_failed_saves(failures: int, limit: int, folder: str | None, why: str) -> ExitReason | None:
    """Return the reason to stop once ``limit`` consecutive saves have failed, else None: further work would be lost.
    ``exit_code`` stays 0 here; the program sets the code of every run whose last save failed."""
    if failures < limit:
        return None
    return ExitReason(
        "unsaved",
        f"stopping: the last {failures} saves to --save {folder} failed, the latest: {why}. Checkpoints before them are"
        " intact: free space there, or repair the file system, and start the same command with --load on that folder."
        " --max-failed-saves sets how many failures are allowed",
    )


def after_last_batch(num_samples: int, consumed: int, batch_size: int) -> ExitReason | None:
    """Return the reason to stop if fewer than ``batch_size`` of ``num_samples`` training samples remain after
    ``consumed``, else None. The exit code says bad input, because the run is not complete."""
    if consumed + batch_size <= num_samples:
        return None
    return ExitReason("data", used_up(num_samples), EXIT_BAD_INPUT)


def used_up(num_samples: int) -> str:
    """Return the message of a run whose training data ends before it."""
    return (
        f"the training data is used up: it holds {num_samples} samples. Give --data-path weights, so that sources"
        " repeat, or more data, or fewer --train-iters or --train-samples"
    )


def as_signal(value: signal.Signals | str | int) -> signal.Signals:
    """Return the signal for a number, a name ("SIGTERM") or a name without SIG ("TERM"); names are case-sensitive.
    Raises UserError that names --exit-signal for unknown values."""
    try:
        if isinstance(value, str):
            return signal.Signals[value if value.startswith("SIG") else f"SIG{value}"]
        return signal.Signals(value)
    except (KeyError, ValueError):
        raise UserError(f"--exit-signal: {value!r} is not a signal of this system; use e.g. SIGTERM, SIGUSR1") from None


class ExitConditions:
    """Calls :func:`decide` once per iteration with inputs that all ranks agree on. Installs signal handlers until
    :meth:`close`. A signal only sets a flag; repeated signals change nothing, even while a checkpoint is written. Only
    a second Ctrl-C ends the process, immediately and without a traceback; checkpoints are complete or absent at any
    time."""

    def __init__(self, cfg: PretrainConfig, *, start_time: float | None = None):
        """Install handlers for the signals of --save-on-signal and --exit-signal-handler; none outside the main thread.
        ``start_time``: ``time.monotonic()`` at process start, which is immune to changes of the system clock; None:
        now. Raises UserError for an unknown --exit-signal."""
        self.cfg = cfg
        self.start_time = time.monotonic() if start_time is None else start_time
        self.received: signal.Signals | None = None
        """First signal that this rank received; other ranks may not know it yet."""
        self.agreed: signal.Signals | None = None
        """Signal received by any rank, as of the last :meth:`check`."""
        self._received_at = 0.0
        self._first_iteration: int | None = None
        self._previous = {number: signal.getsignal(number) for number in self._to_catch()}
        for number in self._previous:
            signal.signal(number, self._on_signal)
        _CAUGHT.update(self._previous)
        if self._previous:
            _stop_catching_in_children()

    def _to_catch(self) -> set[signal.Signals]:
        """With --save-on-signal ``EXIT_SIGNALS`` that the program neither handles nor ignores (nohup), with
        --exit-signal-handler also --exit-signal. Empty outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return set()
        free = {number for number in EXIT_SIGNALS if self.cfg.training.save_on_signal and _is_free(number)}
        return free | ({as_signal(self.cfg.training.exit_signal)} if self.cfg.training.exit_signal_handler else set())

    def _on_signal(self, number: int, frame: object) -> None:
        """Store the first signal. A later SIGINT kills the data-loader workers and exits with code 130; within
        ``DOUBLE_DELIVERY_SECONDS`` it is ignored, as are other signals."""
        if self.received is None:
            self.received, self._received_at = signal.Signals(number), time.monotonic()
            if is_first_rank():
                _write(self._announcement())
        elif number == signal.SIGINT and time.monotonic() - self._received_at > DOUBLE_DELIVERY_SECONDS:
            _write("ended by a second Ctrl-C")
            for child in multiprocessing.active_children():  # data-loader workers
                child.kill()
            os._exit(128 + number)

    def _announcement(self) -> str:
        assert self.received is not None
        then = (
            "saving and stopping"
            if self.cfg.checkpoint.save is not None
            else "stopping (without --save nothing is saved)"
        )
        return f"received {self.received.name}: {then} after this iteration; a further Ctrl-C ends the process at once"

    @property
    def signalled(self) -> bool:
        """Whether this rank received a signal; other ranks may not know it yet."""
        return self.received is not None

    def check(self, state: TrainState) -> ExitReason | None:
        """Return the decision after ``state.iteration``, the same on every rank. Collective if signals or a time limit
        are enabled. The first call must precede the first iteration, because a complete run makes none."""
        if self._first_iteration is None:
            self._first_iteration = state.iteration + 1
        return decide(self.cfg, state, self._agree(), self.agreed, self._first_iteration)

    def interrupted(self) -> bool:
        """Whether any rank received a signal; the same on every rank. Collective like :meth:`check`."""
        self._agree()
        return self.agreed is not None

    def _agree(self) -> float:
        """Set ``agreed`` to the highest signal of any rank; return the maximum seconds since start. All-reduces only if
        signals or a time limit are enabled."""
        elapsed, number = time.monotonic() - self.start_time, self.received or 0
        if (
            self.cfg.training.save_on_signal
            or self.cfg.training.exit_signal_handler
            or self.cfg.training.exit_duration_in_mins is not None
        ):
            elapsed, number = agree(elapsed, number)
        self.agreed = signal.Signals(number) if number else None
        return elapsed

    def close(self) -> None:
        """Restore the previous signal handlers. If this rank received a signal, ignore all caught signals except SIGINT
        instead, because the process is exiting. May be called several times."""
        for number, handler in self._previous.items():
            left = _IGNORED.pop(number, handler)
            before = left if handler == signal.SIG_IGN else handler
            if ignored := self.signalled and number != signal.SIGINT:
                _IGNORED[number] = before
            signal.signal(number, signal.SIG_IGN if ignored else before)
        _CAUGHT.difference_update(self._previous)
        self._previous = {}

    def __enter__(self) -> "ExitConditions":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _write(line: str) -> None:
    """A signal handler may have interrupted a write to ``sys.stderr``."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())


_CAUGHT: set[signal.Signals] = set()
"""Signals that this process's trainer catches now."""
_IGNORED: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}
"""Signals that an interrupted run left ignored -> handler before it; a later run in the process catches them again."""


def _is_free(number: signal.Signals) -> bool:
    handler = signal.getsignal(number)
    return handler in (signal.SIG_DFL, signal.default_int_handler) or handler == signal.SIG_IGN and number in _IGNORED


@functools.cache
def _stop_catching_in_children() -> None:
    os.register_at_fork(after_in_child=_restore_defaults)


def _restore_defaults() -> None:
    for number in _CAUGHT:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


class IgnoreExitSignals:
    """DataLoader ``worker_init_fn``: keep workers alive on the signals that the trainer catches. Terminals, torchrun
    and batch systems signal full process groups. If the signal ended the workers, the trainer would fail in its loader
    before it reaches the checkpoint. When the trainer exits, however, Python sends SIGTERM to remaining workers and
    waits for them; they then exit, since ignoring it would block forever."""

    def __init__(self) -> None:
        self._trainer_leaves = _leaving_flag()

    def __call__(self, worker_id: int) -> None:
        for number in _CAUGHT:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        if self._trainer_leaves.value:
            os._exit(0)


@functools.cache
def _leaving_flag() -> ctypes.c_byte:
    """Return one byte of shared memory; 1 when this process exits. ``atexit`` handlers run in reverse order, so this
    one runs before the one of ``multiprocessing``, which ends workers."""
    flag = multiprocessing.RawValue("b", 0)
    atexit.register(setattr, flag, "value", 1)
    return flag


def agree(elapsed: float, received: int) -> tuple[float, int]:
    """Return the maximum ``elapsed`` and the maximum signal number (0: none) over all ranks. One all-reduce over gloo,
    without a device sync. Returns the arguments without torch.distributed or with one rank."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return elapsed, received
    over_hosts = dist.get_backend() == "gloo"
    group = dist.group.WORLD if over_hosts else parallel_state.get_process_groups().world.host_handle
    values = torch.tensor([elapsed, float(received)], dtype=torch.float64)
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    largest, number = values.tolist()
    return largest, int(number)
