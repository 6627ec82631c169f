"""Settings of the frozen models that flags of GPT ask for. Torch-free unless there is one."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.core.config.distillation import TEACHER, DistillationConfig
from megatron.training.checkpoint.reference_settings import reference_companions
from megatron.training.config.pretrain_config import PretrainConfig


def frozen_models(cfg: PretrainConfig) -> Mapping[str, PretrainConfig]:
    """Return the settings of the frozen models that flags of GPT ask for, by name: the teacher of distillation, the
    reference of --dpo. Raises UserError if a folder holds no complete model."""
    folder = cfg.group(DistillationConfig).export_kd_teacher_load
    if folder is None:
        return reference_companions(cfg)
    from megatron.training.checkpoint.companion_settings import load_companion_config  # imports torch

    teacher = load_companion_config(cfg, folder, flag="--export-kd-teacher-load")
    # checkpoints have no padding: equal padding gives equal slices of the vocabulary
    return {TEACHER: teacher.with_settings(make_vocab_size_divisible_by=cfg.embeddings.make_vocab_size_divisible_by)}
