"""Failures, checkpoint interval and stragglers of long runs. Torch-free.

Young (1974): a save that stalls training for d seconds, with a mean time to failure M, is due every sqrt(2 d M)
seconds. Goodput is the share of time that advances training: 1 - d / T - (T / 2 + R) / M, with R seconds from a failure
to the next step. Published failure rates differ by a factor of 6, so there are three presets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from megatron.core.pipeline_parallel.actions import Schedule
from megatron.core.pipeline_parallel.simulate import CostFunction, simulate

FAILURES = {"low": 1.97e-5, "medium": 3.4e-5, "high": 1.24e-4}
"""Failures per GPU-hour: LLaMA-3 405B (419 unplanned interruptions, 16,384 GPUs, 54 days); 6.5 per 1,000 node-days of 8
GPUs, and 7.9 h between failures at 1,024 GPUs (research clusters of Meta)."""
RANK_NOISE = 0.003
"""Standard deviation of ranks' speeds on healthy hardware: the spread within measured jobs."""


@dataclass(frozen=True)
class Goodput:
    """Expected losses of a run to saves and failures."""

    failure_hours: float
    """Mean time to failure."""
    interval: float
    """Seconds between saves."""
    share: float
    """Share of time that advances training, 0 to 1."""


def goodput(gpus: int, rate: float, stall: float, restart: float, shortest: float = 0.0) -> Goodput:
    """Return the best save interval and its goodput. ``rate``: failures per GPU-hour; ``stall``: seconds that a save
    stops training; ``restart``: seconds to the next step after a failure; ``shortest``: minimum seconds between
    saves."""
    failure = 3600.0 / (rate * gpus)
    interval = max(math.sqrt(2 * stall * failure), stall, shortest)
    lost = stall / interval + (interval / 2 + restart) / failure
    return Goodput(failure / 3600.0, interval, max(0.0, 1 - lost))


def expected_maximum(ranks: int) -> float:
    """Return the expected maximum of ``ranks`` standard normal values (Blom 1958): 1.4 at 8, 4.0 at 16,384."""
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0


def simulate_ranks(
    schedule: Schedule,
    cost: CostFunction,
    ranks_per_stage: int,
    *,
    tp: int = 1,
    noise: float = RANK_NOISE,
    slow: dict[int, float] | None = None,
    seed: int = 0,
) -> float:
    """Return the seconds of a schedule on ``schedule.num_ranks * ranks_per_stage`` ranks. Each has a normal speed with
    standard deviation ``noise``; ``slow`` maps a rank to another factor of its times. The ``tp`` ranks of a replica
    wait for each other in every action, pipelines run independently, and the last one ends the step."""
    stages, rng = schedule.num_ranks, np.random.default_rng(seed)
    factors = 1 + noise * rng.standard_normal((stages, ranks_per_stage))
    for rank, factor in (slow or {}).items():
        factors[rank // ranks_per_stage, rank % ranks_per_stage] *= factor
    factors = factors.reshape(stages, -1, tp).max(axis=2)
    events = sorted(
        (event for rank in simulate(schedule, cost).events for event in rank), key=lambda event: event.start
    )
    clock = np.zeros_like(factors)
    ends: dict[tuple[int, object], np.ndarray] = {}
    for event in events:  # in an order in which every input is computed before its use
        start, source = clock[event.rank], schedule.source(event.rank, event.action)
        if source is not None:
            start = np.maximum(start, ends[source.rank, source.action])
        end = start + (event.end - event.start) * factors[event.rank]
        ends[event.rank, event.action] = clock[event.rank] = end
    return float(clock.max())
