"""Attention sinks against the definition, against transformers' GPT-OSS, and over context-parallel ranks."""

import dataclasses

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.attention.choose import choose_kernel
from megatron.core.attention.context import AttentionContext
from megatron.core.attention.context_parallel import zigzag
from megatron.core.attention.dot_product_attention import CoreAttention
from megatron.core.attention.kernels.base import Request
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.rotary import RotaryEmbedding, yarn_scaling
from megatron.core.attention.token_layout import TokenLayout
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.fusions.activations import select_activation
from megatron.core.groups.process_groups import SINGLE_PROCESS, Group
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.context import ForwardContext
from megatron.core.transformer.spec_utils import build_module

HEADS, GROUPS, CHANNELS, LENGTH, BATCH, WINDOW = 8, 4, 6, 32, 2, (6, 0)
BOUNDS = torch.tensor([0, 7, 8, 26, 32, 45, 64], dtype=torch.int32)
SINKS = torch.linspace(-2.0, 3.0, HEADS, dtype=torch.float64)


def make_config(**overrides):
    settings = {
        "num_layers": 2, "hidden_size": HEADS * CHANNELS, "num_attention_heads": HEADS, "num_query_groups": GROUPS,
        "kv_channels": CHANNELS, "attention_dropout": 0.0, "hidden_dropout": 0.0, "params_dtype": torch.float64,
        "softmax_type": "learnable",
    }  # fmt: skip
    return TransformerConfig(**{**settings, **overrides})


