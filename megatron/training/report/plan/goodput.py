"""Failures, checkpoint interval and stragglers of long runs. Torch-free.

Young (1974): a save that stalls training for d seconds, with a mean time to failure M, is due every sqrt(2 d M)
seconds. Goodput is the share of time that advances training: 1 - d / T - (T / 2 + R) / M, with R seconds from a failure
to the next step. Published failure rates differ by a factor of 6, so there are three presets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

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
    stops training; ``restart``: seconds to the next step after a failure; ``shortest``: minimum between saves."""
    failure = 3600.0 / (rate * gpus)
    interval = max(math.sqrt(2 * stall * failure), stall, shortest)
    lost = stall / interval + (interval / 2 + restart) / failure
    return Goodput(failure / 3600.0, interval, max(0.0, 1 - lost))


def expected_maximum(ranks: int) -> float:
    """Return the expected maximum of ``ranks`` standard normal values (Blom 1958): 1.4 at 8, 4.0 at 16,384."""
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0
