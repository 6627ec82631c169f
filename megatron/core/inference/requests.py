"""Requests to the generation engine, and their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megatron.core.config.errors import UserError
from megatron.core.inference.images import PromptImages
from megatron.core.inference.sampling import NOT_FINITE, PLAIN, Sampling

FinishReason = Literal["stop", "length", "cancelled", "failed"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt to continue or to score."""

    prompt: Sequence[int]
    """Token ids; at least one."""
    images: PromptImages | None = None
    """Images of the prompt, which has one image token per square of patches."""
    max_new_tokens: int = 16
    """0: score the prompt only."""
    sampling: Sampling = PLAIN
    stop_tokens: Sequence[int] = ()
    """Tokens that end the text; they are not part of it."""
    prompt_logprobs: bool = False
    """Whether to compute log-probabilities of the prompt's tokens, which needs a forward pass over the full prompt."""
    top_logprobs: int = 0
    """Number of most likely tokens to report at each position."""
    logprobs_at_temperature: bool = False
    """Whether the temperature divides the logits of log-probabilities (0: by 1)."""
    return_routes: bool = False
    """Whether to return the experts of each token. Cached prefixes, which have none, are then computed again."""


class TokenScore(NamedTuple):
    """Log-probability of a token: fp32 log-softmax of the true vocabulary, before filters, and before temperature
    unless the request has ``logprobs_at_temperature``."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """Most likely tokens with their log-probabilities, best first."""


@dataclass
class Completion:
    """Result of a request."""

    tokens: list[int] = field(default_factory=list)
    """Generated tokens, without the stop token."""
    scores: list[TokenScore] = field(default_factory=list)
    """One entry per sampled token, the stop token included."""
    prompt_scores: list[TokenScore | None] = field(default_factory=list)
    """One entry per prompt token if requested; None for the first."""
    finish_reason: FinishReason | None = None
    """``stop``: a stop token; ``length``: ``max_new_tokens`` or the maximum sequence length; ``cancelled``:
    :meth:`Engine.cancel`; ``failed``: logits are NaN or infinite. None: running."""
    route_parts: list[Tensor] = field(default_factory=list, repr=False)
    """Experts of the tokens of each step, int32 [layers, tokens, k]; -1 in layers without experts."""

    def check(self) -> None:
        """Raise UserError if the request failed."""
        if self.finish_reason == "failed":
            raise UserError(NOT_FINITE)

    @property
    def routes(self) -> dict[int, Tensor]:
        """Layer number -> experts, int64 [tokens, k], of prompt and text if requested, for
        ``transformer/moe/replay.py``. The last token of the text lacks routes if no forward pass has computed it."""
        layers = torch.cat(self.route_parts, 1).long() if self.route_parts else ()
        return {layer: experts for layer, experts in enumerate(layers, 1) if (experts >= 0).all()}


class Output(NamedTuple):
    """Progress of one request in a step."""

    request: int
    """Number that ``Engine.add`` returned."""
    token: int | None
    """New token of the text; None if the request ended without one."""
    completion: Completion
    """Result so far; complete if ``finish_reason`` is set."""
