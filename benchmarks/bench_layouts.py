"""Training speed of parallel layouts: the LLaMA-3-8B shape through pretrain_gpt.py itself, one fresh job per row.

    python benchmarks/bench_layouts.py                      # every row that this machine has the GPUs for
    python benchmarks/bench_layouts.py --rows dp4 tp4       # some of them
    python benchmarks/bench_layouts.py --smoke              # the same layouts, tiny, over gloo on a CPU

Reports model TFLOP/s per GPU (causal attention counted as half, no recomputation), tokens/s per GPU, peak memory, and
how much of a step communication leaves the GPU with nothing else to do (from a trace of one step of rank 0). Time is
measured on healthy training (mock text, falling loss). Writes benchmarks/results/layouts.json.
"""

import argparse
import gzip
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
SHAPE = (
    "--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 "
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --rotary-base 500000 "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --bf16 --vocab-size 128256"
)
TINY = (
    "--hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 8 --group-query-attention --num-query-groups 4 "
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --vocab-size 500"
)
COMMON = "--mock-data --tokenizer-type NullTokenizer --micro-batch-size 1 --lr 1e-4 --lr-warmup-iters 2 --eval-iters 0 "
COMMON += "--log-interval 1 --log-throughput --num-workers 1 --manual-gc"
ZERO = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"

# row: (GPUs, layers, sequence length, global batch, flags)
ROWS: dict[str, tuple[int, int, int, int, str]] = {
    "one": (1, 16, 8192, 8, ""),
    "one-s4096": (1, 16, 4096, 16, "--micro-batch-size 2"),
    "dp4": (4, 32, 8192, 32, ZERO),
    "dp4-no-overlap": (4, 32, 8192, 32, "--use-distributed-optimizer"),
    "tp4-sp": (4, 32, 8192, 32, "--tensor-model-parallel-size 4 --sequence-parallel"),
    "tp4-sp-overlap": (4, 32, 8192, 32, "--tensor-model-parallel-size 4 --sequence-parallel --tp-comm-overlap"),
    "pp4": (4, 32, 8192, 32, "--pipeline-model-parallel-size 4"),
    "pp4-vpp": (4, 32, 8192, 32, "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2"),
    "pp4-zero-bubble": (4, 32, 8192, 32, "--pipeline-model-parallel-size 4 --pipeline-schedule zero-bubble"),
    "cp4-s32768": (4, 32, 32768, 8, f"--context-parallel-size 4 {ZERO}"),
    "tp2-pp2": (4, 32, 8192, 32, "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"),
    "dp2-tp2": (4, 32, 8192, 32, f"--tensor-model-parallel-size 2 --sequence-parallel {ZERO}"),
    "dp2-pp2": (4, 32, 8192, 32, f"--pipeline-model-parallel-size 2 {ZERO}"),
}


