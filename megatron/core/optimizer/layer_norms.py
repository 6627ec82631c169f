"""Norms of the weights, gradients and updates of each layer, equal on every layout.

Each element of a layer is counted once, as in the norm of all gradients (``clip_grads``): local squares are summed over
the ranks that share the layer's parameters, in one all-reduce per group for all layers. The copy of the weights before
the update, from which its norm follows, is in host memory, so that a step with statistics needs no more device memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.sharding.placement import global_name

_LAYER = re.compile(r"(?:(.*)\.)?layers\.(\d+)\.")


def layer_labels(names: Iterable[str]) -> dict[str, str]:
    """Return the label of each parameter name of a model: ``layer 3`` for ``decoder.layers.2.…`` (the names of expert
    statistics count from 1), with the stack before it if it is not the model's main one, or the model has an encoder
    and a decoder; the module's name outside of layers."""
    matches = {name: match for name in names if (match := _LAYER.match(name))}
    stacks = {match[1] for match in matches.values()}
    main = "decoder" if "decoder" in stacks else next(iter(stacks), None)
    if {"encoder", "decoder"} <= stacks:
        main = None
    labels = {}
    for name in names:
        if name not in matches:
            labels[name] = name.rpartition(".")[0] or name
        else:
            stack, number = matches[name][1], int(matches[name][2]) + 1
            labels[name] = f"layer {number}" if stack == main else f"{stack} layer {number}"
    return labels


class LayerNorms:
    """Norms around one step of ``optimizer``: call :meth:`start` before it and :meth:`finish` after it. Both are
    collective, as is the constructor, which exchanges names over the pipeline."""

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        self.optimizer, pipeline = optimizer, optimizer.groups.pp
        parameters = optimizer.model_params.items()
        local = {name: global_name(name, getattr(parameter, "spec", None)) for name, parameter in parameters}
        names: list[Sequence[str]] = [list(local.values())]
        if pipeline.size > 1:
            names *= pipeline.size
            dist.all_gather_object(names, list(local.values()), group=pipeline.handle)
        labels = layer_labels([name for stage in names for name in stage])
        self.labels = [*dict.fromkeys(labels.values())]
        self._index = {name: self.labels.index(labels[other]) for name, other in local.items()}
        self._before: dict[str, Tensor] = {}
        self._gradients: Tensor | None = None

    @torch.no_grad()
    def start(self) -> None:
        """Measure the gradients, after their reduction and before they are clipped, and copy the weights."""
        optimizer = self.optimizer
        grads = optimizer.local_gradients()
        self._gradients = self._norms(grads.get) / optimizer.get_loss_scale()
        counted = (name for names in optimizer.counted_names.values() for name in names)
        self._before = {name: optimizer.host_state.read(name).to("cpu", copy=True) for name in counted}

    @torch.no_grad()
    def finish(self) -> dict[str, Tensor]:
        """Return ``LABEL/grad_norm``, ``LABEL/weight_norm`` (after the update) and ``LABEL/update_norm`` of all layers
        of the model, 0-d fp64 device tensors."""
        read, before = self.optimizer.host_state.read, self._before
        assert self._gradients is not None, "start comes first"
        measured = {"grad_norm": self._gradients, "weight_norm": self._norms(read)}
        measured["update_norm"] = self._norms(lambda name: (new := read(name)) - before[name].to(new.device))
        self._before, self._gradients = {}, None
        return {
            f"{label}/{kind}": value
            for index, label in enumerate(self.labels)
            for kind, value in ((kind, norms[index]) for kind, norms in measured.items())
        }

    def _norms(self, tensor: Callable[[str], Tensor | None]) -> Tensor:
        """Return the norm of each label's tensors over all ranks, fp64 [labels]. Collective."""
        optimizer = self.optimizer
        total = torch.zeros(len(self.labels), dtype=torch.float64, device=optimizer.device)
        for ranks in optimizer.groups.data_parallel:
            squares = torch.zeros_like(total)
            for name in optimizer.counted_names[ranks]:
                value = tensor(name)
                if value is not None:
                    wide = torch.promote_types(value.dtype, torch.float32)
                    norm = torch.linalg.vector_norm(value, dtype=wide).to(torch.float64)
                    squares[self._index[name]] += norm.square()
            for group in (ranks.shard, ranks.model) if optimizer.shards_optimizer else (ranks.model,):
                if group.size > 1:
                    dist.all_reduce(squares, group=group.handle)
            total += squares
        return total.sqrt()
