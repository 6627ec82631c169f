"""progress.txt: one line per job and checkpoint, with throughput since the first job of this size."""

import re
from datetime import datetime

import pytest

from megatron.training.hooks.progress import ProgressHook


def lines_of(folder):
    return (folder / "progress.txt").read_text().splitlines()


def test_a_job_and_its_checkpoints_have_their_lines(tmp_path, simulated_run, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    simulated_run(save_interval=5, world_size=4).train([ProgressHook(str(tmp_path), seq_length=1000)], 1, 10)
    start, first, second = lines_of(tmp_path)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\tJob ID: 77\t# GPUs: 4\tStarting job", start)
    assert re.search(
        r"\tSaved checkpoint\tIteration: 5\tJob throughput: [\d.]+ TFLOP/s/GPU\t"
        r"Cumulative throughput: [\d.]+ TFLOP/s/GPU\tFloating-point operations: 5.00e\+12\t"
        r"Tokens \(in billions\): 0.00$",
        first,
    )
    assert "Iteration: 10" in second


def test_cumulative_throughput_begins_at_the_first_job_of_this_size(tmp_path):
    (tmp_path / "progress.txt").write_text(
        "2026-01-01 00:00:00\tJob ID: 1\t# GPUs: 2\tStarting job\n"
        "2026-01-01 01:00:00\tJob ID: 1\t# GPUs: 2\tSaved checkpoint\tFloating-point operations: 5.00e+12\tx\n"
        "2026-01-02 00:00:00\tJob ID: 2\t# GPUs: 4\tStarting job\n"
        "2026-01-02 01:00:00\tJob ID: 2\t# GPUs: 4\tSaved checkpoint\tFloating-point operations: 9.00e+12\tx\n"
        "2026-01-03 00:00:00\tJob ID: 3\t# GPUs: 4\tStarting job\n"
    )
    start, flops = ProgressHook(str(tmp_path), 1)._first_job()
    assert (start.day, flops) == (2, 5e12)


def test_throughput_of_a_resumed_job_counts_its_flops_time_and_gpus(tmp_path, simulated_run, monkeypatch):
    """The job resumes at iteration 40 with 1e12 FLOPs per iteration; an earlier job of this size began 10 s ago."""

    class Now(datetime):
        @classmethod
        def now(cls):
            return cls(2026, 1, 1, 12, 0, 10)

    monkeypatch.setattr("megatron.training.hooks.progress.datetime", Now)
    begun = "2026-01-01 12:00:00"
    path = tmp_path / "progress.txt"
    path.write_text(
        f"{begun}\tJob ID: 1\t# GPUs: 4\tStarting job\n"
        f"{begun}\tJob ID: 1\t# GPUs: 4\tSaved checkpoint\tFloating-point operations: 4.00e+13\tx\n"
    )
    times = iter([100.0, 102.5])  # start of the job, first checkpoint
    monkeypatch.setattr("megatron.training.hooks.progress.time.monotonic", lambda: next(times))
    simulated_run(save_interval=60, world_size=4).train([ProgressHook(str(tmp_path), seq_length=5_000_000)], 41, 60)
    line = lines_of(tmp_path)[-1]
    result = {name.strip(): float(value) for name, value in re.findall(r"([A-Z][^:\t]+): ([\d.]+(?:e\+\d+)?)", line)}
    job, cumulative = result["Job throughput"], result["Cumulative throughput"]
    flops, tokens = result["Floating-point operations"], result["Tokens (in billions)"]
    assert job == pytest.approx(20e12 / 2.5 / 4 / 1e12)
    assert cumulative == pytest.approx(60e12 / 10 / 4 / 1e12)
    assert flops == 60e12 and tokens == pytest.approx(60 * 8 * 5_000_000 / 1e9)
