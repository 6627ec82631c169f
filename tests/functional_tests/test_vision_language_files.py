"""Text models inside of files of models of images and text: loaded, and written back next to the same tower."""

import json
from pathlib import Path

import pytest
import torch

from tests.functional_tests.test_hf_families import fill, our_model
from tests.test_utils.foreign_comparison import random_text
from tests.test_utils.foreign_models import DELTA, GATED, LENGTH, VOCAB
from tests.test_utils.hf_folders import weights_in

transformers = pytest.importorskip("transformers", reason="pip install transformers: it is what is compared with")

from megatron.core.config.errors import UserError  # noqa: E402
from megatron.core.sharding.lazy_tensor import LazyTensor  # noqa: E402
from megatron.export.hf import load_hf, save_hf  # noqa: E402
from megatron.tools.checkpoint import convert  # noqa: E402
from megatron.training.hooks.hugging_face import HuggingFaceHook  # noqa: E402

EXPERTS = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 24, "num_experts": 4,
           "num_experts_per_tok": 2}  # fmt: skip
KINDS = {"Qwen3_5": {}, "Qwen3_5Moe": EXPERTS}
PROCESSOR = ("preprocessor_config.json", "video_preprocessor_config.json", "chat_template.jinja")
DEPTH = "mtp.layers.0.input_layernorm.weight"


def stacked(tensors: dict) -> dict:
    """Return the tensors with all experts of a layer in one tensor, as on the hub."""
    result = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in sorted({name.partition(".experts.")[0] for name in tensors if ".experts." in name}):
        part = [[tensors[f"{layer}.experts.{expert}.{kind}_proj.weight"] for expert in range(4)]
                for kind in ("gate", "up", "down")]  # fmt: skip
        gate, up, down = map(torch.stack, part)
        result |= {f"{layer}.experts.gate_up_proj": torch.cat((gate, up), 1), f"{layer}.experts.down_proj": down}
    return result


def save_folder(kind: str, path: Path, *, as_on_hub: bool = True):
    """Save a tiny random model with processor files and a prediction depth; return the model of ``transformers``."""
    from safetensors.torch import save_file

    torch.manual_seed(1)
    text = {**GATED, **DELTA, **KINDS[kind], "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 4, "max_position_embeddings": 64}  # fmt: skip
    text["rope_parameters"] = {**text.get("rope_parameters", {}), "rope_type": "default", "rope_theta": 1e4,
                               "mrope_section": [1, 0, 0], "mrope_interleaved": True}  # fmt: skip
    if kind == "Qwen3_5Moe":
        del text["intermediate_size"]
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32,
              "num_position_embeddings": 16, "patch_size": 4}  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision, image_token_id=50)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model = model.to(torch.bfloat16).eval()
    model.save_pretrained(path)
    tensors = {**weights_in(path), DEPTH: torch.ones(32, dtype=torch.bfloat16)}
    tensors = {name: tensor.float() if name.endswith("A_log") else tensor for name, tensor in tensors.items()}
    save_file(stacked(tensors) if as_on_hub else tensors, path / "model.safetensors", {"format": "pt"})
    for name in PROCESSOR:
        (path / name).write_text(f'{{"of": "{name}"}}')
    return model.float()


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))


def assert_logits(native, foreign):
    tokens = random_text()[0]
    logits = native(tokens, torch.arange(LENGTH).expand_as(tokens))[..., :VOCAB]
    torch.testing.assert_close(logits, foreign(input_ids=tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "as_on_hub"), [("Qwen3_5", True), ("Qwen3_5Moe", True), ("Qwen3_5Moe", False)])
def test_export_of_trained_text_keeps_bytes_of_the_tower(kind, as_on_hub, tmp_path):
    foreign = save_folder(kind, tmp_path / "theirs", as_on_hub=as_on_hub)
    model = load_hf(tmp_path / "theirs")
    towers = [note for note in model.notes if "vision tower is neither loaded nor trained" in note]
    assert len(towers) == 1 and "21 tensors model.visual.*" in towers[0]
    native = our_model(model.settings)
    fill(native, model)
    assert_logits(native, foreign)

    before = weights_in(tmp_path / "theirs")
    save_hf(model, tmp_path / "same", original=tmp_path / "theirs")
    after = weights_in(tmp_path / "same")
    assert before.keys() == after.keys() and all(same_bytes(value, after[name]) for name, value in before.items())
    for name in ("config.json", "generation_config.json", *PROCESSOR):
        assert (tmp_path / "same" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()

    model.tensors = {name: LazyTensor.of(tensor.read().float() * 1.25) if "norm" in name else tensor
                     for name, tensor in model.tensors.items()}  # fmt: skip
    save_hf(model, tmp_path / "trained", original=tmp_path / "theirs")
    trained = weights_in(tmp_path / "trained")
    for name, value in before.items():
        changes = "norm" in name and not name.startswith("model.visual.") and name != DEPTH
        assert same_bytes(value, trained[name]) != changes, name
    auto = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "trained", dtype=torch.float32).eval()
    fill(native, load_hf(tmp_path / "trained"))
    assert_logits(native, auto)


def test_convert_writes_a_native_checkpoint_into_the_original_folder(tmp_path, capsys):
    save_folder("Qwen3_5", tmp_path / "theirs")
    original, native, exported = (str(tmp_path / name) for name in ("theirs", "native", "exported"))
    assert convert.main(["--loader", "hf", "--saver", "native", "--load-dir", original, "--save-dir", native]) == 0
    line = ["--saver", "hf", "--load-dir", native, "--original-dir", original, "--save-dir", exported]
    assert convert.main(line) == 0
    output = str(capsys.readouterr())
    assert output.count("the vision tower is neither loaded nor trained") == 1 and output.count(": equal") == 4
    before, after = weights_in(Path(original)), weights_in(Path(exported))
    assert before.keys() == after.keys() and all(same_bytes(value, after[name]) for name, value in before.items())
    hook = HuggingFaceHook(native, 1, original)
    hook._convert("release")
    assert not hook.failure
    exported = weights_in(Path(native) / "hf" / "release")
    assert before.keys() == exported.keys() and all(same_bytes(value, exported[name]) for name, value in before.items())
    with pytest.raises(UserError, match="whose dtypes apply; remove --dtype bf16"):
        convert.main([*line[:-1], str(tmp_path / "none"), "--dtype", "bf16"])
    assert not (tmp_path / "none").exists()


def test_original_folder_of_another_model_is_rejected(tmp_path):
    save_folder("Qwen3_5", tmp_path / "theirs")
    model = load_hf(tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["rms_norm_eps"] = 1e-4
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match="another model than the one to export: rms_norm_eps is"):
        save_hf(model, tmp_path / "again", original=tmp_path / "theirs")
    assert not (tmp_path / "again").exists()
