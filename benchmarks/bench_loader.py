"""Tokens per second that one process reads from a GPTDataset.

    python benchmarks/bench_loader.py

A uint16 data set of 130 M tokens (documents of 665 tokens on average) in the page cache, samples of 4096 in training
order: the cost of the program without the disk. Prints the median of at least five passes for each reader.
Writes benchmarks/results/loader.json.
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.data.indexed_dataset import IndexedDatasetBuilder

ROOT = Path(__file__).resolve().parents[1]
VOCAB_SIZE = 50257
WAYS = {
    "mmap": {},
    "mmap, document boundaries": {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True},
    "pread (--no-mmap-bin-files)": {"mmap_bin_files": False},
}


def write_data(prefix: str, num_documents: int) -> None:
    """Random documents, each ended by token 0."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 1330, num_documents)
    tokens = generator.integers(1, VOCAB_SIZE, int(lengths.sum()), dtype=np.uint16)
    tokens[np.cumsum(lengths) - 1] = 0
    with IndexedDatasetBuilder(prefix + ".bin", np.uint16) as builder:
        builder.add_documents(tokens, lengths)
        builder.finalize(prefix + ".idx")


def tokens_per_second(data, samples: int, runs: int) -> dict[str, float]:
    """Median over ``runs`` passes of the same ``samples`` samples, after one to warm up."""
    rates = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        for number in range(samples):
            data[number]
        rates.append(samples * data.config.sequence_length / (time.perf_counter() - start))
    rates = rates[1:]
    return {"median": statistics.median(rates), "min": min(rates), "max": max(rates), "runs": runs}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=200_000)
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--output", default=str(ROOT / "benchmarks" / "results" / "loader.json"))
    args = parser.parse_args(argv)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        prefix = f"{folder}/data"
        write_data(prefix, args.documents)
        for name, options in WAYS.items():
            config = GPTDatasetConfig(
                random_seed=1234,
                sequence_length=args.seq_length,
                blend=([prefix], None),
                split="1,0,0",
                tokenizer=SimpleNamespace(eod=0, vocab_size=VOCAB_SIZE),
                **options,
            )
            data = BlendedMegatronDatasetBuilder(GPTDataset, [args.samples, 0, 0], lambda: True, config).build()[0]
            results[name] = tokens_per_second(data, args.samples, args.runs)
    machine = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }
    print(" ".join(f"{name} {value}" for name, value in machine.items()))
    for name, rate in results.items():
        spread = f"({rate['min'] / 1e6:.1f} to {rate['max'] / 1e6:.1f})"
        print(f"{name:<30} {rate['median'] / 1e6:8.1f} M tokens/s per process  {spread}")
    content = {"sequence_length": args.seq_length} | machine | {"tokens_per_second": results}
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    Path(args.output).write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
