"""MoE permutation: gather token rows by expert; combine expert outputs per token.

    gather    y_r = x[source_r]            backward: dx_t = sum over j of dy[place_tj]
    combine   y_t = sum over j of x[place_tj]            backward: dx_r = dy[source_r]

Each is the backward of the other, because a :class:`Permutation` holds both index maps. An index of -1 means no row:
zeros, and no gradient. Sums are fp32 in the order of j, without atomics: same bits every run.

Legend: t tokens, j choices of a token (its top-k experts), r rows, h width."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.fusions.dispatch import ByDevice, kernels_serve
from megatron.core.fusions.installed_triton import tl, triton

_BLOCK, _NUM_WARPS = 1024, 4
"""Elements per program: 2 KiB of 16-bit values, one 16-byte vector per thread."""


class Permutation(NamedTuple):
    """Mapping between (token, choice) pairs and rows sorted by key (expert)."""

    choice_r: Tensor
    """int64 [r]: flat choice index t * (number of choices) + j of each row; -1 for an empty row."""
    token_r: Tensor
    """int64 [r]: token of each row; -1 for an empty row."""
    place_tj: Tensor
    """int64 [t, j]: row of each choice; -1 for a dropped choice."""
    ends: Tensor
    """int32 [keys]: end row of each key; rows after the last end are empty."""
    is_complete: bool = False
    """Whether every choice has a row and no row is empty."""

    def head(self, rows: int) -> Permutation:
        """Return a view of the first ``rows`` rows; the remaining rows must be empty."""
        return self._replace(choice_r=self.choice_r[:rows], token_r=self.token_r[:rows])


def _token_indices(choice_r: Tensor, num_choices: int) -> Tensor:
    return choice_r if num_choices == 1 else torch.div(choice_r, num_choices, rounding_mode="floor")


def sort_choices(key_tj: Tensor, num_keys: int, *, is_complete: bool = False) -> Permutation:
    """Stable-sort choices by ``key_tj``, int [t, j] in [0, num_keys]; ``num_keys`` marks a dropped choice. Return the
    permutation with one row per choice: by key, then by token and choice, and empty rows (-1) for dropped ones at the
    end. ``is_complete``: the caller guarantees that none is dropped. No host sync."""
    keys = key_tj.flatten()
    # fewer bits need fewer radix passes
    sorted_keys, order = torch.sort(keys.to(torch.int16 if num_keys < 1 << 15 else torch.int32), stable=True)
    bounds = torch.arange(num_keys, dtype=sorted_keys.dtype, device=keys.device)
    ends = torch.searchsorted(sorted_keys, bounds, right=True, out_int32=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    if not is_complete:
        order.masked_fill_(sorted_keys == num_keys, -1)
        place.masked_fill_(keys == num_keys, -1)
    return Permutation(order, _token_indices(order, key_tj.shape[1]), place.view(key_tj.shape), ends, is_complete)


def pad_to(permutation: Permutation, key_tj: Tensor, capacity: int) -> Permutation:
    """Return a new permutation in which each key has exactly ``capacity`` rows: excess choices, the last by position,
    are dropped, and missing rows are empty (-1). ``permutation`` was made from ``key_tj``, int [t, j]. No host sync."""
    ends, num_keys = permutation.ends, len(permutation.ends)
    starts = torch.cat((ends.new_zeros(1), ends))  # one extra entry, which dropped choices (key num_keys) index
    within = permutation.place_tj - starts[key_tj]
    fits = (permutation.place_tj >= 0) & (within < capacity)
    place = torch.where(fits, key_tj * capacity + within, -1)
    rows = num_keys * capacity
    choice_r = torch.full((rows + 1,), -1, device=place.device)
    choices = torch.arange(place.numel(), device=place.device)
    choice_r.scatter_(0, place.flatten().masked_fill(~fits.flatten(), rows), choices)  # the last row takes dropped ones
    even_ends = torch.arange(1, num_keys + 1, dtype=torch.int32, device=place.device) * capacity
    choice_r = choice_r[:rows]
    return Permutation(choice_r, _token_indices(choice_r, place.shape[1]), place, even_ends)


def gather_plain(x: Tensor, source_r: Tensor) -> Tensor:
    """Return copies of rows ``source_r`` [r] of ``x`` [t, h], zeros for -1. Torch operations."""
    if not len(x):
        return x.new_zeros((len(source_r), *x.shape[1:]))
    return x.index_select(0, source_r.clamp(min=0)).masked_fill_((source_r < 0).unsqueeze(-1), 0)


def combine_plain(x: Tensor, place_tj: Tensor) -> Tensor:
    """Sum rows ``place_tj`` [t, j] of ``x`` [r, h] to [t, h] in fp32 (fp64 for fp64) in choice order, rounded once to
    the dtype of ``x``; -1 adds nothing. Torch operations."""
    total = x.new_zeros((len(place_tj), x.shape[1]), dtype=torch.promote_types(x.dtype, torch.float32))
    for place_t in place_tj.unbind(1):
        total += gather_plain(x, place_t)
    return total.to(x.dtype)


def spread_plain(x: Tensor, place_tj: Tensor) -> Tensor:
    """Return rows [t * j, h] in which row ``place_tj[t, j]`` is ``x[t]``; ``place_tj`` [t, j] holds each row once.
    Equals :func:`gather_plain` for a complete permutation. Torch operations."""
    place_r = place_tj.flatten()
    return x.new_empty(len(place_r), x.shape[1]).index_copy_(0, place_r, x.repeat_interleave(place_tj.shape[1], 0))


if triton is not None:

    @triton.jit
    def _gather_kernel(x, source, out, width, tiles, BLOCK: tl.constexpr):
        """One program per row and block of columns; zeros if the source is -1."""
        row = (tl.program_id(0) // tiles).to(tl.int64)
        column = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        token = tl.load(source + row)
        value = tl.load(x + token * width + column, mask=inside & (token >= 0), other=0.0)
        tl.store(out + row * width + column, value, mask=inside)

    @triton.jit
    def _spread_kernel(x, place, out, width, tiles, CHOICES: tl.constexpr, BLOCK: tl.constexpr):
        """Copy BLOCK columns of one token of ``x`` to rows ``place[token, :]`` of ``out``, none of which is -1: one
        read per token, where :func:`_gather_kernel` reads per row (8192 tokens of 8 rows of 2048, H200: 84 us, 121 by
        rows). One program per token and block."""
        token = (tl.program_id(0) // tiles).to(tl.int64)
        column = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        value = tl.load(x + token * width + column, mask=inside)
        for choice in tl.static_range(CHOICES):
            row = tl.load(place + token * CHOICES + choice)
            tl.store(out + row * width + column, value, mask=inside)

    @triton.jit
    def _combine_kernel(x, place, out, width, tiles, CHOICES: tl.constexpr, BLOCK: tl.constexpr):
        """Sum rows ``place[token, :]`` in choice order in fp32, rounded once; -1 adds nothing."""
        token = (tl.program_id(0) // tiles).to(tl.int64)
        column = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for choice in tl.static_range(CHOICES):  # unrolled: all loads are in flight at once
            row = tl.load(place + token * CHOICES + choice)
            total += tl.load(x + row * width + column, mask=inside & (row >= 0), other=0.0).to(tl.float32)
        tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)


def _launch(kernel: Any, x: Tensor, index: Tensor, rows: int, **constants: int) -> Tensor:
    """Program i handles block i % tiles of the columns and entry i // tiles of ``index``. Launches nothing for an empty
    result."""
    out = x.new_empty((rows, x.shape[1]))
    tiles = triton.cdiv(x.shape[1], _BLOCK)
    if out.numel():
        kernel[(len(index) * tiles,)](
            x.contiguous(), index.contiguous(), out, x.shape[1], tiles, BLOCK=_BLOCK, num_warps=_NUM_WARPS, **constants
        )
    return out


def gather_triton(x: Tensor, source_r: Tensor) -> Tensor:
    """Return copies of rows ``source_r`` [r] of ``x`` [t, h], zeros for -1, as :func:`gather_plain`, in one kernel."""
    return _launch(_gather_kernel, x, source_r, len(source_r))


def spread_triton(x: Tensor, place_tj: Tensor) -> Tensor:
    """Copy each token of ``x`` [t, h] to its rows ``place_tj`` [t, j], as :func:`spread_plain`, in one kernel."""
    return _launch(_spread_kernel, x, place_tj, place_tj.numel(), CHOICES=place_tj.shape[1])


def combine_triton(x: Tensor, place_tj: Tensor) -> Tensor:
    """Sum rows ``place_tj`` [t, j] of ``x`` [r, h] in fp32 in choice order, as :func:`combine_plain`, in one kernel."""
    return _launch(_combine_kernel, x, place_tj, len(place_tj), CHOICES=place_tj.shape[1])


Move = Callable[[Tensor, Tensor], Tensor]


class RowMoves(NamedTuple):
    """Implementation of both directions."""

    gather: Move
    combine: Move
    spread: Move = spread_plain
    """``gather`` of a complete permutation, from its places."""

    def expand(self, permutation: Permutation) -> tuple[Move, Tensor]:
        """Return the function that copies tokens to rows, and the index map of ``permutation`` that it reads."""
        complete = permutation.is_complete
        return (self.spread, permutation.place_tj) if complete else (self.gather, permutation.token_r)


PLAIN = RowMoves(gather_plain, combine_plain)


def choose_row_moves(dtype: torch.dtype, enabled: bool = True) -> RowMoves:
    """Return the implementation for values of ``dtype``; ``enabled`` False selects torch operations."""
    if not kernels_serve(dtype, enabled):
        return PLAIN
    return RowMoves(
        ByDevice(gather_triton, gather_plain), ByDevice(combine_triton, combine_plain),
        ByDevice(spread_triton, spread_plain),
    )  # fmt: skip


class _Move(torch.autograd.Function):
    """``move(x, index)``, with backward ``back(grad, back_index)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, back_index: Tensor, move: Move, back: Move) -> Tensor:
        ctx.save_for_backward(back_index)
        ctx.back = back
        return move(x, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return ctx.back(grad, ctx.saved_tensors[0]), None, None, None, None


class _GatherChoices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source_r: Tensor, place_tkc: Tensor, is_complete: bool) -> Tensor:
        ctx.save_for_backward(place_tkc)
        ctx.is_complete = is_complete
        return x.flatten()[source_r]  # -1 reads the last element

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Sum the gradients of the copies of each element, zero for dropped ones."""
        (place_tkc,) = ctx.saved_tensors
        if not len(grad):  # -1 is not a valid index then
            return grad.new_zeros(place_tkc.shape[:-1]), None, None, None
        choices = grad[place_tkc]
        if not ctx.is_complete:
            choices = choices.masked_fill_(place_tkc < 0, 0)
        return choices.squeeze(-1) if choices.shape[-1] == 1 else choices.sum(-1), None, None, None


def gather_rows(x: Tensor, permutation: Permutation, moves: RowMoves = PLAIN) -> Tensor:
    """Copy each token to the rows of its choices: [t, h] -> [r, h], zeros in empty rows; differentiable. Sums of the
    gradient are fp32, rounded to its dtype."""
    expand, index = moves.expand(permutation)
    return _Move.apply(x, index, permutation.place_tj, expand, moves.combine)


def combine_rows(x: Tensor, permutation: Permutation, moves: RowMoves = PLAIN) -> Tensor:
    """Sum the rows of each token in choice order, in fp32, rounded to the dtype of ``x``: [r, h] -> [t, h], zeros for
    tokens without rows; differentiable."""
    expand, index = moves.expand(permutation)
    return _Move.apply(x, permutation.place_tj, index, moves.combine, expand)


def gather_choices(x: Tensor, permutation: Permutation) -> Tensor:
    """Return each row's element of ``x`` [t, k]: [r], differentiable. ``permutation`` has k choices per token, or
    copies * k; each element then goes to all its copies (k slow, copies fast). Empty rows get arbitrary elements, which
    must not be used."""
    copies = max(1, permutation.place_tj.numel() // max(1, x.numel()))
    place = permutation.place_tj.view(*x.shape, copies)
    return _GatherChoices.apply(x, _token_indices(permutation.choice_r, copies), place, permutation.is_complete)
