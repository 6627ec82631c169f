"""Records of measured times at log points."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.training.observe.kinds.train import RATES
from megatron.training.observe.metrics import TIMING_FILE
from megatron.training.observe.page.charts import Chart, Line, Section, slug
from megatron.training.observe.records import Record, RecordKind, RunInfo
from megatron.training.observe.run_folder import Run, Series, number

PARTS = {
    "parts_seconds/forward_backward": "forward and backward",
    "parts_seconds/update": "update and reduction",
    "parts_seconds/data_wait": "host waits for data",
    "parts_seconds/device_wait": "host waits for device",
}


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


def _read_timing(run: Run, record: Record) -> None:
    run.add_numbers(record)
    run.spend("iterations", number(record, "iterations") * number(record, "seconds_per_iteration"))
    run.device, run.world_size = str(record.get("device", "")), int(number(record, "world_size"))


def speeds(run: Run) -> dict[str, tuple[str, str]]:
    """Return (name of the figure, title of the chart) of each measured rate; TFLOP/s and MFU are rates of GPUs."""
    rates = {"tokens_per_second": ("tokens/s", "tokens per second")}
    if run.device != "CPU":
        rates |= {"tflops_per_device": ("TFLOP/s per GPU", "TFLOP/s per GPU"), "mfu": ("MFU", "MFU")}
    return rates


def speed_charts(run: Run) -> list[Chart]:
    """Return charts of tokens/s and TFLOP/s if recorded, then of step time with its parts, and memory (GiB)."""
    charts = []
    for key, (_, title) in speeds(run).items():
        if key in run.timing and key != "mfu":  # proportional to TFLOP/s
            charts.append(Chart(f"chart-{slug(key)}", title, [Line(title, run.timing[key])], from_zero=True))
    lines = [Line("iteration", run.timing["seconds_per_iteration"])] if "seconds_per_iteration" in run.timing else []
    lines += [Line(name, run.timing[key]) for key, name in PARTS.items() if key in run.timing]
    charts.append(Chart("chart-seconds", "seconds per iteration", lines, from_zero=True, cut_spikes=True))
    names = {
        name: name[7:].removeprefix("mem-").removesuffix("-bytes") for name in run.timing if name.endswith("-bytes")
    }
    memory = [
        Line(short_name, Series(run.timing[name].x, [num_bytes / 2**30 for num_bytes in run.timing[name].y]))
        for name, short_name in names.items()
    ]
    charts.append(Chart("chart-memory", "memory, GiB", memory, from_zero=True))
    return charts


TIMING = RecordKind(
    name="timing",
    fields={
        "iterations": "iterations since the last log point",
        "seconds_per_iteration": "mean seconds, without evaluation and saving",
        **RATES,
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
    read=_read_timing,
    page=lambda run: [Section("speed", "Speed and memory", speed_charts(run), position=20)],
)
TIMERS = RecordKind(
    name="timers",
    fields={"text": "table of the timers of all ranks, several lines"},
    file=None,
    console=lambda record, run: [record["text"]],
)
KINDS = (TIMING, TIMERS)
