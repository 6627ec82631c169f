"""A GPT that learns the next-token distribution of a frozen teacher. Torch-free."""

from dataclasses import dataclass, replace

from megatron.core.config.optional import OptionalGroup
from megatron.core.models.family import Program
from megatron.core.models.registry import get_family


@dataclass(kw_only=True)
class TeacherConfig(OptionalGroup):
    """Teacher"""

    teacher: str | None = None
    """Folder of the teacher."""


GPT = get_family("gpt")
FAMILY = replace(
    GPT,
    name=__name__,
    is_default=False,
    programs=(Program("distill", "students"),),
    task="tests.test_utils.toy_distillation.task:DistillationTask",
    groups=(*GPT.groups, TeacherConfig),
    companions="tests.test_utils.toy_distillation.task:companions",
    tokenizer_type="NullTokenizer",
)
