"""Pruning against ``transformers``: importance equals a definition over hooks of its models, written apart, and the
pruned model equals its weights sliced by hand. The results train, and wrong sizes end in one message."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from megatron.console import run_tool
from megatron.core import parallel_state
from tests.functional_tests.test_conversion import run
from tests.test_utils.foreign_models import MIXTURES, MODELS, VOCAB, build

transformers = pytest.importorskip("transformers")

from megatron.post_training import importance as measured  # noqa: E402
from megatron.tools import prune  # noqa: E402

SAMPLES = torch.randint(1, VOCAB, (5, 16), generator=torch.Generator().manual_seed(2))
DENSE = {"hidden_size": 24, "ffn_hidden_size": 32, "num_layers": 2, "num_attention_heads": 2}
CASES = {
    "llama-tied": DENSE,
    "llama-biases": DENSE,
    "qwen2": {"hidden_size": 24, "num_query_groups": 1},
    "qwen3-wide-heads-groups": {**DENSE, "num_query_groups": 2},
    "gpt2": {"hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 96, "num_layers": 2},
    "qwen3-moe": {"hidden_size": 24, "num_moe_experts": 5, "moe_ffn_hidden_size": 16},
    "qwen3-moe-unnormalized": {**DENSE, "num_moe_experts": 6},
    "qwen2-moe": {"num_layers": 2, "num_moe_experts": 6, "moe_shared_expert_intermediate_size": 24},
}
HF_NAMES = {
    "hidden_size": ("hidden_size", "n_embd"),
    "ffn_hidden_size": ("intermediate_size", "n_inner"),
    "num_layers": ("num_hidden_layers", "n_layer"),
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "num_query_groups": ("num_key_value_heads",),
    "num_moe_experts": ("num_experts", "num_local_experts"),
    "moe_ffn_hidden_size": ("moe_intermediate_size",),
    "moe_shared_expert_intermediate_size": ("shared_expert_intermediate_size",),
}


def three_layers(name):
    """A model of three layers."""
    model = {**MODELS, **MIXTURES}[name]
    layers = "n_layer" if "n_layer" in model.settings else "num_hidden_layers"
    return dataclasses.replace(model, settings={**model.settings, layers: 3})


def mean_then_norm(activations):
    """Mean of |x| over tokens, then the L2 norm over samples: [samples, tokens, channels] -> [channels]."""
    return np.sqrt((np.abs(activations).mean(1) ** 2).sum(0))


def definition(model, samples):
    """Importance of the parts of a model of ``transformers`` by the names of ``megatron.post_training``."""
    values, handles, result = {}, [], {}
    layers = model.transformer.h if hasattr(model, "transformer") else model.model.layers

    def keep(name):
        def hook(_, args, output):
            inputs = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
            outputs = output[0] if isinstance(output, tuple) else output
            values[name] = (inputs.double().numpy(), outputs.double().numpy(), args)

        return hook

    for index, layer in enumerate(layers):
        old = hasattr(layer, "ln_1")
        attention, mlp = (layer.attn, layer.mlp) if old else (layer.self_attn, layer.mlp)
        parts = {"layer": layer, "heads": attention.c_proj if old else attention.o_proj}
        parts |= {"norm1": layer.ln_1 if old else layer.input_layernorm}
        parts |= {"norm2": layer.ln_2 if old else layer.post_attention_layernorm}
        if hasattr(mlp, "experts"):
            parts["experts"] = mlp.experts
            if hasattr(mlp, "shared_expert"):
                parts["shared_ffn"] = mlp.shared_expert.down_proj
        else:
            parts["ffn"] = mlp.c_proj if old else mlp.down_proj
        handles += [part.register_forward_hook(keep(f"{index}.{name}")) for name, part in parts.items()]
    with torch.no_grad():
        model(samples)
    for handle in handles:
        handle.remove()
    heads = model.config.num_attention_heads
    norms = [values[f"{index}.{norm}"][1] for index in range(len(layers)) for norm in ("norm1", "norm2")]
    result["hidden"] = sum(map(mean_then_norm, norms))
    result["layers"] = np.zeros(len(layers))
    for index in range(len(layers)):
        before, after, _ = values[f"{index}.layer"]
        lengths = np.linalg.norm(before, axis=2) * np.linalg.norm(after, axis=2)
        result["layers"][index] = (1 - (before * after).sum(2) / lengths).mean(1).sum()
        scores = mean_then_norm(values[f"{index}.heads"][0]).reshape(heads, -1)
        result[f"{index}.heads"] = np.sqrt((scores**2).sum(1))
        for name in ("ffn", "shared_ffn"):
            if f"{index}.{name}" in values:
                inputs = values[f"{index}.{name}"][0]
                result[f"{index}.{name}"] = mean_then_norm(inputs.reshape(*samples.shape, -1))
        if f"{index}.experts" in values:
            result |= expert_definition(layers[index].mlp.experts, values[f"{index}.experts"][2], index, len(samples))
    return result


def expert_definition(experts, args, index, num_samples):
    hidden, chosen, weights = args
    up, down = (weight.double().detach() for weight in (experts.gate_up_proj, experts.down_proj))
    tokens, (count, width) = hidden.double().flatten(0, -2), (down.shape[0], down.shape[2])
    outputs, channels = [[] for _ in range(count)], np.zeros((num_samples, count, width))
    for token, (row, ids, gates) in enumerate(zip(tokens, chosen, weights.double())):
        for expert, gate in zip(ids.tolist(), gates):
            left, right = (up[expert] @ row).chunk(2)
            activated = gate * torch.nn.functional.silu(left) * right
            outputs[expert].append(float((down[expert] @ activated).norm()))
            channels[token * num_samples // len(tokens), expert] += activated.abs().numpy()
    means = np.array([np.mean(norms) if norms else 0.0 for norms in outputs])
    return {f"{index}.experts": means, f"{index}.expert_ffn": np.sqrt((channels**2).sum(0))}


def best(scores, count):
    return np.sort(np.argsort(-np.asarray(scores), kind="stable")[:count])


def spread(numbers, size):
    return [number * size + channel for number in numbers for channel in range(size)]


def slice_by_hand(model, sizes, importance):
    """A smaller model of ``transformers`` with the selected rows and columns of ``model``."""
    config, old = model.config.to_dict(), model.config
    for name, size in sizes.items():
        config |= {key: size for key in HF_NAMES[name] if key in config}
    groups = getattr(old, "num_key_value_heads", old.num_attention_heads)
    per_group = old.num_attention_heads // groups
    width = getattr(old, "head_dim", None) or old.hidden_size // old.num_attention_heads
    new_groups = sizes.get("num_query_groups", sizes.get("num_attention_heads", groups) if per_group == 1 else groups)
    if "num_key_value_heads" in config:
        config |= {"num_key_value_heads": new_groups, "head_dim": width}
    if "num_attention_heads" not in sizes and "num_attention_heads" in config:
        config["num_attention_heads"] = new_groups * per_group
    config["layer_types"] = None
    new = type(old).from_dict(config)
    new._attn_implementation, new._experts_implementation = "eager", "eager"
    hidden = best(importance["hidden"], new.hidden_size)
    layers = best(importance["layers"], new.num_hidden_layers)
    state = {}
    for name, weight in model.state_dict().items():
        match = re.fullmatch(r"(model\.layers|transformer\.h)\.(\d+)\.(.+)", name)
        if match is None:
            state[name] = weight[..., hidden]
            continue
        layer = int(match[2])
        if layer not in layers:
            continue
        scores = importance[f"{layer}.heads"].reshape(groups, per_group)
        kept_groups = best(np.linalg.norm(scores, axis=1), new_groups)
        per_new = new.num_attention_heads // new_groups
        heads = [group * per_group + head for group in kept_groups for head in best(scores[group], per_new)]
        rows = {"q_proj": spread(heads, width), "k_proj": spread(kept_groups, width)}
        rows |= {"v_proj": rows["k_proj"], "o_proj": hidden, "down_proj": hidden, "c_proj": hidden}
        columns = {"o_proj": rows["q_proj"]}
        ffn = None
        for part, size in (("ffn", "ffn_hidden_size"), ("shared_ffn", "moe_shared_expert_intermediate_size")):
            if (channels := importance.get(f"{layer}.{part}")) is not None:
                ffn = best(channels, sizes.get(size, len(channels)))
        rows |= {"gate_proj": ffn, "up_proj": ffn}
        columns["down_proj"] = ffn
        rest = match[3]
        module, leaf = rest.split(".")[-2:]
        if "experts." in rest or rest in ("mlp.gate.weight",):
            experts = best(importance[f"{layer}.experts"], new.num_experts)
            part = weight[experts]
            chosen = [best(importance[f"{layer}.expert_ffn"][e], new.moe_intermediate_size) for e in experts]
            if rest.endswith("gate_up_proj"):
                halves = part.chunk(2, 1)
                part = torch.stack(
                    [torch.cat([half[i][channels] for half in halves]) for i, channels in enumerate(chosen)]
                )[..., hidden]
            elif rest.endswith("down_proj"):
                part = torch.stack([part[i][:, channels] for i, channels in enumerate(chosen)])[:, hidden]
            else:
                part = part[:, hidden]
        elif "c_" in module:  # GPT-2 stores [in, out]
            outer, inner = {
                "c_attn": ([k * old.hidden_size + row for k in range(3) for row in rows["q_proj"]], hidden),
                "c_fc": (ffn, hidden),
                "c_proj": (hidden, rows["q_proj"] if rest.startswith("attn") else ffn),
            }[module]
            part = weight[outer] if leaf == "bias" else weight[inner][:, outer]
        elif module in ("q_norm", "k_norm"):
            part = weight
        elif "norm" in module or "ln_" in module or "shared_expert_gate" in rest:
            part = weight[..., hidden]
        else:
            part = weight[rows[module]]
            part = part[:, columns.get(module, hidden)] if leaf == "weight" else part
        state[f"{match[1]}.{list(layers).index(layer)}.{rest}"] = part
    smaller = type(model)(new).eval()
    smaller.load_state_dict(state)
    return smaller


@pytest.fixture
def scores(monkeypatch):
    """The importance that the program measures, on ``SAMPLES``."""
    result, measure = {}, measured.measure
    monkeypatch.setattr(prune, "calibration_samples", lambda trained, args: iter(SAMPLES))
    monkeypatch.setattr(measured, "measure", lambda *args: result.update(measure(*args)) or result)
    yield result
    parallel_state.destroy_model_parallel()


def pruned(folder, target, sizes, *more):
    text = sizes if isinstance(sizes, str) else json.dumps(sizes)
    words = ["--load", folder, "--save", target, "--prune-export-config", text]
    words += ["--mock-data", "--tokenizer-type", "NullTokenizer", *more]
    return run_tool("prune", [str(word) for word in words])


@pytest.mark.parametrize("name", CASES)
def test_pruned_model_equals_weights_sliced_by_hand(name, scores, tmp_path):
    parent, sizes = build(three_layers(name)), CASES[name]
    parent.save_pretrained(tmp_path / "parent")
    assert pruned(tmp_path / "parent", tmp_path / "small", sizes) == 0
    expected = definition(parent, SAMPLES)
    assert scores.keys() == expected.keys()
    for part, values in expected.items():
        np.testing.assert_allclose(scores[part], values, rtol=1e-4, atol=1e-5, err_msg=part)
    words = ["--load-dir", tmp_path / "small", "--save-dir", tmp_path / "hf", "--loader", "native", "--saver", "hf"]
    assert run_tool("convert", [*map(str, words), "--no-checking"]) == 0
    smaller = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    by_hand = slice_by_hand(parent, sizes, expected)
    with torch.no_grad():
        torch.testing.assert_close(smaller(SAMPLES).logits, by_hand(SAMPLES).logits, rtol=1e-4, atol=1e-5)
    assert smaller.num_parameters() == by_hand.num_parameters() < parent.num_parameters()


@pytest.mark.parametrize("name", ["qwen2", "qwen2-moe"])
def test_pruned_models_train(name, scores, gloo_pool, tmp_path):
    build(three_layers(name)).save_pretrained(tmp_path / "parent")
    assert pruned(tmp_path / "parent", tmp_path / "small", CASES[name]) == 0
    words = f"--pretrained-checkpoint {tmp_path / 'small'} --use-checkpoint-args --mock-data --lr 1e-2 --train-iters 3"
    words += " --micro-batch-size 2 --global-batch-size 4 --seq-length 16 --eval-iters 0 --num-workers 0"
    words += f" --tokenizer-type NullTokenizer --vocab-size {VOCAB} --save {tmp_path / 'run'}"
    assert gloo_pool.run(run, 2, words.split()) == [(0, "")] * 2
    assert run_tool("verify", [str(tmp_path / "run")]) == 0


ORACLE = """
import sys, torch, transformers
from modelopt.torch.prune.importance_hooks.base_hooks import L2NormHook

