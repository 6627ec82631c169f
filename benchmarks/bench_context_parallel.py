"""Attention under context parallelism: forward and backward of every form, and how much communication is exposed.

    torchrun --nproc-per-node 4 benchmarks/bench_context_parallel.py        # on GPUs: 32768 tokens over the 4 ranks
    python benchmarks/bench_context_parallel.py --smoke                     # the same over gloo on a CPU, tiny

One layer's attention in the shape of LLaMA-3-8B: 32 heads, 8 key-value groups of 128 channels, bf16. TFLOP/s per GPU
counts the causal mask as half. The exposed communication of a form is its time less the time of the same work with each
transfer replaced by a local copy. ``one rank`` is a quarter of the batch's work on one GPU: full attention with
equal FLOPs per GPU. Every form is first compared with one rank. Writes benchmarks/results/context_parallel.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.core import parallel_state
from megatron.core.attention.context import AttentionContext
from megatron.core.attention.dot_product_attention import CoreAttention
from megatron.core.attention.token_layout import ONE_RANK, TokenLayout
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups import collective_names
from megatron.core.groups.process_groups import SINGLE_PROCESS, ProcessGroups

RESULTS = Path(__file__).resolve().parent / "results" / "context_parallel.json"


@dataclass(frozen=True)
class Shape:
    """Sizes of one layer's attention."""

    length: int
    heads: int = 32
    kv_groups: int = 8
    channels: int = 128
    dtype: torch.dtype = torch.bfloat16

    @property
    def flops(self) -> float:
        """Forward (two GEMMs) and backward (five), causal."""
        return 7 * 2 * self.heads * self.channels * self.length**2 / 2

    def config(self, ranks: int, form: str) -> TransformerConfig:
        return TransformerConfig(
            num_layers=1, hidden_size=self.heads * self.channels, num_attention_heads=self.heads,
            num_query_groups=self.kv_groups, kv_channels=self.channels, params_dtype=self.dtype, hidden_dropout=0.0,
            attention_dropout=0.0, context_parallel_size=ranks, cp_comm_type=[form],  # type: ignore[list-item]
        )  # fmt: skip

    def tensors(self, device: torch.device) -> list[Tensor]:
        """Query, key, value and the gradient of the output of whole sequences; the same on every rank."""
        generator = torch.Generator().manual_seed(0)
        sizes = [(self.heads, self.channels), *[(self.kv_groups, self.channels)] * 2, (self.heads * self.channels,)]
        return [torch.randn(self.length, 1, *size, generator=generator).to(device, self.dtype) for size in sizes]


