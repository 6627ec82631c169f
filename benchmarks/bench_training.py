"""Training speed through the entry scripts themselves: a command per row of the speed table, with profile and limits.

    python benchmarks/bench_training.py one                     # one row
    python benchmarks/bench_training.py dp4 tp4-sp one+te       # some; + adds a named variant
    python benchmarks/bench_training.py one --extra-flags "--attention-backend flash"
    python benchmarks/bench_training.py                         # every row that this machine has the GPUs for
    python benchmarks/bench_training.py --list
    python benchmarks/bench_training.py --smoke tp4-sp          # tiny, over gloo on a CPU; writes no results
    python benchmarks/bench_training.py --analyse trace.json.gz --as dp4     # a trace that was kept

Each row is measured in fresh processes (--repeats), medians of medians, warm-up left out. It reports model TFLOP/s per
GPU (causal attention counted as half, no recomputation), tokens/s per GPU, peak memory; and, of one step of rank 0
under the profiler after the timed ones: time by class of kernel, exposed communication, idle gaps, launches, waits of
the host, and where the gap to the limits of the device is. A row whose loss is not finite or does not fall is marked
invalid. Results are merged into benchmarks/results/training.json, row by row, with versions and command.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.harness import jobs
from benchmarks.harness.environment import environment
from benchmarks.harness.rows import ROWS, VARIANTS, base_row, split_name

RESULTS = Path(__file__).resolve().parent / "results" / "training.json"
HEADER = f"{'row':<28}{'TFLOP/s':>8}{'tokens/s':>10}{'s/iter':>8}{'peak GB':>9}{'exposed':>9}{'idle ms':>9}{'waits':>7}"


def line(name: str, result: dict[str, Any]) -> str:
    """One row of the printed table."""
    if result.get("tflops_per_gpu") is None:
        return f"{name:<28} failed: {result.get('error', 'no figure')[-600:]}"
    profile = result.get("profile") or {}
    waits = sum(wait["count"] for wait in profile.get("synchronizations", []))
    note = f"  INVALID: {result['invalid']}" if result["invalid"] else ""
    note += f"  failed: {result['error'][-300:]}" if "error" in result else ""
    return (
        f"{name:<28}{result['tflops_per_gpu']:8.1f}{result['tokens_per_second_per_gpu']:10.0f}"
        f"{result['seconds_per_iteration']:8.3f}{result['peak_memory_gb'] or 0:9.1f}"
        f"{profile.get('exposed_communication_ms', 0):9.1f}{profile.get('idle_ms', 0):9.1f}{waits:7d}{note}"
    )


def details(result: dict[str, Any]) -> str:
    """Return the gap to the limits by class, from the stored result."""
    report, profile = result.get("roofline"), result.get("profile")
    if not report or not profile:
        return ""
    lines = [f"  {'class':<24}{'limit ms':>10}{'measured':>10}{'gap':>9}"]
    for row in report["rows"]:
        lines.append(f"  {row['class']:<24}{row['limit_ms']:10.2f}{row['measured_ms']:10.2f}{row['gap_ms']:9.2f}")
    lines.append(f"  {'step':<24}{report['limit_ms']:10.2f}{report['step_ms'] or 0:10.2f}")
    lines.append(f"  launches {profile['launches']}, copies to the host {profile['device_to_host_copies']}")
    for wait in profile["synchronizations"][:5]:
        lines.append(f"  wait {wait['count']} x {wait['name']}, {wait['ms']} ms: {wait['scope']}")
    for gap in profile["gaps"][:3]:
        lines.append(f"  gap {gap['ms']} ms, {gap['after']} -> {gap['before']}; host: {gap['host']}")
    return "\n".join(lines)


def merge(path: Path, name: str, result: dict[str, Any]) -> None:
    """Stores a row in a file of results, in the order of the table, in place of an earlier one of the same device.

    Rows of other devices are kept. A new measurement without a profile keeps the old profile with its commit.
    """
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else {}
    device = result["environment"]["device"]
    if name in rows and rows[name]["environment"]["device"] != device:
        name = f"{name} on {device}"
    before = rows.get(name, {})
    if before.get("profile") and not result.get("profile"):
        kept = {key: before[key] for key in jobs.PROFILE if key in before}
        result = {**result, **kept, "profiled_at": before.get("profiled_at") or before["environment"].get("commit")}
    rows[name] = result
    order = {row: position for position, row in enumerate(ROWS)}
    content = {"rows": dict(sorted(rows.items(), key=lambda item: (order[base_row(item[0])], item[0])))}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def stored_name(row: str, extra: list[str]) -> str:
    """Return the stored name of a row with extra flags; flags of a named variant become the variant's name."""
    if not extra:
        return row
    named = {tuple(shlex.split(flags)): variant for variant, flags in VARIANTS.items()}
    return f"{row}+{named.get(tuple(extra), ' '.join(extra))}"


