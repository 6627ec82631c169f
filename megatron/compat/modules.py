"""Modules and functions of layers that programs build themselves from."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core import parallel_state
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.groups.process_groups import AnyGroup
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer.norm import build_norm


class WrappedTorchNorm:
    """The norm that ``config.normalization`` names, as the library builds it."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **unused: object) -> Any:
        return build_norm(config, hidden_size, eps, groups=parallel_state.get_process_groups())


class FusedLayerNorm(WrappedTorchNorm):
    """Same as the base: the library chooses the kernels."""


class InferenceParams:
    """Arguments of inference in annotations; models here generate through ``tools/generate.py``."""

    def __init__(self, max_batch_size: int, max_sequence_length: int) -> None:
        self.max_batch_size, self.max_sequence_length = max_batch_size, max_sequence_length


class BaseInferenceContext:
    """Base of contexts of inference, for annotations and instance checks."""


def fused_vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, tp_group: AnyGroup = None
) -> Tensor:
    """``vocab_parallel_cross_entropy`` without smoothing; fused where the device has such a kernel."""
    return vocab_parallel_cross_entropy(vocab_parallel_logits, target, tp_group=tp_group)


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2."""
    return F.relu(x).square()


def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x)."""
    return x * torch.sigmoid(1.702 * x)


def fast_gelu(x: Tensor) -> Tensor:
    """GELU by its tanh approximation."""
    return F.gelu(x, approximate="tanh")


def roll_tensor(
    tensor: Tensor,
    shifts: int = -1,
    dims: int = -1,
    cp_group: AnyGroup = None,
    packed_seq_params: PackedSeqParams | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (``tensor`` shifted one place to the left along ``dims``, zeros at the end of each document; the sum of
    the result). ``tensor`` is not changed. Raises ValueError for other shifts, or with context parallelism."""
    if shifts != -1 or parallel_state.resolve_group(cp_group, "cp").size > 1:
        raise ValueError("roll_tensor: only shifts of -1 without context parallelism are available here")
    rolled = tensor.roll(-1, dims)
    ends = [tensor.shape[dims]]
    if packed_seq_params is not None and packed_seq_params.cu_seqlens_q is not None:
        ends += packed_seq_params.cu_seqlens_q[1:].tolist()
    rolled.index_fill_(dims, torch.tensor(sorted({end - 1 for end in ends if end}), device=tensor.device), 0)
    return rolled, rolled.sum()
