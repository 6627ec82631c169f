"""Recipe of ``install_gemms`` that selects the layers of a stack that compute in fp8, and their scales."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from torch import nn

from megatron.core.config.errors import UserError
from megatron.core.config.fp8 import EXPERT_WIDTH, experts_in_fp8
from megatron.core.config.notices import notice
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.fp8.experts import ExpertGemms, ExpertProducts
from megatron.core.fp8.gemms import BlockwiseGemms, Fp8Gemms, PerTensorGemms
from megatron.core.fp8.scales import ScaleHistory
from megatron.core.fp8.storage import Epoch, Fp8Gathered, GatheredCopy
from megatron.core.fusions.fp8_cast import E4M3, E5M2
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.sharding.placement import declare
from megatron.core.sharding.sharded_tensor import ShardedTensor
from megatron.core.tensor_parallel.gemms import GemmLayer, GemmPlace, Gemms, install_gemms, layer_index
from megatron.core.tensor_parallel.grouped_linear import GroupedLinear, GroupedProducts

logger = logging.getLogger(__name__)

PREFIX = "fp8."
"""Prefix of the stored names of scales and histories."""


class Fp8Stack:
    """fp8 state of the layers of one stack on this rank, and the recipe of their GEMMs. ``num_layers``: of the full
    stack."""

    def __init__(self, config: TransformerConfig, num_layers: int, groups: ProcessGroups) -> None:
        self.config, self.groups = config, groups
        self.in_bf16: set[int] = set()
        """Layers that keep the model's dtype, from 0."""
        if config.first_last_layers_bf16:
            last = num_layers - config.num_layers_at_end_in_bf16
            self.in_bf16 = {*range(config.num_layers_at_start_in_bf16), *range(last, num_layers)}
        self.gradient_format = E5M2 if config.fp8 == "hybrid" else E4M3
        self.epoch, self.history = Epoch(), None
        if config.fp8_recipe == "delayed":
            uses_maximum = config.fp8_amax_compute_algo == "max"
            self.history = ScaleHistory(
                config.fp8_amax_history_len, uses_maximum=uses_maximum, margin=config.fp8_margin
            )

    def recipe(self, place: GemmPlace) -> Gemms | GroupedProducts | None:
        """Return the GEMMs of a layer; None for layers that keep the model's dtype."""
        config, module = self.config, place.module
        before = module.traits.gemms
        if place.layer in self.in_bf16 or type(before) is not Gemms:
            return None
        if isinstance(module, GroupedLinear):
            return self._expert_products(module, place.name, before) if experts_in_fp8(config) else None
        weights = [
            weight for name in ("weight", "shared_weight") if (weight := getattr(module, name, None)) is not None
        ]
        if config.fp8_param_gather:
            for weight in weights:
                square, shape = config.fp8_recipe == "blockwise", tuple(weight.shape)
                copy = GatheredCopy(shape, square=square, groups=() if square else (self.groups.tp,))
                weight.fp8_copy = copy  # type: ignore[attr-defined]
                declare(weight, storage=Fp8Gathered)
        kind = weights, self.epoch, self.gradient_format, before.accumulate
        if config.fp8_recipe == "blockwise":
            return BlockwiseGemms(*kind, weight_gradients=config.fp8_wgrad)
        return PerTensorGemms(
            *kind, weight_gradients=config.fp8_wgrad, groups=(self.groups.tp_cp,), weight_groups=(self.groups.tp,),
            history=self.history, name=place.name,
        )  # fmt: skip

    def _expert_products(self, module: GroupedLinear, name: str, before: Gemms) -> ExpertProducts:
        groups, config = self.groups, self.config
        casts = ExpertGemms(
            [module.weight], self.epoch, self.gradient_format, before.accumulate,
            weight_gradients=config.fp8_wgrad, groups=(groups.tp_cp, groups.etp_ep), weight_groups=(groups.etp,),
            history=self.history, name=name, num_experts=module.num_local,
        )  # fmt: skip
        return ExpertProducts(module.products, casts)

    def begin_recording(self) -> None:
        """Prepare the recording of a micro-batch as a CUDA graph: it must contain the casts of the weights, which
        replays repeat. Raises UserError if a matrix has no delayed scale yet."""
        self.epoch.advance()
        if self.history is not None and not all(self.history.known):
            name = self.history.names[self.history.known.index(False)]
            raise UserError(
                f"--cuda-graph-warmup-steps: {name} has no delayed fp8 scale yet, as all its values have been zero; "
                "raise it, or use --fp8-recipe tensorwise"
            )

    def end_step(self, groups: ProcessGroups) -> None:
        """End a step, after all backward passes and before the update: compute the next delayed scales, collectively
        over the ranks of a pipeline stage, and let the next forward pass cast the weights again."""
        self.epoch.advance()
        if self.history is not None:
            self.history.update((groups.tp, groups.dp_cp))


def install_fp8(stack: nn.Module, config: TransformerConfig, num_layers: int, groups: ProcessGroups) -> Fp8Stack | None:
    """Let the linear layers of ``stack`` compute in fp8 and return its state; None without ``config.fp8``."""
    if config.fp8 is None:
        return None
    if config.num_moe_experts is not None and not experts_in_fp8(config):
        needed = f"--fp8-recipe delayed or tensorwise and --moe-ffn-hidden-size {EXPERT_WIDTH} or more"
        notice(logger, f"fp8: experts compute in the model's dtype; fp8 experts require {needed}")
    state = Fp8Stack(config, num_layers, groups)
    install_gemms(stack, state.recipe)
    for gemms in fp8_gemms(stack):
        gemms.keeps_transposed = config.fp8_weight_transpose_cache
    for name, module in stack.named_modules():  # layers of other packages cast by themselves
        if (use_fp8 := getattr(module, "use_fp8", None)) is not None and layer_index(name) not in state.in_bf16:
            use_fp8(config)
    return state


def fp8_stacks(model: nn.Module) -> dict[str, Fp8Stack]:
    """Return the fp8 states in ``model`` by the name of the stack; empty without fp8."""
    states = ((name, getattr(module, "fp8", None)) for name, module in model.named_modules())
    return {name: state for name, state in states if isinstance(state, Fp8Stack)}


def fp8_gemms(model: nn.Module) -> list[Fp8Gemms]:
    """Return the fp8 GEMMs of all layers of ``model``, in order; of experts, their casts."""
    layers = [module for module in model.modules() if isinstance(module, GemmLayer)]
    products = (getattr(layer, "products", None) for layer in layers)
    gemms = (
        product.casts if isinstance(product, ExpertProducts) else layer.traits.gemms
        for layer, product in zip(layers, products)
    )
    return [gemm for gemm in gemms if isinstance(gemm, Fp8Gemms)]


def scale_tensors(chunks: Iterable[nn.Module]) -> dict[str, ShardedTensor]:
    """Return the delayed scales and histories of unwrapped model chunks for a checkpoint: live, replicated tensors."""
    tensors = {}
    for chunk in chunks:
        device = next(chunk.parameters()).device
        for stack, state in fp8_stacks(chunk).items():
            for name, tensor in () if state.history is None else state.history.tensors(device):
                full = f"{PREFIX}{stack}.{name}"
                tensors[full] = ShardedTensor(full, tensor, tuple(tensor.shape), (0,) * tensor.dim())
    return tensors


def scales_loaded(chunks: Iterable[nn.Module]) -> None:
    """Complete the scales after a load into :func:`scale_tensors`. Waits for the device."""
    for chunk in chunks:
        for state in fp8_stacks(chunk).values():
            if state.history is not None:
                state.history.loaded()
