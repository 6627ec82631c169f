"""Zero-bubble schedules (arXiv:2401.10241): the weight gradient W of a micro-batch is split from its input gradient B,
and fills the time in which a rank would wait. Torch-free.

The lists come out of a simulated run: whenever a rank is free, it takes the first of B, F and W that can run, where F
may not exceed the activations that 1F1B (or the interleaved schedule) would hold at most. With one chunk per rank this
is ZB-H1: (P - 1) instead of 3 (P - 1) units of bubble for F = B = W = 1. It cannot deadlock, since it has been run.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from megatron.core.pipeline_parallel.actions import Action, Place, Schedule
from megatron.core.pipeline_parallel.schedule_interleaved import group_sizes, passes


@dataclass
class _Rank:
    """One rank of the simulated run."""

    forwards: deque[Action]
    backwards: deque[Action]
    limit: int
    weights: deque[Action] = field(default_factory=deque)
    alive: int = 0
    free_at: int = 0
    done: list[Action] = field(default_factory=list)


def zero_bubble(
    num_ranks: int, num_microbatches: int, num_chunks: int = 1, group_size: int | None = None
) -> Schedule:
    """Zero bubble with one or several chunks per rank."""
    group_size = num_ranks if group_size is None else group_size
    sizes = group_sizes(num_ranks, num_microbatches, group_size)
    order = passes(sizes, num_chunks)
    ahead = 0 if num_chunks == 1 else (num_chunks - 1) * max(sizes) + num_ranks - 1
    ranks = [
        _Rank(
            deque(Action("F", chunk, m) for chunk, m in order),
            deque(Action("B", num_chunks - 1 - chunk, m) for chunk, m in order),
            limit=num_ranks + ahead,
        )
        for _ in range(num_ranks)
    ]
    empty = Schedule("zero-bubble", num_chunks, num_microbatches, ((),) * num_ranks)
    ends: dict[Place, int] = {}
    time = 0
    while any(rank.forwards or rank.backwards or rank.weights for rank in ranks):
        chosen = [(index, _choose(empty, index, rank, ends, time)) for index, rank in enumerate(ranks)]
        for index, action in chosen:
            if action is not None:
                ranks[index].free_at = time + 1
                ends[Place(index, action)] = time + 1
                _record(ranks[index], action)
        if all(action is None for _, action in chosen) and all(rank.free_at <= time for rank in ranks):
            _let_one_more_in(ranks)
        time += 1
    return Schedule("zero-bubble", num_chunks, num_microbatches, tuple(tuple(rank.done) for rank in ranks))


def _choose(schedule: Schedule, index: int, rank: _Rank, ends: dict[Place, int], time: int) -> Action | None:
    """What a rank does in this unit of time."""

    def ready(action: Action) -> bool:
        source = schedule.source(index, action)
        own = action.kind == "F" or ends.get(Place(index, action._replace(kind="F")), time + 1) <= time
        return own and (source is None or ends.get(source, time + 1) <= time)

    if rank.backwards and ready(rank.backwards[0]):
        return rank.backwards[0]
    if rank.forwards and rank.alive < rank.limit and ready(rank.forwards[0]):
        return rank.forwards[0]
    return rank.weights[0] if rank.weights else None


def _record(rank: _Rank, action: Action) -> None:
    rank.done.append(action)
    if action.kind == "F":
        rank.forwards.popleft()
        rank.alive += 1
    elif action.kind == "B":
        rank.backwards.popleft()
        rank.weights.append(action._replace(kind="W"))
    else:
        rank.weights.popleft()
        rank.alive -= 1


def _let_one_more_in(ranks: list[_Rank]) -> None:
    """Nobody can go on: the activations allowed are too few for these sizes."""
    for rank in ranks:
        rank.limit += 1
