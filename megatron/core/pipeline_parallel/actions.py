"""A pipeline schedule as data: for every rank, the list of what it computes, in order. Torch-free.

Sends and receives are not in the lists; they follow from where the inputs of an action come from. With P ranks and V
chunks per rank, stage ``s`` (of P x V) is chunk ``s // P`` of rank ``s % P``.

Legend: F forward of a micro-batch through one chunk; B its backward; W its weight gradients where B leaves them out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "W"]


class Action(NamedTuple):
    """One piece of computation on one rank."""

    kind: Kind
    chunk: int
    microbatch: int


class Place(NamedTuple):
    """An action and the rank that runs it."""

    rank: int
    action: Action


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank, in order. All ranks know all lists."""

    name: str
    num_chunks: int
    """Model chunks per rank."""
    num_microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    """By rank."""

    @property
    def num_ranks(self) -> int:
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_chunks

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are actions of their own."""
        return any(action.kind == "W" for actions in self.actions for action in actions)

    @property
    def has_backward(self) -> bool:
        return any(action.kind == "B" for actions in self.actions for action in actions)

    def stage(self, rank: int, chunk: int) -> int:
        """Position in the pipeline, from 0."""
        return chunk * self.num_ranks + rank

    def source(self, rank: int, action: Action) -> Place | None:
        """The action whose result this one receives (it may run on the same rank); None for none."""
        return self._neighbour(rank, action, {"F": -1, "B": 1, "W": 0}[action.kind])

    def target(self, rank: int, action: Action) -> Place | None:
        """The action that receives the result of this one."""
        return self._neighbour(rank, action, {"F": 1, "B": -1, "W": 0}[action.kind])

    def _neighbour(self, rank: int, action: Action, step: int) -> Place | None:
        """The same action ``step`` stages further on; None for no step, and beyond the ends."""
        stage = self.stage(rank, action.chunk) + step
        if step == 0 or not 0 <= stage < self.num_stages:
            return None
        return Place(stage % self.num_ranks, action._replace(chunk=stage // self.num_ranks))
