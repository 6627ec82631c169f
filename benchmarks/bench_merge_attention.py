"""Merging attention over two sets of keys on a GPU: the kernel, the reference, and the bandwidth of each.

    python benchmarks/bench_merge_attention.py

8192 queries of 32 heads with 128 channels: one step of a ring over a quarter of 32768 tokens.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.core.fusions.merge_attention import merge_attention_, merge_attention_reference_


def main() -> int:
    if not torch.cuda.is_available():
        sys.stdout.write("needs a GPU\n")
        return 0
    queries, heads, channels = 8192, 32, 128
    out = torch.randn(queries, 1, heads, channels, device="cuda").movedim(0, 2)
    lse = torch.randn(queries, 1, heads, device="cuda").movedim(0, 2)
    block = torch.randn(1, heads, queries, channels, device="cuda").bfloat16()
    block_lse = torch.randn(1, heads, queries, device="cuda")
    least = out.numel() * (4 + 4 + 2)  # bytes: read and write the sum, read the block
    for name, merge in (("kernel", merge_attention_), ("reference", merge_attention_reference_)):
        times = []
        for _ in range(25):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            merge(out, lse, block, block_lse)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        elapsed = statistics.median(times[5:])
        sys.stdout.write(f"{name:<10} {elapsed * 1e3:8.1f} us  {least / elapsed / 1e9:6.2f} TB/s of what is needed\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