def inputs():
    """Query, key, value and the gradient of the output."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(HEADS, CHANNELS), (GROUPS, CHANNELS), (GROUPS, CHANNELS), (HEADS * CHANNELS,)]
    return [torch.randn(LENGTH, BATCH, *shape, generator=generator, dtype=torch.float64) for shape in shapes]


def visible(window, documents):
    """Bool [b, 1, s, s], by positions."""
    distance = torch.arange(LENGTH).unsqueeze(1) - torch.arange(LENGTH)
    observed = (distance >= 0) & (distance <= (LENGTH if window is None else window[0]))
    document = torch.bucketize(torch.arange(BATCH * LENGTH), BOUNDS[1:].long(), right=True).view(BATCH, LENGTH)
    same = document.unsqueeze(2) == document.unsqueeze(1)
    return (observed & same if documents else observed.expand(BATCH, -1, -1)).unsqueeze(1)


def by_definition(query, key, value, sinks, observed):
    """p_k = exp(s_k) / (sum_j exp(s_j) + exp(sink)), written out."""
    key, value = (x.repeat_interleave(HEADS // GROUPS, dim=2) for x in (key, value))
    scores = torch.einsum("qbad,kbad->baqk", query, key) / CHANNELS**0.5
    weights = torch.exp(scores).masked_fill(~observed, 0.0)
    weights = weights / (weights.sum(-1, keepdim=True) + torch.exp(sinks).view(1, -1, 1, 1))
    return torch.einsum("baqk,kbad->qbad", weights, value).flatten(2)


def results(function, tensors, sinks, grad):
    """Output and gradients of query, key, value and sinks."""
    leaves = [x.clone().requires_grad_() for x in (*tensors, sinks)]
    output = function(*leaves)
    output.backward(grad)
    return [output.detach(), *(x.grad for x in leaves)]


def of_core(core, documents=None, groups=SINGLE_PROCESS):
    """A function of query, key, value and sinks."""
    context = AttentionContext(layout=TokenLayout.of(groups).with_documents(documents))

    def attend(query, key, value, sinks):
        core.softmax_offset = torch.nn.Parameter(torch.zeros_like(sinks))
        return torch.func.functional_call(core, {"softmax_offset": sinks}, (query, key, value, context))

    return attend


@pytest.mark.parametrize("backend", ["auto", "unfused"])
@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("documents", [False, True])
def test_output_and_gradients_are_those_of_the_definition(backend, window, documents):
    config = make_config(window_size=window, attention_backend=backend)
    core = CoreAttention(config, 1, groups=SINGLE_PROCESS)
    packed = PackedSeqParams(cu_seqlens_q=BOUNDS) if documents else None
    *tensors, grad = inputs()
    actual = results(of_core(core, packed), tensors, SINKS, grad)
    observed = visible(window, documents)
    expected = results(lambda *leaves: by_definition(*leaves, observed), tensors, SINKS, grad)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_off_by_one_is_a_sink_of_zero_without_a_parameter():
    *tensors, _ = inputs()
    core = CoreAttention(make_config(softmax_type="off-by-one"), 1, groups=SINGLE_PROCESS)
    assert not list(core.parameters()) and not core.state_dict()
    expected = by_definition(*tensors, torch.zeros(HEADS, dtype=torch.float64), visible(None, False))
    torch.testing.assert_close(core(*tensors), expected)


def differences_over_ranks(rank, size, form, levels):
    """Largest difference of output and gradients to one rank's, by case; sink gradients are this rank's share."""
    groups = parallel_state.initialize_model_parallel(
        context_parallel_size=size, hierarchical_context_parallel_sizes=levels
    )
    *tensors, grad = inputs()
    actual = {}
    for name, window, documents in (("causal", None, False), ("window", WINDOW, False), ("packed", None, True)):
        config = make_config(window_size=window, context_parallel_size=size, cp_comm_type=[form])
        packed = PackedSeqParams(cu_seqlens_q=BOUNDS) if documents else None
        observed = visible(window, documents)
        expected = results(lambda *leaves, observed=observed: by_definition(*leaves, observed), tensors, SINKS, grad)
        local = [zigzag.local_part(x, rank, size, dim=0) for x in (*tensors, grad)]
        *separate, share = results(
            of_core(CoreAttention(config, 1, groups=groups), packed, groups), local[:3], SINKS, local[3]
        )
        parts = [zigzag.local_part(x, rank, size, dim=0) for x in expected[:-1]]
        off = max((one - other).abs().max().item() for one, other in zip(separate, parts, strict=True))
        actual[name] = off, share, expected[-1]
    return actual


@pytest.mark.parametrize("form, size, levels", [
    ("p2p", 2, None), ("p2p", 4, None), ("allgather", 2, None), ("a2a", 2, None), ("a2a+p2p", 4, [2, 2]),
])  # fmt: skip
def test_context_parallel_ranks_give_the_same_and_shares_of_the_sinks_gradients(gloo_pool, form, size, levels):
    ranks = gloo_pool.run(differences_over_ranks, size, form, levels)
    for name in ranks[0]:
        assert max(rank[name][0] for rank in ranks) < 1e-12, name
        torch.testing.assert_close(sum(rank[name][1] for rank in ranks), ranks[0][name][2])


@pytest.mark.parametrize("softmax_type", ["learnable", "off-by-one"])
def test_tensor_parallel_ranks_hold_their_heads(softmax_type):
    groups = dataclasses.replace(SINGLE_PROCESS, tp=Group("tp", (0, 1), 1))
    config = make_config(tensor_model_parallel_size=2, softmax_type=softmax_type)
    core = CoreAttention(config, 1, groups=groups)
    assert core.softmax_offset.shape == (HEADS // 2,)


@pytest.mark.parametrize(
    "changes, kernel, reason",
    [
        ({}, "cudnn", "attention sinks"),
        ({"window": (127, 0)}, "cudnn", "window 127,0, attention sinks"),
        ({"backend": "flash", "flash_packages": (3,)}, "flash", "gives no gradients by a log-sum-exp"),
        ({"capability": None}, "unfused", "no GPU"),
        ({"dtype": torch.float32}, "unfused", "float32"),
    ],
)
def test_kernels_that_give_a_log_sum_exp_are_chosen(changes, kernel, reason):
    settings = {"backend": "auto", "dtype": torch.bfloat16, "channels": 64, "capability": (9, 0), "form": "gather"}
    choice = choose_kernel(Request(**{**settings, "sink": True, **changes}))
    assert choice.kernel == kernel and reason in str(choice)


def gpt_oss_attention(layer):
    """transformers' attention layer with its rotary embedding and mask: a function of [b, s, h], and its weights."""
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    config = modeling.GptOssConfig(
        hidden_size=HEADS * CHANNELS, num_attention_heads=HEADS, num_key_value_heads=GROUPS, head_dim=8,
        num_hidden_layers=2, sliding_window=7, max_position_embeddings=LENGTH, attention_bias=True,
        rope_parameters={"rope_type": "yarn", "rope_theta": 150.0, "factor": 4.0, "beta_fast": 2.0, "beta_slow": 0.2,
                         "truncate": False, "original_max_position_embeddings": 8},
        attn_implementation="eager",
    )  # fmt: skip
    attention = modeling.GptOssAttention(config, layer).double()
    generator = torch.Generator().manual_seed(layer)
    for weight in attention.parameters():
        weight.data = torch.randn(weight.shape, generator=generator, dtype=torch.float64) * 0.3
    rotary = modeling.GptOssRotaryEmbedding(config)
    window = (6, 0) if attention.sliding_window else None
    mask = torch.zeros(BATCH, 1, LENGTH, LENGTH, dtype=torch.float64).masked_fill(~visible(window, False), -1e300)

    def forward(hidden_states):
        embeddings = rotary(hidden_states, torch.arange(LENGTH).expand(BATCH, -1))
        return attention(hidden_states, embeddings, mask)[0]

    return forward, attention


