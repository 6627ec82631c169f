"""Text from a trained model, one token at a time, each from a full forward pass over the context.

There is no cache of keys and values: for looking at a model during training, not for serving it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from megatron.core.config.errors import UserError


def filter_logits(logits: Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 0.0) -> Tensor:
    """Logits [v] over ``temperature``, with all but the allowed tokens at -inf.

    Args:
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probabilities sum to at least this; 0 keeps all.
    """
    logits = logits.float() / temperature
    if top_k > 0:
        smallest = logits.topk(min(top_k, logits.numel())).values[-1]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    if top_p > 0.0:
        values, order = logits.sort(descending=True)
        probabilities = values.softmax(dim=-1)
        beyond = probabilities.cumsum(dim=-1) - probabilities >= top_p  # the token that reaches top_p stays
        logits = logits.index_fill(0, order[beyond], float("-inf"))
    return logits


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: list[int],
    *,
    max_new_tokens: int,
    max_sequence_length: int,
    stop_token: int | None = None,
    greedy: bool = False,
    generator: torch.Generator | None = None,
    filters: dict[str, float] | None = None,
) -> Iterator[int]:
    """Yields tokens after ``prompt`` until ``stop_token`` (not yielded) or ``max_new_tokens``.

    Args:
        model: maps (input_ids [1, s], position_ids [1, s]) to logits [1, s, v]; left in evaluation mode.
        max_sequence_length: the context; older tokens fall out of it.
        generator: of the draws, on the CPU; None takes torch's global one.
        filters: keyword arguments of :func:`filter_logits`.
    """
    if not prompt:
        raise UserError("the prompt is empty: give at least one token (for example the end-of-document token)")
    model.eval()
    device = next(model.parameters()).device
    context = list(prompt)
    for _ in range(max_new_tokens):
        window = torch.tensor([context[-max_sequence_length:]], device=device)
        positions = torch.arange(window.shape[1], device=device)[None]
        logits = model(window, positions)[0, -1].cpu()
        if greedy:
            token = int(logits.argmax())
        else:
            weights = filter_logits(logits, **(filters or {})).softmax(dim=-1)  # type: ignore[arg-type]
            token = int(torch.multinomial(weights, 1, generator=generator))
        if token == stop_token:
            return
        yield token
        context.append(token)
