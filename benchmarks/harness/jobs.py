"""One row, measured: fresh jobs of an entry script, their health, medians, and the profile of one step.

A job's time is valid only if it trained: every loss finite, the last below the first, not yet zero. A GPU at its power
limit runs constant, zero or NaN data up to a fifth faster.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import roofline, step_trace
from benchmarks.harness.environment import sampled_clocks
from benchmarks.harness.rows import row_flags, split_name
from megatron.training.arguments import parse_args
from megatron.training.config.resolve import resolve

ROOT = Path(__file__).resolve().parents[2]
PROFILED = 2
"""Number of profiled iterations at the end of a job; the first is read, the second shows where the first ends."""
LAUNCHER = re.compile(r"[WEI]\d{4} .*torch/distributed/|={20,}|-{20,}")
"""Lines of torchrun itself."""
LEARNED = 1e-3
"""A loss that leaves no gradient to compute."""


@dataclass(frozen=True)
class Settings:
    """Settings of the measurement of rows."""

    repeats: int = 2
    warmup: int = 3
    """Iterations left out of the medians."""
    iters: int | None = None
    """Instead of the row's own number."""
    profile: bool = True
    """Whether the last repeat is profiled."""
    smoke: bool = False
    timeout: float = 300.0
    extra: tuple[str, ...] = ()
    keep_traces: Path | None = None
    """A folder that gets the trace of each row."""


def job_command(name: str, folder: Path, settings: Settings, *, traced: bool) -> list[str]:
    """The job of a row; without a launcher where there is one rank."""
    row, _ = split_name(name)
    words = row_flags(name, extra=settings.extra, smoke=settings.smoke)
    iters = (settings.iters or (7 if settings.smoke else row.iters)) + traced
    words += ["--train-iters", str(iters), "--tensorboard-dir", str(folder)]
    if traced:
        words += ["--profile", "--use-pytorch-profiler", "--profile-step-start", str(iters - PROFILED)]
        words += ["--profile-step-end", str(iters)]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={row.gpus}"] if row.gpus > 1 else []
    return [sys.executable, *launcher, str(ROOT / f"pretrain_{row.family}.py"), *words]


def shown(command: Sequence[str], folder: Path) -> str:
    """The command as a user would type it."""
    text = shlex.join(command).replace(shlex.quote(sys.executable) + " -m torch.distributed.run", "torchrun")
    text = text.replace(shlex.quote(sys.executable), "python")
    return text.replace(str(folder), "OUTPUT").replace(str(ROOT) + "/", "")


def read_records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def health(losses: Sequence[float]) -> str | None:
    """Return why a run is no valid measurement of training; None if it is valid."""
    if not losses:
        return "no loss was recorded"
    if not all(math.isfinite(loss) for loss in losses):
        return f"the loss of iteration {next(i for i, x in enumerate(losses, 1) if not math.isfinite(x))} is not finite"
    if losses[-1] >= losses[0]:
        return f"the loss did not fall: {losses[0]:.4f} to {losses[-1]:.4f}"
    return f"nothing left to learn: loss {losses[-1]:.1e}" if losses[-1] < LEARNED else None


def reason(stderr: str) -> str:
    """Return the output of the ranks without the launcher's report."""
    start, *tracebacks = stderr.split("Traceback (most recent call last):")
    of_ranks = [text for text in tracebacks if "torch/distributed/run.py" not in text]
    said = "Traceback:".join([start, *of_ranks]).split("torch.distributed.elastic.multiprocessing", 1)[0]
    lines = [line for line in said.splitlines() if not LAUNCHER.match(line)]
    return "\n".join(lines)[-2000:].strip()


