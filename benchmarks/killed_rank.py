"""Kill one rank of a run on real text, continue on half of the ranks in another layout, compare the losses.

    python benchmarks/killed_rank.py --data text                            # CPU: 4 ranks over gloo, then 2; minutes
    python benchmarks/killed_rank.py --data text --shape 345M --ranks 8     # 8 GPUs, then 4

1. *uninterrupted*: all steps in the first layout.
2. *killed*: the same with saves in the background. In the middle one rank gets SIGKILL, after which the job must end.
3. *continued*: the same command in the second layout on half of the ranks, from the last complete checkpoint.

Up to the signal the losses must equal the uninterrupted run's, bit for bit. After it the other layout sums in another
order: the mean of the last 20 steps must agree within 0.25 %. Small models train in fp32, 345M in bf16 with
deterministic kernels. OUTPUT gets result.json, the log of both jobs, metrics.jsonl and the report page, without the
paths and the name of this machine.
Exit code 1 if a job or the comparison fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.harness.environment import environment
from benchmarks.harness.jobs import read_records, shown, stop, with_our_path
from benchmarks.real_text_curves import SHAPES, WINDOW, flags, rms, token_prefix, windows

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "killed_rank"
BEFORE = (
    "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather"
)
AFTER = "--pipeline-model-parallel-size 2"
PRECISION = {"345M": "--bf16 --deterministic-mode"}
BAND = 0.0025
"""Largest relative difference of the mean of the last steps."""
PAUSE = 0.05
"""Seconds between looks at a job."""


def launch(words: Sequence[str], ranks: int, log: Path) -> tuple[subprocess.Popen, list[str]]:
    """Start a job whose output is appended to ``log``; return it and its command."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += [str(ROOT / "pretrain_gpt.py"), *words]
    variables = {**os.environ, **with_our_path()}
    if torch.cuda.device_count() < ranks:
        variables |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with log.open("a", encoding="utf-8") as file:
        job = subprocess.Popen(command, cwd=log.parent, env=variables, stdout=file, stderr=subprocess.STDOUT)
    return job, command


def finish(job: subprocess.Popen, timeout: float) -> int | None:
    """Return the exit code of ``job``; None if it had to be stopped after ``timeout`` seconds."""
    try:
        return job.wait(timeout)
    except subprocess.TimeoutExpired:
        stop(job)
        return None


def rank_process(job: subprocess.Popen, rank: int) -> int:
    """Return the process id of a rank of torchrun."""
    for task in Path(f"/proc/{job.pid}/task").iterdir():
        for pid in (task / "children").read_text().split():
            if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return int(pid)
    raise RuntimeError(f"the job has no rank {rank}")


def kill_rank(job: subprocess.Popen, rank: int, iteration: int, log: Path, timeout: float) -> dict[str, Any]:
    """Send SIGKILL to a rank after ``iteration`` and wait for the end of the job."""
    end = time.monotonic() + timeout
    while True:
        logged = re.findall(r" iteration +(\d+)/", log.read_text(encoding="utf-8", errors="replace"))
        if logged and int(logged[-1]) >= iteration:
            break
        if job.poll() is not None or time.monotonic() > end:
            stop(job)
            raise RuntimeError(f"the job did not reach iteration {iteration}")
        time.sleep(PAUSE)
    os.kill(rank_process(job, rank), signal.SIGKILL)
    start = time.monotonic()
    with log.open("a", encoding="utf-8") as file:
        file.write(f"=== SIGKILL to rank {rank} after iteration {logged[-1]} ===\n")
    code, seconds = finish(job, timeout), round(time.monotonic() - start, 1)
    return {"rank": rank, "iteration": int(logged[-1]), "exit_code": code, "seconds_to_end": seconds}


def losses(run: Path) -> list[float]:
    """Return the loss of every iteration from the first on; AssertionError if one is missing or repeated."""
    records = [record for record in read_records(run / "metrics.jsonl") if record["kind"] == "train"]
    assert [record["iteration"] for record in records] == [*range(1, len(records) + 1)]
    return [record["lm loss"] for record in records]


