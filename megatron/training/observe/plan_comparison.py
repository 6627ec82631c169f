"""Comparison of a run's measured step time with the planner's prediction. Torch-free.

A run is slower than planned if its mean step takes more than (1 + error) x 1.05 of the predicted time. ``error`` is the
relative difference that the planner cannot resolve: 3 % for dense models and 10 % with experts, its error on measured
rows. A smaller difference may be the planner's.

Parts: if the host waits for the device in every step, data loading and the host's work are hidden, and the device's
times show the cause. Otherwise the device waits for the host: the excess is time spent waiting for data, as far as
batches were waited for, and else the host's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from megatron.training.observe.metrics import Record

SLOWER = 1.05
HIDDEN = 0.02
"""Share of a step that the host must wait for the device, else the step is bound by the host."""
UPDATE_PARTS = ("optimizer", "orthogonalization", "copies of optimizer state", "data communication")
FORWARD, UPDATE, DATA, HOST = "forward and backward", "update", "data loading", "host"


class Prediction(NamedTuple):
    """The planner's prediction for a full global batch."""

    gpu: str
    seconds: float
    parts: Mapping[str, float]
    """Seconds by part of ``StepTime``."""
    error: float
    """Relative error of the planner."""


def worst_part(comparison: Record) -> str:
    """Return the part with the largest excess."""
    parts = comparison["parts_seconds"]
    return max(parts, key=lambda name: parts[name]["measured"] - parts[name]["predicted"])


def message(comparison: Record, prediction: Prediction) -> str:
    """Return the warning for the log, on one line."""
    worst, measured = worst_part(comparison), comparison["measured_seconds"]
    times, shares = comparison["parts_seconds"][worst], plan_shares(prediction.parts)
    apart = "".join(f", {name} {value:.3g} s per iteration" for name, value in comparison["apart_seconds"].items())
    return (
        f"an iteration takes {measured:.4g} s, planned on {prediction.gpu}: {prediction.seconds:.4g} s"
        f" ({measured / prediction.seconds - 1:+.0%}; the planner's error is {prediction.error:.0%}). The largest"
        f" difference is in {worst}: {times['measured']:.3g} s, planned {times['predicted']:.3g} s. Plan: "
        + ", ".join(f"{name} {seconds:.3g} s" for name, seconds in shares.items())
        + f". Outside of iterations{apart or ' nothing'}. See docs/guides/watching_a_run.md"
    )


def plan_shares(parts: Mapping[str, float]) -> dict[str, float]:
    """Return predicted seconds of compute, exposed communication, bubble and host, without zeros."""
    shares = {"compute": 0.0, "exposed communication": 0.0, "bubble": 0.0, "host": 0.0}
    for name, seconds in parts.items():
        communication = "exposed communication" if name.endswith("communication") else "compute"
        shares[name if name in shares else communication] += seconds
    return {name: seconds for name, seconds in shares.items() if seconds > 0}


def compare(
    prediction: Prediction, seconds: float, parts: Mapping[str, float], apart: Mapping[str, float] | None = None
) -> Record:
    """Compare one mean step of ``seconds``; return the fields of a record of kind ``plan``. ``parts``: as
    ``step_parts.mean_parts``; ``apart``: seconds outside of steps."""
    update = sum(prediction.parts.get(name, 0.0) for name in UPDATE_PARTS)
    host = prediction.parts.get("host", 0.0)
    planned = {FORWARD: prediction.seconds - update - host, UPDATE: update, DATA: 0.0, HOST: host}
    data_wait = parts.get("data_wait", 0.0)
    if parts.get("device_wait", 0.0) > HIDDEN * seconds:
        measured = {FORWARD: parts.get("forward_backward", 0.0), UPDATE: parts.get("update", 0.0)}
    else:
        measured = {FORWARD: min(planned[FORWARD], seconds), UPDATE: min(update, seconds)}
    measured[DATA] = min(data_wait, max(seconds - sum(measured.values()), 0.0))
    measured[HOST] = max(seconds - sum(measured.values()), 0.0)
    return {
        "predicted_seconds": prediction.seconds,
        "measured_seconds": seconds,
        "limit_seconds": prediction.seconds * (1 + prediction.error) * SLOWER,
        "parts_seconds": {name: {"predicted": planned[name], "measured": measured[name]} for name in planned},
        "apart_seconds": {name: value for name, value in (apart or {}).items() if value > 0},
    }
