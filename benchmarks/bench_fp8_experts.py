#!/usr/bin/env python
"""Layers of experts in bf16 and fp8: how wide experts must be for fp8 to save time.

    python benchmarks/bench_fp8_experts.py [--only mixtral ...] [--output benchmarks/results/fp8_experts.json]

fc1 and fc2 of one layer on one GPU, as training computes them: output, input gradient, weight gradient added to fp32,
with all casts of rows (tensorwise scales) and the read of the number of rows. Casts of weights, once per step, are
timed separately. Experts have between half and one and a half times the mean number of rows. About 40 s on an H200.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness.environment import environment
from megatron.core.fp8.experts import ExpertGemms, ExpertProducts
from megatron.core.fp8.storage import Epoch
from megatron.core.fusions.fp8_cast import E5M2
from megatron.core.tensor_parallel.gemms import accumulate_product
from megatron.core.tensor_parallel.grouped_linear import GROUPED, GroupedProducts

RESULTS = Path(__file__).resolve().parent / "results" / "fp8_experts.json"
SHAPES = {
    "mixtral": (8, 16384, 4096, 14336), "wide-4096": (8, 16384, 4096, 4096), "wide-2048": (16, 32768, 4096, 2048),
    "narrow-1408": (64, 49152, 2048, 1408), "qwen3": (128, 65536, 2048, 768),
}  # fmt: skip
"""(experts, rows, hidden size, width of gated experts)."""
WARMUP, REPEATS = 2, 5
LARGEST_ERROR = 0.1


def draw_ends(experts: int, rows: int) -> torch.Tensor:
    """Return ends int32 [g] of uneven groups that share ``rows``."""
    parts = torch.rand(experts, generator=torch.Generator().manual_seed(0)) + 0.5
    ends = (parts.cumsum(0) / parts.sum() * rows).int()
    ends[-1] = rows
    return ends.cuda()


class Layer:
    """One linear layer of experts, with the memory of its gradients."""

    def __init__(self, experts: int, rows: int, out: int, into: int, products: str) -> None:
        self.x, self.grad = (torch.randn(rows, width, device="cuda").bfloat16() for width in (into, out))
        weight = torch.randn(experts * out, into, device="cuda").mul_(into**-0.5).bfloat16()
        self.weight, self.products = weight.view(experts, out, into), GROUPED
        self.total = torch.zeros(self.weight.shape, device="cuda")
        if products == "fp8":
            self.casts = ExpertGemms(
                [weight], Epoch(), E5M2, accumulate_product, groups=(), weight_groups=(), num_experts=experts
            )
            self.products: GroupedProducts = ExpertProducts(GROUPED, self.casts)

    def run(self, ends: torch.Tensor) -> dict[str, float]:
        """Return the milliseconds of forward, input gradient (with the cast of dY) and weight gradient."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        ends = ends.clone()  # a new tensor, whose numbers of rows the host has not read
        marks[0].record()
        x = self.products.pack_input(self.x, ends, for_backward=True)
        self.y = self.products.output(x.first, self.weight, ends)
        marks[1].record()
        grad = self.products.pack_gradient(self.grad, ends, for_input=True, for_weight=True)
        self.dx = self.products.input_gradient(grad.first, self.weight, ends)
        marks[2].record()
        self.products.weight_gradient(grad.second, x.second, ends, self.total)
        marks[3].record()
        marks[3].synchronize()
        names = ("forward", "input gradient", "weight gradient")
        return {name: start.elapsed_time(end) for name, start, end in zip(names, marks, marks[1:])}

    def cast_weights(self) -> float:
        """Return the milliseconds of the casts of all weights."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.casts.epoch.advance()
        start.record()
        self.casts.weight_copies(self.weight[0], columns=False)
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


def measure(name: str) -> dict[str, Any]:
    experts, rows, hidden, width = SHAPES[name]
    ends, row = draw_ends(experts, rows), {"name": name}
    flops = 0.0
    for layer, (out, into) in {"fc1": (2 * width, hidden), "fc2": (hidden, width)}.items():
        flops += 6.0 * rows * out * into
        kept = {}
        for kind in ("bf16", "fp8"):
            torch.manual_seed(1)
            built = Layer(experts, rows, out, into, kind)
            times = [built.run(ends) for _ in range(WARMUP + REPEATS)][WARMUP:]
            for part in times[0]:
                row[f"{layer} {part}, {kind}, ms"] = statistics.median(seconds[part] for seconds in times)
            if kind == "fp8":
                row[f"{layer} casts of weights, ms"] = min(built.cast_weights() for _ in range(3))
            kept[kind] = [built.y, built.dx, built.total]
        for one, other in zip(*kept.values()):
            error = float((one.float() - other.float()).norm() / one.float().norm())
            if not error < LARGEST_ERROR:
                raise SystemExit(f"{name}, {layer}: fp8 differs from bf16 by {error:.3f}")
        del kept, built
    for kind in ("bf16", "fp8"):
        total = sum(value for key, value in row.items() if f", {kind}, " in key)
        row[f"{kind}, TFLOP/s"] = flops / total / 1e9
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("start it on a machine with a GPU")
    rows = []
    for name in options.only:
        rows.append(measure(name))
        sys.stdout.write(", ".join(f"{key} {value}" for key, value in rows[-1].items()) + "\n")
    results = {"environment": environment(), "rows": rows}
    options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
