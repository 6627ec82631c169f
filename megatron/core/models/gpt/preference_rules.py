"""Kind of reference that follows from --dpo, and rules of preference pairs."""

from __future__ import annotations

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
