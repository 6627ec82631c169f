"""Compare loss curves of fp8 recipes with bf16: 2,000 steps of a small GPT on the sources of Python's library.

    python benchmarks/fp8_curves.py --corpus FOLDER --prepare                # only make the tokens
    python benchmarks/fp8_curves.py --corpus FOLDER                          # all curves, at the same time on one GPU
    python benchmarks/fp8_curves.py --draw docs/guides/fp8_loss.svg          # plot the stored curves (matplotlib)

Each fp8 curve is compared with bf16 of the same seed. The difference is compared with the differences between bf16 runs
of several seeds (initial weights and order of samples). The figures are the mean training loss of the last 200 steps
and the validation loss. Exit code 1 if an fp8 recipe differs more than the seeds do. Writes
benchmarks/results/fp8_curves.json.
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
CURVES = {
    "bf16": "",
    "bf16, seed 2": "--seed 2",
    "bf16, seed 3": "--seed 3",
    "tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise",
    "delayed": "--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max",
    "blockwise": "--fp8-format e4m3 --fp8-recipe blockwise",
}


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


def compare(curves: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare each recipe with bf16; ``seeds`` is the largest difference between bf16 runs of two seeds."""
    rows = []
    seeds = [name for name in CURVES if name.startswith("bf16")]
    for key in ("last", "last validation"):
        values = {name: curve[key] for name, curve in curves.items() if curve.get(key) is not None}
        noise = max((abs(values[a] - values[b]) for a in seeds for b in seeds if {a, b} <= values.keys()), default=0.0)
        for name in values.keys() - set(seeds) if "bf16" in values else ():
            gap = values[name] - values["bf16"]
            rows.append({"recipe": name, "loss": key, "gap": gap, "seeds": noise, "passed": abs(gap) <= noise})
    return sorted(rows, key=lambda row: (row["loss"], row["recipe"]))


def draw(stored: dict[str, Any], path: Path) -> None:
    """Plot the stored curves, smoothed over 50 steps, and their differences from bf16."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "fp8"
    from matplotlib import pyplot

    def smooth(values: list[float], width: int = 50) -> list[float]:
        sums = [0.0]
        for value in values:
            sums.append(sums[-1] + value)
        return [(sums[at + width] - sums[at]) / width for at in range(0, len(values) - width, 10)]

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 7), sharex=True, height_ratios=(3, 2))
    base = smooth(stored["curves"]["bf16"]["losses"])
    steps = [50 + 10 * at for at in range(len(base))]
    for name, curve in stored["curves"].items():
        style = {"linestyle": ":", "color": "gray"} if "seed" in name else {"color": COLORS[name]}
        values = smooth(curve["losses"])
        above.plot(steps, values, label=name, linewidth=1, **style)
        if name != "bf16":
            difference = [value - other for value, other in zip(values, base)]
            below.plot(steps, difference, label=name, linewidth=1, **style)
    above.set_ylabel("training loss")
    above.set_ylim(top=4.5)
    above.legend()
    below.set_ylabel("difference from bf16")
    below.set_ylim(-0.15, 0.15)
    below.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--curves", nargs="+", choices=list(CURVES), default=list(CURVES))
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
        with ThreadPoolExecutor(len(args.curves)) as pool:
            found = pool.map(lambda name: train(RATES + CURVES[name], prefix, args.steps), args.curves)
            curves = dict(zip(args.curves, found))
    rows = compare(curves)
    content = {"environment": environment(), "steps": args.steps, "comparisons": rows, "curves": curves}
    args.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    for name, curve in curves.items():
        print(name, curve.get("error") or f"{curve['last']:.4f}, validation {curve['last validation']}", flush=True)
    for row in rows:
        print(", ".join(f"{key} {value}" for key, value in row.items()))
    return int(any("error" in curve for curve in curves.values()) or not all(row["passed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
