"""Compare loss curves on real text: a Llama-shaped 345M model, or one of 64 fine-grained experts, 400 steps of 65,536
tokens, from equal initial weights.

    python benchmarks/collect_text.py --output text --sample-tokens 26500000
    python benchmarks/real_text_curves.py --data text/sample --curves bf16 --output DIR/real_text.json   # one per call
    python benchmarks/real_text_curves.py --data text/sample --shape experts --curves "bf16, other weights" ...
    python benchmarks/real_text_curves.py --draw docs/guides/real_text.svg                               # matplotlib

Curves: this program in bf16 and in fp8 (tensorwise, hybrid), from other initial weights and with micro-batches of half
the size, which round otherwise (noise), a plain loop of torch around ``transformers``, and Megatron-LM with Transformer
Engine (``--megatron-lm CHECKOUT``) in bf16 and in fp8. All read one Hugging Face folder of initial weights (made from a
seed, bf16) and the same tokens in the order of GPTDataset. The plain loop shares no other code with this program: fp32
master weights and gradients, AdamW, the cosine schedule. Differences are means of :data:`WINDOW` steps, against bf16
from the same weights (Megatron-LM in fp8: against Megatron-LM); a curve passes if its differences are smaller than the
noise (root mean square, and at the end). The mean of the fp8 curves from two weights has to end within 0.25 %, if its
standard error is smaller than that. No network is used. Results are merged with --output, or else with a file of
benchmarks/results: real_text.json, for another shape real_text_SHAPE.json, for another number of steps also with
_STEPS. Exit code 1 if a run or a comparison fails."""

from __future__ import annotations

import argparse
import json
import lzma
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from benchmarks.harness.environment import environment, version_of
from benchmarks.harness.jobs import read_records, reason, run_command, shown

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "real_text.json"
WINDOW, FP8_BAND = 20, 0.0025
SEED, STEPS = 1234, 400
SHAPES = {
    "345M": {"hidden": 1024, "ffn": 2816, "layers": 24, "heads": 16, "length": 2048, "micro": 16, "batch": 32,
             "vocab": 32_000},
    "small": {"hidden": 128, "ffn": 352, "layers": 4, "heads": 4, "length": 128, "micro": 2, "batch": 8,
              "vocab": 32_000},
    "tiny": {"hidden": 64, "ffn": 176, "layers": 2, "heads": 4, "length": 32, "micro": 2, "batch": 4,
             "vocab": 512},
    # a fifth of 0.9 billion parameters reads a token; as Qwen3-MoE, with a balancing loss per sequence
    "experts": {"hidden": 1024, "ffn": 352, "layers": 12, "heads": 16, "length": 2048, "micro": 16, "batch": 32,
                "vocab": 32_000, "experts": 64, "choices": 8},
    "tiny-experts": {"hidden": 64, "ffn": 48, "layers": 2, "heads": 4, "length": 32, "micro": 2, "batch": 4,
                     "vocab": 512, "experts": 8, "choices": 3},
}  # fmt: skip
RATE = {"max": 6e-4, "min": 6e-5, "warmup": 40}
DECAY, BETAS, CLIP, BALANCE = 0.1, (0.9, 0.95), 1.0, 0.01
MEGATRON_LM = (
    "--finetune --no-load-optim --no-load-rng --ckpt-format torch_dist --dist-ckpt-strictness log_all "
    "--transformer-impl transformer_engine --use-mcore-models --no-rope-fusion --no-gradient-accumulation-fusion "
    "--eval-interval 1000"
)
FP8 = "--fp8-format hybrid --fp8-recipe tensorwise"
OTHER, HALVES = ", other weights", "bf16, half micro-batches"
NOISE, MEAN, IN_FP8 = ("bf16" + OTHER, HALVES), ", mean of two weights", ", fp8"
CURVES = {
    "bf16": "", "fp8": FP8, "bf16" + OTHER: "", "transformers": None, "megatron-lm": "", "fp8" + OTHER: FP8, HALVES: "",
    "transformers" + OTHER: None, "megatron-lm" + IN_FP8: FP8,
}  # fmt: skip
"""Flags in addition to :func:`flags`; None: not a command line."""


