"""Write megatron/training/report/rates.tsv, from which ``--dry-run`` predicts time and cost.

    python benchmarks/write_rates.py [--check]

Reads benchmarks/results/training.json and keeps the fastest measured row of each kind of model and set of rank axes.
``--check`` only compares and exits with 1 if the file is out of date.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a program from anywhere
    sys.path.insert(0, str(ROOT))

from megatron.core.models.registry import find_program, programs  # noqa: E402
from megatron.training.arguments import parse_args  # noqa: E402
from megatron.training.config.resolve import resolve  # noqa: E402
from megatron.training.report.rates import model_kind, used_axes  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "training.json"
TABLE = ROOT / "megatron" / "training" / "report" / "rates.tsv"
HEADER = "# row\tkind\taxes\tmodel TFLOP/s per GPU\tdevice; written by benchmarks/write_rates.py\n"


def table() -> str:
    """Return the text of the table."""
    best: dict[tuple[str, str], tuple[float, str]] = {}
    scripts = [program.script for _, program in programs().values()]
    for name, row in json.loads(RESULTS.read_text(encoding="utf-8"))["rows"].items():
        words = shlex.split(row["command"])
        at = next(index for index, word in enumerate(words) if word in scripts)
        gpus = row["environment"]["devices"]
        cfg = resolve(parse_args(words[at + 1 :], model_family=find_program(words[at])[0].name), gpus, gpus=True)
        key = model_kind(cfg), " ".join(f"{axis}{size}" for axis, size in used_axes(cfg).items())
        tflops = row["tflops_per_gpu"]
        found = tflops, "\t".join((name, *key, f"{tflops:.0f}", row["environment"]["device"]))
        if tflops and not row.get("invalid") and (key not in best or best[key] < found):
            best[key] = found
    return HEADER + "".join(f"{best[key][1]}\n" for key in sorted(best))


def main(argv: list[str]) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    text = table()
    if parser.parse_args(argv).check:
        if not TABLE.exists() or TABLE.read_text(encoding="utf-8") != text:
            print(f"{TABLE.relative_to(ROOT)} is out of date: run python benchmarks/write_rates.py", file=sys.stderr)
            return 1
        return 0
    TABLE.write_text(text, encoding="utf-8")
    print(f"wrote {TABLE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
