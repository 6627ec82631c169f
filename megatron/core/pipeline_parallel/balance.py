"""Balanced split of a model into pipeline stages: minimize the cost of the slowest stage. Torch-free.

Costs are forward plus backward times in units of one layer, estimated from the FLOPs of the model description
(``core/description/model.py``). GEMMs run at one rate and core attention at a lower one; norms, activations and the
embedding cost nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from megatron.core.config.errors import UserError


class LayoutError(UserError):
    """Pipeline layout that cannot be parsed or is impossible for the model; the message has the reason."""


ATTENTION_RATE = 0.65
"""Speed of core attention relative to GEMMs, in model FLOP/s. On a Hopper GPU: 430 TFLOP/s for attention over 8192
tokens (forward and backward), 670 TFLOP/s for GEMMs."""


class ModelCosts(NamedTuple):
    """Names and costs of a model's residual branches, in units of its median layer."""

    names: tuple[tuple[str, ...], ...]
    """Names of the branches of every layer, for messages."""
    layers: tuple[tuple[float, ...], ...] | None
    """Costs of the branches of every layer. None: unknown; all layers then cost the same and are not split."""
    head: float = 0.0
    """Cost of the output layer, the loss and multi-token prediction."""

    @property
    def branches(self) -> list[float]:
        """Costs of all branches in order; if unknown, every layer costs 1, spread evenly over its branches."""
        layers = self.layers or [[1 / len(branches)] * len(branches) for branches in self.names]
        return [cost for layer in layers for cost in layer]


def shared_out(total: int, parts: int) -> list[int]:
    """Split ``total`` into ``parts`` counts that differ by at most one, larger first."""
    return [total // parts + (part < total % parts) for part in range(parts)]


_SHARPNESS = 8  # minimize the 8-norm of stage costs: close to their maximum, but prefers even splits for equal maxima


def balanced_counts(costs: Sequence[float], smallest: Sequence[int], front: float, back: float) -> list[int]:
    """Return the number of consecutive items (layers or branches) per stage that minimizes the 8-norm of stage costs,
    by dynamic programming. ``costs``: of each item; ``smallest``: minimum number of items per stage; ``front``,
    ``back``: additional cost of the first and last stage. LayoutError for too few items."""
    return list(_balanced_counts(tuple(costs), tuple(smallest), front, back))


@lru_cache(maxsize=64)
def _balanced_counts(costs: tuple[float, ...], smallest: tuple[int, ...], front: float, back: float) -> list[int]:
    # cached: a search over layouts and a dry run ask for the same split many times
    num_stages, num = len(smallest), len(costs)
    if num < sum(smallest):
        raise LayoutError(f"{num} layers cannot fill {num_stages} pipeline stages")
    before = [0.0, *accumulate(costs)]
    mean = (before[-1] + front + back) / num_stages
    largest = math.ceil(num / max(num_stages - 1, 1)) + math.ceil(mean * num / max(before[-1], 1e-9))
    # best[n] = (sum of (stage cost / mean)^8, counts) for n items on the stages so far
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(num_stages):
        extra = (front if stage == 0 else 0.0) + (back if stage == num_stages - 1 else 0.0)
        later = sum(smallest[stage + 1 :])
        longer: dict[int, tuple[float, tuple[int, ...]]] = {}
        for used, (cost, counts) in best.items():
            rest, is_last = num - used - later, stage == num_stages - 1
            for count in range(rest if is_last else smallest[stage], (rest if is_last else min(rest, largest)) + 1):
                total = cost + ((before[used + count] - before[used] + extra) / mean) ** _SHARPNESS
                previous = longer.get(used + count)
                if previous is None or total < previous[0] * (1 - 1e-12):
                    longer[used + count] = (total, (*counts, count))
        best = longer
    return list(best[num][1])


def stage_costs(costs: Sequence[float], counts: Sequence[int], front: float, back: float) -> list[float]:
    """Return the cost of every stage for ``counts`` items per stage, with ``front`` and ``back`` added at the ends."""
    before, ends = [0.0, *accumulate(costs)], [0, *accumulate(counts)]
    costs_of_stages = [before[end] - before[begin] for begin, end in zip(ends, ends[1:])]
    costs_of_stages[0] += front
    costs_of_stages[-1] += back
    return costs_of_stages


def slowest(costs: Sequence[float], counts: Sequence[int], front: float, back: float) -> float:
    """Return the cost of the slowest stage."""
    return max(stage_costs(costs, counts, front, back))
