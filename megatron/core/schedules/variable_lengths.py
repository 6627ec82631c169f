"""Plan of a global batch of samples of different lengths: which ranks compute which samples, and when. Torch-free.

A *step* is one row of packed samples and the consecutive ranks that share its tokens (context parallelism); a *plan* is
the ordered list of steps of every rank. A long sample gets the smallest power of two of ranks that holds it, or more if
it would otherwise take longer than an equal share of the batch. Short samples fill rows of single ranks: the longest
first, each to the rank with the least modeled time (LPT, Graham 1969).

Why a plan cannot deadlock: steps of many ranks come before steps of fewer, and blocks of ranks are aligned, so that all
ranks of a step have run the same steps before it. With ``aligned`` all ranks have the same number of steps, step i of
all ranks runs at the same time, and rows may be empty: required if ranks communicate in every step (pipelines, experts,
FSDP).

The plan depends on the lengths in sample order and on the number of ranks only, so that a resumed run repeats it."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.core.config.errors import UserError


class CostModel(NamedTuple):
    """Modeled time of a step on each of its ranks, in any unit."""

    token: float = 1.0
    """Per token: linear layers."""
    square: float = 0.0
    """Per squared length of a sample: attention."""
    exchange: float = 0.0
    """Per token that a rank receives from other ranks of its step: keys and values."""
    step: float = 0.0
    """Per step: launches."""

    def sample(self, length: int, ranks: int) -> float:
        """Return the time of one sample on each of ``ranks`` ranks."""
        work = (self.token + self.square * length) * length / ranks
        return work + self.exchange * length * (ranks - 1) / ranks

    def time(self, lengths: Sequence[int], ranks: int) -> float:
        """Return the time of a step with samples of ``lengths``."""
        return self.step + sum(self.sample(length, ranks) for length in lengths)


class Step(NamedTuple):
    """One row of packed samples on consecutive ranks."""

    samples: tuple[int, ...]
    """Indices of samples in the global batch, ascending; empty: a row of padding."""
    first: int
    """First of the ranks that share the row."""
    size: int
    """Number of these ranks."""

    @property
    def ranks(self) -> range:
        """Ranks that share the row."""
        return range(self.first, self.first + self.size)


@dataclass(frozen=True)
class Plan:
    """Steps of all ranks for one global batch."""

    lengths: tuple[int, ...]
    """Lengths of all samples, in sample order."""
    ranks: tuple[tuple[Step, ...], ...]
    """Steps by rank, in the order in which the rank runs them."""
    cost: CostModel

    def distinct_steps(self) -> Iterator[Step]:
        """Yield every step once, from its first rank."""
        return (step for rank, steps in enumerate(self.ranks) for step in steps if step.first == rank)

    def time(self, step: Step) -> float:
        """Return the modeled time of ``step``."""
        return self.cost.time([self.lengths[sample] for sample in step.samples], step.size)

    def tokens(self, step: Step) -> int:
        """Return the tokens of the full row of ``step``, without padding."""
        return sum(self.lengths[sample] for sample in step.samples)

    @property
    def loads(self) -> list[float]:
        """Modeled time of every rank, without waiting."""
        times = [[self.time(step) if step.samples else 0.0 for step in steps] for steps in self.ranks]
        return [sum(durations) for durations in times]

    @property
    def imbalance(self) -> float:
        """Modeled time of the slowest rank over the mean, minus 1."""
        loads = self.loads
        return max(loads) * len(loads) / (sum(loads) or 1.0) - 1.0

    @property
    def cp_sizes(self) -> dict[int, int]:
        """Number of steps with samples by number of ranks, ascending."""
        counts: dict[int, int] = {}
        for step in self.distinct_steps():
            if step.samples:
                counts[step.size] = counts.get(step.size, 0) + 1
        return dict(sorted(counts.items()))


class PlanDeadlockError(RuntimeError):
    """The steps of a plan wait for each other: a bug of the planner."""


@dataclass(frozen=True)
class Simulation:
    """Execution of a plan: every rank runs its steps in order, a step starts when all its ranks have reached it."""

    starts: tuple[tuple[float, ...], ...]
    """Start of each step, by rank."""
    ends: tuple[float, ...]
    """End of the last step, by rank."""
    busy: tuple[float, ...]
    """Sum of the times of a rank's steps."""

    @property
    def duration(self) -> float:
        """Time until the last rank has finished."""
        return max(self.ends)

    @property
    def idle(self) -> float:
        """Share of the time of all ranks in which they wait, 0 to 1."""
        return 1.0 - sum(self.busy) / (self.duration * len(self.ends) or 1.0)


