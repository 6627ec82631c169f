"""``megatron quantize``: scales, values and perplexities equal a definition with transformers; compressed-tensors loads
the folder; calibration does not depend on the layout."""

import dataclasses
import json
import math
import re
from unittest import mock

import pytest
import torch

from megatron.console import run_tool
from megatron.core.config.errors import UserError
from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.core.tensor_parallel.calibration import Magnitudes
from megatron.export.hf import load_hf, save_hf
from megatron.export.hf.reader import read_weights
from tests.functional_tests.test_lora_layouts import LLAMA
from tests.test_utils.chats import MISTRAL, tokenizer_folder
from tests.test_utils.gpt_runs import train, write_dataset
from tests.test_utils.hf_folders import tiny_llama, weights_in
from tests.unit_tests.export.test_hf_quantized import DEEPSEEK, LINEAR, random_bf16, write
from tests.unit_tests.tools.test_tools_on_ranks import run as run_on_ranks

E4M3, LENGTH = torch.float8_e4m3fn, 16
SIZES = f"--calib-size 6 --calib-batch-size 2 --eval-size 3 --calib-max-sequence-length {LENGTH}".split()
FUSED = re.compile(r"[qkv]_proj|(gate|up)_proj")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tiny_llama(tmp_path_factory.mktemp("model") / "hf", 1024)
    tokenizer_folder(folder, MISTRAL)
    return folder


@pytest.fixture(scope="module")
def texts(folder):
    path = folder.parent / "texts.jsonl"
    lines = [f"The {n}th of {n * n} short\u2028texts about {'many ' * (n % 5)}numbers: {7 * n}." for n in range(80)]
    path.write_text("".join(json.dumps({"text": line}, ensure_ascii=False) + "\n" for line in lines), "utf-8")
    return path


def run(folder, texts, target, *flags):
    return run_tool("quantize", ["--load", str(folder), "--save-hf", str(target), "--data", str(texts), *SIZES, *flags])


def token_rows(folder, texts):
    transformers = pytest.importorskip("transformers", reason="pip install transformers: the definition")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token="</s>")
    ids = []
    for line in texts.open(encoding="utf-8"):
        ids += [*tokenizer(json.loads(line)["text"])["input_ids"], tokenizer.eos_token_id]
    return [torch.tensor(ids[start : start + LENGTH + 1]) for start in range(0, 9 * LENGTH, LENGTH)]


def hf_model(folder, **options):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


@torch.no_grad()
def perplexity(model, rows):
    losses = [torch.nn.functional.cross_entropy(model(row[None, :-1]).logits[0], row[1:]) for row in rows]
    return math.exp(torch.stack(losses).mean())


def linear_layers(model):
    return {
        name: layer for name, layer in model.named_modules() if ".layers." in name and type(layer) is torch.nn.Linear
    }


def to_bf16(scale):
    return scale.to(torch.bfloat16).float()


def fp8(x, scale):
    return (x / scale).clamp(-448, 448).to(E4M3).float() * scale


def quantized(model, stored, dtype=torch.float32, kept=()):
    """``model`` with weights that are read as ``dtype``, and inputs rounded with stored or per-token scales; the linear
    layers in ``kept`` do not change."""
    layers = linear_layers(model)
    for name in layers.keys() - kept:
        layer = layers[name]
        values = stored[f"{name}.weight"].float() * stored[f"{name}.weight_scale"].float()
        layer.weight.data.copy_(values.to(dtype))

        def round_input(_, args, name=name):
            scale, dynamic = stored.get(f"{name}.input_scale"), args[0].abs().amax(-1, keepdim=True) / 448
            return (fp8(args[0], dynamic if scale is None else scale.float()),)

        layer.register_forward_pre_hook(round_input)
    return model


def printed(text):
    return [float(number) for number in re.search(r"perplexity of 48 tokens: (\S+) before, (\S+) after", text).groups()]


