"""Run all GPU benchmarks, the most important first, within a budget of seconds; write each result at once.

    python benchmarks/gpu_suite.py --budget 1700                  # what this machine has the GPUs and the time for
    python benchmarks/gpu_suite.py --only tests                   # every GPU test, in parts
    python benchmarks/gpu_suite.py --only tests row:one row:one+te --budget 570
    python benchmarks/gpu_suite.py --min-gpus 4 --budget 570      # only what needs four GPUs
    python benchmarks/gpu_suite.py --list
    python benchmarks/gpu_suite.py --take FOLDER ...              # later: results into benchmarks/results/, new tables

Results go to the folder $OUT, or --out: one JSON file per kind and suite.json, which says of every item how long it
took, how it ended and what it printed last. An item is started only if its estimate still fits; one that runs longer is
stopped at its own limit or at the end of the budget. The same call again continues: successful items are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness.jobs import stop, with_our_path
from benchmarks.harness.rows import ROWS, VARIANTS, split_name

ROOT = Path(__file__).resolve().parents[1]
COPY_ENGINES = (
    "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "benchmarks/bench_copy_engines.py",
)  # fmt: skip
OUTPUT_TAIL = 20000
KEPT_MARGIN = 5.0
"""Seconds of the budget that remain for writing."""


@dataclass(frozen=True)
class Item:
    """Something to run. ``{out}`` in its arguments is the folder of results."""

    arguments: tuple[str, ...]
    seconds: int
    """Estimate on H200s."""
    gpus: int = 1
    limit: int = 0
    """Seconds after which it is stopped; default: twice the estimate and a minute."""

    @property
    def timeout(self) -> float:
        return self.limit or 2 * self.seconds + 60


def row_item(name: str, repeats: int) -> Item:
    """``row:NAME``: a line of the speed table."""
    row, _ = split_name(name)
    arguments = ("benchmarks/bench_training.py", name, "--repeats", str(repeats), "--output", "{out}/training.json")
    return Item((*arguments, "--timeout", str(2 * row.seconds + 60)), row.seconds * repeats, row.gpus)


def bench_item(name: str, seconds: int, *flags: str, gpus: int = 1) -> Item:
    """A benchmark that takes ``--output``."""
    return Item((f"benchmarks/bench_{name}.py", *flags, "--output", f"{{out}}/{name}.json"), seconds, gpus)


def test_item(seconds: int, processes: int, folders: Sequence[str], without: Sequence[str] = ()) -> Item:
    """GPU tests of ``folders`` without subfolders, in ``processes``: most of the time is the compilation of kernels."""
    flags = ("-m", "gpu", "-q", "--maxfail=20", "-p", "no:cacheprovider", "-n", str(processes), "--durations=8")
    return Item(("-m", "pytest", *flags, *folders, *(f"--ignore={folder}" for folder in without)), seconds, limit=240)


CORE = "tests/unit_tests/core"
KERNELS = [f"{CORE}/fusions", f"{CORE}/fp8", f"{CORE}/attention"]


def items(repeats: int) -> dict[str, Item]:
    """By name, the most important first."""
    return {
        "tests:kernels": test_item(150, 8, KERNELS),
        "tests:core": test_item(80, 6, [CORE], KERNELS),
        "tests:rest": test_item(140, 12, ["tests"], [CORE]),
        "ceilings": bench_item("ceilings", 45),
        "row:one": row_item("one", repeats),
        "fusions": bench_item("fusions", 60),
        "cross_entropy": bench_item("cross_entropy", 45),
        "optimizer": bench_item("optimizer", 45),
        "linear_attention": bench_item("linear_attention", 120, "--sweep"),
        "gemms": bench_item("gemms", 170),
        "loss_curves": Item(("benchmarks/loss_curves.py", "--output", "{out}/loss_curves.json"), 110),
        **{f"row:{name}": row_item(name, repeats) for name in ROWS},
        "context_parallel": bench_item("context_parallel", 60, gpus=4),
        "copy_engines": Item((*COPY_ENGINES, "--output", "{out}/copy_engines.json"), 25, gpus=4),
    }


def chosen(names: Sequence[str], repeats: int) -> dict[str, Item]:
    """The items of ``names`` in that order; also rows and variants that are in no list, and ``tests`` for all of its
    parts. ``ValueError`` for others."""
    known = items(repeats)
    plan = {}
    for name in names:
        if name == "tests":
            plan.update({part: item for part, item in known.items() if part.startswith("tests:")})
        elif name in known or name.startswith("row:"):
            plan[name] = known.get(name) or row_item(name.removeprefix("row:"), repeats)
        else:
            raise ValueError(f"no item {name!r}; there are tests, {', '.join(known)} and row:ROW+VARIANT")
    return plan


def run(item: Item, out: Path, limit: float) -> dict[str, Any]:
    """Run one item; return its outcome and the end of its output."""
    arguments = [sys.executable, *(word.replace("{out}", str(out)) for word in item.arguments)]
    started = time.perf_counter()
    log = out / "running.log"
    with log.open("w", encoding="utf-8") as file:
        job = subprocess.Popen(
            arguments, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, **with_our_path(), "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        try:
            code: int | None = job.wait(limit)
        except subprocess.TimeoutExpired:
            stop(job, with_group=True)
            code = None
    text = log.read_text(encoding="utf-8", errors="replace")
    log.unlink()
    ended = "stopped at its limit" if code is None else "ok" if code == 0 else f"exit code {code}"
    return {"ended": ended, "seconds": round(time.perf_counter() - started, 1), "output": text[-OUTPUT_TAIL:]}


def device_count() -> int:
    """GPUs of this machine, without a CUDA context in this process."""
    try:
        text = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return 0
    return sum(line.startswith("GPU ") for line in text.splitlines())


def suite(plan: dict[str, Item], out: Path, budget: float, devices: int) -> dict[str, Any]:
    """Runs what fits; suite.json is up to date after every item."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "suite.json"
    done: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    end = time.monotonic() + budget - KEPT_MARGIN
    for name, item in plan.items():
        left = end - time.monotonic()
        if done.get(name, {}).get("ended") == "ok":
            print(f"{name}: done before", flush=True)
            continue
        if item.gpus > devices:
            ended = f"not run: needs {item.gpus} GPUs, there are {devices}"
        elif item.seconds > left:
            ended = f"not run: about {item.seconds} s, {left:.0f} s are left"
        elif not item.arguments[0].startswith("-") and not (ROOT / item.arguments[0]).exists():
            ended = f"not run: there is no {item.arguments[0]}"
        else:
            done[name] = run(item, out, min(item.timeout, left))
            ended = done[name]["ended"]
            print(f"== {name}: {ended}, {done[name]['seconds']} s\n{done[name]['output'][-2500:]}", flush=True)
        done.setdefault(name, {"seconds": 0.0, "output": ""})["ended"] = ended
        path.write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")
    return done


