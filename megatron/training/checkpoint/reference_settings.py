"""Settings of the reference model of --dpo. Torch-free unless there is one."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.core.config.preferences import REFERENCE, PreferenceConfig
from megatron.training.config.pretrain_config import PretrainConfig


def reference_companions(cfg: PretrainConfig) -> Mapping[str, PretrainConfig]:
    """Return the settings of the frozen reference model of --dpo by name; empty if there is none. Raises UserError if
    its folder holds no complete model."""
    preferences = cfg.group(PreferenceConfig)
    reference = reference_settings(cfg) if preferences.dpo and preferences.dpo_reference == "model" else None
    return {} if reference is None else {REFERENCE: reference}


def reference_settings(cfg: PretrainConfig) -> PretrainConfig | None:
    """Return the settings of the reference model; None if no folder names it. Raises UserError as above."""
    preferences = cfg.group(PreferenceConfig)
    from megatron.training.checkpoint.companion_settings import load_companion_config  # imports torch

    sources = {
        "--dpo-reference-load": preferences.dpo_reference_load,
        "--load-hf": cfg.checkpoint.load_hf,
        "--pretrained-checkpoint": cfg.checkpoint.pretrained_checkpoint,
    }
    for flag, folder in sources.items():
        if folder:
            return load_companion_config(cfg, folder, flag=flag)
    return None  # a rule reports it
