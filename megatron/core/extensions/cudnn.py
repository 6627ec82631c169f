"""What cuDNN's attention, which torch's SDPA calls, is reported to get wrong without a word. Torch-free."""

from __future__ import annotations

CUDNN_LENGTHS = 128
"""Queries and keys must be multiples of this: of other lengths the backward pass was reported to give NaN and illegal
accesses (NVIDIA/cudnn-frontend#160, pytorch/pytorch#171627). A test over 16 tokens gave both with cuDNN 9.19 and torch
2.11 on an H200, in memory that had been used before."""


def cudnn_takes_lengths(num_queries: int, num_keys: int) -> bool:
    """Whether gradients of attention of such lengths can be trusted."""
    return num_queries % CUDNN_LENGTHS == 0 and num_keys % CUDNN_LENGTHS == 0
