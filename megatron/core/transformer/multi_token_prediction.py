"""Multi-token prediction (DeepSeek-V3, section 2.2): depth d of D predicts the token d positions after the next one.

  h^d_i = norm(layer([norm(e_{i+d}); norm(h^{d-1}_i)] W^T))        loss^d_i = cross entropy of h^d_i and label_{i+d}

e are the model's embeddings and h^0 is the input of its output layer, which all depths share. Ids, positions, labels
and loss mask are shifted by d; entries past the end of a sequence or packed document are masked. With
``mtp_use_repeated_layer`` one layer is applied at every depth. The main loss is the sum over valid tokens, divided by
their number in the global batch; to that sum is added

  factor / D  sum_d sum_b (n_b / n^d_b) sum_i loss^d_bi

over sequences b with n_b valid tokens, n^d_b at depth d: the mean of each depth's losses over its valid tokens,
with sequences weighted as in the main loss, independent of layout and micro-batch size. The gradient of the main losses
gives the weight of a token, so any loss function works, and the model returns only the main losses.

Legend: s sequence (local), b batch, h hidden."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron import serve_other_names
from megatron.core import parallel_state
from megatron.core.attention.token_layout import TokenLayout
from megatron.core.autograd_context import AutogradContext
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.statistics import StepStatistics
from megatron.core.tensor_parallel.layers import ReplicatedLinear
from megatron.core.transformer.context import ForwardContext
from megatron.core.transformer.initial_values import weight_init
from megatron.core.transformer.norm import build_norm
from megatron.core.transformer.recompute import Recompute
from megatron.core.transformer.sites import Run, Sited, call, install
from megatron.core.transformer.spec_utils import ModuleSpec, build_module


def mtp_on_this_rank(
    config: Any = None,
    ignore_virtual: bool = True,
    vp_stage: int | None = None,
    *,
    layout: object = None,
    mtp_num_layers: int | None = None,
) -> bool:
    """Return whether this rank, or its model chunk ``vp_stage`` with ``ignore_virtual=False``, holds the multi-token
    prediction layers: the last pipeline stage does. Pass ``config`` or ``mtp_num_layers``; ``layout`` is ignored."""
    num_layers = mtp_num_layers if config is None else config.mtp_num_layers
    return num_layers is not None and parallel_state.is_pipeline_last_stage(ignore_virtual, vp_stage)


def get_mtp_ranks(pp_ranks: Sequence[int], config: TransformerConfig) -> list[int]:
    """Return the ranks of one pipeline, ``pp_ranks``, that hold the multi-token prediction layers."""
    return [] if config.mtp_num_layers is None else [pp_ranks[-1]]


class Tokens(NamedTuple):
    """Shifted tokens of a micro-batch for one depth, [b, s] each."""

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    """fp64; 0 past the end of a sequence or document."""
    weight: Tensor
    """fp64 [b]: n_b / n^d_b over full sequences, 0 if no token is valid at this depth; [b, s] if rows pack several
    sequences."""


def shifted_tokens(
    tensors: Sequence[Tensor], loss_mask: Tensor | None, depths: int, layout: TokenLayout, packed: bool = False
) -> list[Tokens]:
    """Return the tokens of depths 1 to ``depths``: zeros past the end of a sequence or packed document, where the mask
    is 0. ``tensors`` are ids, positions and labels [b, s] of this rank. ``packed``: each document of ``layout`` is a
    sequence, which the weights are for. One all-gather over the ranks of ``layout``, in fp64."""
    mask = torch.ones_like(tensors[0]) if loss_mask is None else loss_mask
    # fp64 represents every id exactly: one collective for all tensors
    full = layout.full(torch.stack([tensor.to(torch.float64) for tensor in (*tensors, mask)]), 2)
    batch, length = full.shape[1:]
    bounds = None if layout.documents is None else layout.documents.cu_seqlens_q
    document = None
    if bounds is not None:
        index = torch.arange(batch * length, device=full.device)
        document = torch.bucketize(index, bounds[1:].to(index.dtype), right=True).view(batch, length)

    def num_valid(mask: Tensor) -> Tensor:
        if not packed:
            return mask.sum(1)
        assert document is not None and bounds is not None
        sums = mask.new_zeros(len(bounds)).index_add(0, document.flatten(), mask.flatten())
        return sums[document]

    shifted, all_valid = [], num_valid(full[3])
    for depth in range(1, depths + 1):
        end = min(depth, length)
        moved = F.pad(full[..., end:], (0, end))
        if document is not None:
            moved[3] *= F.pad(document[:, end:] == document[:, : length - end], (0, end))
        left = num_valid(moved[3])
        ids, positions, labels, shifted_mask = layout.local(moved, 2)
        weight = (all_valid / left).where(left > 0, 0.0)
        weight = layout.local(weight, 1) if packed else weight
        shifted.append(Tokens(ids.long(), positions.long(), labels.long(), shifted_mask, weight))
    return shifted


class _AttachToLosses(torch.autograd.Function):
    """Return ``losses`` unchanged; backward also propagates their mean gradient per valid token to ``total``."""

    @staticmethod
    def forward(ctx: AutogradContext, losses: Tensor, total: Tensor, num_valid: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(num_valid, scale)
        return losses.view_as(losses)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        num_valid, scale = ctx.saved_tensors
        # fallback: a context-parallel rank may have valid tokens at a later depth but none in the main loss
        weight = torch.where(num_valid > 0, grad.sum() / num_valid, scale.to(grad.dtype))
        return grad, weight, None, None


@dataclass
class MultiTokenPredictionLayerSubmodules:
    """Slots of one depth."""

    mtp_model_layer: ModuleSpec | Callable[..., object]
    enorm: ModuleSpec | Callable[..., object] = build_norm
    hnorm: ModuleSpec | Callable[..., object] = build_norm
    layer_norm: ModuleSpec | Callable[..., object] = build_norm


@dataclass
class MultiTokenPredictionBlockSubmodules:
    """One spec per depth."""

    layer_specs: Sequence[ModuleSpec]


class PredictionLayers(nn.Module):
    """Layers of one depth of a hybrid model."""

    def __init__(
        self, config: TransformerConfig, submodules: Sequence[ModuleSpec], layer_number: int, *, groups: ProcessGroups
    ) -> None:
        """Build ``layers`` from their specs. ``layer_number`` is of a depth with one layer; numbers continue."""
        super().__init__()
        first = config.num_layers + (layer_number - config.num_layers - 1) * len(submodules) + 1
        self.layers = nn.ModuleList(
            build_module(spec, config, layer_number=number, groups=groups)
            for number, spec in enumerate(submodules, first)
        )

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        for layer in self.layers:
            x = layer(x, ctx)
        return x


class MultiTokenPredictionLayer(Sited, nn.Module):
    """One depth: embeddings and hidden states [s, b, h] -> [s, b, h]. ``eh_proj`` is replicated over tensor-parallel
    ranks; under sequence parallelism each projects its own positions."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MultiTokenPredictionLayerSubmodules,
        layer_number: int,
        *,
        groups: ProcessGroups,
    ) -> None:
        """Build two input norms, ``eh_proj`` [h, 2 h], the layer with ``layer_number`` (after the decoder's) and the
        final norm from the slots. Full recomputation covers all except the final norm."""
        super().__init__()
        hidden = config.hidden_size
        self.enorm, self.hnorm, final = (
            build_module(norm, config, hidden, config.norm_epsilon, groups=groups)
            for norm in (submodules.enorm, submodules.hnorm, submodules.layer_norm)
        )
        self.eh_proj = ReplicatedLinear(
            2 * hidden, hidden, config=config, init_method=weight_init(config), bias=False, groups=groups
        )
        self.mtp_model_layer = build_module(
            submodules.mtp_model_layer, config, layer_number=layer_number, groups=groups
        )
        self.final_layernorm = final
        self.stream_dtype = torch.float32 if config.fp32_residual_connection else config.params_dtype
        self.layer_runs: list[tuple[Run, range]] = [(call, range(1))]
        install(self, [Recompute(config, self, groups)])

    def forward(self, embeddings: Tensor, hidden_states: Tensor, ctx: ForwardContext) -> Tensor:
        return self.final_layernorm(self.layer_runs[0][0](partial(self._layer, ctx), embeddings, hidden_states))

    def _layer(self, ctx: ForwardContext, embeddings: Tensor, hidden_states: Tensor) -> Tensor:
        both = torch.cat((self.enorm(embeddings), self.hnorm(hidden_states)), dim=-1)
        return self.mtp_model_layer(self.eh_proj(both)[0].to(self.stream_dtype), ctx)


