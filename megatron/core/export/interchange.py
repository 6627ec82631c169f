"""What a loader gives and a saver takes: a model between two formats of checkpoints.

The common form is that of this project's own checkpoints: global tensors (no layout, no padding) under global names,
and the settings under the names of flags. Every format is one translation to and from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.core.sharding.lazy_tensor import LazyTensor


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
