"""Exchange of small JSON values between ranks, sent as UTF-8 text in byte tensors, without pickle."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron.core.config.errors import UserError
from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.groups.process_groups import Group

T = TypeVar("T")


def all_ranks() -> Group:
    """Return the world group of torch.distributed; a group of one rank if it is not initialized."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Group("world")
    return Group("world", tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)


def all_gather_json(value: object, group: Group) -> list[Any]:
    """All-gather a JSON value; return the values by group rank, after a JSON round trip (tuples become lists), or
    [value] itself for one rank. Collective: two all-gathers of bytes, by gloo if the group has a host handle, else by
    its backend. The host waits for the result. Raises TypeError for other values, on this rank only."""
    if group.size == 1:
        return [value]
    handle = group.host_handle or group.handle
    device = "cuda" if dist.get_backend(handle) == "nccl" else "cpu"
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(group.size)]
    dist.all_gather(sizes, torch.tensor([mine.numel()], device=device), group=handle)
    max_size = max(int(size) for size in sizes)
    padded = torch.zeros(max_size, dtype=torch.uint8, device=device)
    padded[: mine.numel()] = mine
    everyone = [torch.empty_like(padded) for _ in range(group.size)]
    dist.all_gather(everyone, padded, group=handle)
    return [json.loads(data[: int(size)].cpu().numpy().tobytes()) for data, size in zip(everyone, sizes)]


def from_first_rank(make: Callable[[], T], group: Group) -> T:
    """Return the JSON result of ``make()`` on group rank 0 on every rank. Collective; errors as :func:`together`."""

    def only_first() -> Any:
        return make() if group.is_first else None

    return together(only_first, group)[0]


def together(action: Callable[[], T], group: Group, error: type[UserError] = CheckpointError) -> list[T]:
    """Run ``action`` on every rank of ``group`` and all-gather the JSON results. Collective. After a ValueError or
    OSError on any rank, all ranks raise ``error`` (or CheckpointDamagedError), naming the first; a rank with a bug, not
    a ``UserError`` or ``OSError``, raises it unchanged. Other exceptions are not caught: other ranks then block."""
    result: Any = None
    message = None
    damaged = False
    caught: Exception | None = None
    try:
        result = action()
    except (ValueError, OSError) as problem:
        caught, damaged = problem, isinstance(problem, CheckpointDamagedError)
        message = str(problem) if isinstance(problem, UserError) else f"{type(problem).__name__}: {problem}"
    replies = all_gather_json([message, damaged, result], group)
    failures = [(rank, text, kind) for rank, (text, kind, _) in enumerate(replies) if text is not None]
    if caught is not None and not isinstance(caught, UserError | OSError):
        raise caught
    if failures:
        rank, text, damaged = failures[0]
        where = f"rank {group.ranks[rank]}: " if group.size > 1 else ""
        more = f" (and {len(failures) - 1} more ranks)" if len(failures) > 1 else ""
        raise (CheckpointDamagedError if damaged else error)(f"{where}{text}{more}") from caught
    return [value for *_, value in replies]