class MultiTokenPredictionBlock(nn.Module):
    """All depths in sequence. Layer numbers continue after the decoder's; a repeated layer keeps its number, and
    therefore its dropout masks, at every depth."""

    def __init__(
        self, config: TransformerConfig, spec: MultiTokenPredictionBlockSubmodules, *, groups: ProcessGroups
    ) -> None:
        """Build one layer per spec, or only the first with ``mtp_use_repeated_layer``: it then divides the layer's
        auxiliary loss coefficients by the depths and marks its weights with ``has_several_gradients``."""
        super().__init__()
        self.num_depths, repeats = len(spec.layer_specs), config.mtp_use_repeated_layer
        if repeats:  # its routers attach their losses at every depth: divide so that the sum is unchanged
            shares = [coefficient / self.num_depths for coefficient in config.moe_aux_loss_coeff]
            config = replace(config, moe_aux_loss_coeff=shares)
        self.layers = nn.ModuleList(
            build_module(each, config, layer_number=config.num_layers + depth, groups=groups)
            for depth, each in enumerate(spec.layer_specs[: 1 if repeats else None], start=1)
        )
        # a repeated layer gets one gradient per depth: a bucket reduced after the first would miss the others
        for weight in self.parameters():
            weight.has_several_gradients = len(self.layers) < self.num_depths  # type: ignore[attr-defined]
        self.factor = config.mtp_loss_scaling_factor / self.num_depths
        self.names = [f"mtp_{depth} loss" for depth in range(1, self.num_depths + 1)]
        self.statistics = StepStatistics("mtp", **dict.fromkeys(self.names, 2))
        self._counts = groups.tp.is_first  # the others have the same losses

    def forward(self, hidden_states: Tensor, embeddings: Sequence[Tensor], ctx: ForwardContext) -> list[Tensor]:
        """Return the output layer's input for every depth, from ``embeddings`` [s, b, h] of each depth's tokens."""
        outputs = []
        for layer, embedding in zip(cycle(self.layers), embeddings):
            hidden_states = layer(embedding, hidden_states, ctx)
            outputs.append(hidden_states)
        return outputs

    def attach(
        self, losses: Tensor, later: Sequence[Tensor], tokens: Sequence[Tokens], mask: Tensor | None, scale: Tensor
    ) -> Tensor:
        """Return a view of the main ``losses`` [b, s]; its backward also differentiates the ``later`` losses [b, s] of
        every depth. Adds the depths' losses to the statistics, on the first tensor-parallel rank only.

        ``mask`` [b, s]: valid main losses (None: all). ``scale`` (0-d): factor of the summed loss before backward, used
        on ranks without valid main tokens."""
        total = losses.new_zeros(())
        for name, loss, at in zip(self.names, later, tokens, strict=True):
            masked, weight = loss * at.loss_mask.to(loss.dtype), at.weight.to(loss.dtype)
            sum_b = masked.sum(1)
            total = total + ((sum_b if weight.dim() == 1 else masked) * weight).sum()
            if self._counts:
                self.statistics.add(name, torch.stack((sum_b.detach().double().sum(), at.loss_mask.sum())))
        num_valid = losses.new_tensor(losses.numel()) if mask is None else mask.sum(dtype=losses.dtype)
        return _AttachToLosses.apply(losses, total * self.factor, num_valid, scale)

    def end_step(self, totals: dict[str, Tensor]) -> None:
        """Do nothing: no state is kept between steps."""


serve_other_names(__name__)