def step(core: torch.nn.Module, inputs: list[Tensor], layout: TokenLayout = ONE_RANK) -> list[Tensor]:
    """Forward and backward; output and gradients."""
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    output = core(*leaves, AttentionContext(layout))
    output.backward(inputs[3])
    return [output.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[misc]


def seconds(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Median time of one call, the slowest rank's."""
    times = []
    for _ in range(repeats + 3):
        if dist.is_initialized():
            dist.barrier()
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - start)
    slowest = torch.tensor(statistics.median(times[3:]), dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def local_copies() -> Iterator[None]:
    """Each transfer replaced by a copy on this rank: the same work and the same buffers, other numbers."""

    def exchange(operations: list) -> list:
        operations[1].tensor.copy_(operations[0].tensor)
        return []

    def gather(result: Tensor, x: Tensor, group: object = None) -> None:
        result.view(-1, *x.shape).copy_(x.expand(result.numel() // x.numel(), *x.shape))

    def reduce_scatter(result: Tensor, x: Tensor, group: object = None) -> None:
        result.copy_(x[: len(result)])

    def all_to_all(result: Tensor, x: Tensor, group: object = None, async_op: bool = False) -> Any:
        result.copy_(x)
        return SimpleNamespace(wait=lambda: None)

    with (
        mock.patch.multiple(dist, batch_isend_irecv=exchange, all_to_all_single=all_to_all),
        mock.patch.multiple(collective_names, all_gather=gather, reduce_scatter=reduce_scatter),
    ):
        yield


def largest_error(shape: Shape, form: str, groups: ProcessGroups, device: torch.device) -> float:
    """Largest relative difference (norms) of outputs and gradients from one rank's."""
    size, layout = groups.cp.size, TokenLayout.of(groups)
    whole = shape.tensors(device)
    alone = step(CoreAttention(shape.config(1, "p2p"), 1, groups=SINGLE_PROCESS), whole)
    local = [layout.local(x, 0).contiguous() for x in whole]
    found = step(CoreAttention(shape.config(size, form), 1, groups=groups), local, layout)
    expected = [layout.local(x, 0) for x in alone]
    pairs = zip(found, expected, strict=True)
    return max(((x.double() - y.double()).norm() / y.double().norm()).item() for x, y in pairs)


def measure(shape: Shape, form: str, groups: ProcessGroups, repeats: int, device: torch.device) -> dict[str, float]:
    """One row of the table."""
    size, layout = groups.cp.size, TokenLayout.of(groups)
    core = CoreAttention(shape.config(size, form), 1, groups=groups)
    inputs = [layout.local(x, 0).contiguous() for x in shape.tensors(device)]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elapsed = seconds(lambda: step(core, inputs, layout), repeats, device)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    with local_copies() if size > 1 else nullcontext():
        alone = seconds(lambda: step(core, inputs, layout), repeats, device)
    return {
        "ms": elapsed * 1e3,
        "tflops_per_gpu": shape.flops / size / elapsed / 1e12,
        "ms_without_communication": alone * 1e3,
        "exposed_ms": max(0.0, elapsed - alone) * 1e3,
        "peak_gib": peak / 2**30,
    }


def relaunch(ranks: int) -> int:
    """This program on ``ranks`` ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.call([*command, __file__, *sys.argv[1:]], env=environment)


def run(shape: Shape, small: Shape, repeats: int, device: torch.device) -> dict[str, dict[str, float]]:
    """Every form on the ranks that are up."""
    size = dist.get_world_size()
    half = [2, size // 2] if size % 2 == 0 else [size, 1]
    groups = parallel_state.initialize_model_parallel(
        context_parallel_size=size, hierarchical_context_parallel_sizes=half
    )
    rows = {}
    for form in ("p2p", "allgather", "a2a", "a2a+p2p"):
        error = largest_error(small, form, groups, device)
        if error > (0.02 if shape.dtype == torch.bfloat16 else 1e-5):
            raise SystemExit(f"{form}: off by {error:.1e} from one rank")
        rows[form] = {**measure(shape, form, groups, repeats, device), "largest_error": error}
    equal_work = Shape(int(shape.length / size**0.5) // 128 * 128 or 64, shape.heads, shape.kv_groups, shape.channels,
                       shape.dtype)  # fmt: skip
    rows["one rank"] = measure(equal_work, "p2p", SINGLE_PROCESS, repeats, device)
    return rows


def report(rows: dict[str, dict[str, float]]) -> str:
    lines = [f"{'form':<12} {'ms':>9} {'TFLOP/s':>9} {'of one':>7} {'exposed ms':>11} {'peak GiB':>9} {'error':>9}"]
    best = rows["one rank"]["tflops_per_gpu"]
    for name, row in rows.items():
        lines.append(
            f"{name:<12} {row['ms']:>9.2f} {row['tflops_per_gpu']:>9.3g} {row['tflops_per_gpu'] / best:>7.1%} "
            f"{row['exposed_ms']:>11.2f} {row['peak_gib']:>9.2f} {row.get('largest_error', 0.0):>9.1e}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes over gloo on a CPU; writes no results")
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--ranks", type=int, default=0, help="without torchrun; default: all GPUs, or 4 with --smoke")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        return relaunch(options.ranks or (4 if options.smoke else torch.cuda.device_count()) or 4)
    on_gpu = torch.cuda.is_available() and not options.smoke
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    small = Shape(2048) if on_gpu else Shape(64, 8, 4, 8, torch.float32)
    shape = Shape(options.length) if on_gpu else Shape(512, 8, 4, 16, torch.float32)
    rows = run(shape, small, options.repeats if on_gpu else 3, device)
    if dist.get_rank() == 0:
        sys.stdout.write(report(rows) + "\n")
        if on_gpu:
            machine = {"gpu": torch.cuda.get_device_name(device), "torch": torch.__version__}
            settings = {"length": shape.length, "ranks": dist.get_world_size(), "dtype": str(shape.dtype)}
            results = {"machine": machine, "python": platform.python_version(), "settings": settings, "rows": rows}
            options.output.write_text(json.dumps(results, indent=1) + "\n")
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
