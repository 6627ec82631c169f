"""Kind of reference that follows from --dpo, and rules of preference pairs."""

from __future__ import annotations

from megatron.core.config.lora import LoraConfig
from megatron.core.config.optional import used_fields
from megatron.core.config.preferences import PreferenceConfig
from megatron.core.config.problems import Problems, Settings, problem


def derived(flat: Settings) -> dict[str, object]:
    """Return the kind of reference, unless it is set."""
    if not flat.dpo or flat.dpo_reference is not None:
        return {}
    return {"dpo_reference": "model" if flat.lora_rank is None or flat.dpo_reference_load else "base"}


def preference_flags_require_dpo(cfg: Settings) -> Problems:
    """Reject settings of preference pairs without --dpo."""
    preferences = cfg.group(PreferenceConfig)
    if not preferences.dpo:
        for field in used_fields(PreferenceConfig, preferences):
            yield problem(cfg, field, "has no effect without --dpo", "add --dpo, or remove this flag")


def preference_conflicts(cfg: Settings) -> Problems:
    """Reject --dpo with further losses, and options of one loss with another."""
    preferences = cfg.group(PreferenceConfig)
    if preferences.dpo and cfg.model.mtp_num_layers:
        yield problem(cfg, "mtp_num_layers", "is not supported with --dpo: its loss has no further tokens", "remove it")
    if preferences.dpo_label_smoothing and preferences.dpo_loss != "sigmoid":
        reason = f"is defined for --dpo-loss sigmoid, not {preferences.dpo_loss}"
        yield problem(cfg, "dpo_label_smoothing", reason, "remove one of them")


def preference_reference_exists(cfg: Settings) -> Problems:
    """Require weights of the reference model."""
    preferences, checkpoint = cfg.group(PreferenceConfig), cfg.checkpoint
    if not preferences.dpo:
        return
    if preferences.dpo_reference == "stored" and cfg.data.mock_data:
        yield problem(cfg, "dpo_reference", "stored requires data files, not --mock-data", "use model")
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
