"""Linear recurrences of one layer on a GPU: our kernels, plain torch, and fla-core if it is installed and works here.

    python benchmarks/bench_linear_attention.py [--output benchmarks/results/linear_attention.json] [--sweep] [--smoke]
        [--shapes gated kimi] [--lengths 8192 131072] [--variants kernels fla] [--kernels]

Median milliseconds of the forward pass, and of both passes, in bf16. For short sequences also the relative errors of
outputs and gradients against plain torch in fp64. ``--sweep``: both passes with other tilings of one kernel
(``CANDIDATES``). ``--kernels``: milliseconds of both passes by kernel. Shapes and variants are selected by parts of
their names. Tokens/s of models: rows ``gdn*`` and ``dense*`` of bench_training.py.
``--smoke`` runs tiny sizes on a CPU, with our kernels only if TRITON_INTERPRET=1; times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness.environment import environment
from benchmarks.harness.timing import milliseconds
from megatron.core.fusions.linear_attention import CANDIDATES, TILINGS, linear_attention
from megatron.core.transformer.ssm.delta_rule import delta_rule
from megatron.core.transformer.ssm.state_space import state_space

ROOT = Path(__file__).resolve().parents[1]
Rule = Callable[..., Tensor]
Shape = tuple[str, int, int, int, int, int]
SHAPES: dict[str, Shape] = {  # name: (rule, batch, heads of keys and values, channels of keys and values)
    "gated delta net, 32 heads": ("delta", 1, 16, 32, 128, 128),
    "gated delta net, 64 heads": ("delta", 1, 16, 64, 128, 128),
    "kimi delta attention, 32 heads": ("channels", 1, 32, 32, 128, 128),
    "mamba-2, 128 heads": ("states", 1, 8, 128, 128, 64),
}
LENGTHS = (8192, 32768, 131072)
LONGEST_PLAIN = 8192
"""Plain torch saves about 20 kB per token and head."""
SMOKE: dict[str, Shape] = {
    "delta": ("delta", 1, 1, 2, 16, 16), "channels": ("channels", 1, 2, 2, 16, 16),
    "state space": ("states", 1, 1, 2, 16, 16),
}  # fmt: skip


def random_inputs(length: int, shape: Shape, device: torch.device) -> list[Tensor]:
    """Return query, key, value, log-decays and, for the delta rule, beta: leaves with gradients."""
    kind, batch, keys, heads, width, channels = shape
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    key = torch.nn.functional.normalize(normal(length, batch, keys, width), dim=-1)
    query = normal(length, batch, keys, width) * width**-0.5
    half = [x.bfloat16() for x in (query, key, normal(length, batch, heads, channels))]
    per_head = (length, batch, heads, width) if kind == "channels" else (length, batch, heads)
    decay, beta = -torch.nn.functional.softplus(normal(*per_head)), normal(length, batch, heads).sigmoid()
    return [x.requires_grad_() for x in (*half, decay, *([] if kind == "states" else [beta]))]


def by_kernels(tilings: Any, *inputs: Tensor) -> Tensor:
    """Outputs of our kernels; the fifth of ``inputs`` is beta."""
    beta = inputs[4] if len(inputs) == 5 else None
    return linear_attention(*inputs[:4], beta, None, zeros_state(inputs), tilings)[0]


def zeros_state(inputs: tuple[Tensor, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    key, value = inputs[1:3]
    return value.new_zeros((*value.shape[1:3], key.shape[-1], value.shape[-1]), dtype=dtype)


def by_chunks(dtype: torch.dtype, *inputs: Tensor) -> Tensor:
    """Outputs of the chunks in plain torch, in ``dtype``."""
    rule = delta_rule if len(inputs) == 5 else state_space
    return rule(*(x.to(dtype) for x in inputs), None, zeros_state(inputs, dtype))[0]


def by_fla(*inputs: Tensor) -> Tensor:
    """Outputs of fla-core: [b, s, heads, channels]."""
    query, key, value, decay, *beta = (x.transpose(0, 1).contiguous() for x in inputs)
    if decay.ndim == 4:
        from fla.ops.kda import chunk_kda

        return chunk_kda(query, key, value, decay, beta[0], scale=1.0)[0].transpose(0, 1)
    if beta:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return chunk_gated_delta_rule(query, key, value, decay, beta[0], scale=1.0)[0].transpose(0, 1)
    from fla.ops.simple_gla import chunk_simple_gla

    shared = value.shape[2] // key.shape[2]
    query, key = (x.repeat_interleave(shared, 2) for x in (query, key))
    return chunk_simple_gla(query, key, value, decay, scale=1.0)[0].transpose(0, 1)


def forward_and_backward(rule: Rule, inputs: list[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    """Return the outputs and the gradients of ``inputs``."""
    outputs = rule(*inputs)
    return outputs.detach(), *torch.autograd.grad(outputs, inputs, grad.to(outputs.dtype))


def relative_errors(rule: Rule, inputs: list[Tensor], grad: Tensor) -> list[float]:
    """Return the errors of the outputs and all gradients against plain torch in fp64."""
    exact = [x.detach().double().requires_grad_() for x in inputs]
    right = forward_and_backward(partial(by_chunks, torch.float64), exact, grad)
    actual = forward_and_backward(rule, inputs, grad)
    return [((x.double() - y).norm() / y.norm()).item() for x, y in zip(actual, right, strict=True)]


def per_pass(spans: Iterable[tuple[str, float, float]], passes: int) -> dict[str, float]:
    """Return the median over ``passes`` of the sum of durations by name, the largest first, of (name, begin, duration).
    Every pass launches the same kernels."""
    durations: dict[str, list[float]] = {}
    for name, _, duration in sorted(spans, key=lambda span: span[1]):
        durations.setdefault(name, []).append(duration)
    sums = {}
    for name, parts in durations.items():
        count = max(1, len(parts) // passes)
        sums[name] = statistics.median(sum(parts[at : at + count]) for at in range(0, len(parts), count))
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def kernel_milliseconds(work: Callable[[], object], passes: int = 5) -> dict[str, float]:
    """Return the milliseconds of ``work`` by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(passes):
            work()
        torch.cuda.synchronize()
    spans = (
        (event.name[:60], event.time_range.start, event.time_range.elapsed_us() / 1e3)
        for event in profile.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    return {name: round(value, 4) for name, value in per_pass(spans, passes).items()}


def measure(
    name: str, rule: Rule, inputs: list[Tensor], repeats: int, *, errors: bool, kernels: bool
) -> dict[str, Any]:
    """Return times, peak memory and errors of ``rule``, or the reason why it does not run."""
    device = inputs[0].device
    grad = torch.randn_like(inputs[2])
    row: dict[str, Any] = {"variant": name}
    try:
        row["forward_ms"] = milliseconds(lambda: rule(*inputs), device, repeats)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        row["both_ms"] = milliseconds(lambda: forward_and_backward(rule, inputs, grad), device, repeats)
        if device.type == "cuda":
            row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        if kernels and device.type == "cuda":
            row["kernels"] = kernel_milliseconds(lambda: forward_and_backward(rule, inputs, grad))
        if errors:
            row["errors"] = relative_errors(rule, inputs, grad)
    except Exception as error:  # a package without support of this GPU or Triton, or too little memory: a result too
        row["failure"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
        torch.cuda.empty_cache()
    return row


def variants(kind: str, length: int, *, sweep: bool, kernels: bool) -> dict[str, Rule]:
    """Return the rules to measure by name."""
    rules: dict[str, Rule] = {"kernels": partial(by_kernels, TILINGS)} if kernels else {}
    if sweep and kernels:
        unused = {"pairs", "gradients"} if kind == "channels" else {"channel_pairs", "channel_gradients"}
        for kernel, tilings in CANDIDATES.items():
            if kernel in unused:
                continue
            for tiling in tilings:
                if tiling != TILINGS[kernel]:
                    rules[f"kernels, {kernel} {tiling}"] = partial(by_kernels, {**TILINGS, kernel: tiling})
    if length <= LONGEST_PLAIN:
        rules["plain torch"] = partial(by_chunks, torch.float32)
    return rules | {"fla-core": by_fla}


def contains(name: str, parts: list[str] | None) -> bool:
    """Whether ``name`` contains one of ``parts``; None: any name."""
    return parts is None or any(part in name for part in parts)


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all shapes, lengths and variants; print a line for each at once."""
    device = torch.device("cpu" if options.smoke else "cuda")
    shapes, lengths, repeats = (SMOKE, (70,), 1) if options.smoke else (SHAPES, options.lengths, options.repeats)
    shapes = {name: shape for name, shape in shapes.items() if contains(name, options.shapes)}
    kernels, rows = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1", []
    for name, shape in shapes.items():
        for length in lengths:
            inputs = random_inputs(length, shape, device)
            if options.smoke:  # the interpreter has no products of bf16
                inputs = [x.detach().float().requires_grad_() for x in inputs]
            sweep = options.sweep and length == lengths[0]
            for variant, rule in variants(shape[0], length, sweep=sweep, kernels=kernels).items():
                if not contains(variant, options.variants):
                    continue
                row, errors = {"shape": name, "length": length}, length <= LONGEST_PLAIN
                row |= measure(variant, rule, inputs, repeats, errors=errors, kernels=options.kernels)
                rows.append(row)
                sys.stdout.write(json.dumps(row) + "\n")
                sys.stdout.flush()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "linear_attention.json")
    parser.add_argument("--sweep", action="store_true", help="also time the other tilings, at the first length")
    parser.add_argument("--shapes", nargs="+", metavar="SUBSTRING", help="measure only these shapes")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, metavar="N", help="tokens of a sequence")
    parser.add_argument("--variants", nargs="+", metavar="SUBSTRING", help="measure only these variants")
    parser.add_argument("--kernels", action="store_true", help="also report the time of both passes by kernel")
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU; writes nothing")
    options = parser.parse_args()
    if not options.smoke and not torch.cuda.is_available():
        sys.stdout.write("needs a GPU, or --smoke\n")
        return 1
    rows = run(options)
    if not options.smoke:
        options.output.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
