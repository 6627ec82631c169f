"""What cuDNN's attention, which torch's SDPA calls, gets wrong without a word. Torch-free."""

from __future__ import annotations

CUDNN_LENGTHS = 128
"""Queries and keys must be multiples of this: of other lengths the backward pass reads what lies behind their end, and
gives NaN or an illegal access (NVIDIA/cudnn-frontend#160, pytorch/pytorch#171627)."""


def cudnn_takes_lengths(num_queries: int, num_keys: int) -> bool:
    """Whether the gradients of attention of such lengths are right, whatever memory holds."""
    return num_queries % CUDNN_LENGTHS == 0 and num_keys % CUDNN_LENGTHS == 0
