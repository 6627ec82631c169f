"""Descriptions against the models that are built, against what torch counts, and against published figures."""

import math
import re
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.description.model import Piece
from megatron.core.models.gpt import GPTModel, description
from megatron.core.models.gpt.description import describe_gpt
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.transformer.norm import build_norm
from megatron.core.transformer.spec_utils import BranchSpec, ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer

LATENT = {
    "multi_latent_attention": True, "kv_lora_rank": 10, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 6,
}  # fmt: skip
DEEPSEEK_V3_DENSE = TransformerConfig(
    num_layers=3, hidden_size=7168, ffn_hidden_size=18432, num_attention_heads=128, swiglu=True, qk_layernorm=True,
    normalization="RMSNorm", add_bias_linear=False, multi_latent_attention=True, q_lora_rank=1536, kv_lora_rank=512,
)  # fmt: skip
LLAMA_3_8B = TransformerConfig(
    num_layers=32, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32, num_query_groups=8, swiglu=True,
    normalization="RMSNorm", add_bias_linear=False,
)  # fmt: skip


def described(config, vocab_size, length, **options):
    return describe_gpt(config, vocab_size=vocab_size, seq_length=length, max_sequence_length=length, **options)


def gpt_flops_per_sample(config, *, vocab_size, seq_length):
    return described(config, vocab_size, seq_length).flops_per_sample


@pytest.mark.parametrize("length, giga", [(4096, 48.25), (8192, 51.47), (32768, 70.8), (131072, 148.0)])
def test_llama_3_8b_per_token(length, giga):
    per_token = gpt_flops_per_sample(LLAMA_3_8B, vocab_size=128256, seq_length=length) / length
    assert per_token / 1e9 == pytest.approx(giga, rel=1e-3)


def test_llama_3_8b_has_its_8_030_261_248_parameters():
    assert described(LLAMA_3_8B, 128256, 8192, position_embedding_type="rope").num_parameters == 8_030_261_248


def test_a_dense_layer_of_deepseek_v3_has_its_583_485_440_parameters():
    """Published weights: layer 0 of 61; its attention has 187 107 328 parameters with its two latent norms."""
    model = described(DEEPSEEK_V3_DENSE, 129280, 4096, position_embedding_type="rope")
    attention, mlp = (branch.num_parameters for branch in model.layers[0])
    assert (attention, mlp) == (187_107_328 + 7168, 3 * 7168 * 18432 + 7168)


def flops_in_place(total, left, right, **rest):
    """FLOPs that torch does not count: expert gradients are accumulated in place."""
    return 2 * left[0] * left[1] * right[1]


@pytest.mark.parametrize(
    "overrides",
    [
        LATENT,
        {**LATENT, "q_lora_rank": 12, "qk_layernorm": True, "mla_down_proj_fusion": True},
        {},
        {"swiglu": True, "num_query_groups": 2, "kv_channels": 12},
        {"quick_geglu": True, "num_query_groups": 1, "ffn_hidden_size": 56, "add_bias_linear": False},
        {"squared_relu": True, "add_bias_linear": False},
        {
            "swiglu": True,
            "add_bias_linear": False,
            "num_moe_experts": 8,
            "moe_router_topk": 3,
            "moe_ffn_hidden_size": 24,
        },
        {
            "num_moe_experts": 4,
            "moe_layer_freq": [0, 1, 1],
            "moe_ffn_hidden_size": 40,
            "quick_geglu": True,
            "moe_shared_expert_intermediate_size": 48,
            "moe_shared_expert_gate": True,
        },
        {"num_moe_experts": 4, "moe_layer_freq": 2, "moe_router_topk": 1, "moe_router_pre_softmax": True},
    ],
)
def test_the_formula_equals_a_counted_trace(overrides):
    """Torch counts all s x s scores and the padded vocabulary; the formula counts half of the scores and the true one.

    On the unfused path, because only some torch versions count fused kernels.
    """
    length, vocab, padded, batch = 16, 50, 64, 2
    config = TransformerConfig(
        num_layers=3, hidden_size=32, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0,
        attention_backend="unfused", use_cpu_initialization=True, **overrides,
    )  # fmt: skip
    model = GPTModel(
        config, get_gpt_decoder_block_spec(config), vocab_size=vocab, max_sequence_length=length,
        make_vocab_size_divisible_by=64,
    )  # fmt: skip
    tokens = torch.randint(0, vocab, (batch, length))
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: flops_in_place}) as counter:
        model(tokens, torch.arange(length).expand(batch, -1), labels=tokens).sum().backward()
    channels = 12 + 6 if config.multi_latent_attention else 2 * config.kv_channels
    scores = 3 * 2 * config.num_layers * config.num_attention_heads * channels * length**2
    padding = 3 * 2 * length * config.hidden_size * (padded - vocab)
    formula = gpt_flops_per_sample(config, vocab_size=vocab, seq_length=length)
    assert counter.get_total_flops() / batch == formula + scores / 2 + padding


