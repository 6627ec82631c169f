"""Parts of multi-latent attention: scale and rotation, heads of two sizes, what fills its slots."""

import math
from dataclasses import replace

import pytest
import torch

from megatron.core.attention.context_parallel.forms import EqualHeads, RingAttention
from megatron.core.attention.dot_product_attention import CoreAttention
from megatron.core.attention.masks import Mask
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.rotary import latent_rotary, latent_softmax_scale
from megatron.core.attention.token_layout import TokenLayout
from megatron.core.config.transformer_config import MLATransformerConfig
from megatron.core.groups.process_groups import SINGLE_PROCESS, Group
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.tensor_parallel.operators import (
    copy_to_region,
    gather_from_sequence,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import build_module

SIZES = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "params_dtype": torch.float64,
}  # fmt: skip


def configured(**settings):
    return MLATransformerConfig(**{**SIZES, **settings})


def test_the_softmax_of_deepseek_v3_is_sharpened_1_874_times():
    config = configured(mscale_all_dim=1.0)
    assert latent_softmax_scale(config) * math.sqrt(192) == pytest.approx(1.8739, rel=1e-4)
    assert latent_softmax_scale(configured()) * math.sqrt(192) == 1.0
    # as in Megatron-LM the factor counts for a plain rotation too
    assert latent_softmax_scale(configured(mscale_all_dim=1.0, rope_type="rope")) == latent_softmax_scale(config)


def test_positions_are_stretched_from_4096_unless_another_context_is_given():
    rotary = latent_rotary(configured(), 10000, 0.5)
    assert rotary.width == 64 and rotary.scaling.original_max_position_embeddings == 4096
    rotary = latent_rotary(configured(original_max_position_embeddings=512), 10000, 1.0)
    assert rotary.scaling.original_max_position_embeddings == 512
    plain = latent_rotary(configured(rope_type="rope"), 500, 0.5)
    assert (plain.width, plain.base, plain.scaling) == (32, 500.0, None)


@pytest.mark.parametrize("sizes", [(12, 6), (6, 12), (8, 8)])
@pytest.mark.parametrize("softmax_type", ["vanilla", "learnable"])
def test_heads_of_two_sizes_attend_as_their_formula(sizes, softmax_type):
    keys, values = sizes
    config = configured(softmax_type=softmax_type)
    core = CoreAttention(config, 1, groups=SINGLE_PROCESS, softmax_scale=0.3, k_channels=keys, v_channels=values)
    torch.manual_seed(1)
    shapes = [(10, 2, 4, channels) for channels in (keys, keys, values)]
    query, key, value = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    scores = torch.einsum("sbad,tbad->bast", query, key) * 0.3
    scores = scores.masked_fill(torch.ones(10, 10, dtype=torch.bool).triu(1), -torch.inf)
    in_blocks = softmax_type == "learnable"
    if in_blocks:
        core.softmax_offset.data.normal_()
        scores = torch.cat((scores, core.softmax_offset.view(1, 4, 1, 1).expand(2, 4, 10, 1)), -1)
    expected = torch.einsum("bast,tbae->sbae", scores.softmax(-1)[..., :10], value).flatten(2)
    actual, grad = core(query, key, value), torch.randn(10, 2, 4 * values, dtype=torch.float64)
    torch.testing.assert_close(actual, expected)
    tensors = (query, key, value, *([core.softmax_offset] if in_blocks else []))
    for mine, foreign in zip(torch.autograd.grad(actual, tensors, grad), torch.autograd.grad(expected, tensors, grad)):
        torch.testing.assert_close(mine, foreign)
    filled = keys != values and in_blocks
    form = core.form(TokenLayout())
    assert isinstance(form, EqualHeads if filled else RingAttention) if in_blocks else form == core.kernel.attend
    assert (f"heads of {keys} and {values} channels filled up" in core.description) == filled


