"""Measured times and memory at log points."""

from __future__ import annotations

from megatron.core.timers import Timers
from megatron.training.hooks.base import Hook
from megatron.training.observe.kinds.timing import TIMERS, TIMING
from megatron.training.observe.kinds.train import INTERVAL
from megatron.training.observe.records import Record, RecordKind, RunInfo
from megatron.training.observe.throughput import memory_bytes


class TimingHook(Hook):
    """Emits the table of timers and the record of measured times. With timers collective: use it on every rank."""

    kinds = (INTERVAL,)

    def __init__(self, timers: Timers) -> None:
        self.timers = timers

    def on_start(self, run: RunInfo) -> None:
        self.run = run

    def on_record(self, kind: RecordKind, record: Record) -> None:
        run, timers, number = self.run, self.timers, record["iterations"]
        text = timers.text(normalizer=number) if timers.log_level > 0 else None
        if not run.is_log_rank:
            return
        if text is not None:
            run.emit(TIMERS, {"text": text})
        values = {
            "iterations": number,
            "seconds_per_iteration": record["seconds"] / number,
            **{name: record[name] for name in ("tokens_per_second", "tflops_per_device", "mfu")},
            "world_size": run.world_size,
            "device": run.device_name,
            "memory": memory_bytes(run.device),
        }
        values |= {"parts_seconds": record["parts_seconds"]} if record["parts_seconds"] else {}
        run.emit(TIMING, values | ({"timers_ms": timers.latest} if timers.latest else {}))
