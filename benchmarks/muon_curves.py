"""Compare Muon with AdamW: does it reach AdamW's final validation loss with 75 % of the tokens? A 30 M GPT.

    python benchmarks/muon_curves.py --corpus FOLDER --prepare               # only make the tokens
    python benchmarks/muon_curves.py --corpus FOLDER --optimizer adamw       # nine runs at the same time on one GPU
    python benchmarks/muon_curves.py --corpus FOLDER --optimizer muon        # nine shorter runs
    python benchmarks/muon_curves.py --draw docs/guides/muon_loss.svg        # plot the stored curves (matplotlib)

Each optimizer has three learning rates with three seeds each (initial weights and order of samples). Muon trains 75 %
of the steps, with a learning-rate schedule of that length, and updates of AdamW's size (``--muon-extra-scale-factor
0.2``). The figure of an optimizer is the mean validation loss over seeds at its best rate. The second command merges
its curves into the stored ones and compares. Exit code 1 for a failed run, or if Muon does not reach AdamW's loss.
Writes benchmarks/results/muon_curves.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.fp8_curves import ROOT, make_tokens, train
from benchmarks.harness.environment import environment

RESULTS = ROOT / "benchmarks" / "results" / "muon_curves.json"
STEPS, SHARE, SEEDS = 2000, 0.75, (1, 2, 3)
RATES = {"adamw": ("5e-4", "1e-3", "2e-3"), "muon": ("1e-3", "2e-3", "4e-3")}
FLAGS = {"adamw": "", "muon": "--optimizer muon --muon-momentum 0.95 --muon-nesterov --muon-extra-scale-factor 0.2"}
COLORS = {"adamw": "black", "muon": "tab:blue"}


def curve_flags(kind: str) -> dict[str, str]:
    """Return the flags of all curves of an optimizer by name."""
    return {
        f"{kind}, lr {rate}, seed {seed}": f"{FLAGS[kind]} --lr {rate} --min-lr {float(rate) / 10:g} --seed {seed}"
        for rate in RATES[kind]
        for seed in SEEDS
    }


def best(curves: dict[str, dict[str, Any]], kind: str) -> dict[str, Any] | None:
    """Return rate, mean and range of the last validation losses of the best rate; None without a complete rate."""
    found = []
    for rate in RATES[kind]:
        runs = [curves.get(f"{kind}, lr {rate}, seed {seed}", {}).get("last validation") for seed in SEEDS]
        losses = [loss for loss in runs if loss is not None]
        if len(losses) == len(SEEDS):
            spread = max(losses) - min(losses)
            found.append({"rate": rate, "validation": statistics.fmean(losses), "spread": spread})
    return min(found, key=lambda row: row["validation"], default=None)


def draw(stored: dict[str, Any], path: Path) -> None:
    """Plot the training losses of the best rates, smoothed over 50 steps; one line per seed."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "muon"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for kind, row in stored["best"].items():
        for seed in SEEDS if row else ():
            losses = stored["curves"][f"{kind}, lr {row['rate']}, seed {seed}"]["losses"]
            steps = range(50, len(losses), 10)
            label = f"{kind}, lr {row['rate']}" if seed == SEEDS[0] else None
            smooth = [statistics.fmean(losses[step - 50 : step]) for step in steps]
            axes.plot(steps, smooth, color=COLORS[kind], label=label, linewidth=1)
    axes.set_ylabel("training loss")
    axes.set_xlabel("step")
    axes.set_ylim(top=4.5)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", nargs="+", choices=list(RATES), default=list(RATES))
    parser.add_argument("--corpus", type=Path, help="folder that keeps corpus, tokenizer and tokens")
    parser.add_argument("--prepare", action="store_true", help="only make the content of --corpus")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of AdamW; Muon runs 75 %% as many")
    parser.add_argument("--draw", type=Path, metavar="SVG", help="only plot the stored curves")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    stored = json.loads(args.output.read_text(encoding="utf-8")) if args.output.exists() else {}
    if args.draw:
        draw(stored, args.draw)
        return 0
    jobs = {name: flags for kind in args.optimizer for name, flags in curve_flags(kind).items()}
    with tempfile.TemporaryDirectory() as temporary:
        prefix = make_tokens((args.corpus or Path(temporary)).resolve())
        if args.prepare:
            return 0
        steps = [round(SHARE * args.steps) if name.startswith("muon") else args.steps for name in jobs]
        with ThreadPoolExecutor(len(jobs)) as pool:
            found = pool.map(lambda flags, count: train(flags, prefix, count), jobs.values(), steps)
            curves = {**stored.get("curves", {}), **dict(zip(jobs, found))}
    rows = {kind: best(curves, kind) for kind in RATES}
    passed = None if None in rows.values() else rows["muon"]["validation"] <= rows["adamw"]["validation"]
    content = {"environment": environment(), "steps": args.steps, "best": rows, "passed": passed, "curves": curves}
    args.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    for name in jobs:
        curve = curves[name]
        print(name, curve.get("error") or f"{curve['last']:.4f}, validation {curve['last validation']}", flush=True)
    print(f"best: {rows}; Muon with {SHARE:.0%} of the tokens reaches AdamW's loss: {passed}")
    return int(any("error" in curves[name] for name in jobs) or passed is False)


if __name__ == "__main__":
    sys.exit(main())
