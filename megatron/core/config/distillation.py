"""Settings of knowledge distillation. Only fields, no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron.core.config.cli import flag
from megatron.core.config.optional import OptionalGroup
from megatron.core.config.ranges import NonNegativeFloat, PositiveFloat, PositiveInt

TEACHER = "teacher"
"""Name of the teacher among the frozen models of a run."""

_PAIR = re.compile(r"([1-9]\d*|final):([1-9]\d*|final)(?::(cosine|mse))?")


class LayerPair(NamedTuple):
    """Layers of both models, from 1, whose outputs are compared; None: the output of the final norm."""

    student: int | None
    teacher: int | None
    loss: str = "cosine"

    def __str__(self) -> str:
        return f"{self.student or 'final'}:{self.teacher or 'final'}:{self.loss}"


def layer_pair(text: str) -> LayerPair:
    """Return the pair in ``text``, such as 2:4, 2:4:mse or final:final. Raises ValueError."""
    if not (match := _PAIR.fullmatch(text)):
        raise ValueError("must be STUDENT:TEACHER[:cosine|mse] with layers from 1 or final, such as 2:4:mse")
    student, teacher = (None if name == "final" else int(name) for name in match.groups()[:2])
    return LayerPair(student, teacher, match[3] or "cosine")


@dataclass(kw_only=True)
class DistillationConfig(OptionalGroup):
    """Knowledge distillation"""

    export_kd_teacher_load: str | None = None
    """Folder of a teacher, a --save directory or a Hugging Face folder: train on its next-token distributions. Its
    size and family may differ, its vocabulary may not."""

    logits_save_dir: str | None = None
    """New folder for the largest log-probabilities of the model of this run, of every training sample; then stop."""

    logits_save_top_k: PositiveInt | None = None
    """Log-probabilities of a token to store with --logits-save-dir."""

    logits_save_dtype: Literal["fp16", "bf16", "fp32"] = "fp16"
    """Format of stored log-probabilities."""

    logits_load_dir: str | None = None
    """Folder of --logits-save-dir: train on its distributions, over their entries only, instead of a teacher's."""

    export_kd_cfg: str | None = flag("--export-kd-cfg", "--export-kd-distill-cfg", metavar="FILE")
    """YAML file of ModelOpt with intermediate_layer_pairs, kd_loss_alpha (or skip_lm_loss and kd_loss_scale) and
    logit_kl_temperature. Flags win over its values."""

    kd_loss: Literal["forward-kl", "reverse-kl"] = "forward-kl"
    """Divergence: KL(teacher, student), or KL(student, teacher). Times the square of --kd-temperature."""

    kd_temperature: PositiveFloat = 1.0
    """Divisor of both models' logits."""

    kd_loss_scale: PositiveFloat = 1.0
    """Factor of the divergence in the loss."""

    kd_lm_loss_weight: NonNegativeFloat = 0.0
    """Factor of the language-model loss in the loss, to which the divergence is added."""

    kd_layer_pairs: list[str] | None = flag(nargs="+", metavar="STUDENT:TEACHER[:LOSS]")
    """Layers whose outputs are compared too: numbers from 1, or final (after the final norm); loss: cosine (default) or
    mse. The mean over the pairs is added."""

    kd_layer_loss_scale: PositiveFloat = 1.0
    """Factor of the loss of --kd-layer-pairs in the loss."""

    @property
    def layer_pairs(self) -> list[LayerPair]:
        """Pairs of --kd-layer-pairs. Raises ValueError."""
        return list(map(layer_pair, self.kd_layer_pairs or ()))

    @property
    def distills(self) -> bool:
        """Whether the run trains on a teacher's distributions."""
        return self.export_kd_teacher_load is not None or self.logits_load_dir is not None
