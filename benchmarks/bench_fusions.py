#!/usr/bin/env python
"""The operations between the GEMMs on one GPU: torch itself, torch.compile, our kernels, the memory's limit.

    python benchmarks/bench_fusions.py [--only swiglu ...] [--output benchmarks/results/fusions.json] [--smoke]
    python benchmarks/bench_fusions.py --only norm --output /tmp/norms.json

Shapes are from a LLaMA-3-8B layer over 8192 tokens in bf16. The limit is the time to read and write required bytes
once, at 4.2 TB/s; each figure is the median of repeated calls, the second-level cache overwritten before each.
Backward is autograd's, sums of gradients that meet included. ``--smoke`` shows on a CPU that it runs; with
TRITON_INTERPRET=1 the kernels run too, in Triton's interpreter. Its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness.environment import environment
from benchmarks.harness.timing import milliseconds
from megatron.core.fusions.activation_kernels import GateTraits, gated_triton, squared_relu_triton
from megatron.core.fusions.activations import squared_relu, swiglu
from megatron.core.fusions.column_sum import ColumnSum, column_sum_plain, column_sum_triton
from megatron.core.fusions.dropout_add import Draw, dropout_add_triton
from megatron.core.fusions.embedding_gradient import add_rows_triton
from megatron.core.fusions.residual_norm import NormTraits, normalize_plain, normalize_triton
from megatron.core.fusions.rope import rotary_reference
from megatron.core.fusions.split_rotary import (
    split_heads,
    split_heads_triton,
    split_rotary_plain,
    split_rotary_triton,
)
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.random.philox import DropoutStream
from megatron.core.tensor_parallel.embedding import look_up
from megatron.core.tensor_parallel.linear import LinearTraits

ROOT = Path(__file__).resolve().parents[1]
BYTES_PER_SECOND = 4.2e12
RMS, LAYER = NormTraits(1e-5, False, 0.0), NormTraits(1e-5, True, 0.0)


@dataclass(frozen=True)
class Sizes:
    tokens: int = 8192
    hidden: int = 4096
    ffn: int = 14336
    groups: int = 8
    heads_per_group: int = 4
    channels: int = 128
    wide: int = 16384
    vocab: int = 128256


TINY = Sizes(4, 16, 24, 2, 2, 8, 32, 10)


@dataclass(frozen=True)
class Operation:
    """One row. Functions take the inputs and give one tensor or several; None: there is no such form."""

    inputs: tuple[Tensor, ...]
    eager: Callable[..., Any]
    formula: Callable[..., Any] | None
    """Input of torch.compile: only plain operations."""
    kernel: Callable[..., Any] | None
    forward_elements: int
    backward_elements: int
    """Read or written, 2 bytes each."""


def norms(sizes: Sizes, random: Callable[..., Tensor]) -> Iterator[tuple[str, Operation]]:
    def alone(normalize: Callable[..., Any], traits: NormTraits, x: Tensor, weight: Tensor) -> Tensor:
        return normalize(x, None, weight, None, traits)[1]

    def with_stream(normalize: Callable[..., Any], x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        stream, normed = normalize(x, None, weight, None, RMS)
        return stream.view_as(stream), normed

    def with_branch(normalize: Callable[..., Any], x: Tensor, branch: Tensor, weight: Tensor) -> Any:
        return normalize(x, branch, weight, None, RMS)

    def layer_norm(normalize: Callable[..., Any], x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor) -> Any:
        return normalize(x, branch, weight, bias, LAYER)

    def forms(function: Callable[..., Any], *args: Any) -> tuple[Callable[..., Any], ...]:
        forms = (normalize_plain, normalize_plain, normalize_triton)
        return tuple(partial(function, normalize, *args) for normalize in forms)

    t, h = sizes.tokens, sizes.hidden
    x, branch, weight, bias = random(t, 1, h), random(t, 1, h), random(h), random(h)
    yield "rms_norm, final", Operation((x, weight), *forms(alone, RMS), 2 * t * h, 3 * t * h)
    yield "rms_norm and stream", Operation((x, weight), *forms(with_stream), 2 * t * h, 4 * t * h)
    yield "add and rms_norm", Operation((x, branch, weight), *forms(with_branch), 4 * t * h, 4 * t * h)
    yield "add and layer_norm", Operation((x, branch, weight, bias), *forms(layer_norm), 4 * t * h, 4 * t * h)
    heads = random(t, 1, sizes.groups * sizes.heads_per_group, sizes.channels)
    inputs = heads, random(sizes.channels)
    yield "rms_norm of heads", Operation(inputs, *forms(alone, RMS), 2 * heads.numel(), 3 * heads.numel())
    wide = random(t // 4, 1, sizes.wide)
    inputs = wide, random(sizes.wide)
    yield "rms_norm, wide", Operation(inputs, *forms(alone, RMS), 2 * wide.numel(), 3 * wide.numel())


def activations(sizes: Sizes, random: Callable[..., Tensor]) -> Iterator[tuple[str, Operation]]:
    def formula(packed: Tensor) -> Tensor:
        gate, up = packed.chunk(2, dim=-1)
        return F.silu(gate) * up

    size = sizes.tokens * sizes.ffn
    packed, single = random(sizes.tokens, 1, 2 * sizes.ffn), random(sizes.tokens, 1, sizes.ffn)
    gate = partial(gated_triton, traits=GateTraits(1.0))
    yield "swiglu", Operation((packed,), swiglu, formula, gate, 3 * size, 5 * size)
    yield "squared_relu", Operation((single,), squared_relu, squared_relu, squared_relu_triton, 2 * size, 3 * size)
    gelu = partial(F.gelu, approximate="tanh")
    yield "gelu", Operation((single,), gelu, gelu, None, 2 * size, 3 * size)


def rotary(sizes: Sizes, random: Callable[..., Tensor]) -> Iterator[tuple[str, Operation]]:
    packed = random(sizes.tokens, 1, sizes.groups, sizes.heads_per_group + 2, sizes.channels)
    angles = torch.outer(torch.arange(sizes.tokens), 500000.0 ** -torch.linspace(0, 1, sizes.channels // 2))
    tables = [table.to(packed.device)[:, None, None] for table in (angles.cos(), angles.sin())]
    narrow = [table.to(packed.dtype) for table in tables]  # as the plain form casts them

    def formula(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = split_heads(packed)
        return rotary_reference(query, *narrow), rotary_reference(key, *narrow), value

    def of(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda packed: function(packed, *tables, False)

    size = packed.numel()
    forms = of(split_rotary_plain), formula, of(split_rotary_triton)
    yield "split and rotary", Operation((packed,), *forms, 2 * size, 2 * size)
    heads = random(sizes.tokens, 1, sizes.groups * sizes.heads_per_group, 3, sizes.channels)
    yield "split", Operation((heads,), split_heads, split_heads, split_heads_triton, 0, 2 * heads.numel())


def lookups(sizes: Sizes, random: Callable[..., Tensor]) -> Iterator[tuple[str, Operation]]:
    """With the addition to an fp32 ``main_grad``, whose rows are read and written where an id occurs."""
    weight = random(sizes.vocab, sizes.hidden)
    total = torch.zeros_like(weight, dtype=torch.float32)
    weight.main_grad = total  # type: ignore[attr-defined]
    weight.grad_ready = torch.zeros((), device=total.device, requires_grad=True)  # type: ignore[attr-defined]

    def add_to_total(grad: Tensor) -> None:
        total.add_(grad)

    def dense(ids: Tensor, weight: Tensor) -> Tensor:
        seen = weight.view_as(weight)
        seen.register_hook(add_to_total)
        return F.embedding(ids, seen)

    def ours(ids: Tensor, weight: Tensor) -> Tensor:
        return look_up(weight, ids, None, LinearTraits(SINGLE_PROCESS.tp), add_rows_triton)

    generator = torch.Generator(weight.device).manual_seed(1)
    uniform = torch.rand(sizes.tokens, 1, generator=generator, device=weight.device)
    ranks = torch.exp(uniform * math.log(sizes.vocab))  # frequencies fall as 1 / rank: the first has 6 %
    size = sizes.tokens * sizes.hidden
    for name, ids in {"random": (uniform * sizes.vocab).long(), "of text": ranks.long() - 1}.items():
        rows = ids.unique().numel() * sizes.hidden
        forms = partial(dense, ids), None, partial(ours, ids)
        yield f"embedding, {name} ids", Operation((weight,), *forms, 2 * size, size + 4 * rows)


class _WithBias(torch.autograd.Function):
    """``x + bias``, whose backward pass is one sum over rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, column_sum: ColumnSum) -> Tensor:
        ctx.column_sum = column_sum
        return x + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grad, ctx.column_sum(grad), None


