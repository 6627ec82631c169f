"""Simulation of a schedule with given costs: timeline, bubble, peak activations, and deadlock detection. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron.core.pipeline_parallel.actions import Action, RankAction, Schedule

CostFunction = Callable[[int, Action], float]
"""(stage, action) -> duration in seconds."""


class DeadlockError(AssertionError):
    """Deadlock of a schedule; the message lists the action at which each rank is blocked."""


@dataclass(frozen=True)
class Event:
    """One executed action with its start and end in seconds."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Result of a simulation."""

    schedule: Schedule
    events: tuple[tuple[Event, ...], ...]
    """Executed actions by rank, in order."""

    @property
    def duration(self) -> float:
        return max((events[-1].end for events in self.events if events), default=0.0)

    def busy(self, rank: int) -> float:
        """Return the compute time of a rank in seconds."""
        return sum(event.end - event.start for event in self.events[rank])

    @property
    def bubble(self) -> float:
        """Idle fraction of the total time of all ranks, from the first start to the last end."""
        total = self.duration * self.schedule.num_ranks
        return 1.0 - sum(self.busy(rank) for rank in range(self.schedule.num_ranks)) / total if total else 0.0


def unit_costs(forward: float = 1.0, backward: float = 2.0, weight: float | None = None) -> CostFunction:
    """Return a cost function, (stage, action) -> seconds, that is equal on all stages. With ``weight``, W costs
    ``weight`` and B the rest of ``backward``. Without it, B costs all of ``backward`` and W another half of it, so that
    schedules that split backward need ``weight``."""
    share = backward / 2 if weight is None else weight

    def cost(stage: int, action: Action) -> float:
        return {"F": forward, "B": backward, "W": share}[action.kind]

    def split(stage: int, action: Action) -> float:
        return {"F": forward, "B": backward - share, "W": share}[action.kind]

    return split if weight is not None else cost


def simulate(schedule: Schedule, cost: CostFunction | None = None, *, latency: float = 0.0) -> Timeline:
    """Simulate a schedule: an action starts when its rank is free and its inputs are available. An input from another
    rank is available ``latency`` seconds after it was computed. The default costs are F = 1 and B = 2, or F = B = W = 1
    if the schedule splits backward. Raises DeadlockError if the schedule does not finish."""
    if cost is None:
        cost = unit_costs(weight=1.0) if schedule.splits_backward else unit_costs()
    ends: dict[RankAction, float] = {}
    events: list[list[Event]] = [[] for _ in schedule.actions]
    position = [0] * schedule.num_ranks
    clock = [0.0] * schedule.num_ranks
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(schedule.actions):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                ready = _input_time(schedule, ends, rank, action, latency)
                if ready is None:
                    break
                start = max(clock[rank], ready)
                clock[rank] = start + cost(schedule.stage(rank, action.chunk), action)
                ends[RankAction(rank, action)] = clock[rank]
                events[rank].append(Event(rank, action, start, clock[rank]))
                position[rank] += 1
                progress = True
    _check_end(schedule, position)
    return Timeline(schedule, tuple(map(tuple, events)))


def _input_time(
    schedule: Schedule, ends: dict[RankAction, float], rank: int, action: Action, latency: float
) -> float | None:
    """Return seconds: of the source, plus ``latency`` from another rank, and for B of the F, for W of the B. 0 without
    inputs; None if one has not been computed yet."""
    needs = []
    if (source := schedule.source(rank, action)) is not None:
        needs.append((source, latency if source.rank != rank else 0.0))
    if action.kind != "F":
        needs.append((RankAction(rank, action._replace(kind="F" if action.kind == "B" else "B")), 0.0))
    times = [ends.get(place) for place, _ in needs]
    if None in times:
        return None
    return max((time + delay for time, (_, delay) in zip(times, needs) if time is not None), default=0.0)


def _check_end(schedule: Schedule, position: list[int]) -> None:
    """``position``: finished actions of each rank. DeadlockError names the actions at which ranks wait."""
    waiting = [
        f"rank {rank} waits for the input of {'{}{}.{}'.format(*actions[at])}"
        for rank, (actions, at) in enumerate(zip(schedule.actions, position))
        if at < len(actions)
    ]
    if waiting:
        raise DeadlockError(f"schedule {schedule.name!r} does not end: {'; '.join(waiting)}")


def peak_activations(schedule: Schedule, *, weight: Callable[[int], float] = lambda stage: 1.0) -> list[float]:
    """Return the peak activation memory per rank, with ``weight(stage)`` for each (chunk, micro-batch) that is alive.
    Activations are alive from F to B, or to W if the schedule splits backward, since weight gradients need the
    inputs."""
    last = "W" if schedule.splits_backward else "B"
    peaks = []
    for rank, actions in enumerate(schedule.actions):
        alive = peak = 0.0
        for action in actions:
            size = weight(schedule.stage(rank, action.chunk))
            alive += size if action.kind == "F" else -size if action.kind == last else 0.0
            peak = max(peak, alive)
        peaks.append(peak)
    return peaks