def test_static_scales_values_and_perplexities_equal_the_definition(folder, texts, tmp_path, capsys):
    rows = token_rows(folder, texts)
    assert run(folder, texts, tmp_path / "out") == 0
    before, after = printed(capsys.readouterr().out)
    stored, model = weights_in(tmp_path / "out"), hf_model(folder)
    assert before == pytest.approx(perplexity(model, rows[6:]), rel=1e-4)
    layers, inputs = linear_layers(model), {}
    hooks = [layer.register_forward_pre_hook(
        lambda layer, args, name=name: inputs.setdefault(name, []).append(args[0].abs().max())
    ) for name, layer in layers.items()]  # fmt: skip
    perplexity(model, rows[:6])
    for hook in hooks:
        hook.remove()
    groups = {}
    for name in layers:
        groups.setdefault(FUSED.sub(lambda match: "gate_up" if match[1] else "qkv", name), []).append(name)
    assert len(layers) == 14 and len(groups) == 8
    for names in groups.values():
        scale = to_bf16(torch.stack([layers[name].weight.abs().max() for name in names]).max() / 448)
        for name in names:
            weight, input_scale = layers[name].weight.data, stored[f"{name}.input_scale"]
            torch.testing.assert_close(
                input_scale.float(), to_bf16(torch.stack(inputs[name]).max() / 448).view(1), rtol=2**-7, atol=0
            )
            assert torch.equal(stored[f"{name}.weight_scale"].float(), scale.view(1)), name
            assert torch.equal(stored[f"{name}.weight"].float() * scale, fp8(weight, scale)), name
    assert after == pytest.approx(perplexity(quantized(model, stored, torch.bfloat16), rows[6:]), rel=1e-4)


