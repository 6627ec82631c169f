"""MB/s of tools/preprocess_data.py with a 32k byte-level BPE, on the sources of Python's standard library.

    python benchmarks/bench_preprocess.py [--repeats 3] [--copies 4] [--vocab-size 32768] [--tokenizer tokenizer.json]

Every figure is the median over complete commands in new processes: "whole command" includes imports, loading, joining
and syncing. Prints a table and writes benchmarks/results/preprocess.json.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def write_corpus(path: Path, copies: int) -> int:
    """The standard library, ``copies`` times, one file a line; returns the size in bytes."""
    root = Path(sysconfig.get_path("stdlib"))
    with path.open("w", encoding="utf-8") as out:
        lines = []
        for source in sorted(root.rglob("*.py")):
            if {"site-packages", "dist-packages"} & set(source.parts):
                continue
            try:
                lines.append(json.dumps({"text": source.read_text(encoding="utf-8")}) + "\n")
            except UnicodeDecodeError:
                continue
        for _ in range(copies):
            out.writelines(lines)
    return path.stat().st_size


def command(*arguments: object) -> str:
    """Run a tool; its output."""
    return subprocess.run([sys.executable, *map(str, arguments)], check=True, capture_output=True, text=True).stdout


def measure(corpus: Path, tokenizer: str, workers: int, folder: Path) -> tuple[float, float, float]:
    """Measure one run: MB/s of the complete command, its reported MB/s of tokenization, MB per CPU second."""
    start, used = time.perf_counter(), processor_seconds()
    output = command(
        ROOT / "tools/preprocess_data.py", "--input", corpus, "--output-prefix", folder / "out", "--overwrite",
        "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tokenizer, "--append-eod",
        "--workers", workers,
    )  # fmt: skip
    wall = time.perf_counter() - start
    reported = re.search(r"\(([0-9.]+) MB/s\)", output)
    assert reported is not None
    megabytes = corpus.stat().st_size / 1e6
    return megabytes / wall, float(reported[1]), megabytes / (processor_seconds() - used)


def processor_seconds() -> float:
    """Processor time of all finished child processes: on a busy machine steadier than wall time."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def encode_speeds(corpus: Path, tokenizer_path: str) -> dict[str, float]:
    """Return MB/s of one process, without files: this package's batch call, and `tokenizers` on the same texts."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from megatron.core.tokenizers.huggingface import build_huggingface

    tokenizer = build_huggingface(tokenizer_path)
    with corpus.open(encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line, _ in zip(file, range(600))]
    speeds = {}
    for name, subset, call in (
        ("this package", texts, tokenizer.tokenize_batch),
        ("tokenizers", texts[:100], lambda some: tokenizer._backend.encode_batch_fast(some, add_special_tokens=False)),
    ):
        start = time.perf_counter()
        call(subset)
        speeds[name] = sum(len(text.encode()) for text in subset) / (time.perf_counter() - start) / 1e6
    return speeds


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--copies", type=int, default=4, help="times the standard library is in the corpus")
    parser.add_argument("--vocab-size", type=int, default=32768)
    parser.add_argument("--tokenizer", help="a tokenizer.json to use instead of training one")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    load = os.getloadavg()[0]  # of other work: above 0.5 or so the wall figures are too low
    results: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = folder / "corpus.jsonl"
        size = write_corpus(corpus, args.copies)
        tokenizer = args.tokenizer
        if tokenizer is None:
            command(ROOT / "tools/train_tokenizer.py", "--input", corpus, "--vocab-size", args.vocab_size,
                    "--output", folder, "--max-bytes", 30_000_000)  # fmt: skip
            tokenizer = str(folder / "tokenizer.json")
        print(f"corpus {size / 1e6:.1f} MB of JSON lines, {args.vocab_size if not args.tokenizer else tokenizer} ids")
        results["encode, one process, MB/s"] = speeds = encode_speeds(corpus, tokenizer)
        for library, speed in speeds.items():
            print(f"encode only, one process, {library:14} {speed:7.1f} MB/s")
        for workers in args.workers:
            runs = [measure(corpus, tokenizer, workers, folder) for _ in range(args.repeats)]
            whole, inner, per_second = (statistics.median(column) for column in zip(*runs))
            print(
                f"preprocess_data.py --workers {workers}: {inner:6.1f} MB/s, whole command {whole:6.1f} MB/s, "
                f"{per_second:6.1f} MB per processor second"
            )
            results[f"workers {workers}"] = {
                "MB/s": inner, "whole command MB/s": whole, "MB per processor second": per_second, "runs": runs,
            }  # fmt: skip
    packages = ("tokenizers", "tiktoken", "orjson", "numpy")
    versions = {package: importlib.metadata.version(package) for package in packages}
    report = {
        "corpus_bytes": size, "vocab_size": args.vocab_size, "processors": os.cpu_count(), "load_at_start": load,
        "machine": platform.machine(), "python": platform.python_version(), "versions": versions, "results": results,
    }  # fmt: skip
    target = ROOT / "benchmarks/results/preprocess.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"load average of the machine at the start: {load:.1f}")
    print(f"wrote {target.relative_to(ROOT)}: {', '.join(f'{name} {version}' for name, version in versions.items())}")


if __name__ == "__main__":
    main()
