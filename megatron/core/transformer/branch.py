"""Residual branch ``x + dropout(mixer(norm(x)))``. ``norm_placement`` puts the norm before the mixer, after it, or
both.

The mixer is attention, a feed-forward network or any module that maps [s, b, h] to [s, b, h]. It is called as
``mixer(x, ctx)`` if its ``forward`` has a parameter ``ctx``, else as ``mixer(x)``. A mixer with ``segments(x, ctx)``
(``overlap.py``) can overlap with the other half of the micro-batch. With ``apply_residual_connection_post_layernorm``
the residual is norm(x) instead of x.

Norm, mixer and dropout are registered on the *layer*, under their checkpoint names (``self_attention``, ``mlp`` …); a
branch module would add a prefix to every parameter name. A branch looks them up at each call, so that programs can
replace them.

Legend: s sequence, b batch, h hidden."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor, nn

from megatron.core.config.errors import UserError
from megatron.core.config.layer_kinds import norm_places
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.random.dropout import NoDropout, dropout_is_fused, make_dropout
from megatron.core.transformer.context import ForwardContext
from megatron.core.transformer.context_parallel_support import build_token_mixer
from megatron.core.transformer.norm import StreamNorm, ToDtype
from megatron.core.transformer.overlap import runs_its_segments
from megatron.core.transformer.sites import Sited
from megatron.core.transformer.spec_utils import BranchSpec, build_module


class Stream(NamedTuple):
    """Residual stream at the norm of a branch."""

    hidden: Tensor
    """Input of the norm."""
    residual: Tensor
    """Tensor to which the mixer's output is added."""
    normed: Tensor


