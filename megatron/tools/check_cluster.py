"""Measure a cluster before training: ``torchrun ... tools/check_cluster.py [sizes of the layout]``.

Prints bus bandwidth (GB/s: bytes / seconds x 2 (n - 1) / n for all-reduce, (n - 1) / n for other collectives, 1 for
p2p) and latency per group of the layout and per link between ranks of a node and between nodes, the GEMM rate of each
rank, and settings of the hosts. Names each group, link or rank below --tolerance x the median of its kind. Exit code 1
if there is one, if versions differ between ranks, or if a measurement exceeds --deadline."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.core.config.commands import as_typed, tool_parser
from megatron.core.config.errors import UserError
from megatron.core.groups.process_groups import RankGrid
from megatron.training.checks import cluster

SIZES = {"tensor": "tp", "context": "cp", "pipeline": "pp", "expert": "ep"}


def _parser() -> argparse.ArgumentParser:
    parser = tool_parser(__doc__)
    for name, axis in SIZES.items():
        flag = f"--{name}-parallel-size" if name == "context" else f"--{name}-model-parallel-size"
        parser.add_argument(flag, dest=axis, type=int, default=1, metavar="N", help=f"{name}-parallel size")
    parser.add_argument("--size-mb", type=float, metavar="N", help="largest message (256 on GPUs, 4 on CPUs)")
    parser.add_argument("--tolerance", type=float, default=0.8, help="lowest share of the median rate")
    parser.add_argument("--deadline", type=float, default=60.0, metavar="S", help="seconds per measurement")
    parser.add_argument("--json", metavar="FILE", help="write all values to this file")
    return parser


def _check(options: argparse.Namespace) -> None:
    if options.json and not Path(options.json).absolute().parent.is_dir():
        raise UserError(f"--json {options.json}: its folder does not exist; create it")
    if not 0 < options.tolerance < 1:
        raise UserError(f"--tolerance {options.tolerance}: must lie between 0 and 1")
    for name in ("deadline", "size_mb"):
        value = getattr(options, name)
        if value is not None and not 0 < value < 1e6:
            raise UserError(f"--{name.replace('_', '-')} {value}: must be positive and below a million")
    if not dist.is_initialized() and not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        raise UserError(as_typed("there is one process only; use torchrun --nproc_per_node=N tools/check_cluster.py"))


def main(argv: Sequence[str]) -> int:
    """Measure, print the table on rank 0 and return the exit code. Raises UserError for bad flags."""
    options = _parser().parse_args(argv)
    _check(options)
    started = not dist.is_initialized()
    gpus = torch.cuda.is_available() and (started or dist.get_backend() == "nccl")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    if started:
        dist.init_process_group("nccl" if gpus else "gloo", timeout=timedelta(seconds=10 * options.deadline))
    try:
        return _measure(options, device)
    finally:
        if started:
            dist.destroy_process_group()


def _measure(options: argparse.Namespace, device: torch.device) -> int:
    num_bytes = int((options.size_mb or (256 if device.type == "cuda" else 4)) * 1e6)
    check = cluster.ClusterCheck(device, num_bytes, options.deadline)
    grid = RankGrid.from_world(check.world_size, **{axis: getattr(options, axis) for axis in SIZES.values()})
    facts, versions = check.gather(cluster.host_facts()), check.gather(cluster.versions())
    results = check.gemm()
    for axis, rank_lists in cluster.layout_groups(grid).items():
        results += check.collectives(axis, rank_lists)
    nodes, places = cluster.node_groups([fact["host"] for fact in facts])
    for kind, rank_lists in (("inside nodes", nodes), ("between nodes", places)):
        if max(map(len, rank_lists)) > 1:
            links = check.links(kind, rank_lists)
            results += [*links, *cluster.rank_rates(links)]
    skews = check.clock_skews()
    slow = cluster.outliers(results, options.tolerance)
    differences = cluster.differing_versions(versions)
    if check.rank == 0:
        print(_table(results))
        for rank, fact in enumerate(facts):
            print(f"rank {rank}: " + ", ".join(f"{k} {v}" for k, v in fact.items()) + f", clock {skews[rank]:+.4f} s")
        for result, median in slow:
            hosts = sorted({facts[rank]["host"] for rank in result.ranks})
            print(
                f"SLOW {result.kind} {cluster.ranks_text(result.ranks)} ({', '.join(hosts)}): {result.rate:.3g}, median"
                f" {median:.3g}"
            )
        print(*(f"DIFFERENT {sentence}" for sentence in differences), sep="\n", end="\n" if differences else "")
        print("not ok" if slow or differences else f"ok: all rates above {options.tolerance:g} x the median")
        if options.json:
            values = {
                "results": [dataclasses.asdict(result) for result in results],
                "slow": [dataclasses.asdict(result) for result, _ in slow],
                "hosts": facts,
                "versions": versions,
                "clock_skew_seconds": skews,
                "different": differences,
            }
            Path(options.json).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    return int(bool(slow or differences))


def _table(results: Sequence[cluster.Result]) -> str:
    lines = [f"{'measurement':<36}{'count':>6}{'median':>10}{'lowest':>10}  {'of ranks':<16}{'latency us':>10}"]
    for kind in dict.fromkeys(result.kind for result in results):
        rows = [result for result in results if result.kind == kind]
        lowest = min(rows, key=lambda result: result.rate)
        median = statistics.median(result.rate for result in rows)
        latency = statistics.median(result.latency for result in rows)
        unit = "TFLOP/s" if kind == "GEMM" else "GB/s"
        lines.append(
            f"{kind + ', ' + unit:<36}{len(rows):>6}{median:>10.3g}{lowest.rate:>10.3g}  "
            f"{cluster.ranks_text(lowest.ranks):<16}" + (f"{latency:>10.1f}" if latency else "")
        )
    return "\n".join(lines)
