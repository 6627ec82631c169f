"""Every form of context-parallel attention equals one rank, forward and backward, in float64."""

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.attention.context import AttentionContext
from megatron.core.attention.dot_product_attention import CoreAttention
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.token_layout import TokenLayout
from megatron.core.enums import AttnMaskType
from megatron.core.random.dropout import DropoutCoordinates
from megatron.core.random.philox import DropoutStream
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.test_utils.reference_attention import reference_attention

LENGTH, BATCH, CHANNELS = 32, 2, 6
DOCUMENTS = [0, 7, 8, 26, 32, 32, 45, 64]
CASES = {
    "causal": {},
    "all pairs": {"mask": AttnMaskType.no_mask},
    "window": {"window_size": (6, 0)},
    "wide window": {"window_size": (21, 0)},
    "two-sided window": {"mask": AttnMaskType.no_mask, "window_size": (3, 9)},
    "packed": {"packed": True},
    "packed, all pairs": {"packed": True, "mask": AttnMaskType.no_mask},
    "packed window": {"packed": True, "window_size": (4, 0)},
    "dropout": {"attention_dropout": 0.3},
    "packed dropout": {"packed": True, "attention_dropout": 0.3},
    "unfused": {"attention_backend": "unfused", "packed": True},
    "relative": {"biased": True},
    "relative, all pairs": {"biased": True, "mask": AttnMaskType.no_mask},
    "packed, relative, all pairs, sink": {
        "biased": True,
        "packed": True,
        "mask": AttnMaskType.no_mask,
        "softmax_type": "off-by-one",
    },
    "relative window, dropout": {"biased": True, "window_size": (6, 0), "attention_dropout": 0.3},
}
FORMS = ["p2p", "allgather", "a2a", "a2a+p2p"]


def make_config(heads, kv_groups, **overrides):
    sizes = {"num_layers": 2, "hidden_size": heads * CHANNELS, "num_attention_heads": heads, "kv_channels": CHANNELS}
    rates = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": torch.float64}
    return TransformerConfig(**{**sizes, **rates, "num_query_groups": kv_groups, **overrides})


def tensors(heads, kv_groups, length=LENGTH, dtype=torch.float64):
    """Query, key, value of whole sequences and the gradient of the output."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(heads, CHANNELS), (kv_groups, CHANNELS), (kv_groups, CHANNELS), (heads * CHANNELS,)]
    return [torch.randn(length, BATCH, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def coordinates(positions):
    return DropoutCoordinates(DropoutStream(1), torch.tensor([5, 9]), positions)


def attend(core, inputs, packed, layout, bias=None):
    """Output and gradients of query, key, value, and bias if there is one."""
    leaves = [x.clone().requires_grad_() for x in (*inputs[:3], *([] if bias is None else [bias]))]
    bounds = torch.tensor(DOCUMENTS, dtype=torch.int32)
    positions = layout.positions(len(leaves[0]), torch.device("cpu"))
    layout = layout.with_documents(PackedSeqParams(cu_seqlens_q=bounds) if packed else None)
    context = AttentionContext(layout=layout, dropout=coordinates(positions), position_bias=[*leaves[3:], None][0])
    output = core(*leaves[:3], context)
    output.backward(inputs[3])
    return [output.detach(), *(x.grad for x in leaves)]


def largest_differences(rank, size, form, levels, heads, kv_groups, order="zigzag"):
    """Case -> largest relative difference between this rank's results and its part of one rank's."""
    groups = parallel_state.initialize_model_parallel(
        context_parallel_size=size, hierarchical_context_parallel_sizes=levels
    )
    differences, layout = {}, TokenLayout.of(groups, order=order)
    full = tensors(heads, kv_groups)
    for name, case in CASES.items():
        case = dict(case)
        packed, mask = case.pop("packed", False), case.pop("mask", AttnMaskType.causal)
        biased = case.pop("biased", False)
        bias = torch.randn(heads, 2 * LENGTH - 1, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        bias = bias if biased else None
        reference = reference_attention(make_config(heads, kv_groups, **case), 2, mask)
        expected = attend(reference, full, packed, TokenLayout(), bias)
        config = make_config(heads, kv_groups, context_parallel_size=size, cp_comm_type=[form], **case)
        core = CoreAttention(config, 2, mask, "relative" if biased else "self", groups=groups)
        local = [layout.local(x, 0) for x in full]
        results = attend(core, local, packed, layout, bias)
        parts = [layout.local(x, 0) for x in expected[:4]] + expected[4:]
        for share in results[4:]:  # every rank has seen some pairs
            torch.distributed.all_reduce(share, group=groups.cp.handle)
        differences[name] = max(
            ((part - result).norm() / part.norm()).item() for part, result in zip(parts, results, strict=True)
        )
    return differences


@pytest.mark.parametrize("form, size, levels, kv_groups", [
    ("p2p", 2, None, 8), ("p2p", 4, None, 4), ("allgather", 2, None, 8), ("allgather", 4, None, 4),
    ("a2a", 2, None, 8), ("a2a", 4, None, 4), ("a2a+p2p", 4, [2, 2], 8), ("a2a+p2p", 2, [2, 1], 4),
    ("a2a+p2p", 2, [1, 2], 8),
])  # fmt: skip
def test_every_form_equals_one_rank(gloo_pool, form, size, levels, kv_groups):
    for differences in gloo_pool.run(largest_differences, size, form, levels, 8, kv_groups):
        assert set(differences) == set(CASES)
        assert max(differences.values()) < 1e-12, differences


@pytest.mark.parametrize("form, levels", [("p2p", None), ("allgather", None), ("a2a", None), ("a2a+p2p", [2, 2])])
def test_forms_take_contiguous_tokens_too(gloo_pool, form, levels):
    for differences in gloo_pool.run(largest_differences, 4, form, levels, 8, 4, "contiguous"):
        assert max(differences.values()) < 1e-12, differences


@pytest.mark.parametrize("form", ["p2p", "allgather"])
def test_one_key_value_head_serves_any_number_of_ranks(gloo_pool, form):
    for differences in gloo_pool.run(largest_differences, 4, form, None, 3, 1):
        assert max(differences.values()) < 1e-12, differences


def test_one_rank_gathers_and_sums_nothing():
    """A group of one has the handle None, which torch would take for the world group."""
    x, layout = torch.ones(2, 4, 1, 1, 3), TokenLayout()
    assert layout.full(x, 1) is x and layout.sum_local(x, 1) is x and layout.sum(x) is x and layout.local(x, 1) is x
