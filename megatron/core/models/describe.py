"""Describe the model of each training program from its settings. Torch-free unless ``spec`` names layers."""

from __future__ import annotations

from typing import Any

from megatron.core.description.model import Config, ModelDescription
from megatron.core.models.bert_description import describe_bert
from megatron.core.models.common.description import Vocabulary
from megatron.core.models.gpt_description import describe_gpt
from megatron.core.models.t5_description import EncoderDecoder, describe_t5


def describe_family(config: Config, run: Any, vocab_size: int, *, spec: Any = None) -> ModelDescription:
    """Return the description of the model that ``run.model_family`` names (``gpt``, ``bert`` or ``t5``).

    Args:
        config: transformer configuration.
        run: resolved command-line settings, or any object with the same model attributes.
        vocab_size: unpadded vocabulary size; 0 if unknown.
        spec: layer spec of GPT, or one per layer; None builds the default layers of ``config``. Ignored for BERT and
            T5.
    """
    vocabulary = Vocabulary(vocab_size, not run.untie_embeddings_and_output_weights, run.make_vocab_size_divisible_by)
    lengths = {"max_sequence_length": run.max_position_embeddings,
               "position_embedding_type": run.position_embedding_type}  # fmt: skip
    if run.model_family == "t5":
        depth, length = run.decoder_num_layers or run.num_layers, run.decoder_seq_length or run.seq_length
        sizes = EncoderDecoder(run.seq_length, length, depth, run.relative_attention_num_buckets)
        return describe_t5(config, vocabulary, sizes, **lengths)
    lengths["seq_length"] = run.seq_length
    if run.model_family == "bert":
        pairs = run.bert_binary_head
        return describe_bert(
            config, vocabulary, **lengths, num_tokentypes=2 if pairs else 0, add_binary_head=pairs
        )  # fmt: skip
    return describe_gpt(
        config, vocab_size=vocab_size, share_embeddings_and_output_weights=vocabulary.shared,
        make_vocab_size_divisible_by=vocabulary.divisible_by, spec=spec, **lengths,
    )  # fmt: skip


def weight_shapes(model: ModelDescription, *, expert_bias: bool) -> dict[str, tuple[int, ...]]:
    """Map the names of a model's stored tensors to their global, unpadded shapes. Tied parameters are omitted.
    ``expert_bias`` adds ``router.expert_bias`` [experts] for every MoE router.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for param in model.params():
        if not param.tied_to:
            shapes[param.name] = tuple(param.shape)
        if expert_bias and param.name.endswith("router.weight"):
            shapes[param.name.replace("router.weight", "router.expert_bias")] = (param.shape[0],)
    return shapes
