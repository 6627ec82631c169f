"""Documents of different lengths: dynamic against static context parallelism and packing, simulated and measured.

    python benchmarks/bench_variable_lengths.py                                    # simulated, 64 ranks, no torch
    python benchmarks/bench_variable_lengths.py --draw docs/guides/variable_lengths.svg
    torchrun --nproc-per-node 2 benchmarks/bench_variable_lengths.py --measure github:dynamic
    torchrun --nproc-per-node 8 benchmarks/bench_variable_lengths.py --measure github:dynamic --json FILE

Lengths are log-normal with the percentiles of two public corpora: GitHub (source files: a long tail) and CommonCrawl
(web pages: shorter). Simulated times use the planner's costs of a 7B model. ``--measure CORPUS:METHOD`` trains a few
steps (1.2B on GPUs) with lengths up to 32,768 and prints tokens per second. On CPUs (lengths up to 4,096) it also
prints the idle share (1 minus the mean over the ranks of the CPU time of a global batch, divided by the slowest rank's)
and tokens per second of the slowest rank's CPU time, the speed with a core per rank and free communication. CPU time
does not contain waiting, so that ranks may share cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from megatron.core.datasets.varlen_dataset import LogNormalLengths
from megatron.core.schedules.variable_lengths import CostModel, Plan, Ranks, plan_batch, simulate_plan

LONGEST = 131_072
CORPORA = {
    "github": LogNormalLengths.of_percentiles(900, 16_000, LONGEST),
    "commoncrawl": LogNormalLengths.of_percentiles(600, 4_000, LONGEST),
}
LIMIT = 16_384
COST = CostModel(token=1.0, square=1 / 50_000, exchange=0.06, step=64.0)
"""In tokens of a 7B model's linear layers (6 x 6.5e9 FLOPs): attention 12 x 4096 x 32 / 2 FLOPs per pair at 0.65 of
their speed; 256 KiB of keys and values per token three times at 2,000 FLOPs per byte, over 32 layers."""
METHODS = ("packing", "static", "dynamic")


def draw_lengths(corpus: LogNormalLengths, count: int, seed: int, longest: int) -> list[int]:
    """Return lengths of samples, at most ``longest``."""
    return [min(length, longest) for length in corpus.draw(count, seed).tolist()]


def select_ranks(method: str, count: int, longest: int) -> Ranks:
    """Return the ranks of a method. ``packing``: one rank holds any sample; ``static``: all samples on the ranks that
    hold the longest one; ``dynamic``: each on as many as it needs. All have the same memory per rank but packing."""
    static = 1
    while static * LIMIT < longest:
        static *= 2
    return {
        "packing": Ranks(count, longest, 1, 1),
        "static": Ranks(count, LIMIT, static, static),
        "dynamic": Ranks(count, LIMIT),
    }[method]


def simulated(corpus: LogNormalLengths, count: int, batch: int) -> Iterator[tuple[str, float, float, float]]:
    """Yield (method, tokens per time and rank, idle share, imbalance), means over ten global batches."""
    for method in METHODS:
        rates, idle, imbalance = [], [], []
        for seed in range(10):
            plan = plan_batch(draw_lengths(corpus, batch, seed, LONGEST), select_ranks(method, count, LONGEST), COST)
            simulation = simulate_plan(plan)
            rates.append(sum(plan.lengths) / simulation.duration / count)
            idle.append(max(0.0, simulation.idle))
            imbalance.append(plan.imbalance)
        yield method, *map(statistics.mean, (rates, idle, imbalance))


def draw(plan: Plan, path: Path) -> None:
    """Write a picture of ``plan``: a bar per step and rank. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "plan"  # the same file every time
    simulation, colors = simulate_plan(plan), {1: "#4c78a8", 2: "#54a24b", 4: "#e8b23a", 8: "#e45756"}
    figure, axes = plt.subplots(figsize=(10, 0.45 * len(plan.ranks) + 1.3))
    for rank, steps in enumerate(plan.ranks):
        for start, step in zip(simulation.starts[rank], steps):
            color, length = colors[step.size], plan.time(step)
            axes.barh(rank, length, left=start, height=0.92, color=color, edgecolor="white", linewidth=0.8)
            text = f"{plan.tokens(step):,} tokens" if len(step.samples) == 1 else f"{len(step.samples)} samples"
            axes.text(start + length / 2, rank, text, ha="center", va="center", fontsize=6, color="white")
    axes.set(yticks=range(len(plan.ranks)), yticklabels=[f"rank {rank}" for rank in range(len(plan.ranks))])
    axes.set_xlabel("modeled time, in tokens of the linear layers")
    axes.set_title(f"{len(plan.lengths)} documents, imbalance {plan.imbalance:.1%}", fontsize=9)
    axes.invert_yaxis()
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in colors.values()]
    labels = [f"{size} ranks" if size > 1 else "1 rank" for size in colors]
    axes.legend(handles, labels, loc="lower right", ncols=4, fontsize=7, bbox_to_anchor=(1.0, 1.0))
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


class Measured(NamedTuple):
    """Figures of one method on one corpus."""

    tokens_per_second: float
    """On CPUs of the slowest rank's CPU time."""
    planned_imbalance: float
    planned_idle: float
    """Idle share of the plans, if the modeled times were right."""
    measured_idle: float | None
    """Idle share in CPU time; None on GPUs."""

    def __str__(self) -> str:
        text = f"{self.tokens_per_second:12,.0f} tokens/s   planned imbalance {self.planned_imbalance:.1%}"
        return text if self.measured_idle is None else f"{text}   idle {self.measured_idle:.1%}"