def take(folder: Path) -> list[str]:
    """Puts the results of a folder into benchmarks/results/: rows are merged, other files replaced."""
    from benchmarks.bench_training import merge

    results, taken = ROOT / "benchmarks" / "results", []
    for path in sorted(folder.glob("*.json")):
        if path.name == "training.json":
            for name, result in json.loads(path.read_text(encoding="utf-8"))["rows"].items():
                merge(results / path.name, name, result)
                taken.append(f"row {name}")
        elif path.name == "ceilings.json":
            shutil.copy(path, ROOT / "benchmarks" / "harness" / path.name)
            taken.append(path.name)
        elif path.name != "suite.json":
            shutil.copy(path, results / path.name)
            taken.append(path.name)
    return taken


def summary(done: dict[str, Any], names: Sequence[str]) -> str:
    """One line per item."""
    known = {name: done[name] for name in names if name in done}
    return "\n".join(f"{name:<28}{each['seconds']:8.1f} s  {each['ended']}" for name, each in known.items())


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=570, help="seconds for all of it")
    parser.add_argument("--only", nargs="+", metavar="ITEM", help="these, in this order")
    parser.add_argument("--min-gpus", type=int, default=1, help="only items that need at least MIN_GPUS")
    parser.add_argument("--repeats", type=int, default=2, help="fresh jobs per row")
    parser.add_argument("--list", action="store_true", help="items with their estimates")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu_results")))
    parser.add_argument("--take", type=Path, nargs="+", metavar="FOLDER", help="put results into benchmarks/results/")
    args = parser.parse_args()
    if args.take:
        print("\n".join(name for folder in args.take for name in take(folder)))
        return subprocess.call([sys.executable, str(ROOT / "benchmarks" / "tables.py")])
    plan = chosen(args.only, args.repeats) if args.only else items(args.repeats)
    plan = {name: item for name, item in plan.items() if item.gpus >= args.min_gpus}
    if args.list:
        print("\n".join(f"{name:<28}{item.gpus} GPUs {item.seconds:5d} s" for name, item in plan.items()))
        print(f"rows take +variants: {', '.join(VARIANTS)}; rows: {', '.join(ROWS)}")
        return 0
    done = suite(plan, args.out, args.budget, device_count())
    print(summary(done, list(plan)))
    return int(not all(done[name]["ended"].startswith(("ok", "not run")) for name in plan))


if __name__ == "__main__":
    sys.exit(main())
