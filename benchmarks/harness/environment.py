"""Conditions of a measurement: the device, the versions, the clocks during the run."""

from __future__ import annotations

import importlib.metadata
import platform
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
FIELDS = ("clocks.sm", "clocks.max.sm", "power.draw", "power.limit", "temperature.gpu", "utilization.gpu")


def output_of(*command: str) -> str | None:
    """Return the output of a command; None if it does not exist or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def version_of(package: str) -> str | None:
    """None for a package that is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment(*, cpu: bool = False) -> dict[str, Any]:
    """Return the record that is stored with every result; unknown values are None."""
    on_gpu = torch.cuda.is_available() and not cpu
    dirty = output_of("git", "status", "--porcelain", "--untracked-files=no")
    return {
        "device": torch.cuda.get_device_name() if on_gpu else f"CPU {platform.processor() or platform.machine()}",
        "devices": torch.cuda.device_count() if on_gpu else 0,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": cudnn_version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
        "triton": version_of("triton"),
        "transformer_engine": version_of("transformer_engine"),
        "flash_attn": version_of("flash_attn"),
        "flash_attn_4": version_of("flash-attn-4"),
        "driver": first_line(output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")),
        "python": platform.python_version(),
        "commit": output_of("git", "rev-parse", "--short=12", "HEAD"),
        "uncommitted_changes": None if dirty is None else bool(dirty),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def cudnn_version() -> str | None:
    """As "9.19.0"."""
    number = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return None if number is None else f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def first_line(text: str | None) -> str | None:
    return text.splitlines()[0] if text else None


@contextmanager
def sampled_clocks(every_ms: int = 1000) -> Iterator[dict[str, float]]:
    """Fills the yielded dictionary, when the block ends, with medians of GPU 0's clock and power while it was busy.

    Runs one nvidia-smi process during the block; leaves the dictionary empty without nvidia-smi.
    """
    found: dict[str, float] = {}
    query = [f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits", "--id=0", f"--loop-ms={every_ms}"]
    with tempfile.TemporaryFile("w+") as log:
        try:
            watcher = subprocess.Popen(["nvidia-smi", *query], stdout=log, stderr=subprocess.DEVNULL)
        except OSError:
            yield found
            return
        try:
            yield found
        finally:
            watcher.terminate()
            watcher.wait()
            log.seek(0)
            found.update(busy_medians(log.read()))


def busy_medians(text: str) -> dict[str, float]:
    """Medians over the samples of at least 90 % utilization."""
    rows = []
    for line in text.splitlines():
        try:
            rows.append([float(value) for value in line.split(",")])
        except ValueError:  # "[N/A]", or a line cut short
            continue
    busy = [row for row in rows if len(row) == len(FIELDS) and row[-1] >= 90]
    if not busy:
        return {}
    medians = {name: statistics.median(column) for name, column in zip(FIELDS, zip(*busy))}
    return {
        "sm_clock_mhz": medians["clocks.sm"], "sm_clock_limit_mhz": medians["clocks.max.sm"],
        "power_w": medians["power.draw"], "power_limit_w": medians["power.limit"],
        "temperature_c": medians["temperature.gpu"], "samples": len(busy),
    }  # fmt: skip
