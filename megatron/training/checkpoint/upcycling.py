"""Upcycling: initialize a mixture of experts from a dense checkpoint (Komatsuzaki et al. 2022; He et al. 2024).

A dense MLP of width F becomes E experts of width F / G (G: --moe-upcycling-granularity): expert e is slice e mod G.
Each group of G consecutive experts forms one copy of the MLP, and their router rows are equal. Outputs are scaled so
that a token's top-k experts, k a multiple of G, sum to the dense output. The result is exact if the router's weights
have the same sum for all tokens.

Megatron-LM spreads that scale over both layers, which changes the function for activations that are not powers (SwiGLU,
GELU). Here only the second layer is scaled; G = 1 with weights that sum to 1 needs no scale."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from megatron.core.config.moe import has_experts
from megatron.core.dist_checkpointing.reader import CheckpointReader
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.sharding.placement import fill_parameter, spec_or_replicated
from megatron.core.sharding.sharded_tensor import ShardedTensor
from megatron.core.transformer.moe.router import TopKRouter
from megatron.training.config.pretrain_config import PretrainConfig

_DENSE = re.compile(r"(model\.(?:decoder|mtp)\.layers\.(\d+)\.(?:mtp_model_layer\.)?mlp\.)(linear_fc.*)")


class DenseCheckpoint:
    """Dense checkpoint presented to the unwrapped ``chunks`` with experts (a ``dist_checkpointing.reader.Source``)."""

    num_threads = 1

    def __init__(self, reader: CheckpointReader, chunks: Iterable[nn.Module], cfg: PretrainConfig) -> None:
        self.directory, self._reader, self._cfg = reader.directory, reader, cfg
        self._slices = cfg.upcycling.moe_upcycling_granularity
        modules = (module for chunk in chunks for module in chunk.named_modules(prefix="model"))
        self._routers = {name: module for name, module in modules if isinstance(module, TopKRouter)}

    def tensors_to_read(self, tensors: Mapping[str, ShardedTensor]) -> dict[str, ShardedTensor]:
        """Return ``tensors`` without those that keep their initial values: router buffers and shared experts."""
        fresh = (".mlp.router.expert_bias", ".mlp.router.last_choices", ".mlp.router.bias", ".mlp.shared_experts.")
        return {key: tensor for key, tensor in tensors.items() if not any(name in tensor.name for name in fresh)}

    @property
    def names(self) -> list[str]:
        """Names of the stored tensors; dense MLP tensors have the names of the experts created from them."""
        return [self._name_in_the_model(name) for name in self._reader.names]

    def _name_in_the_model(self, name: str) -> str:
        """Return ``mlp.experts.linear_fc…`` for the dense MLP of a layer with experts, else ``name``."""
        match = _DENSE.fullmatch(name)
        if match is None:
            return name
        layer = self._cfg.model.num_layers if ".mtp." in name else int(match[2]) + 1
        return f"{match[1]}experts.{match[3]}" if has_experts(self._cfg.model, layer or 1) else name

    def misfits(self, tensors: Iterable[ShardedTensor]) -> list[str]:
        """Describe tensors that are not stored or have another shape, experts by their dense MLP."""
        read = (tensor for tensor in tensors if not tensor.name.endswith(".mlp.router.weight"))
        return self._reader.misfits(next(self._dense_slices(tensor), tensor) for tensor in read)

    @torch.no_grad()
    def read_into(self, tensor: ShardedTensor) -> None:
        """Fill ``tensor.local`` in place: experts with their slices of the dense MLP, times `_scale`; router weights
        with new initial rows, without reading; other tensors as stored."""
        if tensor.name.endswith(".mlp.router.weight"):
            tensor.local.detach().copy_(tensor.rectangle.of(self._router_rows(tensor)))
            return
        if ".mlp.experts." not in tensor.name:
            self._reader.read_into(tensor)
            return
        scale = self._scale(tensor.name)
        for part in self._dense_slices(tensor):
            self._reader.read_into(part)
            if scale != 1:
                part.local.mul_(scale)

    def _dense_slices(self, tensor: ShardedTensor) -> Iterator[ShardedTensor]:
        """Yield, per local expert of ``tensor`` [e, …], the dense slice to read, with a view of the expert's memory as
        ``local``. A bias of the second layer is not sliced."""
        if ".mlp.experts." not in tensor.name:
            return
        name, shape = tensor.name.replace(".experts.", "."), list(tensor.global_shape[1:])
        kind = name.rpartition(".mlp.")[2]
        cut = {"linear_fc1.weight": len(shape) - 2, "linear_fc1.bias": len(shape) - 1, "linear_fc2.weight": 1}.get(kind)
        width = 0 if cut is None else shape[cut]
        if cut is not None:
            shape[cut] *= self._slices
        for index, local in enumerate(tensor.local.detach()):
            offsets = list(tensor.offsets[1:])
            if cut is not None:
                offsets[cut] += (tensor.offsets[0] + index) % self._slices * width
            yield ShardedTensor(name, local, tuple(shape), tuple(offsets))

    def _scale(self, name: str) -> float:
        """Return 1 for the first layer; for the second G / w (bias: 1 / w), where w is the sum of the top-k router
        weights at logits of 0, which a new router's are near."""
        if ".linear_fc2." not in name:
            return 1.0
        router = self._routers[name.partition(".experts.")[0] + ".router"]
        logits = torch.zeros(router.num_experts, dtype=torch.float64)
        weights = float(router.rule.weigh(logits, torch.arange(router.k)).sum())
        return (self._slices if name.endswith("weight") else 1) / weights

    def _router_rows(self, tensor: ShardedTensor) -> Tensor:
        """Return a router weight [e, h] of --seed and the name; all experts of one copy get the row of its first."""
        spec = spec_or_replicated(self._routers[tensor.name.removesuffix(".weight")].weight)
        weight = torch.zeros(spec.shape, dtype=tensor.local.dtype)
        name = tensor.name.removeprefix("model.")
        fill_parameter(weight, spec, name, self._cfg.model.seed, SINGLE_PROCESS)
        return weight[torch.arange(len(weight)) // self._slices * self._slices]
