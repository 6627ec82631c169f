"""Wall-clock values of a log interval: a record for all sinks, and the hook that gathers timers."""

import time
from dataclasses import dataclass
from typing import Any

from megatron.core.timers import Timers
from megatron.training.hooks.base import Hook, RunInfo
from megatron.training.hooks.console import stdout_logger
from megatron.training.hooks.interval import IntervalSummary
from megatron.training.observe.throughput import Throughput, memory_bytes
from megatron.training.train_state import TrainState


@dataclass(frozen=True)
class Clock:
    """Source of wall-clock values."""

    throughput: Throughput
    timers: Timers
    device: str = "cpu"

    def record(self, summary: IntervalSummary) -> dict[str, Any]:
        """Return the ``timing.jsonl`` record of one log interval: counters, seconds per iteration, tokens per second,
        TFLOP/s per device and MFU (None if unknown), `memory_bytes` now, and, if timers ran, their latest milliseconds
        (maximum over ranks). Reads the wall clock; writes nothing."""
        rate = self.throughput.rate(summary.flops, summary.num_tokens, summary.elapsed)
        record: dict[str, Any] = {
            "kind": "timing",
            "iteration": summary.iteration,
            "consumed_samples": summary.consumed_samples,
            "time": time.time(),
            "iterations": len(summary.steps),
            "seconds_per_iteration": summary.elapsed_per_iteration,
            "tokens_per_second": rate.tokens_per_second,
            "tflops_per_device": rate.tflops,
            "mfu": rate.mfu,
            "world_size": self.throughput.world_size,
            "device": self.throughput.device_name,
        }
        record["memory"] = memory_bytes(self.device)
        if self.timers.latest:
            record["timers_ms"] = self.timers.latest
        return record


class TimersHook(Hook):
    """At each log point, gathers the time per iteration of every timer and prints it on the last rank. Use on every
    rank, before the sinks: the gathering is collective."""

    def __init__(self, timers: Timers):
        self.timers = timers
        self.prints = False

    def on_train_start(self, run: RunInfo) -> None:
        self.prints = run.is_log_rank

    def on_log(self, state: TrainState, summary: IntervalSummary) -> None:
        text = self.timers.text(normalizer=len(summary.steps))
        if text is not None and self.prints:
            stdout_logger().info("%s", text)