@pytest.fixture(scope="module")
def nemotron(tmp_path_factory):
    transformers = pytest.importorskip("transformers", reason="pip install transformers: the definition")
    config = transformers.NemotronHConfig(
        vocab_size=1024, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=48,
        layers_block_type=["mamba", "mlp", "attention", "mlp"], mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=8,
        n_groups=2, chunk_size=16, max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("nemotron") / "hf"
    transformers.NemotronHForCausalLM(config).float().save_pretrained(folder)
    tokenizer_folder(folder, MISTRAL)
    return folder


def test_hybrid_models_keep_the_projections_of_mamba_and_name_them_as_transformers_does(
    nemotron, texts, tmp_path, capsys
):
    rows, model = token_rows(nemotron, texts), hf_model(nemotron)
    assert run(nemotron, texts, tmp_path / "out") == 0
    before, after = printed(capsys.readouterr().out)
    stored = {name.replace("backbone.", "model."): value for name, value in weights_in(tmp_path / "out").items()}
    linear = {name for name, layer in model.named_modules() if type(layer) is torch.nn.Linear}
    kept = {name for name in linear if f"{name}.weight_scale" not in stored}
    assert kept == {"lm_head", *(f"model.layers.0.mixer.{part}_proj" for part in ("in", "out"))}
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert {name.replace("backbone.", "model.") for name in ignored} == kept | {
        "model.embeddings", "model.layers.0.mixer.conv1d"
    }  # fmt: skip
    assert before == pytest.approx(perplexity(model, rows[6:]), rel=1e-4)
    definition = quantized(model, stored, torch.bfloat16, kept=kept)
    assert after == pytest.approx(perplexity(definition, rows[6:]), rel=1e-4)


@pytest.mark.parametrize("form", ["fp8", "fp8-dynamic"])
def test_compressed_tensors_loads_hybrid_models_with_the_same_values(nemotron, texts, tmp_path, form):
    pytest.importorskip("compressed_tensors", reason="pip install compressed-tensors: the other reader")
    assert run(nemotron, texts, tmp_path / "out", "--format", form) == 0
    stored = {name.replace("backbone.", "model."): value for name, value in weights_in(tmp_path / "out").items()}
    rows, model = token_rows(nemotron, texts), hf_model(nemotron)
    kept = {name for name in linear_layers(model) if f"{name}.weight_scale" not in stored}
    expected = perplexity(quantized(model, stored, kept=kept), rows[6:])
    assert perplexity(hf_model(tmp_path / "out"), rows[6:]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("form", ["fp8", "fp8-dynamic"])
def test_compressed_tensors_loads_the_folder_with_the_same_values(folder, texts, tmp_path, capsys, form):
    pytest.importorskip("compressed_tensors", reason="pip install compressed-tensors: the other reader")
    rows, model = token_rows(folder, texts), hf_model(folder)
    assert run(folder, texts, tmp_path / "out", "--format", form) == 0
    loaded, defined = hf_model(tmp_path / "out"), quantized(model, weights_in(tmp_path / "out"))
    assert perplexity(loaded, rows[6:]) == pytest.approx(perplexity(defined, rows[6:]), rel=1e-5)
    import transformers

    options = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}
    values = linear_layers(hf_model(tmp_path / "out", **options))
    tensors, count = read_weights(tmp_path / "out")
    assert count >= 14 and len(values) == 14
    for name, layer in values.items():
        assert torch.equal(tensors[f"{name}.weight"].read(), layer.weight.bfloat16()), name


def test_fp8_blocks_print_both_perplexities_and_convert_writes_dynamic_scales(folder, texts, tmp_path, capsys):
    assert run(folder, texts, tmp_path / "blocks", "--format", "fp8-blocks") == 0
    before, after = printed(capsys.readouterr().out)
    assert 0 < abs(after / before - 1) < 0.05
    words = ["--saver", "hf", "--load-dir", str(folder), "--save-dir", str(tmp_path / "dynamic"), "--quantize"]
    assert run_tool("convert", [*words, "fp8-dynamic"]) == 0
    config = json.loads((tmp_path / "dynamic" / "config.json").read_text())["quantization_config"]
    inputs = config["config_groups"]["group_0"]["input_activations"]
    assert (inputs["dynamic"], inputs["strategy"]) == (True, "token")
    assert {"lm_head", "model.embed_tokens"} == {*config["ignore"]}
    assert run_tool("verify", [str(tmp_path / "dynamic")]) == 0


@pytest.mark.parametrize("percentile", [50.0, 97.3, 99.99])
def test_percentile_is_the_smallest_magnitude_that_covers_the_share(percentile):
    magnitudes, parts = Magnitudes(counts=True), torch.randn(4, 250, generator=torch.Generator().manual_seed(1))
    for part in parts:
        magnitudes(part)
    ordered = parts.abs().bfloat16().flatten().float().sort().values
    limit = ordered[math.ceil(percentile / 100 * ordered.numel()) - 1]
    assert magnitudes.scale(percentile) == float(to_bf16(limit / 448))


def test_a_missing_scale_is_named(folder, tmp_path):
    with pytest.raises(UserError, match=r"no scale of the inputs of decoder.layers.0.*linear_qkv"):
        save_hf(load_hf(folder), tmp_path / "out", quantize={"decoder.layers.7.mlp.linear_fc1": 1.0})
    assert not (tmp_path / "out").exists()


def test_inputs_that_are_all_zero_are_named(folder, texts, tmp_path, capsys):
    """Without any scale the folder must not be written in the dtype of the model."""
    source = load_hf(folder)
    embedding = source.tensors["model.embedding.word_embeddings.weight"]
    zeros = LazyTensor.of(torch.zeros(embedding.shape))
    tensors = {**source.tensors, "model.embedding.word_embeddings.weight": zeros}
    save_hf(dataclasses.replace(source, tensors=tensors), tmp_path / "zeros")
    tokenizer_folder(tmp_path / "zeros", MISTRAL)
    assert run(tmp_path / "zeros", texts, tmp_path / "out") == 2
    assert "no scale of the inputs of decoder.layers.0.self_attention.linear_qkv" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flags, message", [
    (["--calib-size", "10000"], "rows of 16 tokens, 10003 are needed; lower --calib-size or --eval-size"),
    (["--calib-percentile", "0"], "--calib-percentile 0.0: must be above 0"),
    (["--calib-max-sequence-length", "999"], "--calib-max-sequence-length 999: the model takes"),
    (["--auto-quantize-bits", "4"], "--auto-quantize-bits: is a flag of NVIDIA ModelOpt; all layers have one format"),
    (["--load", "{quantized}"], "is quantized already; quantize the folder of the model in bf16"),
    (["--save-hf", "{model}"], "exists already; choose another name"),
    (["--save-hf", "{model}/config.json/out"], "config.json is no folder; choose another folder"),
    (["--save-hf", "n" * 300], "File name too long; choose another folder"),
    (["--save-hf", ""], "--save-hf : is an empty path"),
    (["--calib-size", "9" * 20], "must be from 1 to 1000000000"),
    (["--data", "{deep}"], "deep.jsonl: cannot be read as texts (is no JSON: it is nested too deeply"),
    (["--data", "{numbers}"], "(line 2: 'text' is missing or no text; conversations are not read)"),
])  # fmt: skip
def test_bad_input_is_one_message(folder, texts, tmp_path, capsys, flags, message):
    quantized = tmp_path / "quantized"
    quantized.mkdir()
    (quantized / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    (tmp_path / "deep.jsonl").write_text('{"text":' + "[" * 100_000)
    (tmp_path / "numbers.jsonl").write_text('\n{"text": 5}\n')
    files = {name: tmp_path / f"{name}.jsonl" for name in ("deep", "numbers")}
    words = [word.format(quantized=quantized, model=folder, **files) for word in flags]
    assert run(folder, texts, tmp_path / "out", *words) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert message in line and not (tmp_path / "out").exists()


def test_a_run_with_the_vocabulary_size_of_its_tokenizer_is_quantized(gloo_pool, folder, texts, tmp_path, capsys):
    tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]
    argv = [*LLAMA.split(), *tokenizer, "--mock-data", "--train-iters", "3", "--save", str(tmp_path / "run")]
    assert gloo_pool.run(train, 1, argv, False, "gpt", ("--vocab-size",)) == [0]
    assert run(tmp_path / "run", texts, tmp_path / "out") == 0
    before, after = printed(capsys.readouterr().out)
    assert after == pytest.approx(before, rel=0.01)