def initial_weights(shape: dict[str, int], seed: int, folder: Path) -> Path:
    """Write a model of ``shape`` with random bf16 weights from ``seed``, a LlamaForCausalLM or with experts a
    Qwen3MoeForCausalLM; return ``folder``."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": shape["vocab"], "hidden_size": shape["hidden"], "intermediate_size": shape["ffn"],
        "num_hidden_layers": shape["layers"], "num_attention_heads": shape["heads"], "tie_word_embeddings": True,
        "num_key_value_heads": shape["heads"], "max_position_embeddings": shape["length"], "rms_norm_eps": 1e-5,
        "initializer_range": 0.02,
    }  # fmt: skip
    if "experts" in shape:
        config: Any = Qwen3MoeConfig(
            **settings, num_experts=shape["experts"], num_experts_per_tok=shape["choices"], norm_topk_prob=True,
            moe_intermediate_size=shape["ffn"], head_dim=shape["hidden"] // shape["heads"],
        )  # fmt: skip
    else:
        config = LlamaConfig(**settings)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def flags(shape: dict[str, int], steps: int, prefix: Path, precision: str = "--bf16") -> list[str]:
    """Return the flags that this program and Megatron-LM share. ``precision``: a flag, or empty for fp32."""
    experts = (
        f"--num-experts {shape['experts']} --moe-router-topk {shape['choices']} --moe-ffn-hidden-size {shape['ffn']} "
        f"--qk-layernorm --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff {BALANCE} "
        "--moe-token-dispatcher-type alltoall --moe-grouped-gemm"
    ) if "experts" in shape else ""  # fmt: skip
    return (
        f"--num-layers {shape['layers']} --hidden-size {shape['hidden']} --ffn-hidden-size {shape['ffn']} "
        f"--num-attention-heads {shape['heads']} --seq-length {shape['length']} "
        f"--max-position-embeddings {shape['length']} --position-embedding-type rope --normalization RMSNorm "
        f"--norm-epsilon 1e-5 --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 {precision} "
        f"--micro-batch-size {shape['micro']} --global-batch-size {shape['batch']} --train-iters {steps} "
        f"--lr {RATE['max']} --min-lr {RATE['min']} --lr-decay-style cosine --lr-decay-iters {steps} "
        f"--lr-warmup-iters {min(RATE['warmup'], steps // 2)} --weight-decay {DECAY} --adam-beta1 {BETAS[0]} "
        f"--adam-beta2 {BETAS[1]} --clip-grad {CLIP} --seed {SEED} --split 1,0,0 --eval-iters 0 --log-interval 1 "
        f"--num-workers 1 --tokenizer-type NullTokenizer --data-path {prefix} {experts}"
    ).split()


def token_prefix(folder: Path) -> Path:
    """Return the data set in a folder of collect_text.py, or in its sample, which is decompressed at first use."""
    if (folder / "corpus_text_document.idx").exists():
        return folder / "corpus_text_document"
    prefix = folder / "text"
    if not prefix.with_suffix(".bin").exists():
        prefix.with_suffix(".bin").write_bytes(lzma.decompress(prefix.with_suffix(".bin.xz").read_bytes()))
    return prefix


def learning_rate(step: int, steps: int) -> float:
    """Rate of update ``step`` (from 0): linear from 0, then a cosine. The first update has rate 0."""
    warmup = min(RATE["warmup"], steps // 2)
    if step <= warmup:
        return RATE["max"] * step / warmup
    ratio = (step - warmup) / (steps - warmup)
    return RATE["min"] + (RATE["max"] - RATE["min"]) * (math.cos(math.pi * ratio) + 1) / 2


def samples(shape: dict[str, int], steps: int, prefix: Path) -> Callable[[int], torch.Tensor]:
    """Return a function from a step to its tokens [batch, length + 1]."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    tokenizer = SimpleNamespace(eod=shape["vocab"] - 1, vocab_size=shape["vocab"])
    config = GPTDatasetConfig(
        random_seed=SEED, sequence_length=shape["length"], blend=([str(prefix)], None), split="1,0,0",
        tokenizer=tokenizer, reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
    )  # fmt: skip
    size = shape["batch"]
    data = BlendedMegatronDatasetBuilder(GPTDataset, [steps * size, 0, 0], lambda: True, config).build()[0]

    def batch(step: int) -> torch.Tensor:
        rows = [data[index] for index in range(step * size, (step + 1) * size)]
        return torch.tensor(np.stack([np.append(row["tokens"], row["labels"][-1]) for row in rows])).long()

    return batch


