"""Batch-invariant product and attention equal their definitions, and an element's bits do not depend on the shape."""

import contextlib
import random

import pytest
import torch

from megatron.core.fusions import batch_invariant_attention as attention
from megatron.core.fusions import batch_invariant_product as product
from megatron.core.fusions.batch_invariant_attention import Scores, Span
from megatron.core.fusions.batch_invariant_product import tree_sum
from megatron.core.fusions.installed_triton import triton
from tests.test_utils.kernels import DEVICE

WITH_KERNEL = pytest.param("triton", marks=pytest.mark.skipif(triton is None, reason="needs Triton"))
KINDS = ["plain", WITH_KERNEL]
DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}[DEVICE]
"""The interpreter has no products of bf16."""


def same(kind, left, right):
    """Whether the bits are equal. The interpreter's products depend on the place in a tile: there, nearly equal."""
    exact = kind == "plain" or DEVICE == "cuda"
    return torch.equal(left, right) if exact else torch.allclose(left, right, rtol=1e-4, atol=1e-4)


def products(kind):
    device = DEVICE if kind == "triton" else "cpu"
    return (product.product_triton if kind == "triton" else product.product_plain), device


def matrices(rows, columns, width, device):
    generator = torch.Generator().manual_seed(0)
    results = torch.randn(rows, width, generator=generator), torch.randn(columns, width, generator=generator)
    return [x.to(device, DTYPE) for x in results]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_rows_and_columns_have_the_same_bits_in_every_shape(kind, parts):
    multiply, device = products(kind)
    x, weight = matrices(70, 67, 200, device)
    full = multiply(x, weight, parts)
    torch.testing.assert_close(full.double(), x.double() @ weight.double().t(), atol=1e-3, rtol=1e-4)
    for rows in ((0, 1), (3, 8), (5, 70), (69, 70)):
        assert same(kind, multiply(x[slice(*rows)], weight, parts), full[slice(*rows)])
    assert same(kind, multiply(x, weight[13:40], parts), full[:, 13:40])


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_split_k_add_up_to_the_bits_of_one_rank(kind):
    multiply, device = products(kind)
    x, weight = matrices(5, 33, 320, device)
    full = multiply(x, weight, 8)
    for ranks in (2, 4, 8):
        shards = zip(x.chunk(ranks, 1), weight.chunk(ranks, 1))
        assert same(kind, tree_sum([multiply(*shard, 8 // ranks) for shard in shards]), full)
    assert not torch.equal(multiply(x, weight, 1), full), "another order of sums would be found"


@pytest.mark.skipif(triton is None, reason="needs Triton")
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_large_tiles_have_the_bits_of_small_ones(parts):
    x, weight = matrices(200, 144, 64 * parts, DEVICE)
    result = product.product_large(x, weight, parts)
    assert same("triton", result, product.product_triton(x, weight, parts))
    rounded = product.product_large(x, weight, parts, torch.bfloat16)
    assert torch.equal(rounded, result.to(torch.bfloat16)) if DEVICE == "cuda" else rounded.dtype == torch.bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "columns, width", [(6144, 4096), (28672, 4096), (4096, 14336), (1024, 512), (192, 64), (768, 3072), (8, 2048)]
)
def test_cublas_has_the_bits_of_the_kernels_for_any_number_of_rows(columns, width, dtype, caplog):
    x, weight = torch.randn(8192, width).cuda().to(dtype), torch.randn(columns, width).cuda().to(dtype)
    expected = product.product_triton(x, weight, 1, dtype)
    for rows in (65, 100, 129, 256, 384, 1000, 2048, 6000, 8192):
        assert torch.equal(product.product_cublas(x[:rows], weight, dtype), expected[:rows])
        unrounded = product.product_cublas(x[:rows], weight, torch.float32)
        assert torch.equal(unrounded.to(dtype), expected[:rows])
    assert not caplog.records, "no shape needs the slower kernel"


@pytest.mark.gpu
def test_shapes_that_cublas_adds_in_another_order_use_the_kernel(monkeypatch, caplog):
    """cuBLAS with split-K."""
    monkeypatch.setattr(product, "_AGREES", {})
    monkeypatch.setattr(product, "_cublaslt_without_split_k", contextlib.nullcontext)
    x, weight = torch.randn(96, 14336).cuda().bfloat16(), torch.randn(4096, 14336).cuda().bfloat16()
    expected = product.product_triton(x, weight, 1, x.dtype)
    assert not torch.equal(x @ weight.t(), expected)
    for _ in range(2):
        assert torch.equal(product.product_cublas(x, weight, x.dtype), expected)
    assert len(caplog.records) == 1 and "another order" in caplog.text


HEADS, GROUPS, WIDTH, OUT_WIDTH, LENGTH = 6, 2, 24, 16, 150
SCORES = [Scores(0.3), Scores(0.3, left=5), Scores(0.3, left=70, sink=torch.randn(HEADS)), Scores(0.3, soft_cap=1.5)]


def sequences(device):
    generator = torch.Generator().manual_seed(0)
    shapes = (LENGTH, HEADS, WIDTH), (LENGTH, GROUPS, WIDTH), (LENGTH, GROUPS, OUT_WIDTH)
    return [torch.randn(*shape, generator=generator).to(device, DTYPE) for shape in shapes]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scores", SCORES, ids=["full", "window", "sink", "cap"])
def test_prefill_decoding_and_pages_give_the_same_bits(kind, scores):
    device = DEVICE if kind == "triton" else "cpu"
    attend = attention.attention_triton if kind == "triton" else attention.attention_plain
    scores = scores._replace(sink=None if scores.sink is None else scores.sink.to(device))
    query, keys, values = sequences(device)
    key_rows = torch.arange(LENGTH, device=device)
    out, lse = attend(query, keys, values, key_rows, [Span(0, LENGTH, 0, 0)], scores)
    expected, expected_lse = definition(query, keys, values, scores)
    tolerance = 3e-2 if torch.bfloat16 == DTYPE and kind == "triton" else 1e-4
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, atol=tolerance, rtol=tolerance)

    # two sequences with shuffled pages: the tail of this one, and a single token of another
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(1)).to(device)
    place = order.argsort()
    paged_rows = torch.cat([place, place])
    spans = [Span(0, 1, 99, 0), Span(1, 40, 110, LENGTH)]
    rows = [99, *range(110, 150)]
    actual = attend(query[rows], keys[order], values[order], paged_rows, spans, scores)
    assert same(kind, actual[0], out[rows]) and same(kind, actual[1], lse[rows])
    # keys in order need no index
    actual = attend(query, keys, values, None, [Span(0, LENGTH, 0, 0)], scores)
    assert torch.equal(actual[0], out) and torch.equal(actual[1], lse)
    # one group and some of its heads, as a tensor-parallel rank has them
    local = scores._replace(sink=None if scores.sink is None else scores.sink[3:5])
    actual = attend(query[:, 3:5], keys[:, 1:], values[:, 1:], key_rows, [Span(0, LENGTH, 0, 0)], local)
    assert same(kind, actual[0], out[:, 3:5]) and same(kind, actual[1], lse[:, 3:5])


CHUNKED = {
    "full": Scores(0.1), "window": Scores(0.1, left=200), "cap and window": Scores(0.9, left=130, soft_cap=1.5),
    "sink and window": Scores(0.1, left=70, sink=torch.linspace(-2, 3, 8)),
}  # fmt: skip


@pytest.mark.parametrize("scores", CHUNKED.values(), ids=CHUNKED)
def test_plain_attention_has_the_same_bits_for_every_chunking(scores):
    for seed in range(3):
        check_chunkings(attention.attention_plain, scores, seed, normal(seed, 300, 16, torch.float32, "cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, width", [(torch.bfloat16, 128), (torch.float16, 64)])
@pytest.mark.parametrize("scores", CHUNKED.values(), ids=CHUNKED)
def test_attention_has_the_same_bits_for_every_chunking(scores, dtype, width):
    scores = scores._replace(sink=None if scores.sink is None else scores.sink.cuda())
    for seed in range(200):
        check_chunkings(attention.attention_triton, scores, seed, normal(seed, 1500, width, dtype, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("scores", CHUNKED.values(), ids=CHUNKED)
def test_plain_attention_in_float64_has_the_same_bits_for_every_chunking_on_a_gpu(scores):
    for seed in range(5):
        check_chunkings(attention.attention_plain, scores, seed, normal(seed, 300, 16, torch.float64, "cuda"))


def check_chunkings(attend, scores, seed, inputs):
    """Compare outputs and log-sum-exps of the full sequence with random chunks at random offsets, single tokens, and
    all chunks as one batch in random order."""
    query, keys, values = inputs
    length = len(query)
    expected = attend(query, keys, values, None, [Span(0, length, 0, 0)], scores)
    key_rows = torch.arange(length, device=query.device)
    chunks = random_chunks(seed, length)
    for first, count in [*chunks[:3], (seed * 7 % length, 1)]:
        rows = slice(first, first + count)
        chunk = attend(query[rows], keys, values, key_rows, [Span(0, count, first, 0)], scores)
        assert all(torch.equal(x, y[rows]) for x, y in zip(chunk, expected)), f"seed {seed}: {count} from {first}"
    batch = attend(query, keys, values, key_rows, [Span(first, count, first, 0) for first, count in chunks], scores)
    assert all(torch.equal(x, y) for x, y in zip(batch, expected)), f"seed {seed}: {chunks}"


def normal(seed, length, width, dtype, device):
    """Return queries of 8 heads, keys and values of 2 groups."""
    generator = torch.Generator(device).manual_seed(seed)
    return [torch.randn(length, heads, width, device=device, generator=generator).to(dtype) for heads in (8, 2, 2)]


def random_chunks(seed, length):
    """Return (first, count) that cover ``length``, in random order, with counts of all magnitudes up to 1,024."""
    numbers, first, chunks = random.Random(seed), 0, []
    while first < length:
        count = min(length - first, int(2 ** numbers.uniform(0, 10.01)))
        chunks.append((first, count))
        first += count
    numbers.shuffle(chunks)
    return chunks


def definition(query, keys, values, scores):
    """Attention in fp64, with a mask of all pairs."""
    k, v = (x.double().repeat_interleave(HEADS // GROUPS, 1) for x in (keys, values))
    logits = torch.einsum("sad,tad->ast", query.double(), k) * scores.scale
    if scores.soft_cap is not None:
        logits = scores.soft_cap * torch.tanh(logits / scores.soft_cap)
    index = torch.arange(LENGTH, device=query.device)
    distance = index[:, None] - index
    left = LENGTH if scores.left is None else scores.left
    logits = logits.masked_fill((distance < 0) | (distance > left), -torch.inf)
    if scores.sink is not None:
        logits = torch.cat([logits, scores.sink.double()[:, None, None].expand(-1, LENGTH, 1)], -1)
    weights, lse = logits.softmax(-1)[..., :LENGTH], logits.logsumexp(-1)
    return torch.einsum("ast,tae->sae", weights, v), lse.t()