@pytest.mark.parametrize("kind", ["run", "folder"])
def test_a_model_with_transposed_matrices_is_rejected_before_it_is_calibrated(
    gloo_pool, folder, texts, tmp_path, capsys, kind
):
    """GPT-2's layers are stored as [in, out]."""
    source = tmp_path / "source"
    if kind == "run":
        tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]
        argv = [*tokenizer, "--mock-data", "--train-iters", "3", "--vocab-size", "1024", "--save", str(source)]
        assert gloo_pool.run(train, 1, argv) == [0]
    else:
        transformers = pytest.importorskip("transformers", reason="pip install transformers: the model")
        config = transformers.GPT2Config(vocab_size=1024, n_positions=32, n_embd=32, n_layer=2, n_head=4)
        transformers.GPT2LMHeadModel(config).save_pretrained(source)
        tokenizer_folder(source, MISTRAL)
    with mock.patch("megatron.tools.quantize.load_gpt", side_effect=AssertionError("the model was loaded")):
        assert run(source, texts, tmp_path / "out") == 2
    message = "h.0.attn.c_attn.weight [32, 96] is not the matrix [out, in] of a linear layer; write the folder in bf16"
    assert f"--quantize fp8: transformer.{message}" in capsys.readouterr().err


def test_latent_attention_and_experts_have_scales_and_the_router_none(texts, tmp_path, capsys):
    config = {**DEEPSEEK, "vocab_size": 1024}
    folder = write(tmp_path / "model", random_bf16(config), config)
    tokenizer_folder(folder, MISTRAL)
    assert run(folder, texts, tmp_path / "out") == 0
    before, after = printed(capsys.readouterr().out)
    stored = weights_in(tmp_path / "out")
    linear = {name.removesuffix(".weight") for name in stored if LINEAR.fullmatch(name)}
    assert len(linear) == 2 * 5 + 3 + 5 * 3 and 0 < abs(after / before - 1) < 0.05
    for ending in ("weight_scale", "input_scale"):
        assert {name.removesuffix(f".{ending}") for name in stored if name.endswith(f".{ending}")} == linear
    experts = [stored[f"model.layers.1.mlp.experts.{n}.up_proj.input_scale"] for n in range(4)]
    assert all(torch.equal(scale, experts[0]) for scale in experts)
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert {*ignored} == {"lm_head", "model.embed_tokens", "model.layers.1.mlp.gate"}


# ---- ranks

EXPERTS = f"{LLAMA} --num-experts 4 --moe-ffn-hidden-size 16 --moe-router-topk 2"
ON_RANKS = {
    "TP 2": (LLAMA, "--tensor-model-parallel-size 2"),
    "PP 2": (LLAMA, "--pipeline-model-parallel-size 2"),
    "EP 2": (EXPERTS, "--expert-model-parallel-size 2"),
    "experts, TP 2": (EXPERTS, "--tensor-model-parallel-size 2"),
}


@pytest.mark.parametrize("name", ON_RANKS)
def test_ranks_write_the_folder_of_one_rank(gloo_pool, tmp_path, name):
    model, layout = ON_RANKS[name]
    training = [*model.split(), "--mock-data", "--train-iters", "3", "--save", str(tmp_path / "run")]
    assert gloo_pool.run(train, 1, training) == [0]
    write_dataset(tmp_path / "text", 40)
    argv = ["quantize", "--load", str(tmp_path / "run"), "--data-path", str(tmp_path / "text"), *SIZES]
    percentile = [] if name == "TP 2" else ["--calib-percentile", "99"]
    folders, perplexities = [], []
    for ranks, flags in ((1, []), (2, layout.split())):
        results = gloo_pool.run(
            run_on_ranks, ranks, [*argv, "--save-hf", str(tmp_path / str(ranks)), *flags, *percentile]
        )
        assert [code for code, _, _ in results] == [0] * ranks, results
        folders.append(weights_in(tmp_path / str(ranks)))
        perplexities.append(printed(results[0][1]))
    one, several = folders
    assert one.keys() == several.keys() and sum(key.endswith("input_scale") for key in one) >= 14
    for key, tensor in one.items():
        same = torch.equal(tensor.view(torch.uint8), several[key].view(torch.uint8))
        assert same or (key.endswith("input_scale") and torch.allclose(tensor, several[key], rtol=2**-7)), key
    assert perplexities[1] == pytest.approx(perplexities[0], rel=5e-3)
