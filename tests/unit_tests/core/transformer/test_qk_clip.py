"""The maximum attention logit of each head is exact."""

import pytest
import torch

from megatron.core.attention.max_logits import MaxLogits
from megatron.core.attention.tiles import Visibility


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("visibility", [Visibility(), Visibility(False), Visibility(True, (3, 0))])
@pytest.mark.parametrize("block", [4, 1024])
def test_maximum_includes_all_visible_pairs(monkeypatch, visibility, block):
    monkeypatch.setattr("megatron.core.attention.max_logits._BLOCK", block)
    found = MaxLogits(0.5, visibility, 1)
    expected = torch.full((6,), -torch.inf, dtype=torch.float64)
    for seed in (1, 2):
        query, key = random(9, 2, 6, 4, seed=seed), random(9, 2, 3, 4, seed=seed + 5)
        found.add(query, key)
        scores = 0.5 * torch.einsum("sbad,tbad->bast", query, key.repeat_interleave(2, dim=2))
        distance = torch.arange(9)[:, None] - torch.arange(9)
        hidden = (distance < 0) & visibility.causal | (distance > 3) & (visibility.window is not None)
        expected = torch.maximum(expected, scores.masked_fill(hidden, -torch.inf).amax((0, 2, 3)))
    torch.testing.assert_close(found.take(expected, 6), expected)
    assert found.take(expected, 6).max() == -torch.inf
