"""Measure the time of an operation on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def milliseconds(
    work: Callable[[], object], device: torch.device, repeats: int, before: Callable[[], object] | None = None
) -> float:
    """Median of single calls, after three to warm up. ``before`` each of them, untimed, comes what clears a cache."""
    times = []
    for _ in range(repeats + 3):
        if before is not None:
            before()
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            begun = time.perf_counter()
            work()
            times.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(times[3:])
