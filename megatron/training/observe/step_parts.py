"""Parts of an iteration's time, measured without waiting for the device.

On CUDA the marks are events of the current stream, which are read at log points; on a CPU they are clock readings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Union

if TYPE_CHECKING:
    import torch

Mark = Union[float, "torch.cuda.Event"]
"""Time of a point of the computation: seconds, or an event that the device records."""


class StepMarks(NamedTuple):
    """Times of one iteration."""

    forward: Mark
    """Start of the first forward pass."""
    update: Mark
    """End of the last backward pass."""
    end: Mark
    data_wait: float
    """Host seconds spent waiting for batches."""
    device_wait: float
    """Host seconds spent waiting for the device; close to 0 if the host is slower than the device."""


def mark(is_cuda: bool) -> Mark:
    """Return the current point of the device's work; does not wait for it."""
    if not is_cuda:
        return time.perf_counter()
    import torch  # imported late: reading metrics needs no torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _is_reached(mark: Mark) -> bool:
    return isinstance(mark, float) or mark.query()


def _seconds(start: Mark, end: Mark) -> float:
    if isinstance(start, float):
        assert isinstance(end, float)
        return end - start
    assert not isinstance(end, float)
    return start.elapsed_time(end) / 1000.0


def mean_parts(steps: Sequence[StepMarks | None]) -> dict[str, float]:
    """Return mean seconds per iteration: ``forward_backward`` and ``update`` on the device, ``data_wait`` and
    ``device_wait`` on the host. Iterations without marks, and those that the device has not finished, do not count."""
    marks = [step for step in steps if step is not None and _is_reached(step.end)]
    if not marks:
        return {}
    sums = {
        "forward_backward": sum(_seconds(step.forward, step.update) for step in marks),
        "update": sum(_seconds(step.update, step.end) for step in marks),
        "data_wait": sum(step.data_wait for step in marks),
        "device_wait": sum(step.device_wait for step in marks),
    }
    return {name: seconds / len(marks) for name, seconds in sums.items()}
