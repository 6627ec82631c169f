"""Time to read all weights of a live model as full Hugging Face tensors (``hf_weights``), 8 billion parameters.

    python benchmarks/bench_live_weights.py                                  # one GPU
    torchrun --nproc_per_node 2 benchmarks/bench_live_weights.py --tensor-model-parallel-size 2
    torchrun --nproc_per_node 2 benchmarks/bench_live_weights.py --smoke --pipeline-model-parallel-size 2

Takes the flags of ``pretrain_gpt.py`` too. Prints GB, seconds of the fastest of three readings and
peak memory in addition to the weights. ``copy`` also copies each tensor into a buffer, as a generator's update does.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness.environment import environment
from benchmarks.harness.rows import LLAMA_8B, TINY_LLAMA
from megatron.core.tokenizers import build_tokenizer
from megatron.training.arguments import parse_args, validate_args
from megatron.training.config.launcher import launched_world_size
from megatron.training.initialize import initialize_megatron, training_device
from megatron.training.live_weights import hf_weights
from megatron.training.tasks.language_model import task_class

COMMON = (
    "--bf16 --micro-batch-size 1 --skip-train --train-iters 1 --eval-iters 0 --mock-data "
    "--tokenizer-type NullTokenizer --seq-length 2048 --max-position-embeddings 8192"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny, on a CPU too")
    parser.add_argument("--output", type=Path, default=None, help="append the row to this JSON file")
    args, rest = parser.parse_known_args()
    shape = f"{TINY_LLAMA} --num-layers 2" if args.smoke else f"{LLAMA_8B} --num-layers 32"
    flat = parse_args([*shape.split(), *COMMON.split(), *rest], needs_data=False, model_family="gpt")
    cfg = validate_args(flat, launched_world_size() or 1, announce=False)
    groups = initialize_megatron(cfg)
    task = task_class(cfg.model_family)(cfg, build_tokenizer(cfg.tokenizer))
    model = [task.model_provider(groups.pp.is_first, groups.pp.is_last).to(training_device())]
    row: dict[str, Any] = {"ranks": groups.world.size, "flags": " ".join(rest)}
    cuda = torch.cuda.is_available()
    held = torch.cuda.memory_allocated() if cuda else 0
    buffer: dict[str, torch.Tensor] = {}
    for kind in ("read", "copy"):
        times = []
        for _ in range(3):
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            start, size = time.perf_counter(), 0
            for name, tensor in hf_weights(cfg, model, vocab_size=task.vocab_size, groups=groups):
                size += tensor.nbytes
                if kind == "copy":
                    buffer.setdefault(name, torch.empty_like(tensor)).copy_(tensor)
            if cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
            if cuda and kind == "read":
                row["peak_gb"] = round((torch.cuda.max_memory_allocated() - held) / 1e9, 2)
        row |= {"gb": round(size / 1e9, 2), f"{kind}_s": round(min(times), 3)}
        row[f"{kind}_times"] = [round(each, 3) for each in times]
    if groups.world.rank == 0:
        print(json.dumps(row))
        if args.output is not None:
            found = json.loads(args.output.read_text()) if args.output.exists() else {"rows": []}
            found["environment"] = environment(cpu=args.smoke)
            found["rows"].append(row)
            args.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
