"""The model of a run's settings, described. Torch-free, unless ``--spec`` names layers of your own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from inspect import signature
from typing import Any

from megatron.core.config.errors import UserError
from megatron.core.config.transformer_config import ModelSettings, TransformerConfig, values_of
from megatron.core.description.model import ModelDescription
from megatron.core.models.bert_description import with_head_on
from megatron.core.models.describe import describe_family
from megatron.core.models.t5_description import DECODER_LAYER, ENCODER_LAYER
from megatron.core.pipeline_parallel.stages import BranchNames
from megatron.core.transformer.spec_utils import ModuleSpec, import_module
from megatron.training.config.pretrain_config import PretrainConfig


def layers_of_spec(cfg: PretrainConfig) -> Any:
    """The layers that ``--spec`` names: one spec, or one per layer, or a function that makes them, given the library's
    configuration where it takes a ``config``. None: the layers that the other flags describe.

    Raises:
        UserError: it names something else.
    """
    if cfg.spec in (None, ["local"]):
        return None
    found = import_module(cfg.spec)
    if callable(found) and not isinstance(found, type):
        takes_config = "config" in signature(found).parameters
        found = found(config=TransformerConfig(**values_of(ModelSettings, cfg))) if takes_config else found()
    if not isinstance(found, ModuleSpec) and not isinstance(getattr(found, "layer_specs", None), Sequence):
        raise UserError(
            f"--spec {' '.join(cfg.spec)}: {found!r:.60} specifies no layers; name a ModuleSpec, "
            "TransformerBlockSubmodules or a function that returns one of them"
        )
    return found


def branches_of_spec(cfg: PretrainConfig) -> BranchNames | None:
    """What the branches of each layer of :func:`layers_of_spec` are called; None: those of a decoder layer."""
    if cfg.model_family == "t5":
        return [ENCODER_LAYER] * cfg.num_layers + [DECODER_LAYER] * (cfg.decoder_num_layers or cfg.num_layers)
    if (spec := layers_of_spec(cfg)) is None:
        return [["layer"]] * cfg.num_layers if cfg.use_parallel_residual else None
    from megatron.core.transformer.transformer_block import branch_names, layer_specs  # specs are of torch's modules

    return branch_names(layer_specs(spec, cfg.num_layers), cfg.use_parallel_residual)


PROGRAMS = {"pretrain_gpt.py": "gpt", "pretrain_moe.py": "gpt", "pretrain_bert.py": "bert", "pretrain_t5.py": "t5"}
"""Which family of models each entry script trains."""


def describe_run(cfg: PretrainConfig, vocab_size: int) -> ModelDescription:
    """The model of resolved settings; ``vocab_size`` 0: unknown."""
    spec = layers_of_spec(cfg) if cfg.model_family == "gpt" else None
    described = describe_family(cfg, cfg, vocab_size, spec=spec)
    if cfg.model_family != "bert":
        return described
    predicted, needed = predicted_per_rank(cfg), most_masked(cfg)
    computed = cfg.seq_length if predicted is None else predicted * cfg.context_parallel_size
    return with_head_on(described, computed / cfg.seq_length, needed / cfg.seq_length)


def most_masked(cfg: PretrainConfig) -> int:
    """Masked tokens of a BERT sample at most; its data set (``MaskingRule.budget``) masks no more."""
    return math.ceil(cfg.mask_prob * cfg.seq_length)


def predicted_per_rank(cfg: PretrainConfig) -> int | None:
    """At how many places of each row BERT's head predicts: as many as can be masked, on each context-parallel rank,
    since all of them may be one rank's. None: at all places (other models too)."""
    if cfg.model_family != "bert" or cfg.sequence_parallel:
        return None
    most = most_masked(cfg)
    return most if most < cfg.seq_length // cfg.context_parallel_size else None
