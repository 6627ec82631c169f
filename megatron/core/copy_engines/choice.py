"""Which groups have copy engines between their ranks."""

from __future__ import annotations

import logging
import os
import socket
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.copy_engines.exchange import CopyEngines
from megatron.core.copy_engines.window import SymmetricWindow
from megatron.core.notices import notice

logger = logging.getLogger(__name__)


def engines_of(name: str, handle: Any, ranks: Sequence[int], rank: int) -> CopyEngines | None:
    """Of the group ``ranks``, in which this is number ``rank``. None, on all of them, where it does not work: without
    NCCL, for ranks on several hosts or GPUs that do not reach each other's memory, and where all streams share one
    queue, in which a stream that waits would hold up what it waits for."""
    if dist.get_backend(handle) != "nccl":
        return None
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        notice(logger, "%s: messages go through NCCL, since CUDA_DEVICE_MAX_CONNECTIONS is 1", name)
        return None
    if not _on_one_host(handle, len(ranks)):
        return None
    open_window = partial(SymmetricWindow, handle)
    reason = ""
    try:
        window = open_window(16, 1)
        window.here().write([window.word(rank, 0)], 1)
        window.here().wait([window.word(rank, 0)], 1)
        torch.cuda.synchronize()
    except (RuntimeError, OSError, AttributeError, ImportError) as error:
        reason = str(error).splitlines()[0]
    works = torch.tensor([int(not reason)], device="cuda")
    dist.all_reduce(works, dist.ReduceOp.MIN, group=handle)
    if not works.item():
        notice(logger, "%s: messages go through NCCL, copy engines do not work here: %s", name, reason or "on a peer")
        return None
    return CopyEngines(rank, len(ranks), open_window)


def _on_one_host(handle: Any, size: int) -> bool:
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = socket.gethostname() + (boot.read_text() if boot.exists() else "")
    own = torch.tensor([zlib.crc32(host.encode())], dtype=torch.int64, device="cuda")
    hosts = own.new_empty(size)
    dist.all_gather_into_tensor(hosts, own, group=handle)
    return bool((hosts == own).all())
