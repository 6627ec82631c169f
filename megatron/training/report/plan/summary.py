"""Tables and records of planned layouts. Torch-free."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.observe.plan_comparison import Prediction
from megatron.training.report.advice import LIBRARIES_GIB, peak_memory
from megatron.training.report.plan.cluster import Cluster, find_gpu, kind_of_device
from megatron.training.report.plan.goodput import FAILURES, RANK_NOISE, expected_maximum, goodput
from megatron.training.report.plan.search import TIE, TIE_OF_EXPERTS, Layout
from megatron.training.report.plan.step_time import predict_step

logger = logging.getLogger(__name__)

Record = dict[str, object]


def straggler_factor(ranks: int) -> float:
    """Return the expected time of the slowest of ``ranks`` ranks relative to an average rank."""
    return 1 + RANK_NOISE * expected_maximum(ranks)


def layout_record(layout: Layout, cluster: Cluster, vocab_size: int, tokens: float, price: float | None) -> Record:
    """Return the prediction of a layout; with ``tokens`` > 0 also days, GPU-hours and, with ``price``, cost."""
    time, cfg = layout.time, layout.cfg
    seconds = time.seconds * straggler_factor(cluster.world_size)
    per_step = cfg.training.global_batch_size * cfg.data.seq_length
    record: Record = {
        "flags": layout.flags,
        "memory_gib": layout.memory / 2**30,
        "seconds_per_step": seconds,
        "tokens_per_second_per_gpu": per_step / seconds / cfg.world_size,
        "bubble": time.parts.get("bubble", 0.0) / time.seconds,
        "exposed_communication": time.exposed / time.seconds,
        "parts_seconds": {name: value for name, value in time.parts.items() if value},
    }
    model = cfg.describe(vocab_size)
    tflops = model.flops_per_sample * cfg.training.global_batch_size / seconds / cfg.world_size / 1e12
    record |= {"tflops_per_gpu": tflops, "mfu": tflops / cluster.gpu.peak}
    if tokens:
        hours = tokens / per_step * seconds / 3600
        record |= {"days": hours / 24, "gpu_hours": hours * cfg.world_size}
        if price is not None:
            record["cost"] = price * hours * cfg.world_size
    return record


_COLUMNS = {
    "tokens_per_second_per_gpu": ("tok/s/GPU", ",.0f"),
    "tflops_per_gpu": ("TFLOP/s", ".0f"),
    "mfu": ("MFU", ".1%"),
    "memory_gib": ("GiB", ".1f"),
    "bubble": ("bubble", ".1%"),
    "exposed_communication": ("comm", ".1%"),
    "days": ("days", ",.2f"),
    "gpu_hours": ("GPU-h", ",.0f"),
    "cost": ("cost", ",.0f"),
    "measured_seconds": ("measured s", ".3f"),
}


def layout_table(records: Sequence[Record], ties: int) -> str:
    """Return one line of numbers and one of flags per layout. Marks the first ``ties`` layouts if several."""
    names = [name for name in _COLUMNS if any(record.get(name) is not None for record in records)]
    lines = ["   " + "".join(f"{_COLUMNS[name][0]:>12}" for name in names)]
    for index, record in enumerate(records):
        cells = "".join(
            f"{format(record[name], _COLUMNS[name][1]) if record.get(name) is not None else '-':>12}" for name in names
        )
        lines += [f"{index + 1:>2} {cells}{'   tie' if ties > 1 and index < ties else ''}", f"     {record['flags']}"]
    return "\n".join(lines)


class GoodputRow(NamedTuple):
    """Goodput at one of the published failure rates."""

    failures: str
    hours_between: float
    save_every_seconds: float
    goodput: float


def goodput_rows(cluster: Cluster, stall: float, restart: float) -> list[GoodputRow]:
    """Return goodput at each published failure rate."""
    rows = []
    for name, rate in FAILURES.items():
        best = goodput(cluster.world_size, rate, stall, restart)
        rows.append(GoodputRow(name, best.failure_hours, best.interval, best.share))
    return rows


def prediction_rows(cfg: PretrainConfig, vocab_size: int, samples: int) -> Iterator[tuple[str, str]]:
    """Yield rows of the dry run for nodes of eight H100s and H200s: whether the layout fits, and the predicted time of
    an iteration and of ``samples`` samples. Yields nothing for runs not in 16 bits, whose speed was not measured."""
    if not (cfg.model.bf16 or cfg.model.fp16):
        return
    need = peak_memory(cfg, vocab_size) / 2**30
    for name in ("H100", "H200"):
        gpu = find_gpu(name)
        cluster = Cluster(gpu, -(-cfg.world_size // 8), min(cfg.world_size, 8))
        seconds = predict_step(cfg, cluster, vocab_size).seconds * straggler_factor(cfg.world_size)
        hours = seconds * samples / cfg.training.global_batch_size / 3600
        room = gpu.memory_gib - LIBRARIES_GIB
        fits = f"{'fits' if need <= room else 'does NOT fit'}, {need:.1f} of {room:g} GiB"
        cost = f"{hours / 24:,.3g} days, {hours * cfg.world_size:,.3g} GPU-hours"
        yield f"predicted on {name}", f"{fits}; {seconds:.3g} s per iteration, {cost}"


def predict_run(cfg: PretrainConfig, device_name: str, vocab_size: int) -> Prediction | None:
    """Return the predicted step of a run on the GPUs of this process's kind; None for unknown kinds, and for runs not
    in 16 bits, whose speed was not measured."""
    gpu = kind_of_device(device_name)
    if gpu is None or not vocab_size or not (cfg.model.bf16 or cfg.model.fp16):
        return None
    per_node = min(int(os.environ.get("LOCAL_WORLD_SIZE", 8)), cfg.world_size)
    try:
        time = predict_step(cfg, Cluster(gpu, -(-cfg.world_size // per_node), per_node), vocab_size)
    except Exception as error:  # training must not depend on the planner
        logger.debug("no predicted step time for these settings (%s: %s)", type(error).__name__, error)
        return None
    factor = straggler_factor(cfg.world_size)
    parts = {name: seconds * factor for name, seconds in time.parts.items() if seconds}
    experts = cfg.model.num_moe_experts is not None
    return Prediction(gpu.name, time.seconds * factor, parts, TIE_OF_EXPERTS if experts else TIE)
