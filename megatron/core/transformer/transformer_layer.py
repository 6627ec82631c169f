"""Transformer layer: a sequence of residual branches.

  x = x + dropout(attention(norm(x)))
  x = x + dropout(mlp(norm(x)))

Any other list of branches (``branch.py``) works too. With ``use_parallel_residual`` all branches read the same x:

  x = x + dropout(attention(norm(x))) + dropout(mlp(norm'(x)))

where norm' is norm with ``share_parallel_norm``.

Only x passes from one branch to the next, so that a pipeline stage may end between any two. Adding a branch's output
and the next branch's norm are one kernel if both are on the same stage.

Legend: s sequence, b batch, h hidden."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron import serve_other_names
from megatron.core.config.errors import UserError
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.transformer.branch import Branch, Stream, accepts_context
from megatron.core.transformer.context import ForwardContext
from megatron.core.transformer.overlap import Segmented, Segments, mixer_segments, runs_its_segments
from megatron.core.transformer.spec_utils import BranchSpec, ModuleSpec


@dataclass
class TransformerLayerSubmodules:
    """Slots of a layer of attention and a feed-forward network."""

    input_layernorm: ModuleSpec | Callable[..., Any]
    self_attention: ModuleSpec | Callable[..., Any]
    pre_mlp_layernorm: ModuleSpec | Callable[..., Any]
    mlp: ModuleSpec | Callable[..., Any]

    @property
    def branches(self) -> Sequence[BranchSpec]:
        """Specs of the two branches, in order."""
        return (
            BranchSpec("self_attention", self.self_attention, self.input_layernorm, "input_layernorm", "attention"),
            BranchSpec("mlp", self.mlp, self.pre_mlp_layernorm),
        )


def branch_specs(submodules: Any) -> Sequence[BranchSpec]:
    """Return the branch specs of a layer's submodules, or the list itself."""
    return getattr(submodules, "branches", submodules)


class TransformerLayer(Segmented):
    """Layer of residual branches, [s, b, h] -> [s, b, h]. ``layer_number`` counts from 1 over the full model.

    ``submodules`` lists the branches. ``branches`` restricts the layer to a range; other branches are not built. Raises
    UserError: two modules would have the same name."""

    mixes_tokens = False  # its branches are checked one by one

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules | Sequence[BranchSpec],
        layer_number: int = 1,
        *,
        groups: ProcessGroups,
        branches: range | None = None,
    ) -> None:
        """Build the branches of ``submodules`` in the range ``branches`` (None: all). With ``embed_layernorm`` the
        first norm of layer 1 replaces the residual stream."""
        super().__init__()
        self.config, self.layer_number = config, layer_number
        specs = branch_specs(submodules)
        names = [name for spec in specs for name in (spec.name, spec.norm_name, spec.post_norm_name, spec.dropout_name)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise UserError(f"{', '.join(twice)}: given to two modules; parameters are called by these names, one each")
        built = specs if branches is None else specs[branches.start : branches.stop]
        self.branches = list[Branch]()
        for spec in built:
            first = self.branches[0] if self.branches and config.share_parallel_norm else None
            self.branches.append(Branch(self, spec, config, layer_number, groups, reads_norm_of=first))
        if config.embed_layernorm and layer_number == 1 and built[0] is specs[0]:
            self.branches[0].normed_is_residual = True  # its first norm is the embedding's norm
        self._is_parallel = config.use_parallel_residual

    def segments(self, hidden_states: Tensor, ctx: ForwardContext) -> Segments[Tensor]:
        """Neither norms nor mixers are recomputed with ``ctx.overlap``. Adding a branch's output and the next branch's
        norm are one step, in one kernel where possible."""
        streams = [self.branches[0].enter(hidden_states)]
        if self._is_parallel:
            self._add_parallel_streams(streams)
        residual = streams[-1].residual
        for branch, following in zip(self.branches, [*self.branches[1:], None]):
            stream, mixer = streams.pop(0), branch.mixer
            if ctx.overlap:
                output = yield from mixer_segments(mixer, stream.normed, ctx)
            else:
                with branch.kept.layernorm(stream.normed, branch.norm, stream.hidden):
                    facts = (ctx,) if accepts_context(type(mixer).forward) else ()
                    output = getattr(branch.at, branch.name)(mixer, stream.normed, *facts)
            output = branch.finish(output)
            if following is None or self._is_parallel:
                residual = branch.add(residual, output, ctx)
            else:
                streams.append(following.add_and_norm(branch, residual, output, ctx))
                residual = streams[0].residual
        return residual

    def _add_parallel_streams(self, streams: list[Stream]) -> None:
        """Append the inputs of all branches but the first: each normalized by its norm, or all by the first norm.
        Chains the stream through the norms: their backward accumulates its gradient."""
        for branch in self.branches[1:]:
            streams.append(streams[0] if self.config.share_parallel_norm else branch.enter(streams[-1].residual))

    @property
    def overlaps(self) -> bool:
        """Whether all branches support two-batch overlap and no subclass overrides ``forward`` only."""
        return runs_its_segments(self) and all(branch.overlaps for branch in self.branches)


def layer_branches(spec: ModuleSpec | Callable[..., Any], parallel: bool = False) -> Sequence[BranchSpec] | None:
    """Return the branches of a layer if stages may split it between them: its class does not override ``forward`` or
    ``segments`` and has a parameter ``branches``, and its branches do not read the same stream (``parallel``). Else
    None."""
    if parallel or not isinstance(spec, ModuleSpec) or not isinstance(spec.module, type):
        return None
    kind = spec.module
    if not issubclass(kind, TransformerLayer) or "branches" not in inspect.signature(kind).parameters:
        return None
    is_plain = all(getattr(kind, name) is getattr(TransformerLayer, name) for name in ("forward", "segments"))
    return branch_specs(spec.submodules) if is_plain else None


serve_other_names(__name__)
