"""Validation of a checkpoint's JSON before any of it is used.

The checksum proves that a manifest is intact, not who wrote it. A counter that is NaN, negative or a list would cause a
traceback far from its origin, or an endless loop; validation gives one message instead."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_type_hints

from megatron.core.config.errors import UserError
from megatron.core.schedules.learning_rate import SchedulePlan
from megatron.training.train_state import TrainState

MAX_COUNT = 2**53
"""Largest counter; larger integers are not exact as doubles."""

Check = Callable[[Any], bool]


def is_count(value: object) -> bool:
    """Whether ``value`` is an integer in [0, MAX_COUNT], not a bool."""
    return type(value) is int and 0 <= value <= MAX_COUNT


def is_number(value: Any) -> bool:
    """Whether ``value`` is a finite number below 1e300 in magnitude, not a bool."""
    return type(value) in (int, float) and abs(value) < 1e300 and math.isfinite(value)


def is_size(value: Any) -> bool:
    """Whether ``value`` is a finite, non-negative number."""
    return is_number(value) and value >= 0


def is_text(value: object) -> bool:
    return isinstance(value, str)


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


_BY_TYPE: dict[object, Check] = {
    int: is_count,
    float: is_number,
    str: is_text,
    int | None: _or_none(is_count),
    str | None: _or_none(is_text),
}
_TRAIN_STATE: dict[str, Check] = {
    name: is_size if name == "floating_point_operations" else is_count for name in TrainState.__dataclass_fields__
}
_SCHEDULER: dict[str, Check] = {
    "num_steps": is_count,
    **{name: _BY_TYPE[kind] for name, kind in get_type_hints(SchedulePlan).items()},
}
_SCALER: dict[str, Check] = {
    "scale": lambda value: is_number(value) and value > 0,
    "growth_tracker": is_count,
    "hysteresis_tracker": is_count,
}


def _is_scaler(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() in (set(), {"scale"}, _SCALER.keys())
        and all(_SCALER[key](entry) for key, entry in value.items())
    )


def malformed(objects: dict[str, Any], *, release: bool = False) -> list[str]:
    """Return messages for missing, wrong or contradicting objects of a checkpoint. ``scheduler``, ``versions`` and
    ``optimizer`` may be missing, for a ``release`` (weights only) also counters."""
    problems = []
    required = {"args", "tokenizer"} | (set() if release else {"iteration", "train_state"})
    problems += [f"{name} is missing" for name in sorted(required - objects.keys())]
    checks: dict[str, Check] = {"iteration": is_count, "tokenizer": _or_none(is_text)}
    problems += _against(checks, {key: objects[key] for key in checks if key in objects}, "")
    problems += _table(objects, "args", {}, exact=False)
    problems += _table(objects, "train_state", _TRAIN_STATE)
    problems += _table(objects, "scheduler", _SCHEDULER) or _impossible_schedule(objects.get("scheduler"))
    problems += _table(objects, "versions", dict.fromkeys(("python", "torch"), is_text), exact=False)
    if "optimizer" in objects:
        problems += _table(objects, "optimizer", {"step": is_count, "grad_scaler": _is_scaler})
    state = objects.get("train_state")
    if not problems and not release and isinstance(state, dict) and state["iteration"] != objects["iteration"]:
        problems.append(f"iteration is {objects['iteration']}, train_state counts {state['iteration']}")
    return problems


def _impossible_schedule(scheduler: dict[str, Any] | None) -> list[str]:
    if scheduler is None:
        return []
    try:
        SchedulePlan(**{name: value for name, value in scheduler.items() if name != "num_steps"})
    except UserError as error:
        return [f"scheduler: {error}"]
    return []


def _table(objects: dict[str, object], name: str, checks: dict[str, Check], exact: bool = True) -> list[str]:
    """``exact``: the dictionary must have just the keys of ``checks``."""
    if name not in objects:
        return []
    table = objects[name]
    if not isinstance(table, dict):
        return [f"{name} is {_short(table)}, not a table"]
    problems = _against(checks, table, f"{name}.")
    if exact and table.keys() != checks.keys():
        problems.append(f"{name} has the entries {_short(sorted(table))}, expected {', '.join(sorted(checks))}")
    return problems


def _against(checks: dict[str, Check], table: dict[str, object], prefix: str) -> list[str]:
    wrong = [key for key, check in checks.items() if key in table and not check(table[key])]
    return [f"{prefix}{key} is {_short(table[key])}" for key in wrong]


def _short(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # the integer has too many digits for Python to print
        text = "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."
