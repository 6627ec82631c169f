"""Layers that ``--spec`` names. Torch-free unless it is given."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

from megatron.core.config.errors import UserError
from megatron.core.config.problems import Settings
from megatron.core.models.family import standard_branches
from megatron.core.models.gpt import hybrid_rules
from megatron.core.pipeline_parallel.stages import BranchNames
from megatron.core.transformer.spec_utils import ModuleSpec, import_module


def spec_layers(cfg: Settings) -> Any:
    """Return the layers that ``--spec`` names: a spec for all layers, specs per layer, or the result of a function,
    which receives the library's configuration if it has a ``config`` parameter. None without ``--spec`` or with
    ``--spec local``. Does not check the number of layers. Raises UserError if it names another kind of object."""
    if cfg.custom_layers.spec in (None, ["local"]):
        return None
    spec = import_module(cfg.custom_layers.spec)
    if callable(spec) and not isinstance(spec, type):
        takes_config = "config" in signature(spec).parameters
        spec = spec(config=cfg.model) if takes_config else spec()
    if not isinstance(spec, ModuleSpec) and not isinstance(getattr(spec, "layer_specs", None), Sequence):
        raise UserError(
            f"--spec {' '.join(cfg.custom_layers.spec)}: {spec!r:.60} specifies no layers; name a ModuleSpec, "
            "TransformerBlockSubmodules or a function that returns one of them"
        )
    return spec


def specs_of_layers(cfg: Settings) -> Sequence[ModuleSpec]:
    """Return the spec of each layer that ``--spec`` names; empty without ``--spec``. Raises UserError: ``--spec`` names
    no layers, or their number differs from ``--num-layers``."""
    if (spec := spec_layers(cfg)) is None:
        return []
    from megatron.core.transformer.transformer_block import layer_specs  # imports torch

    return layer_specs(spec, cfg.model.num_layers)


def branches(cfg: Settings) -> BranchNames | None:
    """Return the branch names of each layer with --spec or --use-parallel-residual, else None. Raises UserError if
    --spec is invalid."""
    if not (specs := specs_of_layers(cfg)):
        return hybrid_rules.branches(cfg) or standard_branches(cfg)
    from megatron.core.transformer.transformer_block import branch_names  # imports torch

    return branch_names(specs, cfg.model.use_parallel_residual)
