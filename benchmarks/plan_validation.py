"""Validate the planner's predictions, and write its calibration and the tables of results/planning.md.

    python benchmarks/plan_validation.py [--check]

Measured rows of this repository (benchmarks/results/training.json) calibrate one factor per kind of model; each row is
predicted with the factor of the other rows. Published rows (published_speeds.json) never calibrate the planner; their
errors are also listed with one factor per program, fitted to its other rows. Options that a publication does not state
are the planner's choice. ``--check`` only compares the files and exits with 1 if they
are out of date.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a program from anywhere
    sys.path.insert(0, str(ROOT))

from megatron.core.models.registry import find_program, programs  # noqa: E402
from megatron.training.arguments import parse_args  # noqa: E402
from megatron.training.config.pretrain_config import PretrainConfig  # noqa: E402
from megatron.training.config.resolve import resolve  # noqa: E402
from megatron.training.report.plan.cluster import Cluster, find_gpu, kind_of_device  # noqa: E402
from megatron.training.report.plan.search import search  # noqa: E402
from megatron.training.report.plan.step_time import calibration_kinds, predict_step  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
CALIBRATION = ROOT / "megatron" / "training" / "report" / "plan" / "calibration.tsv"
PAGE = RESULTS / "planning.md"
GUIDE = ROOT / "docs" / "guides" / "planning.md"
HEADER = "# kind\tmeasured / predicted time\trows; written by benchmarks/plan_validation.py\n"
OTHER_KERNELS = re.compile(r"\+(te|no-fusions|halves|learned)\b|through copy engines|with separate torch operations")
"""Rows with kernels or options that the time model does not describe."""
MOST_HOST = 0.1
"""Share of host time above which a row does not calibrate kernels."""
FAR_APART = 0.05
"""Relative difference from which two rows have an order."""


@dataclass(frozen=True)
class Row:
    """One validated row."""

    name: str
    workload: str
    """Rows of the same workload and GPU are compared with each other."""
    measured: float
    """Seconds per step."""
    uncalibrated: float
    """Predicted seconds per step, without a factor."""
    per_gpu: float
    """Measured tokens per second and GPU."""
    kinds: tuple[str, ...]
    """Kinds of rows that calibrate this one, the most similar first: kinds of models, or the program of a published
    row."""
    source: str = ""
    host: float = 0.0
    """Predicted seconds in which the device waits for the host or the link to it; no factor applies to them."""
    factor: float = 1.0
    """Measured over predicted time of other rows."""
    notes: tuple[str, ...] = ()
    """Known options that flags do not express, each with its source."""

    @property
    def predicted(self) -> float:
        """Predicted seconds per step."""
        return (self.uncalibrated - self.host) * self.factor + self.host

    @property
    def speed(self) -> float:
        """Predicted tokens per second and GPU."""
        return self.per_gpu * self.measured / self.predicted

    @property
    def error(self) -> float:
        """Relative error of the predicted speed."""
        return self.measured / self.predicted - 1


# ---- rows of this repository


def own_rows() -> list[Row]:
    """Return the measured rows, with uncalibrated predictions."""
    scripts = [program.script for _, program in programs().values()]
    found = []
    for name, row in json.loads((RESULTS / "training.json").read_text(encoding="utf-8"))["rows"].items():
        if row.get("invalid") or not row["seconds_per_iteration"] or OTHER_KERNELS.search(name):
            continue
        words, gpus = shlex.split(row["command"]), row["environment"]["devices"]
        at = next(index for index, word in enumerate(words) if word in scripts)
        cfg = resolve(parse_args(words[at + 1 :], model_family=find_program(words[at])[0].name), gpus, gpus=True)
        gpu = kind_of_device(row["environment"]["device"])
        assert gpu is not None, row["environment"]["device"]
        time = predict_step(cfg, Cluster(gpu, 1, gpus), cfg.tokenizer.vocab_size or 0, {})
        host = sum(time.parts.get(part, 0.0) for part in ("host", "copies of optimizer state"))
        per_gpu = cfg.training.global_batch_size * cfg.data.seq_length / row["seconds_per_iteration"] / gpus
        kinds = tuple(calibration_kinds(cfg, gpu))
        seconds = row["seconds_per_iteration"]
        found.append(Row(name, workload(cfg, gpu.name), seconds, time.seconds, per_gpu, kinds, host=host))
    return found


def workload(cfg: PretrainConfig, gpu: str) -> str:
    """Return the model, the sequence length and the GPU as text."""
    sizes = (cfg.model.num_layers, cfg.model.hidden_size, cfg.model.num_moe_experts, cfg.data.seq_length)
    return f"{cfg.model_family} {sizes} {gpu}"


def factors(rows: Iterable[Row]) -> dict[str, tuple[float, int]]:
    """Return the geometric mean of measured over predicted time and the number of rows, by kind with and without the
    GPU."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.host > MOST_HOST * row.uncalibrated:
            continue
        for kind in row.kinds[:2]:
            ratios[kind].append(math.log((row.measured - row.host) / (row.uncalibrated - row.host)))
    return {kind: (math.exp(statistics.fmean(each)), len(each)) for kind, each in sorted(ratios.items())}


