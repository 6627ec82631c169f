"""Global generators of python, numpy and torch as tensors, saved for user code; this library does not draw
from them."""

from __future__ import annotations

import random
import struct

import numpy as np
import torch
from torch import Tensor

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError
from megatron.core.sharding.sharded_tensor import ShardedTensor


def _bits(value: float | None) -> list[int]:
    """Return [is set, bits of the double]."""
    return [0, 0] if value is None else [1, struct.unpack("<q", struct.pack("<d", value))[0]]


def _double(is_set: int, bits: int) -> float | None:
    return struct.unpack("<d", struct.pack("<q", bits))[0] if is_set else None


def get_rng_state() -> dict[str, Tensor]:
    """Return a flat CPU tensor per global generator, int64 for Python and numpy, uint8 for torch."""
    _, words, gauss = random.getstate()
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict) and state["bit_generator"] == "MT19937", "numpy's global generator is this one"
    keys, position = state["state"]["key"].tolist(), state["state"]["pos"]
    cached = state["gauss"] if state["has_gauss"] else None
    states = {
        "python": torch.tensor([*words, *_bits(gauss)], dtype=torch.int64),
        "numpy": torch.tensor([*keys, position, *_bits(cached)], dtype=torch.int64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_rng_state(states: dict[str, Tensor]) -> None:
    """Restore the generators from :func:`get_rng_state`. Raises ``CheckpointDamagedError`` for invalid states."""
    try:
        _set_rng_state(states)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:  # raised by four libraries
        raise CheckpointDamagedError(f"the random states of the checkpoint fit no generator: {error}") from error


def _set_rng_state(states: dict[str, Tensor]) -> None:
    *words, is_set, bits = states["python"].tolist()
    random.setstate((3, tuple(words), _double(is_set, bits)))
    *keys, position, is_set, bits = states["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, is_set, _double(is_set, bits) or 0.0))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states["cuda"])


def rng_tensors(rank: int, world_size: int, *, prefix: str = "rng.") -> dict[str, ShardedTensor]:
    """Return this rank's row of a [world size, state] tensor per generator."""
    return {
        prefix + name: ShardedTensor(prefix + name, state[None], (world_size, state.numel()), (rank, 0))
        for name, state in get_rng_state().items()
    }
