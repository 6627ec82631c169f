"""Selection of the groups that use copy engines."""

from __future__ import annotations

import logging
import os
import socket
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.core.config.notices import notice
from megatron.core.groups.copy_engines.exchange import CopyEngines
from megatron.core.groups.copy_engines.window import OpenWindow, SymmetricWindow

logger = logging.getLogger(__name__)

DEVICE = "cuda"


def start_copy_engines(name: str, handle: dist.ProcessGroup, ranks: Sequence[int], rank: int) -> CopyEngines | None:
    """Return copy engines for the group ``ranks`` (``rank``: within the group), or None on all ranks: they require NCCL
    and all ranks on one host with GPU peer access. Not with CUDA_DEVICE_MAX_CONNECTIONS=1: all streams then share one
    hardware queue, where a waiting stream blocks others. The reason is logged. Collective; waits for the device."""
    if dist.get_backend(handle) != "nccl":
        return None
    open_window = partial(SymmetricWindow, handle)
    reason = "CUDA_DEVICE_MAX_CONNECTIONS is 1" if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1" else ""
    # every rank must take part in every vote: a rank that returned early would leave the others in a collective
    works = _all_agree(handle, not reason)
    if works and not _on_one_host(handle):
        works, reason = False, "its ranks are on several hosts"
    if works:
        reason = _trial(open_window, rank)
        works = _all_agree(handle, not reason)
    if works:
        return CopyEngines(rank, len(ranks), open_window)
    notice(logger, "%s: messages go through NCCL instead of copy engines: %s", name, reason or "a peer cannot")
    return None


def _trial(open_window: OpenWindow, rank: int) -> str:
    """Signal this rank; return the first line of the error, or "". Collective; waits for the device."""
    try:
        window = open_window(16, 1)
        window.current_queue().write([window.word(rank, 0)], 1)
        window.current_queue().wait([window.word(rank, 0)], 1)
        torch.cuda.synchronize()
    except (RuntimeError, OSError, AttributeError, ImportError) as error:
        return str(error).splitlines()[0]
    return ""


def _all_agree(handle: dist.ProcessGroup, agrees: bool) -> bool:
    """Collective (one all-reduce); waits for the device."""
    votes = torch.tensor([int(agrees)], device=DEVICE)
    dist.all_reduce(votes, dist.ReduceOp.MIN, group=handle)
    return bool(votes.item())


def _on_one_host(handle: dist.ProcessGroup) -> bool:
    """By host name and boot id; the same answer on all ranks. Collective (one all-reduce); waits for the device."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = socket.gethostname() + (boot.read_text() if boot.exists() else "")
    number = zlib.crc32(host.encode())
    extremes = torch.tensor([number, -number], dtype=torch.int64, device=DEVICE)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=handle)  # [maximum, -minimum]
    return bool(extremes[0] == -extremes[1])