def left_out(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with predictions that are calibrated by all other rows."""
    return [calibrate(row, [other for other in rows if other is not row]) for row in rows]


def calibrate(row: Row, others: Sequence[Row]) -> Row:
    """Return ``row`` with the prediction that ``others`` calibrate."""
    known = factors(others)
    return replace(row, factor=next((known[kind][0] for kind in row.kinds if kind in known), 1.0))


# ---- published rows


def full_flops(cfg: PretrainConfig, vocab_size: int) -> float:
    """Return FLOPs of a sequence with a causal mask counted as a full one."""
    model = cfg.describe(vocab_size)
    attention = sum(op.flops for piece in model.pieces for op in piece.ops if op.kind == "attention")
    return model.flops_per_sample + 3 * attention


def published_rows() -> list[Row]:
    """Return the published rows with the planner's prediction for the stated layout."""
    found = []
    for row in json.loads((RESULTS / "published_speeds.json").read_text(encoding="utf-8")):
        gpus = row["gpus"]
        cluster = Cluster(find_gpu(row["gpu"]), -(-gpus // 8), min(gpus, 8))
        defaults = {"micro_batch_size": 1, "train_iters": 1, "lr": 1e-4, "bf16": True}
        cfg = parse_args(row["flags"].split(), args_defaults=defaults, needs_data=False)
        vocab_size = cfg.tokenizer.vocab_size or 0
        seconds, resolved = _stated(cfg, cluster, vocab_size, row)
        samples, length = resolved.training.global_batch_size, resolved.data.seq_length
        speed = row["value"]
        if row["unit"] == "TFLOP/s":
            flops = resolved.describe(vocab_size).flops_per_sample
            flops = full_flops(resolved, vocab_size) if row["convention"] == "full" else flops
            speed = speed * 1e12 * length / flops
        measured = samples * length / speed / gpus
        names, source, known = workload(resolved, row["gpu"]), row["source"], tuple(row.get("basis", ()))
        found.append(Row(row["name"], names, measured, seconds, speed, (source,), source, notes=known))
    return found


def _stated(cfg: PretrainConfig, cluster: Cluster, vocab_size: int, row: dict) -> tuple[float, PretrainConfig]:
    """Return (seconds, configuration) of the fastest layout with the stated settings, without zero-bubble schedules,
    which no published row uses. A row that does not fit by this program's estimate is predicted regardless. Optional
    fields of ``row``, explained in its ``basis``:

    - ``fixed``: settings that the search must not choose
    - ``attention``: rate of the program's attention kernels relative to those of ``gpus.tsv``
    - ``recomputed``: share of the GEMMs of layers, by FLOPs, that the backward pass recomputes
    - ``hidden``: share of the expert communication that overlaps with computation
    """
    rate, fixed = row.get("attention", 1.0), row.get("fixed", {})
    gpu = cluster.gpu
    gpu = replace(gpu, attention_forward=gpu.attention_forward * rate, attention_backward=gpu.attention_backward * rate)
    for memory in (gpu.memory_gib, 1e5):
        found = search(cfg, replace(cluster, gpu=replace(gpu, memory_gib=memory)), vocab_size)
        layouts = [each for each in found.layouts if "pipeline_schedule" not in each.values]
        layouts = [each for each in layouts if all(getattr(each.cfg.flat, name) == fixed[name] for name in fixed)]
        if layouts:
            resolved, parts = layouts[0].cfg, layouts[0].time.parts
            model = resolved.describe(vocab_size)
            in_layers = sum(op.flops for piece in model.pieces if piece.is_branch for op in piece.ops if op.gemm)
            in_layers /= sum(op.flops for piece in model.pieces for op in piece.ops if op.gemm)
            again = row.get("recomputed", 0.0) * in_layers * parts["GEMM"] / 3
            hidden = row.get("hidden", 0.0) * parts.get("expert communication", 0.0)
            return layouts[0].time.seconds + again - hidden, resolved
    raise ValueError(f"{row['name']}: {found.reason}")


# ---- report


def pairs(rows: Sequence[Row]) -> tuple[int, int]:
    """Return (pairs in the right order, pairs) of one workload whose measured speeds differ by more than 5 %. Both rows
    are calibrated by the rows other than these two: with different factors, the measured order would enter them. Equal
    predictions are not in order."""
    right = total = 0
    for index, first in enumerate(rows):
        for second in rows[:index]:
            if first.workload != second.workload or abs(first.per_gpu / second.per_gpu - 1) <= FAR_APART:
                continue
            total += 1
            others = [row for row in rows if row is not first and row is not second]
            speeds = [calibrate(row, others).speed for row in (first, second)]
            right += (speeds[0] - speeds[1]) * (first.per_gpu - second.per_gpu) > 0
    return right, total


def summary(rows: Sequence[Row], aim: float) -> str:
    """Return one sentence: the median and largest error, and the order of pairs."""
    errors = sorted(abs(row.error) for row in rows)
    right, total = pairs(rows)
    median = statistics.median(errors)
    met = "met" if median <= aim else "missed"
    order = "met" if right >= 0.9 * total else "missed"
    most = errors[int(0.9 * (len(errors) - 1))]
    return (
        f"{len(rows)} rows: median error {median:.1%} (target {aim:.0%}: {met}), 90 % of the rows within {most:.1%},"
        f" largest {errors[-1]:.1%}. Order: {right} of {total} pairs of one workload that differ by more than 5 %"
        f" (target 9 of 10: {order})."
    )


def breakdown(rows: Sequence[Row]) -> str:
    """Return the median error and the number of rows by kind of model or source, as a list."""
    groups: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        groups[row.source or row.kinds[1]].append(abs(row.error))
    return "\n".join(f"- {name}: median {statistics.median(each):.1%} of {len(each)}" for name, each in groups.items())


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table with the errors of the predicted speed."""
    lines = ["| row | tokens/s per GPU | predicted | error |", "|---|---:|---:|---:|"]
    lines += [f"| {row.name} | {row.per_gpu:,.0f} | {row.speed:,.0f} | {row.error:+.1%} |" for row in rows]
    return "\n".join(lines)


def published_table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table with the errors without and with a factor per program."""
    lines = [
        "| row | source | tokens/s per GPU | predicted | error | with a factor |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row, fitted in zip(rows, left_out(rows)):
        speeds = f"{row.per_gpu:,.0f} | {row.speed:,.0f}"
        lines.append(f"| {row.name} | {row.source} | {speeds} | {row.error:+.1%} | {fitted.error:+.1%} |")
    return "\n".join(lines)


def notes(rows: Sequence[Row]) -> str:
    """Return what is known about published rows besides their flags, with the rows, as a list."""
    found: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        for note in row.notes:
            found[note].append(row.name)
    return "\n".join(f"- {note}: {'; '.join(names)}" for note, names in found.items())


def page(text: str, own: Sequence[Row], published: Sequence[Row]) -> str:
    """Return the page of errors with its two tables replaced."""
    fitted = f"With a factor per program: {summary(left_out(published), 0.10)}"
    parts = {
        "own": (summary(own, 0.05), breakdown(own), table(own)),
        "published": (
            f"Without a factor: {summary(published, 0.10)}",
            breakdown(published),
            fitted,
            "Known besides the flags:",
            notes(published),
            published_table(published),
        ),
    }
    for name, found in parts.items():
        text = replace_part(text, f"{name} rows", found)
    return text


def guide(text: str, own: Sequence[Row], published: Sequence[Row]) -> str:
    """Return the guide with the two summaries of errors replaced."""
    found = f"- Runs of this repository: {summary(own, 0.05)}", f"- Published runs: {summary(published, 0.10)}"
    return replace_part(text, "summaries", ["\n".join(found)])


def replace_part(text: str, name: str, paragraphs: Sequence[str]) -> str:
    """Return a page whose text between the two comments that name a part is replaced."""
    start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, after = text.split(start)[0], text.split(end)[1]
    return before + "\n\n".join((start, *paragraphs, end)) + after


def main(argv: list[str]) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args(argv).check
    measured = own_rows()
    lines = [f"{kind}\t{factor:.3f}\t{count}\n" for kind, (factor, count) in factors(measured).items()]
    stale = _write(CALIBRATION, HEADER + "".join(lines), check)
    own, published = left_out(measured), published_rows()
    stale |= _write(PAGE, page(PAGE.read_text(encoding="utf-8"), own, published), check)
    stale |= _write(GUIDE, guide(GUIDE.read_text(encoding="utf-8"), own, published), check)
    print(f"own {summary(own, 0.05)}\npublished {summary(published, 0.10)}")
    print(f"with a factor per program {summary(left_out(published), 0.10)}")
    return int(stale)


def _write(path: Path, text: str, check: bool) -> bool:
    """Write the file, or with ``check`` report whether it is out of date."""
    if not check:
        path.write_text(text, encoding="utf-8")
        return False
    if path.read_text(encoding="utf-8") == text:
        return False
    print(f"{path.relative_to(ROOT)} is out of date: run python benchmarks/plan_validation.py", file=sys.stderr)
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
