"""Conversion of a large checkpoint: GB/s and peak memory of ``tools/checkpoint/convert.py``.

    python benchmarks/bench_conversion.py --folder /tmp/conversion [--layers 32] [--json results.json]

Makes a Hugging Face folder of LLaMA-2-7B's shape with random bf16 weights (13.5 GB; --layers 8: 3.8 GB), converts it to
the native format and back, each in a separate process, and compares: the files hold the same bytes. The rate includes
the complete program with fsync and checksums, per byte of the model. Needs three times the model's size on disk.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.export.files import read_safetensors
from megatron.export.hf import save_hf
from megatron.export.interchange import Interchange
from megatron.training.arguments import parse_args, validate_args
from megatron.training.checkpoint.other_formats import MODEL, expected_tensors
from megatron.training.stored_settings import config_to_dict

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = 32000
LLAMA_7B = [
    "--hidden-size", "4096", "--num-attention-heads", "32", "--ffn-hidden-size", "11008", "--seq-length", "4096",
    "--max-position-embeddings", "4096", "--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear",
    "--position-embedding-type", "rope", "--untie-embeddings-and-output-weights", "--bf16", "--micro-batch-size", "1",
    "--skip-train", "--eval-iters", "0",
]  # fmt: skip


def synthetic(layers: int) -> Interchange:
    """Return random weights of LLaMA-2-7B with ``layers`` layers, generated on read."""
    cfg = validate_args(parse_args([*LLAMA_7B, "--num-layers", str(layers)], needs_data=False), 1)
    settings = {name: value for name, value in config_to_dict(cfg.flat).items() if name in MODEL}

    def lazy(seed: int, shape: tuple[int, ...]) -> LazyTensor:
        def read() -> torch.Tensor:
            return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.bfloat16)

        return LazyTensor(shape, torch.bfloat16, read)

    shapes = enumerate(expected_tensors(cfg, VOCABULARY).items())
    tensors = {name: lazy(seed, each) for seed, (name, each) in shapes}
    return Interchange({**settings, "vocab_size": VOCABULARY}, tensors)


def convert(saver: str, source: Path, target: Path, size: int, tensor: int) -> dict[str, float | str]:
    """Return time and memory of one conversion in a separate process."""
    shutil.rmtree(target, ignore_errors=True)
    places = ["--load-dir", str(source), "--save-dir", str(target), "--no-checking"]
    command = [sys.executable, str(ROOT / "tools" / "checkpoint" / "convert.py"), "--saver", saver, *places]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    process = subprocess.Popen(command, env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if status:
        raise SystemExit(f"{' '.join(command)} ended with status {status}")
    peak = usage.ru_maxrss * 1024
    return {
        "conversion": f"{source.name} -> {target.name}", "GB": size / 1e9, "seconds": seconds,
        "GB/s": size / seconds / 1e9, "peak RSS GB": peak / 1e9, "peak RSS / largest tensor": peak / tensor,
        "cpu seconds": usage.ru_utime + usage.ru_stime,
    }  # fmt: skip


def idle_rss(environment: dict[str, str]) -> float:
    """Memory of a process that imports what the tool imports, in bytes."""
    module = "megatron.tools.checkpoint.convert"
    program = f"import {module}, resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    out = subprocess.run([sys.executable, "-c", program], env=environment, cwd=ROOT, capture_output=True, check=True)
    return int(out.stdout) * 1024


def same_bytes(one: Path, other: Path) -> bool:
    """Whether all tensors of two Hugging Face folders are equal, bit for bit."""
    first: dict[str, LazyTensor] = {}
    second: dict[str, LazyTensor] = {}
    for folder, found in ((one, first), (other, second)):
        for path in folder.glob("*.safetensors"):
            found |= read_safetensors(path)
    return first.keys() == second.keys() and all(
        torch.equal(first[name].read().view(torch.int16), second[name].read().view(torch.int16)) for name in first
    )


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the model and what becomes of it are kept")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--keep", action="store_true", help="leave the folders where they are")
    args = parser.parse_args()
    names = [args.folder / name for name in ("hf", "native", "hf-again")]
    model = synthetic(args.layers)
    sizes = [tensor.dtype.itemsize * torch.Size(tensor.shape).numel() for tensor in model.tensors.values()]
    if not names[0].exists():
        save_hf(model, names[0])
    base = idle_rss({**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    rows = [convert("native", names[0], names[1], sum(sizes), max(sizes))]
    rows.append(convert("hf", names[1], names[2], sum(sizes), max(sizes)))
    equal = same_bytes(names[0], names[2])
    for row in rows:
        row |= {"RSS of imports GB": base / 1e9, "same bytes after both": str(equal)}
        shown = {key: f"{value:.3g}" if isinstance(value, float) else value for key, value in row.items()}
        print("  ".join(f"{key} {value}" for key, value in shown.items()))
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"largest tensor {max(sizes) / 1e9:.3f} GB; this program itself used {used / 1e9:.2f} GB")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))
    if not args.keep:
        for name in names:
            shutil.rmtree(name, ignore_errors=True)
    return int(not equal)


if __name__ == "__main__":
    sys.exit(main())