def union(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Disjoint intervals that cover the same points."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(intervals: list[tuple[float, float]]) -> float:
    """Total length of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def analyse(trace: Path, steps: int) -> dict[str, float]:
    """Milliseconds per step: busy with compute, with communication, exposed communication, and idle."""
    opener = gzip.open if trace.suffix == ".gz" else open
    with opener(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not kernels:
        return {}
    spans = [(event["ts"], event["ts"] + event["dur"], "nccl" in event["name"].lower()) for event in kernels]
    compute = union([(start, end) for start, end, communicates in spans if not communicates])
    communication = union([(start, end) for start, end, communicates in spans if communicates])
    busy = union(compute + communication)
    total = busy[-1][1] - busy[0][0]
    milliseconds = {
        "compute": length(compute),
        "communication": length(communication),
        "exposed_communication": length(busy) - length(compute),
        "idle": total - length(busy),
    }
    return {name: value / 1000 / steps for name, value in milliseconds.items()}


def command_of(name: str, folder: Path, args: argparse.Namespace) -> list[str]:
    """The job of a row."""
    gpus, layers, seq_length, batch, flags = ROWS[name]
    shape, layers = SHAPE, args.layers or layers
    if args.smoke:
        shape, layers, seq_length, batch = TINY, 8, 64, 8
    words = [*shape.split(), *COMMON.split(), *flags.split(), "--num-layers", str(layers)]
    words += ["--seq-length", str(seq_length), "--max-position-embeddings", str(seq_length)]
    words += ["--global-batch-size", str(batch), "--train-iters", str(args.iters), "--tensorboard-dir", str(folder)]
    if args.trace:
        words += ["--profile", "--use-pytorch-profiler", "--profile-step-start", str(args.iters - 1)]
        words += ["--profile-step-end", str(args.iters)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}"]
    return [*launcher, str(ROOT / "pretrain_gpt.py"), *words]


def reason(stderr: str) -> str:
    """What the ranks said, without the launcher's own report."""
    said = stderr.split("torch.distributed.elastic.multiprocessing", 1)[0]
    return said[-3000:]


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One job: medians over its steady iterations."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        command = command_of(name, folder, args)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        job = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=args.timeout)
        if job.returncode:
            return {"error": reason(job.stderr)}
        timing = [json.loads(line) for line in (folder / "timing.jsonl").read_text().splitlines()]
        train = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        last = args.iters - 2 if args.trace else args.iters
        steady = [record for record in timing if args.warmup < record["iteration"] <= last]
        result: dict[str, Any] = {
            "seconds_per_iteration": statistics.median(record["seconds_per_iteration"] for record in steady),
            "tokens_per_second_per_gpu": statistics.median(r["tokens_per_second"] / r["world_size"] for r in steady),
            "tflops_per_gpu": statistics.median(record["tflops_per_device"] for record in steady),
            "peak_memory_gb": max((r["memory"] or {}).get("mem-max-allocated-bytes", 0) for r in timing) / 1e9,
            "first_and_last_loss": [record["lm loss"] for record in (train[0], train[-1])],
            "command": " ".join(["torchrun", *command[3:]]).replace(str(ROOT) + "/", ""),
        }
        traces = sorted(Path(temporary).rglob("*.json*"))
        traces = [path for path in traces if "rank-0" in path.name]
        if traces:
            result["trace_ms_per_step"] = analyse(traces[0], steps=1)
        return result


def main() -> None:
    """Measures, prints a table, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), help="default: all that fit this machine")
    parser.add_argument("--iters", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2, help="iterations left out of the medians")
    parser.add_argument("--layers", type=int, help="instead of the row's own number")
    parser.add_argument("--timeout", type=float, default=300, help="seconds per job")
    parser.add_argument("--no-trace", dest="trace", action="store_false")
    parser.add_argument("--smoke", action="store_true", help="tiny, on a CPU")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/layouts.json")
    args = parser.parse_args()
    devices = 4 if args.smoke else torch.cuda.device_count()
    rows = args.rows or [name for name, row in ROWS.items() if row[0] <= devices]
    device = "CPU" if args.smoke else torch.cuda.get_device_name()
    report: dict[str, Any] = {"device": device, "torch": torch.__version__, "python": platform.python_version()}
    report["rows"] = {}
    print("row                TFLOP/s/GPU  tokens/s/GPU  s/iter  peak GB  exposed, idle ms", flush=True)
    for name in rows:
        result = report["rows"][name] = measure(name, args)
        args.output.write_text(json.dumps(report, indent=1) + "\n")
        if "error" in result:
            print(f"{name:18s} failed: {result['error'][-600:]}", flush=True)
            continue
        trace = result.get("trace_ms_per_step", {})
        print(
            f"{name:18s} {result['tflops_per_gpu']:11.1f} {result['tokens_per_second_per_gpu']:13.0f}"
            f" {result['seconds_per_iteration']:7.2f} {result['peak_memory_gb']:8.1f}"
            f"  {trace.get('exposed_communication', 0):.0f}, {trace.get('idle', 0):.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