def with_our_path() -> dict[str, str]:
    """Return PYTHONPATH with this checkout first."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


def run_command(
    command: Sequence[str], folder: Path, timeout: float, **environment: str
) -> subprocess.CompletedProcess[str] | None:
    """A program's exit code and output, run in ``folder``; None if it had to be stopped, which a launcher passes on."""
    variables = {**os.environ, **with_our_path(), **environment}
    with subprocess.Popen(
        command, cwd=folder, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as job:
        try:
            output, errors = job.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            stop(job)
            return None
    return subprocess.CompletedProcess(command, job.returncode, output, errors)


def stop(job: subprocess.Popen, with_group: bool = False, patience: float = 20.0) -> None:
    """Asks first: only so does a launcher take its ranks along."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if with_group:
            os.killpg(job.pid, number)
        else:
            job.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(patience)
            return


def run_job(name: str, settings: Settings, *, traced: bool) -> dict[str, Any]:
    """One fresh job: its steady iterations, losses, memory and, if ``traced``, profile. ``error`` if it failed."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary, sampled_clocks() as clocks:
        folder = Path(temporary) / "run"
        command = job_command(name, folder, settings, traced=traced)
        small = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if settings.smoke else {}
        job = run_command(command, Path(temporary), settings.timeout, **small)
        result: dict[str, Any] = {"command": shown(command, folder)}
        if job is None:
            return {**result, "error": f"not finished after {settings.timeout:.0f} s"}
        if job.returncode:
            return {**result, "error": reason(job.stderr)}
        iters = int(command[command.index("--train-iters") + 1])
        last = iters - PROFILED - 1 if traced else iters  # then the profiler starts, with NCCL in about 0.4 s
        timing = [each for each in read_records(folder / "timing.jsonl") if each["kind"] == "timing"]
        result.update(steady(timing, settings.warmup, last))
        losses = [each["lm loss"] for each in read_records(folder / "metrics.jsonl") if each["kind"] == "train"]
        result["losses"] = [round(loss, 5) for loss in losses]
        result["invalid"] = health(losses)
        if traced:
            result.update(read_trace(name, Path(temporary), settings))
    result["clocks"] = clocks
    result["job_seconds"] = round(time.perf_counter() - started, 1)
    return result


def steady(timing: Sequence[dict[str, Any]], warmup: int, last: int) -> dict[str, Any]:
    """Medians over the records of iterations after ``warmup`` up to ``last``."""
    starts = [0, *(record["iteration"] for record in timing)]
    measured = [record for start, record in zip(starts, timing) if warmup <= start and record["iteration"] <= last]
    if not measured:
        return {"error": f"no iteration is measured: {warmup} of warm-up, {last} before the profile"}
    seconds = [record["seconds_per_iteration"] for record in measured]
    peak = max((record["memory"] or {}).get("mem-max-allocated-bytes", 0) for record in timing)
    return {
        "seconds_per_iteration": statistics.median(seconds),
        "spread": round((max(seconds) - min(seconds)) / statistics.median(seconds), 4),
        "seconds": [round(value, 4) for value in seconds],
        "tokens_per_second_per_gpu": statistics.median(r["tokens_per_second"] / r["world_size"] for r in measured),
        "tflops_per_gpu": statistics.median(record["tflops_per_device"] for record in measured),
        "peak_memory_gb": peak / 1e9 or None,
    }


def read_trace(name: str, folder: Path, settings: Settings) -> dict[str, Any]:
    """Profile and roofline of a job's trace of rank 0."""
    traces = sorted(folder.rglob("rank-0.json*"))
    if not traces:
        return {"profile": None}
    if settings.keep_traces:
        settings.keep_traces.mkdir(parents=True, exist_ok=True)
        shutil.copy(traces[0], settings.keep_traces / f"{name}.json.gz")
    return analyse(name, traces[0], settings)


def analyse(name: str, trace: Path, settings: Settings) -> dict[str, Any]:
    """The profile of a trace file of a row, and its distance from the limits."""
    row, _ = split_name(name)
    words = row_flags(name, extra=settings.extra, smoke=settings.smoke)
    given = parse_args([*words, "--train-iters", "1"], model_family=row.family)
    cfg = resolve(given, row.gpus, gpus=not settings.smoke)
    found = step_trace.profile(step_trace.read_events(trace), roofline.weight_shapes(cfg, cfg.tokenizer.vocab_size))
    if found is None:
        return {"profile": None}
    profile, ceilings = found.as_dict(), roofline.load_ceilings()
    report = roofline.report(cfg, cfg.tokenizer.vocab_size, ceilings, profile).as_dict()
    return {
        "profile": profile,
        "roofline": {**report, "ceilings": ceilings["device"]},
        "communication_if_not_hidden_ms": roofline.communication_ms(cfg, cfg.tokenizer.vocab_size, ceilings),
    }


MEDIANS = ("seconds_per_iteration", "tokens_per_second_per_gpu", "tflops_per_gpu", "peak_memory_gb")
PROFILE = ("profile", "roofline", "communication_if_not_hidden_ms")
"""Additional keys of a profiled job."""


def measure(name: str, settings: Settings) -> dict[str, Any]:
    """A row: ``settings.repeats`` jobs, medians of their medians; the profile is the last job's."""
    jobs: list[dict[str, Any]] = []
    for repeat in range(settings.repeats):
        jobs.append(run_job(name, settings, traced=settings.profile and repeat == settings.repeats - 1))
        if "error" in jobs[-1]:
            break
    return combine(jobs)


def combine(jobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One result of several jobs; an error or an unhealthy job is the row's."""
    good = [job for job in jobs if "error" not in job]
    result: dict[str, Any] = {"command": jobs[0]["command"], "repeats": len(good)}
    failed = next((job["error"] for job in jobs if "error" in job), None)
    if failed is not None:
        result["error"] = failed
    if not good:
        return result
    for key in MEDIANS:
        values = [job[key] for job in good if job[key] is not None]
        result[key] = statistics.median(values) if values else None
    result["tflops_of_each_repeat"] = [round(job["tflops_per_gpu"], 2) for job in good if job["tflops_per_gpu"]]
    result["spread_within_a_job"] = max(job["spread"] for job in good)
    result["seconds_of_each_iteration"] = [job["seconds"] for job in good]
    result["losses"] = good[-1]["losses"]
    result["invalid"] = next((job["invalid"] for job in good if job["invalid"]), None)
    result["clocks"] = good[0]["clocks"]
    result["job_seconds"] = [job["job_seconds"] for job in good]
    for key in PROFILE:
        if good[-1].get(key):
            result[key] = good[-1][key]
    return result
