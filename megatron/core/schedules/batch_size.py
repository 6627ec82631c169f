"""Global batch size, number of micro-batches and training length as pure functions of consumed samples.

Three kinds of schedules exist: a constant size; a linear ramp ``--rampup-batch-size start increment samples``, whose
increments are spread evenly over the ramp's samples; and a step schedule by tokens, ``--step-batch-size-schedule
"0:16 2.4B:320"``. All are converted to a list of :class:`Plateau`. The functions keep no state, so that any rank can
evaluate the schedule at any sample."""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

from megatron.core.config.errors import UserError

_STEPS = "--step-batch-size-schedule"
_MAX_STEPS = 10_000  # plateaus of a ramp
_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


class BatchConfig(Protocol):
    """Configuration fields of the batch size schedule; ``PretrainConfig`` has all of them."""

    micro_batch_size: int
    global_batch_size: int
    rampup_batch_size: list[int] | None
    step_batch_size_schedule: str | None
    decrease_batch_size_if_needed: bool
    seq_length: int


class ScheduleError(UserError):
    """Batch size flag that is invalid or contradicts others; ``reason`` is the message without the flag."""

    def __init__(self, flag: str, reason: str) -> None:
        super().__init__(f"{flag}: {reason}")
        self.reason = reason


@dataclass(frozen=True)
class Plateau:
    """Batch size ``size`` for iterations that start at sample ``first_sample`` or later, until the next plateau."""

    first_sample: int
    size: int


