"""Low-rank adapters as a model transform. Torch-free: ``lora.py`` has the modules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING

from megatron.core.config.lora import SETTINGS, LoraConfig
from megatron.core.config.preferences import PreferenceConfig
from megatron.core.config.problems import Settings
from megatron.core.description.model import ModelDescription, Op, Param, Piece, Saved, forward_only, frozen
from megatron.core.description.parts import activation_bytes
from megatron.core.models.transforms import ModelTransform

if TYPE_CHECKING:
    from torch import nn

    from megatron.core.groups.process_groups import ProcessGroups


RECURRENT = frozenset(("in_proj", "out_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj"))
"""Linear layers of linear attention and Mamba-2."""


def supports_adapters(layer: str) -> bool:
    """Return whether linear layers whose names end with ``layer`` support adapters."""
    return layer.startswith("linear_") or layer in RECURRENT


def is_target(module: str, targets: Sequence[str] | None) -> bool:
    """Return whether the linear layer with the full name ``module`` gets an adapter. ``targets``: last parts of names,
    or patterns of full names; None: all linear layers of mixers and feed-forward networks, but not Mamba-2's
    ``mixer.out_proj``, which PEFT rejects. Routed experts and vision towers need a target that names them, such as
    ``experts.linear_fc1`` or ``vision.*.linear_qkv``."""
    parent, _, last = module.rpartition(".")
    part = "experts" if parent.endswith(".experts") else "vision" if module.startswith("vision.") else ""
    if not supports_adapters(last):
        return False
    if targets is None:
        return not part and not module.endswith(".mixer.out_proj")
    chosen = [target for target in targets if part in target]
    return any(f".{module}".endswith(f".{target}") or fnmatchcase(module, target) for target in chosen)


def linear_weights(model: ModelDescription) -> list[Param]:
    """Return the weights of linear layers that adapters support: of mixers, feed-forward networks and experts."""
    return [param for param in model.params() if _module(param)]


def num_adapters(weight: Param) -> int:
    """Return the number of adapters of a weight: one per matrix that it stacks, or per expert."""
    return weight.shape[0] if weight.is_expert else len(weight.matrices)


def _module(param: Param) -> str:
    """Return the full name of the layer of a weight that can have adapters, else an empty string."""
    module, _, leaf = param.name.rpartition(".")
    return module if leaf == "weight" and supports_adapters(module.rpartition(".")[2]) else ""


class LoraTransform(ModelTransform):
    """Freezes the model and trains low-rank adapters."""

    reads_base = True

    def __init__(self, cfg: Settings) -> None:
        self.model, self.lora = cfg.model, cfg.group(LoraConfig)
        assert self.lora.lora_rank is not None
        self.runs_base = cfg.group(PreferenceConfig).dpo_reference == "base"
        self.matches = partial(is_target, targets=self.lora.lora_target_modules)
        self.rank = self.lora.lora_rank
        divisor = math.sqrt(self.rank) if self.lora.lora_use_rslora else self.rank
        self.scale = (self.lora.lora_alpha or self.rank) / divisor

    def apply(self, model: nn.Module, groups: ProcessGroups) -> None:
        from megatron.core.models.adapters.lora import LoraSettings, add_adapters

        lora = self.lora
        settings = LoraSettings(self.rank, self.scale, lora.lora_use_dora, self.model.seed, lora.lora_dropout)
        add_adapters(model, self.matches, settings, groups)

    def stores(self, name: str) -> bool:
        return ".adapter.lora_" in name

    def disabled(self, model: nn.Module) -> AbstractContextManager:
        from megatron.core.models.adapters.lora import without_adapters

        return without_adapters(model)

    def base_loaded(self, model: nn.Module, groups: ProcessGroups) -> None:
        from megatron.core.models.adapters.lora import set_magnitudes

        set_magnitudes(model)

    def merge(self, model: nn.Module) -> None:
        from megatron.core.models.adapters.lora import merge_adapters

        merge_adapters(model)

    def describe(self, model: ModelDescription) -> ModelDescription:
        """Freeze all parameters, halve the backward pass of their GEMMs, and add the adapters; and the forward pass of
        the base if it is a reference."""
        base = (model.with_pieces(frozen),) if self.runs_base else ()
        model = replace(model.with_pieces(self._changed), companions=base)
        embedding = replace(model.embedding, settings=(*model.embedding.settings, *SETTINGS))
        if all(param.frozen for param in embedding.params):  # nothing before the first layer has a gradient
            embedding = replace(embedding, ops=tuple(map(forward_only, embedding.ops)))
        return replace(model, embedding=embedding)

    def _changed(self, piece: Piece) -> Piece:
        params = [*frozen(piece).params]
        weights: dict[str, list[Param]] = {}  # routed and shared experts have layers of the same last names
        for param in piece.params:
            if module := _module(param):
                weights.setdefault(module.rpartition(".")[2], []).append(param)
                params += self._adapter(module, param) if self.matches(module) else []
        ops: list[Op] = []
        for op in piece.ops:
            ops.append(replace(op, backward=min(op.backward, 1.0)) if op.kind == "gemm" else op)
            if op.kind == "gemm" and weights.get(op.name):
                weight = weights[op.name].pop(0)
                ops += [self._operation(op, weight)] if self.matches(_module(weight)) else []
        return replace(piece, params=tuple(params), ops=tuple(ops))

    def _adapter(self, module: str, weight: Param) -> list[Param]:
        """Return the parameters of the adapters of one weight."""
        lead, last = weight.shape[:-1], len(weight.shape) - 1
        rows = {axis: dim for axis, dim in weight.mesh.items() if dim != last}
        columns = {axis: 2 for axis, dim in weight.mesh.items() if dim == last}
        if weight.is_expert:
            columns["ep"] = 0
        name, shared, active = f"{module}.adapter", weight.shared, weight.active
        params = [
            Param(f"{name}.lora_a", (num_adapters(weight), self.rank, weight.shape[-1]), columns, active=active),
            Param(f"{name}.lora_b", (*lead, self.rank), rows, shared=shared, active=active),
        ]
        if self.lora.lora_use_dora:
            params.append(Param(f"{name}.lora_magnitude", lead, rows, shared=shared, ndim=1))
        return params

    def _operation(self, gemm: Op, weight: Param) -> Op:
        """Return the operation of the adapters next to ``gemm``; it saves X A^T. The GEMM's input is saved already."""
        low = num_adapters(weight) * self.rank
        elements = low * weight.shape[-1] + self.rank * math.prod(weight.shape[:-1])
        item, model = activation_bytes(self.model), self.model
        saved = [Saved("low-rank product", low * weight.active * item)]
        if self.lora.lora_dropout and gemm.gemm is not None:
            splits_input = len(weight.shape) - 1 in weight.mesh.values()
            ranks = model.tensor_model_parallel_size if model.sequence_parallel and not splits_input else 1
            saved.append(Saved("input after dropout, mask", gemm.gemm[1] / ranks * (item + 1)))
        return Op("other", "adapter", gemm.flops * elements / math.prod(weight.shape), saved=tuple(saved))


def lora_transform(cfg: Settings) -> LoraTransform | None:
    """Return the transform of --lora-rank; None without it."""
    return None if cfg.group(LoraConfig).lora_rank is None else LoraTransform(cfg)