MIXTRAL_8X7B = {"num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32,
                "num_query_groups": 8, "num_moe_experts": 8, "moe_ffn_hidden_size": 14336}  # fmt: skip
QWEN3_30B_A3B = {"num_layers": 48, "hidden_size": 2048, "num_attention_heads": 32, "num_query_groups": 4,
                 "kv_channels": 128, "num_moe_experts": 128, "moe_router_topk": 8, "moe_ffn_hidden_size": 768,
                 "qk_layernorm": True}  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "vocab", "total", "active"),
    [
        (MIXTRAL_8X7B, 32000, 46_702_792_704, 12_879_925_248),
        (QWEN3_30B_A3B, 151936, 30_532_122_624, 3_353_032_704),
    ],
    ids=["mixtral-8x7b", "qwen3-30b-a3b"],
)
def test_published_mixtures_have_their_parameters_and_active_ones(sizes, vocab, total, active):
    config = TransformerConfig(swiglu=True, normalization="RMSNorm", add_bias_linear=False, **sizes)
    options = {"position_embedding_type": "rope", "share_embeddings_and_output_weights": False}
    model = described(config, vocab, 4096, **options)
    assert (model.num_parameters, model.num_active_parameters) == (total, active)
    gemms = 6 * (active - vocab * config.hidden_size)  # the embedding multiplies nothing
    assert 1 < model.flops_per_sample / 4096 / gemms < 1.3, "the rest is attention"


@pytest.mark.parametrize("ranks, times", [(1, 1), (2, 2), (4, 4), (8, 4)])
def test_static_rows_are_counted_with_their_room(ranks, times):
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "num_moe_experts": 8, "moe_router_topk": 2}

    def rows(**settings):
        (layer,) = described(TransformerConfig(**sizes, expert_model_parallel_size=ranks, **settings), 50, 16).layers
        return next(saved.bytes for piece in layer for op in piece.ops for saved in op.saved if saved.name == "rows")

    assert rows(moe_static_rows=True) == times * rows()


@pytest.mark.parametrize(
    "overrides",
    [
        {"window_size": (3, 0), "window_attn_skip_freq": 2},
        {"no_rope_freq": 2},
        {"num_moe_experts": 4, "moe_layer_freq": 2},
        {"experimental_attention_variant": "gdn", "linear_attention_freq": 2, "norm_placement": "mixed"},
    ],
)
def test_layers_of_a_kind_are_described_as_each_by_itself(monkeypatch, overrides):
    config = TransformerConfig(num_layers=5, hidden_size=32, num_attention_heads=2, **overrides)
    model = described(config, 64, 16, position_embedding_type="rope")
    monkeypatch.setattr(description, "_layer_kind", lambda config, number: (number,))
    assert model == described(config, 64, 16, position_embedding_type="rope")


@pytest.mark.parametrize("window, skip", [((7, 0), None), ((100, 0), None), ((3, 0), 2)])
def test_windows_count_their_band(window, skip):
    length = 4096
    config = TransformerConfig(
        num_layers=2, hidden_size=8, num_attention_heads=2, window_size=window, window_attn_skip_freq=skip
    )
    full = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2)
    saved = gpt_flops_per_sample(full, vocab_size=9, seq_length=length) - gpt_flops_per_sample(
        config, vocab_size=9, seq_length=length
    )
    hidden_pairs = (length - window[0] - 1) * (length - window[0]) / 2  # exactly, by counting rows
    windowed_layers = 2 if skip is None else 1
    assert saved == pytest.approx(3 * 2 * 2 * 8 * hidden_pairs * windowed_layers, rel=1e-3)


def test_descriptions_need_no_torch():
    program = "import sys, megatron.core.models.gpt.description; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


