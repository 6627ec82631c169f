"""Settings of knowledge distillation. Only fields, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.core.config.cli import flag
from megatron.core.config.optional import OptionalGroup
from megatron.core.config.ranges import NonNegativeFloat, PositiveFloat

TEACHER = "teacher"
"""Name of the teacher among the frozen models of a run."""


@dataclass(kw_only=True)
class DistillationConfig(OptionalGroup):
    """Knowledge distillation"""

    export_kd_teacher_load: str | None = None
    """Folder of a teacher, a --save directory or a Hugging Face folder: train on its next-token distributions. Its
    size and family may differ, its vocabulary may not."""

    export_kd_cfg: str | None = flag("--export-kd-cfg", "--export-kd-distill-cfg", metavar="FILE")
    """YAML file of ModelOpt with skip_lm_loss, kd_loss_scale and logit_kl_temperature. Flags win over its values."""

    kd_loss: Literal["forward-kl", "reverse-kl"] = "forward-kl"
    """Divergence: KL(teacher, student), or KL(student, teacher). Times the square of --kd-temperature."""

    kd_temperature: PositiveFloat = 1.0
    """Divisor of both models' logits."""

    kd_loss_scale: PositiveFloat = 1.0
    """Factor of the divergence in the loss."""

    kd_lm_loss_weight: NonNegativeFloat = 0.0
    """Factor of the language-model loss in the loss, to which the divergence is added."""
