"""LLaVA of ``transformers``, with the towers of CLIP and SigLIP: logits, loss, gradients, and the same bytes back."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron.console import run_tool
from megatron.core.config.errors import UserError
from megatron.core.sharding.lazy_tensor import LazyTensor
from tests.functional_tests.test_image_models import IMAGE, VOCAB, local_model
from tests.test_utils.foreign_comparison import assert_close, compare_gradients

TEXT = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
TOWER = {
    "model_type": "clip_vision_model", "hidden_size": 24, "num_attention_heads": 2, "intermediate_size": 40,
    "num_hidden_layers": 3, "image_size": 12, "patch_size": 4,
}  # fmt: skip
SIGLIP = {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}
KINDS = {
    "clip": (TEXT, TOWER, {}),
    "clip-class-token": (TEXT, TOWER, {"vision_feature_select_strategy": "full", "vision_feature_layer": -1}),
    "siglip-mistral": (
        {**TEXT, "model_type": "mistral", "sliding_window": 5},
        SIGLIP,
        {"vision_feature_select_strategy": "full"},
    ),
}


def peer(kind):
    """A small model of transformers with random weights."""
    text, vision, more = KINDS[kind]
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE, **more)
    config._attn_implementation = "eager"
    model = transformers.LlavaForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(1)
    for param in model.parameters():
        param.data = torch.randn(param.shape, generator=generator) * 0.1 + (param.ndim == 1) * 0.3
    return model


def text_and_images(count):
    """Two rows of tokens [2, s] with two images of ``count`` tokens in the first and one in the second; pixels."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(11, VOCAB, (2, 24), generator=generator)
    for row, start in ((0, 2), (0, 13), (1, 0)):
        tokens[row, start : start + count] = IMAGE
    return tokens, torch.randn(3, 3, 12, 12, generator=generator)


def inputs(tokens, pixels):
    from megatron.core.models.vlm.model import Images

    is_image = tokens == IMAGE
    numbers = (is_image.flatten().cumsum(0).view_as(tokens) - 1).where(is_image, -1)
    patches = torch.nn.functional.unfold(pixels, 4, stride=4).transpose(1, 2).flatten(0, 1)
    return {"images": Images(patches, torch.full((3, 2), 3), numbers)}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_loss_and_gradients_equal_those_of_transformers(kind, tmp_path):
    from megatron.export.hf.conversion import placements, to_local
    from megatron.export.hf.family import complete
    from megatron.export.hf.registry import load_settings

    foreign = peer(kind).eval()
    foreign.save_pretrained(tmp_path / "hf")
    native = local_model(tmp_path / "hf")
    tokens, pixels = text_and_images(10 if kind == "clip-class-token" else 9)
    expected = foreign(input_ids=tokens, pixel_values=pixels).logits
    images = inputs(tokens, pixels)
    assert_close("logits", native(tokens, None, **images)[..., :VOCAB], expected)
    labels = torch.randint(0, VOCAB, tokens.shape, generator=torch.Generator().manual_seed(5))
    loss = native(tokens, None, labels=labels, **images).mean()
    expected_loss = torch.nn.functional.cross_entropy(expected.transpose(1, 2), labels)
    assert_close("loss", loss.detach(), expected_loss.detach())
    loss.backward()
    expected_loss.backward()
    family, settings, _ = load_settings(tmp_path / "hf", "vlm")
    gradients = {name: param.grad for name, param in foreign.named_parameters() if param.grad is not None}
    names = family.family_names(gradients)
    stored = {names[name]: LazyTensor.of(grad) for name, grad in gradients.items()}
    local = to_local(placements(family, complete(settings)), stored)
    compared = compare_gradients(native, {name.removeprefix("model."): x.read() for name, x in local.items()})
    assert compared == sum(grad.numel() for grad in gradients.values())