def simulate_plan(plan: Plan) -> Simulation:
    """Simulate ``plan`` without a pipeline. Raises PlanDeadlockError if it does not end."""
    clock, busy = [0.0] * len(plan.ranks), [0.0] * len(plan.ranks)
    starts: list[list[float]] = [[] for _ in plan.ranks]
    ready = list(range(len(plan.ranks)))
    while ready:
        rank = ready.pop()
        if len(starts[rank]) == len(plan.ranks[rank]):
            continue
        step = plan.ranks[rank][len(starts[rank])]
        if any(
            len(starts[rank]) == len(plan.ranks[rank]) or plan.ranks[rank][len(starts[rank])] != step
            for rank in step.ranks
        ):
            continue  # the last rank that reaches the step finds all others there
        start, time = max(clock[rank] for rank in step.ranks), plan.time(step)
        for rank in step.ranks:
            starts[rank].append(start)
            clock[rank], busy[rank] = start + time, busy[rank] + time
            ready.append(rank)
    for rank, steps in enumerate(plan.ranks):
        if len(starts[rank]) < len(steps):
            raise PlanDeadlockError(f"rank {rank} waits at step {len(starts[rank])}: {steps[len(starts[rank])]}")
    return Simulation(tuple(map(tuple, starts)), tuple(clock), tuple(busy))


@dataclass(frozen=True)
class Ranks:
    """Ranks and limits of a plan."""

    count: int
    """Number of ranks: data-parallel times context-parallel size."""
    limit: int
    """Tokens that one rank holds of a step."""
    smallest: int = 1
    """Ranks of a step at least; divides ``count``."""
    largest: int | None = None
    """Ranks of a step at most; None: ``count``. Equal to ``smallest`` for a fixed context-parallel size."""
    aligned: int = 0
    """If not 0: all ranks have the same number of steps, a multiple of this."""

    @property
    def largest_block(self) -> int:
        """Largest number of ranks that share a step: ``smallest`` times a power of two."""
        size, most = self.smallest, min(self.count, self.largest or self.count)
        while size * 2 <= most:
            size *= 2
        return size


def required_ranks(length: int, ranks: Ranks) -> int:
    """Return the fewest ranks that hold a sample of ``length`` tokens. Raises UserError if all together do not."""
    size = ranks.smallest
    while length > size * ranks.limit:
        size *= 2
    if size > ranks.largest_block:
        raise UserError(
            f"--max-seqlen-per-dp-cp-rank {ranks.limit}: a sample of {length} tokens needs {size} ranks, but at most "
            f"{ranks.largest_block} share one; give at least {-(-length // ranks.largest_block)}, or a smaller "
            "--seq-length"
        )
    return size


def plan_batch(lengths: Sequence[int], ranks: Ranks, cost: CostModel, stages: int = 1) -> Plan:
    """Plan one global batch of samples of ``lengths``. With ``stages`` pipeline stages, more and shorter steps are
    preferred, as the pipeline is filled and drained by the longest ones. UserError for a sample that does not fit."""
    smallest = [required_ranks(length, ranks) for length in lengths]
    plans: list[tuple[list[int], Plan]] = []
    # an equal share of the batch, and smaller bounds: more ranks per sample, which shortens the slowest step
    for share in (1.0, 0.5, 0.25) if stages > 1 else (1.0, 0.5):
        sizes = _grown(lengths, smallest, ranks, cost, share)
        if not plans or sizes != plans[-1][0]:
            plans.append((sizes, _Builder(lengths, sizes, ranks, cost, stages).build()))
    return min((plan for _, plan in plans), key=lambda plan: _predicted(plan, stages))


def _predicted(plan: Plan, stages: int) -> float:
    """The slowest rank, and filling the pipeline with the longest step."""
    if stages == 1:
        return max(plan.loads)
    slowest = max(map(plan.time, plan.distinct_steps()), default=0.0)
    return max(plan.loads) / stages + slowest * (stages - 1) / stages


def _grown(lengths: Sequence[int], smallest: Sequence[int], ranks: Ranks, cost: CostModel, share: float) -> list[int]:
    """Double the ranks while the sample takes longer than ``share`` of a rank's mean time and more ranks are faster."""
    mean = sum(cost.sample(length, size) * size for length, size in zip(lengths, smallest)) / ranks.count
    sizes = []
    for length, size in zip(lengths, smallest):
        while size * 2 <= ranks.largest_block and cost.sample(length, size) > share * mean:
            if cost.sample(length, size * 2) >= cost.sample(length, size):
                break
            size *= 2
        sizes.append(size)
    return sizes