def biases(sizes: Sizes, random: Callable[..., Tensor]) -> Iterator[tuple[str, Operation]]:
    def add(column_sum: ColumnSum, x: Tensor, bias: Tensor) -> Tensor:
        return _WithBias.apply(x, bias, column_sum)

    for width in (sizes.hidden // 4, sizes.hidden):
        x, bias = random(sizes.tokens, width), random(width)
        forms = partial(add, column_sum_plain), torch.add, partial(add, column_sum_triton)
        yield f"bias gradient, {width} wide", Operation((x, bias), *forms, 2 * x.numel(), x.numel())


def dropout(sizes: Sizes, random: Callable[..., Tensor]) -> Iterator[tuple[str, Operation]]:
    x, residual = random(sizes.tokens, 1, sizes.hidden), random(sizes.tokens, 1, sizes.hidden)
    stream, site, rate = DropoutStream(1), ("layer", 1, "mlp output"), 0.1
    sample, position = torch.tensor([7], device=x.device), torch.arange(sizes.tokens, device=x.device)
    draw = Draw(stream.key(site), sample, position, round(rate * 65536))

    def formula(x: Tensor, residual: Tensor) -> Tensor:
        at = sample[None, :, None], position[:, None, None]
        return residual + x * stream.keep_mask(rate, site, *at, 0, range(x.shape[-1])) / (1 - stream.exact_rate(rate))

    size = x.numel()
    yield "dropout and add", Operation(
        (x, residual), formula, formula, partial(dropout_add_triton, draw=draw), 3 * size, 2 * size
    )


def operations(sizes: Sizes, device: torch.device) -> Iterator[tuple[str, Operation]]:
    """By name; the inputs of one at a time need memory."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        made = torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)
        return made.requires_grad_()

    for family in (norms, activations, rotary, dropout, lookups, biases):
        yield from family(sizes, random)


def microseconds(function: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median time of one call whose operands are in no cache."""
    cache = torch.empty(1 << 28 if device.type == "cuda" else 1, dtype=torch.uint8, device=device)
    return milliseconds(function, device, repeats, before=cache.zero_) * 1e3


def measured(operation: Operation, function: Callable[..., Any], device: torch.device, repeats: int) -> list[float]:
    """[forward, backward] in microseconds."""
    outputs = function(*operation.inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    upstream = [torch.randn_like(output) for output in outputs]

    def backward() -> None:  # not autograd.grad, which leaves out gradients that a kernel adds to a sum of its own
        for each in operation.inputs:
            each.grad = None
        torch.autograd.backward(outputs, upstream, retain_graph=True)

    return [
        microseconds(lambda: function(*operation.inputs), device, repeats), microseconds(backward, device, repeats)
    ]  # fmt: skip


def rows_of(
    name: str, operation: Operation, device: torch.device, smoke: bool, repeats: int
) -> list[dict[str, Any]]:
    """Return a record per direction with the times of every form, or the reason for a missing time."""
    compiled = None
    if operation.formula is not None and not smoke:
        compiled = torch.compile(operation.formula, dynamic=False)
    runs = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    forms = {"eager_us": operation.eager, "compiled_us": compiled, "kernel_us": operation.kernel if runs else None}
    limits = [2 * n / BYTES_PER_SECOND * 1e6 for n in (operation.forward_elements, operation.backward_elements)]
    records: list[dict[str, Any]] = [
        {"name": name, "pass": direction, "limit_us": round(limit, 1)}
        for direction, limit in zip(("forward", "backward"), limits)
    ]
    for form, function in forms.items():
        times: list[Any] = [None, None]
        if function is not None:
            try:
                times = [round(each, 1) for each in measured(operation, function, device, repeats)]
            except Exception as error:  # one form that fails must not cost the others' figures
                times = [f"{type(error).__name__}: {error}"[:200].replace("\n", " ")] * 2
        for record, each in zip(records, times):
            record[form] = each
    for record, limit in zip(records, limits):
        time_us = record["kernel_us"]
        record["kernel_share_of_limit"] = round(limit / time_us, 3) if isinstance(time_us, float) else None
    return records


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="operations with any of these words")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "fusions.json")
    parser.add_argument("--smoke", action="store_true", help="tiny, on a CPU too; writes nothing unless --output")
    args = parser.parse_args()
    if not torch.cuda.is_available() and not args.smoke:
        print("needs a GPU; --smoke shows on a CPU that it runs")
        return 0
    device = torch.device("cpu" if args.smoke or not torch.cuda.is_available() else "cuda")
    rows = []
    for name, operation in operations(TINY if args.smoke else Sizes(), device):
        if args.only and not any(word in name for word in args.only):
            continue
        records = rows_of(name, operation, device, args.smoke, 2 if args.smoke else args.repeats)
        for record in records:
            print("  ".join(f"{key} {value}" for key, value in record.items()), flush=True)
        rows += records
        torch._dynamo.reset()
    if not args.smoke or args.output != parser.get_default("output"):
        record = {"environment": environment(cpu=args.smoke), "smoke": args.smoke, "rows": rows}
        args.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