def balancing_loss(router_logits: Sequence[torch.Tensor], sequences: int, choices: int) -> torch.Tensor:
    """Return the sum over layers, of logits [sequences * s, e], of the mean over sequences of e times the product of
    the fraction of choices and the mean probability of each expert (arXiv 2101.03961, equation 4)."""
    losses = []
    for logits in router_logits:
        scores = logits.float().softmax(-1).unflatten(0, (sequences, -1))
        chosen = torch.nn.functional.one_hot(scores.topk(choices).indices, scores.shape[-1])
        losses.append((chosen.float().mean((1, 2)) * scores.mean(1)).sum(1).mean() * scores.shape[-1])
    return torch.stack(losses).sum()


def plain_loop(
    shape: dict[str, int], steps: int, batch: Callable[[int], torch.Tensor], weights: Path, stop_after: float
) -> list[float]:
    """Train with torch and ``transformers`` only, for at most ``stop_after`` seconds; return the loss of each step."""
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.to(device).train()
    working = list(model.parameters())
    master = [torch.nn.Parameter(parameter.detach().float()) for parameter in working]
    groups = [  # no weight decay of norms
        {"params": [p for p in master if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in master if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=BETAS, eps=1e-8)
    num_micro = 2 * shape["batch"] // shape["micro"]  # logits in fp32 need more memory than this program's
    routers = {"output_router_logits": True} if "experts" in shape else {}
    losses, start = [], time.perf_counter()
    for step in range(steps):
        total = torch.zeros((), device=device)
        for parameter in master:
            parameter.grad = torch.zeros_like(parameter)
        for rows in batch(step).to(device).split(shape["batch"] // num_micro):
            outputs = model(input_ids=rows[:, :-1], use_cache=False, **routers)
            loss = torch.nn.functional.cross_entropy(outputs.logits.float().flatten(0, 1), rows[:, 1:].flatten())
            total += loss.detach() / num_micro
            if routers:
                loss = loss + BALANCE * balancing_loss(outputs.router_logits, len(rows), shape["choices"])
            (loss / num_micro).backward()
            for parameter, low in zip(master, working, strict=True):
                parameter.grad += low.grad  # fp32 sum over micro-batches
                low.grad = None
        torch.nn.utils.clip_grad_norm_(master, CLIP)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        optimizer.step()
        with torch.no_grad():
            for parameter, low in zip(master, working, strict=True):
                low.copy_(parameter)
        losses.append(total.item())
        if step % 20 == 0:
            print(f"step {step + 1}: {losses[-1]:.4f}, {time.perf_counter() - start:.0f} s", flush=True)
        if time.perf_counter() - start > stop_after:
            break
    return losses


def run_program(
    name: str, words: Sequence[str], vocab: int, weights: Path, folder: Path, timeout: float
) -> dict[str, Any]:
    """Train with pretrain_gpt.py of this program; return command and losses, or the error."""
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *words, "--vocab-size", str(vocab)]
    command += [*(CURVES[name] or "").split(), "--load-hf", str(weights), "--tensorboard-dir", str(folder / "run")]
    job = run_command(command, folder, timeout)
    result = {"command": shown(command, folder)}
    if job is None or job.returncode:
        return {**result, "error": f"not finished after {timeout:.0f} s" if job is None else reason(job.stderr)}
    records = [record for record in read_records(folder / "run" / "metrics.jsonl") if record["kind"] == "train"]
    return {**result, "losses": [record["lm loss"] for record in records]}


def run_megatron_lm(
    name: str, checkout: Path, words: Sequence[str], vocab: int, weights: Path, folder: Path, timeout: float
) -> dict[str, Any]:
    """Train with Megatron-LM's pretrain_gpt.py in ``checkout``, from a converted checkpoint. Its NullTokenizer adds an
    id for the end of a document, so that ``vocab`` - 1 there is ``vocab`` here."""
    converted = folder / "converted"
    convert = ["megatron", "convert", "--loader", "hf", "--saver", "megatron_torch_dist", "--load-dir", str(weights)]
    convert += ["--save-dir", str(converted), "--no-checking"]
    subprocess.run([sys.executable, "-m", *convert], cwd=ROOT, check=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
    command += [str(checkout / "pretrain_gpt.py"), *words, "--vocab-size", str(vocab - 1), "--load", str(converted)]
    command += [*MEGATRON_LM.split(), *(CURVES[name] or "").split()]
    job = run_command(command, folder, timeout, PYTHONPATH=os.pathsep.join([str(checkout), *sys.path[1:]]))
    result = {"command": shown(command, folder), "megatron-lm": str(checkout.name)}
    if job is None or job.returncode:
        return {**result, "error": f"not finished after {timeout:.0f} s" if job is None else reason(job.stderr)}
    return {**result, "losses": [float(value) for value in re.findall(r"lm loss: ([\d.E+-]+)", job.stdout)]}


def draw_curve(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train one curve; return its losses and conditions, or the error."""
    shape, start = SHAPES[args.shape], time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prefix = token_prefix(args.data.resolve())
        weights = initial_weights(shape, 2 if name.endswith(OTHER) else 1, folder / "weights")
        if name == HALVES:
            shape = {**shape, "micro": shape["micro"] // 2}
        words = flags(shape, args.steps, prefix)
        if name.startswith("transformers"):
            losses = plain_loop(shape, args.steps, samples(shape, args.steps, prefix), weights, args.timeout)
            result: dict[str, Any] = {"command": f"transformers {version_of('transformers')}", "losses": losses}
        elif name.startswith("megatron-lm"):
            checkout = args.megatron_lm.resolve()
            result = run_megatron_lm(name, checkout, words, shape["vocab"], weights, folder, args.timeout)
        else:
            result = run_program(name, words, shape["vocab"], weights, folder, args.timeout)
    record = {"seconds": round(time.perf_counter() - start), "environment": environment()}
    return {**result, **record, "losses": [round(loss, 5) for loss in result.get("losses", [])]}


def windows(losses: Sequence[float]) -> list[float]:
    """Return the means of :data:`WINDOW` steps."""
    return [statistics.fmean(losses[at : at + WINDOW]) for at in range(0, len(losses) - WINDOW + 1, WINDOW)]


def rms(values: Sequence[float]) -> float:
    return math.hypot(*values) / max(1, len(values)) ** 0.5


def compare(curves: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare each curve with bf16 from the same weights over the steps that both have; differences of window means, in
    nats. One pair differs as much as the larger noise. The mean of two fp8 pairs decides only if its standard error is
    within the band."""
    means = {name: windows(curve.get("losses", [])) for name, curve in curves.items()}
    base = means.get("bf16", [])
    noise = max(([b - a for a, b in zip(base, means.get(name, []))] for name in NOISE), key=rms)
    pairs = {name: (base, values) for name, values in means.items() if name != "bf16"}
    if "megatron-lm" + IN_FP8 in pairs:
        pairs["megatron-lm" + IN_FP8] = means["megatron-lm"], means["megatron-lm" + IN_FP8]
    for name in ("fp8", "transformers"):
        if name + OTHER in pairs:
            pairs[name + OTHER] = means["bf16" + OTHER], means[name + OTHER]
            pairs[name + MEAN] = mean("bf16", means), mean(name, means)
    rows = []
    for name, (base, values) in pairs.items():
        differences = [b - a for a, b in zip(base, values)]
        if not differences:
            continue
        row = {
            "curve": name, "steps": WINDOW * len(differences),
            "rms": rms(differences),
            "largest": max(map(abs, differences)), "last": differences[-1],
            "last_relative": differences[-1] / base[len(differences) - 1],
        }  # fmt: skip
        if name.endswith(MEAN):
            one, other = (means[name.removesuffix(MEAN) + end][-1] - means["bf16" + end][-1] for end in ("", OTHER))
            row["error_relative"] = abs(one - other) / 2 / base[len(differences) - 1]
            if name.startswith("fp8") and row["error_relative"] <= FP8_BAND:
                row["passed"] = abs(row["last_relative"]) <= FP8_BAND
        elif name not in NOISE and noise:
            row["noise"] = rms(noise)
            row["passed"] = row["rms"] < row["noise"] and abs(row["last"]) < max(map(abs, noise))
        rows.append(row)
    return rows


def mean(name: str, means: dict[str, list[float]]) -> list[float]:
    """Return the mean of the curves ``name`` from both weights."""
    return [statistics.fmean(pair) for pair in zip(means[name], means[name + OTHER])]


def draw(stored: dict[str, Any], path: Path) -> None:
    """Plot the losses, and their differences from bf16."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "real text"
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 7), sharex=True, height_ratios=(3, 2))
    base = windows(stored["curves"]["bf16"]["losses"])
    for name, curve in stored["curves"].items():
        means = windows(curve.get("losses", []))
        steps = [WINDOW * (index + 1) for index in range(len(means))]
        above.plot(steps, means, label=name, linewidth=1)
        below.plot(steps, [b - a for a, b in zip(base, means)], label=name, linewidth=1)
    above.set_ylabel("training loss")
    above.legend()
    below.set_ylabel("difference from bf16")
    below.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def results_file(shape: str, steps: int) -> Path:
    """Return the default --output: each shape and number of steps has a file."""
    names = [RESULTS.stem, *([shape] if shape != "345M" else []), *([str(steps)] if steps != STEPS else [])]
    return RESULTS.with_name("_".join(names) + ".json")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of collect_text.py with text.bin.xz and text.idx")
    parser.add_argument("--curves", nargs="+", choices=list(CURVES), default=list(CURVES)[:4])
    parser.add_argument("--shape", choices=list(SHAPES), default="345M")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--timeout", type=float, default=540, help="seconds per curve")
    parser.add_argument("--megatron-lm", type=Path, metavar="CHECKOUT", help="for the curves of Megatron-LM")
    parser.add_argument("--draw", type=Path, metavar="SVG", help="only plot the stored curves")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    default = results_file(args.shape, args.steps)
    args.output = args.output or default
    source = args.output if args.output.exists() else default
    stored = json.loads(source.read_text(encoding="utf-8")) if source.exists() else {}
    if args.draw:
        draw(stored, args.draw)
        return 0
    if args.data is None or (args.megatron_lm is None and any(name.startswith("megatron-lm") for name in args.curves)):
        parser.error("--data is required, and --megatron-lm for the curves of Megatron-LM")
    same = stored.get("shape") == args.shape and stored.get("steps") == args.steps
    content: dict[str, Any] = {"shape": args.shape, "steps": args.steps, "curves": stored["curves"] if same else {}}
    for name in args.curves:
        curve = content["curves"][name] = draw_curve(name, args)
        print(f"{name}: {curve.get('error') or curve['losses'][-1]}, {curve['seconds']} s", flush=True)
        content["comparisons"] = compare(content["curves"])
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    for row in content["comparisons"]:
        print(
            ", ".join(
                f"{key} {value:.5f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            )
        )
    failed = any("error" in content["curves"][name] for name in args.curves)
    return int(failed or not all(row.get("passed", True) for row in content["comparisons"]))


if __name__ == "__main__":
    sys.exit(main())