@pytest.mark.parametrize("layer", [0, 1])
def test_the_layer_is_that_of_gpt_oss(layer):
    """Sinks, biases, alternating windows and YaRN whose range is not rounded."""
    foreign, weights = gpt_oss_attention(layer)
    config = make_config(
        kv_channels=8, window_size=(6, 0), window_attn_skip_freq=2, yarn_correction_range_round_to_int=False,
        rotary_scaling_factor=4.0, yarn_original_max_position_embeddings=8, yarn_beta_fast=2.0, yarn_beta_slow=0.2,
    )  # fmt: skip
    local = build_module(
        get_gpt_layer_local_spec().submodules.self_attention, config, layer_number=layer + 1, groups=SINGLE_PROCESS
    )
    q, k, v = (getattr(weights, f"{name}_proj") for name in "qkv")
    for kind in ("weight", "bias"):
        parts = [getattr(item, kind).data.unflatten(0, (GROUPS, -1)) for item in (q, k, v)]
        getattr(local.linear_qkv, kind).data = torch.cat(parts, dim=1).flatten(0, 1)
        getattr(local.linear_proj, kind).data = getattr(weights.o_proj, kind).data
    local.core_attention.softmax_offset.data = weights.sinks.data
    rotary = RotaryEmbedding(8, 1.0, rotary_base=150.0, dtype=torch.float64, scaling=yarn_scaling(config, LENGTH))
    context = ForwardContext(rotary_pos_emb=rotary(LENGTH, torch.device("cpu")))
    x = torch.randn(BATCH, LENGTH, HEADS * CHANNELS, dtype=torch.float64)
    result = local(x.transpose(0, 1), context)
    result = (result[0] if isinstance(result, tuple) else result).transpose(0, 1)
    torch.testing.assert_close(result, foreign(x), rtol=1e-5, atol=1e-5)  # their tables are fp32


def test_the_clamped_activation_is_that_of_gpt_oss():
    """Their halves are interleaved, and clamped after the bias."""
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    experts = modeling.GptOssExperts(modeling.GptOssConfig(hidden_size=8, intermediate_size=6, num_local_experts=2))
    config = make_config(quick_geglu=True, activation_func_clamp_value=7.0, glu_linear_offset=1.0)
    gate, up = torch.randn(2, 5, 6, dtype=torch.float64) * 8
    expected = experts._apply_gate(torch.stack((gate, up), dim=-1).flatten(-2))
    torch.testing.assert_close(select_activation(config)(torch.cat((gate, up), dim=-1)), expected)