def test_convert_compares_logits_with_transformers(tmp_path, capsys):
    peer("siglip-mistral").save_pretrained(tmp_path / "hf")
    for source, target, more in (("hf", "native", ["--model-type", "VLM"]), ("native", "exported", [])):
        saver = "native" if target == "native" else "hf"
        folders = ["--load-dir", str(tmp_path / source), "--save-dir", str(tmp_path / target)]
        assert run_tool("convert", ["--saver", saver, *folders, *more]) == 0
        assert str(capsys.readouterr()).count(": equal") == 2  # a small random model, and this one


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_gives_the_same_bytes_back(kind, tmp_path):
    from megatron.export.hf import load_hf, save_hf

    peer(kind).save_pretrained(tmp_path / "hf")
    before = load_file(tmp_path / "hf" / "model.safetensors")
    # names of the published files
    names = {name: name.replace("vision_tower.", "vision_tower.vision_model.") for name in before}
    save_file({names[name]: tensor for name, tensor in before.items()}, tmp_path / "hf" / "model.safetensors")
    model = load_hf(tmp_path / "hf", "vlm")
    save_hf(model, tmp_path / "copy", original=tmp_path / "hf")
    copy = load_file(tmp_path / "copy" / "model.safetensors")
    assert {names[name] for name in before} == copy.keys()
    assert all(torch.equal(copy[names[name]], tensor) for name, tensor in before.items())
    save_hf(model, tmp_path / "new")
    new = load_file(tmp_path / "new" / "model.safetensors")
    unused = {name for name in before if ".post_layernorm" in name or ".encoder.layers.2." in name}
    assert before.keys() - new.keys() == {name for name in unused if kind != "clip-class-token" or "layers" not in name}
    assert all(torch.equal(before[name], tensor) for name, tensor in new.items())
    transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path / "new")
    written, original = (json.loads((path / "config.json").read_text()) for path in (tmp_path / "new", tmp_path / "hf"))
    ignored = {"projection_dim", "initializer_factor", "initializer_range", "attention_dropout", "pretraining_tp",
               "rope_parameters"}  # fmt: skip
    for part in ("text_config", "vision_config"):
        different = {key for key, value in original[part].items() if written[part].get(key) != value}
        assert different <= ignored | {"tie_word_embeddings", "dtype"}, different
    tokens = 10 if kind == "clip-class-token" else 9
    assert written["image_seq_length"] == tokens
    outer = ("image_token_index", "vision_feature_layer", "vision_feature_select_strategy")
    assert all(written[key] == original[key] for key in outer)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_images_have_zero_gradients_of_the_tower(kind, tmp_path):
    foreign = peer(kind).eval()
    foreign.save_pretrained(tmp_path / "hf")
    native, tokens = local_model(tmp_path / "hf"), torch.arange(11, 35)[None]
    logits = native(tokens, None)
    assert_close("logits", logits[..., :VOCAB], foreign(input_ids=tokens).logits)
    with torch.no_grad():
        assert torch.equal(native(tokens, None), logits)
    logits.square().mean().backward()
    gradients = {name: param.grad for name, param in native.named_parameters()}
    assert all(not x.any() if name.startswith("vision.") else x.any() for name, x in gradients.items())


@pytest.mark.parametrize("kind", ["clip_vision_model", "siglip_vision_model"])
def test_keys_that_a_folder_leaves_out_have_the_defaults_of_transformers(kind, tmp_path):
    from megatron.export.hf import load_hf_settings

    parts = {"text_config": {"model_type": "llama"}, "vision_config": {"model_type": kind}}
    more = {"vision_feature_select_strategy": "full"} if kind == "siglip_vision_model" else {}
    config = transformers.LlavaConfig(**parts, **more)
    config.architectures = ["LlavaForConditionalGeneration"]
    config.save_pretrained(tmp_path / "full")
    (tmp_path / "short").mkdir()
    short = {"model_type": "llava", "architectures": config.architectures, **parts, **more}
    (tmp_path / "short" / "config.json").write_text(json.dumps(short))
    full = json.loads((tmp_path / "full" / "config.json").read_text())
    assert len(full["text_config"]) > 15 and len(full["vision_config"]) > 8
    assert load_hf_settings(tmp_path / "short", "vlm") == load_hf_settings(tmp_path / "full", "vlm")


@pytest.mark.parametrize("part, key, value", [
    ("text_config", "model_type", "qwen2"), ("vision_config", "model_type", "dinov2"),
    ("vision_config", "hidden_act", "gelu"), ("vision_config", "layer_norm_eps", 1e-3),
])  # fmt: skip
def test_another_model_within_llava_is_rejected(part, key, value, tmp_path):
    from megatron.export.hf import load_hf_settings

    peer("clip").config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config[part][key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"{part}.{key} is "):
        load_hf_settings(tmp_path, "vlm")
