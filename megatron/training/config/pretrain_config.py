"""All settings of a pretraining run in one flat object: ``cfg.hidden_size``, ``cfg.train_iters``, ``cfg.save`` ..."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.core.config.cli import derived
from megatron.core.config.model_parallel_config import parameter_dtype
from megatron.core.config.optimizer import MixedPrecisionConfig, RegularizationConfig
from megatron.core.config.optional import (
    CustomLayersConfig,
    DocumentConfig,
    MaskedDataConfig,
    OptionalGroup,
    RopeScalingConfig,
    UpcyclingConfig,
)
from megatron.core.config.tokenizer import TokenizerConfig
from megatron.core.config.transformer_config import ModelSettings
from megatron.core.description.model import ModelDescription
from megatron.core.models import registry
from megatron.core.models.bert.family import BertConfig
from megatron.core.models.family import ModelFamily
from megatron.core.models.t5.family import EncoderDecoderConfig
from megatron.training.config.checkpointing import CheckpointConfig
from megatron.training.config.data import DataConfig
from megatron.training.config.distributed import DistributedConfig
from megatron.training.config.learning_rate import LearningRateConfig
from megatron.training.config.logging import LoggingConfig
from megatron.training.config.network import ModelConfig
from megatron.training.config.program import ProgramConfig, SelfCheckConfig
from megatron.training.config.training import ProfilingConfig, TrainingConfig
from megatron.training.config.validation import ValidationConfig

if TYPE_CHECKING:
    import torch


@dataclass(kw_only=True)
class PretrainConfig(
    ProgramConfig,
    ModelSettings,
    ModelConfig,
    RopeScalingConfig,
    CustomLayersConfig,
    BertConfig,
    EncoderDecoderConfig,
    TrainingConfig,
    RegularizationConfig,
    MixedPrecisionConfig,
    LearningRateConfig,
    DataConfig,
    DocumentConfig,
    MaskedDataConfig,
    TokenizerConfig,
    ValidationConfig,
    CheckpointConfig,
    UpcyclingConfig,
    LoggingConfig,
    SelfCheckConfig,
    ProfilingConfig,
    DistributedConfig,
):
    """All settings of a run. Frozen; ``resolve`` returns a copy with the derived settings filled in."""

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
    """True once ``resolve`` made this object; it accepts no assignment then."""

    @property
    def family(self) -> ModelFamily:
        """The model family: description, rules, task, data set and more."""
        return registry.get_family(self.model_family)

    def describe(self, vocab_size: int) -> ModelDescription:
        """Return the description of the model; torch-free unless --spec is set. ``vocab_size`` is unpadded, 0 if
        unknown."""
        return self.family.describe(self, vocab_size)

    @property
    def foreign_groups(self) -> list[type[OptionalGroup]]:
        """Optional groups of flags that the model family does not have."""
        return [group for group in optional_groups(type(self)) if group not in self.family.groups]

    @property
    def params_dtype(self) -> torch.dtype:
        """torch dtype of the parameters; imports torch."""
        return parameter_dtype(fp16=self.fp16, bf16=self.bf16, fp64=self.fp64)

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("resolved"):
            raise AttributeError(f"the configuration is frozen: {name} cannot be set to {value!r} any more")
        super().__setattr__(name, value)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            try:
                return self.__dict__["extra"][name]
            except KeyError:
                raise AttributeError(f"there is no setting {name!r}") from None



def optional_groups(kind: type[PretrainConfig]) -> list[type[OptionalGroup]]:
    """Return the optional groups of flags among the bases of ``kind``, in the order of ``--help``."""
    return [group for group in kind.__mro__ if issubclass(group, OptionalGroup) and OptionalGroup in group.__bases__]


@functools.cache
def config_class(model_family: str) -> type[PretrainConfig]:
    """Return the class of a family's settings: :class:`PretrainConfig`, with the family's own groups of flags if it has
    any. Raises UserError for an unknown family."""
    own = tuple(group for group in registry.get_family(model_family).groups if not issubclass(PretrainConfig, group))
    if not own:
        return PretrainConfig
    members = {"__reduce__": lambda self: (_restored, (model_family, vars(self))), "__doc__": PretrainConfig.__doc__}
    return dataclass(kw_only=True)(type(PretrainConfig.__name__, (PretrainConfig, *own), members))


def _restored(model_family: str, values: dict[str, Any]) -> PretrainConfig:
    """Return unpickled settings of :func:`config_class`, which pickle cannot find by name."""
    kind = config_class(model_family)
    cfg = kind.__new__(kind)
    vars(cfg).update(values)
    return cfg
