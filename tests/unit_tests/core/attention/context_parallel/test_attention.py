"""Which blocks the attention of ranks that share a sequence is built from."""

from dataclasses import replace

import pytest
import torch

from megatron.core.attention.context_parallel import attention as module
from megatron.core.attention.context_parallel.kernels import BlockwiseTorch
from megatron.core.attention.context_parallel.tiles import Visibility
from megatron.core.groups.process_groups import SINGLE_PROCESS, Group
from megatron.core.transformer import TransformerConfig


@pytest.mark.parametrize(
    ("kind", "window", "is_ring"),
    [("p2p", (8, 0), True), ("a2a+p2p", (8, 0), True), ("p2p", None, False), ("allgather", (8, 0), False),
     ("a2a", (8, 0), False)],
)  # fmt: skip
def test_a_ring_with_a_window_says_so_to_the_chooser_of_kernels(monkeypatch, kind, window, is_ring):
    """For only such rings make bands that not every flash kernel gets right."""
    asked = {}

    def chooser(scale, backend, dtype, **choices):
        asked.update(choices, dtype=dtype)
        return BlockwiseTorch(scale)

    monkeypatch.setattr(module, "make_block_kernel", chooser)
    pair = {"ranks": (0, 1), "rank": 0}
    two_levels = {"cp_a2a": Group("cp_a2a"), "cp_p2p": Group("cp_p2p", **pair)} if "+" in kind else {}
    groups = replace(SINGLE_PROCESS, cp=Group("cp", **pair), **two_levels)
    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, cp_comm_type=kind, context_parallel_size=2, bf16=True,
        params_dtype=torch.bfloat16, attention_dropout=0.0,
    )  # fmt: skip
    module.make_context_parallel_attention(config, 1, Visibility(True, window), 0.25, groups, None)
    assert asked == {"channels": 16, "dropout_rate": 0.0, "ring_window": is_ring, "dtype": torch.bfloat16}
