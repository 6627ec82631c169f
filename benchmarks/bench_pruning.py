"""Compare ways to a model of half the size: from random weights, pruned and trained, pruned and distilled.

    python benchmarks/bench_pruning.py --folder RUNS

A story model is trained on a CPU, pruned to half of its parameters, and the small size is trained for the same number
of tokens in three ways with three seeds each. Writes the losses of the full validation split to
benchmarks/results/pruning.json. Runs whose folder exists in RUNS are not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "pruning.json"
MODEL = (
    "--num-attention-heads 4 --swiglu --max-position-embeddings 128 --position-embedding-type rope "
    "--normalization RMSNorm --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --kv-channels 32 "
    "--tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer"
)
PARENT = f"--num-layers 4 --hidden-size 128 --ffn-hidden-size 384 {MODEL}"
SMALL = f"--num-layers 3 --hidden-size 96 --ffn-hidden-size 256 {MODEL}"
SIZES = {"num_layers": 3, "hidden_size": 96, "ffn_hidden_size": 256}
DATA = (
    "--data-path stories_text_document --split 95,5,0 --seq-length 128 --micro-batch-size 16 --global-batch-size 16 "
    "--lr 4e-3 --min-lr 4e-4 --lr-decay-style cosine --lr-warmup-iters 10 --num-workers 0 --full-validation "
    "--eval-iters 1 --log-interval 20 --eval-interval 1000"
)
SEEDS = (1, 2, 3)
PRUNED = "--pretrained-checkpoint pruned --use-checkpoint-args"
WAYS = {
    "random weights": SMALL,
    "pruned, trained on the text": PRUNED,
    "pruned, distilled from the parent": f"{PRUNED} --export-kd-teacher-load parent",
}


def run(folder: Path, command: str, *words: str) -> None:
    """Run a command of this checkout in ``folder``; its output goes to the end of ``log``."""
    with open(folder / "log", "a", encoding="utf-8") as log:
        program = [sys.executable, "-m", "megatron", *command.split(), *words]
        subprocess.run(program, cwd=folder, check=True, stdout=log, stderr=log)


def train(folder: Path, name: str, flags: str, iterations: int, seed: int) -> float:
    """Train the run ``name``, unless its folder exists; return its loss on the validation split."""
    if not (folder / name).exists():
        run(folder, f"pretrain gpt {flags} {DATA} --train-iters {iterations} --seed {seed} --save {name}")
    lines = (folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    (*_, loss) = [record["lm loss"] for record in map(json.loads, lines) if record["kind"] == "valid"]
    return float(loss)


def prepare(folder: Path) -> None:
    """Write the corpus, its tokenizer and its tokens, unless they exist."""
    if (folder / "stories_text_document.idx").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    run(folder, "make-corpus --documents stories --max-bytes 4000000 --output stories.jsonl")
    run(folder, "train-tokenizer --input stories.jsonl --vocab-size 1024 --output tokenizer")
    tokenizer = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer"
    run(folder, f"preprocess --input stories.jsonl --output-prefix stories --append-eod --workers 2 {tokenizer}")


def main() -> None:
    """Run everything and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--parent-iterations", type=int, default=400)
    parser.add_argument("--iterations", type=int, default=60, help="of each small model")
    args = parser.parse_args()
    prepare(args.folder)
    losses: dict[str, object] = {"parent": train(args.folder, "parent", PARENT, args.parent_iterations, 1234)}
    if not (args.folder / "pruned").exists():
        data = "--data-path stories_text_document --split 95,5,0 --calib-size 256"
        run(args.folder, f"prune --load parent --save pruned {data}", "--prune-export-config", json.dumps(SIZES))
    losses["pruned"] = train(args.folder, "pruned_loss", f"{PRUNED} --skip-train", args.iterations, 1)
    for way, flags in WAYS.items():
        names = [f"{way.replace(', ', '_').replace(' ', '_')}_{seed}" for seed in SEEDS]
        values = [train(args.folder, name, flags, args.iterations, seed) for name, seed in zip(names, SEEDS)]
        losses[way] = {"seeds": values, "mean": statistics.mean(values)}
        print(f"{way}: {statistics.mean(values):.3f}", flush=True)
    settings = {"parent": PARENT, "small": SMALL, "data": DATA, "sizes": SIZES}
    iterations = {"parent": args.parent_iterations, "small": args.iterations}
    result = {"settings": settings, "iterations": iterations, "validation loss": losses}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
