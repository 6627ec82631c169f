"""Model description of a run's settings. Torch-free, unless ``--spec`` names custom layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from inspect import signature
from typing import Any

from megatron.core.config.errors import UserError
from megatron.core.config.transformer_config import ModelSettings, TransformerConfig, group_values
from megatron.core.description.model import ModelDescription
from megatron.core.models.bert_description import with_head_on
from megatron.core.models.describe import describe_family
from megatron.core.models.t5_description import DECODER_LAYER, ENCODER_LAYER
from megatron.core.pipeline_parallel.stages import BranchNames
from megatron.core.transformer.spec_utils import ModuleSpec, import_module
from megatron.training.config.pretrain_config import PretrainConfig


def spec_layers(cfg: PretrainConfig) -> Any:
    """Return the layers that ``--spec`` names: a spec for all layers, specs per layer, or the result of a function,
    which receives the library's configuration if it has a ``config`` parameter. None without ``--spec`` or with
    ``--spec local``. Imports the named module.

    Raises:
        UserError: ``--spec`` names another kind of object.
    """
    if cfg.spec in (None, ["local"]):
        return None
    found = import_module(cfg.spec)
    if callable(found) and not isinstance(found, type):
        takes_config = "config" in signature(found).parameters
        found = found(config=TransformerConfig(**group_values(ModelSettings, cfg))) if takes_config else found()
    if not isinstance(found, ModuleSpec) and not isinstance(getattr(found, "layer_specs", None), Sequence):
        raise UserError(
            f"--spec {' '.join(cfg.spec)}: {found!r:.60} specifies no layers; name a ModuleSpec, "
            "TransformerBlockSubmodules or a function that returns one of them"
        )
    return found


def spec_branches(cfg: PretrainConfig) -> BranchNames | None:
    """Return the branch names of each layer: encoder then decoder layers for T5, else from --spec or
    --use-parallel-residual. None: standard decoder layers. Imports torch for --spec; raises UserError if --spec is
    invalid."""
    if cfg.model_family == "t5":
        return [ENCODER_LAYER] * cfg.num_layers + [DECODER_LAYER] * (cfg.decoder_num_layers or cfg.num_layers)
    if not (specs := specs_of_layers(cfg)):
        return [["layer"]] * cfg.num_layers if cfg.use_parallel_residual else None
    from megatron.core.transformer.transformer_block import branch_names  # imports torch

    return branch_names(specs, cfg.use_parallel_residual)


def specs_of_layers(cfg: PretrainConfig) -> Sequence[ModuleSpec]:
    """Return the spec of each layer that ``--spec`` names; empty without ``--spec``.

    Raises:
        UserError: ``--spec`` names no layers, or their number differs from ``--num-layers``.
    """
    if (spec := spec_layers(cfg)) is None:
        return []
    from megatron.core.transformer.transformer_block import layer_specs  # imports torch

    return layer_specs(spec, cfg.num_layers)


PROGRAMS = {"pretrain_gpt.py": "gpt", "pretrain_moe.py": "gpt", "pretrain_bert.py": "bert", "pretrain_t5.py": "t5"}
"""Model family of each entry script."""


def describe_run(cfg: PretrainConfig, vocab_size: int) -> ModelDescription:
    """Return the model description of resolved settings, torch-free unless --spec is set. ``vocab_size`` is unpadded; 0
    means unknown. BERT's head is counted at the masked positions it computes, not at all tokens."""
    spec = spec_layers(cfg) if cfg.model_family == "gpt" else None
    described = describe_family(cfg, cfg, vocab_size, spec=spec)
    if cfg.model_family != "bert":
        return described
    predicted, needed = predicted_per_rank(cfg), most_masked(cfg)
    computed = cfg.seq_length if predicted is None else predicted * cfg.context_parallel_size
    return with_head_on(described, computed / cfg.seq_length, needed / cfg.seq_length)


def most_masked(cfg: PretrainConfig) -> int:
    """Return the maximum number of masked tokens in a BERT sample (as ``MaskingRule.budget`` of its data set)."""
    return math.ceil(cfg.mask_prob * cfg.seq_length)


def predicted_per_rank(cfg: PretrainConfig) -> int | None:
    """Return the number of positions per row at which BERT's head predicts: the maximum number of masked tokens on each
    context-parallel rank, because one rank may hold them all. None: all positions (also for other models)."""
    if cfg.model_family != "bert" or cfg.sequence_parallel:
        return None
    most = most_masked(cfg)
    return most if most < cfg.seq_length // cfg.context_parallel_size else None
