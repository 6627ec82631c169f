"""Relative positions through the attention core: with Triton's kernels as with plain torch, down to the table's
gradient; on CPUs in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from megatron.core.attention.context import AttentionContext
from megatron.core.attention.dot_product_attention import CoreAttention
from megatron.core.attention.kernels.relative import RelativeAttention
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.token_layout import TokenLayout
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.enums import AttnMaskType
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.models.common.relative_positions import position_bias
from tests.test_utils.kernels import DEVICE, TOLERANCE, filled

CASES = {
    "encoder": (AttnMaskType.padding, None, {}), "decoder": (AttnMaskType.causal, None, {}),
    "padded": (AttnMaskType.padding, True, {}), "window": (AttnMaskType.causal, None, {"window_size": (9, 0)}),
}  # fmt: skip


def assert_equal_to_plain_torch(case, length, batch, heads, groups, channels, dtype, backend="auto"):
    """Output and gradients of query, key, value and table, against plain torch in fp64."""
    mask, padded, settings = CASES[case]
    shapes = [(length, batch, n, channels) for n in (heads, groups, groups)]
    inputs = [filled(*shape, dtype=dtype, seed=seed, device=DEVICE) for seed, shape in enumerate(shapes)]
    inputs.append(filled(32, heads, dtype=dtype, seed=3, device=DEVICE))
    upstream = filled(length, batch, heads * channels, dtype=dtype, seed=4, device=DEVICE)
    lengths = torch.arange(batch) * 7 % length + 1
    documents = PackedSeqParams.of_lengths(lengths, length).on(torch.device(DEVICE)) if padded else None
    if padded:  # outputs at padding are unused
        upstream[torch.arange(length)[:, None] >= lengths] = 0
    results = []
    for number, kernel in ((torch.float64, None), (dtype, backend)):
        config = TransformerConfig(
            num_layers=1, hidden_size=heads * channels, num_attention_heads=heads, num_query_groups=groups,
            kv_channels=channels, attention_dropout=0.0, params_dtype=number, **settings,
            attention_backend=kernel or "unfused",
        )  # fmt: skip
        core = CoreAttention(config, 1, mask, "relative", groups=SINGLE_PROCESS)
        if kernel is not None and DEVICE == "cpu":
            core.kernel = RelativeAttention(channels**-0.5)
        leaves = [x.to(number, copy=True).requires_grad_() for x in inputs]
        bias = position_bias(leaves[3], length, max_distance=20, bidirectional=mask is AttnMaskType.padding)
        mixed = core.to(DEVICE)(
            *leaves[:3], AttentionContext(layout=TokenLayout(documents=documents), position_bias=bias)
        )
        results.append([mixed, *torch.autograd.grad(mixed, leaves, upstream.to(number))])
    for expected, actual in zip(*results, strict=True):
        assert actual.dtype == dtype
        assert (actual.double() - expected).norm() < TOLERANCE[dtype] * expected.norm()
    return core


@pytest.mark.parametrize("case", CASES)
def test_kernels_equal_plain_torch(case):
    core = assert_equal_to_plain_torch(case, 40, 2, 2, 1, 16, torch.float32)
    assert isinstance(core.kernel, RelativeAttention) or DEVICE == "cuda"


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("length, heads, groups, channels", [(512, 8, 8, 128), (128, 8, 2, 64), (333, 4, 4, 32)])
def test_the_chosen_kernels_equal_plain_torch(case, length, heads, groups, channels):
    core = assert_equal_to_plain_torch(case, length, 4, heads, groups, channels, torch.bfloat16)
    assert core.choice.kernel == "triton"