class _Builder:
    """Assigns samples to *rounds*, one step per rank. A *unit* is ``ranks.smallest`` ranks."""

    def __init__(
        self, lengths: Sequence[int], sizes: Sequence[int], ranks: Ranks, cost: CostModel, stages: int
    ) -> None:
        self.lengths, self.sizes, self.ranks, self.cost, self.stages = lengths, sizes, ranks, cost, stages
        self.units = ranks.count // ranks.smallest
        order = sorted(range(len(lengths)), key=lambda sample: (-sizes[sample], -lengths[sample], sample))
        self.shared = [sample for sample in order if sizes[sample] > ranks.smallest]
        self.single = order[len(self.shared) :]

    def build(self) -> Plan:
        """Return the fewest rounds that hold all samples; with a pipeline at least two per stage, if possible."""
        tokens = sum(self.lengths)
        rounds = max(1, -(-tokens // (self.ranks.count * self.ranks.limit)))
        if self.stages > 1:
            rounds = max(rounds, min(2 * self.stages, len(self.lengths) // self.units))
        rounds = self._aligned(rounds)
        while not self._fill(rounds):
            rounds = self._aligned(rounds + max(1, rounds // 16))
        return Plan(tuple(self.lengths), tuple(self._steps(rounds)), self.cost)

    def _aligned(self, rounds: int) -> int:
        return -(-rounds // (self.ranks.aligned or 1)) * (self.ranks.aligned or 1)

    def _fill(self, rounds: int) -> bool:
        self.loads = [0.0] * self.units
        self.blocks: list[list[Step]] = [[] for _ in range(self.units)]
        self.rows: list[list[list[int]]] = []
        return self._place_shared(rounds) and self._place_single(rounds)

    def _place_shared(self, rounds: int) -> bool:
        """Largest blocks first: all units of a block then have the same load and the same steps."""
        unit, heap, level = self.ranks.smallest, [], 0
        for sample in self.shared:
            size = self.sizes[sample] // unit
            if size != level:
                level = size
                # of 6 units, 4 and 5 form no block of four
                heap = [(self.loads[first], first) for first in range(0, self.units - size + 1, size)]
                heapq.heapify(heap)
            load, first = heap[0]
            if len(self.blocks[first]) == rounds:
                free = [entry for entry in heap if len(self.blocks[entry[1]]) < rounds]
                if not free:
                    return False
                load, first = min(free)
                heap.remove((load, first))
                heapq.heapify(heap)
            else:
                heapq.heappop(heap)
            step = Step((sample,), first * unit, size * unit)
            load += self.cost.step + self.cost.sample(self.lengths[sample], step.size)
            for member in range(first, first + size):
                self.loads[member] = load
                self.blocks[member].append(step)
            heapq.heappush(heap, (load, first))
        return True

    def _place_single(self, rounds: int) -> bool:
        """Longest sample first, to the unit with the least load that has room, there to the emptiest row."""
        capacity, size = self.ranks.limit * self.ranks.smallest, self.ranks.smallest
        rows = [[(-capacity, row) for row in range(rounds - len(steps))] for steps in self.blocks]
        self.rows = [[[] for _ in unit_rows] for unit_rows in rows]
        open_units = [(load, unit) for unit, load in enumerate(self.loads)]
        heapq.heapify(open_units)
        full: list[tuple[int, int]] = []  # (-room, unit) of units without room for the samples so far
        for sample in self.single:
            length = self.lengths[sample]
            while full and -full[0][0] >= length:
                unit = heapq.heappop(full)[1]
                heapq.heappush(open_units, (self.loads[unit], unit))
            while True:
                if not open_units:
                    return False
                _, unit = heapq.heappop(open_units)
                if rows[unit] and -rows[unit][0][0] >= length:
                    break
                heapq.heappush(full, (rows[unit][0][0] if rows[unit] else 0, unit))
            room, row = rows[unit][0]
            heapq.heapreplace(rows[unit], (room + length, row))
            self.loads[unit] += self.cost.sample(length, size) + (0.0 if self.rows[unit][row] else self.cost.step)
            self.rows[unit][row].append(sample)
            heapq.heappush(open_units, (self.loads[unit], unit))
        return True

    def _steps(self, rounds: int) -> Iterator[tuple[Step, ...]]:
        """A rank without samples keeps an empty row: its last backward pass starts its gradient reduction."""
        unit = self.ranks.smallest
        used = max(
            len(steps) + max((row + 1 for row, samples in enumerate(rows) if samples), default=0)
            for steps, rows in zip(self.blocks, self.rows)
        )
        for number in range(self.units):
            shared, rows = self.blocks[number], self.rows[number]
            steps = shared + [Step(tuple(sorted(row)), number * unit, unit) for row in rows]
            if self.ranks.aligned:
                steps = steps[: self._aligned(max(used, 1))]
            else:
                steps = [step for step in steps if step.samples] or steps[:1]
            for _ in range(unit):
                yield tuple(steps)
