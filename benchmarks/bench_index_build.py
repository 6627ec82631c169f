"""Time to build the sample order of a large GPT data set: document shuffle, sample index, sample shuffle.

    python benchmarks/bench_index_build.py

10 M documents of 665 tokens on average (6.65 B tokens, 1.62 M samples of 4096), lengths read from a mapped .idx as in
training. Prints the median of at least five runs for the C++ builders and the numpy twin, and for a first start
(with writing the cache) and a second one (reading it). Writes benchmarks/results/index_build.json.
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

from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.data import helpers
from megatron.data.blend import Split
from megatron.data.gpt_index import build_document_index, build_gpt_indices, build_shuffle_index, plan_epochs
from megatron.data.index_format import HEADER, MAGIC, VERSION
from megatron.data.indexed_dataset import IndexedDataset

ROOT = Path(__file__).resolve().parents[1]
SEQUENCE_LENGTH = 4096
SEED = 1234


def write_index(prefix: str, num_documents: int) -> None:
    """Write an .idx of ``num_documents`` random lengths and a sparse .bin, because no token is read here."""
    lengths = np.random.default_rng(0).integers(1, 1330, num_documents).astype("<i4")
    ends = np.cumsum(lengths, dtype="<i8") * 2
    with open(prefix + ".idx", "wb") as stream:
        stream.write(HEADER.pack(MAGIC, VERSION, 8, num_documents, num_documents + 1))
        stream.write(lengths.tobytes() + (ends - 2 * lengths).astype("<i8").tobytes())
        stream.write(np.arange(num_documents + 1, dtype="<i8").tobytes())
    with open(prefix + ".bin", "wb") as stream:
        stream.truncate(int(ends[-1]))


def seconds(function, runs: int) -> dict[str, float]:
    """Median, smallest and largest time of ``runs`` calls."""
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return {"median_s": statistics.median(times), "min_s": min(times), "max_s": max(times), "runs": runs}


def stages(data: IndexedDataset, runs: int) -> dict[str, dict[str, float]]:
    """Measure each stage of the build separately."""
    documents = np.arange(len(data), dtype=np.int32)
    tokens = int(data.sequence_lengths.sum(dtype=np.int64))
    plan = plan_epochs(tokens, None, SEQUENCE_LENGTH, 1)
    order = build_document_index(documents, plan, np.random.RandomState(SEED))
    lengths = data.sequence_lengths
    samples = helpers.count_samples(tokens, SEQUENCE_LENGTH, True, 1)
    numbers = np.arange(samples, dtype=np.uint32)
    return {
        "open and check .idx": seconds(lambda: IndexedDataset(data.path_prefix), runs),
        "document shuffle": seconds(lambda: build_document_index(documents, plan, np.random.RandomState(SEED)), runs),
        "document shuffle, numpy": seconds(lambda: np.random.RandomState(SEED).shuffle(order.copy()), runs),
        "sample index": seconds(lambda: helpers.build_sample_idx(lengths, order, SEQUENCE_LENGTH, 1, tokens), runs),
        "sample index, numpy": seconds(
            lambda: helpers.build_sample_idx_numpy(lengths, order, SEQUENCE_LENGTH, samples, 1), runs
        ),
        "sample shuffle": seconds(lambda: build_shuffle_index(samples, samples, np.random.RandomState(SEED)), runs),
        "sample shuffle, numpy": seconds(lambda: np.random.RandomState(SEED).shuffle(numbers), runs),
        "whole index build": seconds(lambda: build_gpt_indices(lengths, documents, plan, SEQUENCE_LENGTH, SEED), runs),
    }


def starts(data: IndexedDataset, folder: str, runs: int) -> dict[str, dict[str, float]]:
    """A training start that builds and writes the cache, and one that finds it."""
    tokenizer = SimpleNamespace(eod=0, vocab_size=50257)
    documents = np.arange(len(data), dtype=np.int32)
    count = 0

    def start(fresh: bool) -> None:
        nonlocal count
        count += fresh
        config = GPTDatasetConfig(
            random_seed=count,
            sequence_length=SEQUENCE_LENGTH,
            blend=([data.path_prefix], None),
            split="1,0,0",
            path_to_cache=folder,
            tokenizer=tokenizer,
        )
        GPTDataset(data, data.path_prefix, documents, None, Split.train, config)

    return {
        "first start: build and write the cache": seconds(lambda: start(True), runs),
        "second start: read the cache": seconds(lambda: start(False), runs),
    }


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--output", default=str(ROOT / "benchmarks" / "results" / "index_build.json"))
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        prefix = f"{folder}/data"
        write_index(prefix, args.documents)
        data = IndexedDataset(prefix)
        results = stages(data, args.runs) | starts(data, f"{folder}/cache", args.runs)
    machine = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "extension": helpers.has_extension(),
        "machine": platform.machine(),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }
    print(" ".join(f"{name} {value}" for name, value in machine.items()))
    for name, result in results.items():
        print(f"{name:<42} {result['median_s']:8.3f} s  ({result['min_s']:.3f} to {result['max_s']:.3f})")
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    Path(args.output).write_text(
        json.dumps({"documents": args.documents} | machine | {"results": results}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
