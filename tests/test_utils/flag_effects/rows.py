"""Rows of the table of flag effects, and the functions that build their expectations.

An expectation is a function of (base run, changed run) that raises AssertionError. A flag without effect would
produce the base run again. So at least one of a row's expectations must fail on (base run, base run); the test checks
this for every row.
"""

import dataclasses
import math
from collections.abc import Callable

import torch

LAYERS = "decoder.layers."


@dataclasses.dataclass(frozen=True)
class Row:
    """A flag, its value, and the expected effects."""

    changed: str
    """Flags that only the changed run has; the tested flag comes first."""
    expect: tuple[Callable, ...]
    base: str = ""
    """Flags of both runs in addition to ``observe.MODEL``."""
    drop: str = ""
    """Flags of ``MODEL``, one value each, that the changed run does not have."""
    without: str = ""
    """Flags of ``MODEL`` that neither run has."""
    ranks: int = 1
    count: tuple[str, ...] = ()
    pretend: str | None = None

    @property
    def flag(self):
        return self.changed.split()[0]


@dataclasses.dataclass(frozen=True)
class Probe:
    """A flag whose effect is read from one function because a run would need a GPU, a package, a tokenizer's files or
    a second program."""

    changed: str
    ask: Callable
    """Function from resolved settings to their effect."""
    expect: object
    """Result of ``ask`` with the flag; without the flag, the result must differ."""
    base: str = ""
    drop: str = ""
    without: str = ""
    ranks: int = 1
    family: str = "gpt"
    """Model family of the program."""

    @property
    def flag(self):
        return self.changed.split()[0]


def row(changed, *expect, **remaining):
    """A :class:`Row`."""
    return Row(changed, expect, **remaining)


def same(left, right):
    """Equal, bit for bit where there are tensors."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.shape == right.shape and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def close(left, right, tolerance=1e-5):
    """Whether numbers, tensors (relative to the largest magnitude), or dicts and lists are equal up to rounding."""
    if isinstance(left, torch.Tensor):
        if left.shape != right.shape:
            return False
        scale = float(right.double().abs().max()) if right.numel() else 0.0
        return bool(((left.double() - right.double()).abs() <= tolerance * scale + 1e-12).all())
    if isinstance(left, dict):
        return set(left) == set(right) and all(close(left[key], right[key], tolerance) for key in left)
    if isinstance(left, (list, tuple)):
        if not isinstance(right, (list, tuple)):
            return False
        return len(left) == len(right) and all(close(a, b, tolerance) for a, b in zip(left, right))
    if isinstance(left, float):
        return math.isclose(left, right, rel_tol=tolerance, abs_tol=1e-12)
    return left == right


def changes(*names):
    """Each of these observations differs from the base run's."""

    def changes_them(base, run):
        finished(base, run)
        for name in names:
            assert not same(getattr(base, name), getattr(run, name)), f"{name} is the same with and without the flag"

    return changes_them


def keeps(*names):
    """Each of these observations is, bit for bit, the base run's."""

    def keeps_them(base, run):
        finished(base, run)
        for name in names:
            assert same(getattr(base, name), getattr(run, name)), f"{name} is not what it is without the flag"

    return keeps_them


def keeps_to_rounding(*names, tolerance=1e-4):
    """Each of these observations is the base run's to rounding."""

    def keeps_them(base, run):
        finished(base, run)
        for name in names:
            left, right = getattr(run, name), getattr(base, name)
            assert close(left, right, tolerance), f"{name} is not what it is without the flag"

    return keeps_them


def gives(look, value, tolerance=1e-6):
    """``look(run)`` is ``value`` (to rounding)."""

    def gives_it(base, run):
        finished(run)
        result = look(run)
        assert close(result, value, tolerance), f"{result!r}, expected {value!r}"

    return gives_it


def says(text):
    """The log holds ``text``."""

    def says_it(base, run):
        finished(run)
        assert run.rank or text in run.log, f"the log says nothing of {text!r}: {run.log[-3000:]}"

    return says_it


def stops(text, code=None):
    """The run does not begin or ends early, and stderr holds ``text``."""

    def stops_it(base, run):
        assert run.code != 0 and code in (None, run.code), (run.code, run.errors)
        assert run.rank or text in run.errors, run.errors  # the first rank speaks for all

    return stops_it


def finished(*runs):
    for run in runs:
        assert run.code == 0, f"exit code {run.code}: {run.errors}"


def accepts(base, run):
    """The run goes through, while without the flag it does not."""
    finished(run)


def shape(name):
    """A function of a run: the shape of an initial weight, None if the weight does not exist."""
    return lambda run: tuple(run.initial[name].shape) if name in run.initial else None


def modules(name):
    return lambda run: run.modules.get(name, 0)
