"""Settings that follow from --sft and --dpo, and their common rules."""

from __future__ import annotations

from megatron.core.config.preferences import PreferenceConfig
from megatron.core.config.problems import Problems, Settings, problem
from megatron.core.config.sft import FineTuningConfig


def derived(flat: Settings) -> dict[str, object]:
    """Return the settings that follow from --sft and --dpo: attention and positions restart with each document."""
    return {"reset_position_ids": True, "reset_attention_mask": True} if flat.sft or flat.dpo else {}


def conversation_conflicts(cfg: Settings) -> Problems:
    """Reject --sft and --dpo with other data sets and tokenizers without text, and flags that require one of them."""
    is_sft, is_dpo = cfg.group(FineTuningConfig).sft, cfg.group(PreferenceConfig).dpo
    kind = "dpo" if is_dpo else "sft"
    if not is_sft and not is_dpo:
        if "sft_packing" in cfg.explicit:
            yield problem(cfg, "sft_packing", "requires --sft or --dpo", "add one, or remove this flag")
        return
    if is_sft and is_dpo:
        yield problem(cfg, "dpo", "is another kind of training than --sft", "remove one of them")
    for field in ("use_varlen_dataset", "fim_data"):
        if getattr(cfg.flat, field):
            yield problem(cfg, field, f"is not supported with --{kind} and its own data set", "remove one of them")
    if cfg.tokenizer.tokenizer_type == "NullTokenizer" and not cfg.data.mock_data:
        yield problem(cfg, "tokenizer_type", f"has no text, which --{kind} requires", "use HuggingFaceTokenizer")
    if cfg.documents.eod_mask_loss:
        yield problem(cfg, "eod_mask_loss", f"contradicts --{kind}, whose masks come from the answers", "remove it")
    if cfg.data.dataloader_type == "external":
        yield problem(cfg, kind, "contradicts --dataloader-type external", "remove one of them")
