"""``Interchange``: the common form that loaders return and savers accept.

Follows this project's checkpoints: unsharded, unpadded tensors under global names, and settings under flag names. Each
checkpoint format is one translation from and to this form."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError
from megatron.core.sharding.lazy_tensor import LazyTensor

COUNTER = "router.last_choices"
"""Suffix of the routers' int64 counters, which start at zero and exist only in native checkpoints."""


Settings = Mapping[str, Any]
"""Fields of a model's configuration, or Megatron-LM's arguments, by name."""


@dataclass
class Interchange:
    """A model, with training state if the format stores it."""

    settings: dict[str, Any]
    """Setting name (``num_layers``, ``swiglu`` …) -> value, for the settings that the format stores."""
    tensors: dict[str, LazyTensor]
    """Lazy tensors: ``model.…`` for weights; with optimizer state also ``optimizer.exp_avg.…``,
    ``optimizer.exp_avg_sq.…`` and ``optimizer.main_param.…``."""
    objects: dict[str, Any] = field(default_factory=dict)
    """JSON of a training checkpoint (``iteration``, ``train_state``, ``optimizer``, …); empty for weights only."""
    assets: dict[str, Path] = field(default_factory=dict)
    """Additional files to copy: ``tokenizer/<name>`` -> source path."""
    notes: list[str] = field(default_factory=list)
    """Messages for the user about data that was not converted or differs."""


def check_names(names: Iterable[str], where: str | os.PathLike) -> None:
    """Raise CheckpointDamagedError for tensor names with control characters, which could manipulate a terminal."""
    for name in names:
        if not name.isprintable():
            raise CheckpointDamagedError(f"{where}: the name {name!r:.100} of a tensor holds control characters")


def with_counters(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Add lazy int64 zeros [experts] for every ``model.…router.weight`` whose counter is missing."""
    result = dict(tensors)
    for name, tensor in tensors.items():
        if name.startswith("model.") and name.endswith("router.weight"):
            zeros = torch.zeros(tensor.shape[0], dtype=torch.int64)
            result.setdefault(name.replace("router.weight", COUNTER), LazyTensor.of(zeros))
    return result


def differences(tensors: Mapping[str, LazyTensor], expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Describe missing tensors, wrong shapes and extra tensors. Counters in ``tensors`` are ignored."""
    missing = [f"{name} is missing, expected {list(expected[name])}" for name in expected if name not in tensors]
    shapes = [(name, list(tensor.shape)) for name, tensor in tensors.items() if not name.endswith(COUNTER)]
    misshapen = [
        f"{name} has shape {shape}, expected {list(expected[name])}"
        for name, shape in shapes
        if name in expected and shape != list(expected[name])
    ]
    return missing + misshapen + [f"{name} {shape} is not expected" for name, shape in shapes if name not in expected]
