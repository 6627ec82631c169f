"""The cuts of a model into pipeline stages that make the slowest stage as fast as possible. Torch-free.

Costs are times of forward and backward pass in units of one layer, by the FLOPs of a model's description
(``core/description/model.py``): GEMMs at one rate, attention between its projections at a lower one; norms,
activations and the embedding count nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from megatron.core.config.errors import UserError


class LayoutError(UserError):
    """A way of cutting a model into stages that cannot be read or met, and why."""


ATTENTION_RATE = 0.65
"""Speed of attention relative to GEMMs, by model FLOPs: a Hopper GPU computes 430 TFLOP/s of attention over 8192
tokens, forward and backward, beside 670 of GEMMs."""


class ModelCosts(NamedTuple):
    """The branches of a model and what they cost, in units of its median layer."""

    names: tuple[tuple[str, ...], ...]
    """Names of the branches of every layer, for messages."""
    layers: tuple[tuple[float, ...], ...] | None
    """Costs of the branches of every layer; None where they are not known: layers count alike and stay whole."""
    head: float = 0.0
    """The output layer and the loss, and predictions of further tokens."""

    @property
    def branches(self) -> list[float]:
        """Costs of all branches in order; where they are not known, a layer costs 1."""
        layers = self.layers or [[1 / len(own)] * len(own) for own in self.names]
        return [cost for layer in layers for cost in layer]


def shared_out(total: int, parts: int) -> list[int]:
    """``total`` in ``parts`` counts that differ by one at most, the larger ones first."""
    return [total // parts + (part < total % parts) for part in range(parts)]


_SHARPNESS = 8  # the 8-norm of the stages' costs: nearly their maximum, but among equal maxima the evener split wins


def balanced_counts(costs: Sequence[float], smallest: Sequence[int], front: float, back: float) -> list[int]:
    """Share the pieces of a model out to stages, such that the costliest stage is as cheap as possible.

    Args:
        costs: of the pieces, in order.
        smallest: least number of pieces of each stage.
        front: cost that the first stage has besides its pieces.
        back: the same for the last stage.
    """
    num_stages, num = len(smallest), len(costs)
    if num < sum(smallest):
        raise LayoutError(f"{num} layers cannot fill {num_stages} pipeline stages")
    before = [0.0, *accumulate(costs)]
    mean = (before[-1] + front + back) / num_stages
    largest = math.ceil(num / max(num_stages - 1, 1)) + math.ceil(mean * num / max(before[-1], 1e-9))
    # best[n] = (sum of costs^8 so far, counts) for n pieces on the stages so far
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(num_stages):
        extra = (front if stage == 0 else 0.0) + (back if stage == num_stages - 1 else 0.0)
        later = sum(smallest[stage + 1 :])
        longer: dict[int, tuple[float, tuple[int, ...]]] = {}
        for used, (cost, counts) in best.items():
            rest, is_last = num - used - later, stage == num_stages - 1
            for count in range(rest if is_last else smallest[stage], (rest if is_last else min(rest, largest)) + 1):
                total = cost + ((before[used + count] - before[used] + extra) / mean) ** _SHARPNESS
                known = longer.get(used + count)
                if known is None or total < known[0] * (1 - 1e-12):
                    longer[used + count] = (total, (*counts, count))
        best = longer
    return list(best[num][1])


def stage_costs(costs: Sequence[float], counts: Sequence[int], front: float, back: float) -> list[float]:
    """Cost of every stage, for the pieces that it gets."""
    before, ends = [0.0, *accumulate(costs)], [0, *accumulate(counts)]
    found = [before[end] - before[begin] for begin, end in zip(ends, ends[1:])]
    found[0] += front
    found[-1] += back
    return found


def slowest(costs: Sequence[float], counts: Sequence[int], front: float, back: float) -> float:
    """The cost of the costliest stage."""
    return max(stage_costs(costs, counts, front, back))
