#!/usr/bin/env python
"""Whether torch's choice of algorithm for GEMMs is the best there is when the GPU sits at its power limit.

    python benchmarks/bench_gemms.py [--only fc1 ...] [--output benchmarks/results/gemms.json]

The GEMMs of a LLaMA-3-8B layer and the output layer over 8192 tokens: forward, input gradient, weight gradient
added to fp32. For each, cuBLASLt's own suggestions and a grid of tiles, variants and clusters run briefly; the fastest
few and torch then run for ``--seconds`` each, alternating, on random data, because a GPU that has just been idle favors
the first candidate. TFLOP/s are means of two rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness.cublaslt import Gemm
from benchmarks.harness.environment import environment

RESULTS = Path(__file__).resolve().parent / "results" / "gemms.json"
TOKENS = 8192
LAYERS = {
    "qkv": (6144, 4096), "proj": (4096, 4096), "fc1": (28672, 4096), "fc2": (4096, 14336), "output": (128256, 4096),
}  # fmt: skip
"""(output features, input features)."""
SUGGESTIONS, FINALISTS, TURNS, BRIEFLY = 24, 6, 2, 0.012
TILES, VARIANTS, CLUSTERS = (20, 23, 24, 29, 197, 199, 201, 203, 205, 207, 209, 248), range(9), range(2, 6)
"""Tiles of 128 x 128 elements and more; the others are those that suggestions named."""


def gemms(out_features: int, in_features: int) -> dict[str, tuple[Gemm, Callable[[], object]]]:
    """By name, cuBLASLt's GEMM and torch's, in the same memory."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").mul_(shape[-1] ** -0.5).bfloat16()

    x, weight, grad = draw(TOKENS, in_features), draw(out_features, in_features), draw(TOKENS, out_features)
    y, grad_x, total = torch.empty_like(grad), torch.empty_like(x), torch.zeros(weight.shape, device="cuda")
    return {
        "forward": (Gemm(x, weight.t(), y), partial(torch.mm, x, weight.t(), out=y)),
        "input gradient": (Gemm(grad, weight, grad_x), partial(torch.mm, grad, weight, out=grad_x)),
        "weight gradient": (
            Gemm(grad.t(), x, total),
            partial(torch.addmm, total, grad.t(), x, out_dtype=torch.float32, out=total),
        ),
    }


def seconds_per_call(work: Callable[[], object], seconds: float) -> float:
    """Seconds of one of many calls without a pause, over about ``seconds``, a first quarter not counted."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def timed(count: int) -> float:
        start.record()
        for _ in range(count):
            work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / count

    count = max(3, int(seconds / timed(3)))
    timed(max(1, count // 4))
    return timed(count)


def check(name: str, gemm: Gemm, works: tuple[Callable[[], object], Callable[[], object]]) -> None:
    """Both compute the same."""
    results = []
    for work in works:
        gemm.out.zero_()
        work()
        results.append(gemm.out.to(torch.float32, copy=True))
    ours, theirs = results
    if not (ours - theirs).norm() < 0.01 * theirs.norm():
        raise SystemExit(f"{name}: cuBLASLt's result is not torch's")


def measure(name: str, gemm: Gemm, torch_gemm: Callable[[], object], seconds: float) -> dict[str, Any]:
    algorithms = gemm.suggested(SUGGESTIONS)
    first = next(iter(algorithms))
    check(name, gemm, (partial(gemm.run, algorithms[first]), torch_gemm))
    for choice, algorithm in gemm.others(algorithms[first], TILES, VARIANTS, CLUSTERS):
        algorithms.setdefault(choice, algorithm)
    brief = {choice: seconds_per_call(partial(gemm.run, each), BRIEFLY) for choice, each in algorithms.items()}
    finalists = dict.fromkeys([first, *sorted(brief, key=brief.__getitem__)[:FINALISTS]])
    works = {"torch": torch_gemm, **{choice: partial(gemm.run, algorithms[choice]) for choice in finalists}}
    turns = [{key: seconds_per_call(work, seconds) for key, work in works.items()} for _ in range(TURNS)]
    speed = {key: gemm.flops / statistics.mean(turn[key] for turn in turns) / 1e12 for key in works}
    best = max(finalists, key=speed.__getitem__)
    return {
        "name": name, "torch": speed["torch"], "first suggestion": speed[first], "best": speed[best],
        "best tile, variant, cluster": ", ".join(map(str, best)), "algorithms": len(algorithms),
        "TFLOP": gemm.flops / 1e12,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("start it on a machine with a GPU")
    rows = []
    for layer in options.only:
        for kind, (gemm, torch_gemm) in gemms(*LAYERS[layer]).items():
            rows.append(measure(f"{layer}, {kind}", gemm, torch_gemm, options.seconds))
            sys.stdout.write(", ".join(f"{key} {value}" for key, value in rows[-1].items()) + "\n")
    results = {"environment": environment(), "rows": rows}
    options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
