"""GPT, LLaMA and similar decoders, with or without experts, as a model family."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from megatron.core.config.mla import LatentAttentionConfig
from megatron.core.config.moe import MoEConfig
from megatron.core.config.mtp import MTPConfig
from megatron.core.config.optional import (
    CustomLayersConfig,
    DocumentConfig,
    MultiplierConfig,
    RopeScalingConfig,
    UpcyclingConfig,
    VariableLengthConfig,
)
from megatron.core.config.problems import Settings, collect_rules
from megatron.core.models.family import DataSet, ModelFamily, Options, Program, TrainedModel
from megatron.core.models.gpt import custom_layers, description, rules

if TYPE_CHECKING:
    from torch import Tensor, nn

    from megatron.core.inference.sampling import Sampling


def data_set(cfg: Settings, options: Options) -> DataSet:
    """Return (class, configuration) of the data set: GPTDataset, or VarlenDataset with --use-varlen-dataset, or their
    mock forms with --mock-data, with the document flags and the tokenizer's vocabulary size (None without tokenizer).
    ``options`` are the common options. Reads no data."""
    from megatron.core.datasets import gpt_dataset, varlen_dataset  # imports numpy

    tokenizer, varies = options["tokenizer"], cfg.variable_lengths
    options = {
        **options, **asdict(cfg.documents), "vocab_size": None if tokenizer is None else tokenizer.vocab_size
    }  # fmt: skip
    if not varies.use_varlen_dataset:
        kind = gpt_dataset.MockGPTDataset if cfg.data.mock_data else gpt_dataset.GPTDataset
        return kind, gpt_dataset.GPTDatasetConfig(**options)
    text = varies.varlen_mock_dataset_config_json
    lengths = None if text is None else varlen_dataset.parse_mock_lengths(text)
    varlen = varlen_dataset.MockVarlenDataset if cfg.data.mock_data else varlen_dataset.VarlenDataset
    return varlen, varlen_dataset.VarlenDatasetConfig(**options, mock_lengths=lengths)


def generate(trained: TrainedModel, prompt: str, max_new_tokens: int, sampling: Sampling) -> str:
    """Return ``prompt`` followed by its continuation up to eod or ``max_new_tokens``; an empty prompt starts with the
    eod token. Older tokens than --seq-length are dropped from the context."""
    from megatron.core.inference import sampling as inference  # imports torch

    tokenizer = trained.tokenizer
    tokens = inference.generate(
        trained.model,
        tokenizer.tokenize(prompt) or [tokenizer.eod],
        max_new_tokens=max_new_tokens,
        max_sequence_length=trained.cfg.data.seq_length,
        stop_token=tokenizer.eod,
        sampling=sampling,
    )
    return prompt + tokenizer.detokenize(list(tokens))


def logits(model: nn.Module, cfg: Settings, tokens: Tensor) -> Tensor:
    """Return the logits [b, s, v] for ``tokens`` [b, s]."""
    import torch

    return model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens))


FAMILY = ModelFamily(
    name="gpt",
    is_default=True,
    programs=(
        Program("gpt", "GPT"),
        Program("moe", "GPT with mixture-of-experts layers", required=("num_moe_experts",)),
    ),
    task="megatron.training.tasks.gpt:GPTTask",
    data_set=data_set,
    describe=description.describe_settings,
    branches=custom_layers.branches,
    groups=(
        MoEConfig,
        UpcyclingConfig,
        MTPConfig,
        LatentAttentionConfig,
        MultiplierConfig,
        RopeScalingConfig,
        CustomLayersConfig,
        DocumentConfig,
        VariableLengthConfig,
    ),
    rules=collect_rules(rules),
    sequence_tensors=frozenset({"tokens", "labels", "loss_mask", "position_ids"}),
    tool="tools/generate.py",
    generate=generate,
    logits=logits,
    auto_model="AutoModelForCausalLM",
)
