"""Check of a custom data set: its first sample must have the keys and shapes that the task reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from megatron.core.config.errors import UserError

if TYPE_CHECKING:
    from megatron.training.data.loader import DataSource

OPTIONAL = ("cu_seqlens",)


def check_first_sample(dataset: DataSource, expected: Mapping[str, object], source: str) -> None:
    """Compare ``dataset[0]`` with ``expected``, a sample of the task; skip a data set that is None, empty or not
    map-style. Ignores additional keys, values, and ``cu_seqlens``.

    Args:
        source: name of the data set in messages.

    Raises:
        UserError: lists missing keys and wrong shapes and dtypes, with the expected ones."""
    if dataset is None or not hasattr(dataset, "__getitem__") or not len(dataset):
        return
    sample = dataset[0]
    if not isinstance(sample, Mapping):
        raise UserError(f"{source}: a sample is a {type(sample).__name__}; return a dictionary of {_listed(expected)}")
    problems = []
    if missing := [key for key in expected if key not in sample and key not in OPTIONAL]:
        problems.append(f"lacks {', '.join(missing)} (it has {', '.join(map(str, sample)) or 'no keys'})")
    for key in expected.keys() & sample.keys() - {*OPTIONAL}:
        problems += _differences(key, sample[key], np.asarray(expected[key]))
    if problems:
        raise UserError(f"{source}: the first sample {'; '.join(sorted(problems))}; expected: {_listed(expected)}")


def _differences(key: str, value: object, expected: np.ndarray) -> list[str]:
    """Return at most one message about ``value``: no array, another shape, or another kind of dtype. Integers must stay
    integers except in ``loss_mask``; bit width does not matter; floats may also be integers or bool."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        return [f"has a {key} that is no array ({error})"]
    if array.shape != expected.shape:
        return [f"has {key} of shape {list(array.shape)} instead of {list(expected.shape)}"]
    kinds = "iu" if expected.dtype.kind in "iu" and key != "loss_mask" else "iufb"
    return [] if array.dtype.kind in kinds else [f"has {key} of type {array.dtype}"]


def _listed(expected: Mapping[str, object]) -> str:
    arrays = {key: np.asarray(value) for key, value in expected.items() if key not in OPTIONAL}
    return ", ".join(f"{key} {list(array.shape)} {array.dtype}" for key, array in arrays.items())
