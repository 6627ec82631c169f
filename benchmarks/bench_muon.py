#!/usr/bin/env python
"""Newton-Schulz of the matrices of a LLaMA-3-8B layer on one GPU: time, TFLOP/s and error of four variants.

    python benchmarks/bench_muon.py [--output benchmarks/results/muon.json] [--smoke]

Variants: the iteration on X and on its Gram matrix, each with full GEMMs and with symmetric products (half the FLOP of
products whose result is symmetric). TFLOP/s counts the FLOP that a variant needs. Errors are of bf16, relative to the
same iteration in fp64 on a smaller matrix of the same aspect ratio: of the result, and the singular values' range.
``batch`` compares the bits of small and large batches. ``--smoke`` runs on a CPU; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness.environment import environment
from benchmarks.harness.timing import milliseconds
from megatron.core.fusions.symmetric_product import symmetric_product, symmetric_product_reference
from megatron.core.optimizer.newton_schulz import COEFFICIENTS, iterate, orthogonalize

ROOT = Path(__file__).resolve().parents[1]
Product = Callable[..., Tensor]
RESTART = 2
LAYERS = 32
MATRICES = {  # name: (matrices per layer, rows, columns), rows <= columns
    "query, output": (2, 4096, 4096),
    "key, value": (2, 1024, 4096),
    "gate and up": (1, 4096, 28672),
    "down": (1, 4096, 14336),
}
STEPS = COEFFICIENTS["quintic"].take(5)


def iterate_gram(x: Tensor, steps: list[tuple[float, float, float]], product: Product) -> Tensor:
    """Return the result of :func:`iterate` by the Gram form: A = X X^T; P = a I + b A + c A A; Q <- P Q;
    A <- P A P; X <- Q X after every second step. Rounding makes small eigenvalues of A negative, and P amplifies them:
    three steps on one Gram matrix diverge in bf16 for matrices of low rank."""
    for start in range(0, len(steps), RESTART):
        part = steps[start : start + RESTART]
        gram = product(x, x, None, 1.0, 1.0)
        # Q = scale I + rest: the unit matrix is not rounded
        scale, rest = 1.0, None
        for index, (a, b, c) in enumerate(part):
            polynomial = product(gram, gram, gram, c, b)  # P - a I
            if rest is None:
                rest = polynomial
            else:
                rest = product(polynomial, rest, scale * polynomial + a * rest, 1.0, 1.0)
            scale *= a
            if index + 1 < len(part):
                gram = product(polynomial, gram, gram, 1.0, a)
                gram = product(polynomial, gram, gram, 1.0, a)
        assert rest is not None
        x = torch.baddbmm(x, rest, x, beta=scale)
    return x


VARIANTS = {
    "plain": (iterate, symmetric_product_reference),
    "plain, symmetric": (iterate, symmetric_product),
    "gram": (iterate_gram, symmetric_product_reference),
    "gram, symmetric": (iterate_gram, symmetric_product),
}


def normed(matrices: Tensor) -> Tensor:
    return matrices / matrices.norm(dim=(-2, -1), keepdim=True)


def flops(name: str, rows: int, columns: int) -> float:
    """Return the FLOP of one matrix, counted by running the variant with a product that counts."""
    method, product = VARIANTS[name]
    half = 0.5 if product is symmetric_product else 1.0
    total = 0.0

    def count(a: Tensor, b: Tensor, add: Tensor | None, alpha: float, beta: float) -> Tensor:
        nonlocal total
        total += half * 2 * rows**2 * (columns if a.shape[-1] == 2 else rows)
        return a.new_zeros(1, 1, 1)

    method(torch.ones(1, 1, 2, dtype=torch.float64), STEPS, count)
    applications = len(STEPS) if method is iterate else -(-len(STEPS) // RESTART)
    return total + applications * 2 * rows**2 * columns


def errors(name: str, rows: int, columns: int, device: torch.device) -> dict[str, float]:
    """Return the relative error of bf16, and the range of singular values, of a matrix with 256 rows."""
    torch.manual_seed(0)
    method, product = VARIANTS[name]
    x = torch.randn(1, 256, 256 * columns // rows, dtype=torch.float64, device=device)
    exact = orthogonalize(x, STEPS, "highest")
    found = method(normed(x.float()).to(torch.bfloat16), STEPS, product).double()
    values = torch.linalg.svdvals(found[0])
    return {
        "error": float((found - exact).norm() / exact.norm()), "smallest": float(values.min()),
        "largest": float(values.max()),
    }  # fmt: skip


def measure(scale: int, device: torch.device, repeats: int) -> dict[str, Any]:
    """Return all rows, for matrices of 1 / ``scale`` of the width."""
    rows: dict[str, Any] = {}
    for name, (method, product) in VARIANTS.items():
        layer = 0.0
        for matrix, (count, m, n) in MATRICES.items():
            x = normed(torch.randn(1, m // scale, n // scale, device=device)).to(torch.bfloat16)
            elapsed = milliseconds(partial(method, x, STEPS, product), device, repeats)
            rate = flops(name, m // scale, n // scale) / elapsed / 1e9
            rows[f"{name}: {matrix}"] = {"ms": elapsed, "tflops": rate, **errors(name, m, n, device)}
            layer += count * elapsed
            sys.stdout.write(f"{name + ': ' + matrix:<34} {elapsed:9.3f} ms {rate:7.1f} TFLOP/s\n")
        rows[name] = {"ms_per_layer": layer, "ms_per_model": LAYERS * layer}
        sys.stdout.write(f"{name:<34} {LAYERS * layer:9.1f} ms for {LAYERS} layers\n")
    return rows


def batch_bits(device: torch.device) -> dict[str, bool]:
    """Return, by shape, whether a batch of one matrix gives the bits of larger batches."""
    found = {}
    for rows, columns in ((64, 64), (256, 256), (512, 1024), (256, 1024), (768, 2048)):
        x = torch.randn(8, rows, columns, device=device)
        single = torch.cat([orthogonalize(each, STEPS, "medium") for each in x.split(1)])
        found[f"{rows} x {columns}"] = all(
            torch.equal(orthogonalize(x[:size], STEPS, "medium"), single[:size]) for size in (2, 3, 8)
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "muon.json")
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU; writes nothing")
    options = parser.parse_args()
    if not options.smoke and not torch.cuda.is_available():
        sys.stdout.write("needs a GPU, or --smoke\n")
        return 1
    device = torch.device("cpu" if options.smoke else "cuda")
    rows = measure(32 if options.smoke else 1, device, 2 if options.smoke else options.repeats)
    bits = batch_bits(device)
    sys.stdout.write(f"same bits in a batch: {bits}\n")
    if not options.smoke:
        result = {"environment": environment(), "rows": rows, "same_bits_in_batches": bits}
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
