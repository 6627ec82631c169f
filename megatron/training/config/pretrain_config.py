"""The configuration of a run, composed of groups: ``cfg.model.hidden_size``, ``cfg.training.train_iters``."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_type_hints

from megatron.core.config.groups import FlagGroup, Group, frozen_group
from megatron.core.config.model_settings import ModelSettings
from megatron.core.config.optimizer import OptimizerConfig
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
from megatron.core.config.tokenizer import TokenizerConfig
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.description.model import ModelDescription, frozen
from megatron.core.models.transforms import ModelTransform
from megatron.training.config.checkpointing import CheckpointConfig
from megatron.training.config.data import DataConfig
from megatron.training.config.distributed import DistributedConfig
from megatron.training.config.flat import FlatConfig, RunFacts, optional_groups
from megatron.training.config.learning_rate import LearningRateConfig
from megatron.training.config.logging import LoggingConfig
from megatron.training.config.network import ModelConfig
from megatron.training.config.program import ProgramConfig, SelfCheckConfig
from megatron.training.config.training import ProfilingConfig, TrainingConfig
from megatron.training.config.validation import ValidationConfig


@dataclass(kw_only=True)
class PretrainConfig(RunFacts):
    """All settings of a run, frozen: as parsed, or with their final values, by ``resolve``.

    ``model`` and ``optimizer`` are the library's configurations, which layers and optimizers are built from. Values may
    contradict each other until the rules have passed."""

    flat: FlatConfig
    """The same values by field, for messages, checkpoints, ``get_args()``, and code that loops over names."""

    program: ProgramConfig
    model: TransformerConfig
    embeddings: ModelConfig
    rope_scaling: RopeScalingConfig
    custom_layers: CustomLayersConfig
    training: TrainingConfig
    optimizer: OptimizerConfig
    schedule: LearningRateConfig
    data: DataConfig
    documents: DocumentConfig
    variable_lengths: VariableLengthConfig
    fill_in_the_middle: FillInTheMiddleConfig
    masked_data: MaskedDataConfig
    tokenizer: TokenizerConfig
    validation: ValidationConfig
    checkpoint: CheckpointConfig
    upcycling: UpcyclingConfig
    logging: LoggingConfig
    checks: SelfCheckConfig
    profiling: ProfilingConfig
    distributed: DistributedConfig

    family_groups: Mapping[type[OptionalGroup], OptionalGroup]
    """Groups that model families define; :meth:`group` returns one."""

    def group(self, kind: type[Group]) -> Group:
        """Return the settings of a group that a model family defines."""
        return self.family_groups[kind]  # type: ignore[index, return-value]

    def describe(self, vocab_size: int) -> ModelDescription:
        """Return the description of the model; torch-free unless --spec is set. ``vocab_size`` is unpadded, 0 if
        unknown. Computed once: a start and a plan read it several times."""
        if vocab_size not in self._descriptions:
            self._descriptions[vocab_size] = self._describe(vocab_size)
        return self._descriptions[vocab_size]

    @functools.cached_property
    def _descriptions(self) -> dict[int, ModelDescription]:
        return {}

    def _describe(self, vocab_size: int) -> ModelDescription:
        model = self.family.describe(self, vocab_size)
        for transform in self.transforms:
            model = transform.describe(model)
        if not self.companions:
            return model
        sizes = ((other, max(vocab_size, other.tokenizer.vocab_size or 0)) for other in self.companions.values())
        others = (other.describe(size if vocab_size else 0).with_pieces(frozen) for other, size in sizes)
        return replace(model, companions=tuple(others))

    @functools.cached_property
    def transforms(self) -> tuple[ModelTransform, ...]:
        """Changes of the built model that groups of flags ask for, in order."""
        functions = [kind.TRANSFORM for kind in self.family.groups if kind.TRANSFORM]
        transforms = (pkgutil.resolve_name(function)(self) for function in functions)
        return tuple(transform for transform in transforms if transform is not None)

    @property
    def reads_base(self) -> bool:
        """Whether checkpoints of the run omit weights that come from --load-hf or --pretrained-checkpoint."""
        return any(transform.reads_base for transform in self.transforms)

    def stores(self, name: str) -> bool:
        """Return whether checkpoints of the run contain the model's tensor with this global name."""
        return all(transform.stores(name) for transform in self.transforms)

    @functools.cached_property
    def companions(self) -> Mapping[str, PretrainConfig]:
        """Settings of the frozen models next to the trained one, by name. May read their folders."""
        return pkgutil.resolve_name(self.family.companions)(self) if self.family.companions else {}

    def with_settings(self, **changes: Any) -> PretrainConfig:
        """Return a copy with other values for these fields; derived settings are not updated."""
        return compose(self.flat.with_settings(**changes))


@functools.cache
def _members() -> dict[str, type[FlagGroup]]:
    """Return the groups of :class:`PretrainConfig` by the names of their attributes."""
    kinds = get_type_hints(PretrainConfig).items()
    groups = {name: kind for name, kind in kinds if isinstance(kind, type) and issubclass(kind, FlagGroup)}
    del groups["flat"]
    return groups


def compose(flat: FlatConfig) -> PretrainConfig:
    """Return the configuration of a run with the values of ``flat``. Contradictions pass."""
    values = vars(flat)
    members = {name: frozen_group(kind, values) for name, kind in _members().items()}
    shared = {*_members().values(), *ModelSettings.__mro__}
    others = {kind: frozen_group(kind, values) for kind in optional_groups(flat.model_family) if kind not in shared}
    return frozen_group(PretrainConfig, {**values, **members, "family_groups": others, "flat": flat})
