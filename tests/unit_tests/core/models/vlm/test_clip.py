"""The towers of CLIP and SigLIP with LLaVA's projector against transformers, with the same weights."""

import pytest
import torch
from transformers import CLIPVisionConfig, CLIPVisionModel, SiglipVisionConfig, SiglipVisionModel
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.config.vision import VisionConfig
from megatron.core.models.vlm.clip import ClipTower
from megatron.core.models.vlm.description import tower_parameters
from megatron.core.models.vlm.grids import Grids
from megatron.core.models.vlm.spread import share_images
from megatron.core.models.vlm.towers import TOWERS

HEADS, WIDTH, HIDDEN, PATCH, SIDE, LAYERS = 2, 24, 20, 4, 12, 3
KINDS = {"clip": (CLIPVisionConfig, CLIPVisionModel), "siglip": (SiglipVisionConfig, SiglipVisionModel)}


def by_heads(state, name, part):
    """Queries, keys and values of transformers in our order, head by head."""
    matrices = [state[f"{name}.self_attn.{letter}_proj.{part}"].unflatten(0, (HEADS, -1)) for letter in "qkv"]
    return torch.cat(matrices, dim=1).flatten(0, 1)


def values(state, projector, layers):
    """The weights of transformers under our names."""
    result = {"position_embeddings.weight": state["embeddings.position_embedding.weight"]}
    for name, value in state.items():
        if name.startswith("embeddings.patch_embedding"):
            result[name.replace("embeddings.patch_embedding", "patch_embed")] = (
                value.flatten(1) if value.ndim > 1 else value
            )
    if "embeddings.class_embedding" in state:
        result["class_embedding.weight"] = state["embeddings.class_embedding"][None]
    for part in ("weight", "bias"):
        if "pre_layrnorm.bias" in state:
            result[f"first_norm.{part}"] = state[f"pre_layrnorm.{part}"]
        for number in (1, 2):
            result[f"merger.linear_fc{number}.{part}"] = projector[f"linear_{number}.{part}"]
        for layer in range(layers):
            old, new = f"encoder.layers.{layer}", f"blocks.layers.{layer}"
            result[f"{new}.input_layernorm.{part}"] = state[f"{old}.layer_norm1.{part}"]
            result[f"{new}.pre_mlp_layernorm.{part}"] = state[f"{old}.layer_norm2.{part}"]
            result[f"{new}.self_attention.linear_qkv.{part}"] = by_heads(state, old, part)
            result[f"{new}.self_attention.linear_proj.{part}"] = state[f"{old}.self_attn.out_proj.{part}"]
            for number in (1, 2):
                result[f"{new}.mlp.linear_fc{number}.{part}"] = state[f"{old}.mlp.fc{number}.{part}"]
    return result


@pytest.mark.parametrize(
    "kind, layer, drops", [("clip", -2, True), ("clip", -1, False), ("siglip", -2, False), ("siglip", -1, False)]
)
def test_embeddings_and_gradients_equal_those_of_transformers(kind, layer, drops):
    make_config, make = KINDS[kind]
    sizes = {"hidden_size": WIDTH, "intermediate_size": 40, "image_size": SIDE, "patch_size": PATCH}
    config = make_config(num_hidden_layers=LAYERS, num_attention_heads=HEADS, **sizes)
    if kind == "siglip":
        config.vision_use_head = False
    peer = make(config).double()
    text = type("Text", (), {"hidden_size": HIDDEN})
    projector = LlavaMultiModalProjector(
        type("Config", (), {"vision_config": config, "text_config": text, "vision_feature_layer": layer,
                            "multimodal_projector_bias": True, "projector_hidden_act": "gelu"})
    ).double()  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    for param in (*peer.parameters(), *projector.parameters()):
        param.data = torch.randn(param.shape, generator=generator, dtype=torch.float64) * 0.3
    language = TransformerConfig(num_layers=1, hidden_size=HIDDEN, num_attention_heads=1, params_dtype=torch.float64)
    vision = VisionConfig(
        vision_model_type=kind, vision_frames=1, vision_merge_size=1, vision_num_layers=LAYERS,
        vision_hidden_size=WIDTH, vision_num_attention_heads=HEADS, vision_ffn_hidden_size=40, img_h=SIDE, img_w=SIDE,
        vision_patch_size=PATCH, vision_feature_layer=layer, disable_vision_class_token=drops,
    )  # fmt: skip
    tower = ClipTower(language, vision)
    computed = LAYERS + 1 + layer
    weights = values(peer.state_dict(), projector.state_dict(), computed)
    parameters = dict(tower.named_parameters())
    assert parameters.keys() == weights.keys()
    described = {param.name.removeprefix("vision."): param.shape for param in tower_parameters(language, vision)}
    assert described.keys() == weights.keys()
    for name, value in weights.items():
        parameters[name].data = value.clone().reshape(parameters[name].shape)
    pixels = torch.randn(2, 3, SIDE, SIDE, generator=generator, dtype=torch.float64)
    features = peer(pixels, output_hidden_states=True).hidden_states[layer]
    expected = projector(features[:, int(drops) :]).flatten(0, 1)
    patches = torch.nn.functional.unfold(pixels, PATCH, stride=PATCH).transpose(1, 2).flatten(0, 1)
    grids = Grids(torch.tensor([(3, 3), (3, 3)]), 1, tower.class_tokens)
    output = tower(patches, grids)
    assert output.shape == (int(grids.tokens.sum()), HIDDEN)
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)
    factors = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    (output * factors).sum().backward()
    (expected * factors).sum().backward()
    gradients = {name: param.grad for name, param in peer.named_parameters() if param.grad is not None}
    for name, value in values(
        gradients, {name: param.grad for name, param in projector.named_parameters()}, computed
    ).items():
        actual = parameters[name].grad
        torch.testing.assert_close(actual, value.reshape(actual.shape), rtol=1e-8, atol=1e-8)


def test_norms_have_the_epsilon_of_transformers():
    for kind, (make_config, _) in KINDS.items():
        assert TOWERS[kind].norm_epsilon == make_config().layer_norm_eps


def test_the_largest_images_are_shared_first():
    assert share_images([1, 1, 1, 3], 2) == [[3], [0, 1, 2]]
    assert share_images([2, 2], 3) == [[0], [1], []]
