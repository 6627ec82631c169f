"""Tensor-parallel collectives by NCCL and copy engines: separately, and their cost for concurrent computation.

    torchrun --nproc-per-node 4 benchmarks/bench_copy_engines.py        # on GPUs of one host

Hidden states of LLaMA-3-8B, 8192 tokens over the ranks, bf16. *ms*: a single collective. *overlapped*: a series of
GEMMs (the second of the feed-forward network, a rank's shard) or attentions, with and without concurrent
collectives, in ms per operation of the series; the collectives last about as long as the series. Writes
benchmarks/results/copy_engines.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness.environment import environment
from megatron.core.groups.async_handle import AsyncHandle
from megatron.core.groups.copy_engines.choice import start_copy_engines
from megatron.core.groups.process_groups import Group
from megatron.core.tensor_parallel.collectives import begin_all_gather, begin_reduce_scatter

RESULTS = Path(__file__).resolve().parent / "results" / "copy_engines.json"
TOKENS, HIDDEN, WIDTH, HEADS, GROUPS, CHANNELS = 8192, 4096, 14336, 32, 8, 128
SERIES, UNDER_WAY = 20, 2

Start = Callable[[], Callable[[], Tensor]]
"""Starts a collective; the returned function finishes it."""


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    """Median over ``repeats`` of the time that ``work`` takes on the first rank's GPU, ranks in step."""
    times = []
    for _ in range(repeats + 2):
        dist.barrier()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    median = torch.tensor([statistics.median(times[2:])], device="cuda")
    dist.broadcast(median, 0)  # decisions that follow from it must be the same everywhere
    return median.item()


def collectives(groups: dict[str, Group], x: Tensor, full: Tensor) -> dict[str, Start]:
    """By name, of every kind of group."""
    starts: dict[str, Start] = {}
    for kind, group in groups.items():
        starts[f"all-gather, {kind}"] = partial(_begin, begin_all_gather, x, group)
        starts[f"reduce-scatter, {kind}"] = partial(_begin, begin_reduce_scatter, full, group)
    return starts


def _begin(begin: Callable[[Tensor, Group], AsyncHandle], x: Tensor, group: Group) -> Callable[[], Tensor]:
    return begin(x, group).wait


def largest_differences(starts: dict[str, Start]) -> dict[str, float]:
    """Between copy engines and NCCL, which sums in bf16."""
    differences = {}
    for name in ("all-gather", "reduce-scatter"):
        if f"{name}, copy engines" in starts:
            ours, theirs = (starts[f"{name}, {kind}"]()().float() for kind in ("copy engines", "NCCL"))
            differences[name] = (ours - theirs).abs().max().item()
    return differences


def series_overlapped(piece: Callable[[], object], start: Start | None, repeats: int, count: int) -> float:
    """Return ms per operation of a series, with ``count`` concurrent collectives, at most two in flight."""

    def work() -> None:
        under_way: list[Callable[[], Tensor]] = []
        started = 0
        for index in range(SERIES):
            while start is not None and started < count * (index + 1) // SERIES:
                if len(under_way) == UNDER_WAY:
                    under_way.pop(0)()
                under_way.append(start())
                started += 1
            piece()
        for finish in under_way:
            finish()

    return milliseconds(work, repeats) / SERIES


def _at_once(start: Start) -> Tensor:
    return start()()


def measure(repeats: int, device: torch.device) -> list[dict[str, object]]:
    size, rank = dist.get_world_size(), dist.get_rank()
    groups = {"NCCL": Group("world", tuple(range(size)), rank, dist.group.WORLD)}
    if (engines := start_copy_engines("world", dist.group.WORLD, range(size), rank)) is not None:
        groups["copy engines"] = replace(groups["NCCL"], engines=engines)
    x = torch.randn(TOKENS // size, 1, HIDDEN, device=device, dtype=torch.bfloat16)
    full = torch.randn(TOKENS, 1, HIDDEN, device=device, dtype=torch.bfloat16)
    wide = torch.randn(TOKENS, WIDTH // size, device=device, dtype=torch.bfloat16)
    weight = torch.randn(HIDDEN, WIDTH // size, device=device, dtype=torch.bfloat16)
    query = torch.randn(1, HEADS // size, TOKENS, CHANNELS, device=device, dtype=torch.bfloat16)
    key = torch.randn(1, GROUPS // size, TOKENS, CHANNELS, device=device, dtype=torch.bfloat16)
    pieces: dict[str, Callable[[], object]] = {
        "GEMM": lambda: F.linear(wide, weight),
        "attention": lambda: F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True),
    }
    starts = collectives(groups, x, full)
    differences = largest_differences(starts)
    rows: list[dict[str, object]] = []
    separate = {name: milliseconds(partial(_at_once, start), repeats) for name, start in starts.items()}
    plain = {name: series_overlapped(piece, None, repeats, 0) for name, piece in pieces.items()}
    for name, start in starts.items():
        row: dict[str, object] = {"name": name, "ms": separate[name]}
        row["GB/s"] = (size - 1) / size * full.nbytes / separate[name] / 1e6
        for kind, piece in pieces.items():
            count = max(1, round(0.8 * SERIES * plain[kind] / separate[name]))
            row[f"{kind} ms"] = plain[kind]
            row[f"{kind} overlapped ms"] = series_overlapped(piece, start, repeats, count)
            row[f"collectives during {kind}"] = count
        row["largest difference"] = differences.get(name.split(",")[0])
        rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if "RANK" not in os.environ or not torch.cuda.is_available():
        parser.error("start it with torchrun on a machine with GPUs")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    torch.manual_seed(dist.get_rank())
    rows = measure(options.repeats, device)
    if dist.get_rank() == 0:
        results = {"environment": environment(), "rows": rows}
        options.output.write_text(json.dumps(results, indent=1) + "\n")
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
