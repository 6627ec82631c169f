"""Padding and split of the vocabulary.

The padding does not affect results: padded rows are zero, excluded from every softmax, get no gradient and are not
saved in checkpoints."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron.core.config.errors import UserError
from megatron.core.groups.process_groups import Group


def padded_vocab_size(vocab_size: int, multiple: int = 128) -> int:
    """Return the smallest multiple of ``multiple``, at least ``vocab_size``; UserError unless both are positive."""
    if vocab_size < 1 or multiple < 1:
        raise UserError(f"vocab_size {vocab_size} and make_vocab_size_divisible_by {multiple} must be positive")
    return -(-vocab_size // multiple) * multiple


def stored_vocab_size(vocab_size: int, multiple: int, group: Group) -> int:
    """Return the padded size that is also divisible by the size of ``group``."""
    return padded_vocab_size(vocab_size, math.lcm(multiple, group.size))


def num_true_entries(vocab_size: int, local_size: int, group: Group) -> int:
    """Return how many of this rank's ``local_size`` vocabulary entries are not padding."""
    return max(0, min(local_size, vocab_size - group.rank * local_size))


class IdOutOfRange(UserError, IndexError):
    """Error for a token id outside of the vocabulary; also an ``IndexError``."""


def check_ids(ids: Tensor, vocab_size: int, what: str, allow_negative: bool = False) -> None:
    """Raise IdOutOfRange (a UserError and IndexError) for ids outside of [0, vocab_size); ``what`` names them in the
    message. For GPU tensors it is a device assertion instead, without a sync. ``allow_negative``: accept ids below 0,
    such as -1 and -100, which mark positions that the caller masks out of the loss."""
    inside = ids < vocab_size
    inside = (inside if allow_negative else inside & (ids >= 0)).all()
    if ids.is_cuda:
        torch._assert_async(inside)
    elif not inside:
        raise IdOutOfRange(
            f"{what} range from {int(ids.min())} to {int(ids.max())}, outside of the vocabulary of {vocab_size}; "
            f"mask tokens "
            "out by their loss mask, not by an id"
        )
