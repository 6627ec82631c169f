"""Sampling of tokens from logits, and generation without a cache: one full forward pass per token.

``generate`` serves models with layers that cannot cache, and contexts longer than the model's; ``generate_seq2seq``
serves encoder-decoder models. ``engine.py`` generates with a cache.

Legend: s sequence, e sequence of the encoder, h hidden, v vocabulary, r rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from megatron.core.config.errors import UserError
from megatron.core.fusions.dispatch import ByDevice
from megatron.core.fusions.gumbel_argmax import gumbel_argmax_triton
from megatron.core.random.philox import GUMBEL_KEY, gumbel


@dataclass(frozen=True)
class Sampling:
    """Settings that choose the next token from its logits."""

    temperature: float = 1.0
    """0: always the likeliest token."""
    top_k: int = 0
    """Draw from the k likeliest tokens; 0: from all."""
    top_p: float = 0.0
    """Draw from the smallest set of tokens whose probabilities sum to at least this; 0 and 1: from all."""
    seed: int | None = None
    """Key of the draws of one text, with the token's position; None: one from torch's global generator."""

    def __post_init__(self) -> None:
        if problems := sampling_problems(vars(self)):
            raise UserError("; ".join(f"{name} {value}: {problem}" for name, (value, problem) in problems.items()))

    def chooser(self) -> Callable[..., int]:
        """Return a function from logits [v] and the position of the new token (default 0) to a token id: the largest
        logit with temperature 0, else :func:`draw` with this object's seed (None: one from torch's global generator).
        It raises UserError if a logit is NaN or +inf, or all are -inf."""
        sampling = self.seeded()

        def choose(logits: Tensor, position: int = 0) -> int:
            if nonfinite_rows(logits[None]):
                raise UserError(NOT_FINITE)
            arrays, form = draw_arrays([sampling], [position])
            draws = Draws(**{name: torch.from_numpy(x).to(logits.device) for name, x in arrays.items()})
            return int(draw(logits[None], draws, form))

        return choose

    def seeded(self) -> Sampling:
        """Return a copy with a seed; a missing one comes from torch's global generator."""
        return self if self.seed is not None else replace(self, seed=int(torch.randint(2**63 - 1, ())))


NOT_FINITE = "the model's logits are NaN or infinite: its weights are damaged, or training diverged"


def nonfinite_rows(logits: Tensor) -> Tensor:
    """Return bool [r], whether a row of ``logits`` [r, v] has NaN or +inf, or only -inf."""
    return logits.isnan().any(-1) | logits.amax(-1).isinf()


class Form(NamedTuple):
    """Operations that a batch of rows needs."""

    is_random: bool = False
    """Whether a row has a temperature above 0."""
    largest_k: int = 0
    """At least the largest ``top_k``, a power of two; 0: no row has one."""
    has_top_p: bool = False


class Draws(NamedTuple):
    """Settings and counters of rows, each [r, 1]: NumPy arrays on the host, tensors on the device of the logits."""

    seeds: Tensor
    positions: Tensor
    """Position of the new token."""
    top_k: Tensor
    temperature: Tensor
    """fp64, as ``top_p``."""
    top_p: Tensor


def draw_arrays(samplings: Sequence[Sampling], positions: Sequence[int]) -> tuple[dict[str, np.ndarray], Form]:
    """Return the fields of :class:`Draws`, int64 or fp64, of rows whose new tokens have these positions, and the
    operations that they need. Every seed must be set."""
    count, form = len(samplings), Form()
    integers, numbers = np.zeros((3, count, 1), np.int64), np.zeros((2, count, 1), np.float64)
    if any(x.temperature for x in samplings):  # greedy rows need no numbers
        # rounded sums of probabilities reach 1 before the last token: a top_p of 1 is none
        columns = zip(*((x.seed, place, x.top_k, x.temperature, x.top_p % 1) for x, place in zip(samplings, positions)))
        for row, column in zip((*integers, *numbers), columns):
            row[:, 0] = column
        k = max(x.top_k for x in samplings)
        form = Form(True, 1 << (k - 1).bit_length() if k else 0, bool(numbers[1].any()))
    return Draws(*integers, *numbers)._asdict(), form  # type: ignore[arg-type]


def filtered(logits: Tensor, draws: Draws, form: Form) -> Tensor:
    """Return fp32 logits [r, v], shifted so that the largest is 0, divided by the temperature (rows with 0: by 1), and
    -inf outside the ``top_k`` largest (ties are kept) and, of these, outside the smallest set with probability
    ``top_p``, which includes the token that reaches it."""
    temperature = draws.temperature.float()
    # at most 0: a small temperature overflows to -inf only
    logits = logits.float()
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature.where(temperature > 0, 1.0)
    if form.largest_k:
        largest = logits.topk(min(form.largest_k, logits.shape[-1])).values
        smallest = largest.gather(-1, (draws.top_k - 1).clamp(0, largest.shape[-1] - 1))
        logits = logits.masked_fill((logits < smallest) & (draws.top_k > 0), float("-inf"))
    if form.has_top_p:
        values, order = logits.sort(descending=True, stable=True)
        probabilities = values.softmax(dim=-1)
        # the token that reaches top_p stays
        beyond = (probabilities.cumsum(dim=-1) - probabilities >= draws.top_p) & (draws.top_p > 0)
        logits = logits.masked_fill(beyond.gather(-1, order.argsort(-1)), float("-inf"))
    return logits


