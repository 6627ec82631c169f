"""The base of a transformed model (LoRA) as a frozen model next to it: the same weights, without the transform."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from torch import nn

from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.models.transforms import ModelTransform
from megatron.core.pipeline_parallel import stage_model
from megatron.core.pipeline_parallel.p2p import Message


class BaseStage(nn.Module):
    """Chunk of a base, in evaluation mode. It computes with the trained chunk without transforms."""

    def __init__(self, trained: nn.Module, transforms: Sequence[ModelTransform], groups: ProcessGroups) -> None:
        super().__init__()
        self._trained = [trained]  # in a list, so that its parameters are not registered again
        self.transforms, self.groups = transforms, groups

    def set_input_tensor(self, message: Message | None) -> None:
        """Pass the previous stage's output to the chunk, until the trained model gets its own."""
        stage_model.set_input(self._trained[0], message)

    def message_shapes(self, lengths: tuple[int, int | None], micro_batch_size: int) -> Sequence[tuple[int, ...]]:
        """Return the shapes of the trained chunk."""
        model = stage_model.unwrapped(self._trained[0])
        return stage_model.message_shapes(model, self.groups, lengths, micro_batch_size)

    def forward(self, *args: object, **kwargs: object) -> object:
        """Return the output of the chunk without its transforms and without dropout."""
        trained = self._trained[0]
        was_training = trained.training
        trained.eval()
        try:
            with ExitStack() as stack:
                for transform in self.transforms:
                    stack.enter_context(transform.disabled(stage_model.unwrapped(trained)))
                return trained(*args, **kwargs)
        finally:
            trained.train(was_training)
