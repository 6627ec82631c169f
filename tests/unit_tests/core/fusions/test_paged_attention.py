"""Paged attention equals the softmax over the gathered keys, and its bits do not depend on the batch."""

import itertools

import numpy as np
import pytest
import torch

from megatron.core.fusions.paged_attention import SPLIT, PagedRows, paged_attention, split_tokens, write_pages
from tests.test_utils.kernels import DEVICE

POSITIONS = 0, 4, 5, SPLIT - 1, SPLIT, 2 * SPLIT + 70
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
"""The interpreter has no products of bf16."""


def case(heads, groups, width, out_width, dtype, positions=POSITIONS, page=16, seed=0, values_in_keys=False):
    generator = torch.Generator().manual_seed(seed)
    num_pages = sum(position // page + 1 for position in positions) + 3
    order = (torch.randperm(num_pages - 1, generator=generator) + 1).tolist()
    tables = torch.zeros(len(positions), max(positions) // page + 1, dtype=torch.int32)
    for sequence, position in enumerate(positions):
        for index in range(position // page + 1):
            tables[sequence, index] = order.pop()
    keys, values = (
        torch.randn(num_pages, page, groups, size, generator=generator).to(dtype) for size in (width, out_width)
    )
    query_width = width + out_width * values_in_keys
    query = torch.randn(len(positions), heads, query_width, generator=generator).to(dtype)
    rows = torch.arange(len(positions)), torch.tensor(positions)
    tensors = [x.to(DEVICE) for x in (query, keys, values, tables, *rows)]
    splits = (torch.from_numpy(x).to(DEVICE) for x in split_tokens(np.array(positions)))
    return *tensors[:3], PagedRows(*tensors[3:], *splits)


def reference(query, keys, values, rows, scale, left=None, soft_cap=None, sink=None):
    """Attention in fp64, token by token."""
    results = []
    keys = torch.cat((values, keys), -1) if query.shape[2] > keys.shape[3] else keys
    for row, (sequence, position) in enumerate(zip(rows.sequences.tolist(), rows.positions.tolist())):
        first = 0 if left is None else max(position - left, 0)
        pages = rows.tables[sequence].long()
        local = [x[pages].flatten(0, 1)[first : position + 1].double() for x in (keys, values)]
        k, v = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in local)
        scores = torch.einsum("ad,tad->at", query[row].double(), k) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if sink is not None:
            scores = torch.cat([scores, sink.double()[:, None]], 1)
        weights = scores.softmax(-1)[:, : len(k)]
        results.append(torch.einsum("at,tae->ae", weights, v))
    return torch.stack(results)


OPTIONS = {}, {"left": 300, "sink": True}, {"left": 5}, {"soft_cap": 1.5}


def cases(sizes, options):
    """All pairs in fp32; in half precisions each of the options and each of the sizes."""
    longer = max(sizes, options, key=len)
    half = [
        (sizes[n % len(sizes)], options[n % len(options)], dtype) for dtype in DTYPES[1:] for n in range(len(longer))
    ]
    return [*itertools.product(sizes, options, DTYPES[:1]), *half]


@pytest.mark.parametrize("sizes, options, dtype", cases([(4, 2, 24, 24), (3, 3, 16, 10), (8, 1, 64, 64)], OPTIONS))
def test_paged_attention_equals_softmax_over_gathered_keys(sizes, options, dtype):
    heads = sizes[0]
    inputs = case(*sizes, dtype)
    options = {**options, "scale": 0.3}
    if "sink" in options:
        options["sink"] = torch.randn(heads, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    result = paged_attention(*inputs, **options)
    tolerance = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(result.double(), reference(*inputs, **options), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("sizes, options, dtype", cases([(5, 6, 20), (20, 16, 32), (20, 16, 272)], OPTIONS[:2]))
def test_values_may_be_channels_of_the_keys(sizes, options, dtype):
    heads, width, out_width = sizes
    inputs = case(heads, 1, width, out_width, dtype, values_in_keys=True)
    options = {**options, "scale": 0.1}
    if "sink" in options:
        options["sink"] = torch.randn(heads, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    result = paged_attention(*inputs, **options)
    tolerance = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(result.double(), reference(*inputs, **options), rtol=tolerance, atol=tolerance)


def test_bits_do_not_depend_on_the_batch():
    query, keys, values, rows = case(4, 2, 16, 16, torch.float32)
    together = paged_attention(query, keys, values, rows, scale=0.3)
    for row in range(len(query)):
        at = slice(row, row + 1)
        splits = (torch.from_numpy(x).to(DEVICE) for x in split_tokens(rows.positions[at].cpu().numpy()))
        single = PagedRows(rows.tables, rows.sequences[at], rows.positions[at], *splits)
        separate = paged_attention(query[at], keys, values, single, scale=0.3)
        assert torch.equal(separate[0], together[row])


def test_written_entries_are_read_back():
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.zeros(5, 4, 3, 8, device=DEVICE), torch.zeros(5, 4, 3, 6, device=DEVICE)
    packed = torch.randn(4, 3, 20, generator=generator).to(DEVICE)
    key, value = packed[..., :8], packed[..., 8:14]
    slots = torch.tensor([5, 19, 8, 0], device=DEVICE)
    write_pages(keys, values, slots, key, value)
    for pool, x in ((keys, key), (values, value)):
        expected = torch.zeros_like(pool)
        expected.flatten(0, 1)[slots] = x
        assert torch.equal(pool, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "groups", "width", "positions"), [
    (32, 8, 128, [2047 + 8 * n for n in range(64)]), (32, 8, 128, [40_000]), (8, 8, 64, [0, 255, 256, 5000]),
    (48, 1, 128, [3000, 17]), (28, 4, 96, [511, 512, 513]),
])  # fmt: skip
@pytest.mark.parametrize("options", [{}, {"left": 1000}, {"left": 4095, "sink": True}, {"soft_cap": 30.0}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_paged_attention_on_a_gpu_at_sizes_of_models(heads, groups, width, positions, options, dtype):
    inputs = case(heads, groups, width, width, dtype, positions, page=256)
    options = {**options, "scale": width**-0.5}
    if "sink" in options:
        options["sink"] = torch.randn(heads, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    result = paged_attention(*inputs, **options)
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(result.double(), reference(*inputs, **options), rtol=tolerance, atol=tolerance)
    assert torch.equal(result, paged_attention(*inputs, **options))


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "positions"), [(16, [2047 + 8 * n for n in range(64)]), (128, [3000, 17, 255])])
@pytest.mark.parametrize("options", [{}, {"left": 1000}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_to_latents_on_a_gpu_at_sizes_of_models(heads, positions, options, dtype):
    inputs = case(heads, 1, 64, 512, dtype, positions, page=256, values_in_keys=True)
    options = {**options, "scale": 576**-0.5}
    result = paged_attention(*inputs, **options)
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(result.double(), reference(*inputs, **options), rtol=tolerance, atol=tolerance)
    assert torch.equal(result, paged_attention(*inputs, **options))


@pytest.mark.gpu
def test_bits_on_a_gpu_do_not_depend_on_the_batch():
    positions = [2047 + 300 * n for n in range(16)]
    query, keys, values, rows = case(32, 8, 128, 128, torch.bfloat16, positions, page=256)
    together = paged_attention(query, keys, values, rows, scale=0.1)
    for row in range(len(query)):
        at = slice(row, row + 1)
        splits = (torch.from_numpy(x).to(DEVICE) for x in split_tokens(rows.positions[at].cpu().numpy()))
        single = PagedRows(rows.tables, rows.sequences[at], rows.positions[at], *splits)
        assert torch.equal(paged_attention(query[at], keys, values, single, scale=0.1)[0], together[row])
