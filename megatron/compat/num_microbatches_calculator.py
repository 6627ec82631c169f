"""Micro-batches of the current global batch, for programs that ask without saying where they are.

A thin front with state over the pure functions of ``core.schedules.batch_size``: a schedule and the consumed samples.
The training program itself asks the pure functions; for entry scripts a hook moves this state on after every step."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

from megatron.core.schedules import batch_size as batch_schedule
from megatron.core.schedules.batch_size import BatchConfig

logger = logging.getLogger(__name__)


@dataclass
class BatchSettings:
    """The settings of a batch schedule without the rest of a run's."""

    micro_batch_size: int
    global_batch_size: int
    rampup_batch_size: list[int] | None = None
    decrease_batch_size_if_needed: bool = False
    step_batch_size_schedule: str | None = None
    seq_length: int = 1


@dataclass(frozen=True)
class _Position:
    settings: BatchConfig
    data_parallel_size: int
    consumed_samples: int = 0


class _Current:
    """Global, because autograd's threads, which recompute layers on GPUs, have separate contexts."""

    position: _Position | None = None


def init_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: list[int] | None = None,
    global_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    data_parallel_size: int | None = None,
    decrease_batch_size_if_needed: bool = False,
    step_batch_size_schedule: str | None = None,
    seq_length: int | None = None,
) -> None:
    """Set up the schedule of this process, at the first sample. ``rank`` only decides who logs it (0);
    ``step_batch_size_schedule`` and ``seq_length`` (for token counts in it) are as the flags.

    Raises:
        ValueError: a size is missing, or micro-batches and data-parallel ranks cannot share a batch; the nearest sizes
            are named.
        RuntimeError: it is set up already (``reconfigure_…`` replaces it)."""
    if _Current.position is not None:
        raise RuntimeError(
            "the number of micro-batches is already set up: call reconfigure_num_microbatches_calculator instead"
        )
    if global_batch_size is None or micro_batch_size is None or data_parallel_size is None:
        raise ValueError("pass global_batch_size, micro_batch_size and data_parallel_size")
    settings = BatchSettings(
        micro_batch_size,
        global_batch_size,
        rampup_batch_size,
        decrease_batch_size_if_needed,
        step_batch_size_schedule,
        seq_length or 1,
    )
    follow_batch_schedule(settings, data_parallel_size)
    if rank == 0:
        logger.info("number of micro-batches: %d", get_num_microbatches())


def reconfigure_num_microbatches_calculator(*arguments: Any, **named: Any) -> None:
    """Replace the schedule by another one, at its first sample: arguments as of ``init_…``."""
    destroy_num_microbatches_calculator()
    init_num_microbatches_calculator(*arguments, **named)


def follow_batch_schedule(settings: BatchConfig, data_parallel_size: int, consumed_samples: int = 0) -> None:
    """Same for any object with the fields of a batch schedule, such as a run's whole configuration."""
    batch_schedule.check_batch_sizes(settings, data_parallel_size)
    _Current.position = _Position(settings, data_parallel_size, consumed_samples)


def destroy_num_microbatches_calculator() -> None:
    """Forget the schedule."""
    _Current.position = None


unset_num_microbatches_calculator = destroy_num_microbatches_calculator


def update_num_microbatches(consumed_samples: int, consistency_check: bool = True, verbose: bool = False) -> None:
    """Move to the global batch that starts after ``consumed_samples`` samples. ``consistency_check`` is accepted: every
    size of the schedule was checked when it was set up. ``verbose`` logs a batch size that changes."""
    before = get_current_global_batch_size()
    _Current.position = replace(_position(), consumed_samples=consumed_samples)
    if verbose and get_current_global_batch_size() != before:
        logger.info("global batch size: %d -> %d", before, get_current_global_batch_size())


def get_num_microbatches() -> int:
    """Micro-batches of the current global batch on each data-parallel rank."""
    at = _position()
    return batch_schedule.num_microbatches(at.settings, at.consumed_samples, at.data_parallel_size)


def get_current_global_batch_size() -> int:
    """Samples of the current global batch, as scheduled."""
    at = _position()
    return batch_schedule.global_batch_size(at.settings, at.consumed_samples)


def get_current_running_global_batch_size() -> int:
    """Return the batch size that is run: rounded down to whole micro-batches if ``decrease_batch_size_if_needed``."""
    at = _position()
    return batch_schedule.running_global_batch_size(at.settings, at.consumed_samples, at.data_parallel_size)


def get_micro_batch_size() -> int:
    """Samples of one micro-batch."""
    return _position().settings.micro_batch_size


def _position() -> _Position:
    """Raises RuntimeError before ``init_num_microbatches_calculator``."""
    position = _Current.position
    if position is None:
        raise RuntimeError(
            "the number of micro-batches is not set up: call init_num_microbatches_calculator(...) first (the training "
            "program does it before it builds the model)"
        )
    return position
