"""The model of a run's settings, described. Torch-free, unless ``--spec`` names layers of your own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

from megatron.core.config.errors import UserError
from megatron.core.config.transformer_config import ModelSettings, TransformerConfig, values_of
from megatron.core.description.model import ModelDescription
from megatron.core.models.bert_description import describe_bert
from megatron.core.models.common.description import Vocabulary
from megatron.core.models.gpt_description import describe_gpt
from megatron.core.models.t5_description import DECODER_LAYER, ENCODER_LAYER, EncoderDecoder, describe_t5
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


def _gpt(cfg: PretrainConfig, vocab_size: int) -> ModelDescription:
    return describe_gpt(
        cfg, vocab_size=vocab_size, **_lengths(cfg),
        share_embeddings_and_output_weights=not cfg.untie_embeddings_and_output_weights,
        make_vocab_size_divisible_by=cfg.make_vocab_size_divisible_by, spec=layers_of_spec(cfg),
    )  # fmt: skip


def _bert(cfg: PretrainConfig, vocab_size: int) -> ModelDescription:
    return describe_bert(
        cfg, _vocabulary(cfg, vocab_size), **_lengths(cfg), num_tokentypes=2 if cfg.bert_binary_head else 0,
        add_binary_head=cfg.bert_binary_head,
    )  # fmt: skip


def _t5(cfg: PretrainConfig, vocab_size: int) -> ModelDescription:
    options = _lengths(cfg)
    lengths = options.pop("seq_length"), cfg.decoder_seq_length or cfg.seq_length
    sizes = EncoderDecoder(*lengths, cfg.decoder_num_layers or cfg.num_layers, cfg.relative_attention_num_buckets)
    return describe_t5(cfg, _vocabulary(cfg, vocab_size), sizes, **options)


def _vocabulary(cfg: PretrainConfig, size: int) -> Vocabulary:
    return Vocabulary(size, not cfg.untie_embeddings_and_output_weights, cfg.make_vocab_size_divisible_by)


def _lengths(cfg: PretrainConfig) -> dict[str, Any]:
    return {
        "seq_length": cfg.seq_length,
        "max_sequence_length": cfg.max_position_embeddings,
        "position_embedding_type": cfg.position_embedding_type,
    }


FAMILIES: Mapping[str, Callable[[PretrainConfig, int], ModelDescription]] = {"gpt": _gpt, "bert": _bert, "t5": _t5}
"""What describes the model of each program."""


PROGRAMS = {"pretrain_gpt.py": "gpt", "pretrain_moe.py": "gpt", "pretrain_bert.py": "bert", "pretrain_t5.py": "t5"}
"""Which of them each entry script trains."""


def describe_run(cfg: PretrainConfig, vocab_size: int) -> ModelDescription:
    """The model of resolved settings; ``vocab_size`` 0: unknown."""
    return FAMILIES[cfg.model_family](cfg, vocab_size)
