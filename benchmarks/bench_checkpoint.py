"""Measure the cost of a checkpoint on one rank: writing, reading and waiting.

    python benchmarks/bench_checkpoint.py --gb 4 --folder /where/checkpoints/go

Saves tensors of a model's shapes (on a GPU if present) with fsync and checksums, compared with ``dd conv=fsync`` of
the same bytes on the same disk; loads them again, from the page cache and from the disk; saves them in the background
while matrices are multiplied. Runs of different kinds alternate, because disk speed varies. Prints medians and writes
benchmarks/results/checkpoint.json.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.core.dist_checkpointing import ShardedTensor, load, writer
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.training.checkpoint.background import BackgroundWriter

ROOT = Path(__file__).resolve().parents[1]
WORLD = SINGLE_PROCESS.world


def make_state(gigabytes: float, device: str) -> dict[str, ShardedTensor]:
    """bf16 weights and two float32 moments of layers of hidden size 4096: a matrix of 12 h^2 and a norm each."""
    hidden, state, size = 4096, {}, 0
    if gigabytes < 2:
        hidden = 1024
    layer = 0
    while size < gigabytes * 1e9:
        for name, shape in (("mlp.weight", (12 * hidden, hidden)), ("norm.weight", (hidden,))):
            for prefix, dtype in (("model", torch.bfloat16), ("optimizer.exp_avg", torch.float32),
                                  ("optimizer.exp_avg_sq", torch.float32)):  # fmt: skip
                tensor = torch.randn(shape, device=device).to(dtype)
                full = f"{prefix}.layers.{layer}.{name}"
                state[full] = ShardedTensor(full, tensor, shape, (0,) * len(shape))
                size += tensor.numel() * tensor.element_size()
        layer += 1
    return state


def timed(action) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def drop_from_cache(folder: Path) -> None:
    """The next reader goes to the disk."""
    os.sync()
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def dd(source: Path, target: Path) -> float:
    """Seconds to write the bytes of a checkpoint's files, which are in the page cache, as ``dd`` does."""
    target.mkdir()
    seconds = sum(
        timed(lambda path=path: subprocess.run(
            ["dd", f"if={path}", f"of={target / path.name}", "bs=16M", "conv=fsync"], check=True, capture_output=True
        )) for path in sorted(source.iterdir())
    )  # fmt: skip
    shutil.rmtree(target)
    return seconds


def step(matrix: torch.Tensor, times: int) -> float:
    """Seconds of some matrix products."""

    def multiply() -> None:
        for _ in range(times):
            matrix @ matrix
        if matrix.is_cuda:
            torch.cuda.synchronize()

    return timed(multiply)


def background(state: dict, folder: Path, saves: BackgroundWriter) -> dict[str, float]:
    """Measure one background save: stall of training, duration, and slowdown of the steps during it."""
    device = next(iter(state.values())).local.device.type
    matrix = torch.randn(4096, 4096, device=device) if device == "cuda" else torch.randn(512, 512)
    times = 10
    alone = statistics.median(step(matrix, times) for _ in range(20))
    part = writer.plan(state, WORLD)
    meta = part.without_data()
    began = time.perf_counter()
    saves.start(part, lambda group, blocks, fault: writer.write(meta, folder, blocks, group=group, fault=fault),
                writer.no_fault, "the save")  # fmt: skip
    stall = time.perf_counter() - began
    steps = []
    while saves.busy:
        steps.append(step(matrix, times))
    assert saves.done(wait=True)
    num_bytes, ended = saves.take()
    shutil.rmtree(folder)
    slower = statistics.fmean(steps) / alone - 1 if steps else 0.0
    return {"stall": stall, "seconds": ended - began, "bytes": num_bytes, "slower": slower}


def measure(state: dict, folder: Path, runs: int, staging: float | None) -> dict[str, list[float]]:
    """Seconds of every kind of run."""
    found: dict[str, list[float]] = {}
    kept, scratch = folder / "iter_0000001", folder / "iter_0000002"
    writer.save(state, kept, group=WORLD)
    blank = {key: ShardedTensor(t.name, torch.zeros_like(t.local), t.global_shape, t.offsets)
             for key, t in state.items()}  # fmt: skip
    device = next(iter(state.values())).local.device.type
    saves = BackgroundWriter(WORLD, device, staging, 3600.0)
    first = background(state, scratch, saves)
    found["first stall"] = [first["stall"]]

    def note(name: str, seconds: float) -> None:
        found.setdefault(name, []).append(seconds)

    for _ in range(runs):
        note("dd", dd(kept, folder / "dd"))
        note("save", timed(lambda: writer.save(state, scratch, group=WORLD)))
        shutil.rmtree(scratch)
        with mock.patch.object(writer.zlib, "crc32", lambda data: 0):
            note("save without checksums", timed(lambda: writer.save(state, scratch, group=WORLD)))
        shutil.rmtree(scratch)
        note("load, cached", timed(lambda: load(blank, kept, group=WORLD)))
        drop_from_cache(kept)
        note("load, from disk", timed(lambda: load(blank, kept, group=WORLD)))
        behind = background(state, scratch, saves)
        note("stall", behind["stall"])
        note("background save", behind["seconds"])
        note("steps slower by", behind["slower"])
    assert all(torch.equal(blank[key].local, state[key].local) for key in state)
    saves.close()
    return found


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--staging-gb", type=float, help="as --async-save-staging-gb")
    parser.add_argument("--folder", help="on the disk to measure (default: the disk of temporary files)")
    parser.add_argument("--output", default=str(ROOT / "benchmarks" / "results" / "checkpoint.json"))
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    state = make_state(args.gb, device)
    num_bytes = sum(t.local.numel() * t.local.element_size() for t in state.values())
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        staging = None if args.staging_gb is None else 1e9 * args.staging_gb
        found = measure(state, Path(folder), args.runs, staging)
    median = {name: statistics.median(values) for name, values in found.items()}
    size = num_bytes / 1e9
    print(f"{size:.2f} GB on {device}, medians of {args.runs}")
    for name in ("dd", "save", "save without checksums", "load, cached", "load, from disk", "background save"):
        print(f"{name:>24}  {size / median[name]:6.2f} GB/s   {min(found[name]):.2f} to {max(found[name]):.2f} s")
    pairs = statistics.median(a / b for a, b in zip(found["dd"], found["save"]))
    cost = statistics.median(a / b - 1 for a, b in zip(found["save"], found["save without checksums"]))
    print(f"saving reaches {pairs:.0%} of dd; checksums cost {cost:.1%}")
    stalls = f"{median['stall'] / size:.3f} s/GB (the first time {median['first stall'] / size:.3f})"
    print(f"a background save stalls for {stalls}; concurrent steps are slower by {median['steps slower by']:.0%}")
    Path(args.output).write_text(json.dumps({
        "date": datetime.now(timezone.utc).date().isoformat(), "gigabytes": size, "device": device,
        "machine": platform.processor() or platform.machine(), "cores": os.cpu_count(), "seconds": found,
        "share_of_dd": pairs, "cost_of_checksums": cost, "stall_per_gb": median["stall"] / size,
    }, indent=1) + "\n")  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
