"""Padding and split of the vocabulary.

The padded size depends on a multiple and on nothing else that could reach the numbers: padded rows are zero, take no
part in any softmax, get no gradient and are not part of any checkpoint.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron.core.config.errors import UserError
from megatron.core.groups.process_groups import Group


def padded_vocab_size(vocab_size: int, multiple: int = 128) -> int:
    """The smallest multiple of ``multiple`` that is at least ``vocab_size``."""
    if vocab_size < 1 or multiple < 1:
        raise UserError(f"vocab_size {vocab_size} and make_vocab_size_divisible_by {multiple} must be positive")
    return -(-vocab_size // multiple) * multiple


def stored_vocab_size(vocab_size: int, multiple: int, group: Group) -> int:
    """The padded size that also divides evenly over the ranks of ``group``."""
    return padded_vocab_size(vocab_size, math.lcm(multiple, group.size))


def num_true_entries(vocab_size: int, local_size: int, group: Group) -> int:
    """Number of this rank's ``local_size`` vocabulary entries that exist (the rest is padding)."""
    return max(0, min(local_size, vocab_size - group.rank * local_size))


class IdOutOfRange(UserError, IndexError):
    """The data holds a token id that the vocabulary does not have."""


def check_ids(ids: Tensor, vocab_size: int, what: str) -> None:
    """IndexError for ids outside of [0, vocab_size); on GPUs a device assertion, which does not wait."""
    inside = ((ids >= 0) & (ids < vocab_size)).all()
    if ids.is_cuda:
        torch._assert_async(inside)
    elif not inside:
        raise IdOutOfRange(
            f"{what} range from {int(ids.min())} to {int(ids.max())}, outside of the vocabulary of {vocab_size}; "
            f"mask tokens "
            "out by their loss mask, not by an id"
        )