def draw(logits: Tensor, draws: Draws, form: Form) -> Tensor:
    """Return a token id, int64 [r], for each row of ``logits`` [r, v]: the largest logit with temperature 0, else

        argmax(filtered logits + g),    g = -log(-log u)        (Gumbel-max)

    where u is a function of (seed, position of the new token, token id), so that a draw does not depend on the other
    rows. The host does not wait. Rows of :func:`nonfinite_rows` give meaningless tokens."""
    tokens = logits.argmax(-1)
    if not form.is_random:
        return tokens
    drawn = gumbel_argmax(filtered(logits, draws, form), draws.seeds, draws.positions, GUMBEL_KEY)
    return torch.where(draws.temperature[:, 0] > 0, drawn, tokens)


def _gumbel_argmax(logits: Tensor, seeds: Tensor, positions: Tensor, key: int) -> Tensor:
    return (logits + gumbel(seeds, positions, logits.shape[-1], key)).argmax(-1)


gumbel_argmax = ByDevice(gumbel_argmax_triton, _gumbel_argmax)


MIN_TEMPERATURE = 1e-6
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 1000),
    "top_k": (0, 2**31 - 1),
    "top_p": (0, 1),
    "seed": (0, 2**63 - 1),
    "max_new_tokens": (0, 10**6),
}


def sampling_problems(values: Mapping[str, float | None]) -> dict[str, tuple[float, str]]:
    """Return {name: (value, problem)} of all ``values`` that are out of their range, NaN included; a temperature
    between 0 and 1e-6 is too. Missing names, None and names without a range pass."""
    problems = {}
    for name, (low, high) in _RANGES.items():
        value = values.get(name)
        if value is None:
            continue
        if not low <= value <= high:
            problems[name] = (value, f"must be between {low} and {high}")
        elif name == "temperature" and 0 < value < MIN_TEMPERATURE:
            problems[name] = (value, f"must be 0, or at least {MIN_TEMPERATURE}")
    return problems


PLAIN = Sampling()


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    max_sequence_length: int,
    stop_tokens: Sequence[int] = (),
    sampling: Sampling = PLAIN,
) -> Iterator[int]:
    """Yield tokens generated after ``prompt`` until one of ``stop_tokens`` (not yielded) or ``max_new_tokens``; each
    runs the model on the full context. A generator: checks and model calls start with its first ``next``.

    Args:
        model: maps (input_ids [1, s], position_ids [1, s]) to logits [1, s, v]; left in evaluation mode.
        max_sequence_length: the context; older tokens fall out of it.

    Raises:
        UserError: an empty prompt."""
    if not prompt:
        raise UserError("the prompt is empty: give at least one token (for example the end-of-document token)")
    device = _prepared(model)

    def logits(context: list[int]) -> Tensor:
        window = torch.tensor([context[-max_sequence_length:]], device=device)
        return model(window, torch.arange(window.shape[1], device=device)[None])

    yield from _written(logits, list(prompt), max_new_tokens, stop_tokens, sampling)


@torch.no_grad()
def generate_seq2seq(
    model: nn.Module,
    text: Sequence[int],
    *,
    start: int,
    max_new_tokens: int,
    max_sequence_length: int,
    stop_tokens: Sequence[int] = (),
    sampling: Sampling = PLAIN,
) -> Iterator[int]:
    """Yield the tokens a :class:`T5Model` decoder generates after ``start`` until one of ``stop_tokens`` (not yielded),
    ``max_new_tokens`` or ``max_sequence_length``. ``text`` is encoded once. A generator: checks start with its first
    ``next``; leaves the model in evaluation mode. Raises UserError for an empty or too long text."""
    check_length(text, max_sequence_length)
    device = _prepared(model)
    ids = torch.tensor([list(text)], device=device)
    encoded = model(ids, ids[:, :1], output_encoder_hidden_only=True)

    def logits(written: list[int]) -> Tensor:
        return model(ids, torch.tensor([written], device=device), encoder_hidden_states=encoded)

    yield from _written(logits, [start], min(max_new_tokens, max_sequence_length), stop_tokens, sampling)


def check_length(text: Sequence[int], max_sequence_length: int) -> None:
    """Raise ``UserError`` for a text without tokens, or with more than the model has positions."""
    if not text:
        raise UserError("the text is empty: give at least one word")
    if len(text) > max_sequence_length:
        raise UserError(f"the text has {len(text)} tokens, the model takes {max_sequence_length}: give a shorter one")


def _prepared(model: nn.Module) -> torch.device:
    model.eval()
    return next(model.parameters()).device


def _written(
    logits: Callable[[list[int]], Tensor],
    context: list[int],
    max_new_tokens: int,
    stop_tokens: Sequence[int],
    sampling: Sampling,
) -> Iterator[int]:
    """Yield up to ``max_new_tokens`` sampled tokens after ``context`` and append each to that list; end before
    one of ``stop_tokens``. ``logits`` computes [1, s, v] of the full context each time."""
    choose = sampling.chooser()
    for _ in range(max_new_tokens):
        token = choose(logits(context)[0, -1].cpu(), len(context))
        if token in stop_tokens:
            return
        yield token
        context.append(token)