class Branch(Sited):
    """One residual branch of ``layer``. Builds its modules and registers them on the layer. ``layer_number`` counts
    from 1 over the full model. Its sites are its mixer, under the branch's name, its norm and the norm's output."""

    spans, results = ("attn_norm", "mlp_norm"), ("layernorm",)

    def __init__(
        self,
        layer: nn.Module,
        spec: BranchSpec,
        config: TransformerConfig,
        layer_number: int,
        groups: ProcessGroups,
        *,
        reads_norm_of: Branch | None = None,
    ) -> None:
        """Build norms, mixer and dropout and register them on ``layer`` under the names of ``spec``. Without a norm
        before the mixer a cast to the compute dtype takes its name. ``reads_norm_of``: the branch whose norm is this
        branch's too. Raises UserError as :func:`accepts_context` and :func:`build_token_mixer`."""
        self.layer, self.name, self.norm_name, self.dropout_name = layer, spec.name, spec.norm_name, spec.dropout_name
        self.post_norm_name = spec.post_norm_name
        if reads_norm_of is not None:
            self.norm_name = reads_norm_of.norm_name
        norm_before, norm_after = (
            build_module(spec.norm, config, config.hidden_size, config.norm_epsilon, groups=groups) if used else None
            for used in norm_places(config, layer_number)
        )
        mixer = _build_mixer(spec.mixer, config, layer_number, groups)
        site = ("layer", layer_number, f"{spec.site} output")
        if reads_norm_of is None:
            layer.add_module(self.norm_name, norm_before or ToDtype(config.params_dtype))
        layer.add_module(self.name, mixer)
        if norm_after is not None:
            layer.add_module(self.post_norm_name, norm_after)
        layer.add_module(self.dropout_name, make_dropout(config.hidden_dropout, *site, fused=dropout_is_fused(config)))
        accepts_context(type(mixer).forward)  # raises for an unsupported signature at construction
        self.calls, self.norm_site = (spec.name,), "mlp_norm" if spec.name == "mlp" else "attn_norm"
        self.open_sites()
        self._multiplier = config.residual_multiplier
        self.normed_is_residual = config.apply_residual_connection_post_layernorm
        """Whether the mixer's output is added to the norm's output instead of its input."""

    @property
    def norm(self) -> nn.Module:
        return getattr(self.layer, self.norm_name)

    @property
    def post_norm(self) -> nn.Module | None:
        return self.layer._modules.get(self.post_norm_name)

    @property
    def mixer(self) -> nn.Module:
        return getattr(self.layer, self.name)

    @property
    def dropout(self) -> nn.Module:
        return getattr(self.layer, self.dropout_name)

    @property
    def norm_adds(self) -> bool:
        """Whether the norm's kernel also adds the previous branch's output to the stream."""
        return isinstance(self.norm, StreamNorm) and not self.normed_is_residual

    def enter(self, hidden: Tensor) -> Stream:
        """Return the normalized stream and the residual: ``hidden``, or the former with ``normed_is_residual``."""
        normalize = getattr(self.at, self.norm_site)
        if self.norm_adds:  # its backward also accumulates the gradient of the residual stream
            residual, normed = normalize(self.norm, hidden, None)
            return Stream(hidden, residual, normed)
        normed = normalize(self.norm, hidden)
        return Stream(hidden, normed if self.normed_is_residual else hidden, normed)

    def add_and_norm(self, before: Branch, residual: Tensor, output: Tensor, ctx: ForwardContext) -> Stream:
        """Add the output of the branch ``before``, after its dropout, to ``residual`` and normalize by this branch's
        norm. One fused kernel does both if ``before`` has no dropout and the norm is a :class:`StreamNorm`."""
        if isinstance(before.dropout, NoDropout) and self.norm_adds:
            hidden, normed = getattr(self.at, self.norm_site)(self.norm, residual, output)
            return Stream(hidden, hidden, normed)
        return self.enter(before.add(residual, output, ctx))

    def finish(self, output: Tensor) -> Tensor:
        """Return the mixer's ``output`` after the post-norm if there is one, times ``residual_multiplier``."""
        output = output if self.post_norm is None else self.post_norm(output)
        return output if self._multiplier == 1.0 else output * self._multiplier

    def add(self, residual: Tensor, output: Tensor, ctx: ForwardContext) -> Tensor:
        """Apply dropout to the mixer output and add ``residual``; the masks are functions of ``ctx.dropout``."""
        return self.dropout(output, ctx.dropout, residual)

    @property
    def overlaps(self) -> bool:
        """Whether the mixer supports two-batch overlap."""
        return bool(getattr(self.mixer, "overlaps", False)) and runs_its_segments(self.mixer)


def _build_mixer(slot: Any, config: TransformerConfig, layer_number: int, groups: ProcessGroups) -> nn.Module:
    numbered = _takes(getattr(slot, "module", slot), "layer_number", inspect.Parameter.VAR_KEYWORD)
    number = {"layer_number": layer_number} if numbered else {}
    return build_token_mixer(slot, config, groups=groups, **number)


@cache
def accepts_context(forward: Callable[..., Any]) -> bool:
    """Return whether a mixer is called as ``forward(x, ctx)``, because its ``forward`` has ``ctx`` or ``*args``, or as
    ``forward(x)``. Raises UserError if it has ``attention_mask``, ``rotary_pos_emb`` or ``packed_seq_params``, which
    nothing would fill."""
    if _takes(forward, "ctx", inspect.Parameter.VAR_POSITIONAL):
        return True
    facts = ("attention_mask", "rotary_pos_emb", "packed_seq_params")
    if names := [name for name in facts if name in inspect.signature(forward).parameters]:
        raise UserError(
            f"{forward.__qualname__} takes {', '.join(names)}: make it forward(x, ctx); ctx.{names[0]} is the same "
            "(megatron/core/transformer/context.py)"
        )
    return False


def _takes(function: Callable[..., object], name: str, rest: object) -> bool:
    """Return whether ``function`` has a parameter ``name`` or a variadic parameter of the kind ``rest``."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(parameter.kind == rest for parameter in parameters.values())
