"""Choice of the norms of queries and keys."""

from types import SimpleNamespace

import pytest

from megatron.core.attention.qk_norm import qk_norm


@pytest.mark.parametrize(
    "l2, layernorm, across_heads, is_filled, expected",
    [
        (False, False, False, False, None),
        (False, True, False, False, "standard"),
        (False, True, True, False, "across_heads"),
        (True, False, False, False, "l2"),
        (False, False, False, True, "standard"),  # a spec enables a norm that the configuration has not,
        (True, False, False, True, "l2"),  # and leaves L2 norms and norms across heads
        (False, True, True, True, "across_heads"),
    ],
)
def test_spec_enables_a_norm_and_keeps_its_kind(l2, layernorm, across_heads, is_filled, expected):
    config = SimpleNamespace(qk_l2_norm=l2, qk_layernorm=layernorm, qk_layernorm_across_heads=across_heads)
    assert qk_norm(config, is_filled=is_filled) == expected
