"""Attention with T5's relative positions on a GPU: milliseconds of each way, forward and forward with backward.

    python benchmarks/bench_attention_bias.py [--padded] [--causal] [--shape 512 32 32 128] [--sweep]

Default shape: sequence, batch, heads, channels of a T5 of 3 billion parameters. ``--sweep`` times each of the Triton
kernels with other tiles. "without bias" is what cuDNN takes for the same without relative positions.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness.timing import milliseconds
from megatron.core.attention.kernels.relative import RelativeAttention
from megatron.core.attention.kernels.torch_sdpa import TorchAttention
from megatron.core.attention.kernels.unfused import UnfusedAttention
from megatron.core.attention.masks import Mask
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.position_bias import of_pairs
from megatron.core.attention.tiles import Visibility, full_tile
from megatron.core.fusions.relative_attention import TILINGS, Pairs, relative_attention, relative_attention_backward

Way = Callable[[Tensor, Tensor, Tensor, Mask], Tensor]


def efficient_with_bias(query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
    """torch's memory-efficient kernel with a dense bias, which is expanded over the batch; without padding."""
    assert mask.bias is not None
    bias = of_pairs(mask.bias, full_tile(len(query), len(key), Visibility(False))).to(query.dtype)
    if mask.visibility.causal:
        bias = bias.masked_fill(bias.new_ones(bias.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
    tensors = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        dense = bias.unsqueeze(0).expand(query.shape[1], -1, -1, -1)
        return F.scaled_dot_product_attention(*tensors, attn_mask=dense).permute(2, 0, 1, 3)


def report(name: str, way: Way, tensors: list[Tensor], mask: Mask) -> None:
    """Times of ``way``, and its memory at the peak."""
    leaves = [x for x in (*tensors, mask.bias) if x is not None and x.requires_grad]
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    try:
        grad = torch.randn_like(way(*tensors, mask))
        forward = milliseconds(lambda: way(*tensors, mask), torch.device("cuda"), 20)
        both = milliseconds(
            lambda: torch.autograd.grad(way(*tensors, mask), leaves, grad, allow_unused=True), torch.device("cuda"), 20
        )  # fmt: skip
    except RuntimeError as error:  # what another machine's torch cannot do is part of the answer
        sys.stdout.write(f"{name:<28} {str(error).splitlines()[0][:100]}\n")
        return
    peak = (torch.cuda.max_memory_allocated() - held) / 2**20
    sys.stdout.write(f"{name:<28} forward {forward:7.3f} ms   both {both:7.3f} ms   peak {peak:7.0f} MiB\n")
    sys.stdout.flush()


def sweep(tensors: list[Tensor], mask: Mask) -> None:
    """Forward, and the whole backward with other tiles of one of its kernels."""
    assert mask.bias is not None
    query, key, value = (x.detach().permute(1, 2, 0, 3) for x in tensors)
    bias, scale, captured = mask.bias.detach(), query.shape[-1] ** -0.5, []
    documents, right = mask.documents, 0 if mask.visibility.causal else None
    ranges = None if documents is None else documents.ranges(len(query), query.shape[2])
    pairs = Pairs(bias.shape[1] // 2, None, right, ranges)
    out, lse = relative_attention(query, key, value, bias, scale, pairs)
    grad = torch.randn_like(out)
    sizes = [(64, 64), (64, 128), (128, 32), (128, 64), (128, 128)]
    for name, (m, n), warps, stages in itertools.product(TILINGS, sizes, (4, 8), (2, 3)):
        tilings = {**TILINGS, name: (m, n, warps, stages)}
        work: Callable[[], object] = partial(
            relative_attention_backward, grad, (query, key, value, out, lse, bias), scale, pairs, tilings
        )  # fmt: skip
        if name == "forward":
            work = partial(relative_attention, query, key, value, bias, scale, pairs, tilings)
        try:
            captured.append((name, milliseconds(work, torch.device("cuda"), 10), tilings[name]))
        except Exception as error:  # too much shared memory for an SM
            sys.stdout.write(f"{name} {tilings[name]}: {type(error).__name__}\n")
    for name in TILINGS:
        best = sorted(each[1:] for each in captured if each[0] == name)[:4]
        sys.stdout.write(f"{name:<10} " + "   ".join(f"{elapsed:.3f} ms {tiles}" for elapsed, tiles in best) + "\n")
        sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", type=int, nargs=4, default=(512, 32, 32, 128))
    for name in ("padded", "causal", "sweep"):
        parser.add_argument(f"--{name}", action="store_true")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        sys.stdout.write("needs a GPU\n")
        return 0
    length, batch, heads, channels = asked.shape
    sizes = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    tensors = [torch.randn(length, batch, heads, channels, **sizes) for _ in range(3)]
    bias = torch.randn(heads, 2 * length - 1, device="cuda", requires_grad=True)
    documents = None
    if asked.padded:
        lengths = torch.randint(length // 2, length + 1, (batch,), generator=torch.Generator().manual_seed(0))
        documents = PackedSeqParams.of_lengths(lengths, length).on(torch.device("cuda"))
    mask = Mask(Visibility(asked.causal), documents, bias=bias)
    if asked.sweep:
        sweep(tensors, mask)
        return 0
    scale = channels**-0.5
    report("Triton kernels", RelativeAttention(scale).attend, tensors, mask)
    report("plain torch", UnfusedAttention(scale).attend, tensors, mask)
    if documents is None:
        report("memory-efficient, dense bias", efficient_with_bias, tensors, mask)
    report("cuDNN, without bias", TorchAttention("cudnn", scale).attend, tensors, Mask(mask.visibility, documents))
    return 0


if __name__ == "__main__":
    sys.exit(main())