model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
oracles = {}
for index, layer in enumerate(model.model.layers):
    for name, part in (("heads", layer.self_attn.o_proj), ("ffn", layer.mlp.down_proj)):
        oracle = oracles[f"{index}.{name}"] = L2NormHook()
        part.register_forward_hook(lambda _, x, y, oracle=oracle: oracle(_, (x[0].transpose(0, 1),), None))
with torch.no_grad():
    model(torch.load(sys.argv[2]))
torch.save({name: oracle.accumulate() for name, oracle in oracles.items()}, sys.argv[2])
"""


@pytest.mark.skipif(find_spec("modelopt") is None, reason="pip install nvidia-modelopt: it is what is compared with")
def test_importance_equals_that_of_model_optimizer(scores, tmp_path):
    """In a process without this package, which ModelOpt takes for Megatron-LM and adds its classes to."""
    parent = build(three_layers("llama-biases"))
    parent.save_pretrained(tmp_path / "parent")
    assert pruned(tmp_path / "parent", tmp_path / "small", {"hidden_size": 16}) == 0
    torch.save(SAMPLES, tmp_path / "values.pt")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [sys.executable, "-c", ORACLE, tmp_path / "parent", tmp_path / "values.pt"]
    subprocess.run(words, check=True, cwd=tmp_path, env=environment)
    for name, channels in torch.load(tmp_path / "values.pt").items():
        if name.endswith("heads"):
            channels = torch.linalg.vector_norm(channels.unflatten(0, (parent.config.num_attention_heads, -1)), dim=1)
        torch.testing.assert_close(scores[name], channels, rtol=1e-5, atol=1e-6)


WRONG = {
    '{"hidden_size": 640, "num_layers": 0.5, "num_moe_experts": 2, "depth": 3}': [
        "hidden_size 640 is larger than the parent's 32", "num_layers 0.5 must be a positive integer",
        "num_moe_experts 2: the model has no such part", "depth cannot be pruned; use hidden_size, ffn_hidden_size",
    ],
    '{"num_attention_heads": 3}': ["num_attention_heads 3 must be divisible by num_query_groups 2"],
    '{"num_attention_heads": 3, "num_query_groups": 1}': ["needs 3 heads per group, the parent has 2"],
    '{"hidden_size": 16, "hidden_size": 8}': ["is not JSON (the key 'hidden_size' is there twice)"],
    '{"a":' * 100_000: ["is not JSON (it is nested too deeply)"],
    '{"hidden_size": 32}': ["no size is smaller than the parent's"],
    "hidden_size=16": ["is not JSON"],
    "[16]": ["must be a JSON object"],
}  # fmt: skip


def test_impossible_sizes_end_in_one_message(tmp_path, capsys):
    build(three_layers("qwen2")).save_pretrained(tmp_path / "parent")
    capsys.readouterr()
    for text, messages in WRONG.items():
        assert pruned(tmp_path / "parent", tmp_path / "small", text) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: --prune-export-config") and error.count("\n") == 1
        assert all(message in error for message in messages), error
    assert pruned(tmp_path / "parent", tmp_path / "parent", '{"hidden_size": 16}') == 2
    assert "exists already" in capsys.readouterr().err and not (tmp_path / "small").exists()
    for folder, message in (("parent/config.json/out", "config.json is no folder"), ("n" * 300, "File name too long")):
        assert pruned(tmp_path / "parent", tmp_path / folder, '{"hidden_size": 16}') == 2
        assert message in capsys.readouterr().err
    words = ["--load", str(tmp_path / "parent"), "--save", str(tmp_path / "small"), "--prune-export-config", "{}"]
    for more, message in (
        ([], "--data-path: give the data"), (["--mock-data", "--calib-size", "0"], "--calib-size 0: must be at least 1")
    ):  # fmt: skip
        assert run_tool("prune", [*words, *more]) == 2
        assert message in capsys.readouterr().err


def test_impossible_experts_and_layers_are_rejected(tmp_path, capsys):
    build(MIXTURES["deepseek-v3"]).save_pretrained(tmp_path / "experts")
    assert pruned(tmp_path / "experts", tmp_path / "small", {"num_moe_experts": 3, "num_attention_heads": 2}) == 2
    error = capsys.readouterr().err
    assert "num_moe_experts 3 is less than the 4 experts of a token" in error and "the router's 4 groups" in error
    assert "num_attention_heads cannot be pruned with multi-latent attention" in error
    build(MODELS["qwen3.5"]).save_pretrained(tmp_path / "hybrid")
    assert pruned(tmp_path / "hybrid", tmp_path / "small", {"hidden_size": 16}) == 2
    assert "has layers of gated_delta_net" in capsys.readouterr().err


def test_patterns_of_layers_follow_the_layers_that_stay():
    from megatron.core.config.transformer_config import TransformerConfig
    from megatron.post_training.pruning import _layer_patterns

    sizes = {"num_layers": 6, "hidden_size": 8, "num_attention_heads": 2, "num_moe_experts": 4, "moe_layer_freq": 2}
    patterns = {"window_size": (3, 0), "window_attn_skip_freq": 3, "no_rope_freq": [0, 0, 1, 0, 1, 1]}
    config = TransformerConfig(**sizes, **patterns)
    assert _layer_patterns(config, [0, 1, 2, 5]) == {
        "window_attn_skip_freq": [1, 1, 0, 0], "no_rope_freq": [0, 0, 1, 1], "moe_layer_freq": [1, 0, 1, 0],
    }  # fmt: skip
    assert _layer_patterns(config, [0, 1, 2, 3, 4, 5]) == {}


def test_heads_keep_their_gates_and_experts_are_chosen_within_router_groups():
    from megatron.core.config.transformer_config import TransformerConfig
    from megatron.core.sharding.lazy_tensor import LazyTensor
    from megatron.export.interchange import Interchange
    from megatron.post_training.pruning import prune as prune_weights
    from megatron.post_training.pruning import target_sizes

    config = TransformerConfig(
        num_layers=1, hidden_size=6, num_attention_heads=4, num_query_groups=2, kv_channels=3, num_moe_experts=8,
        attention_output_gate=True, moe_router_topk=2, moe_router_num_groups=2, moe_router_group_topk=1,
        moe_ffn_hidden_size=5,
    )  # fmt: skip
    # a group: query and gate of each of its two heads, then key and value, of 3 rows each
    qkv, proj = torch.arange(216.0).view(2, 18, 6), torch.arange(72.0).view(6, 12)
    router, fc2 = torch.arange(48.0).view(8, 6), torch.arange(240.0).view(8, 6, 5)
    layer = "model.decoder.layers.0"
    weights = {
        f"{layer}.self_attention.linear_qkv.weight": qkv, f"{layer}.self_attention.linear_proj.weight": proj,
        f"{layer}.mlp.router.weight": router, f"{layer}.mlp.experts.linear_fc2.weight": fc2,
    }  # fmt: skip
    importance = {
        "hidden": torch.ones(6), "layers": torch.ones(1), "0.heads": torch.tensor([1.0, 4, 3, 2]),
        "0.experts": torch.tensor([1.0, 5, 2, 3, 8, 7, 9, 6]), "0.expert_ffn": torch.ones(8, 5),
    }  # fmt: skip
    source = Interchange({}, {name: LazyTensor.of(weight) for name, weight in weights.items()})
    sizes = target_sizes('{"num_attention_heads": 2, "num_moe_experts": 4}', config)
    smaller = prune_weights(source, config, importance, sizes).tensors
    second_head, first_head = qkv[0, [*range(6, 12), *range(12, 18)]], qkv[1, [*range(6), *range(12, 18)]]
    experts = [1, 3, 4, 6]  # the best two experts of each router group
    expected = torch.stack((second_head, first_head)), proj[:, 3:9], router[experts], fc2[experts]
    for name, weight in zip(weights, expected):
        assert torch.equal(smaller[name].read(), weight), name
