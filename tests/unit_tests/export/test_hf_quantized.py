"""Quantized folders of Hugging Face's: read as ``transformers`` dequantizes them; fp8 blocks written as published."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.core.config.errors import UserError
from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.export.hf import load_hf, save_hf
from megatron.export.hf.conversion import expected, placements
from megatron.export.hf.family import complete
from megatron.export.hf.quantized_tensors import dequantized, mxfp4_to_bf16
from megatron.export.hf.reader import read_weights
from megatron.export.hf.registry import known_families
from megatron.tools.checkpoint import convert, inspect_checkpoint, verify

E4M3 = torch.float8_e4m3fn
LINEAR = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.(.*\.)?\w+_proj(_with_mqa)?\.weight")
"""Matrices that published folders have in fp8."""
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
COMMON = {
    "vocab_size": 64, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 64, "rope_theta": 10000.0, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3 = {
    **COMMON, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 1, "head_dim": 128,
}  # fmt: skip
QWEN3_MOE = {
    **QWEN3, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 3,
    "num_experts_per_tok": 2, "moe_intermediate_size": 128, "decoder_sparse_step": 1, "norm_topk_prob": True,
}  # fmt: skip
DEEPSEEK = {
    **COMMON, "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": 2,
    "q_lora_rank": 128, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_interleave": True,
}  # fmt: skip
KIMI = {**DEEPSEEK, "model_type": "kimi_k2", "n_group": 1}
GPT_OSS = {
    **COMMON, "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_size": 64, "head_dim": 32,
    "intermediate_size": 32, "num_key_value_heads": 1, "num_local_experts": 3, "num_experts_per_tok": 2,
    "sliding_window": 16, "rms_norm_eps": 1e-5, "rope_theta": 150000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False,
                     "beta_fast": 32.0, "beta_slow": 1.0},
    "layer_types": ["sliding_attention", "full_attention"],
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
}  # fmt: skip


def random_bf16(config):
    family = known_families()[config["model_type"]]
    settings = complete(family.load_settings({**config, "quantization_config": None}))
    generator = torch.Generator().manual_seed(1)
    shapes = expected(placements(family, settings))
    weights = {name: torch.randn(shape, generator=generator) * 0.05 for name, shape in shapes.items()}
    return {name: value if "correction_bias" in name else value.bfloat16() for name, value in weights.items()}


def blocks(weight, scale):
    """Value times scale of every element, by plain indexing."""
    rows, columns = (torch.arange(size) // 128 for size in weight.shape)
    return (weight.float() * scale.float()[rows[:, None], columns]).bfloat16()


def fp8_tensors(weights, scale_dtype=torch.float32):
    """Published form of ``weights``: any fp8 values and scales."""
    generator, result = torch.Generator().manual_seed(2), {}
    for name, weight in weights.items():
        if not LINEAR.fullmatch(name):
            result[name] = weight
            continue
        result[name] = (weight.float() * 1000).clamp(-448, 448).to(E4M3)
        shape = [-(-size // 128) for size in weight.shape]
        scales = torch.rand(shape, generator=generator) * 1e-3 + 1e-5
        result[f"{name}_scale_inv"] = scales.to(scale_dtype)
    return result


def write(folder, tensors, config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def fp8_folder(folder, config=QWEN3, change=None, **more):
    tensors = fp8_tensors(random_bf16(config), **more)
    if change is not None:
        change(tensors)
    return write(folder, tensors, {**config, "quantization_config": FP8})


def foreign_state(folder, config):
    """State of the model that ``transformers`` dequantizes to bf16; it must miss no tensor and expect all."""
    transformers = pytest.importorskip("transformers", reason="pip install transformers: the definition")
    pytest.importorskip("accelerate", reason="pip install accelerate: transformers needs it for quantized folders")
    kind, form = getattr(transformers, config["architectures"][0]), config["quantization_config"]["quant_method"]
    quantization = transformers.FineGrainedFP8Config if form == "fp8" else transformers.Mxfp4Config
    model, report = kind.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True, quantization_config=quantization(dequantize=True),
        config=kind.config_class.from_dict({**config, "model_type": kind.config_class.model_type}),
    )  # fmt: skip
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    return model.state_dict()


def in_memory(tensors, name):
    """The tensor of ``transformers`` called ``name``: it stacks the experts of a layer."""
    experts = re.fullmatch(r"(.*\.experts)\.(gate_up_proj|down_proj)", name)
    if experts is None or name in tensors:
        return tensors[name].read()
    parts = ("gate_proj", "up_proj") if experts[2] == "gate_up_proj" else ("down_proj",)
    count = 1 + max(int(key.split(".experts.")[1].split(".")[0]) for key in tensors if f"{experts[1]}." in key)
    rows = [[tensors[f"{experts[1]}.{n}.{part}.weight"].read() for part in parts] for n in range(count)]
    return torch.stack([torch.cat(matrices) for matrices in rows])


def assert_reads_like_transformers(folder, config):
    tensors, count = read_weights(folder)
    assert count
    for name, value in foreign_state(folder, config).items():
        assert torch.equal(in_memory(tensors, name).to(value.dtype), value), name


@pytest.mark.parametrize("config", [QWEN3, QWEN3_MOE, DEEPSEEK, KIMI], ids=lambda config: config["model_type"])
def test_fp8_blocks_are_read_as_transformers_dequantizes_them(config, tmp_path):
    folder = fp8_folder(tmp_path / "a", config)
    assert_reads_like_transformers(folder, {**config, "quantization_config": FP8})
    model = load_hf(folder)
    assert {tensor.dtype for name, tensor in model.tensors.items() if "linear_" in name} == {torch.bfloat16}
    assert any("quantized tensors are read as bf16" in note for note in model.notes)


def test_incomplete_blocks_with_bf16_scales_equal_the_definition(tmp_path):
    config = {**QWEN3, "hidden_size": 136, "intermediate_size": 200}
    folder = fp8_folder(tmp_path / "a", config, scale_dtype=torch.bfloat16)
    stored, tensors = load_file(folder / "model.safetensors"), read_weights(folder)[0]
    quantized = [name for name in stored if f"{name}_scale_inv" in stored]
    assert len(quantized) == 14 and stored["model.layers.0.mlp.up_proj.weight_scale_inv"].shape == (2, 2)
    for name in quantized:
        assert torch.equal(tensors[name].read(), blocks(stored[name], stored[f"{name}_scale_inv"])), name


def test_stacked_fp8_experts_are_read_by_rows():
    values, scales = torch.randn(3, 130, 140).to(E4M3), torch.rand(3, 2, 2) + 0.1
    stored = {"gate_up_proj": LazyTensor.of(values), "gate_up_proj_scale_inv": LazyTensor.of(scales)}
    (tensor,) = dequantized(stored, "fp8", Path("folder")).values()
    matrices = torch.stack([blocks(*pair) for pair in zip(values, scales)])
    assert torch.equal(tensor.read(), matrices) and torch.equal(tensor.rows(1, 3), matrices[1:])


QUERY = "model.layers.1.self_attn.q_proj.weight"
SCALE = f"{QUERY}_scale_inv"


@pytest.mark.parametrize(("change", "message"), [
    (lambda tensors: tensors.pop(SCALE), f"{SCALE} is missing"),
    (lambda tensors: tensors.update({"model.norm.weight_scale_inv": torch.ones(1)}),
     "model.norm.weight_scale_inv: there is no fp8 tensor model.norm.weight"),
    (lambda tensors: tensors.update({SCALE: torch.ones(2, 1)}), f"{SCALE} has shape [2, 1], expected [2, 2]"),
    (lambda tensors: tensors.update({SCALE: torch.ones(2, 2, dtype=torch.int32)}), f"{SCALE} is torch.int32, expected"),
    (lambda tensors: tensors.update({QUERY: torch.ones(256, 256).to(torch.float8_e5m2)}), f"{SCALE}: there is no fp8"),
], ids=["missing", "extra", "shape", "dtype", "values"])  # fmt: skip
def test_scales_that_do_not_fit_are_named(change, message, tmp_path):
    with pytest.raises(UserError) as caught:
        load_hf(fp8_folder(tmp_path / "a", change=change))
    assert message in str(caught.value) and "(1 problem)" in str(caught.value)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_verify_names_invalid_scales(value, tmp_path, capsys):
    folder = fp8_folder(tmp_path / "a", change=lambda tensors: tensors[SCALE].__setitem__((0, 1), value))
    assert verify.main([str(folder)]) == 1
    assert f"{SCALE}: 1 of 4 scales are not positive and finite" in capsys.readouterr().out
    with pytest.raises(UserError, match="1 of 4 scales"):
        convert.main(["--saver", "native", "--load-dir", str(folder), "--save-dir", str(tmp_path / "b")])
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(("quantization", "words"), [
    ({"quant_method": "gptq", "bits": 4}, ("quant_method is 'gptq'", "in bf16")),
    ({"quant_method": "awq"}, ("'awq'",)),
    ({"load_in_4bit": True, "quant_method": "bitsandbytes"}, ("'bitsandbytes'", "dequantize")),
    ({"quant_method": "compressed-tensors"}, ("'compressed-tensors'",)),
    ({**FP8, "weight_block_size": [1, 32]}, ("weight_block_size is [1, 32]", "[128, 128]")),
    ({**FP8, "activation_scheme": "static"}, ("activation_scheme is 'static'", "in bf16")),
    ([1], ("quantization_config is [1]", "expected an object")),
], ids=str)  # fmt: skip
def test_other_quantizations_are_rejected_with_method_and_fix(quantization, words, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3, "quantization_config": quantization}))
    with pytest.raises(UserError) as caught:
        load_hf(tmp_path)
    assert all(word in str(caught.value) for word in (str(tmp_path), *words)), caught.value


def test_fp8_weights_without_a_quantization_in_config_are_rejected(tmp_path):
    tensors = random_bf16(QWEN3)
    folder = write(tmp_path / "a", {**tensors, QUERY: tensors[QUERY].to(E4M3)}, QWEN3)
    with pytest.raises(UserError, match="torch.float8_e4m3fn, which config.json does not explain"):
        load_hf(folder)


def mxfp4_folder(folder):
    generator, result = torch.Generator().manual_seed(3), {}
    for name, tensor in random_bf16(GPT_OSS).items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = tensor.shape
            shape = experts, rows, columns // 32
            result[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
            result[f"{name}_scales"] = torch.randint(115, 125, shape, generator=generator, dtype=torch.uint8)
        else:
            result[name] = tensor
    return write(folder, result, GPT_OSS)


def test_mxfp4_experts_are_read_as_transformers_converts_them(tmp_path, capsys):
    folder = mxfp4_folder(tmp_path / "a")
    assert_reads_like_transformers(folder, GPT_OSS)
    assert verify.main([str(folder)]) == 0
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    with pytest.raises(UserError, match=r"down_proj_scales has shape \[3, 64\], expected \[3, 64, 1\]"):
        load_hf(write(tmp_path / "b", {**stored, name: stored[name][..., 0].clone()}, GPT_OSS))
    with pytest.raises(UserError, match="down_proj_scales: there is no tensor"):
        load_hf(write(tmp_path / "c", {key: stored[key] for key in stored if key != f"{name[:-6]}blocks"}, GPT_OSS))
    stored[name][1, 2] = 255
    assert verify.main([str(write(tmp_path / "d", stored, GPT_OSS))]) == 1
    assert "1 of 192 scales are not positive and finite" in capsys.readouterr().out


def test_every_mxfp4_byte_and_scale_has_the_value_of_transformers():
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4", reason="pip install transformers: the definition")
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 255, 16, 16).contiguous()
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).expand(2, 255, 16).contiguous()
    converted = mxfp4.convert_moe_packed_tensors(blocks, scales)
    assert torch.equal(mxfp4_to_bf16(blocks, scales).view(torch.int16), converted.view(torch.int16))


@pytest.mark.parametrize("config", [QWEN3_MOE, DEEPSEEK], ids=lambda config: config["model_type"])
def test_written_fp8_blocks_have_the_published_form_and_bounded_errors(config, tmp_path):
    weights = random_bf16(config)
    save_hf(load_hf(write(tmp_path / "a", weights, config)), tmp_path / "b", quantize="fp8-blocks")
    table = json.loads((tmp_path / "b" / "config.json").read_text())
    quantization = table["quantization_config"]
    gates = {f"model.layers.{n}.mlp.gate" for n in range(2) if f"model.layers.{n}.mlp.gate.weight" in weights}
    assert {*quantization.pop("modules_to_not_convert")} == {"model.embed_tokens", "lm_head"} | gates
    assert quantization == FP8 and table["torch_dtype"] == "bfloat16"
    stored = load_file(tmp_path / "b" / "model.safetensors")
    linear = {name for name in weights if LINEAR.fullmatch(name)}
    assert stored.keys() == weights.keys() | {f"{name}_scale_inv" for name in linear}
    for name, weight in weights.items():
        if name not in linear:
            assert torch.equal(stored[name], weight), name
            continue
        scale = stored[f"{name}_scale_inv"]
        rows, columns = (torch.arange(size) // 128 for size in weight.shape)
        amax = torch.zeros_like(scale).flatten()
        block_index = (rows[:, None] * scale.shape[1] + columns).flatten()
        amax.scatter_reduce_(0, block_index, weight.float().abs().flatten(), "amax")
        torch.testing.assert_close(scale.flatten(), amax / 448, rtol=3e-7, atol=0)
        # half a step of e4m3: 3 bits after the leading one, 2^-9 below 2^-6
        units = weight.double() / scale.double()[rows[:, None], columns]
        step = (units.abs().clamp_min(2.0**-6).log2().floor() - 3).exp2()
        assert ((stored[name].double() - units).abs() <= step / 2 * (1 + 1e-5)).all(), name
    assert_reads_like_transformers(tmp_path / "b", table)
    save_hf(load_hf(tmp_path / "b"), tmp_path / "c", quantize="fp8-blocks")
    rewritten = load_file(tmp_path / "c" / "model.safetensors")
    assert all(torch.equal(stored[name].view(torch.uint8), rewritten[name].view(torch.uint8)) for name in linear)


def test_prediction_layers_are_written_in_fp8_but_for_their_own_projection(tmp_path):
    config = {**DEEPSEEK, "num_nextn_predict_layers": 1}
    model = load_hf(write(tmp_path / "a", random_bf16(config), config))
    save_hf(model, tmp_path / "b", quantize="fp8-blocks")
    stored = load_file(tmp_path / "b" / "model.safetensors")
    assert {f"model.layers.2.{name}_proj.weight_scale_inv" for name in ("self_attn.o", "mlp.experts.3.up")} <= {*stored}
    others = {"model.layers.2.eh_proj", "model.layers.2.mlp.gate", "model.layers.2.shared_head.head"}
    skipped = json.loads((tmp_path / "b" / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert others <= {*skipped} and {stored[f"{name}.weight"].dtype for name in others} == {torch.bfloat16}
    assert load_hf(tmp_path / "b").tensors.keys() == model.tensors.keys()


def test_converted_fp8_folders_pass_verification_and_the_comparison_of_logits(tmp_path, capfd):
    config = {**QWEN3, "hidden_size": 136, "intermediate_size": 200}  # incomplete blocks
    source, target = write(tmp_path / "a", random_bf16(config), config), tmp_path / "b"
    places = ["--saver", "hf", "--load-dir", str(source), "--save-dir", str(target)]
    assert convert.main([*places, "--quantize", "fp8-blocks"]) == 0
    assert capfd.readouterr().err.count("equal; largest") == 2
    assert verify.main([str(target)]) == 0 and inspect_checkpoint.main([str(target)]) == 0
    assert "note: 14 quantized tensors are read as bf16" in capfd.readouterr().out
    native = ["--saver", "native", "--load-dir", str(target), "--save-dir", str(tmp_path / "c")]
    assert convert.main(native) == 0
    assert capfd.readouterr().err.count("equal; largest") == 2
    # exports of models that began with it, as --save-hf-interval writes them
    for number, original in enumerate((None, target)):
        save_hf(load_hf(target), tmp_path / f"d{number}", original=original)
        assert "quantization_config" not in json.loads((tmp_path / f"d{number}" / "config.json").read_text())
        stored = load_file(tmp_path / f"d{number}" / "model.safetensors")
        assert {value.dtype for value in stored.values()} == {torch.bfloat16}


@pytest.mark.parametrize(("flags", "words"), [
    (("--saver", "native"), "--saver hf"), (("--saver", "hf", "--original-dir", "x"), "remove --original-dir"),
])  # fmt: skip
def test_quantize_is_rejected_for_other_targets(flags, words, tmp_path):
    with pytest.raises(UserError, match=f"--quantize fp8-blocks: .*{words}"):
        convert.main([*flags, "--load-dir", "a", "--save-dir", str(tmp_path / "b"), "--quantize", "fp8-blocks"])


def test_stacked_experts_are_not_written_as_fp8_blocks(tmp_path):
    model = load_hf(mxfp4_folder(tmp_path / "a"))
    with pytest.raises(UserError, match="--quantize fp8-blocks: .*experts.gate_up_proj .*write the folder in bf16"):
        save_hf(model, tmp_path / "b", quantize="fp8-blocks")
    assert not (tmp_path / "b").exists()
