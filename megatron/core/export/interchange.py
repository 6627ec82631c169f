"""What a loader gives and a saver takes: a model between two formats of checkpoints.

The common form is that of this project's own checkpoints: global tensors (no layout, no padding) under global names,
and the settings under the names of flags. Every format is one translation to and from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron.core.sharding.lazy_tensor import LazyTensor

COUNTER = "router.last_choices"
"""End of the names of integer buffers that a model begins at zero and that no other format has."""


@dataclass
class Interchange:
    """A model, and the training state where the format holds one."""

    settings: dict[str, Any]
    """Field of the command line's settings (``num_layers``, ``swiglu`` …) -> value: those that the format knows."""
    tensors: dict[str, LazyTensor]
    """``model.…`` for weights; ``optimizer.exp_avg.…``, ``optimizer.exp_avg_sq.…``, ``optimizer.main_param.…`` where
    the format holds optimizer state."""
    objects: dict[str, Any] = field(default_factory=dict)
    """The JSON of a training checkpoint (``iteration``, ``train_state``, ``optimizer``, ``scheduler`` …); empty where
    there are weights alone."""
    assets: dict[str, Path] = field(default_factory=dict)
    """Files that go along: ``tokenizer/<name>`` -> path."""
    notes: list[str] = field(default_factory=list)
    """What could not come over, or differs, in words for the user."""


def with_counters(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """``tensors``, and zeros for the counter of every router of experts among them that has none."""
    result = dict(tensors)
    for name, tensor in tensors.items():
        if name.startswith("model.") and name.endswith("router.weight"):
            zeros = torch.zeros(tensor.shape[0], dtype=torch.int64)
            result.setdefault(name.replace("router.weight", COUNTER), LazyTensor.of(zeros))
    return result


def differences(tensors: Mapping[str, LazyTensor], expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Describe, tensor by tensor, what is not as ``expected`` (name -> shape); counters may be there or not."""
    missing = [f"{name} is missing, expected {list(expected[name])}" for name in expected if name not in tensors]
    found = [(name, list(tensor.shape)) for name, tensor in tensors.items() if not name.endswith(COUNTER)]
    others = [
        f"{name} has shape {shape}, expected {list(expected[name])}"
        for name, shape in found if name in expected and shape != list(expected[name])
    ]  # fmt: skip
    return missing + others + [f"{name} {shape} is not expected" for name, shape in found if name not in expected]
