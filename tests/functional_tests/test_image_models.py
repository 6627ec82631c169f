"""Models of images and text of ``transformers``: logits, loss, gradients, and the same bytes back."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron.core.sharding.lazy_tensor import LazyTensor
from tests.test_utils.foreign_comparison import TOLERANCE, assert_close, compare_gradients

VOCAB, IMAGE = 61, 7
TEXT = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}  # fmt: skip
PLAIN = {name: value for name, value in TEXT.items() if "linear" not in name} | {
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True,
    },
}  # fmt: skip
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 12,
}
VISION = {
    "depth": 2, "hidden_size": 24, "num_heads": 2, "intermediate_size": 40, "out_hidden_size": 32, "patch_size": 4,
    "num_position_embeddings": 25,
}  # fmt: skip
TOKENS = {"image_token_id": IMAGE, "video_token_id": 8, "vision_start_token_id": 9, "vision_end_token_id": 10}
KINDS = {
    "qwen3_5": ("Qwen3_5", {"intermediate_size": 48}, {}),
    "qwen3_5_moe": ("Qwen3_5Moe", EXPERTS, {}),
    "qwen3_vl": ("Qwen3VL", {"intermediate_size": 48}, {"deepstack_visual_indexes": [0, 2], "depth": 3}),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        {"intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
        {"deepstack_visual_indexes": [0, 2], "depth": 3},
    ),
}
SIZES = [(4, 6), (2, 2), (6, 4)]
"""Height and width of the images in patches; the first row has two."""


def peer(kind, dtype=torch.float32, image_token_id=IMAGE, **changes):
    """A small model of transformers with random weights; ``changes`` in its text configuration."""
    name, more, vision = KINDS[kind]
    text = {**(PLAIN if "vl" in kind else TEXT), **more, **changes}
    tokens = {**TOKENS, "image_token_id": image_token_id}
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config={**VISION, **vision}, **tokens)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).to(dtype)
    generator = torch.Generator().manual_seed(1)
    for param in model.parameters():
        param.data = (torch.randn(param.shape, generator=generator) * 0.1 + (param.ndim == 1) * 0.3).to(dtype)
    return model


def as_published(kind, tensors):
    """Tensors by name with the experts of Qwen3-VL as in published files: transposed."""
    is_stacked = kind == "qwen3_vl_moe"
    return {name: x.mT.contiguous() if is_stacked and ".experts." in name else x for name, x in tensors.items()}


def save(model, folder):
    """Write the folder of a model, as it is published."""
    model.save_pretrained(folder)
    weights = as_published(model.config.model_type, load_file(folder / "model.safetensors"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def text_and_images():
    """Two rows of tokens [2, s], patches of three images, their sizes."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(11, VOCAB, (2, 24), generator=generator)
    counts = [height * width // 4 for height, width in SIZES]
    for row, start, count in ((0, 3, counts[0]), (0, 12, counts[1]), (1, 0, counts[2])):
        tokens[row, start : start + count] = IMAGE
    patches = torch.randn(4 * sum(counts), 3 * 2 * VISION["patch_size"] ** 2, generator=generator)
    return tokens, patches, torch.tensor(SIZES)


def inputs(tokens, patches, sizes):
    """Images and rotary positions of the local model."""
    import numpy as np

    from megatron.core.datasets.image_positions import axes
    from megatron.core.models.vlm.model import Images

    is_image = tokens == IMAGE
    squares = [(height // 2, width // 2) for height, width in sizes.tolist()]
    rows = [axes(is_image[0].numpy(), squares[:2]), axes(is_image[1].numpy(), squares[2:])]
    numbers = (is_image.flatten().cumsum(0).view_as(tokens) - 1).where(is_image, -1)
    return {"images": Images(patches, sizes, numbers), "axes": torch.from_numpy(np.stack(rows))}


def local_model(folder):
    from megatron.core.groups.process_groups import SINGLE_PROCESS
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.checkpoint.other_formats import apply_hf_settings, load_hf_weights
    from megatron.training.tasks.images import ImageTask

    flags = (
        f"--load-hf {folder} --micro-batch-size 2 --seq-length 24 --lr 1e-3 --hidden-dropout 0 --attention-dropout 0"
    )
    cfg = parse_args([*flags.split(), "--train-iters", "1"], needs_data=False, model_family="vlm")
    cfg = validate_args(apply_hf_settings(cfg), 1)
    without_tokenizer = type("WithoutTokenizer", (ImageTask,), {"vocab_size": VOCAB})
    model = without_tokenizer(cfg).model_provider()
    load_hf_weights(str(folder), [model], None, SINGLE_PROCESS, model_family="vlm")
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_logits_loss_and_gradients_equal_those_of_transformers(kind, tmp_path):
    from megatron.export.hf.conversion import placements, to_local
    from megatron.export.hf.family import complete
    from megatron.export.hf.registry import load_settings

    foreign = peer(kind).eval()
    save(foreign, tmp_path / "hf")
    native = local_model(tmp_path / "hf")
    tokens, patches, sizes = text_and_images()
    grids = torch.cat((torch.ones(3, 1, dtype=torch.int64), sizes), dim=1)
    expected = foreign(
        input_ids=tokens, pixel_values=patches, image_grid_thw=grids, mm_token_type_ids=(tokens == IMAGE).int()
    ).logits
    more = inputs(tokens, patches, sizes)
    assert_close("logits", native(tokens, None, **more)[..., :VOCAB], expected)
    labels = torch.randint(0, VOCAB, tokens.shape, generator=torch.Generator().manual_seed(5))
    loss = native(tokens, None, labels=labels, **more).mean()
    expected_loss = torch.nn.functional.cross_entropy(expected.transpose(1, 2), labels)
    assert_close("loss", loss.detach(), expected_loss.detach())
    loss.backward()
    expected_loss.backward()
    family, settings, _ = load_settings(tmp_path / "hf", "vlm")
    tensors = as_published(kind, {name: param.grad for name, param in foreign.named_parameters()})
    stored = {name: LazyTensor.of(tensor) for name, tensor in tensors.items()}
    plan = placements(family.stored_as(stored), complete(settings))
    gradients = {name.removeprefix("model."): tensor.read() for name, tensor in to_local(plan, stored).items()}
    # through gated delta nets up to 2.4e-5 on one processor, less than 1e-5 on another
    compared = compare_gradients(native, gradients, 5e-5 if kind.startswith("qwen3_5") else TOLERANCE)
    assert compared == sum(param.numel() for param in foreign.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_gives_the_same_bytes_back(kind, tmp_path):
    from megatron.export.hf import load_hf, save_hf

    save(peer(kind), tmp_path / "hf")
    for dtype in (None, torch.bfloat16):
        folder = tmp_path / str(dtype)
        save_hf(load_hf(tmp_path / "hf", "vlm"), folder, dtype=dtype)
        before, after = (load_file(path / "model.safetensors") for path in (tmp_path / "hf", folder))
        assert before.keys() == after.keys()
        assert all(torch.equal(after[name], tensor.to(dtype or tensor.dtype)) for name, tensor in before.items())
        again = getattr(transformers, f"{KINDS[kind][0]}ForConditionalGeneration").from_pretrained(folder)
        positions = again.model.visual.pos_embed.weight
        assert torch.equal(positions, before["model.visual.pos_embed.weight"].to(positions.dtype))
    written, original = (
        json.loads((path / "config.json").read_text()) for path in (tmp_path / "None", tmp_path / "hf")
    )
    different = {key for part in ("text_config", "vision_config") for key in original[part]
                 if original[part][key] != written[part].get(key)}  # fmt: skip
    # transformers reads both names of the number of experts
    assert different <= {"tie_word_embeddings", "dtype", "num_local_experts"}, different


def test_text_and_images_are_read_by_the_family_that_is_asked(tmp_path):
    from megatron.export.hf import load_hf, load_hf_settings

    peer("qwen3_5").save_pretrained(tmp_path / "hf")
    assert load_hf_settings(tmp_path / "hf")["model_family"] == "gpt"
    assert not any("vision" in name for name in load_hf(tmp_path / "hf").tensors)
    assert load_hf_settings(tmp_path / "hf", "vlm")["model_family"] == "vlm"
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    del weights["model.visual.pos_embed.weight"]
    save_file(weights, tmp_path / "hf" / "model.safetensors")
    load_hf(tmp_path / "hf")
    with pytest.raises(ValueError, match="pos_embed"):
        load_hf(tmp_path / "hf", "vlm")
