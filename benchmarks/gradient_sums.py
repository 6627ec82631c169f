"""Error of sums of gradients over ranks, by order and precision: ``python benchmarks/gradient_sums.py``.

Gradients are drawn from N(0, 1) plus a common part of 0.1 N(0, 1) (a mean below its noise, as in training) and
rounded to the precision in which it is sent. Sums are made in the order of a ring (one rank after another) or a tree
(pairs), and compared with the sum in fp64 of the same inputs before rounding. The error is the L2 norm of the
difference, relative to the sum. Runs on a CPU; writes benchmarks/results/gradient_sums.json.

    fp32          gradients and partial sums in fp32 (the default)
    bf16 to fp32  sent in bf16, added in fp32 (--grad-reduce-in-bf16 --ddp-reduce-scatter-with-fp32-accumulation)
    bf16          partial sums rounded to bf16 (--grad-reduce-in-bf16)
"""

from __future__ import annotations

import json
import platform
from pathlib import Path

import torch
from torch import Tensor

RESULTS = Path(__file__).resolve().parent / "results" / "gradient_sums.json"
ELEMENTS, RANKS = 65536, (2, 8, 32, 128, 512, 1024)
PRECISIONS = {
    "fp32": (torch.float32, torch.float32),
    "bf16 to fp32": (torch.bfloat16, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
}


def ring(parts: Tensor) -> Tensor:
    """Return the sum of ``parts`` [ranks, n], added one after another in their dtype."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def tree(parts: Tensor) -> Tensor:
    """Return the sum of ``parts`` [ranks, n] of 2^k ranks, added in pairs in their dtype."""
    while len(parts) > 1:
        parts = parts[0::2] + parts[1::2]
    return parts[0]


def error(total: Tensor, exact: Tensor) -> float:
    """Return the L2 norm of the difference, relative to ``exact``."""
    return float((total.double() - exact).norm() / exact.norm())


def main() -> None:
    """Measure all rows and write the result."""
    rows = {}
    for ranks in RANKS:
        generator = torch.Generator().manual_seed(ranks)
        common = 0.1 * torch.randn(ELEMENTS, generator=generator, dtype=torch.float64)
        parts = torch.randn(ranks, ELEMENTS, generator=generator, dtype=torch.float64) + common
        exact, row = parts.sum(0), {}
        for name, (sent, summed) in PRECISIONS.items():
            inputs = parts.to(sent).to(summed)
            row[name] = {"ring": error(ring(inputs), exact), "tree": error(tree(inputs), exact)}
        rows[ranks] = row
    record = {
        "command": "python benchmarks/gradient_sums.py", "device": f"CPU ({platform.machine()})",
        "torch": torch.__version__, "elements": ELEMENTS, "rows": rows,
    }  # fmt: skip
    RESULTS.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
