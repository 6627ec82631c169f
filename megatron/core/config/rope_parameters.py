"""Rotary scaling that depends on the length of a row: the JSON text of --rope-parameters. Torch-free."""

from __future__ import annotations

import json
import math
from typing import Literal, NamedTuple

KEYS = {
    "dynamic": {"rope_type", "factor", "original_max_position_embeddings"},
    "longrope": {"rope_type", "short_factor", "long_factor", "attention_factor", "original_max_position_embeddings"},
}
"""Keys of each type, all required."""


class RopeParameters(NamedTuple):
    """Fields as in ``rope_parameters`` of ``transformers``, except for defaults."""

    rope_type: Literal["dynamic", "longrope"]
    original_max_position_embeddings: int
    """Length in tokens up to which positions are plain (dynamic) or scaled by ``short_factor`` (longrope)."""
    factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    """Divisors of the frequencies of all channel pairs, [r / 2]."""
    long_factor: tuple[float, ...] = ()
    """Divisors for rows with more than ``original_max_position_embeddings`` tokens, [r / 2]."""
    attention_factor: float = 1.0
    """Factor of cosines and sines."""

    def to_text(self) -> str:
        """Return the JSON text that :func:`parse_rope_parameters` reads."""
        return json.dumps({name: value for name, value in self._asdict().items() if name in KEYS[self.rope_type]})


def parse_rope_parameters(text: str) -> RopeParameters:
    """Convert the JSON text. Raises ValueError for other keys than :data:`KEYS`, numbers that are not finite and
    positive, a dynamic factor below 1, an original length below 2, or lists of different lengths."""
    try:
        table = json.loads(text)
    except ValueError:
        raise ValueError('must be a JSON object such as {"rope_type": "dynamic", "factor": 2.0, ...}') from None
    kind = table.get("rope_type") if isinstance(table, dict) else None
    if not isinstance(kind, str) or kind not in KEYS:
        raise ValueError(f"rope_type must be one of {', '.join(KEYS)}")
    if table.keys() != KEYS[kind]:
        raise ValueError(f"{kind} must have the keys {', '.join(sorted(KEYS[kind]))}")
    for name, value in table.items():
        is_list = name in ("short_factor", "long_factor")
        numbers = value if is_list else [value]
        is_valid = isinstance(numbers, list) and numbers and all(map(_is_positive, numbers))
        if name != "rope_type" and not is_valid:
            raise ValueError(f"{name} must be {'a list of positive numbers' if is_list else 'a positive number'}")
        if is_list:
            table[name] = tuple(map(float, numbers))
    parameters = RopeParameters(**table)
    if parameters.factor < 1:
        raise ValueError("factor must be at least 1")
    if type(parameters.original_max_position_embeddings) is not int or parameters.original_max_position_embeddings < 2:
        raise ValueError("original_max_position_embeddings must be an integer of at least 2")
    if len(parameters.short_factor) != len(parameters.long_factor):
        raise ValueError("short_factor and long_factor must have the same length")
    return parameters


def _is_positive(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf  # type: ignore[operator]
