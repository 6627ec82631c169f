"""Settings that follow from --sft, and its rules."""

from __future__ import annotations

from megatron.core.config.preferences import PreferenceConfig
from megatron.core.config.problems import Problems, Settings, problem
from megatron.core.config.sft import FineTuningConfig


def derived(flat: Settings) -> dict[str, object]:
    """Return the settings that follow from --sft: attention and positions restart with each conversation."""
    return {"reset_position_ids": True, "reset_attention_mask": True} if flat.sft else {}


def sft_conflicts(cfg: Settings) -> Problems:
    """Reject --sft with other data sets and tokenizers without text, and flags that require it."""
    if not cfg.group(FineTuningConfig).sft:
        if "sft_packing" in cfg.explicit and not cfg.group(PreferenceConfig).dpo:
            yield problem(cfg, "sft_packing", "requires --sft or --dpo", "add one, or remove this flag")
        return
    for field in ("use_varlen_dataset", "fim_data"):
        if getattr(cfg.flat, field):
            yield problem(cfg, field, "is not supported with --sft, which has its own data set", "remove one of them")
    if cfg.tokenizer.tokenizer_type == "NullTokenizer" and not cfg.data.mock_data:
        yield problem(cfg, "tokenizer_type", "has no text, which --sft requires", "use HuggingFaceTokenizer")
    if cfg.documents.eod_mask_loss:
        reason = "contradicts --sft, whose masks come from the conversations"
        yield problem(cfg, "eod_mask_loss", reason, "remove it")
    if cfg.data.dataloader_type == "external":
        yield problem(cfg, "sft", "contradicts --dataloader-type external", "remove one of them")


def prompt_format_requires_sft_tokenizer(cfg: Settings) -> Problems:
    """Reject --sft-tokenizer-prompt-format with other tokenizers."""
    if "sft_tokenizer_prompt_format" in cfg.explicit and cfg.tokenizer.tokenizer_type != "SFTTokenizer":
        fix = "add it, or give --chat-template"
        yield problem(cfg, "sft_tokenizer_prompt_format", "requires --tokenizer-type SFTTokenizer", fix)