def listing() -> str:
    """Return the list of rows and variants."""
    lines = []
    for name, row in ROWS.items():
        size = f"{row.gpus} GPUs, {row.layers} layers, s {row.length}, batch {row.batch}"
        lines.append(f"{name:<18}{size}; about {row.seconds} s a job")
    return "\n".join([*lines, "", *(f"+{name:<22}{flags}" for name, flags in VARIANTS.items())])


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("rows", nargs="*", metavar="ROW", help="rows, with +variants; default: all rows that fit")
    made.add_argument("--list", action="store_true", help="rows and variants")
    made.add_argument("--repeats", type=int, default=2, help="fresh jobs per row")
    made.add_argument("--iters", type=int, help="iterations of a job; default: the row's own")
    made.add_argument("--warmup", type=int, default=3, help="iterations left out of the medians")
    made.add_argument("--layers", type=int, help="instead of the row's own number")
    made.add_argument("--extra-flags", default="", help="flags of the entry script for every row, in one string")
    made.add_argument("--timeout", type=float, default=300, help="seconds per job")
    made.add_argument("--no-profile", dest="profile", action="store_false")
    made.add_argument("--keep-traces", type=Path, metavar="FOLDER")
    made.add_argument("--smoke", action="store_true", help="tiny, over gloo on a CPU")
    made.add_argument("--analyse", type=Path, metavar="TRACE", help="only read a trace, of the row given with --as")
    made.add_argument("--as", dest="row", default="one")
    made.add_argument("--output", type=Path, help="default: benchmarks/results/training.json")
    return made


def main() -> int:
    """Measures, prints a table, writes JSON."""
    args = parser().parse_args()
    if args.list:
        print(listing())
        return 0
    extra = shlex.split(args.extra_flags)
    if args.layers:
        extra += ["--num-layers", str(args.layers)]
    settings = jobs.Settings(
        repeats=args.repeats, warmup=args.warmup, iters=args.iters, profile=args.profile,
        smoke=args.smoke, timeout=args.timeout, extra=tuple(extra), keep_traces=args.keep_traces,
    )  # fmt: skip
    if args.analyse:
        print(details(jobs.analyse(args.row, args.analyse, settings)))
        return 0
    devices = 8 if args.smoke else torch.cuda.device_count()
    names = args.rows or [name for name, row in ROWS.items() if row.gpus <= devices]
    for name in names:
        try:
            needed = split_name(name)[0].gpus
        except ValueError as error:
            raise SystemExit(f"{name}: {error}") from None
        if needed > devices:
            raise SystemExit(f"{name}: needs {needed} GPUs, there are {devices}; --smoke runs it on a CPU")
    output = args.output or (None if args.smoke else RESULTS)
    record = environment(cpu=args.smoke)
    print(", ".join(f"{key} {value}" for key, value in record.items() if value is not None))
    print(HEADER, flush=True)
    failed = False
    for row in names:
        name = stored_name(row, extra)
        result = {**jobs.measure(row, settings), "environment": record}
        print(line(name, result), details(result), sep="\n", flush=True)
        failed |= "error" in result or bool(result.get("invalid"))
        if output:
            merge(output, name, result)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
