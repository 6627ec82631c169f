"""Pipeline stage of a trained model together with the same stage of frozen models (teacher, reference).

The frozen stages run in the schedule of the trained model, directly before its stage, so that their outputs reach the
loss on the last stage in every layout. A message holds the trained model's tensors, then those of the frozen models,
which receive no gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.pipeline_parallel.p2p import Message
from megatron.core.pipeline_parallel.stage_model import message_shapes, output_tensors, set_input, unwrapped


class PairedOutput(NamedTuple):
    """Outputs of the last stage."""

    trained: Any
    frozen: Mapping[str, Any]
    """Outputs of the frozen models by name; they require no gradient."""


class PairedStage(nn.Module):
    """Chunk of the trained model with the same chunk of frozen models. ``parameters``, ``train`` and ``state_dict``
    concern the trained chunk only.

    Args:
        trained: chunk with its data-parallel wrapper.
        frozen: chunks of the frozen models by name.
        groups: this rank's process groups.
        is_last: whether the chunk is the last pipeline stage."""

    def __init__(
        self, trained: nn.Module, frozen: Mapping[str, nn.Module], groups: ProcessGroups, *, is_last: bool
    ) -> None:
        super().__init__()
        self.trained, self.groups, self.is_last = trained, groups, is_last
        # a plain dict registers no submodules: train() would otherwise switch on the dropout of frozen models
        self.frozen = dict(frozen)
        self._message_sizes = [len(shapes) for shapes in self._shapes((1, 1), 1)]
        self._inputs: list[Message | None] = [None] * len(self._message_sizes)

    @property
    def config(self) -> Any:
        """Configuration of the trained model, which selects the schedule."""
        return unwrapped(self.trained).config

    @property
    def num_frozen_tensors(self) -> int:
        """Number of tensors at the end of a message that belong to frozen models."""
        return sum(self._message_sizes[1:])

    def _shapes(self, lengths: tuple[int, int | None], micro_batch_size: int) -> list[Sequence[tuple[int, ...]]]:
        models = map(unwrapped, (self.trained, *self.frozen.values()))
        return [message_shapes(model, self.groups, lengths, micro_batch_size) for model in models]

    def message_shapes(self, lengths: tuple[int, int | None], micro_batch_size: int) -> list[tuple[int, ...]]:
        """Return the shapes of the tensors of all models, in the order of a message (see ``StageModel``)."""
        return [shape for shapes in self._shapes(lengths, micro_batch_size) for shape in shapes]

    def set_input_tensor(self, message: Message | None) -> None:
        """Keep each model's part of the previous stage's output for ``forward``; None releases it."""
        ends = list(accumulate(self._message_sizes))
        parts = zip([0, *ends], ends)
        self._inputs = [None if message is None else message[start:end] for start, end in parts]
        if message is None:
            for chunk in (self.trained, *self.frozen.values()):
                set_input(chunk, None)

    def no_sync(self) -> AbstractContextManager:
        """Context without gradient reduction of the trained chunk."""
        return getattr(self.trained, "no_sync", nullcontext)()

    def forward(
        self, *args: Any, frozen_arguments: Mapping[str, Mapping[str, Any]] | None = None, **kwargs: Any
    ) -> PairedOutput | tuple[Tensor, ...]:
        """Run the frozen chunks without gradients, then the trained chunk, all with the same arguments. Return the
        outputs on the last stage, else the message to the next stage.

        Args:
            frozen_arguments: keyword arguments by the name of a frozen model, which replace all others for it, if its
                ``forward`` differs."""
        outputs, special = {}, frozen_arguments or {}
        with torch.no_grad():
            # each input directly before its pass: a frozen model may compute with the modules of the trained one
            for (name, chunk), part in zip(self.frozen.items(), self._inputs[1:]):
                set_input(chunk, part)
                outputs[name] = chunk(**special[name]) if name in special else chunk(*args, **kwargs)
        set_input(self.trained, self._inputs[0])
        trained = self.trained(*args, **kwargs)
        if self.is_last:
            return PairedOutput(trained, outputs)
        return tuple(tensor for output in (trained, *outputs.values()) for tensor in output_tensors(output))


def trained_chunk(chunk: nn.Module) -> nn.Module:
    """Return the trained chunk of a :class:`PairedStage`; other modules as they are."""
    return chunk.trained if isinstance(chunk, PairedStage) else chunk
