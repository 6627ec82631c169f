"""Settings by the names of their fields, as command lines, YAML files, checkpoints and ``get_args()`` have them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from megatron.core.config.cli import FlagSpec, derived, group_flags
from megatron.core.config.distillation import DistillationConfig
from megatron.core.config.groups import FlagGroup
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
    PackedSamplesConfig,
    RopeScalingConfig,
    UpcyclingConfig,
    VariableLengthConfig,
)
from megatron.core.config.preferences import PreferenceConfig
from megatron.core.config.quantization import QuantizationConfig
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
class RunFacts(FlagGroup):
    """Facts about a run that are no flags."""

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


@dataclass(init=False, eq=False, repr=False)
class FlatConfig(
    RunFacts,
    ProgramConfig,
    ModelSettings,
    ModelConfig,
    RopeScalingConfig,
    CustomLayersConfig,
    BertConfig,
    PackedSamplesConfig,
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
    QuantizationConfig,
    FineTuningConfig,
    PreferenceConfig,
    DistillationConfig,
    LoggingConfig,
    SelfCheckConfig,
    ProfilingConfig,
    DistributedConfig,
):
    """View of a mapping field -> value with all settings of a run, read-only. The mapping also has the fields of groups
    that only the run's model family has; its custom flags (``extra``) can be read as attributes too."""

    def __init__(self, **values: object) -> None:
        """Settings with these values, of the default family unless ``model_family`` is given, others at their defaults.
        Raises TypeError for an unknown name, UserError for an unknown family."""
        family = str(values.get("model_family") or registry.default_family())
        defaults = {
            name: field.default if field.default_factory is MISSING else field.default_factory()
            for name, field in _fields(family).items()
        }
        vars(self).update(defaults, frozen=True)
        self._update(values)

    def _update(self, values: Mapping[str, object]) -> None:
        if unknown := [name for name in values if name not in vars(self)]:
            raise TypeError(f"there is no setting {unknown[0]!r}")
        vars(self).update(values)

    def with_settings(self, **changes: object) -> FlatConfig:
        """Return a copy with other values for these fields. Raises TypeError for an unknown name."""
        other = copy.copy(self)
        other._update(changes)
        return other

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FlatConfig) and vars(self) == vars(other)

    @property
    def flags(self) -> Mapping[str, FlagSpec]:
        """Flags of the family's programs by field, in the order of ``--help``."""
        return flags_by_field(self.model_family)

    def values(self) -> dict[str, Any]:
        """Return the value of every field."""
        return {name: value for name, value in vars(self).items() if name != "frozen"}

    @property
    def foreign_groups(self) -> list[type[OptionalGroup]]:
        """Optional groups of flags that the model family does not have."""
        return [group for group in optional_groups(self.model_family) if group not in self.family.groups]

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            try:
                return self.__dict__["extra"][name]
            except KeyError:
                raise AttributeError(f"there is no setting {name!r}") from None


@functools.cache
def groups_of(model_family: str) -> tuple[type, ...]:
    """Return the groups of flags of a family's programsin the order of ``--help``. UserError for an unknown family."""
    own = (kind for group in registry.get_family(model_family).groups for kind in group.__mro__)
    return tuple(kind for kind in dict.fromkeys((*FlatConfig.__mro__[1:], *own)) if is_dataclass(kind))


def optional_groups(model_family: str) -> list[type[OptionalGroup]]:
    """Return the optional groups among :func:`groups_of`."""
    return [group for group in groups_of(model_family) if OptionalGroup in group.__bases__]  # type: ignore[misc]


@functools.cache
def flags_by_field(model_family: str) -> Mapping[str, FlagSpec]:
    """Return the flags of a family's programs by field, in the order of ``--help``."""
    return {spec.field: spec for spec in group_flags(*groups_of(model_family))}


@functools.cache
def _fields(model_family: str) -> dict[str, Field[Any]]:
    return {field.name: field for kind in reversed(groups_of(model_family)) for field in fields(kind)}
