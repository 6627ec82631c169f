"""Model transforms: changes of a built model from outside, such as adapters on frozen weights. Torch-free.

A group of flags names the function that makes its transform (``OptionalGroup.TRANSFORM``). A transform says how it
changes the built module, the description of the model, and the contents of checkpoints. Families, layers and the
training loop know no transform."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, ClassVar

from megatron.core.description.model import ModelDescription

if TYPE_CHECKING:
    from torch import nn

    from megatron.core.groups.process_groups import ProcessGroups


class ModelTransform:
    """One change of a model. A subclass overrides what it changes; the defaults change nothing."""

    reads_base: ClassVar[bool] = False
    """Whether tensors that checkpoints of the run do not contain come from --load-hf or --pretrained-checkpoint at each
    start. False: they are initial values, functions of the seed."""

    def apply(self, model: nn.Module, groups: ProcessGroups) -> None:
        """Change a built chunk in place: add modules, wrap products, set ``requires_grad``. Runs on every rank before
        data parallelism and the optimizer see the model, without collectives. New parameters need a ``spec`` and
        initial values that do not depend on the layout (``placement.fill_parameter``)."""

    def describe(self, model: ModelDescription) -> ModelDescription:
        """Return the description of the changed model: parameters added or frozen, operations, settings."""
        return model

    def stores(self, name: str) -> bool:
        """Return whether checkpoints of the run contain the tensor with this global name."""
        return True

    def merge(self, model: nn.Module) -> None:
        """Fold the change into the weights, so that a complete chunk has plain layers, for inference. Collective."""

    def disabled(self, model: nn.Module) -> AbstractContextManager:
        """Context in which a chunk computes as before :meth:`apply`. Required of transforms that read a base."""
        return nullcontext()

    def base_loaded(self, model: nn.Module, groups: ProcessGroups) -> None:
        """Complete a chunk whose base weights were just loaded, such as values that depend on them. Collective."""
