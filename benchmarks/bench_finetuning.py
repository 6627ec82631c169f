"""Speed of fine-tuning on one GPU next to training on plain rows: adapters, packed conversations, both.

    python benchmarks/bench_finetuning.py [--output benchmarks/results/finetuning.json] [--only pretrain lora] [--smoke]

LLaMA-3-8B's width with 16 layers and random weights in a Hugging Face folder, 8 rows of 8,192 tokens per step.
Conversations have 32 to 4,000 words, most of them few. Prints tokens/s (all places of a row), TFLOP/s, peak memory and
the filled share of the packed rows. ``--smoke`` is tiny, on a CPU.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.harness import jobs
from benchmarks.harness.environment import environment

LORA = "--lora-rank 16 --lora-alpha 32"
KINDS = {
    "pretrain": "--mock-data",
    "lora": f"--mock-data {LORA}",
    "sft": "--sft --train-data-path {folder}/chats.jsonl",
    "sft and lora": f"--sft --train-data-path {{folder}}/chats.jsonl {LORA}",
}
COMMON = (
    "--load-hf {folder}/model --micro-batch-size 1 --global-batch-size 8 --seq-length {length} --lr 1e-5 "
    "--eval-iters 0 --lr-warmup-iters 2 --attention-dropout 0 --hidden-dropout 0 --log-interval 1 --log-throughput "
    "--num-workers 1 --manual-gc --train-iters {iters} --tensorboard-dir {run}"
)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WARMUP = 3
LARGE = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "rope_theta": 500000.0, "max_position_embeddings": 8192,
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 512,
}  # fmt: skip


def write_inputs(folder: Path, config: dict[str, Any], tokens: int) -> None:
    """Write ``chats.jsonl`` with at least ``tokens`` tokens, and ``model`` with its tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=4)) for _ in range(200)]
    longest = min(2000, config["max_position_embeddings"] // 4)
    with open(folder / "chats.jsonl", "w", encoding="utf-8") as file:
        written = 0
        while written < tokens:
            turns = [min(longest, int(draw.paretovariate(1.0) * 16)) for _ in range(2)]
            user, answer = (" ".join(draw.choices(words, k=turn)) for turn in turns)
            messages = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
            written += sum(turns)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train([str(folder / "chats.jsonl")], trainer)
    full = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=TEMPLATE)
    full.save_pretrained(folder / "model")
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(LlamaConfig(**config, eos_token_id=full.eos_token_id))
    model.bfloat16().save_pretrained(folder / "model")


def measure(kind: str, folder: Path, length: int, iters: int, smoke: bool) -> dict[str, Any]:
    """One fresh job."""
    run = folder / kind.replace(" ", "_")
    words = f"{COMMON} {KINDS[kind]}".format(folder=folder, length=length, iters=iters, run=run)
    command = [sys.executable, str(jobs.ROOT / "pretrain_gpt.py"), *shlex.split(words), *([] if smoke else ["--bf16"])]
    small = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if smoke else {}
    job = jobs.run_command(command, folder, 240, **small)
    shown = jobs.shown(command, run).replace(str(folder), "FOLDER")
    if job is None or job.returncode:
        return {"command": shown, "error": "timeout" if job is None else jobs.reason(job.stderr)}
    timing = [record for record in jobs.read_records(run / "timing.jsonl") if record["kind"] == "timing"]
    losses = [record["lm loss"] for record in jobs.read_records(run / "metrics.jsonl") if record["kind"] == "train"]
    filled = re.search(r"\(([\d.]+)% filled\)", job.stdout)
    steady = jobs.steady(timing, WARMUP, iters)
    steady["tokens_per_second_per_gpu"] = 8 * length / steady["seconds_per_iteration"]  # the run counts without padding
    return {
        "command": shown, **steady, "losses": [round(loss, 4) for loss in losses],
        "filled_percent": float(filled[1]) if filled else None,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--smoke", action="store_true", help="tiny, on a CPU")
    args = parser.parse_args()
    config, iters = (TINY, 5) if args.smoke else (LARGE, 9)
    length = config["max_position_embeddings"]
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        write_inputs(Path(temporary), config, 8 * length * (iters + 1))
        for kind in args.only:
            rows[kind] = row = measure(kind, Path(temporary), length, iters, args.smoke)
            print(kind, json.dumps(row), flush=True)
            if args.output:
                args.output.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")
    failed = [kind for kind, row in rows.items() if "error" in row]
    speeds = {kind: row["tokens_per_second_per_gpu"] for kind, row in rows.items() if kind not in failed}
    for kind, speed in speeds.items():
        print(f"{kind:<14}{speed:10.0f} tokens/s{speed / speeds.get('pretrain', speed):8.3f} x")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
