"""Speed of generation with the paged cache on a GPU: prefill and decoding of a model of 8 billion parameters.

    python benchmarks/bench_generation.py [--layers 32] [--context 1024] [--batches 1 8 64 256]

Prints milliseconds per step, tokens per second and the share of the limit. Decoding is limited by the memory bandwidth
(--bandwidth, TB/s) for weights and cached keys, prefill by the FLOPs of GEMMs and attention (--tflops).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.inference.engine import Engine
from megatron.core.inference.requests import Request
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.scheduler import Limits
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

VOCABULARY = 128256


def build(layers: int, length: int) -> Any:
    """The sizes of Llama 3 8B with initial weights, in bf16."""
    config = TransformerConfig(
        num_layers=layers, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32, num_query_groups=8,
        swiglu=True, normalization="RMSNorm", add_bias_linear=False, params_dtype=torch.bfloat16, bf16=True,
        hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    return GPTModel(
        config, get_gpt_decoder_block_spec(config), vocab_size=VOCABULARY, max_sequence_length=length,
        position_embedding_type="rope", rotary_base=500000, share_embeddings_and_output_weights=False,
    ).cuda()  # fmt: skip


def timed_steps(engine: Engine, steps: int) -> float:
    """Seconds per step, after two."""
    for _ in range(2):
        engine.step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        engine.step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--bandwidth", type=float, default=4.2, help="TB/s (H200: 4.2, H100: 2.9)")
    parser.add_argument("--tflops", type=float, default=650.0)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.stdout.write("needs a GPU\n")
        return 0
    length = max(args.context + 64, 8192 + 64)
    model = build(args.layers, length)
    weights = sum(x.numel() for name, x in model.named_parameters() if "word_embeddings" not in name)
    limits = Limits(max_length=length, max_tokens=8192, max_sequences=max(args.batches))
    engine = Engine(model, limits)
    sys.stdout.write(f"{torch.cuda.get_device_name()}, {args.layers} layers, {engine.pool.num_usable} pages\n")
    greedy = Sampling(temperature=0)
    for length in (512, 2048, 8192):
        engine.generate([Request(prompt=[1] * length, max_new_tokens=1, sampling=greedy)])  # warm up
        torch.cuda.synchronize()
        start = time.perf_counter()
        engine.generate([Request(prompt=[2 + length] * length, max_new_tokens=1, sampling=greedy)])
        seconds = time.perf_counter() - start
        flops = 2 * weights * length + 2 * 2 * args.layers * 4096 * length**2 / 2
        share = flops / (args.tflops * 1e12) / seconds
        sys.stdout.write(f"prefill {length:5d}: {seconds * 1e3:8.1f} ms {length / seconds:9.0f} tok/s {share:6.1%}\n")
    for batch in args.batches:
        for number in range(batch):
            ids = [number + 1] * (args.context - 32)
            engine.add(Request(prompt=ids, max_new_tokens=60, sampling=greedy))
        while engine.scheduler.waiting or any(len(x.ids) - x.num_cached > 1 for x in engine.scheduler.running):
            engine.step()
        seconds = timed_steps(engine, 20)
        needed = 2 * weights + batch * args.context * 2 * args.layers * 8 * 128 * 2
        share = needed / (args.bandwidth * 1e12) / seconds
        sys.stdout.write(
            f"decode batch {batch:4d}: {seconds * 1e3:8.2f} ms {batch / seconds:9.0f} tok/s {share:6.1%}\n"
        )
        for running in tuple(engine.scheduler.running):
            engine.cancel(running.number)
    return 0


if __name__ == "__main__":
    sys.exit(main())
