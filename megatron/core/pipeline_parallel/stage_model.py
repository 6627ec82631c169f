"""Model chunks as the pipeline runtime sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from megatron.core.config.model_parallel_config import ModelParallelConfig
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.pipeline_parallel.p2p import Message
from megatron.core.tensor_parallel.linear import WeightGradientStore


class StageModel(Protocol):
    """Methods of the module inside a chunk's wrappers. A program's own model may lack both: ``set_input_tensor`` is
    needed on later stages, ``message_shapes`` if stages exchange other tensors than hidden states [s, b, h]."""

    config: ModelParallelConfig

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Store the previous stage's output for the next ``forward``: a tensor, a tuple, or None to release it."""

    def message_shapes(self, lengths: tuple[int, int | None], micro_batch_size: int) -> Sequence[tuple[int, ...]]:
        """Shapes of the tensors between stages. ``lengths``: (encoder's or only length, decoder's or None)."""
        ...


@runtime_checkable
class DefersWeightGradients(Protocol):
    """Layer that puts its weight gradients into ``weight_gradient_store``, if set, instead of computing them."""

    weight_gradient_store: WeightGradientStore | None


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the model inside all wrappers (data-parallel, ``Float16Module``), following ``.module``."""
    while isinstance(inner := getattr(module, "module", None), nn.Module):
        module = inner
    return module


def set_input(chunk: nn.Module, message: Message | None) -> None:
    """Pass the previous stage's output to ``set_input_tensor`` of the model inside ``chunk``: one tensor, or a tuple of
    several; None clears it. Raises ValueError if there is a message but the model has no ``set_input_tensor``."""
    model: object = unwrapped(chunk)
    receive = getattr(model, "set_input_tensor", None)
    if receive is not None:
        receive(message[0] if message is not None and len(message) == 1 else message)
    elif message is not None:
        raise ValueError(f"{type(model).__name__} is a later pipeline stage: it needs set_input_tensor(tensor)")


def output_tensors(output: Tensor | Sequence[Tensor]) -> Message:
    """Return the tensors of a stage's output, which is a tensor or a tuple of tensors and None (skipped)."""
    return (output,) if isinstance(output, Tensor) else tuple(tensor for tensor in output if tensor is not None)


def message_shapes(
    model: Any, groups: ProcessGroups, lengths: tuple[int, int | None], micro_batch_size: int
) -> Sequence[tuple[int, ...]]:
    """Return the shapes of ``model``'s ``message_shapes``; by default hidden states [s / (CP x TP with sequence
    parallelism), b, h]."""
    shapes_of_model = getattr(model, "message_shapes", None)
    if shapes_of_model is not None:
        return shapes_of_model(lengths, micro_batch_size)
    parts = groups.cp.size * (groups.tp.size if model.config.sequence_parallel else 1)
    return [(lengths[0] // parts, micro_batch_size, model.config.hidden_size)]
