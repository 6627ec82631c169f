"""Speed of generation with the paged cache on a GPU: prefill and decoding of a model of 8 billion parameters.

    python benchmarks/bench_generation.py [--layers 32] [--context 2048] [--batches 1 8 64 256]
    python benchmarks/bench_generation.py --profile --batches 1 256     where the time of one decode step goes

Prints milliseconds per step, tokens per second and the share of the limit, decoding with and without CUDA graphs.
Decoding is limited by the memory bandwidth (--bandwidth, TB/s) for weights and cached keys, prefill by the FLOPs of
GEMMs and attention (--tflops).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness.environment import environment
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.inference.engine import Engine
from megatron.core.inference.requests import Request
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.scheduler import Limits
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

OUTPUT = Path(__file__).resolve().parent / "results" / "generation.json"
GREEDY = Sampling(temperature=0)
WARMUP = 3
"""Steps before the timed ones: the first one records a graph."""


def build(args: argparse.Namespace, length: int) -> Any:
    """The sizes of Llama 3 8B with initial weights, in bf16 (--smoke: a small model); --latent: with attention of the
    sizes of DeepSeek-V2."""
    hidden, ffn, heads, groups, vocabulary = (64, 128, 4, 2, 512) if args.smoke else (4096, 14336, 32, 8, 128256)
    attention: dict[str, Any] = {"num_query_groups": groups}
    if args.latent:
        rank, channels = (16, 8) if args.smoke else (512, 128)
        attention = {
            "multi_latent_attention": True, "kv_lora_rank": rank, "qk_head_dim": channels, "v_head_dim": channels,
            "qk_pos_emb_head_dim": channels // 2, "qk_layernorm": True, "rope_type": "rope",
        }  # fmt: skip
    config = TransformerConfig(
        **attention, num_layers=args.layers, hidden_size=hidden, ffn_hidden_size=ffn, num_attention_heads=heads,
        swiglu=True, normalization="RMSNorm", add_bias_linear=False,
        params_dtype=torch.bfloat16, bf16=True, hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    return GPTModel(
        config, get_gpt_decoder_block_spec(config), vocab_size=vocabulary, max_sequence_length=length,
        position_embedding_type="rope", rotary_base=500000, share_embeddings_and_output_weights=False,
        groups=SINGLE_PROCESS,
    ).to("cuda" if torch.cuda.is_available() else "cpu")  # fmt: skip


def prompt(engine: Engine, number: int, length: int) -> list[int]:
    """Random tokens; longer prompts of a number begin with its shorter ones."""
    rng = random.Random(number)
    return [rng.randrange(engine.runner.model.vocab_size) for _ in range(length)]


def timed_step(engine: Engine) -> float:
    """Milliseconds of a step, which ends with a wait for the device."""
    start = time.perf_counter()
    engine.step()
    return (time.perf_counter() - start) * 1e3


class Limit:
    """Least milliseconds of a step."""

    def __init__(self, args: argparse.Namespace, model: Any) -> None:
        self.args, self.config = args, model.config
        self.weights = sum(x.numel() for name, x in model.named_parameters() if "word_embeddings" not in name)

    def prefill(self, length: int) -> float:
        width = self.config.num_attention_heads * self.config.kv_channels  # of latent attention, about
        flops = 2 * self.weights * length + 2 * 2 * self.config.num_layers * width * length**2 / 2
        return flops / (self.args.tflops * 1e9)

    def decode(self, batch: int, context: int) -> float:
        config = self.config
        cached = 2 * config.num_query_groups * config.kv_channels
        if config.multi_latent_attention:
            cached = config.kv_lora_rank + config.qk_pos_emb_head_dim
        return 2 * (self.weights + batch * context * cached * config.num_layers) / (self.args.bandwidth * 1e9)


def prefill_row(engine: Engine, limit: Limit, length: int) -> dict[str, Any]:
    times = []
    for number in range(3):  # the first one loads kernels
        engine.add(Request(prompt=prompt(engine, -1 - number - 10 * length, length), max_new_tokens=1, sampling=GREEDY))
        times.append(sum(timed_step(engine) for _ in iter(lambda: engine.has_work, False)))
    return row("prefill", 1, length, min(times[1:]), limit.prefill(length), length)


def row(kind: str, batch: int, context: int, ms: float, least: float, tokens: int) -> dict[str, Any]:
    return {
        "kind": kind, "batch": batch, "context": context, "ms": round(ms, 3),
        "tokens_per_second": round(tokens / ms * 1e3), "share_of_limit": round(least / ms, 3),
    }  # fmt: skip


def fill(engine: Engine, batch: int, context: int) -> None:
    """Add ``batch`` prompts and compute them, so that the next steps decode."""
    for number in range(batch):
        engine.add(Request(prompt=prompt(engine, number, context), max_new_tokens=2**20, sampling=GREEDY))
    while engine.scheduler.waiting or any(len(x.ids) - x.num_cached > 1 for x in engine.scheduler.running):
        engine.step()


def clear(engine: Engine) -> None:
    for running in tuple(engine.scheduler.running):
        engine.cancel(running.number)


def decode_rows(engine: Engine, limit: Limit, batch: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of steps with CUDA graphs, without, and with draws; the text grows by all these steps."""
    graphs, found = engine.runner.graphs, []
    fill(engine, batch, args.context)
    for kind in ("decode", "decode without graphs", "decode with draws"):
        engine.runner.graphs = None if kind == "decode without graphs" else graphs
        if kind == "decode with draws":
            for running in engine.scheduler.running:
                running.sampling = Sampling(seed=running.number, temperature=0.8)
        times = [timed_step(engine) for _ in range(WARMUP + args.steps)][WARMUP:]
        length = len(engine.scheduler.running[0].ids)
        found.append(row(kind, batch, length, statistics.median(times), limit.decode(batch, length), batch))
    engine.runner.graphs = graphs
    clear(engine)
    return found


