"""All settings of a pretraining run in one flat object: ``cfg.hidden_size``, ``cfg.train_iters``, ``cfg.save`` ..."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.core.config.cli import derived
from megatron.core.config.model_parallel_config import parameter_dtype
from megatron.core.config.optimizer import MixedPrecisionConfig, RegularizationConfig
from megatron.core.config.tokenizer import TokenizerConfig
from megatron.core.config.transformer_config import ModelSettings
from megatron.training.config.checkpointing import CheckpointConfig
from megatron.training.config.data import DataConfig, MaskedDataConfig
from megatron.training.config.distributed import DistributedConfig
from megatron.training.config.learning_rate import LearningRateConfig
from megatron.training.config.logging import LoggingConfig
from megatron.training.config.network import EncoderDecoderConfig, ModelConfig
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
    EncoderDecoderConfig,
    TrainingConfig,
    RegularizationConfig,
    MixedPrecisionConfig,
    LearningRateConfig,
    DataConfig,
    MaskedDataConfig,
    TokenizerConfig,
    ValidationConfig,
    CheckpointConfig,
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

    model_family: str = derived("gpt")
    """Model family that selects description, rules and notices: ``gpt``, ``bert`` or ``t5``."""

    needs_data: bool = derived(True)
    """False for entry scripts with custom data sets and tokenizers: no rule requires data flags."""

    resolved: bool = derived(False)
    """True once ``resolve`` made this object; it accepts no assignment then."""

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


GROUPS: tuple[type, ...] = tuple(group for group in PretrainConfig.__mro__[1:] if "__annotations__" in vars(group))
"""The groups of flags in the order of ``--help``."""
