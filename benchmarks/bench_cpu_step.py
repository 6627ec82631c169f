#!/usr/bin/env python
"""Forward and backward of a quickstart-size GPT on a CPU, as a share of the machine's own matrix-multiply rate.

    python benchmarks/bench_cpu_step.py [--threads 2] [--output benchmarks/results/cpu_step.json]

The matrix-multiply rate is the mean over the shapes that the model itself multiplies (forward and both gradients),
timed separately in the same process and dtype, weighted by their FLOPs. Model FLOPs follow core/description/model.py.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.models.gpt.description import describe_gpt
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel

LENGTH, BATCH, VOCAB = 256, 8, 8192
VARIANTS = {
    "gpt": {},
    "llama": {"swiglu": True, "normalization": "RMSNorm", "add_bias_linear": False, "num_query_groups": 2},
    "gpt_dropout": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
}


def median_seconds(step: Callable[[], object], repeats: int) -> float:
    """Median wall time after two warm-up calls."""
    for _ in range(2):
        step()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def build_config(variant: str, dtype: torch.dtype) -> TransformerConfig:
    """6 layers of width 384."""
    settings = {"hidden_dropout": 0.0, "attention_dropout": 0.0, **VARIANTS[variant]}
    return TransformerConfig(num_layers=6, hidden_size=384, num_attention_heads=6, params_dtype=dtype, **settings)


def matmul_rate(config: TransformerConfig, dtype: torch.dtype, repeats: int) -> float:
    """FLOP/s of the model's own linear layers, forward and backward, with nothing between them."""
    width = config.ffn_hidden_size * (2 if config.swiglu else 1)
    qkv = (config.num_attention_heads + 2 * config.num_query_groups) * config.kv_channels
    hidden, layers = config.hidden_size, config.num_layers
    shapes = [(hidden, qkv, layers), (hidden, hidden, layers), (hidden, width, layers)]
    shapes += [(config.ffn_hidden_size, hidden, layers), (hidden, VOCAB, 1)]
    flops = seconds = 0.0
    for inputs, outputs, count in shapes:
        x, dy = torch.randn(BATCH * LENGTH, inputs).to(dtype), torch.randn(BATCH * LENGTH, outputs).to(dtype)
        weight = torch.randn(outputs, inputs).to(dtype)

        def gemms(x=x, dy=dy, weight=weight) -> None:
            F.linear(x, weight)
            dy @ weight
            dy.t() @ x

        seconds += count * median_seconds(gemms, repeats)
        flops += count * 6.0 * BATCH * LENGTH * inputs * outputs
    return flops / seconds


def measure(variant: str, dtype: torch.dtype, repeats: int) -> dict[str, float | str]:
    """One row of the result."""
    config = build_config(variant, dtype)
    positions = {"position_embedding_type": "rope"} if variant == "llama" else {}
    model = GPTModel(
        config, get_gpt_layer_local_spec(), VOCAB, LENGTH, share_embeddings_and_output_weights=True, **positions
    )
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    position_ids = torch.arange(LENGTH).expand(BATCH, LENGTH)

    def step() -> None:
        model(tokens[:, :-1], position_ids, labels=tokens[:, 1:]).mean().backward()
        for parameter in model.parameters():
            parameter.grad = None

    seconds = median_seconds(step, repeats)
    ceiling = matmul_rate(config, dtype, repeats)
    described = describe_gpt(
        config, vocab_size=VOCAB, seq_length=LENGTH, max_sequence_length=LENGTH,
        share_embeddings_and_output_weights=True,
        position_embedding_type=positions.get("position_embedding_type", "learned_absolute"),
    )  # fmt: skip
    rate = BATCH * described.flops_per_sample / seconds
    return {
        "variant": variant,
        "dtype": str(dtype).removeprefix("torch."),
        "parameters": described.num_parameters,
        "tokens_per_second": round(BATCH * LENGTH / seconds),
        "model_gflops": round(rate / 1e9, 1),
        "matmul_gflops": round(ceiling / 1e9, 1),
        "share": round(rate / ceiling, 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "cpu_step.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    for variant in options.variants:
        for dtype in options.dtypes:
            rows.append(measure(variant, getattr(torch, dtype), options.repeats))
            print(json.dumps(rows[-1]), flush=True)
    result = {
        "model": f"6 layers, hidden 384, 6 heads, sequence {LENGTH}, micro-batch {BATCH}, vocabulary {VOCAB}, tied",
        "threads": options.threads, "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__, "rows": rows,
    }  # fmt: skip
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
