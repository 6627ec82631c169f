"""Settings that follow from --dpo, and its rules."""

from __future__ import annotations

from megatron.core.config.lora import LoraConfig
from megatron.core.config.optional import used_fields
from megatron.core.config.preferences import PreferenceConfig
from megatron.core.config.problems import Problems, Settings, problem
from megatron.core.config.sft import FineTuningConfig


def derived(flat: Settings) -> dict[str, object]:
    """Return the settings that follow from --dpo: documents are completions, and the kind of the reference."""
    if not flat.dpo:
        return {}
    documents: dict[str, object] = {"reset_position_ids": True, "reset_attention_mask": True}
    if flat.dpo_reference is not None:
        return documents
    is_base = flat.lora_rank is not None and flat.dpo_reference_load is None
    return {**documents, "dpo_reference": "base" if is_base else "model"}


def preference_flags_require_dpo(cfg: Settings) -> Problems:
    """Reject settings of preference pairs without --dpo."""
    preferences = cfg.group(PreferenceConfig)
    if not preferences.dpo:
        for field in used_fields(PreferenceConfig, preferences):
            yield problem(cfg, field, "has no effect without --dpo", "add --dpo, or remove this flag")


def preference_conflicts(cfg: Settings) -> Problems:
    """Reject --dpo with other losses, data sets, and tokenizers without text."""
    preferences = cfg.group(PreferenceConfig)
    if not preferences.dpo:
        return
    if cfg.group(FineTuningConfig).sft:
        yield problem(cfg, "dpo", "is another kind of training than --sft", "remove one of them")
    for field in ("use_varlen_dataset", "fim_data"):
        if getattr(cfg.flat, field):
            yield problem(cfg, field, "is not supported with --dpo, which has its own data set", "remove one of them")
    if cfg.model.mtp_num_layers:
        reason = "is not supported with --dpo, whose loss has no further tokens"
        yield problem(cfg, "mtp_num_layers", reason, "remove it")
    if cfg.tokenizer.tokenizer_type == "NullTokenizer" and not cfg.data.mock_data:
        yield problem(cfg, "tokenizer_type", "has no text, which --dpo requires", "use HuggingFaceTokenizer")
    if cfg.documents.eod_mask_loss:
        yield problem(cfg, "eod_mask_loss", "contradicts --dpo, whose masks come from the completions", "remove it")
    if cfg.data.dataloader_type == "external":
        yield problem(cfg, "dpo", "contradicts --dataloader-type external", "remove one of them")
    if preferences.dpo_label_smoothing and preferences.dpo_loss != "sigmoid":
        reason = f"is defined for --dpo-loss sigmoid, not {preferences.dpo_loss}"
        yield problem(cfg, "dpo_label_smoothing", reason, "remove one of them")


def preference_reference_exists(cfg: Settings) -> Problems:
    """Require weights of the reference model."""
    preferences, checkpoint = cfg.group(PreferenceConfig), cfg.checkpoint
    if not preferences.dpo:
        return
    if preferences.dpo_reference == "base":
        if cfg.group(LoraConfig).lora_rank is None:
            reason = "base is the model below adapters, which requires --lora-rank"
            yield problem(cfg, "dpo_reference", reason, "add --lora-rank, or use model")
        if preferences.dpo_reference_load is not None:
            reason = "contradicts --dpo-reference base, whose weights are those below the adapters"
            yield problem(cfg, "dpo_reference_load", reason, "remove one of them")
    elif not (preferences.dpo_reference_load or checkpoint.load_hf or checkpoint.pretrained_checkpoint):
        reason = "compares with a reference model, and none is given"
        yield problem(cfg, "dpo", reason, "add --load-hf, --pretrained-checkpoint or --dpo-reference-load FOLDER")
