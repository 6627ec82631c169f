"""Allowed values of a numeric setting, as annotations of its field: ``micro_batch_size: PositiveInt``.

A range limits one number independently of other settings. Upper bounds are far beyond any use; they
keep sums and products of settings inside 64 bits, and keep a mistyped number from becoming a list of that length.
Contradictions between settings are rules (``megatron.training.rules.run_all``). Standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

INT64_MAX = 2**63 - 1
FLOAT32_MAX = 3.4028234663852886e38
"""Larger numbers are infinite in tensors."""


def _is_finite(value: float) -> bool:
    """Also of integers that are too large for a float."""
    return isinstance(value, int) or math.isfinite(value)


@dataclass(frozen=True)
class Range:
    """From ``low`` to ``high``, both included unless ``above`` (the lower one is not) or ``below`` (the upper)."""

    low: float
    high: float = math.inf
    above: bool = False
    below: bool = False

    def __contains__(self, value: float) -> bool:
        if not _is_finite(value):
            return False
        return (value > self.low if self.above else value >= self.low) and (
            value < self.high if self.below else value <= self.high
        )

    @property
    def bounds(self) -> str:
        """The range for messages, such as "at least 1 and at most 8"; without bounds of 64 bits or fp32."""
        if self.above and self.low == 0 and self.high in (math.inf, FLOAT32_MAX):
            return "positive"
        low = f"{'more than' if self.above else 'at least'} {self.low:g}" if self.low > -FLOAT32_MAX else ""
        named = self.high not in (math.inf, INT64_MAX, FLOAT32_MAX)
        high = f"{'less than' if self.below else 'at most'} {_exact(self.high)}" if named else ""
        return " and ".join(filter(None, (low, high)))

    def __str__(self) -> str:
        """Return the range for the flag reference, such as "0 to below 1"; empty for any number."""
        if self.low <= -FLOAT32_MAX:
            return ""
        low = "more than " * self.above + f"{self.low:g}"
        if self.high >= 2**31 - 1:
            return low if self.above else f"at least {low}"
        return f"{low} to {'below ' * self.below}{_exact(self.high)}"

    def reason(self, value: float) -> str:
        """Return why ``value`` is rejected ("must be …"); empty if it is accepted."""
        if value in self:
            return ""
        if _is_finite(value) and self.high == INT64_MAX and value > self.high:
            return "must be less than 2^63"
        if _is_finite(value) and FLOAT32_MAX in (abs(self.low), self.high) and abs(value) > FLOAT32_MAX:
            return f"magnitude must be at most {FLOAT32_MAX:.1e}: larger numbers are infinite in fp32"
        return f"must be {self.bounds}" if _is_finite(value) and self.bounds else "must be a finite number"


def _exact(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


PositiveInt = Annotated[int, Range(1, INT64_MAX)]
NonNegativeInt = Annotated[int, Range(0, INT64_MAX)]
Dim = Annotated[int, Range(1, 2**31 - 1)]
"""Size of a tensor dimension."""
NumRanks = Annotated[int, Range(1, 2**20)]
Layers = Annotated[int, Range(1, 2048)]
"""Layers of a model: lists with an entry per layer (patterns, costs of pipeline stages) stay short."""
Samples = Annotated[int, Range(1, 2**40)]
Batch = Annotated[int, Range(1, 2**31 - 1)]
"""Sequences of a batch."""
Iterations = Annotated[int, Range(0, 2**40)]
Minutes = Annotated[int, Range(1, 10 * 366 * 1440)]
Seconds = Annotated[float, Range(0, 10 * 366 * 86400)]
Gibibytes = Annotated[float, Range(0, 2**20, above=True)]
PositiveFloat = Annotated[float, Range(0, FLOAT32_MAX, above=True)]
NonNegativeFloat = Annotated[float, Range(0, FLOAT32_MAX)]
AnyFloat = Annotated[float, Range(-FLOAT32_MAX, FLOAT32_MAX)]
RotaryBase = Annotated[float, Range(1, FLOAT32_MAX)]
Probability = Annotated[float, Range(0, 1, below=True)]
