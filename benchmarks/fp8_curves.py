"""Compare loss curves of fp8 recipes with bf16: 2,000 steps of a small GPT on the sources of Python's library.

    python benchmarks/fp8_curves.py --corpus FOLDER --prepare                # only make the tokens
    python benchmarks/fp8_curves.py --corpus FOLDER                          # all curves, at the same time on one GPU
    python benchmarks/fp8_curves.py --draw docs/guides/fp8_loss.svg          # plot the stored curves (matplotlib)

Every recipe and bf16 train with the same seeds (initial weights and order of samples). The gap of a recipe is the mean
over the seeds of its loss minus the loss of bf16; it is compared with the standard deviation of bf16 between seeds.
Losses are the mean training loss of the last 200 steps and the validation loss. Exit code 1 if a gap is larger than the
standard deviation. Writes benchmarks/results/fp8_curves.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness.environment import environment
from benchmarks.harness.jobs import read_records, reason, run_command, shown

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "fp8_curves.json"
STEPS, VOCAB, LAST, TIMEOUT = 2000, 8192, 200, 550
FLAGS = (
    "--num-layers 8 --hidden-size 512 --ffn-hidden-size 1536 --num-attention-heads 8 --seq-length 512 "
    "--max-position-embeddings 512 --position-embedding-type rope --normalization RMSNorm --swiglu --bf16 "
    "--disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 16 --global-batch-size 16 "
    "--lr-decay-style cosine --lr-warmup-iters 100 --weight-decay 0.1 --adam-beta2 0.95 "
    "--clip-grad 1.0 --tokenizer-type HuggingFaceTokenizer --split 95,5,0 --num-workers 1 "
    "--eval-interval 500 --eval-iters 50 --log-interval 1"
)
RATES = "--lr 1e-3 --min-lr 1e-4 "
SEEDS = (1, 2, 3, 4, 5)
RECIPES = {
    "bf16": "",
    "tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise",
    "delayed": "--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max",
    "blockwise": "--fp8-format e4m3 --fp8-recipe blockwise",
}
POINT = 20
"""Steps of a stored point of a curve."""


COLORS = {"bf16": "black", "tensorwise": "tab:blue", "delayed": "tab:green", "blockwise": "tab:red"}


def make_tokens(folder: Path) -> Path:
    """Make corpus, tokenizer and tokens in ``folder`` unless they exist; return the prefix of the tokens."""
    prefix = folder / "corpus_text_document"
    if not prefix.with_suffix(".idx").exists():
        folder.mkdir(parents=True, exist_ok=True)
        corpus, tokenizer = folder / "corpus.jsonl", folder / "tokenizer"
        for command in (
            ["tools/make_corpus.py", "--output", corpus],
            ["tools/train_tokenizer.py", "--input", corpus, "--vocab-size", VOCAB, "--max-bytes", 8_000_000,
             "--output", tokenizer],
            ["tools/preprocess_data.py", "--input", corpus, "--output-prefix", folder / "corpus",
             "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tokenizer, "--append-eod"],
        ):  # fmt: skip
            subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, check=True, capture_output=True)
    return prefix


def train(flags: str, prefix: Path, steps: int) -> dict[str, Any]:
    """Train one curve with ``flags`` next to ``FLAGS``; return its losses, or the error."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        words = [*FLAGS.split(), *flags.split(), "--train-iters", str(steps), "--tensorboard-dir", str(folder)]
        command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *words, "--data-path", str(prefix)]
        command += ["--tokenizer-model", str(prefix.parent / "tokenizer")]
        job = run_command(command, Path(temporary), TIMEOUT)
        typed = shown(command, folder).replace(str(prefix.parent), "CORPUS")
        if job is None or job.returncode:
            return {"command": typed, "error": "timeout" if job is None else reason(job.stderr)}
        records = read_records(folder / "metrics.jsonl")
    losses = [each["lm loss"] for each in records if each["kind"] == "train"]
    validation = [each["lm loss"] for each in records if each["kind"] == "valid"]
    return {
        "command": typed, "losses": losses, "validation": validation,
        "last": statistics.fmean(losses[-LAST:]), "last validation": validation[-1] if validation else None,
    }  # fmt: skip


