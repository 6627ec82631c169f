"""--log-progress: append a line to ``<save>/progress.txt`` at job start and for every checkpoint, on rank 0."""

import logging
import os
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from megatron.core.safe_files import open_to_append, read_file
from megatron.training.hooks.base import Hook
from megatron.training.observe.kinds.save import SAVE, SAVING
from megatron.training.observe.records import Record, RecordKind, RunInfo

logger = logging.getLogger(__name__)

MAX_PROGRESS_BYTES = 1 << 28
"""Largest ``progress.txt`` that is read."""
TIME_FORMAT = "%Y-%m-%d %H:%M:%S"


class ProgressHook(Hook):
    """Logs the throughput of this job and of all consecutive jobs with this number of GPUs, including waiting times."""

    kinds = (SAVING, SAVE)

    def __init__(self, save_dir: str, seq_length: int):
        self.path = Path(save_dir) / "progress.txt"
        self.seq_length = seq_length
        self.world_size = 1
        self.start_time = 0.0
        self.start_flops, self.saved_flops = 0.0, 0.0

    def on_start(self, run: RunInfo) -> None:
        self.state = run.state
        self.world_size = run.world_size
        self.start_time = time.monotonic()
        self.start_flops = run.state.floating_point_operations
        self._append("Starting job")

    def on_record(self, kind: RecordKind, record: Record) -> None:
        """Append a line for a completed checkpoint: iteration, TFLOP/s per GPU of this job and cumulative since the
        first consecutive job with this number of GPUs, total FLOPs, and billions of tokens."""
        if kind is SAVING:  # a background save is complete some iterations later
            self.saved_flops = self.state.floating_point_operations
            return
        flops = self.saved_flops
        job_seconds = time.monotonic() - self.start_time
        first_start, first_flops = self._first_job()
        all_seconds = (datetime.now() - first_start).total_seconds()
        self._append(
            f"Saved checkpoint\tIteration: {record['iteration']}\t"
            f"Job throughput: {self._tflops(flops - self.start_flops, job_seconds):.1f} TFLOP/s/GPU\t"
            f"Cumulative throughput: {self._tflops(flops - first_flops, all_seconds):.1f} TFLOP/s/GPU\t"
            f"Floating-point operations: {flops:.2e}\t"
            f"Tokens (in billions): {record['consumed_samples'] * self.seq_length / 1e9:.2f}"
        )

    def _tflops(self, flops: float, seconds: float) -> float:
        return flops / max(seconds, 1e-9) / self.world_size / 1e12

    def _append(self, text: str) -> None:
        """One tab-separated line: time, SLURM job ID, number of GPUs, ``text``. Warns if it cannot be written."""
        job = os.environ.get("SLURM_JOB_ID", "")
        line = f"{datetime.now():{TIME_FORMAT}}\tJob ID: {job}\t# GPUs: {self.world_size}\t{text}\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open_to_append(self.path) as file:
                file.write(line.encode())
        except OSError as error:
            logger.warning("cannot write %s (%s): training continues without this line", self.path, error.strerror)

    def _first_job(self) -> tuple[datetime, float]:
        """Return the start of the first of the last consecutive jobs with the same number of GPUs, and the total FLOPs
        before it; without any the current time and 0. Skips unreadable lines."""
        start, flops_before, flops, gpus = datetime.now(), 0.0, 0.0, None
        text = b""
        with suppress(OSError):
            text = read_file(self.path, MAX_PROGRESS_BYTES)
        for line in text.decode("utf-8", errors="replace").splitlines():
            fields = line.split("\t")
            with suppress(ValueError, IndexError):  # skip torn or edited lines
                if "Starting job" in fields and fields[2] != gpus:
                    start, flops_before, gpus = datetime.strptime(fields[0], TIME_FORMAT), flops, fields[2]
                for field in fields:
                    if field.startswith("Floating-point operations: "):
                        flops = float(field.split(": ")[1])
        return start, flops_before
