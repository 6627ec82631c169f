"""Comparison of a run's measured step time with the planner's prediction. Torch-free.

A run is slower than planned if its mean step takes more than (1 + error) x 1.05 of the predicted time. ``error`` is the
relative difference that the planner cannot resolve: 3 % for dense models and 10 % with experts, its error on measured
rows. A smaller difference may be the planner's.

Parts: if the host waits for the device in every step, data loading and the host's work are hidden, and the device's
times show the cause. Otherwise the device waits for the host: the excess is time spent waiting for data, as far as
batches were waited for, and else the host's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

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


class Comparison(NamedTuple):
    """Measured and predicted seconds of a step."""

    predicted: float
    measured: float
    limit: float
    """Seconds above which the run is slower than planned."""
    parts: dict[str, tuple[float, float]]
    """(predicted, measured) seconds by part; both add up to about the step."""
    apart: dict[str, float]
    """Seconds per iteration outside of steps: evaluation, checkpoint saving."""

    @property
    def is_slower(self) -> bool:
        return self.measured > self.limit

    @property
    def worst(self) -> str:
        """Part with the largest excess."""
        return max(self.parts, key=lambda name: self.parts[name][1] - self.parts[name][0])

    def message(self, prediction: Prediction) -> str:
        """Return the warning for the log, on one line."""
        planned, measured = self.parts[self.worst]
        shares = plan_shares(prediction.parts)
        apart = "".join(f", {name} {seconds:.3g} s per iteration" for name, seconds in self.apart.items())
        return (
            f"an iteration takes {self.measured:.4g} s, planned on {prediction.gpu}: {self.predicted:.4g} s"
            f" ({self.measured / self.predicted - 1:+.0%}; the planner's error is {prediction.error:.0%}). The largest"
            f" difference is in {self.worst}: {measured:.3g} s, planned {planned:.3g} s. Plan: "
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
) -> Comparison:
    """Compare one mean step of ``seconds``. ``parts``: as ``step_parts.mean_parts``; ``apart``: seconds outside of
    steps."""
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
    return Comparison(
        prediction.seconds,
        seconds,
        prediction.seconds * (1 + prediction.error) * SLOWER,
        {name: (planned[name], measured[name]) for name in planned},
        {name: value for name, value in (apart or {}).items() if value > 0},
    )


class PlanWatch:
    """Collects the iterations after a warm-up, until there are enough to compare them with the plan once. Iterations
    with another batch size than the planned one, and skipped ones, do not count."""

    WARM_UP, ENOUGH = 10, 20

    def __init__(self, prediction: Prediction, first_iteration: int) -> None:
        self.prediction, self.first_iteration = prediction, first_iteration
        self.steps, self.seconds, self.done = 0, 0.0, False
        self.parts: dict[str, float] = {}
        self.apart: dict[str, float] = {}

    def add_apart(self, name: str, seconds: float) -> None:
        """Add seconds of an evaluation or a save after the warm-up."""
        if self.steps == 0 or self.done:
            return
        self.apart[name] = self.apart.get(name, 0.0) + seconds

    def add(self, first: int, number: int, seconds: float, parts: Mapping[str, float]) -> Comparison | None:
        """Add ``number`` iterations from ``first`` on, of ``seconds`` in total, with mean ``parts``. Return the
        comparison once there are enough iterations, else None."""
        if self.done or first < self.first_iteration + self.WARM_UP:
            return None
        self.steps, self.seconds = self.steps + number, self.seconds + seconds
        for name, value in parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + value * number
        if self.steps < self.ENOUGH:
            return None
        self.done = True
        means = {name: value / self.steps for name, value in self.parts.items()}
        apart = {name: value / self.steps for name, value in self.apart.items()}
        return compare(self.prediction, self.seconds / self.steps, means, apart)
