"""The data sets of a run, their proportions, and how one is cut into train, valid and test.

Parsing without side effects of ``--data-path``, similar flags and ``--split``; every error names the flag."""

import enum
import math
import re
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from megatron.core.config.errors import UserError
from megatron.core.safe_files import parse_json, read_text

Blend = tuple[list[str], list[float] | None]
"""Prefixes, and their weights or None."""

Bounds = tuple[float, float] | None
"""A split as a half-open range of [0, 1], or None when it gets nothing."""

DEFAULT_SPLIT = "969, 30, 1"


class Split(enum.Enum):
    """The three parts of a data set."""

    train = 0
    valid = 1
    test = 2


def normalize(weights: Sequence[float]) -> list[float]:
    """Weights divided by their sum."""
    values = np.array(weights, dtype=np.float64)
    return (values / np.sum(values)).tolist()


def parse_and_normalize_split(split: str) -> list[float]:
    """Return three fractions that sum to 1 from text such as ``"949,50,1"``, ``"0.9 0.1"`` or ``"'99,1,0'"``; missing
    ones are 0. Raises UserError for other text (also signs and exponents), more than three numbers, or a sum of 0."""
    unknown = re.sub(r"[0-9.,/\s'\"%\[\]()]", "", split)
    numbers = re.findall(r"[.0-9]+", split)
    try:
        parts = [float(number) for number in numbers]
    except ValueError:
        parts = []
    if unknown or not parts or len(parts) > len(Split) or sum(parts) <= 0:
        raise UserError(
            f"--split {split!r}: give one to three numbers, not all zero, for train,valid,test, such as 969,30,1"
        )
    return normalize(parts + [0.0] * (len(Split) - len(parts)))


def convert_split_vector_to_split_matrix(fractions: Sequence[float]) -> list[Bounds]:
    """``[0.99, 0.01, 0.0]`` as ``[(0, 0.99), (0.99, 1.0), None]``."""
    edges: list[float] = [0]
    for fraction in fractions:
        edges.append(edges[-1] + fraction)
    return [(low, high) if high > low else None for low, high in zip(edges[:-1], edges[1:])]


def split_range(bounds: tuple[float, float], num_elements: int) -> tuple[int, int]:
    """The elements of a split, first and one past the last; halves round to even, as everywhere in Python."""
    return int(round(bounds[0] * float(num_elements))), int(round(bounds[1] * float(num_elements)))


def get_blend_from_list(blend: Sequence[object] | None, flag: str = "--data-path") -> Blend | None:
    """Return ``[prefix, ...]`` as (prefixes, None), ``[weight, prefix, weight, prefix, ...]`` as (prefixes, weights as
    given, not normalized); None for None. Raises UserError for an empty list, some weights only, numbers as prefixes,
    or weights that are not finite and above zero. A single entry is always a prefix. Opens no file."""
    if blend is None:
        return None
    entries = [str(entry).strip() for entry in blend]
    if not entries:
        raise UserError(f"{flag} is empty: give a prefix, several, or pairs of weight and prefix")
    numeric = [_as_number(entry) is not None for entry in entries]
    if len(entries) == 1 or not any(numeric):
        return entries, None
    if len(entries) % 2 or not all(numeric[0::2]) or any(numeric[1::2]):
        raise UserError(
            f"{flag} {' '.join(entries)}: neither a list of prefixes nor pairs of weight and prefix; "
            "give every prefix a weight before it, or none"
        )
    weights = [float(entry) for entry in entries[0::2]]
    check_weights(weights, entries[1::2], flag)
    return entries[1::2], weights


def check_weights(weights: Sequence[float], prefixes: Sequence[str], flag: str = "--data-path") -> None:
    """Raise UserError, beginning with ``flag``, unless every prefix has a finite weight above zero."""
    if len(weights) != len(prefixes):
        raise UserError(f"{flag}: {len(weights)} weights for {len(prefixes)} prefixes")
    for weight, prefix in zip(weights, prefixes):
        if not (math.isfinite(weight) and weight > 0):
            raise UserError(
                f"{flag}: the weight of {prefix} is {weight}; weights are above zero (leave the data set out instead)"
            )


def _as_number(entry: str) -> float | None:
    try:
        return float(entry)
    except ValueError:
        return None


class BlendSettings(Protocol):
    """Flags that name the data."""

    @property
    def data_path(self) -> list[str] | None: ...
    @property
    def data_args_path(self) -> str | None: ...
    @property
    def train_data_path(self) -> list[str] | None: ...
    @property
    def valid_data_path(self) -> list[str] | None: ...
    @property
    def test_data_path(self) -> list[str] | None: ...
    @property
    def per_split_data_args_path(self) -> str | None: ...
    @property
    def mock_data(self) -> bool: ...


def get_blend_and_blend_per_split(args: BlendSettings) -> tuple[Blend | None, list[Blend | None] | None]:
    """Return the data source that the flags name, as ``(blend, None)`` or ``(None, blend of each split)``; ``(None,
    None)`` without one or with mock data. Reads the files of ``data_args_path`` and ``per_split_data_args_path``.
    Raises UserError for more than one source, or a malformed one; the per-split paths are one source."""
    per_split = [args.train_data_path, args.valid_data_path, args.test_data_path]
    sources = {
        "--data-path": args.data_path is not None,
        "--data-args-path": args.data_args_path is not None,
        "--train-data-path/--valid-data-path/--test-data-path": any(paths is not None for paths in per_split),
        "--per-split-data-args-path": args.per_split_data_args_path is not None,
        "--mock-data": bool(args.mock_data),
    }
    chosen = [flag for flag, present in sources.items() if present]
    if len(chosen) > 1:
        raise UserError(f"{' and '.join(chosen)} are both given: a run reads exactly one source of data; keep one")
    if args.data_path is not None:
        return get_blend_from_list(args.data_path), None
    if args.data_args_path is not None:
        return get_blend_from_list(_read(args.data_args_path, "--data-args-path").split(), "--data-args-path"), None
    if any(paths is not None for paths in per_split):
        flags = [f"--{split.name}-data-path" for split in Split]
        return None, [get_blend_from_list(paths, flag) for paths, flag in zip(per_split, flags)]
    if args.per_split_data_args_path is not None:
        return None, _read_per_split(args.per_split_data_args_path)
    return None, None


def _read(path: str, flag: str) -> str:
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{flag} {path} cannot be read: {error}") from error


def _read_per_split(path: str) -> list[Blend | None]:
    """None if absent. Raises UserError for other content."""
    flag = "--per-split-data-args-path"
    text = _read(path, flag)
    try:
        content = parse_json(text)
    except ValueError as error:
        raise UserError(f"{flag} {path} is no JSON: {error}") from error
    names = [split.name for split in Split]
    if not isinstance(content, dict) or not content or not set(content) <= set(names):
        raise UserError(f'{flag} {path}: expected an object such as {{"train": ["prefix"], "valid": [1.0, "prefix"]}}')
    for name, blend in content.items():
        if blend is not None and not (
            isinstance(blend, list) and all(isinstance(entry, str | int | float) for entry in blend)
        ):
            raise UserError(f"{flag} {path}: {name!r} is neither a list of prefixes nor a list of weights and prefixes")
    return [get_blend_from_list(content.get(name), f"{flag} {path}, {name!r}") for name in names]
