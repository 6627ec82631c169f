"""Settings as command lines, YAML files, checkpoints and ``get_args()`` hold them: one flat object."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from megatron.core.config.cli import derived
from megatron.core.config.lora import LoraConfig
from megatron.core.config.model_settings import ModelSettings
from megatron.core.config.muon import MuonConfig
from megatron.core.config.optimizer import MixedPrecisionConfig, RegularizationConfig
from megatron.core.config.optional import (
    CustomLayersConfig,
    DocumentConfig,
    FillInTheMiddleConfig,
    MaskedDataConfig,
    OptionalGroup,
    RopeScalingConfig,
    UpcyclingConfig,
    VariableLengthConfig,
)
from megatron.core.config.preferences import PreferenceConfig
from megatron.core.config.sft import FineTuningConfig
from megatron.core.config.tokenizer import TokenizerConfig
from megatron.core.models import registry
from megatron.core.models.bert.config import BertConfig
from megatron.core.models.family import ModelFamily
from megatron.core.models.t5.config import EncoderDecoderConfig
from megatron.training.config.checkpointing import CheckpointConfig
from megatron.training.config.data import DataConfig
from megatron.training.config.distributed import DistributedConfig
from megatron.training.config.learning_rate import LearningRateConfig
from megatron.training.config.logging import LoggingConfig
from megatron.training.config.network import ModelConfig
from megatron.training.config.program import ProgramConfig, SelfCheckConfig
from megatron.training.config.training import ProfilingConfig, TrainingConfig
from megatron.training.config.validation import ValidationConfig


@dataclass(kw_only=True)
class FlatConfig(
    ProgramConfig,
    ModelSettings,
    ModelConfig,
    RopeScalingConfig,
    CustomLayersConfig,
    BertConfig,
    EncoderDecoderConfig,
    TrainingConfig,
    RegularizationConfig,
    MuonConfig,
    MixedPrecisionConfig,
    LearningRateConfig,
    DataConfig,
    DocumentConfig,
    VariableLengthConfig,
    FillInTheMiddleConfig,
    MaskedDataConfig,
    TokenizerConfig,
    ValidationConfig,
    CheckpointConfig,
    UpcyclingConfig,
    LoraConfig,
    FineTuningConfig,
    PreferenceConfig,
    LoggingConfig,
    SelfCheckConfig,
    ProfilingConfig,
    DistributedConfig,
):
    """All settings of a run by the names of their fields, as parsed. ``resolve`` makes a
    :class:`~megatron.training.config.pretrain_config.PretrainConfig` of them, which holds the complete values as
    ``flat``."""

    world_size: int = derived(1)
    """Ranks of the run."""

    data_parallel_size: int = derived(1)
    """World size / (TP x PP x CP)."""

    explicit: frozenset[str] = derived(frozenset())
    """Fields that the command line or the YAML file set."""

    extra: dict[str, Any] = derived(factory=dict)
    """Values of flags that an entry script added or that have no effect; also readable as attributes."""

    model_family: str = derived(factory=registry.default_family)
    """Name of the model family."""

    needs_data: bool = derived(True)
    """False for entry scripts with custom data sets and tokenizers: no rule requires data flags."""

    resolved: bool = derived(False)
    """Whether derived settings are filled in; part of the settings that checkpoints store."""

    @property
    def family(self) -> ModelFamily:
        """The model family: description, rules, task, data set and more."""
        return registry.get_family(self.model_family)

    @property
    def flat(self) -> FlatConfig:
        """These settings: helpers of rules take flat and composed configurations."""
        return self

    def values(self) -> dict[str, Any]:
        """Return the value of every field."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def foreign_groups(self) -> list[type[OptionalGroup]]:
        """Optional groups of flags that the model family does not have."""
        return [group for group in optional_groups(type(self)) if group not in self.family.groups]

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            try:
                return self.__dict__["extra"][name]
            except KeyError:
                raise AttributeError(f"there is no setting {name!r}") from None


def optional_groups(kind: type[FlatConfig]) -> list[type[OptionalGroup]]:
    """Return the optional groups of flags among the bases of ``kind``, in the order of ``--help``."""
    return [group for group in kind.__mro__ if issubclass(group, OptionalGroup) and OptionalGroup in group.__bases__]


@functools.cache
def flat_class(model_family: str) -> type[FlatConfig]:
    """Return the class of a family's flat settings: :class:`FlatConfig`, with the family's own groups of flags if it
    has any. Raises UserError for an unknown family."""
    own = tuple(group for group in registry.get_family(model_family).groups if not issubclass(FlatConfig, group))
    if not own:
        return FlatConfig
    members = {"__reduce__": lambda self: (_restored, (model_family, vars(self))), "__doc__": FlatConfig.__doc__}
    return dataclass(kw_only=True)(type(FlatConfig.__name__, (FlatConfig, *own), members))


def _restored(model_family: str, values: dict[str, object]) -> FlatConfig:
    """Return unpickled settings of :func:`flat_class`, which pickle cannot find by name."""
    kind = flat_class(model_family)
    flat = kind.__new__(kind)
    vars(flat).update(values)
    return flat
