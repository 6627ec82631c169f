"""T5 as a model family: an encoder and a decoder that share sizes other than their depth."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron.core.config.errors import UserError
from megatron.core.config.network import ScaledOutputConfig
from megatron.core.config.optional import MaskedDataConfig
from megatron.core.config.problems import Settings, collect_rules
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.models.common.masked_data import maskable_tokens, masking_options, sinks_exclude_cuda_graphs
from megatron.core.models.family import DataSet, ModelFamily, Options, Program, TrainedModel
from megatron.core.models.t5 import description, rules
from megatron.core.models.t5.config import EncoderDecoderConfig

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.core.inference.sampling import Sampling


def transformers(cfg: Settings) -> dict[str, TransformerConfig]:
    """Return the configurations of both stacks. They are equal: initial weights of the decoder are scaled by the
    encoder's depth, as Megatron-LM does; the decoder's depth is --decoder-num-layers."""
    return {"encoder": cfg.model, "decoder": cfg.model}


def derive(flat: Any) -> Options:
    """Return the decoder's depth, the encoder's by default."""
    return {"decoder_num_layers": flat.num_layers} if flat.decoder_num_layers is None else {}


def shrink(cfg: Settings, small: Options) -> Options:
    """Return the decoder's layers, in the same ratio to the ``small`` encoder, and its shorter sequence length."""
    ranks = 2 * cfg.model.context_parallel_size * cfg.model.tensor_model_parallel_size
    layers = round(cfg.group(EncoderDecoderConfig).decoder_num_layers / cfg.model.num_layers * small["num_layers"])
    return {"decoder_num_layers": max(1, layers), "decoder_seq_length": math.lcm(ranks, 8)}


def data_set(cfg: Settings, options: Options) -> DataSet:
    """Return (class, configuration) of the data set: spans of at most 10 full words, lengths from a geometric
    distribution, and --decoder-seq-length. ``options`` are the common options. Reads no data."""
    from megatron.core.datasets import t5_dataset  # imports numpy

    config = t5_dataset.T5MaskedWordPieceDatasetConfig(
        **options,
        **masking_options(cfg, rules.LONGEST_NGRAM),
        sequence_length_decoder=cfg.group(EncoderDecoderConfig).decoder_seq_length,
        masking_use_geometric_distribution=True,
    )
    return t5_dataset.T5MaskedWordPieceDataset, config


def generate(trained: TrainedModel, prompts: Sequence[str], max_new_tokens: int, sampling: Sampling) -> Iterator[str]:
    """Yield each prompt, an arrow, and the output up to an end token: each sentinel followed by its predicted span. The
    first decoder token is the same as in the data set: bos, or pad for a tokenizer without bos. Raises UserError for
    an empty or too long prompt, and on several ranks."""
    from megatron.core.inference.sampling import generate_seq2seq  # imports torch

    tokenizer = trained.tokenizer
    if trained.num_ranks > 1:
        raise UserError(f"T5 generates on one rank, not on {trained.num_ranks}; start it without torchrun")
    start = tokenizer.special_ids["bos"] if "bos" in tokenizer.special_ids else tokenizer.pad  # noqa: SIM401  (raises)
    for prompt in prompts:
        tokens = generate_seq2seq(
            trained.model,
            trained.tokenize(prompt),
            start=start,
            max_new_tokens=max_new_tokens,
            max_sequence_length=trained.cfg.embeddings.max_position_embeddings,
            stop_tokens=tokenizer.end_ids,
            sampling=sampling,
        )
        yield f"{prompt}\n-> {tokenizer.detokenize(list(tokens))}"


def decoder_tokens(tokens: Tensor) -> Tensor:
    """Return the decoder's input for encoder ``tokens`` [b, s] in comparisons: reversed, to find swapped stacks."""
    return tokens.flip(-1)


FAMILY = ModelFamily(
    name="t5",
    programs=(Program("t5", "T5"),),
    task="megatron.training.tasks.t5:T5Task",
    data_set=data_set,
    describe=description.describe_settings,
    transformers=transformers,
    branches=description.branches,
    groups=(EncoderDecoderConfig, ScaledOutputConfig, MaskedDataConfig),
    rules=(*collect_rules(rules), partial(maskable_tokens, special=2), sinks_exclude_cuda_graphs),
    derive=derive,
    shrink=shrink,
    tokenizer_type="BertWordPieceLowerCase",
    lengths=("seq_length", "decoder_seq_length"),
    sequence_tensors=frozenset({"text_enc", "text_dec", "labels", "loss_mask"}),
    weight_settings=description.OWN_SETTINGS,
    is_causal=False,
    tool="tools/generate.py",
    generate=generate,
    logits=lambda model, cfg, tokens: model(tokens, decoder_tokens(tokens), tokens.new_ones(tokens.shape)),
    auto_model="AutoModelForSeq2SeqLM",
    peer_inputs=lambda tokens: {
        "decoder_input_ids": decoder_tokens(tokens),
        "attention_mask": tokens.new_ones(tokens.shape),
    },
)
