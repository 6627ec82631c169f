"""Work of context parallelism in addition to attention and transfers, on a GPU: merging attention over two sets of
keys, adding a block's gradients to a sum. Kernels, references, and the bandwidth of each.

    python benchmarks/bench_merge_attention.py

8192 queries of 32 heads with 128 channels: one step of a ring over a quarter of 32768 tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness.timing import milliseconds
from megatron.core.fusions.merge_attention import merge_attention_, merge_attention_reference_
from megatron.core.fusions.sum_parts import sum_parts_reference, sum_parts_triton


def report(name: str, work: Callable[[], None], num_bytes: int) -> None:
    """Median time of one call, and the bandwidth at which it moves the bytes that it must."""
    elapsed = milliseconds(work, torch.device("cuda"), 20)
    sys.stdout.write(f"{name:<24} {elapsed * 1e3:8.1f} us  {num_bytes / elapsed / 1e9:6.2f} TB/s of what is needed\n")


def main() -> int:
    if not torch.cuda.is_available():
        sys.stdout.write("needs a GPU\n")
        return 0
    queries, heads, channels = 8192, 32, 128
    out = torch.randn(queries, 1, heads, channels, device="cuda")
    lse = torch.randn(queries, 1, heads, device="cuda").movedim(0, 2)
    block = torch.randn(1, heads, queries, channels, device="cuda").bfloat16()
    block_lse = torch.randn(1, heads, queries, device="cuda")
    for name, merge in (("merge, kernel", merge_attention_), ("merge, reference", merge_attention_reference_)):
        report(name, partial(merge, out.movedim(0, 2), lse, block, block_lse), out.numel() * (4 + 4 + 2))
    part, rounded = torch.randn_like(out).bfloat16(), torch.empty_like(out, dtype=torch.bfloat16)
    for name, add in (("sum, kernel", sum_parts_triton), ("sum, reference", sum_parts_reference)):
        report(name, partial(add, out, part, out), out.numel() * (4 + 2 + 4))
        report(f"{name}, rounded", partial(add, out, part, rounded), out.numel() * (4 + 2 + 2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
