"""Log-likelihoods of continuations after their contexts, in packed forward passes on every layout of the engine.

Inputs are sorted by length and packed into steps of at most ``max_tokens`` tokens; longer ones take several steps.
Pairs with equal inputs, such as answers of one token to the same question, share one forward pass. Only the logits of
scored tokens are computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron.core.attention.cached_layout import Chunk
from megatron.core.attention.sequence_states import UNUSED, ZERO, StateSlots
from megatron.core.config.errors import UserError
from megatron.core.inference.engine import Engine
from megatron.core.inference.sampling import NOT_FINITE
from megatron.core.inference.step import OutputRow, StepPlan

Pair = tuple[Sequence[int], Sequence[int]]
"""Tokens of a context, then tokens of its continuation."""


@dataclass
class Likelihood:
    """Score of a continuation."""

    logprob: float = 0.0
    """Sum of the raw log-probabilities of its tokens."""
    is_greedy: bool = True
    """Whether each of its tokens is the most likely one; of equally likely ones the first."""


@dataclass
class _Input:
    """Tokens of a forward pass, and what is scored after each of them."""

    ids: tuple[int, ...]
    targets: dict[int, list[tuple[int, Likelihood]]] = field(default_factory=dict)
    """Index of a token -> tokens to score after it, each with the result that it belongs to."""
    pages: list[int] = field(default_factory=list)
    slot: int = UNUSED
    """Slot of its state; models without states use none."""


def score(engine: Engine, pairs: Sequence[Pair]) -> list[Likelihood]:
    """Return the log-likelihood of each continuation, in the order of ``pairs``. Call it on rank 0 of ``engine``, which
    must have no requests; other ranks call ``engine.follow``. Contexts are cut from the left to the engine's maximum
    length. Raises UserError for a pair that is empty or does not fit, or logits that are NaN or infinite."""
    assert not engine.has_work, "the engine is generating"
    results = [Likelihood() for _ in pairs]
    inputs: dict[tuple[int, ...], _Input] = {}
    for (context, continuation), result in zip(pairs, results):
        limit = engine.scheduler.limits.max_length
        if not context:
            raise UserError("the context is empty: give at least one token (for example the end-of-document token)")
        if not continuation:
            raise UserError("the continuation is empty: give at least one token")
        if len(continuation) > limit:
            raise UserError(f"the continuation has {len(continuation)} tokens, the model takes {limit}")
        ids = (*context, *continuation)[-limit - 1 : -1]
        entry = inputs.setdefault(ids, _Input(ids))
        for index, token in enumerate(continuation, len(ids) - len(continuation)):
            entry.targets.setdefault(index, []).append((token, result))
    _run(engine, sorted(inputs.values(), key=lambda entry: len(entry.ids), reverse=True))
    if (number := next((n for n, result in enumerate(results) if math.isnan(result.logprob)), None)) is not None:
        raise UserError(f"text {number} of {len(results)} has no score: {NOT_FINITE}")
    return results


def _run(engine: Engine, inputs: Sequence[_Input]) -> None:
    step: list[tuple[_Input, int, int]] = []
    limits, slots = engine.scheduler.limits, engine.slots
    budget = limits.max_tokens
    for entry in inputs:
        count = engine.pool.pages_for(len(entry.ids))
        if count > engine.pool.num_usable:
            raise UserError(f"a text of {len(entry.ids)} tokens needs {count} pages: give the cache more pages")
        if count > engine.pool.num_free or (slots is not None and len(step) == limits.max_sequences):
            _step(engine, step)
            step, budget = [], limits.max_tokens
        entry.pages = [page for _ in range(count) if (page := engine.pool.allocate()) is not None]
        if slots is not None:
            entry.slot = slots.allocate()
        start = 0
        while start < len(entry.ids):
            stop = min(start + budget, len(entry.ids))
            step.append((entry, start, stop))
            budget -= stop - start
            start = stop
            if not budget:
                _step(engine, step)
                step, budget = [], limits.max_tokens
    _step(engine, step)


def _step(engine: Engine, parts: Sequence[tuple[_Input, int, int]]) -> None:
    """Run one step; release pages and slots of inputs that end in it."""
    if not parts:
        return
    tokens: list[int] = []
    chunks, rows, owners = [], [], []
    for entry, start, stop in parts:
        for index in range(start, stop):
            for token, result in entry.targets.get(index, ()):
                rows.append(OutputRow(len(tokens) + index - start, target=token))
                owners.append(result)
        tokens += entry.ids[start:stop]
        states = StateSlots(entry.slot if start else ZERO, entry.slot)
        chunks.append(Chunk(start, stop - start, tuple(entry.pages), states))
    outputs, _ = engine.run_plan(StepPlan(tokens, chunks, rows, num_top=1))
    for values, result in zip(outputs, owners, strict=True):
        target, logprob, best, _ = values
        result.logprob += logprob
        result.is_greedy &= target == best
    for entry, _, stop in parts:
        if stop == len(entry.ids):
            engine.pool.release(entry.pages)
            if engine.slots is not None:
                engine.slots.release(entry.slot)
