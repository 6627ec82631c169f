"""The vision tower against transformers, with the same weights."""

import math

import pytest
import torch
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.config.vision import VisionConfig
from megatron.core.models.vlm.description import tower_parameters
from megatron.core.models.vlm.grids import Grids
from megatron.core.models.vlm.tower import QwenTower

HEADS, WIDTH, HIDDEN, PATCH = 2, 24, 20, 4


def by_heads(qkv):
    """Rows [3, heads, channels, ...] of transformers in our order, head by head."""
    return qkv.unflatten(0, (3, HEADS, -1)).transpose(0, 1).flatten(0, 2)


def settings(side, merge):
    """Settings of a language model and its tower."""
    language = TransformerConfig(num_layers=1, hidden_size=HIDDEN, num_attention_heads=1, params_dtype=torch.float64)
    return language, VisionConfig(
        vision_model_type="qwen", vision_frames=2,
        vision_num_layers=2, vision_hidden_size=WIDTH, vision_num_attention_heads=HEADS, vision_ffn_hidden_size=40,
        vision_patch_size=PATCH, vision_merge_size=merge, vision_num_positions=side**2,
    )  # fmt: skip


def pair(side, merge):
    """The tower and the one of transformers, with equal random weights, in fp64."""
    sizes = {"num_position_embeddings": side**2, "spatial_merge_size": merge, "patch_size": PATCH}
    peer = Qwen3_5VisionModel(
        Qwen3_5VisionConfig(
            depth=2, hidden_size=WIDTH, intermediate_size=40, num_heads=HEADS, out_hidden_size=HIDDEN,
            initializer_range=0.5, **sizes,
        )
    ).double()  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    for param in peer.parameters():
        param.data = torch.randn(param.shape, generator=generator, dtype=torch.float64) * 0.3
    tower = QwenTower(*settings(side, merge))
    state = peer.state_dict()
    values = {
        "patch_embed.weight": state["patch_embed.proj.weight"].flatten(1),
        "patch_embed.bias": state["patch_embed.proj.bias"],
    }
    values["position_embeddings.weight"] = state["pos_embed.weight"]
    for part in ("weight", "bias"):
        for name in ("norm", "linear_fc1", "linear_fc2"):
            values[f"merger.{name}.{part}"] = state[f"merger.{name}.{part}"]
        for layer in range(2):
            old, new = f"blocks.{layer}", f"blocks.layers.{layer}"
            values[f"{new}.input_layernorm.{part}"] = state[f"{old}.norm1.{part}"]
            values[f"{new}.pre_mlp_layernorm.{part}"] = state[f"{old}.norm2.{part}"]
            values[f"{new}.self_attention.linear_qkv.{part}"] = by_heads(state[f"{old}.attn.qkv.{part}"])
            values[f"{new}.self_attention.linear_proj.{part}"] = state[f"{old}.attn.proj.{part}"]
            for name in ("linear_fc1", "linear_fc2"):
                values[f"{new}.mlp.{name}.{part}"] = state[f"{old}.mlp.{name}.{part}"]
    parameters = dict(tower.named_parameters())
    assert parameters.keys() == values.keys()
    for name, value in values.items():
        parameters[name].data = value.clone()
    return tower, peer


@pytest.mark.parametrize(
    "side,merge,sizes", [(5, 2, [(4, 6), (2, 2), (8, 2)]), (3, 1, [(1, 5), (7, 1), (3, 3)]), (4, 3, [(6, 9)])]
)
def test_embeddings_and_gradients_equal_those_of_transformers(side, merge, sizes):
    tower, peer = pair(side, merge)
    generator = torch.Generator().manual_seed(2)
    grids = Grids(torch.tensor(sizes), merge)
    patches = torch.randn(int(grids.patches.sum()), 3 * 2 * PATCH**2, generator=generator, dtype=torch.float64)
    expected = peer(patches, torch.tensor([(1, *size) for size in sizes])).pooler_output
    described = {
        param.name.removeprefix("vision."): math.prod(param.shape) for param in tower_parameters(*settings(side, merge))
    }
    assert described == {name: param.numel() for name, param in tower.named_parameters()}
    output = tower(patches, grids)
    assert output.shape == (int(grids.tokens.sum()), HIDDEN)
    torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)  # transformers' angles and weights are fp32
    weights = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    (output * weights).sum().backward()
    (expected * weights).sum().backward()
    for name in ("weight", "bias"):
        values, expected = getattr(tower.patch_embed, name).grad, getattr(peer.patch_embed.proj, name).grad
        torch.testing.assert_close(values, expected.reshape(values.shape), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(tower.position_embeddings.weight.grad, peer.pos_embed.weight.grad, rtol=1e-5, atol=1e-5)
    expected = by_heads(peer.blocks[0].attn.qkv.weight.grad)
    torch.testing.assert_close(
        tower.blocks.layers[0].self_attention.linear_qkv.weight.grad, expected, rtol=1e-5, atol=1e-5
    )