SPECS = {
    "gpt2": {},
    "llama": {"swiglu": True, "num_query_groups": 2, "add_bias_linear": False, "normalization": "RMSNorm"},
    "qwen2": {"swiglu": True, "num_query_groups": 1, "add_bias_linear": False, "add_qkv_bias": True},
    "qwen3": {"swiglu": True, "qk_layernorm": True, "kv_channels": 12, "normalization": "RMSNorm"},
    "llama4": {"qk_l2_norm": True, "qk_layernorm": True, "quick_geglu": True, "ffn_hidden_size": 56},
    "latent": LATENT,
    "deepseek": {**LATENT, "q_lora_rank": 12, "qk_layernorm": True, "swiglu": True, "normalization": "RMSNorm"},
    "fused-latents": {**LATENT, "q_lora_rank": 12, "qk_layernorm": True, "mla_down_proj_fusion": True},
    "mtp": {"swiglu": True, "mtp_num_layers": 2, "num_query_groups": 2},
    "mtp-repeated": {"swiglu": True, "mtp_num_layers": 2, "mtp_use_repeated_layer": True},
    "gemma-2": {
        "geglu": True,
        "apply_layernorm_1p": True,
        "norm_placement": "sandwich",
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "apply_embedding_scaling": True,
        "kv_channels": 12,
    },
    "olmo-2": {
        "swiglu": True,
        "norm_placement": "post",
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "qk_layernorm_across_heads": True,
        "kv_channels": 12,
    },
    "gpt-neox": {"use_parallel_residual": True, "num_query_groups": 2, "mtp_num_layers": 1},
    "phi": {"use_parallel_residual": True, "share_parallel_norm": True, "output_layer_bias": True, "mtp_num_layers": 1},
    "opt": {"relu": True, "learned_position_offset": 2},
    "nemotron": {"squared_relu": True, "add_bias_linear": False, "apply_layernorm_1p": True},
}
EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 24, "normalization": "RMSNorm"}
EXPERT_SPECS = {
    "mixtral": {**EXPERTS, "swiglu": True, "add_bias_linear": False},
    "qwen2-moe": {
        **EXPERTS, "swiglu": True, "add_bias_linear": False, "add_qkv_bias": True, "moe_shared_expert_gate": True,
        "moe_shared_expert_intermediate_size": 16, "moe_layer_freq": [0, 1, 1],
    },
    "deepseek": {
        **EXPERTS, "swiglu": True, "add_bias_linear": False, "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True, "moe_shared_expert_intermediate_size": 16, "moe_layer_freq": [0, 1, 1],
        "mtp_num_layers": 1,
    },
    "gpt-oss": {**EXPERTS, "quick_geglu": True, "softmax_type": "learnable", "moe_router_topk": 4},
    "biases": {
        **EXPERTS, "squared_relu": True, "moe_shared_expert_intermediate_size": 16, "moe_layer_freq": 2,
        "norm_placement": "sandwich",
    },
}  # fmt: skip
EXPERT_GRIDS = [(1, 1, 1), (2, 1, 2), (1, 2, 1), (1, 4, 1), (2, 2, 1), (2, 2, 2), (1, 2, 2)]
"""Tensor-parallel, expert-parallel and expert-tensor-parallel ranks."""


@pytest.mark.parametrize("name", SPECS)
def test_description_of_a_spec_equals_that_of_the_settings(name):
    config = TransformerConfig(num_layers=3, hidden_size=32, num_attention_heads=4, **SPECS[name])
    spec = get_gpt_decoder_block_spec(config)
    assert described(config, 50, 16, spec=spec) == described(config, 50, 16, spec=spec.layer_specs[0])
    assert described(config, 50, 16, spec=spec) == described(config, 50, 16)


class Shapeless(torch.nn.Module):
    """Describes parameters (none) and no operations."""

    @staticmethod
    def describe(config, place):
        return Piece("shapeless")


class UndescribedNorm(torch.nn.Module):
    describe = None


def test_stages_of_layers_without_time_or_with_unknown_norms_count_layers_equally():
    config = TransformerConfig(num_layers=3, hidden_size=32, num_attention_heads=4)
    for norm, unknown in ((build_norm, []), (UndescribedNorm, ["shapeless"])):
        spec = ModuleSpec(TransformerLayer, submodules=[BranchSpec("shapeless", Shapeless, norm)])
        result = described(config, 50, 16, spec=spec)
        assert result.unknown == unknown and result.costs == ((("shapeless",),) * 3, None, 0.0)


def as_built(rank, world_size, overrides, options, **grid):
    """Global name -> (logical shape, dims split by axis, this rank's sizes in storage) of the built model."""
    from megatron.core import parallel_state

    grid = grid or {"tensor_model_parallel_size": world_size}
    parallel_state.initialize_model_parallel(**grid)
    config = TransformerConfig(
        num_layers=3, hidden_size=32, num_attention_heads=4, use_cpu_initialization=True, **grid, **overrides,
    )  # fmt: skip
    spec = get_gpt_decoder_block_spec(config)
    model = GPTModel(
        config, spec, vocab_size=50, max_sequence_length=16, mtp_block_spec=get_gpt_mtp_block_spec(config, spec),
        **options,
    )  # fmt: skip
    result = {}
    for name, parameter in model.named_parameters():
        spec, full = parameter.spec, re.sub(r"shared_(?!experts)", "", name)
        shape = spec.shape if spec.part is None else spec.part.shape
        split = {axis: place.dim if hasattr(place, "dim") else place.outer.dim for axis, place in spec.mesh.items()}
        sizes = result.get(full, (None, None, []))[2]
        result[full] = (shape, split, [*sizes, parameter.numel()])
    return result


