"""Moving rows: permutations say where everything lies, kernels equal plain torch, each direction is the other's
backward.

Legend: t tokens, j choices, r rows, h width.
"""

import pytest
import torch

from megatron.core.fusions.permute import (
    PLAIN,
    RowMoves,
    choose_row_moves,
    combine_plain,
    combine_rows,
    combine_triton,
    gather_choices,
    gather_plain,
    gather_rows,
    gather_triton,
    pad_to,
    sort_choices,
    spread_plain,
    spread_triton,
)
from tests.test_utils.kernels import DEVICE, assert_equal_to_formula, filled
from tests.test_utils.unstable_sort import make_sorts_unstable

KEYS = 5
DOUBLE = torch.float64
TRITON = RowMoves(gather_triton, combine_triton, spread_triton)


def keys_of(tokens, choices, seed=0, dropped=0.2, num_keys=KEYS):
    """Return [t, j] distinct keys per token; some choices are dropped."""
    generator = torch.Generator().manual_seed(seed)
    key = torch.rand(tokens, num_keys, generator=generator).argsort(-1)[:, :choices]
    return key.masked_fill(torch.rand(tokens, choices, generator=generator) < dropped, num_keys)


def test_rows_are_sorted_by_key_then_token_and_those_of_none_come_last(monkeypatch):
    make_sorts_unstable(monkeypatch)
    key = torch.tensor([[2, 0], [5, 2], [0, 1], [2, 5]])
    permutation = sort_choices(key, KEYS)
    assert permutation.token_r.tolist() == [0, 2, 2, 0, 1, 3, -1, -1]
    assert permutation.choice_r.tolist() == [1, 4, 5, 0, 3, 6, -1, -1]
    assert permutation.place_tj.tolist() == [[3, 0], [-1, 4], [1, 2], [5, -1]]
    assert permutation.ends.tolist() == [2, 3, 6, 6, 6] and permutation.ends.dtype == torch.int32


@pytest.mark.parametrize("capacity, tokens, places", [
    (2, [0, 2, 2, -1, 0, 1, -1, -1, -1, -1], [[4, 0], [-1, 5], [1, 2], [-1, -1]]),
    (3, [0, 2, -1, 2, -1, -1, 0, 1, 3, *[-1] * 6], [[6, 0], [-1, 7], [1, 3], [8, -1]]),
])  # fmt: skip
def test_padding_gives_every_key_as_many_rows(capacity, tokens, places):
    key = torch.tensor([[2, 0], [5, 2], [0, 1], [2, 5]])
    permutation = pad_to(sort_choices(key, KEYS), key, capacity)
    assert permutation.token_r.tolist() == tokens
    assert permutation.place_tj.tolist() == places
    assert permutation.ends.tolist() == [capacity * index for index in range(1, KEYS + 1)]


@pytest.mark.parametrize("capacity", [None, 3, 9])
def test_gather_and_combine_are_exact_and_have_exact_gradients(capacity):
    key = keys_of(9, 2)
    permutation = sort_choices(key, KEYS)
    if capacity is not None:
        permutation = pad_to(permutation, key, capacity)
    rows = len(permutation.choice_r)
    x, y = filled(9, 3, dtype=DOUBLE).requires_grad_(), filled(rows, 3, dtype=DOUBLE, seed=1).requires_grad_()
    numbers = filled(9, 2, dtype=DOUBLE, seed=2).requires_grad_()
    expected = [x[token] if token >= 0 else torch.zeros(3) for token in permutation.token_r.tolist()]
    assert torch.equal(gather_rows(x, permutation), torch.stack(expected).to(DOUBLE))
    assert torch.autograd.gradcheck(lambda x: gather_rows(x, permutation), x)
    assert torch.autograd.gradcheck(lambda y: combine_rows(y, permutation), y)
    place, is_choice = permutation.place_tj, permutation.choice_r >= 0
    assert torch.autograd.gradcheck(lambda item: gather_choices(item, permutation)[is_choice], numbers)
    actual = gather_choices(numbers, permutation)
    assert torch.equal(actual[place[place >= 0]], numbers[place >= 0])


def test_a_complete_permutation_is_the_same_without_masks():
    key = keys_of(9, 2).clamp(max=KEYS - 1)
    masked, complete = sort_choices(key, KEYS), sort_choices(key, KEYS, is_complete=True)
    assert complete.is_complete and not masked.is_complete
    assert all(torch.equal(one, other) for one, other in zip(masked[:4], complete[:4], strict=True))
    numbers = filled(9, 2, dtype=DOUBLE).requires_grad_()
    assert torch.equal(gather_choices(numbers, complete), gather_choices(numbers, masked))
    assert torch.autograd.gradcheck(lambda item: gather_choices(item, complete), numbers)


def test_gather_choices_without_rows_has_zero_gradient():
    permutation, numbers = sort_choices(torch.full((4, 2), KEYS), KEYS).head(0), torch.ones(4, 2, requires_grad=True)
    gather_choices(numbers, permutation).sum().backward()
    assert not numbers.grad.any()


def test_a_number_of_a_choice_goes_to_all_its_copies():
    key = torch.tensor([[0, 3, 1, 4], [2, 4, 0, 3]])  # two choices of two copies each
    permutation, numbers = sort_choices(key, KEYS), torch.tensor([[10.0, 20.0], [30.0, 40.0]])
    assert gather_choices(numbers, permutation).tolist() == [10, 40, 20, 30, 10, 40, 20, 30]


