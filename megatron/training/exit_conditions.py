"""When to log, evaluate, save and stop.

The first part is pure functions of the flags and the iteration, so that a resumed run decides as an uninterrupted one.
The second part adds what differs between ranks, a signal or a clock, and agrees on it: one small all-reduce per
iteration, only when --exit-signal-handler or --exit-duration-in-mins asks for it.
"""

import logging
import signal
import time
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.distributed as dist

from megatron.core.errors import UserError
from megatron.training.train_state import TrainState

logger = logging.getLogger(__name__)


class ExitFlags(Protocol):
    """The part of the configuration that is read here."""

    @property
    def train_iters(self) -> int | None: ...

    @property
    def train_samples(self) -> int | None: ...

    @property
    def exit_interval(self) -> int | None: ...

    @property
    def exit_duration_in_mins(self) -> int | None: ...

    @property
    def exit_signal_handler(self) -> bool: ...

    @property
    def exit_signal(self) -> signal.Signals: ...


@dataclass(frozen=True)
class ExitReason:
    """Why training stops, and the exit code of the process."""

    kind: Literal["train_iters", "train_samples", "signal", "duration", "interval", "unsaved"]
    message: str
    exit_code: int = 0

    @property
    def finished(self) -> bool:
        """The run is complete: the final evaluation follows. Otherwise the process saves and leaves at once."""
        return self.kind in ("train_iters", "train_samples")


def every(interval: int | None, iteration: int) -> bool:
    """Whether ``iteration`` (counted from 1) is a multiple of ``interval``; never for None or 0."""
    return bool(interval) and iteration > 0 and iteration % interval == 0  # type: ignore[operator]


def is_log_iteration(log_interval: int, iteration: int, first_iteration: int) -> bool:
    """Multiples of --log-interval, and the first iteration of the process (1, or the one after a resume)."""
    return iteration == first_iteration or every(log_interval, iteration)


def is_eval_iteration(eval_interval: int | None, iteration: int, start_eval_at_iter: int | None = None) -> bool:
    """Multiples of --eval-interval from --start-eval-at-iter on; None means no periodic evaluation."""
    return every(eval_interval, iteration) and iteration >= (start_eval_at_iter or 0)


def is_save_iteration(save_interval: int | None, iteration: int, reason: ExitReason | None) -> bool:
    """Multiples of --save-interval, and wherever training stops. (Without --save nothing is saved: not decided here.)

    A run that is resumed when already complete makes no iteration, so it saves nothing a second time.
    """
    return every(save_interval, iteration) or reason is not None


def decide(
    cfg: ExitFlags, state: TrainState, elapsed: float, signalled: bool, first_iteration: int = 1
) -> ExitReason | None:
    """Whether training stops after ``state.iteration``, which no rank may answer differently.

    ``elapsed``: seconds since the process started, the largest over ranks. ``signalled``: any rank got --exit-signal.
    ``first_iteration``: of this process; before it --exit-interval has no say, or no job got past a multiple of it.
    A signal or a full time slice comes first, as what follows the last iteration (evaluation) would not fit any more.
    """
    if cfg.exit_signal_handler and signalled:
        name = as_signal(cfg.exit_signal).name
        return ExitReason("signal", f"exiting program after receiving {name}.")
    if cfg.exit_duration_in_mins is not None and elapsed > 60 * cfg.exit_duration_in_mins:
        return ExitReason("duration", f"exiting program after {elapsed / 60} minutes")
    if cfg.train_iters is not None and state.iteration >= cfg.train_iters:
        return ExitReason("train_iters", f"training is complete after iteration {state.iteration}")
    if cfg.train_samples is not None and state.consumed_train_samples >= cfg.train_samples:
        return ExitReason("train_samples", f"training is complete after {state.consumed_train_samples} samples")
    if every(cfg.exit_interval, state.iteration) and state.iteration >= first_iteration:
        return ExitReason("interval", f"exiting program at iteration {state.iteration}")
    return None


def after_failed_saves(failures: int, limit: int, folder: str | None, why: str) -> ExitReason | None:
    """The reason to stop once ``limit`` saves in a row have failed: what cannot be saved is work that will be lost.

    The program's exit code is then that of every end whose last save failed.
    """
    if failures < limit:
        return None
    return ExitReason(
        "unsaved",
        f"stopping: the last {failures} saves to --save {folder} failed, the latest: {why}. Checkpoints before them are"
        " intact: make room there, or mend the file system, and start the same command with --load on that folder."
        " --max-failed-saves sets how many failures are borne",
    )


def as_signal(value: signal.Signals | str | int) -> signal.Signals:
    """A signal from its name ("SIGTERM", "TERM") or number; ``ValueError`` names --exit-signal."""
    try:
        if isinstance(value, str):
            return signal.Signals[value if value.startswith("SIG") else f"SIG{value}"]
        return signal.Signals(value)
    except (KeyError, ValueError):
        raise UserError(f"--exit-signal: {value!r} is no signal of this system; use e.g. SIGTERM or SIGUSR1") from None


class ExitConditions:
    """Asks :func:`decide` once per iteration with what all ranks agree on.

    With --exit-signal-handler the signal only sets a flag, however often it comes: a second one while the checkpoint
    is written, or while the process ends, changes nothing.
    """

    def __init__(self, cfg: ExitFlags, *, start_time: float | None = None):
        """``start_time``: ``time.monotonic()`` when the process started; a clock that is set back does not matter."""
        self.cfg = cfg
        self.start_time = time.monotonic() if start_time is None else start_time
        self.num_signals = 0
        self._first_iteration: int | None = None
        self._signal = as_signal(cfg.exit_signal)
        self._previous = signal.signal(self._signal, self._on_signal) if cfg.exit_signal_handler else None

    def _on_signal(self, number: int, frame: object) -> None:
        self.num_signals += 1

    @property
    def signalled(self) -> bool:
        """This rank got the signal; other ranks may not know yet."""
        return self.num_signals > 0

    def check(self, state: TrainState) -> ExitReason | None:
        """The decision after ``state.iteration``, the same on every rank. Collective if a signal or a clock counts.

        The first call comes before the first iteration: a complete run makes none.
        """
        if self._first_iteration is None:
            self._first_iteration = state.iteration + 1
        elapsed, signalled = time.monotonic() - self.start_time, self.signalled
        if self.cfg.exit_signal_handler or self.cfg.exit_duration_in_mins is not None:
            elapsed, signalled = agree(elapsed, signalled)
        return decide(self.cfg, state, elapsed, signalled, self._first_iteration)

    def close(self) -> None:
        """Put the previous signal handler back; once signalled, the process is ending and ignores further ones."""
        if self._previous is not None:
            signal.signal(self._signal, signal.SIG_IGN if self.signalled else self._previous)
            self._previous = None

    def __enter__(self) -> "ExitConditions":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def outlive_exit_signal(worker_id: int) -> None:
    """``worker_init_fn`` of a DataLoader: lets workers live through the SIGTERM that their trainer catches.

    torchrun and batch systems signal whole process groups, and torch gives workers a SIGTERM handler that ends them:
    the trainer would then die of its loader before it reaches the checkpoint. Workers still end with their trainer.
    """
    if signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, signal.SIG_IGN, None):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def agree(elapsed: float, signalled: bool) -> tuple[float, bool]:
    """The largest ``elapsed`` and whether any rank was signalled, over all ranks."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return elapsed, signalled
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    values = torch.tensor([elapsed, float(signalled)], dtype=torch.float64, device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    largest, any_signal = values.tolist()
    return largest, bool(any_signal)
