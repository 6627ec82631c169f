"""Broadcast of a batch within a tensor-parallel group."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.groups.process_groups import AnyGroup
from megatron.core.parallel_state import resolve_group


class _Form(NamedTuple):
    """Shape and dtype of a tensor that is broadcast next."""

    shape: torch.Size
    dtype: torch.dtype


def broadcast_data(
    keys: list[str], data: dict[str, Tensor] | None, datatype: torch.dtype, tp_group: AnyGroup = None
) -> dict[str, Tensor]:
    """Return the tensors ``keys`` of the first tensor-parallel rank's ``data``, cast to ``datatype``, on every rank's
    training device. A missing key raises KeyError on the first rank only, and the others block. Collective: one object
    broadcast of shapes, then one broadcast per key. The other ranks may pass None. ``tp_group``: a torch
    ``ProcessGroup`` or a ``Group``; None: the running program's tensor-parallel group."""
    if resolve_group(tp_group).is_first:
        assert data is not None
        data = {name: data[name].to(datatype) for name in keys}
    return broadcast_batch(data, tp_group)


def broadcast_batch(batch: dict[str, Any] | None, tp_group: AnyGroup = None) -> dict[str, Any]:
    """Broadcast the first tensor-parallel rank's ``batch`` and return it in a new dict: tensors on the training device,
    other values pickled. Collective: one object broadcast, then one broadcast per tensor. The other ranks' ``batch`` is
    ignored. ``tp_group``: see :func:`broadcast_data`."""
    group = resolve_group(tp_group)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    contents: list[Any] = [None]
    if group.is_first:
        assert batch is not None
        batch = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
        if group.size == 1:
            return batch
        contents = [{name: _Form(x.shape, x.dtype) if isinstance(x, Tensor) else x for name, x in batch.items()}]
    dist.broadcast_object_list(contents, src=group.ranks[0], group=group.handle)
    received = contents[0]
    for name, form in received.items():
        if isinstance(form, _Form):
            tensor = torch.empty(form.shape, dtype=form.dtype, device=device)
            if group.is_first:
                assert batch is not None
                tensor = batch[name].contiguous()
            dist.broadcast(tensor, src=group.ranks[0], group=group.handle)
            received[name] = tensor
    return received
