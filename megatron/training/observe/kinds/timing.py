"""Records of measured times at log points."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.training.observe.metrics import TIMING_FILE, Record
from megatron.training.observe.records import RecordKind, RunInfo


def _timing_tags(record: Record, run: RunInfo) -> Mapping[str, float | None]:
    cfg = run.logging
    values = {"iteration-time": record["seconds_per_iteration"]}
    if cfg.log_throughput:
        names = {"tokens-per-second": "tokens_per_second", "throughput": "tflops_per_device", "mfu": "mfu"}
        values |= {tag: record.get(name) for tag, name in names.items()}
    if cfg.log_memory_to_tensorboard:
        values |= record["memory"]
    if cfg.log_timers_to_tensorboard:
        values |= {f"{name}-time": ms / 1000.0 for name, ms in record.get("timers_ms", {}).items()}
    return values


TIMING = RecordKind(
    name="timing",
    fields={
        "iterations": "iterations since the last log point",
        "seconds_per_iteration": "mean seconds, without evaluation and saving",
        "tokens_per_second": "tokens that the loss counts, of all devices",
        "tflops_per_device": "model TFLOP/s per device; null for a task that does not count FLOPs",
        "mfu": "model TFLOP/s over the dense peak; null for unknown devices",
        "world_size": "ranks",
        "device": "name of the device",
        "memory": "bytes by name: memory_bytes",
        "parts_seconds": "seconds per iteration: forward_backward and update on the device, data_wait and device_wait"
        " on the host",
        "timers_ms": "milliseconds per iteration by timer, the largest over ranks",
    },
    file=TIMING_FILE,
    flush="write",
    tags=_timing_tags,
)
TIMERS = RecordKind(
    name="timers",
    fields={"text": "table of the timers of all ranks, several lines"},
    file=None,
    console=lambda record, run: [record["text"]],
)
KINDS = (TIMING, TIMERS)
