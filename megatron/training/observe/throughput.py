"""Training throughput relative to the device's peak: tokens and model FLOPs per second, MFU, memory.

Model FLOPs only (formula of the Task: causal attention, no recomputation, no embedding lookup). Peaks are *dense*
vendor figures, without sparsity. Devices that are not in the table report tokens per second and "MFU n/a". An MFU above
100 % means that the FLOP count or the time is wrong; it is an error."""

import logging
import os
import re
import sys
from pathlib import Path

import torch

from megatron.core.config.errors import EXIT_FAILED, UserError

logger = logging.getLogger(__name__)

# (device name pattern, dense bf16, dense fp8 TFLOP/s). The first match applies, so special cases come first.
PEAKS: list[tuple[str, float, float | None]] = [
    (r"\bGB300\b", 2500.0, 5000.0),
    (r"\bGB200\b", 2500.0, 5000.0),
    (r"\bB300\b", 2250.0, 4500.0),
    (r"\bB200\b", 2250.0, 4500.0),
    (r"\bB100\b", 1750.0, 3500.0),
    (r"\bGH200\b", 989.4, 1978.9),
    (r"\bH[12]00 NVL\b", 835.5, 1671.0),
    (r"\bH200\b", 989.4, 1978.9),
    (r"\bH100 PCIe\b", 756.0, 1513.0),
    (r"\bH100\b", 989.4, 1978.9),
    (r"\bH800 PCIe\b", 756.0, 1513.0),
    (r"\bH800\b", 989.4, 1978.9),
    (r"\bH20\b", 148.0, 296.0),
    (r"\bA[18]00\b", 312.0, None),
    (r"\bA40\b", 149.7, None),
    (r"\bA30\b", 165.0, None),
    (r"\bA10\b", 125.0, None),
    (r"\bL40S\b", 362.05, 733.0),
    (r"\bL40\b", 181.05, 362.0),
    (r"\bL4\b", 121.0, 242.5),
    (r"\bRTX 4090\b", 165.2, 330.3),
    (r"\bRTX 3090\b", 71.0, None),
    (r"\bMI355X\b", 2516.6, 5033.2),
    (r"\bMI350X\b", 2306.9, 4613.7),
    (r"\bMI3(00|25)X\b", 1307.4, 2614.9),
    (r"\bMI250X?\b", 383.0, None),
]


class ThroughputError(UserError, ArithmeticError):
    """A measured rate above the device's peak."""

    exit_code = EXIT_FAILED


def peak_tflops(device_name: str, precision: str = "bf16") -> float | None:
    """Return the dense peak in TFLOP/s for ``precision`` "fp8"; any other gives the bf16 peak (fp16 has the same). None
    for unknown devices and for devices without fp8."""
    for pattern, bf16, fp8 in PEAKS:
        if re.search(pattern, device_name, re.IGNORECASE):
            return fp8 if precision == "fp8" else bf16
    return None


def mfu(tflops: float, device_name: str, precision: str = "bf16") -> float | None:
    """Return the model FLOPs utilization (0 to 1): model TFLOP/s per device over the dense peak of ``device_name`` in
    ``precision``. Returns None for an unknown device. Raises :class:`ThroughputError` above 1."""
    peak = peak_tflops(device_name, precision)
    if peak is None:
        return None
    share = tflops / peak
    if share > 1:
        raise ThroughputError(
            f"{tflops:.1f} TFLOP/s per device is {share:.0%} of the dense {precision} peak of {device_name} "
            f"({peak} TFLOP/s): the FLOP count or the elapsed time is wrong"
        )
    return share


class Throughput:
    """Converts counts and seconds to rates for one kind of device. An MFU above 1 is logged as an error, once."""

    def __init__(self, world_size: int, device_name: str, precision: str = "bf16"):
        self.world_size, self.device_name, self.precision = world_size, device_name, precision
        self._reported = False

    def rate(self, flops: float, num_tokens: float, elapsed: float) -> dict[str, float | None]:
        """Return ``tokens_per_second`` of all devices, ``tflops_per_device`` and ``mfu`` for ``flops`` (0: not counted)
        and ``num_tokens``, both of all devices, in ``elapsed`` seconds. Unknown values are None; without time the token
        rate is 0. An MFU above 1 becomes None and is logged once; nothing is raised."""
        tokens = num_tokens / elapsed if elapsed > 0 else 0.0
        tflops = flops / elapsed / self.world_size / 1e12 if elapsed > 0 and flops > 0 else None
        try:
            share = None if tflops is None else mfu(tflops, self.device_name, self.precision)
        except ThroughputError as error:
            share = None
            if not self._reported:
                logger.error("%s", error)
            self._reported = True
        return {"tokens_per_second": tokens, "tflops_per_device": tflops, "mfu": share}


def device_name() -> str:
    """Return the name of the current CUDA device, or "CPU"."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def cuda_memory_megabytes() -> dict[str, float]:
    """Return CUDA memory in MiB: "allocated", "max allocated", "reserved", "max reserved". Does not reset peaks."""
    sizes = {
        "allocated": torch.cuda.memory_allocated(),
        "max allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "max reserved": torch.cuda.max_memory_reserved(),
    }
    return {name: size / 2**20 for name, size in sizes.items()}


def memory_bytes(device: str) -> dict[str, int]:
    """Return memory values of the allocator on ``cuda``, else the current and peak resident set of this process."""
    if device == "cuda":
        stats = torch.cuda.memory_stats()
        return {
            "mem-reserved-bytes": stats.get("reserved_bytes.all.current", 0),
            "mem-allocated-bytes": stats.get("allocated_bytes.all.current", 0),
            "mem-max-allocated-bytes": stats.get("allocated_bytes.all.peak", 0),
            "mem-allocated-count": stats.get("allocation.all.current", 0),
        }
    return {"mem-resident-bytes": resident_bytes(), "mem-max-resident-bytes": max_resident_bytes()}


def resident_bytes() -> int:
    """Return the resident memory of this process, or its peak if the system does not report the current value."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return max_resident_bytes()
    return pages * os.sysconf("SC_PAGE_SIZE")


def max_resident_bytes() -> int:
    """Return the peak resident memory of this process."""
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
