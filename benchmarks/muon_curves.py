"""Compare Muon with AdamW: does it reach AdamW's final validation loss with 75 % of the tokens? A 30 M GPT.

    python benchmarks/muon_curves.py --corpus FOLDER --prepare               # only make the tokens
    python benchmarks/muon_curves.py --corpus FOLDER                         # eight runs at a time, then four
    python benchmarks/muon_curves.py --draw docs/guides/muon_loss.svg        # plot the stored curves (matplotlib)

The first seed (initial weights and order of samples) trains with four learning rates per optimizer, two more seeds
train with the best one. Muon trains 75 % of the steps, with a learning-rate schedule of that length, and updates of
AdamW's size (``--muon-extra-scale-factor 0.2``). The figure of an optimizer is the mean validation loss of the seeds at
its best rate. Exit code 1 for a failed run, or if Muon does not reach AdamW's loss. Writes
benchmarks/results/muon_curves.json.
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
RATES = ("5e-4", "1e-3", "2e-3", "4e-3")
FLAGS = {"adamw": "", "muon": "--optimizer muon --muon-momentum 0.95 --muon-nesterov --muon-extra-scale-factor 0.2"}
COLORS = {"adamw": "black", "muon": "tab:blue"}


def curve_name(kind: str, rate: str, seed: int) -> str:
    return f"{kind}, lr {rate}, seed {seed}"


def curve_flags(kind: str, rate: str, seed: int) -> str:
    return f"{FLAGS[kind]} --lr {rate} --min-lr {float(rate) / 10:g} --seed {seed}"


def best_rate(curves: dict[str, dict[str, Any]], kind: str) -> str | None:
    """Return the rate of the lowest validation loss of the first seed; None if a run failed."""
    losses = {rate: curves[curve_name(kind, rate, SEEDS[0])].get("last validation") for rate in RATES}
    return None if None in losses.values() else min(RATES, key=losses.__getitem__)


def summary(curves: dict[str, dict[str, Any]], kind: str) -> dict[str, Any] | None:
    """Return rate, mean and range of the last validation losses at the best rate; None if a run failed."""
    if (rate := best_rate(curves, kind)) is None:
        return None
    losses = [curves[curve_name(kind, rate, seed)].get("last validation") for seed in SEEDS]
    if None in losses:
        return None
    return {"rate": rate, "validation": statistics.fmean(losses), "spread": max(losses) - min(losses)}


def draw(stored: dict[str, Any], path: Path) -> None:
    """Plot the training losses of the best rates, smoothed over 50 steps; one line per seed."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "muon"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for kind, row in stored["best"].items():
        for seed in SEEDS if row else ():
            losses = stored["curves"][curve_name(kind, row["rate"], seed)]["losses"]
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
    parser.add_argument("--corpus", type=Path, help="folder that keeps corpus, tokenizer and tokens")
    parser.add_argument("--prepare", action="store_true", help="only make the content of --corpus")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of AdamW; Muon runs 75 %% of this number")
    parser.add_argument("--draw", type=Path, metavar="SVG", help="only plot the stored curves")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.draw:
        draw(json.loads(args.output.read_text(encoding="utf-8")), args.draw)
        return 0
    curves: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        prefix = make_tokens((args.corpus or Path(temporary)).resolve())
        if args.prepare:
            return 0

        def run(keys: list[tuple[str, str, int]]) -> None:
            steps = [round(SHARE * args.steps) if kind == "muon" else args.steps for kind, _, _ in keys]
            with ThreadPoolExecutor(len(keys)) as pool:
                found = pool.map(lambda key, count: train(curve_flags(*key), prefix, count), keys, steps)
                curves.update(zip((curve_name(*key) for key in keys), found))

        run([(kind, rate, SEEDS[0]) for kind in FLAGS for rate in RATES])
        rates = {kind: rate for kind in FLAGS if (rate := best_rate(curves, kind))}
        if rates:
            run([(kind, rate, seed) for kind, rate in rates.items() for seed in SEEDS[1:]])
    rows = {kind: summary(curves, kind) if kind in rates else None for kind in FLAGS}
    passed = None if None in rows.values() else rows["muon"]["validation"] <= rows["adamw"]["validation"]
    content = {"environment": environment(), "steps": args.steps, "best": rows, "passed": passed, "curves": curves}
    args.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    for name, curve in curves.items():
        print(name, curve.get("error") or f"{curve['last']:.4f}, validation {curve['last validation']}", flush=True)
    print(f"best: {rows}; Muon with {SHARE:.0%} of the tokens reaches AdamW's loss: {passed}")
    return int(any("error" in curve for curve in curves.values()) or passed is False)


if __name__ == "__main__":
    sys.exit(main())
