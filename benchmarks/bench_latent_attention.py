"""Attention with the heads of latent attention on a GPU: keys of 192 channels, values of 128, by cuDNN and by torch's
flash kernel (with values padded by zeros).

    python benchmarks/bench_latent_attention.py [--shape 4096 2 32]

The shape: sequence, batch, heads; causal, bfloat16. TFLOP/s count 192 + 128 channels and half of all pairs, the
backward pass as 2.5 forward passes; it is the difference of the two times.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness.timing import milliseconds
from megatron.core.attention.dot_product_attention import CoreAttention
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.transformer.transformer_config import TransformerConfig

KEYS, VALUES = 192, 128


def _both(core: CoreAttention, tensors: list[torch.Tensor], grad: torch.Tensor) -> None:
    torch.autograd.grad(core(*tensors), tensors, grad)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=3, default=[4096, 2, 32])
    length, batch, heads = parser.parse_args().shape
    device = torch.device("cuda")
    shapes = [(length, batch, heads, width) for width in (KEYS, KEYS, VALUES)]
    tensors = [torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    flops = batch * heads * length * length * (KEYS + VALUES)
    for name in ("fused", "flash"):
        config = TransformerConfig(
            num_layers=1, hidden_size=heads * VALUES, num_attention_heads=heads, attention_dropout=0.0,
            params_dtype=torch.bfloat16, attention_backend=name,
        )  # fmt: skip
        core = CoreAttention(config, 1, groups=SINGLE_PROCESS, k_channels=KEYS, v_channels=VALUES)
        grad = torch.randn_like(core(*tensors))
        forward = milliseconds(partial(core, *tensors), device, 20)
        both = milliseconds(partial(_both, core, tensors, grad), device, 20)
        rates = (flops / forward / 1e9, 2.5 * flops / (both - forward) / 1e9)
        sys.stdout.write(f"{name:<6} forward {forward:7.3f} ms {rates[0]:4.0f} TFLOP/s   both {both:7.3f} ms, "
                         f"backward {rates[1]:4.0f} TFLOP/s\n")  # fmt: skip


if __name__ == "__main__":
    main()
