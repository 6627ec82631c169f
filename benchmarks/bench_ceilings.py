"""Measure the limits of this GPU for single operations in the shapes of the speed table.

    python benchmarks/bench_ceilings.py            # about 40 s on an H200; rewrites benchmarks/harness/ceilings.json
    python benchmarks/bench_ceilings.py --smoke    # tiny, on a CPU; writes nothing

GEMMs by shape (forward, input gradient, and weight gradient added to an fp32 buffer), attention forward and
backward by length, the copy bandwidth. Random data, medians of CUDA events, every input set larger than the caches.
Bandwidths of collectives are kept from the file: they need several GPUs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness import kernel_classes as kinds
from benchmarks.harness.environment import environment
from benchmarks.harness.roofline import CEILINGS, load_ceilings, weight_shapes
from benchmarks.harness.rows import ROWS, row_flags
from benchmarks.harness.timing import milliseconds
from megatron.training.arguments import parse_args
from megatron.training.config.resolve import resolve

TOKENS = 8192
LENGTHS = (4096, 8192, 32768)


def seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median time of one call."""
    return milliseconds(work, device, repeats) / 1e3


def shapes(smoke: bool) -> list[tuple[int, int]]:
    """Return (output, input) of every weight in the rows of one GPU and four GPUs."""
    found: set[tuple[int, int]] = set()
    for name in ("one", "tp4-sp", "dp2-tp2", "gpt-345m"):
        cfg = resolve(parse_args([*row_flags(name, smoke=smoke), "--train-iters", "1"]), ROWS[name].gpus, gpus=True)
        found |= weight_shapes(cfg, cfg.tokenizer.vocab_size)
    return sorted(found)


def gemms(out: int, into: int, tokens: int, device: torch.device, repeats: int) -> dict[str, float]:
    """TFLOP/s of the three GEMMs of a linear layer."""
    x, dy = (torch.randn(tokens, size, device=device).bfloat16() for size in (into, out))
    weight = torch.randn(out, into, device=device).bfloat16()
    total = torch.zeros(out, into, device=device)

    def accumulate() -> object:
        if device.type == "cuda":
            return torch.addmm(total, dy.t(), x, out_dtype=torch.float32, out=total)
        return total.add_(dy.t() @ x)

    works: dict[str, Callable[[], object]] = {
        kinds.GEMM_FORWARD: lambda: F.linear(x, weight), kinds.GEMM_DGRAD: lambda: dy @ weight,
        kinds.GEMM_WGRAD: accumulate,
    }  # fmt: skip
    flops = 2.0 * tokens * out * into
    return {name: round(flops / seconds(work, device, repeats) / 1e12, 1) for name, work in works.items()}


def attention(length: int, heads: int, device: torch.device, repeats: int) -> tuple[float, float]:
    """TFLOP/s of causal attention, (forward, forward and backward); two GEMMs forward, five backward."""
    counts = (heads, heads // 4, heads // 4)
    query, key, value = (torch.randn(1, n, length, 128, device=device).bfloat16().requires_grad_() for n in counts)
    gradient = torch.randn(1, heads, length, 128, device=device).bfloat16()
    backends = [SDPBackend.CUDNN_ATTENTION] if device.type == "cuda" else [SDPBackend.MATH]

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    gemm = 2.0 * heads * 128 * length**2 / 2
    with sdpa_kernel(backends):
        with torch.no_grad():
            forward_seconds = seconds(forward, device, repeats)
        both = seconds(lambda: forward().backward(gradient), device, repeats)
    return round(2 * gemm / forward_seconds / 1e12, 1), round(7 * gemm / both / 1e12, 1)


def copy_bandwidth(size: int, device: torch.device, repeats: int) -> float:
    """TB/s, read and written."""
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    return round(2 * size / seconds(lambda: target.copy_(source), device, repeats) / 1e12, 3)


def measured(device: torch.device, smoke: bool, repeats: int) -> dict[str, Any]:
    """The file's content, less what needs several GPUs."""
    tokens, lengths, heads, size = (64, (64, 128), 8, 1 << 20) if smoke else (TOKENS, LENGTHS, 32, 1 << 32)
    by_shape = {f"{out}x{into}": gemms(out, into, tokens, device, repeats) for out, into in shapes(smoke)}
    ranges = {}
    for kind in (kinds.GEMM_FORWARD, kinds.GEMM_DGRAD, kinds.GEMM_WGRAD):
        rates = [rates[kind] for rates in by_shape.values()]
        ranges[kind] = {"lowest": min(rates), "highest": max(rates)}
    rates_by_length = {length: attention(length, heads, device, repeats) for length in lengths}
    return {
        "gemm_tflops": ranges,
        "gemm_tflops_note": f"the range over gemm_tflops_by_shape (output x input, {tokens} tokens); weight gradients "
        "are added to an fp32 buffer by the GEMM itself",
        "gemm_tflops_by_shape": by_shape,
        "attention_tflops": {
            "forward": {str(length): rates[0] for length, rates in rates_by_length.items()},
            "forward and backward": {str(length): rates[1] for length, rates in rates_by_length.items()},
        },
        "copy_terabytes_per_second": copy_bandwidth(size, device, repeats),
    }


def main() -> int:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--smoke", action="store_true", help="tiny, on a CPU")
    parser.add_argument("--output", type=Path, help="default: benchmarks/harness/ceilings.json")
    args = parser.parse_args()
    if not args.smoke and not torch.cuda.is_available():
        print("needs a GPU; --smoke runs tiny sizes on a CPU")
        return 2
    record = environment(cpu=args.smoke)
    found = measured(torch.device("cpu" if args.smoke else "cuda"), args.smoke, 2 if args.smoke else args.repeats)
    for shape, rates in found["gemm_tflops_by_shape"].items():
        print(f"{shape:<16}" + "".join(f"{kind} {rate:7.1f}   " for kind, rate in rates.items()))
    print(f"attention {found['attention_tflops']}\ncopy {found['copy_terabytes_per_second']} TB/s")
    output = args.output or (None if args.smoke else CEILINGS)
    if output:
        versions = f"torch {record['torch']}, CUDA {record['cuda']}, cuDNN {record['cudnn']}"
        source = f"measured on one {record['device']}, {versions}: medians of CUDA events, random data"
        content = {**load_ceilings(), "source": source, "device": record["device"], **found, "environment": record}
        output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