def compare(
    uninterrupted: Sequence[float], killed: Sequence[float], continued: Sequence[float], resumed_from: int
) -> dict[str, Any]:
    """Compare losses: of the killed job, of the continued run after the iteration ``resumed_from``."""
    before = max(abs(a - b) for a, b in zip(uninterrupted, [*continued[:resumed_from], *killed[resumed_from:]]))
    after = [b - a for a, b in zip(uninterrupted, continued)][resumed_from:]
    last, expected = windows(continued[-WINDOW:])[0], windows(uninterrupted[-WINDOW:])[0]
    return {
        "before": before, "after": {"rms": rms(after), "largest": max(map(abs, after)), "last": last - expected},
        "last_relative": last / expected - 1,
        "passed": before == 0 and len(continued) == len(uninterrupted) and abs(last / expected - 1) <= BAND,
    }  # fmt: skip


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the three jobs in ``folder``; return the result. Raises RuntimeError if a job fails."""
    shape = SHAPES[args.shape]
    words = flags(shape, args.steps, token_prefix(args.data.resolve()), PRECISION.get(args.shape, ""))
    tokenizer = args.data.resolve() / "tokenizer"  # samples have none
    words += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer)] * tokenizer.exists()
    words += [] if tokenizer.exists() else ["--vocab-size", str(shape["vocab"])]
    words += ["--data-cache-path", str(folder / "cache")]
    words += ["--micro-batch-size", str(min(shape["micro"], shape["batch"] // args.ranks))]
    save = ["--save", str(folder / "run"), "--load", str(folder / "run"), "--async-save"]
    save += ["--save-interval", str(args.save_interval)]
    result: dict[str, Any] = {
        "environment": environment(), "shape": args.shape, "steps": args.steps, "save_interval": args.save_interval,
        "ranks": [args.ranks, args.ranks // 2], "layouts": [args.before, args.after], "commands": [], "seconds": {},
    }  # fmt: skip

    def start(name: str, flags: Sequence[str], layout: str, ranks: int, log: Path) -> subprocess.Popen:
        job, command = launch([*words, *flags, *layout.split()], ranks, log)
        result["commands"].append(f"{name}: {shown(command, folder)}")
        result["seconds"][name] = -time.monotonic()
        return job

    def end(name: str) -> None:
        result["seconds"][name] = round(result["seconds"][name] + time.monotonic())
        print(f"{name}: {result['seconds'][name]} s", flush=True)

    first = ["--tensorboard-dir", str(folder / "uninterrupted")]
    job = start("uninterrupted", first, args.before, args.ranks, folder / "uninterrupted.log")
    if finish(job, args.timeout):
        raise RuntimeError((folder / "uninterrupted.log").read_text(encoding="utf-8")[-3000:])
    end("uninterrupted")
    log = folder / "log.txt"
    job = start("killed", save, args.before, args.ranks, log)
    result["killed"] = kill_rank(job, args.ranks - 1, args.kill_at or args.steps // 2, log, args.timeout)
    end("killed")
    result["resumed_from"] = int((folder / "run" / "latest_checkpointed_iteration.txt").read_text())
    killed = losses(folder / "run")
    job = start("continued", save, args.after, args.ranks // 2, log)
    if finish(job, args.timeout):
        raise RuntimeError(log.read_text(encoding="utf-8")[-3000:])
    end("continued")
    result["uninterrupted"], continued = losses(folder / "uninterrupted"), losses(folder / "run")
    result["killed"]["losses"] = killed[result["resumed_from"] :]
    result["differences"] = compare(result["uninterrupted"], killed, continued, result["resumed_from"])
    result["differences"]["passed"] &= result["killed"]["exit_code"] not in (0, None)
    return result


def store(result: dict[str, Any], folder: Path, data: Path, output: Path) -> None:
    """Write all files of a result to ``output``, without the paths and the name of this machine."""
    report = [sys.executable, "-m", "megatron", "report", str(folder / "run"), "--log", str(folder / "log.txt")]
    subprocess.run([*report, "--output", str(folder / "report.html")], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    shutil.copy(folder / "run" / "metrics.jsonl", folder)
    names = {str(folder): "OUTPUT", str(data.resolve()): "TEXT", f"{ROOT}/": "", sys.prefix: "PYTHON",
             sys.base_prefix: "PYTHON", f"{tempfile.gettempdir()}/": "TMP/", f"host {os.uname().nodename}": "host HOST",
             f"<td>{os.uname().nodename}</td>": "<td>HOST</td>"}  # fmt: skip
    output.mkdir(parents=True, exist_ok=True)
    for name in ("result.json", "log.txt", "metrics.jsonl", "report.html"):
        text = (folder / name).read_text(encoding="utf-8")
        for private, public in names.items():
            text = text.replace(private, public)
        (output / name).write_text(text, encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of collect_text.py, or its sample")
    parser.add_argument("--shape", choices=list(SHAPES), default="small")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--save-interval", type=int, default=16)
    parser.add_argument("--kill-at", type=int, help="iteration of the signal; default: half of the steps")
    parser.add_argument("--ranks", type=int, default=4, help="of the first layout")
    parser.add_argument("--before", default=BEFORE, metavar="FLAGS", help="first layout (default: %(default)s)")
    parser.add_argument("--after", default=AFTER, metavar="FLAGS", help="second layout (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=900, help="seconds per job")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        result = measure(args, folder)
        store(result, folder, args.data, args.output)
    print(json.dumps({key: result[key] for key in ("seconds", "resumed_from", "differences")}))
    return int(not result["differences"]["passed"])


if __name__ == "__main__":
    sys.exit(main())
