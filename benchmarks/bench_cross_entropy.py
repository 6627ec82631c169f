"""The output layer and its loss, forward and backward: plain torch, torch.compile, the kernels, and chunks of tokens.

    python benchmarks/bench_cross_entropy.py             # about 45 s on an H200; writes results/cross_entropy.json
    python benchmarks/bench_cross_entropy.py --tp 4      # one rank's quarter of the vocabulary, without collectives
    python benchmarks/bench_cross_entropy.py --smoke     # tiny, on a CPU; writes nothing

8192 tokens, hidden 4096, vocabulary 128256, bf16, weight gradients added to an fp32 buffer: the shape of LLaMA-3-8B.
``gemms`` are only the three GEMMs, the limit of all other rows; TFLOP/s count these three (6 t h v), without
recomputation. ``extra GB`` is the peak above input, weight and gradient buffer. ``loss error`` is the largest
difference of a token's loss from float32 on the same 16-bit inputs, ``input gradient error`` a relative norm. The last
rows are single kernels for several block sizes, with the bandwidth of the required reads and writes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness.environment import environment
from benchmarks.harness.timing import milliseconds
from megatron.core.fusions import cross_entropy as fusion
from megatron.core.fusions.cross_entropy import PLAIN, Softmax
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.tensor_parallel.gemms import accumulate_product
from megatron.core.tensor_parallel.linear import LinearTraits, parallel_linear
from megatron.core.tensor_parallel.linear_cross_entropy import linear_cross_entropy

RESULTS = Path(__file__).parent / "results" / "cross_entropy.json"
TRAITS = LinearTraits(SINGLE_PROCESS.tp)
CROSS_ENTROPY = importlib.import_module("megatron.core.tensor_parallel.cross_entropy")
BLOCKS = ((2048, 4), (4096, 4), (4096, 8), (8192, 8), (8192, 16), (16384, 8), (16384, 16))
"""(elements, warps) of a program."""

Losses = Callable[[Tensor, Tensor, Tensor], Tensor]


def eager(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")


def of_logits(losses: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return losses(parallel_linear(x, weight, None, TRAITS), labels)


def library(passes: fusion.CrossEntropyPasses, logits: Tensor, labels: Tensor) -> Tensor:
    """Call ``vocab_parallel_cross_entropy`` with the implementation ``passes``."""
    with mock.patch.object(CROSS_ENTROPY, "cross_entropy_passes", lambda *_: passes):
        return CROSS_ENTROPY.vocab_parallel_cross_entropy(logits, labels, reuse_logits=True).flatten()


def in_chunks(tokens: int, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    losses = linear_cross_entropy(x, weight, labels, vocab_size=len(weight), traits=TRAITS, chunk_tokens=tokens)
    return losses.flatten()


def candidates(smoke: bool) -> dict[str, Losses]:
    """By name; each (x [t, 1, h], weight [v, h], labels [t, 1]) -> losses [t]."""
    found: dict[str, Losses] = {
        "eager": partial(of_logits, eager),
        "plain": partial(of_logits, partial(library, PLAIN)),
    }
    if not smoke:
        found["compiled"] = partial(of_logits, torch.compile(eager))
    if fusion.FUSED is not None and not smoke:
        found["kernels"] = partial(of_logits, partial(library, fusion.FUSED))
    for tokens in (16, 7) if smoke else (512, 1024, 2048, 4096):
        found[f"chunks of {tokens}"] = partial(in_chunks, tokens)
    return found


class Problem:
    """Inputs with logits of unit variance; gradients are taken of the sum of losses."""

    def __init__(self, tokens: int, hidden: int, vocab: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.x = torch.randn(tokens, 1, hidden, device=device).bfloat16().requires_grad_()
        weight = torch.randn(vocab, hidden, device=device) * hidden**-0.5
        self.weight = torch.nn.Parameter(weight.bfloat16())
        del weight
        self.labels = torch.randint(0, vocab, (tokens, 1), device=device)
        self.main_grad = torch.zeros(vocab, hidden, device=device)
        self.weight.main_grad = self.main_grad  # type: ignore[attr-defined]
        self.weight.grad_ready = torch.zeros((), device=device, requires_grad=True)  # type: ignore[attr-defined]
        self.grad = torch.ones(tokens, device=device)
        self.device, self.flops = device, 6.0 * tokens * hidden * vocab

    def forget(self) -> None:
        self.x.grad = self.weight.grad = None

    def step(self, losses: Losses) -> Tensor:
        self.forget()
        found = losses(self.x, self.weight, self.labels)
        found.backward(self.grad)
        self.weight.grad = None
        return found.detach()

    def forward(self, losses: Losses) -> None:
        losses(self.x, self.weight, self.labels)

    def gemms(self) -> None:
        """Compute the GEMMs that every variant needs."""
        with torch.no_grad():
            x = self.x.flatten(0, 1)
            logits = x.matmul(self.weight.t())
            logits.matmul(self.weight)
            accumulate_product(self.main_grad, logits.t(), x)

    def exact(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Losses and input gradients of the first tokens, in float32."""
        x = self.x.detach()[:tokens].float().requires_grad_()
        losses = eager(F.linear(x, self.weight.detach().float()), self.labels[:tokens])
        return losses.detach(), torch.autograd.grad(losses.sum(), x)[0]