def points(losses: list[float]) -> list[float]:
    """Return the means of :data:`POINT` steps each."""
    return [round(statistics.fmean(losses[at : at + POINT]), 5) for at in range(0, len(losses), POINT)]


def compare(curves: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Compare each recipe with bf16 of the same seeds. ``error`` is the standard error of the mean ``gap``, ``seeds``
    the standard deviation of bf16 between seeds."""
    rows = []
    for key in ("last", "last validation"):
        base = [curve[key] for curve in curves["bf16"]]
        noise = statistics.stdev(base)
        for name in [each for each in curves if each != "bf16"]:
            gaps = [curve[key] - other for curve, other in zip(curves[name], base, strict=True)]
            gap, error = statistics.fmean(gaps), statistics.stdev(gaps) / len(gaps) ** 0.5
            row = {"recipe": name, "loss": key, "gap": gap, "error": error, "seeds": noise}
            rows.append({**row, "passed": abs(gap) <= noise})
    return rows


def draw(stored: dict[str, Any], path: Path) -> None:
    """Plot the stored curves, smoothed over 50 steps, and their differences from bf16."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "fp8"
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 7), sharex=True, height_ratios=(3, 2))
    curves = {name: [curve["losses"] for curve in each] for name, each in stored["curves"].items()}
    steps = [POINT * (at + 1) for at in range(len(curves["bf16"][0]))]
    for name, each in curves.items():
        mean = [statistics.fmean(values) for values in zip(*each)]
        above.plot(steps, mean, label=name, linewidth=1, color=COLORS[name])
        for losses, base in zip(each, curves["bf16"]):
            if name != "bf16":
                below.plot(steps, [a - b for a, b in zip(losses, base)], linewidth=0.4, alpha=0.6, color=COLORS[name])
        if name != "bf16":
            gaps = [[a - b for a, b in zip(losses, base)] for losses, base in zip(each, curves["bf16"])]
            mean = [statistics.fmean(values) for values in zip(*gaps)]
            below.plot(steps, mean, label=f"{name}, mean of the seeds", linewidth=1.5, color=COLORS[name])
    above.set_ylabel("training loss")
    above.set_ylim(top=4.5)
    above.legend()
    below.legend()
    below.set_ylabel("difference from bf16")
    below.set_ylim(-0.15, 0.15)
    below.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="at least two")
    parser.add_argument("--corpus", type=Path, help="folder that keeps corpus, tokenizer and tokens")
    parser.add_argument("--prepare", action="store_true", help="only make the content of --corpus")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--draw", type=Path, metavar="SVG", help="only plot the stored curves")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.draw:
        draw(json.loads(args.output.read_text(encoding="utf-8")), args.draw)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        prefix = make_tokens((args.corpus or Path(temporary)).resolve())
        if args.prepare:
            return 0
        runs = [(name, seed) for name in RECIPES for seed in args.seeds]
        with ThreadPoolExecutor(len(runs)) as pool:
            flags = [f"{RATES}{RECIPES[name]} --seed {seed}" for name, seed in runs]
            found = list(pool.map(lambda each: train(each, prefix, args.steps), flags))
    for (name, seed), curve in zip(runs, found):
        print(f"{name}, seed {seed}:", curve.get("error") or f"{curve['last']:.4f}, {curve['last validation']:.4f}")
    if any("error" in curve for curve in found):
        return 1
    curves: dict[str, list[dict[str, Any]]] = {name: [] for name in RECIPES}
    for (name, _), curve in zip(runs, found):
        curves[name].append({**curve, "losses": points(curve["losses"])})
    rows = compare(curves)
    content = {"environment": environment(), "steps": args.steps, "comparisons": rows, "curves": curves}
    args.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(", ".join(f"{key} {value}" for key, value in row.items()))
    return int(not all(row["passed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
