"""Description of BERT models: parameters, FLOPs and memory. Torch-free."""

from __future__ import annotations

import math
from dataclasses import replace

from megatron.core.config.problems import Settings
from megatron.core.description.model import Config, LayerPlace, ModelDescription, Op, Param, Piece, Saved
from megatron.core.description.parts import activation_bytes, gemm, norm, stream_elements
from megatron.core.models.bert.config import BertConfig, num_tokentypes
from megatron.core.models.common import description as common

SETTINGS_OF_HEADS = ("bert_binary_head", "bert_num_tokentypes")


def describe_settings(cfg: Settings, vocab_size: int) -> ModelDescription:
    """Return the description of the BERT that ``cfg`` defines, its head at masked positions only."""
    group = cfg.group(BertConfig)
    binary = group.bert_binary_head
    described = describe_bert(
        cfg.model,
        common.Vocabulary.of_settings(cfg, vocab_size),
        seq_length=cfg.data.seq_length,
        max_sequence_length=cfg.embeddings.max_position_embeddings,
        position_embedding_type=cfg.embeddings.position_embedding_type,
        num_tokentypes=num_tokentypes(group),
        add_binary_head=binary,
    )
    predicted, needed = predicted_per_rank(cfg), most_masked(cfg)
    computed = cfg.data.seq_length if predicted is None else predicted * cfg.model.context_parallel_size
    return with_head_on(described, computed / cfg.data.seq_length, needed / cfg.data.seq_length)


def most_masked(cfg: Settings) -> int:
    """Return the maximum number of masked tokens in a sample (as ``MaskingRule.budget`` of its data set)."""
    return math.ceil(cfg.masked_data.mask_prob * cfg.data.seq_length)


def predicted_per_rank(cfg: Settings) -> int | None:
    """Return the number of positions per row at which the head predicts: the maximum number of masked tokens on each
    context-parallel rank, because one rank may hold them all. None: all positions."""
    most, local_length = most_masked(cfg), cfg.data.seq_length // cfg.model.context_parallel_size
    return None if cfg.model.sequence_parallel or most >= local_length else most


def describe_bert(
    config: Config,
    vocabulary: common.Vocabulary,
    *,
    seq_length: int,
    max_sequence_length: int,
    position_embedding_type: str = "learned_absolute",
    num_tokentypes: int = 2,
    add_binary_head: bool = True,
    spec: object = None,
) -> ModelDescription:
    """Return the description of the model that :class:`BertModel` builds from the same arguments, for sequences of
    ``seq_length`` tokens without padding. A vocabulary size of 0 means unknown; ``spec`` is as in :func:`describe_gpt`.
    """
    word, output = common.word_tables(config, vocabulary)
    rotary, layers = position_embedding_type in ("rope", "yarn"), []
    for index, describe in enumerate(common.layer_descriptions(spec, config.num_layers, common.encoder_layer)):
        branches = describe(config, LayerPlace(index + 1, seq_length, rotary, causal=False))
        layers.append(tuple(branch.under(f"encoder.layers.{index}.") for branch in branches))
    positions = max_sequence_length if position_embedding_type == "learned_absolute" else 0
    embedding = common.describe_embedding(config, word, positions, (*common.SETTINGS, *SETTINGS_OF_HEADS))
    if num_tokentypes:
        types = Param("embedding.tokentype_embeddings.weight", (num_tokentypes, config.hidden_size))
        embedding = replace(embedding, params=(*embedding.params, types))
    return ModelDescription(embedding, tuple(layers), _heads(config, output, seq_length, add_binary_head))


def _heads(config: Config, output: Param, seq_length: int, binary: bool) -> Piece:
    """Return one piece for the final norm, the LM head (dense, GELU, norm), the output layer with bias, the optional
    pooler and binary head, and the loss."""
    head = common.describe_head(config, output, seq_length, "encoder.final_layernorm")
    hidden, size = config.hidden_size, stream_elements(config) * activation_bytes(config)
    dense = Param("lm_head.dense.weight", (hidden, hidden))
    params = [*head.params[:-1], dense]
    if config.add_bias_linear:
        params.append(Param("lm_head.dense.bias", (hidden,), ndim=1))
    params += [*norm("lm_head.layer_norm", hidden, config), output]
    params.append(common.output_bias(output))
    if binary:
        for name, rows in (("pooler.dense", hidden), ("binary_head", 2)):
            params += [Param(f"{name}.weight", (rows, hidden)), Param(f"{name}.bias", (rows,), ndim=1)]
    final, *rest = head.ops
    saved = tuple(Saved(name, size) for name in ("input of the GELU", "output of the GELU", "normed"))
    ops = (final, gemm(dense, config, seq_length, saved=saved), Op("activation", "gelu", traffic=5 * size), *rest)
    return replace(head, params=tuple(params), ops=ops)


def with_head_on(described: ModelDescription, computed: float, needed: float) -> ModelDescription:
    """Return ``described`` with the costs of its head, except the final norm, scaled by ``computed``, the fraction of
    tokens at which the head is computed. The loss needs the fraction ``needed``; the rest are needless FLOPs."""
    final, *rest = described.head.ops
    ops = [
        replace(
            op,
            flops=op.flops * computed,
            traffic=op.traffic * computed,
            gradients=op.gradients * computed,
            saved=tuple(replace(saved, bytes=saved.bytes * computed) for saved in op.saved),
        )
        for op in rest
    ]
    head, needless = replace(described.head, ops=(final, *ops)), (computed - needed) * sum(op.flops for op in rest)
    return replace(described, head=head, needless_flops=needless)