def profile(engine: Engine, batch: int, context: int) -> None:
    """Print the kernels of one decode step with CUDA graphs, and the host's time of a step."""
    from torch.profiler import ProfilerActivity

    fill(engine, batch, context)
    plain = min([timed_step(engine) for _ in range(WARMUP + 5)][WARMUP:])
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        engine.step()
    clear(engine)
    events = [x for x in found.events() if x.device_type == torch.autograd.DeviceType.CUDA]
    times: dict[str, list[float]] = {}
    for each in events:
        times.setdefault(each.name, []).append(each.device_time)
    total = sum(sum(each) for each in times.values())
    print(
        f"batch {batch}, context {context}: step {plain:.2f} ms, {len(events)} kernels of {total / 1e3:.2f} ms in all"
    )
    for name, each in sorted(times.items(), key=lambda item: -sum(item[1]))[:16]:
        share, mean = sum(each) / total, sum(each) / len(each)
        print(f"  {sum(each) / 1e3:8.3f} ms {share:6.1%} {len(each):5d} x {mean:8.1f} us  {name:.90}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--context", type=int, default=2048, help="tokens of the prompts before decoding")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 64, 256])
    parser.add_argument("--prefill", type=int, nargs="*", default=[512, 2048, 8192], help="lengths of prompts")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each row")
    parser.add_argument("--bandwidth", type=float, default=4.2, help="TB/s (H200: 4.2, H100: 2.9)")
    parser.add_argument("--tflops", type=float, default=650.0)
    parser.add_argument("--latent", action="store_true", help="multi-latent attention")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a decode step of each batch size")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--smoke", action="store_true", help="tiny, on a CPU too; writes nothing unless --output")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available() and not args.smoke:
        print("needs a GPU; --smoke shows on a CPU that it runs")
        return 0
    if args.smoke:
        args.layers, args.context, args.batches, args.prefill, args.steps = 2, 40, [1, 3], [30], 2
    longest = max([args.context + 4 * (WARMUP + args.steps), *args.prefill]) + 64
    model = build(args, longest)
    limit = Limit(args, model)
    limits = Limits(max_length=longest, max_tokens=8192, max_sequences=max(args.batches, default=1))
    engine = Engine(model, limits)
    print(f"{args.layers} layers, {limit.weights / 1e9:.2f} billion weights per token, {engine.pool.num_usable} pages")
    rows = []
    lengths = () if args.profile else args.prefill
    for length in lengths:
        rows.append(prefill_row(engine, limit, length))
        print(rows[-1], flush=True)
    for batch in args.batches:
        needed = batch * engine.pool.pages_for(args.context + 4 * (WARMUP + args.steps))
        if needed > engine.pool.num_usable:
            print(f"batch {batch}: needs {needed} pages")
        elif args.profile:
            profile(engine, batch, args.context)
        else:
            rows += decode_rows(engine, limit, batch, args)
            print(*rows[-3:], sep="\n", flush=True)
    if rows and (not args.smoke or args.output != parser.get_default("output")):
        settings = {name: getattr(args, name) for name in ("layers", "latent", "steps", "bandwidth", "tflops")}
        record = {"environment": environment(cpu=args.smoke), "settings": settings, "rows": rows}
        args.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