def extra_gigabytes(work: Callable[[], object], device: torch.device) -> float | None:
    """Peak above what is there before."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 1e9, 3)


def measure_row(problem: Problem, losses: Losses, exact: tuple[Tensor, Tensor], limit_ms: float, repeats: int) -> dict:
    """The figures of one candidate."""
    found = problem.step(losses)
    count = len(exact[0])
    assert problem.x.grad is not None
    difference = problem.x.grad[:count].float() - exact[1]
    errors = {
        "loss error": float((found[:count] - exact[0]).abs().max()),
        "input gradient error": float(difference.norm() / exact[1].norm()),
    }
    problem.forget()
    both = milliseconds(lambda: problem.step(losses), problem.device, repeats)
    forward = milliseconds(lambda: problem.forward(losses), problem.device, max(3, repeats // 2))
    problem.forget()
    extra = extra_gigabytes(lambda: problem.step(losses), problem.device)
    problem.forget()
    return {
        "ms": round(both, 3), "forward ms": round(forward, 3), "above GEMMs ms": round(both - limit_ms, 3),
        "TFLOP/s": round(problem.flops / both / 1e9, 2), "extra GB": extra,
        **{name: float(f"{value:.2g}") for name, value in errors.items()},
    }  # fmt: skip


def pass_rows(tokens: int, vocab: int, device: torch.device, repeats: int) -> dict[str, dict[str, Any]]:
    """Measure each kernel separately for several block sizes."""
    logits = torch.randn(tokens, vocab, device=device, dtype=torch.bfloat16)
    label, grad = torch.randint(0, vocab, (tokens,), device=device), torch.full((tokens,), 1.0, device=device)
    out, rows = torch.empty_like(logits), {}
    assert fusion.FUSED is not None
    for block, warps in BLOCKS:
        with mock.patch.multiple(fusion, _BLOCK=block, _NUM_WARPS=warps):
            statistics_tv = fusion.FUSED.statistics(logits, label, vocab)
            softmax = Softmax(statistics_tv[0], statistics_tv[1], vocab)
            works: dict[str, tuple[int, Callable[[], object]]] = {
                "statistics": (1, partial(fusion.FUSED.statistics, logits, label, vocab)),
                "gradient": (2, partial(fusion.FUSED.gradient, logits, label, softmax, grad, out)),
            }
            for name, (times, work) in works.items():
                took = milliseconds(work, device, repeats)
                moved = times * logits.numel() * logits.element_size()
                rows[f"{name}, {block} by {warps} warps"] = {"ms": round(took, 3), "TB/s": round(moved / took / 1e9, 3)}
    return rows


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The content of the results' file."""
    device = torch.device("cpu" if options.smoke else "cuda")
    tokens, hidden, vocab = (40, 32, 300) if options.smoke else (options.tokens, options.hidden, options.vocab)
    vocab //= options.tp
    repeats = 2 if options.smoke else options.repeats
    problem = Problem(tokens, hidden, vocab, device)
    exact = problem.exact(min(tokens, 256))
    limit = milliseconds(problem.gemms, device, repeats)
    gemms = {"ms": round(limit, 3), "above GEMMs ms": 0.0, "TFLOP/s": round(problem.flops / limit / 1e9, 2)}
    rows: dict[str, dict[str, Any]] = {"gemms": gemms}
    for name, losses in candidates(options.smoke).items():
        try:
            rows[name] = measure_row(problem, losses, exact, limit, repeats)
        except torch.OutOfMemoryError:
            rows[name] = {"ms": None}
        problem.forget()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    del problem
    if fusion.FUSED is not None and device.type == "cuda":
        rows.update(pass_rows(tokens, vocab, device, repeats))
    settings = {"tokens": tokens, "hidden": hidden, "vocabulary of this rank": vocab, "tp": options.tp, "dtype": "bf16"}
    return {"settings": settings, "environment": environment(cpu=options.smoke), "rows": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on a CPU; writes nothing without --output")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--tp", type=int, default=1, help="ranks that would share the vocabulary")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    if not options.smoke and not torch.cuda.is_available():
        sys.stdout.write("needs a GPU, or --smoke\n")
        return 0
    results = measure(options)
    for name, row in results["rows"].items():
        sys.stdout.write(f"{name:<34} " + "  ".join(f"{column} {value}" for column, value in row.items()) + "\n")
    output = options.output or (None if options.smoke else RESULTS)
    if output is not None:
        output.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