def test_nothing_reads_rows_of_none():
    key = torch.tensor([[0, KEYS], [KEYS, 1]])
    permutation = sort_choices(key, KEYS)
    rows = torch.full((4, 3), float("nan"))
    rows[:2] = 1.0
    assert torch.equal(combine_rows(rows, permutation), torch.ones(2, 3))
    numbers = torch.ones(2, 2, requires_grad=True)
    gather_choices(numbers, permutation).backward(torch.tensor([1.0, 2.0, float("nan"), float("nan")]))
    assert numbers.grad.tolist() == [[1, 0], [0, 2]]


@pytest.mark.parametrize("tokens", [0, 1])
def test_no_rows_at_all(tokens):
    permutation = sort_choices(torch.full((tokens, 2), KEYS), KEYS)
    x = torch.ones(tokens, 4, requires_grad=True)
    combine_rows(gather_rows(x, permutation), permutation).sum().backward()
    assert x.grad.abs().sum() == 0


SIZES = [(9, 2, 33, torch.float32), (6, 3, 1030, torch.bfloat16), (1, 1, 1, torch.float32)]
BIG = [(8192, 8, 2048, torch.bfloat16), (8192, 2, 4096, torch.bfloat16), (70001, 4, 96, torch.float32)]


@pytest.mark.parametrize(
    "tokens, choices, width, dtype", [*SIZES, *(pytest.param(*size, marks=pytest.mark.gpu) for size in BIG)]
)  # fmt: skip
def test_kernels_equal_the_formula(tokens, choices, width, dtype):
    pytest.importorskip("triton")
    key = keys_of(tokens, choices, num_keys=max(KEYS, 2 * choices)).to(DEVICE)
    permutation = sort_choices(key, max(KEYS, 2 * choices))
    rows = len(permutation.choice_r)
    x, y = filled(tokens, width, dtype=dtype), filled(rows, width, dtype=dtype, seed=1)
    assert_equal_to_formula(
        lambda x: gather_rows(x, permutation, TRITON), lambda x: gather_rows(x, permutation), [x], [y]
    )  # fmt: skip
    assert_equal_to_formula(
        lambda y: combine_rows(y, permutation, TRITON), lambda y: combine_rows(y, permutation), [y], [x]
    )  # fmt: skip


@pytest.mark.parametrize(
    "tokens, choices, width, dtype", [*SIZES, *(pytest.param(*size, marks=pytest.mark.gpu) for size in BIG)]
)  # fmt: skip
def test_rows_of_a_complete_permutation_equal_gathered_rows(tokens, choices, width, dtype):
    pytest.importorskip("triton")
    key = keys_of(tokens, choices, dropped=0, num_keys=2 * choices).to(DEVICE)
    masked, complete = sort_choices(key, 2 * choices), sort_choices(key, 2 * choices, is_complete=True)
    x, y = filled(tokens, width, dtype=dtype).to(DEVICE), filled(tokens * choices, width, dtype=dtype).to(DEVICE)
    expected = gather_rows(x, masked)
    for moves in (PLAIN, TRITON):
        assert torch.equal(gather_rows(x, complete, moves), expected)
        rows = y.clone().requires_grad_()
        combine_rows(rows, complete, moves).backward(x)
        assert torch.equal(rows.grad, expected)


ABSORBED = torch.tensor([256.0, 1.0, 1.0, 1.0, 1.0])
"""260 in fp32; in bf16 each 1 is rounded away, and a sum of pairs gives another number."""


@pytest.mark.parametrize("moves", [PLAIN, pytest.param(TRITON, id="triton")])
def test_half_precision_rows_are_added_up_in_fp32(moves):
    """Outputs of experts in the forward pass, gradients of their inputs in the backward pass."""
    if moves is TRITON:
        pytest.importorskip("triton")
    key = torch.arange(5).expand(3, 5).contiguous().to(DEVICE)
    permutation = sort_choices(key, 5)
    rows = torch.empty(15, 4, dtype=torch.bfloat16, device=DEVICE)
    rows[permutation.place_tj] = ABSORBED.to(rows)[:, None].expand(3, 5, 4)
    combined = combine_rows(rows, permutation, moves)
    assert combined.dtype == torch.bfloat16 and combined.tolist() == [[260.0] * 4] * 3
    x = torch.ones(3, 4, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    gather_rows(x, permutation, moves).backward(rows)
    assert x.grad.dtype == torch.bfloat16 and x.grad.tolist() == [[260.0] * 4] * 3
    padded = pad_to(permutation, key, 4)
    wide = torch.full((20, 4), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    wide[padded.place_tj] = ABSORBED.to(rows)[:, None].expand(3, 5, 4)
    assert combine_rows(wide, padded, moves).tolist() == [[260.0] * 4] * 3


def test_double_precision_rows_are_added_up_in_double_precision():
    rows = torch.tensor([[1.0], [1e-12]], dtype=DOUBLE)
    permutation = sort_choices(torch.tensor([[0, 1]]), 2)
    assert combine_rows(rows, permutation).item() == 1.0 + 1e-12


def test_flags_choose_between_kernels_and_plain_torch(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    kernels = choose_row_moves(torch.bfloat16)
    assert (kernels.gather.kernel, kernels.combine.kernel) == (gather_triton, combine_triton)
    assert (kernels.gather.plain, kernels.combine.plain) == (gather_plain, combine_plain)
    assert (kernels.spread.kernel, kernels.spread.plain) == (spread_triton, spread_plain)
    assert choose_row_moves(torch.float64) is PLAIN and choose_row_moves(torch.bfloat16, enabled=False) is PLAIN
