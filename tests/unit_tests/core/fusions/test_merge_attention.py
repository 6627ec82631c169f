"""Attention over two sets of keys, merged, is attention over all of them; the kernel equals the reference."""

import pytest
import torch

from megatron.core.fusions.merge_attention import merge_attention_, merge_attention_reference_


def attention(query, key, value):
    scores = query @ key.transpose(-1, -2)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def test_merged_parts_equal_full_attention():
    query, key, value = torch.randn(3, 2, 3, 7, 5, dtype=torch.float64)
    out, lse = torch.zeros_like(query), torch.full((2, 3, 7), -torch.inf, dtype=torch.float64)
    for keys in (slice(0, 2), slice(2, 3), slice(3, 7)):
        merge_attention_(out, lse, *attention(query, key[:, :, keys], value[:, :, keys]))
    expected, expected_lse = attention(query, key, value)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "batch, heads, queries, channels", [(1, 1, 1, 8), (2, 3, 33, 24), (1, 8, 257, 128), (2, 2, 64, 80)]
)
def test_the_kernel_equals_the_reference_and_writes_nothing_else(batch, heads, queries, channels, dtype):
    torch.manual_seed(0)
    base = torch.randn(queries + 3, batch, heads, channels, device="cuda")
    base_lse = torch.randn(queries + 3, batch, heads, device="cuda")
    base[3], base_lse[3] = 0.0, -torch.inf  # a query that has seen no key
    block = torch.randn(batch, queries, heads, channels, device="cuda").to(dtype).transpose(1, 2)
    block_lse = torch.randn(batch, heads, queries, device="cuda") * 3
    expected, expected_lse = base.clone(), base_lse.clone()
    for merge, out, lse in ((merge_attention_, base, base_lse),
                            (merge_attention_reference_, expected, expected_lse)):  # fmt: skip
        merge(out.movedim(0, 2)[:, :, 3:], lse.movedim(0, 2)[:, :, 3:], block, block_lse)
    torch.testing.assert_close(base, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(base_lse, expected_lse, rtol=1e-5, atol=1e-5)
    assert torch.equal(base[:3], expected[:3])
