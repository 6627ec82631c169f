"""GPT, LLaMA and similar decoders, with or without experts, as a model family."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from megatron.core.config.distillation import DistillationConfig
from megatron.core.config.errors import UserError
from megatron.core.config.hybrid import HybridConfig
from megatron.core.config.linear_attention import LinearAttentionConfig
from megatron.core.config.lora import SETTINGS as LORA_SETTINGS
from megatron.core.config.lora import LoraConfig
from megatron.core.config.mla import LatentAttentionConfig
from megatron.core.config.moe import MoEConfig
from megatron.core.config.mtp import MTPConfig
from megatron.core.config.mup import MupConfig
from megatron.core.config.optional import (
    CustomLayersConfig,
    DocumentConfig,
    FillInTheMiddleConfig,
    MultiplierConfig,
    RopeScalingConfig,
    UpcyclingConfig,
    VariableLengthConfig,
)
from megatron.core.config.preferences import PreferenceConfig
from megatron.core.config.problems import Settings, collect_rules
from megatron.core.config.quantization import QuantizationConfig
from megatron.core.config.sft import FineTuningConfig
from megatron.core.models import quantization
from megatron.core.models.adapters import rules as adapter_rules
from megatron.core.models.family import DataSet, ModelFamily, Options, Program, TrainedModel
from megatron.core.models.gpt import (
    custom_layers,
    description,
    distillation_rules,
    hybrid_rules,
    preference_rules,
    rules,
    sft_rules,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from megatron.core.inference.sampling import Sampling


def data_set(cfg: Settings, options: Options) -> DataSet:
    """Return (class, configuration) of the data set that the flags choose, with the document flags and the tokenizer's
    vocabulary size (None without tokenizer). ``options`` are the common options. Reads no data."""
    from megatron.core.datasets import gpt_dataset, varlen_dataset  # imports numpy

    tuning = cfg.group(FineTuningConfig)
    is_dpo = cfg.group(PreferenceConfig).dpo
    if (tuning.sft or is_dpo) and not cfg.data.mock_data:
        from megatron.core.datasets import preference_dataset, sft_dataset

        kind = preference_dataset.PreferenceDataset if is_dpo else sft_dataset.SFTDataset
        return kind, sft_dataset.SFTDatasetConfig(**options, packing=tuning.sft_packing)
    tokenizer, varies = options["tokenizer"], cfg.variable_lengths
    options = {
        **options, **asdict(cfg.documents), "vocab_size": None if tokenizer is None else tokenizer.vocab_size
    }  # fmt: skip
    if cfg.fill_in_the_middle.fim_data:
        return _fill_in_the_middle(cfg, options)
    if not varies.use_varlen_dataset:
        plain = gpt_dataset.MockGPTDataset if cfg.data.mock_data else gpt_dataset.GPTDataset
        return plain, gpt_dataset.GPTDatasetConfig(**options)
    text = varies.varlen_mock_dataset_config_json
    lengths = None if text is None else varlen_dataset.parse_mock_lengths(text)
    varlen = varlen_dataset.MockVarlenDataset if cfg.data.mock_data else varlen_dataset.VarlenDataset
    return varlen, varlen_dataset.VarlenDatasetConfig(**options, mock_lengths=lengths)


def _fill_in_the_middle(cfg: Settings, options: Options) -> DataSet:
    """Return (class, configuration) of the data set of --fim-data."""
    from megatron.core.datasets import fim_dataset

    group = cfg.fill_in_the_middle
    tokens = {
        "prefix": group.fim_prefix_token, "middle": group.fim_middle_token, "suffix": group.fim_suffix_token,
        "pad": group.fim_pad_token, "eod": group.fim_eod_token,
    }  # fmt: skip
    return fim_dataset.GPTFIMDataset, fim_dataset.GPTFIMDatasetConfig(
        **options,
        fim_rate=group.fim_rate,
        fim_spm_rate=group.fim_spm_rate,
        fim_extra_tokens=tokens,
        fim_split_sample=group.fim_split_sample,
        fim_fragment_rate=group.fim_fragment_rate,
        fim_no_prefix=group.fim_no_prefix,
    )


def generate(trained: TrainedModel, prompts: Sequence[str], max_new_tokens: int, sampling: Sampling) -> Iterator[str]:
    """Yield each prompt followed by its continuation up to an end token or ``max_new_tokens``; an empty prompt starts
    with the eod token. All prompts run in one batch with a cache. Without a cache, one by one: models whose layers
    cannot use one, and text beyond --seq-length tokens, whose context loses its oldest tokens. On several ranks these
    are rejected, or end (collective; ranks other than 0 yield nothing)."""
    from megatron.core.inference import sampling as inference  # imports torch
    from megatron.core.inference.engine import Engine
    from megatron.core.inference.requests import Completion, Request
    from megatron.core.inference.runner import model_problem
    from megatron.core.inference.scheduler import Limits

    tokenizer, length = trained.tokenizer, trained.cfg.data.seq_length
    ends = tokenizer.end_ids
    texts = [trained.tokenize(prompt) or [tokenizer.eod] for prompt in prompts]
    problem, several = model_problem(trained.model), trained.num_ranks > 1
    needs_cache = several or trained.images is not None
    longest = length if problem is None else -1
    if needs_cache and (problem or max(map(len, texts)) > length):
        problem = problem or f"a prompt has {max(map(len, texts))} tokens, the model takes {length}"
        fix = "use one" if several else "give fewer or smaller images, or another model"
        raise UserError(f"{problem}; {'several ranks' if several else 'images'} need a cache: {fix}")
    batch = [ids for ids in texts if len(ids) <= longest]
    completions: Iterator[Completion] = iter(())
    if batch:
        limits = Limits(length, max_sequences=min(len(batch), 256))
        engine = Engine(trained.model, limits, cuda_graphs=trained.cuda_graphs)
        options = {"max_new_tokens": max_new_tokens, "sampling": sampling, "stop_tokens": ends}
        completions = engine.stream(Request(prompt=ids, images=trained.images, **options) for ids in batch)
        if not engine.is_first_rank:
            list(completions)
            return
    for prompt, ids in zip(prompts, texts):
        completion = next(completions) if len(ids) <= longest else Completion(finish_reason="length")
        tokens = list(completion.tokens)
        if completion.finish_reason == "length" and not needs_cache:
            tokens += inference.generate(
                trained.model,
                ids + tokens,
                max_new_tokens=max_new_tokens - len(tokens),
                max_sequence_length=length,
                stop_tokens=ends,
                sampling=sampling,
            )
        yield prompt + tokenizer.detokenize(tokens)


def logits(model: nn.Module, cfg: Settings, tokens: Tensor) -> Tensor:
    """Return the logits [b, s, v] for ``tokens`` [b, s]."""
    import torch

    return model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens))


_DERIVING = (hybrid_rules, sft_rules, preference_rules, distillation_rules)

FAMILY = ModelFamily(
    name="gpt",
    is_default=True,
    programs=(
        Program("gpt", "GPT"),
        Program("moe", "GPT with mixture-of-experts layers", required=("num_moe_experts",)),
        Program("hybrid", "Mamba-2, attention and others by a pattern", required=("hybrid_layer_pattern",)),
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
        LinearAttentionConfig,
        HybridConfig,
        MultiplierConfig,
        MupConfig,
        RopeScalingConfig,
        CustomLayersConfig,
        DocumentConfig,
        VariableLengthConfig,
        FillInTheMiddleConfig,
        LoraConfig,
        QuantizationConfig,
        FineTuningConfig,
        PreferenceConfig,
        DistillationConfig,
    ),
    rules=collect_rules(rules, adapter_rules, quantization, *_DERIVING),
    derive=lambda flat: {name: value for file in _DERIVING for name, value in file.derived(flat).items()},
    companions="megatron.training.checkpoint.teacher_settings:frozen_models",
    weight_settings=LORA_SETTINGS,
    sequence_tensors=frozenset({"tokens", "labels", "loss_mask", "position_ids"}),
    tool="tools/generate.py",
    generate=generate,
    logits=logits,
    auto_model="AutoModelForCausalLM",
)