def measure(corpus: str, method: str, world: int, on_gpu: bool) -> Measured:
    """Train a few steps with mock documents of ``corpus``; return the figures, without the first three steps."""
    import torch

    from megatron.training.arguments import parse_args
    from megatron.training.data.planned_rows import PlannedRows
    from megatron.training.observe.metrics import PlanFigures
    from megatron.training.run import run
    from megatron.training.tasks.gpt import GPTTask

    longest, scale = (32_768, 1.0) if on_gpu else (4096, 1 / 8)
    lengths, limit, iterations = CORPORA[corpus], longest // world, 12 if on_gpu else 8
    model = "--num-layers 4 --hidden-size 128 --num-attention-heads 4"
    if on_gpu:
        model = "--num-layers 16 --hidden-size 2048 --num-attention-heads 16 --swiglu --bf16 --recompute-granularity"
        model += " full --recompute-method uniform --recompute-num-layers 1"
    distribution = {"p50": lengths.median * scale, "max_seq_len": longest}
    p95 = {"github": 16_000, "commoncrawl": 4_000}[corpus] * scale
    flags = {
        "packing": ["--max-seqlen-per-dp-cp-rank", str(longest)],
        "static": ["--context-parallel-size", str(world)],
        "dynamic": ["--hybrid-context-parallel", "--max-seqlen-per-dp-cp-rank", str(limit)],
    }[method]
    argv = [
        *model.split(), *flags, "--seq-length", str(longest), "--max-position-embeddings", str(longest),
        "--position-embedding-type", "rope", "--micro-batch-size", "1", "--global-batch-size", "64", "--mock-data",
        "--varlen-mock-dataset-config-json", json.dumps({**distribution, "p95": p95}), "--use-varlen-dataset",
        "--tokenizer-type", "NullTokenizer", "--vocab-size", "32000" if on_gpu else "256", "--lr", "1e-4",
        "--train-iters", str(iterations), "--eval-iters", "0", "--hidden-dropout", "0", "--attention-dropout", "0",
        "--distributed-backend", "nccl" if on_gpu else "gloo", "--use-distributed-optimizer",
    ]  # fmt: skip
    seconds: list[float] = []
    busy: list[float] = []
    idle: list[tuple[float, float]] = []
    plans: list[PlanFigures] = []

    class TimedRows(PlannedRows):
        def split(self, *arguments: object) -> dict[str, object]:
            if on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter())
            busy.append(time.thread_time())
            if len(busy) == iterations and not on_gpu:  # now, because the run ends its process groups
                idle.append(idle_share(busy[3:]))
            work = super().split(*arguments)  # type: ignore[arg-type]
            plans.append(self.figures)  # type: ignore[arg-type]
            return work

    class Timed(GPTTask):
        def make_batches(self) -> TimedRows:
            return TimedRows(self.cfg, self.description())

    run(parse_args(argv), Timed)
    plans, elapsed = plans[3:-1], seconds[-1] - seconds[3]
    tokens = sum(plan.tokens for plan in plans)
    imbalance = statistics.mean(plan.imbalance for plan in plans)
    planned = statistics.mean(1 - 1 / (1 + plan.imbalance) for plan in plans)
    share, elapsed = idle[0] if idle else (None, elapsed)
    return Measured(tokens / elapsed, imbalance, planned, share)


def idle_share(clock: Sequence[float]) -> tuple[float, float]:
    """Return the mean idle share of global batches, and the CPU time of the slowest rank of each, summed, from this
    rank's CPU time at their starts, [batches + 1]. Collective."""
    import torch
    import torch.distributed as dist

    times = torch.tensor(clock, dtype=torch.float64).diff()
    every = [torch.zeros_like(times) for _ in range(dist.get_world_size())]
    dist.all_gather(every, times)
    by_rank = torch.stack(every)
    return float((1 - by_rank.mean(0) / by_rank.amax(0)).mean()), float(by_rank.amax(0).sum())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2048, help="documents per global batch")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="write a picture of a plan for 8 ranks")
    parser.add_argument("--measure", choices=[f"{corpus}:{method}" for corpus in CORPORA for method in METHODS],
                        metavar="CORPUS:METHOD", help="train on these ranks: github:dynamic, ...")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="with --measure: add the figures to this file")
    args = parser.parse_args(argv)
    if args.draw:
        lengths = draw_lengths(CORPORA["github"], 48, 260, LONGEST)
        draw(plan_batch(lengths, Ranks(8, LIMIT), COST), args.draw)
        return 0
    if args.measure:
        import torch

        corpus, method = args.measure.split(":")
        world = int(os.environ.get("WORLD_SIZE", "1"))
        measured = measure(corpus, method, world, torch.cuda.is_available())
        if os.environ.get("RANK", "0") == "0":
            print(f"{corpus:12} {method:8} {measured}")
            if args.json:
                found = json.loads(args.json.read_text()) if args.json.exists() else {}
                found[f"{args.measure}, {world} ranks"] = measured._asdict()
                args.json.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    print(f"{'corpus':12} {'method':8} {'tokens/time':>11} {'idle':>7} {'imbalance':>9}   ({args.ranks} ranks)")
    for name, corpus in CORPORA.items():
        for method, rate, idle, imbalance in simulated(corpus, args.ranks, args.batch):
            print(f"{name:12} {method:8} {rate:11.3f} {idle:7.1%} {imbalance:9.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
