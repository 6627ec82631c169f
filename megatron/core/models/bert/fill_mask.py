"""Predictions of an encoder for masked tokens and for the order of two texts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


@torch.no_grad()
def fill_mask(
    model: nn.Module, text: Sequence[int], mask: int, types: Sequence[int] | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the probabilities fp32 [m, v], on the CPU, of the tokens at the m positions where ``text`` holds the id
    ``mask`` (m may be 0), and [2] that the two parts of ``text`` are in order and swapped; None if the model has no
    binary head.

    Args:
        model: a :class:`BertModel`; left in evaluation mode.
        text: a whole sample, special tokens included.
        types: of its tokens, for a model that knows types."""
    model.eval()
    device = next(model.parameters()).device
    ids = torch.tensor([list(text)], device=device)
    logits, order = model(ids, tokentype_ids=None if types is None else torch.tensor([list(types)], device=device))
    return logits[ids == mask].float().softmax(-1).cpu(), None if order is None else order[0].float().softmax(-1).cpu()