@pytest.mark.parametrize("length, has_documents, expected", [(128, False, 4), (130, False, 6), (128, True, 6)])
def test_values_are_filled_up_where_cudnn_does_not_compute(length, has_documents, expected):
    def inner(query, key, value, mask):
        widths.append(value.shape[-1])
        return value

    widths = []
    documents = PackedSeqParams.of_lengths(torch.tensor([length]), length) if has_documents else None
    query, key, value = (torch.ones(length, 1, 2, channels) for channels in (6, 6, 4))
    out = EqualHeads(inner, for_cudnn=True)(query, key, value, Mask(documents=documents))
    assert widths == [expected] and out.shape == value.shape


@pytest.mark.gpu
@pytest.mark.parametrize("length", [128, 130])
@pytest.mark.parametrize("grad", [False, True])
def test_heads_of_two_widths_on_a_gpu(length, grad):
    """Lengths that cuDNN does not support run on the flash kernel, which requires equal head dims."""
    sizes = {"softmax_scale": 0.1, "k_channels": 192, "v_channels": 128}
    core = CoreAttention(configured(params_dtype=torch.bfloat16, bf16=True), 1, groups=SINGLE_PROCESS, **sizes)
    torch.manual_seed(1)
    tensors = [torch.randn(length, 2, 4, channels, device="cuda").bfloat16() for channels in (192, 192, 128)]
    query, key, value = (x.requires_grad_(grad) for x in tensors)
    with torch.set_grad_enabled(grad):
        actual = core(query, key, value)
    scores = torch.einsum("sbad,tbad->bast", query.double(), key.double()) * 0.1
    scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool, device="cuda").triu(1), -torch.inf)
    expected = torch.einsum("bast,tbae->sbae", scores.softmax(-1), value.double()).flatten(2)
    torch.testing.assert_close(actual.double(), expected, atol=2e-2, rtol=2e-2)
    if grad:
        for mine, foreign in zip(*(torch.autograd.grad(x.sum(), tensors) for x in (actual, expected))):
            torch.testing.assert_close(mine, foreign, atol=5e-2, rtol=5e-2)


def test_specs_of_a_layer_and_of_a_block_have_it():
    for spec in (get_gpt_layer_local_spec(multi_latent_attention=True), get_gpt_decoder_block_spec(configured())):
        layer = getattr(spec, "layer_specs", [spec])[0]
        assert layer.submodules.self_attention.module is MLASelfAttention
    slots = get_gpt_layer_local_spec(multi_latent_attention=True).submodules.self_attention
    assert "q_layernorm.weight" not in dict(built(slots, configured()))
    assert "q_layernorm.weight" in dict(built(slots, configured(qk_layernorm=True)))
    slots.submodules.linear_q_down_proj = None
    with pytest.raises(AssertionError, match="slot"):
        built(slots, configured())


def built(slots, config):
    return build_module(slots, config, groups=SINGLE_PROCESS).named_parameters()


def test_two_latents_of_one_weight_are_those_of_two():
    torch.manual_seed(0)
    sizes = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_layernorm": True}
    slots = get_gpt_layer_local_spec(multi_latent_attention=True).submodules.self_attention
    apart = build_module(slots, configured(**sizes), groups=SINGLE_PROCESS)
    fused = build_module(slots, configured(**sizes, mla_down_proj_fusion=True), groups=SINGLE_PROCESS)
    for parameter in apart.parameters():
        parameter.data.normal_()
    state = apart.state_dict()
    parts = [state.pop(f"linear_{name}_down_proj.weight") for name in ("q", "kv")]
    fused.load_state_dict({**state, "linear_qkv_down_proj.weight": torch.cat(parts)})
    x = torch.randn(8, 2, 32, dtype=torch.float64)
    torch.testing.assert_close(fused(x), apart(x))


@pytest.mark.parametrize("split", [True, False])
def test_the_key_of_all_heads_is_gathered_where_only_positions_are_split(split):
    slots = get_gpt_layer_local_spec(multi_latent_attention=True).submodules.self_attention
    groups = replace(SINGLE_PROCESS, tp=Group("tp", (0, 1)))
    config = configured(tensor_model_parallel_size=2, sequence_parallel=split)
    attention = build_module(slots, config, groups=groups)
    spread = gather_from_sequence if split else copy_to_region
    assert attention._for_all_heads is spread
