"""Dropout of an adapter's input (PEFT's ``lora_dropout``), with masks that depend on neither layout nor time.

A linear layer does not know which tokens its rows are. The layers of the stack do: hooks on them note the coordinates.
A recomputed layer reads the coordinates of its first forward pass."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from megatron.core.groups.process_groups import Group
from megatron.core.random.dropout import Dropout, DropoutCoordinates
from megatron.core.tensor_parallel.collectives import begin_all_gather
from megatron.core.transformer.context import ForwardContext
from megatron.core.transformer.recompute import choose
from megatron.core.transformer.transformer_layer import TransformerLayer


class CurrentTokens:
    """Coordinates of the micro-batch whose forward pass runs. ``model``: the chunk whose layers note them."""

    def __init__(self, model: nn.Module) -> None:
        self.coordinates: DropoutCoordinates | None = None
        for layer in model.modules():
            if isinstance(layer, TransformerLayer):
                layer.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, layer: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        contexts = [value for value in (*args, *kwargs.values()) if isinstance(value, ForwardContext)]
        self.coordinates = contexts[0].dropout if contexts else None


class InputDropout(Dropout):
    """Dropout of the input [s, b, i] of the layer with the global ``name``. This rank has the features from
    ``first_feature`` on; the rows may be the positions of all ranks of ``group``."""

    def __init__(self, rate: float, name: str, first_feature: int, tokens: CurrentTokens, group: Group) -> None:
        super().__init__(rate, "adapter", name, first_feature=first_feature)
        self.tokens, self.group = tokens, group

    def dropped(self, x: Tensor) -> Tensor:
        """Return dropout of ``x``; ``x`` itself in eval mode. All-gathers positions if ``x`` has those of all ranks."""
        if not self.training:
            return x
        at, (length, batch, _) = self._checked(self.tokens.coordinates), x.shape
        position, sample = choose(lambda: at.position_s), choose(lambda: at.sample_b)
        if length != len(position):
            position = begin_all_gather(position, self.group).wait()
            if len(sample) != batch:  # one per token of the packed row
                sample = begin_all_gather(sample, self.group).wait()
        return self(x, DropoutCoordinates(at.stream, sample, position))
