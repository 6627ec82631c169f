"""Compare loss curves of all devices and backends: 200 steps of a small GPT on the sources of Python's library.

    python benchmarks/loss_curves.py                            # every curve that this machine can draw, compared
    python benchmarks/loss_curves.py --curves cpu-fp32          # only the reference
    python benchmarks/loss_curves.py --corpus FOLDER            # tokens made earlier (--prepare), kept there

Compared are, within the bands below: bf16 on a GPU with fp32 on one CPU rank, and with bf16 through Transformer Engine;
the two runs in deterministic mode must agree in every bit of every loss and gradient norm. Exit code 1 if a comparison
fails. Writes benchmarks/results/loss_curves.json; curves over other tokens (another Python has other sources) are
replaced, never compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.harness.environment import environment, version_of
from benchmarks.harness.jobs import read_records, reason, run_command, shown

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "loss_curves.json"
STEPS = 200
FLAGS = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 "
    "--hidden-dropout 0 --micro-batch-size 8 --global-batch-size 8 --lr 5e-4 --min-lr 5e-5 "
    "--lr-decay-style cosine --lr-decay-iters 200 --lr-warmup-iters 20 --weight-decay 0.1 --adam-beta2 0.95 "
    "--clip-grad 1.0 --tokenizer-type HuggingFaceTokenizer --split 1,0,0 --num-workers 0 --eval-iters 0 "
    "--log-interval 1"
)


@dataclass(frozen=True)
class Curve:
    """One run."""

    flags: str
    gpu: bool = True
    package: str | None = None
    """Required device."""


CURVES: dict[str, Curve] = {
    "cpu-fp32": Curve("", gpu=False),
    "cpu-bf16": Curve("--bf16", gpu=False),
    "gpu-bf16": Curve("--bf16"),
    "gpu-bf16-te": Curve("--bf16 --transformer-impl transformer_engine", package="transformer_engine"),
    "gpu-deterministic-1": Curve("--bf16 --deterministic-mode"),
    "gpu-deterministic-2": Curve("--bf16 --deterministic-mode"),
}


@dataclass(frozen=True)
class Band:
    """Maximum distance of two curves, relative to the reference."""

    first: float
    """The mean of the first ten steps: before differences can grow."""
    window: float
    """Any mean of ten steps in a row."""
    last: float
    """The mean of the last twenty."""


BF16 = Band(first=0.002, window=0.005, last=0.003)
"""Ten times what bf16 and fp32 differ by on one CPU. The learning rate is one at which fp32 itself is steady: where
single gradients are fifty times the usual ones, as at three times the rate, curves part whatever the precision."""
COMPARISONS: list[tuple[str, str, Band | None]] = [  # None: every bit
    ("cpu-fp32", "cpu-bf16", BF16),
    ("cpu-fp32", "gpu-bf16", BF16),
    ("gpu-bf16", "gpu-bf16-te", BF16),
    ("cpu-fp32", "gpu-deterministic-1", BF16),
    ("gpu-deterministic-1", "gpu-deterministic-2", None),
]


def make_tokens(folder: Path) -> dict[str, str]:
    """Corpus, tokenizer, tokens, as quickstart.sh makes them but smaller; what identifies them."""
    prefix = folder / "corpus_text_document"
    if not prefix.with_suffix(".idx").exists():
        folder.mkdir(parents=True, exist_ok=True)
        corpus, tokenizer = folder / "corpus.jsonl", folder / "tokenizer"
        for command in (
            ["tools/make_corpus.py", "--output", corpus, "--max-bytes", 8_000_000],
            ["tools/train_tokenizer.py", "--input", corpus, "--vocab-size", 4096, "--max-bytes", 4_000_000,
             "--output", tokenizer],
            ["tools/preprocess_data.py", "--input", corpus, "--output-prefix", folder / "corpus",
             "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tokenizer, "--append-eod"],
        ):  # fmt: skip
            subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, check=True, capture_output=True)
    digest = hashlib.sha256(prefix.with_suffix(".bin").read_bytes()).hexdigest()[:16]
    return {"prefix": str(prefix), "tokenizer": str(folder / "tokenizer"), "sha256": digest}


def draw(name: str, tokens: dict[str, str], steps: int, timeout: float) -> dict[str, Any]:
    """One curve: every loss and gradient norm, or the error."""
    curve = CURVES[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        words = [*FLAGS.split(), *curve.flags.split(), "--train-iters", str(steps), "--tensorboard-dir", str(folder)]
        words += ["--data-path", tokens["prefix"], "--tokenizer-model", tokens["tokenizer"]]
        command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *words]
        started = time.perf_counter()
        job = run_command(command, Path(temporary), timeout, **({} if curve.gpu else {"CUDA_VISIBLE_DEVICES": ""}))
        if job is None:
            return {"error": f"not finished after {timeout:.0f} s"}
        typed = shown(command, folder).replace(str(Path(tokens["prefix"]).parent), "CORPUS")
        result: dict[str, Any] = {"command": typed, "tokens": tokens["sha256"]}
        if job.returncode:
            return {**result, "error": reason(job.stderr)}
        records = [each for each in read_records(folder / "metrics.jsonl") if each["kind"] == "train"]
    record = environment(cpu=not curve.gpu)
    return {
        **result, "seconds": round(time.perf_counter() - started, 1), "environment": record,
        "losses": [each["lm loss"] for each in records], "grad_norms": [each["grad_norm"] for each in records],
    }  # fmt: skip


def mean_of(losses: Sequence[float], start: int, stop: int | None = None) -> float:
    return statistics.fmean(losses[start:stop])


def deviations(reference: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """Relative differences of means: first ten steps, the worst ten in a row, last twenty."""
    starts = range(len(reference) - 9)

    def apart(start: int, stop: int | None) -> float:
        return abs(mean_of(other, start, stop) / mean_of(reference, start, stop) - 1)

    return {
        "first": apart(0, 10),
        "window": max(apart(start, start + 10) for start in starts),
        "last": apart(-20, None),
    }


def compare(curves: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Every comparison whose two curves exist, over the same tokens."""
    found = []
    for reference, other, band in COMPARISONS:
        first, second = curves.get(reference, {}), curves.get(other, {})
        if "losses" not in first or "losses" not in second or first["tokens"] != second["tokens"]:
            continue
        row: dict[str, Any] = {"reference": reference, "other": other}
        finite = all(map(math.isfinite, [*first["losses"], *second["losses"]]))
        if band is None:
            row["passed"] = finite and all(first[key] == second[key] for key in ("losses", "grad_norms"))
            row["asked"] = "every bit of every loss and gradient norm"
        else:
            row["deviations"] = deviations(first["losses"], second["losses"])
            row["band"] = {name: getattr(band, name) for name in row["deviations"]}
            row["passed"] = finite and all(row["deviations"][name] <= limit for name, limit in row["band"].items())
        found.append(row)
    return found