@pytest.mark.parametrize("ranks, tied", [(1, True), (1, False), (2, True), (4, False)])
@pytest.mark.parametrize("name", SPECS)
def test_a_description_equals_the_model_that_is_built(gloo_pool, name, ranks, tied):
    options = {
        "position_embedding_type": "learned_absolute" if name == "gpt2" else "rope",
        "share_embeddings_and_output_weights": tied, "make_vocab_size_divisible_by": 8,
    }  # fmt: skip
    config = TransformerConfig(num_layers=3, hidden_size=32, num_attention_heads=4, tensor_model_parallel_size=ranks,
                               **SPECS[name])  # fmt: skip
    params = [param for param in described(config, 50, 16, **options).params() if not param.tied_to]
    sizes = {"tp": ranks}
    expected = {
        param.name: (param.shape, dict(param.mesh), [math.prod(local) for local in param.local_shapes(sizes)])
        for param in params
    }
    for actual in gloo_pool.run(as_built, ranks, SPECS[name], options):
        assert {key: actual[key] for key in sorted(actual)} == {key: expected[key] for key in sorted(expected)}


def test_an_activation_moves_eight_tensors_of_its_width():
    """Gated: reads two and writes one, then reads three and writes two."""
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, ffn_hidden_size=48, swiglu=True, bf16=True,
        tensor_model_parallel_size=2,
    )  # fmt: skip
    (activation,) = (op for op in described(config, 50, 16).layers[0][1].ops if op.kind == "activation")
    assert activation.traffic == 8 * 24 * 2 and activation.gradients == 24 * 2


def test_traffic_of_experts_next_to_their_gemms():
    """16 local tokens, 3 copies each: gathered and added up, read and written, forward and backward; the gated
    activation of half of an expert's 24 channels as above, of both expert-tensor ranks' tokens."""
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, swiglu=True, bf16=True, num_moe_experts=4,
        moe_router_topk=3, moe_ffn_hidden_size=24, expert_tensor_parallel_size=2,
    )  # fmt: skip
    ops = {op.name: op for op in described(config, 50, 16).layers[0][1].ops}
    rows, item = 3 * 2, 2  # of a token
    assert ops["permutation"].traffic == ops["combination"].traffic == 4 * rows * 32 * item
    assert ops["permutation"].gradients == rows * 32 * item
    assert ops["activation"].traffic == 8 * rows * 12 * item and ops["activation"].gradients == rows * 12 * item


@pytest.mark.parametrize("tp, ep, etp", EXPERT_GRIDS)
@pytest.mark.parametrize("name", EXPERT_SPECS)
def test_a_description_of_experts_equals_the_model_that_is_built(gloo_pool, name, tp, ep, etp):
    overrides = EXPERT_SPECS[name] | {"sequence_parallel": tp > 1}
    options = {"position_embedding_type": "rope", "share_embeddings_and_output_weights": False}
    grid = {"tensor_model_parallel_size": tp, "expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp}
    config = TransformerConfig(num_layers=3, hidden_size=32, num_attention_heads=4, **grid, **overrides)
    sizes = {"tp": tp, "ep": ep, "etp": etp}
    model = described(config, 50, 16, **options)
    assert model == described(config, 50, 16, spec=get_gpt_decoder_block_spec(config), **options)
    expected = {
        param.name: (param.shape, dict(param.mesh), [math.prod(local) for local in param.local_shapes(sizes)])
        for param in model.params()
    }
    for actual in gloo_pool.run(partial(as_built, **grid), max(tp, ep * etp), overrides, options):
        assert {key: actual[key] for key in sorted(actual)} == {key: expected[key] for key in sorted(expected)}


def test_context_parallel_attention_keeps_its_output_in_the_ring_s_order_too():
    saved = {}
    for ranks in (1, 2):
        config = TransformerConfig(
            num_layers=1, hidden_size=32, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0, bf16=True,
            context_parallel_size=ranks,
        )  # fmt: skip
        (core,) = (op for op in described(config, 50, 16).layers[0][0].ops if op.kind == "attention")
        saved[ranks] = sum(item.bytes for item in core.saved)
    assert saved == {1: 4 * 4, 2: 4 * 4 + 32 * 2}


@pytest.mark.parametrize("softmax_type, kept_by", [("vanilla", "mla_up_proj"), ("learnable", "core_attn")])
def test_values_that_are_filled_up_belong_to_the_attention_core(softmax_type, kept_by):
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, softmax_type=softmax_type, **LATENT)
    (rotary,) = (op for op in described(config, 50, 16).layers[0][0].ops if op.kind == "rotary")
    saved = {item.name: item.modules for item in rotary.saved}
    assert saved == {"query and key": ("mla_up_proj", "self_attention"), "value": (kept_by, "self_attention")}
