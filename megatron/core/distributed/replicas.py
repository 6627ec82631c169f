"""Finds parameters that should be equal on all data-parallel ranks and are not. Replicas drift apart without any
visible error (a gradient that nobody sums, a faulty device), so a run compares hashes from time to time.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensor_hash(tensor: Tensor) -> Tensor:
    """A 64-bit hash of the bits of ``tensor`` in its order, as an int64 scalar on its device.

    A sum, modulo 2^64, of every element's bits times an odd weight of its position: one changed bit always changes it.
    """
    bits = tensor.detach().contiguous().view(-1).view(_INTEGER[tensor.element_size()]).to(torch.int64)
    weights = torch.arange(bits.numel(), device=bits.device) * 2 * 0x9E3779B97F4A7C1 + 1
    return ((bits + 1) * weights).sum()


def check_replicas(module: nn.Module, group: dist.ProcessGroup | None) -> list[tuple[str, int]]:
    """(parameter name, group rank) wherever a rank's values differ bit for bit from group rank 0's.

    Collective over ``group``; every rank returns the same list. None (one rank) gives an empty list.
    """
    if group is None:
        return []
    plain = module.module if isinstance(module, DistributedDataParallel) else module
    named = list(plain.named_parameters())
    mine = torch.stack([tensor_hash(parameter) for _, parameter in named])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return [
        (name, rank)
        for rank, hashes in enumerate(everyone)
        for (name, _), differs in zip(named, (hashes != everyone[0]).tolist())
        if differs
    ]