def why_not(name: str) -> str | None:
    """Why this machine cannot draw a curve; None if it can."""
    curve = CURVES[name]
    if curve.gpu and not torch.cuda.is_available():
        return "no GPU"
    return f"{curve.package} is not installed" if curve.package and version_of(curve.package) is None else None


def merged(path: Path, curves: dict[str, dict[str, Any]], steps: int) -> dict[str, Any]:
    """The stored curves with the new ones; stored ones over other tokens or of other length go."""
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    tokens = {curve["tokens"] for curve in curves.values() if "tokens" in curve}
    kept = {
        name: curve for name, curve in before.get("curves", {}).items()
        if curve.get("tokens") in tokens and len(curve.get("losses", [])) == steps
    }  # fmt: skip
    return {"steps": steps, "curves": {**kept, **curves}}


def text(rows: Sequence[dict[str, Any]]) -> str:
    """One line per comparison."""
    lines = []
    for row in rows:
        word = "same" if row["passed"] else "DIFFERS"
        values = ", ".join(f"{k} {v:.2%} (at most {row['band'][k]:.1%})" for k, v in row.get("deviations", {}).items())
        lines.append(f"{row['other']} against {row['reference']}: {word}; {values or row['asked']}")
    return "\n".join(lines)


def main() -> int:
    """Draws, compares, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--curves", nargs="+", choices=list(CURVES), help="default: curves that this machine can draw")
    parser.add_argument("--corpus", type=Path, help="folder that keeps corpus, tokenizer and tokens")
    parser.add_argument("--prepare", action="store_true", help="only make what --corpus keeps")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--timeout", type=float, default=400, help="seconds per curve")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    names = args.curves or [name for name in CURVES if name != "cpu-bf16" and why_not(name) is None]
    with tempfile.TemporaryDirectory() as temporary:
        tokens = make_tokens((args.corpus or Path(temporary)).resolve())
        print(f"tokens {tokens['sha256']} (sha256), Python {sys.version.split()[0]}", flush=True)
        if args.prepare:
            return 0
        curves: dict[str, dict[str, Any]] = {}
        lanes: dict[bool, ThreadPoolExecutor] = {gpu: ThreadPoolExecutor(1) for gpu in (False, True)}
        jobs: dict[str, Future] = {  # the CPU's curve beside the GPU's
            name: lanes[CURVES[name].gpu].submit(draw, name, tokens, args.steps, args.timeout) for name in names
        }
        for name, job in sorted(jobs.items(), key=lambda item: not CURVES[item[0]].gpu):
            curves[name] = job.result()
            said = curves[name].get("error") or f"{curves[name]['losses'][-1]:.4f}, {curves[name]['seconds']} s"
            print(f"{name}: {said}", flush=True)
            content = merged(args.output, curves, args.steps)
            content["comparisons"] = compare(content["curves"])
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(text(content["comparisons"]))
    failed = any("error" in curve for curve in curves.values())
    return int(failed or not all(row["passed"] for row in content["comparisons"]))


if __name__ == "__main__":
    sys.exit(main())
