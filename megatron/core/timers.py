"""Named timers, as users of Megatron-LM know them: ``timers("optimizer", log_level=1).start()`` and ``.stop()``.

Timers above ``--timing-log-level`` measure nothing, so that level 0, the default, costs nothing. From level 1 on,
starting and stopping wait for the device: the times are right, the step is slower. Under torch's profiler every timer,
at any level, is a range with its name in the trace."""

import logging
import time
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron.core.config.errors import UserError

logger = logging.getLogger(__name__)

MAX_LOG_LEVEL = 2
NAME_WIDTH = 48  # column of the values, which parsers of existing logs rely on


class Timer:
    """Stopwatch that sums its running times, in seconds; ``with timer:`` times a block."""

    def __init__(self, name: str, synchronize: bool = False, barrier: bool = False):
        """``synchronize``: wait for the GPU at both ends. ``barrier``: a ``with`` block waits for all ranks at both
        ends, but not after an exception; :meth:`start` and :meth:`stop` have a separate argument for it."""
        self.name, self.synchronize, self.barrier = name, synchronize, barrier
        self.active = False
        self._started = 0.0
        self._elapsed = 0.0
        self._total = 0.0
        self._range: Any = None

    def start(self, barrier: bool = False) -> None:
        """Start the timer and open a profiler range. ``barrier``: first wait for all ranks; with ``synchronize`` also
        wait for the device. Raises RuntimeError if the timer runs already."""
        if self.active:
            raise RuntimeError(f"timer {self.name!r} has already been started")
        self._wait(barrier)
        self._open_range()
        self.active = True
        self._started = time.perf_counter()

    def stop(self, barrier: bool = False) -> None:
        """Stop the timer and add the seconds since ``start`` to both sums; close the profiler range. ``barrier``: first
        wait for all ranks; with ``synchronize`` also wait for the device. RuntimeError if it does not run."""
        if not self.active:
            raise RuntimeError(f"timer {self.name!r} is not started")
        self._wait(barrier)
        self._close_range()
        seconds = time.perf_counter() - self._started
        self._elapsed += seconds
        self._total += seconds
        self.active = False

    def reset(self) -> None:
        """Set the time since the last reset to 0. A running timer stops, and its time is not counted;
        :meth:`active_time` keeps its sum."""
        self._close_range()
        self._elapsed = 0.0
        self.active = False

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """Return the seconds since the last reset; ``reset`` sets them to 0. A running timer is stopped and started
        again, with ``barrier`` and waits as in :meth:`stop` and :meth:`start`; the time so far counts."""
        running = self.active
        if running:
            self.stop(barrier)
        seconds = self._elapsed
        if reset:
            self._elapsed = 0.0
        if running:
            self.start(barrier)
        return seconds

    def active_time(self) -> float:
        """Seconds since the timer was created, regardless of resets."""
        return self._total

    def __enter__(self) -> "Timer":
        self.start(self.barrier)
        return self

    def __exit__(self, error: object, *_: object) -> None:
        """Stop the timer, with the barrier if set; after an exception reset it instead, without a barrier."""
        if error is None:
            self.stop(self.barrier)
        else:
            self.reset()  # no barrier: the other ranks may not reach this line

    def _open_range(self) -> None:
        if self._range is None and torch.autograd._profiler_enabled():
            self._range = torch.profiler.record_function(self.name)
            self._range.__enter__()

    def _close_range(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def _wait(self, barrier: bool) -> None:
        """Wait for all ranks (``barrier``, with torch.distributed), then for the device if ``synchronize``."""
        if barrier and dist.is_available() and dist.is_initialized():
            dist.barrier()
        if self.synchronize:
            torch.cuda.synchronize()


class NullTimer(Timer):
    """Timer above the log level: a range in traces, without time measurement or waits."""

    def start(self, barrier: bool = False) -> None:
        self._open_range()

    def stop(self, barrier: bool = False) -> None:
        self._close_range()

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        return 0.0


class Timers:
    """All timers of a process, by name."""

    def __init__(
        self,
        log_level: int = 0,
        log_option: Literal["max", "minmax", "all"] = "minmax",
        barrier_with_L1_time: bool = False,
    ):
        """``log_option``: form of :meth:`text`, see :func:`format_times`; UserError for another word.
        ``barrier_with_L1_time``: a ``with`` block of a level-1 timer waits for all ranks at both ends. ``log_level`` is
        not checked."""
        if log_option not in ("max", "minmax", "all"):
            raise UserError(f"--timing-log-option {log_option!r}: choose max, minmax or all")
        self.log_level, self.log_option = log_level, log_option
        self.barrier_with_L1_time = barrier_with_L1_time
        self.latest: dict[str, float] = {}
        """Milliseconds of the last :meth:`text`, the largest over ranks."""
        self._timers: dict[str, Timer] = {}
        self._levels: dict[str, int] = {}
        self._silent: dict[str, NullTimer] = {}

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        """Return the timer ``name``, the same object at each call. The first call sets its level (default: 2, the
        highest); above ``Timers.log_level`` the timer measures nothing. Raises ValueError for a level outside of 0 to
        2, or another level than in the first call. Timers wait for the device only at log level 1 or 2."""
        known = self._levels.get(name)
        if known is None:
            known = MAX_LOG_LEVEL if log_level is None else log_level
            if not 0 <= known <= MAX_LOG_LEVEL:
                raise ValueError(f"timer {name!r}: log level {known} is not within 0 to {MAX_LOG_LEVEL}")
            self._levels[name] = known
            if known <= self.log_level:
                synchronize = self.log_level > 0 and torch.cuda.is_initialized()
                self._timers[name] = Timer(name, synchronize, barrier=self.barrier_with_L1_time and known == 1)
        elif log_level is not None and log_level != known:
            raise ValueError(f"timer {name!r} has log level {known}; it cannot be used with {log_level} too")
        return self._timers[name] if name in self._timers else self._silent.setdefault(name, NullTimer(name))

    def gather(self, names: Sequence[str] | None = None, *, reset: bool = True, barrier: bool = False) -> list[dict]:
        """Return {name: seconds} of each rank, in rank order, for the timers in ``names`` (None: all) that ran since
        the last reset. Collective over the world: one object all-gather, preceded by a barrier if ``barrier``."""
        own = {
            name: timer.elapsed(reset=reset)
            for name, timer in self._timers.items()
            if (names is None or name in names) and (timer.active or timer._elapsed > 0.0)
        }
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return [own]
        if barrier:
            dist.barrier()
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, own)
        return ranks

    def text(
        self, names: Sequence[str] | None = None, normalizer: float = 1.0, reset: bool = True, barrier: bool = False
    ) -> str | None:
        """Return the lines for the log, in the order of ``names``, with milliseconds divided by ``normalizer``; None if
        no timer ran on any rank. Sets ``latest`` to the maximum over ranks by name. Collective, as :meth:`gather`,
        which resets the timers unless ``reset`` is False."""
        ranks = self.gather(names, reset=reset, barrier=barrier)
        order = list(dict.fromkeys(name for rank in ranks for name in rank))
        if names is not None:
            order = [name for name in names if name in order]
        scale = 1000.0 / normalizer
        times = {
            name: [(rank, seconds[name] * scale) for rank, seconds in enumerate(ranks) if name in seconds]
            for name in order
        }
        self.latest = {name: max(ms for _, ms in values) for name, values in times.items()}
        return format_times(times, self.log_option) if times else None

    def log(self, names: Sequence[str] | None = None, rank: int | None = None, *options: Any, **named: Any) -> None:
        """Log :meth:`text`, with its further arguments, at INFO on ``rank`` only (default: the last); nothing if no
        timer ran. Collective: every rank calls it. Resets the timers unless ``reset`` is False."""
        text = self.text(names, *options, **named)
        here, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if text is not None and here == (size - 1 if rank is None else rank):
            logger.info("%s", text)

    def write(self, names: Sequence[str], writer: Any, iteration: int, *options: Any, **named: Any) -> None:
        """Write the seconds of each timer that ran, the maximum over ranks, divided by ``normalizer``, with
        ``writer.add_scalar("<name>-time", seconds, iteration)``; None as ``writer`` writes nothing. Further arguments
        as for :meth:`text`, which resets the timers unless ``reset`` is False. Collective: every rank calls it."""
        self.text(names, *options, **named)
        if writer is not None:
            for name, milliseconds in self.latest.items():
                writer.add_scalar(f"{name}-time", milliseconds / 1000.0, iteration)


def format_times(times: dict[str, list[tuple[int, float]]], option: str) -> str:
    """Return the log text of ``times``, name -> [(rank, milliseconds)], one line per name with minimum and maximum
    ("minmax") or maximum ("max") after a title, or for "all" one line per name and rank. Values have two decimals."""
    if option == "all":
        lines = ["times across ranks (ms):"]
        for name, values in times.items():
            lines.append(f"  {name}:")
            lines += [f"     rank {rank:2d}: {ms:.2f}" for rank, ms in values]
        return "\n".join(lines)
    lines = ["(min, max) time across ranks (ms):" if option == "minmax" else "max time across ranks (ms):"]
    for name, values in times.items():
        smallest, largest = min(ms for _, ms in values), max(ms for _, ms in values)
        shown = f"({smallest:.2f}, {largest:.2f})" if option == "minmax" else f"{largest:.2f}"
        lines.append(f"    {(name + ' ').ljust(NAME_WIDTH, '.')}: {shown}")
    return "\n".join(lines)
