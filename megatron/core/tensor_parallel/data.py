"""Sharing a batch within a tensor-parallel group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core import parallel_state


def broadcast_data(keys: list[str], data: dict[str, Tensor] | None, datatype: torch.dtype) -> dict[str, Tensor]:
    """The tensors ``keys`` of the first tensor-parallel rank's ``data``, on every rank of the group, as ``datatype``.

    The other ranks may pass None. Tensors travel on the group's device and stay there.
    """
    group = parallel_state.get_process_groups().tp
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if group.size == 1:
        assert data is not None
        return {name: data[name].to(device, datatype) for name in keys}
    source = group.ranks[0]
    shapes: list = [None]
    if group.is_first:
        assert data is not None
        shapes = [{name: tuple(data[name].shape) for name in keys}]
    dist.broadcast_object_list(shapes, src=source, group=group.handle)
    result = {}
    for name in keys:
        if group.is_first:
            assert data is not None
            tensor = data[name].to(device, datatype).contiguous()
        else:
            tensor = torch.empty(shapes[0][name], dtype=datatype, device=device)
        dist.broadcast(tensor, src=source, group=group.handle)
        result[name] = tensor
    return result
