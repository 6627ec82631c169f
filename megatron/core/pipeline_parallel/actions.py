"""Pipeline schedules as data: the ordered list of computations of every rank. Torch-free.

The lists contain no sends and receives; these are derived from the dependencies of the actions. With P ranks and V
chunks per rank, stage ``s`` (of P x V) is chunk ``s // P`` of rank ``s % P``.

Kinds of actions: F is the forward of a micro-batch through one chunk, B its backward, and W its weight gradients if B
computes only the input gradient (zero-bubble)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "W"]


class Action(NamedTuple):
    """Forward (F), backward (B) or weight gradients (W) of one micro-batch through one chunk of a rank."""

    kind: Kind
    chunk: int
    microbatch: int


class RankAction(NamedTuple):
    """An action and the rank that runs it."""

    rank: int
    action: Action


@dataclass(frozen=True)
class Schedule:
    """Ordered actions of all ranks. Every rank has the full schedule, which defines the order of p2p messages."""

    name: str
    num_chunks: int
    """Model chunks per rank."""
    num_microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    """Actions by rank."""

    @property
    def num_ranks(self) -> int:
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_chunks

    @cached_property
    def splits_backward(self) -> bool:
        """Whether weight gradients are separate actions (W)."""
        return any(action.kind == "W" for actions in self.actions for action in actions)

    @cached_property
    def has_backward(self) -> bool:
        return any(action.kind == "B" for actions in self.actions for action in actions)

    def stage(self, rank: int, chunk: int) -> int:
        """Return the stage index of a rank's chunk, from 0."""
        return chunk * self.num_ranks + rank

    def source(self, rank: int, action: Action) -> RankAction | None:
        """Return the action whose output is the input; None for F of the first stage, B of the last, and W."""
        return self._neighbour(rank, action, {"F": -1, "B": 1, "W": 0}[action.kind])

    def target(self, rank: int, action: Action) -> RankAction | None:
        """Return the action that receives the output; None for F of the last stage, B of the first, and W."""
        return self._neighbour(rank, action, {"F": 1, "B": -1, "W": 0}[action.kind])

    def _neighbour(self, rank: int, action: Action, step: int) -> RankAction | None:
        stage = self.stage(rank, action.chunk) + step
        if step == 0 or not 0 <= stage < self.num_stages:
            return None
        return RankAction(stage % self.num_ranks, action._replace(chunk=stage // self.num_ranks))
