"""Descriptions of layers from their specs, through the ``describe`` attribute of the modules in the slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron.core.description.model import Config, LayerPlace, Piece
from megatron.core.description.parts import norm, one_piece, residual_branch
from megatron.core.transformer.spec_utils import BranchSpec, ModuleSpec
from megatron.core.transformer.transformer_layer import branch_specs, layer_branches


def describe_layer(spec: ModuleSpec | Callable[..., object], config: Config, place: LayerPlace) -> tuple[Piece, ...]:
    """Return the pieces of a layer: one per branch, or a single piece for an indivisible layer: from its class's
    ``describe(config, place)`` if it has one, else from its branches. Without branch specs, and for branches without
    ``describe``, it is unknown."""
    apart = layer_branches(spec, config.use_parallel_residual)
    if apart is not None:
        return tuple(_describe_branch(branch, config, place) for branch in apart)
    if describe := getattr(getattr(spec, "module", spec), "describe", None):
        return (describe(config, place),)
    slots = branch_specs(getattr(spec, "submodules", None))  # submodules of custom classes may be any object
    branches = [branch for branch in slots if isinstance(branch, BranchSpec)] if isinstance(slots, Sequence) else []
    shared = config.share_parallel_norm
    pieces = [_describe_branch(spec, config, place, shared and index > 0) for index, spec in enumerate(branches)]
    return (one_piece(pieces),)


def _describe_branch(spec: BranchSpec, config: Config, place: LayerPlace, reads_norm: bool = False) -> Piece:
    """Return the description of one residual branch by the ``describe`` attributes of its mixer and its norm (default:
    of a built-in norm); None, or a mixer without it, makes the branch unknown. ``reads_norm``: of the first branch."""
    describe = getattr(getattr(spec.mixer, "module", spec.mixer), "describe", None)
    describe_norm = getattr(getattr(spec.norm, "module", spec.norm), "describe", norm)
    if describe is None or describe_norm is None:
        return Piece(spec.name, is_branch=True, is_known=False)
    return residual_branch(
        describe(config, place),
        config,
        name=spec.name,
        norm_name=spec.norm_name,
        describe_norm=describe_norm,
        reads_norm=reads_norm,
        layer_number=place.layer_number,
    )