def parse_token_count(text: str) -> int:
    """Parse a token count, e.g. ``"2.4B"`` -> 2400000000; the suffixes K, M, B, T are powers of 1000. Raises
    ScheduleError for other text, or if the count is not an integer."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)([KMBT]?)", text.strip().upper())
    if not match:
        raise ScheduleError(_STEPS, f"{text!r} is not a token count such as 0, 500M or 2.4B")
    count = Fraction(match[1]) * _SUFFIXES[match[2]]
    if count.denominator != 1:
        raise ScheduleError(_STEPS, f"{text!r} is not a whole number of tokens")
    return int(count)


def parse_step_schedule(text: str, seq_length: int) -> list[Plateau]:
    """Parse ``"0:16 2.4B:320"``: pairs (separated by spaces or commas) of threshold in tokens and batch size in
    samples. A size applies from the first sample at which the consumed tokens reach its threshold. Raises ScheduleError
    for invalid entries, a first threshold other than 0, or thresholds that do not increase."""
    flag = f"{_STEPS} {text!r}"
    plateaus: list[Plateau] = []
    previous = -1
    for entry in text.replace(",", " ").split():
        threshold, colon, size_text = entry.partition(":")
        if not colon or not re.fullmatch("0*[1-9][0-9]{0,8}", size_text):
            raise ScheduleError(flag, f"{entry!r} is not TOKENS:SIZE with a positive whole size below 1 billion")
        tokens = parse_token_count(threshold)
        if not plateaus and tokens:
            raise ScheduleError(flag, f"the first threshold is {threshold}, it must be 0")
        if tokens <= previous:
            raise ScheduleError(flag, f"thresholds must rise, but {threshold} follows {previous}")
        previous = tokens
        plateaus.append(Plateau(-(-tokens // seq_length), int(size_text)))
    if not plateaus:
        raise ScheduleError(flag, 'no entry; give for example "0:16 2.4B:320"')
    return plateaus


def ramp_schedule(rampup: Sequence[int], final_size: int) -> list[Plateau]:
    """Return the plateaus of ``--rampup-batch-size start increment samples``: plateau j has size start + j * increment
    and starts when ``consumed >= j * samples / number of increments``. Raises ScheduleError for numbers that do not fit
    each other, or more than 10,000 steps."""
    flag = f"--rampup-batch-size {' '.join(map(str, rampup))}"
    if len(rampup) != 3:
        raise ScheduleError(flag, "needs three numbers, START INCREMENT SAMPLES")
    start, increment, samples = (int(value) for value in rampup)
    if start <= 0 or increment <= 0 or samples < 0:
        raise ScheduleError(flag, "start and increment must be positive and samples not negative")
    steps, rest = divmod(final_size - start, increment)
    if steps < 0 or rest:
        raise ScheduleError(
            flag,
            f"the way from {start} to --global-batch-size {final_size} is not a whole number of "
            f"increments of {increment}; nearest start: {final_size - max(steps, 0) * increment}",
        )
    if steps > _MAX_STEPS:
        raise ScheduleError(flag, f"makes {steps} steps; give a larger increment, for {_MAX_STEPS} at most")
    return [Plateau(-(-j * samples // steps) if steps else 0, start + j * increment) for j in range(steps + 1)]


def batch_size_plateaus(config: BatchConfig) -> list[Plateau]:
    """Return the batch size schedule of ``config``, plateaus by ascending first sample from 0: step schedule, ramp or
    constant size. Among plateaus with equal first sample the last one applies. Raises ScheduleError for invalid flags,
    for both kinds of schedule together, or, except with a step schedule, without a positive global batch size."""
    if config.step_batch_size_schedule:
        if config.rampup_batch_size:
            raise ScheduleError("--rampup-batch-size", "excludes --step-batch-size-schedule: give one")
        return parse_step_schedule(config.step_batch_size_schedule, config.seq_length)
    if not config.global_batch_size or config.global_batch_size < 0:
        raise ScheduleError(f"--global-batch-size {config.global_batch_size}", "give a positive size")
    if config.rampup_batch_size:
        return ramp_schedule(config.rampup_batch_size, config.global_batch_size)
    return [Plateau(0, config.global_batch_size)]


def check_batch_sizes(config: BatchConfig, data_parallel_size: int) -> None:
    """Raise UserError for a batch size that is not divisible by micro-batch size x data-parallel size; with
    --decrease-batch-size-if-needed it must only be at least as large."""
    unit = config.micro_batch_size * data_parallel_size
    for size in dict.fromkeys(plateau.size for plateau in batch_size_plateaus(config)):
        if size < unit or (size % unit and not config.decrease_batch_size_if_needed):
            near = max(size // unit, 1) * unit
            raise UserError(
                f"global batch size {size} is not divisible by --micro-batch-size {config.micro_batch_size} x "
                f"data-parallel size {data_parallel_size}; nearest valid sizes: {near} and {near + unit}"
            )


def global_batch_size(config: BatchConfig, consumed_samples: int) -> int:
    """Return the size in samples of the global batch that starts after ``consumed_samples`` samples."""
    return _size_at(batch_size_plateaus(config), consumed_samples)


def running_global_batch_size(config: BatchConfig, consumed_samples: int, data_parallel_size: int) -> int:
    """Return :func:`global_batch_size`, with --decrease-batch-size-if-needed rounded down to full micro-batches."""
    return _lowered(config, global_batch_size(config, consumed_samples), data_parallel_size)


def num_microbatches(config: BatchConfig, consumed_samples: int, data_parallel_size: int) -> int:
    """Return the micro-batches per data-parallel rank after ``consumed_samples``, rounded down."""
    size = running_global_batch_size(config, consumed_samples, data_parallel_size)
    return size // (config.micro_batch_size * data_parallel_size)


def train_iters_from_samples(
    config: BatchConfig, train_samples: int, data_parallel_size: int = 1, consumed_samples: int = 0
) -> int:
    """Return the full iterations from ``consumed_samples`` to ``train_samples``; a remainder is not trained on."""
    iterations = 0
    for first, size, count in _runs(config, data_parallel_size, consumed_samples):
        if count is None or first + count * size > train_samples:
            return iterations + max(train_samples - first, 0) // size
        iterations += count
    raise AssertionError("the last run of a schedule has no end")


def samples_from_iters(config: BatchConfig, iterations: int, data_parallel_size: int = 1) -> int:
    """Return the number of samples that the first ``iterations`` iterations consume."""
    for first, size, count in _runs(config, data_parallel_size):
        if count is None or iterations <= count:
            return first + iterations * size
        iterations -= count
    raise AssertionError("the last run of a schedule has no end")


def iters_from_samples(config: BatchConfig, consumed_samples: int, data_parallel_size: int = 1) -> Fraction:
    """Return the inverse of :func:`samples_from_iters`; a fraction within an iteration."""
    iterations = 0
    for first, size, count in _runs(config, data_parallel_size):
        if count is None or consumed_samples <= first + count * size:
            return iterations + Fraction(consumed_samples - first, size)
        iterations += count
    raise AssertionError("the last run of a schedule has no end")


def _size_at(plateaus: list[Plateau], consumed_samples: int) -> int:
    index = bisect_right(plateaus, consumed_samples, key=lambda plateau: plateau.first_sample)
    return plateaus[index - 1].size


def _lowered(config: BatchConfig, size: int, data_parallel_size: int) -> int:
    unit = config.micro_batch_size * data_parallel_size
    return size // unit * unit if config.decrease_batch_size_if_needed else size


def _runs(config: BatchConfig, data_parallel_size: int, consumed: int = 0) -> Iterator[tuple[int, int, int | None]]:
    """Yield (first sample, batch size, iterations; None for the last run) after ``consumed`` samples. A batch that
    begins before a plateau keeps the earlier size."""
    plateaus = batch_size_plateaus(config)
    for boundary in [plateau.first_sample for plateau in plateaus[1:]]:
        if boundary > consumed:
            size = _lowered(config, _size_at(plateaus, consumed), data_parallel_size)
            count = -(-(boundary - consumed) // size)
            yield consumed, size, count
            consumed += count * size
    yield consumed, _lowered(config, plateaus[-1].size, data_parallel_size), None
