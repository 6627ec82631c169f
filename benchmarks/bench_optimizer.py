#!/usr/bin/env python
"""The optimizer step on one GPU: time, bytes and share of the memory's own rate, for a billion parameters.

    python benchmarks/bench_optimizer.py [--parameters 1e9] [--output benchmarks/results/optimizer.json] [--smoke]

Rows are ways to update the same bf16 model from fp32 gradients: torch's foreach operators (a pass per operator),
torch's fused AdamW on fp32 masters with the rounding of the weights after it, and the kernel with masters as copies, as
16-bit remainders, and with bf16 moments. The least bytes are what each format must read and write once; the limit is
the rate of a memory copy. ``muon`` rows are its element-wise parts, without Newton-Schulz, from bf16 factors.
``step`` is MegatronOptimizer.update: norm, check, clip, update.
``--smoke`` shows on a CPU that it runs; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness.environment import environment
from benchmarks.harness.timing import milliseconds
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.fusions.adam import AdamStep, adam_reference_, choose_adam
from megatron.core.fusions.muon_update import MuonStep, MuonUpdate, choose_muon_update
from megatron.core.fusions.storage import OptimizerEntry, build_storage
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 4096  # matrices of a layer and a vector, as a transformer has them
BETAS, EPS, LR, DECAY = (0.9, 0.95), 1e-8, 3e-4, 0.1


def shapes(parameters: int) -> list[tuple[int, ...]]:
    """Matrices of 14336 x 4096 and vectors of 4096, about ``parameters`` elements."""
    width = WIDTH if parameters >= 10**8 else 64
    matrix = (width * 7 // 2, width)
    return [matrix, (width,)] * max(1, round(parameters / (matrix[0] * matrix[1] + width)))


class State:
    """bf16 weights with the state of one format; everything random."""

    def __init__(self, parameters: int, device: torch.device, *, split: bool, moments: torch.dtype) -> None:
        self.tensors = []
        for shape in shapes(parameters):
            weight = torch.randn(shape, device=device, dtype=torch.bfloat16)
            master = build_storage(weight, torch.bfloat16, split=split)
            master.kept = torch.zeros(shape, device=device, dtype=master.kept_dtype)
            master.refresh()
            first = (1e-3 * torch.randn(shape, device=device)).to(moments)
            second = (1e-6 * torch.rand(shape, device=device)).to(moments)
            gradient = 1e-3 * torch.randn(shape, device=device)
            self.tensors.append(OptimizerEntry(master, gradient, (first, second), LR, DECAY))
        self.step = torch.ones((), device=device)
        self.skip = torch.zeros((), device=device)

    @property
    def elements(self) -> int:
        return sum(each.gradient.numel() for each in self.tensors)

    def least_bytes(self) -> float:
        """Per parameter: gradient read; master, weight and moments read and written (a copy's weight only written)."""
        each = self.tensors[0]
        assert each.storage.kept is not None
        moments = sum(2 * moment.element_size() for moment in each.moments)
        weight = 2 if each.storage.is_live else 4
        return each.gradient.element_size() + 2 * each.storage.kept.element_size() + weight + moments

    def update(self, kernel: Any) -> None:
        """One step of ``kernel`` with a clipping factor."""
        factor = torch.full_like(self.step, 0.9)
        conditions = AdamStep(*BETAS, EPS, True, self.step, self.skip, factor)
        kernel(self.tensors, conditions)

    def foreach(self) -> None:
        """AdamW by torch's foreach operators, a pass over memory each."""
        masters, gradients, firsts, seconds = self._lists()
        torch._foreach_mul_(masters, 1.0 - LR * DECAY)
        torch._foreach_lerp_(firsts, gradients, 1.0 - BETAS[0])
        torch._foreach_mul_(seconds, BETAS[1])
        torch._foreach_addcmul_(seconds, gradients, gradients, 1.0 - BETAS[1])
        denominators = torch._foreach_sqrt(seconds)
        torch._foreach_add_(denominators, EPS)
        torch._foreach_addcdiv_(masters, firsts, denominators, -LR)
        torch._foreach_copy_([each.storage.weight for each in self.tensors], masters)

    def fused(self) -> None:
        """torch's fused AdamW, then the rounding."""
        masters, gradients, firsts, seconds = self._lists()
        torch._fused_adamw_(
            masters, gradients, firsts, seconds, [], [self.step] * len(masters), lr=LR, beta1=BETAS[0],
            beta2=BETAS[1], weight_decay=DECAY, eps=EPS, amsgrad=False, maximize=False,
        )  # fmt: skip
        torch._foreach_copy_([each.storage.weight for each in self.tensors], masters)

    def _lists(self) -> tuple[list[Tensor], ...]:
        moments = list(zip(*(each.moments for each in self.tensors)))
        masters = [each.storage.read() for each in self.tensors]
        return masters, [each.gradient for each in self.tensors], list(moments[0]), list(moments[1])


def muon_parts(state: State, update: MuonUpdate) -> None:
    """Momentum and direction, then masters and weights."""
    step = MuonStep(0.95, True, True, state.skip, torch.full_like(state.step, 0.9))
    directions = update.advance(state.tensors, step)
    factors = [each.storage.weight for each in state.tensors]  # any bf16 values of these shapes
    del directions
    update.apply(state.tensors, factors, [0.2] * len(factors), step)


def full_step(parameters: int, device: torch.device, moments: str) -> tuple[MegatronOptimizer, int]:
    """An optimizer over a bf16 module with gradient buffers, as a run has it."""
    module = nn.ParameterList(torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes(parameters))
    ddp = DistributedDataParallel(None, DistributedDataParallelConfig(grad_reduce_in_fp32=True), module)
    config = OptimizerConfig(lr=LR, bf16=True, adam_beta2=BETAS[1], exp_avg_dtype=moments, exp_avg_sq_dtype=moments)
    for buffer in ddp.grad_buffers:
        buffer.grad_data.normal_(std=1e-3)
    return get_megatron_optimizer(config, [ddp]), sum(parameter.numel() for parameter in module)


def copy_rate(parameters: int, device: torch.device, repeats: int) -> float:
    """Bytes read and written per second by a copy."""
    source = torch.randn(max(parameters // 4, 1024), device=device)
    target = torch.empty_like(source)
    return 8 * source.numel() / milliseconds(partial(target.copy_, source), device, repeats) * 1e3


def measure(parameters: int, device: torch.device, repeats: int) -> dict[str, Any]:
    """Return all rows in ms, and relative to the time of the minimum bytes at the rate of a copy."""
    copied = copy_rate(parameters, device, repeats)
    rows: dict[str, Any] = {}

    def add(name: str, elapsed: float, least: float, elements: int) -> None:
        limit = least * elements / copied * 1e3
        rows[name] = {
            "ms": elapsed, "least_bytes_per_parameter": least, "limit_ms": limit, "of_limit": limit / elapsed,
            "ms_per_billion_parameters": elapsed / elements * 1e9,
        }  # fmt: skip
        share = f"{limit / elapsed:6.1%} of the limit"
        sys.stdout.write(f"{name:<34} {elapsed:9.3f} ms   {least:4.0f} B/parameter   {share}\n")

    wide, half = torch.float32, torch.bfloat16
    for name, split, moments, kernel in (
        ("torch foreach, copies", False, wide, "foreach"), ("torch fused AdamW, copies", False, wide, "fused"),
        ("project, copies", False, wide, None), ("project, remainders", True, wide, None),
        ("project, remainders, bf16 moments", True, half, None), ("plain, remainders", True, wide, adam_reference_),
    ):  # fmt: skip
        state = State(parameters, device, split=split, moments=moments)
        chosen = kernel or choose_adam([each.storage for each in state.tensors])
        run = getattr(state, chosen) if isinstance(chosen, str) else partial(state.update, chosen)
        add(name, milliseconds(run, device, repeats), state.least_bytes(), state.elements)
        if name == "project, copies":
            gradients = [each.gradient for each in state.tensors]
            add("norm", milliseconds(partial(torch._foreach_norm, gradients), device, repeats), 4, state.elements)
            del gradients
        del state, run
    state = State(parameters, device, split=True, moments=wide)
    storages = [each.storage for each in state.tensors]
    for name, update in (("kernels", choose_muon_update(storages)), ("torch operations", MuonUpdate())):
        add(f"muon, {name}", milliseconds(partial(muon_parts, state, update), device, repeats), 26, state.elements)
    del state, storages
    for moments in ("fp32", "bf16"):
        optimizer, elements = full_step(parameters, device, moments)
        least = 4 + (28 if moments == "fp32" else 20)  # the norm reads the gradients too
        add(f"step, remainders, {moments} moments", milliseconds(optimizer.update, device, repeats), least, elements)
        del optimizer
    return {"copy_bytes_per_second": copied, "rows": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, default=1e9)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "optimizer.json")
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU; writes nothing")
    options = parser.parse_args()
    if options.smoke:
        measure(200_000, torch.device("cpu"), 2)
        return 0
    if not torch.cuda.is_available():
        sys.stdout.write("needs a GPU, or --smoke\n")
        return 1
    found = measure(int(options.parameters), torch.device("cuda"), options.repeats)
    result = {"environment": environment(), "parameters": int(options.parameters), **found}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
