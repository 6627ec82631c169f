"""Folders of Hugging Face's that are broken, or that say what no setting can: one message each, with the tensor."""

import copy
import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from megatron.core.config.errors import UserError
from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.export.files import Target
from megatron.export.hf import load_hf, load_hf_settings, save_hf
from megatron.export.hf.attention_settings import Window
from megatron.export.hf.conversion import expected, placements
from megatron.export.hf.families.granite import FACTORS
from megatron.export.hf.families.mixtures import expert_groups
from megatron.export.hf.family import complete
from megatron.export.hf.registry import known_families
from megatron.export.interchange import Interchange
from tests.test_utils.hf_folders import random_model

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 53, "hidden_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "bos_token_id": 1, "eos_token_id": [2, 3],
}  # fmt: skip
Q = "model.layers.1.self_attn.q_proj.weight"


def random_weights(config):
    family = known_families()[config["model_type"]]
    shapes = expected(placements(family, complete(family.load_settings(config))))
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write(folder, tensors, config=CONFIG):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "tables",
    [
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
        {"rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 7.0}, "rope_parameters": {"rope_theta": 5.0}},
        {"rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5.0}},
        {"rope_scaling": None, "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
    ],
)
@pytest.mark.parametrize("base", [{}, {"rope_theta": 3000.0}])
def test_rotary_settings_of_two_keys_are_those_of_transformers(tables, base):
    """rope_scaling replaces rope_parameters."""
    config = {name: value for name, value in CONFIG.items() if name != "rope_theta"}
    family = known_families()["llama"]
    expected = LlamaConfig(**config, **base, **copy.deepcopy(tables)).rope_parameters
    loaded = family.load_settings({**config, **base, **tables})
    assert loaded == family.load_settings({**config, "rope_parameters": expected})
    assert loaded["rotary_seq_len_interpolation_factor"] == expected["factor"]


def tensors_of(model):
    return {name: lazy.read() for name, lazy in model.tensors.items()}


def refused(folder, *words):
    with pytest.raises(UserError) as caught:
        load_hf(folder)
    message = str(caught.value)
    for word in (folder.name, *words):
        assert word in message, message
    return message


def test_a_tensor_that_is_missing_renamed_or_of_another_shape_is_named(tmp_path):
    weights = random_weights(CONFIG)
    refused(write(tmp_path / "a", {k: v for k, v in weights.items() if k != Q}), f"{Q} is missing, expected [32, 32]")
    renamed = {k.replace("1.self_attn.q_proj", "1.self_attn.query"): v for k, v in weights.items()}
    refused(write(tmp_path / "b", renamed), f"{Q} is missing, expected [32, 32]",
            "model.layers.1.self_attn.query.weight [32, 32] is not expected")  # fmt: skip
    refused(write(tmp_path / "c", {**weights, Q: torch.zeros(32, 16)}), f"{Q} has shape [32, 16]", "[32, 32]")


def test_another_vocabulary_is_named(tmp_path):
    folder = write(tmp_path / "a", random_weights(CONFIG), {**CONFIG, "vocab_size": 64})
    refused(folder, "model.embed_tokens.weight has shape [53, 32]", "[64, 32]", "lm_head.weight")


def test_tied_against_untied_is_named(tmp_path):
    weights = random_weights(CONFIG)
    tied = {**CONFIG, "tie_word_embeddings": True}
    refused(write(tmp_path / "a", weights, tied), "lm_head.weight", "tie_word_embeddings")
    without = {k: v for k, v in weights.items() if k != "lm_head.weight"}
    refused(write(tmp_path / "b", without), "lm_head.weight is missing, expected [53, 32]", "not tied")
    write(tmp_path / "c", {**without, "lm_head.weight": without["model.embed_tokens.weight"].clone()}, tied)
    result = load_hf(tmp_path / "c")
    assert "model.output_layer.weight" not in result.tensors and "lm_head.weight" in result.notes[0]


@pytest.mark.parametrize("cut", [1, 4, 100, 20_000])
def test_a_truncated_file_is_rejected_with_a_tensor(cut, tmp_path):
    folder = write(tmp_path / "a", random_weights(CONFIG))
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - cut)
    refused(folder, "truncated")
    os.truncate(path, 6)
    refused(folder, "truncated")
    path.write_bytes(b"")
    refused(folder, "model.safetensors")


def sharded(tmp_path):
    save_hf(load_hf(write(tmp_path / "one", random_weights(CONFIG))), tmp_path / "many", max_shard_bytes=20_000)
    return tmp_path / "many"


def test_a_missing_shard_and_an_index_that_lies_are_named(tmp_path):
    folder = sharded(tmp_path)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = index["weight_map"][Q]
    retained = (folder / shard).rename(tmp_path / shard)
    refused(folder, f"{shard} is missing", Q)
    shutil.move(retained, folder / shard)
    assert len(load_hf(folder).tensors)

    def with_map(names):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))

    with_map({**index["weight_map"], "model.more": shard})
    refused(folder, "model.more", shard)
    with_map({k: v for k, v in index["weight_map"].items() if k != Q})
    refused(folder, Q, shard)
    with_map({**index["weight_map"], Q: "../../etc/passwd"})
    refused(folder, "../../etc/passwd")
    with_map({**index["weight_map"], Q: 3})
    refused(folder, "weight_map")


def test_an_existing_target_is_rejected_and_nothing_is_half_written(tmp_path):
    model = load_hf(write(tmp_path / "a", random_weights(CONFIG)))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine").write_text("precious")
    with pytest.raises(UserError, match="b: exists already"):
        save_hf(model, tmp_path / "b")
    assert (tmp_path / "b" / "mine").read_text() == "precious"

    def fail():
        raise OSError(28, "No space left on device")

    broken = LazyTensor((32,), torch.float32, fail)
    model.tensors["model.decoder.final_layernorm.weight"] = broken
    with pytest.raises(UserError, match="No space left"):
        save_hf(model, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_a_conversion_that_was_interrupted_goes_on(tmp_path):
    model = load_hf(write(tmp_path / "a", random_weights(CONFIG)))
    full, reads = dict(model.tensors), []

    def counted(name, lazy, allowed):
        def read():
            reads.append(name)
            if len(reads) > allowed:
                raise KeyboardInterrupt
            return lazy.read()

        return LazyTensor(lazy.shape, lazy.dtype, read)

    model.tensors = {name: counted(name, lazy, 12) for name, lazy in full.items()}
    with pytest.raises(KeyboardInterrupt), Target(tmp_path / "b", "a") as target:
        save_hf(model, target, max_shard_bytes=5_000)
    assert not (tmp_path / "b").exists()
    reads.clear()
    model.tensors = {name: counted(name, lazy, 99) for name, lazy in full.items()}
    with Target(tmp_path / "b", "a") as target:
        save_hf(model, target, max_shard_bytes=5_000)
        target.publish()
    assert len(reads) < len(full) - 5
    repeated = tensors_of(load_hf(tmp_path / "b"))
    assert repeated.keys() == full.keys() and all(torch.equal(repeated[name], full[name].read()) for name in full)


class Runs:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("protocol", ["torch", "pickle"])
def test_a_crafted_pickle_is_rejected_and_runs_nothing(protocol, tmp_path):
    folder = write(tmp_path / "a", random_weights(CONFIG))
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    assert torch.equal(load_hf(folder).tensors["model.output_layer.weight"].read(), weights["lm_head.weight"])
    torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(load_hf(folder).tensors["model.output_layer.weight"].read(), weights["lm_head.weight"])
    evil = {**weights, Q: Runs(tmp_path / "ran")}
    if protocol == "torch":
        torch.save(evil, folder / "pytorch_model.bin")
    else:
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(evil))
    message = refused(folder, "pytorch_model.bin")
    assert not (tmp_path / "ran").exists()
    assert "weights_only" not in message and "\n" not in message, "no advice to switch the protection off"
    assert protocol != "torch" or "the pickle is rejected: it requests 'posix.mkdir'" in message
    torch.save([weights], folder / "pytorch_model.bin")
    refused(folder, "pytorch_model.bin", "table of tensors")


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(("change", "words"), [
    (lambda tensor: tensor.to("meta"), "_rebuild_meta_tensor"), (torch.Tensor.to_sparse, "_rebuild_sparse"),
    (lambda tensor: "text", "table of tensors"), (lambda tensor: torch.tensor([[1.0]]).expand(10**4, 10**4), "hold"),
], ids=["meta", "sparse", "text", "expanded"])  # fmt: skip
def test_a_bin_file_holds_plain_tensors_only(change, words, old, tmp_path):
    folder = write(tmp_path / "a", weights := random_weights(CONFIG))
    (folder / "model.safetensors").unlink()
    evil = {**weights, Q: change(weights[Q])}
    torch.save(evil, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not old)
    message = refused(folder, "pytorch_model.bin", words)
    assert "weights_only" not in message and "\n" not in message


def test_a_flipped_bit_of_a_bin_file_is_found(tmp_path):
    folder = write(tmp_path / "a", weights := random_weights(CONFIG))
    (folder / "model.safetensors").unlink()
    path = folder / "pytorch_model.bin"
    torch.save(weights, path)
    data = bytearray(path.read_bytes())
    data[data.index(weights[Q].numpy().tobytes()) + 7] ^= 64
    path.write_bytes(data)
    with pytest.raises(UserError, match="pytorch_model.bin: damaged: its record .*CRC-32"):
        tensors_of(load_hf(folder))


def test_another_architecture_and_an_unknown_family_list_those_that_there_are(tmp_path):
    weights = random_weights(CONFIG)
    for change, words in (
        ({"model_type": "mamba"}, ("'mamba'", "llama, ", "qwen3_moe")),
        ({"model_type": None, "architectures": ["X"]}, ("None", "llama")),
        ({"architectures": ["LlamaForSequenceClassification"]}, ("LlamaForSequenceClassification", "LlamaForCausalLM")),
        (
            {"model_type": "bert", "architectures": ["BertForTokenClassification"]},
            ("BertForTokenC", "BertForPreTraining, BertForMaskedLM, BertModel, BertForNextSentencePrediction"),
        ),
        ({"model_type": "mistral", "architectures": ["MistralForCausalLM"], "hidden_size": 64}, ("[53, 64]",)),
    ):
        refused(write(tmp_path / "a", weights, {**CONFIG, **change}), *words)
    (tmp_path / "a" / "config.json").unlink()
    refused(tmp_path / "a", "config.json is missing")
    (tmp_path / "a" / "config.json").write_text("{")
    refused(tmp_path / "a", "not JSON")
    (tmp_path / "a" / "config.json").write_text("[]")
    refused(tmp_path / "a", "not a table")


@pytest.mark.parametrize("change, words", [
    ({"hidden_act": "relu"}, ("hidden_act", "'relu'", "silu")),
    ({"attention_bias": True}, ("mlp_bias",)),
    ({"rope_scaling": {"rope_type": "proportional", "factor": 2.0}}, ("rope_type", "'proportional'", "longrope")),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, ("rope_scaling", "short_factor must be a list")),
    ({"rope_scaling": {"rope_type": "dynamic"}}, ("rope_scaling", "without a factor")),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 0.5}}, ("rope_scaling", "factor must be at least 1")),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2, "original_max_position_embeddings": 7}},
     ("original_max_position_embeddings of dynamic", "7")),
    ({"rope_scaling": {"type": "linear", "factor": 2.5}}, ("factor", "2.5")),
    ({"rope_scaling": {"rope_type": "llama3"}}, ("rope_scaling", "without a factor")),
    ({"rope_scaling": {"rope_type": "default", "factor": 1.5}}, ("1.5", "'default'")),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 2.0}}, ("low_freq_factor", "2.0")),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 8, "attention_factor": 2.0}}, ("attention_factor", "yarn")),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 8, "mscale": 2.0}}, ("mscale", "2.0")),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, ("full_attention",)),
    ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor", "0.5")),
    ({"rope_theta": 0.5}, ("rope_theta", "0.5")),
    ({"rope_theta": float("inf")}, ("rope_theta", "inf")),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 8, "attention_factor": 1.207}}, ("attention_factor", "1.207")),
    ({"sliding_window": 4096}, ("sliding_window", "4096")),
    ({"quantization_config": {"quant_method": "fp8"}}, ("quantization_config", "fp8")),
    ({"a_new_key": 3, "attention_chunk_size": 8, "use_mtp": 7}, ("attention_chunk_size is 8, use_mtp is 7, which",)),
    ({"num_key_value_heads": 3}, ("num_query_groups", "3")),
    ({"hidden_size": None}, ("hidden_size is missing",)),
    ({"num_hidden_layers": "two"}, ("num_layers", "'two'")),
    ({"num_hidden_layers": 10**9}, ("num_layers", "1000000000")),
    ({"vocab_size": 0}, ("vocab_size", "0")),
], ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")  # fmt: skip
def test_a_key_that_no_setting_can_represent_is_rejected_with_its_value(change, words, tmp_path):
    refused(write(tmp_path / "a", {}, {**CONFIG, **change}), *words)


@pytest.mark.parametrize("name", sorted(known_families()))
def test_odd_values_of_any_key_end_in_one_message(name, tmp_path):
    family = known_families()[name]
    base = {**CONFIG, "model_type": name, "architectures": [family.architecture]}
    keys = {key for rule in family.config for key in rule.hf_keys}
    (tmp_path / "a").mkdir()
    for key in sorted(keys):
        for value in (None, True, -1, 1.5, 10**30, 10**400, "x", [1], {"x": 1}):
            (tmp_path / "a" / "config.json").unlink(missing_ok=True)  # 3 ms less than to truncate it
            (tmp_path / "a" / "config.json").write_text(json.dumps(family.nested({**base, key: value})))
            try:
                load_hf_settings(tmp_path / "a", family.model_family)
            except UserError as error:
                assert str(error).startswith(str(tmp_path / "a")), error


def test_settings_that_no_family_has_are_rejected_with_the_reasons_of_the_nearest(tmp_path):
    model = load_hf(write(tmp_path / "a", random_weights(CONFIG)))
    model.settings["qk_l2_norm"] = True
    with pytest.raises(UserError, match="not llama: qk_l2_norm is True, the family has False alone. not") as caught:
        save_hf(model, tmp_path / "b")
    for name, family in known_families().items():  # families of other model kinds are not listed
        named = re.search(rf"\b(not {name}:|further from it: .*\b{name}\b)", str(caught.value))
        assert bool(named) == (family.model_family == "gpt"), name
    del model.settings["qk_l2_norm"]
    model.settings |= {"moe_router_load_balancing_type": ["quantile_balancing"], "num_moe_experts": 4}
    with pytest.raises(UserError, match="whose bias no family supports"):
        save_hf(model, tmp_path / "b", family="llama")
    del model.settings["moe_router_load_balancing_type"], model.settings["num_moe_experts"]
    with pytest.raises(UserError, match="qk_layernorm is False"):
        save_hf(model, tmp_path / "b", family="qwen3")
    with pytest.raises(UserError, match="no family that can be converted; known: "):
        save_hf(model, tmp_path / "b", family="qwen33")


NEMOTRON = (
    "--hidden-size 32 --num-attention-heads 2 --ffn-hidden-size 48 --max-position-embeddings 64 --disable-bias-linear "
    "--normalization RMSNorm --position-embedding-type none --squared-relu --mamba-num-heads 2 --mamba-num-groups 1 "
)
ROUTER = (
    "--num-experts 4 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-load-balancing-type none "
)
GRANITE = NEMOTRON.replace("--squared-relu", "--swiglu --untie-embeddings-and-output-weights")


@pytest.mark.parametrize("flags, reason", [
    (f"{NEMOTRON} --hybrid-layer-pattern M*-",
     "not nemotron_h: untie_embeddings_and_output_weights is False, the family has True alone"),
    (f"{NEMOTRON} {ROUTER} --untie-embeddings-and-output-weights --hybrid-layer-pattern M*E",
     "not nemotron_h: moe_shared_expert_intermediate_size is None, the family has a shared expert"),
    (f"{GRANITE} --hybrid-layer-pattern ME*E --num-experts 4 --moe-router-load-balancing-type none",
     "not granitemoehybrid: moe_shared_expert_intermediate_size is None, the family has a shared expert"),
    (f"{GRANITE.replace('type none', 'type rope')} --hybrid-layer-pattern *-*- --softmax-scale 0.3 --window-size 5,0",
     r"not granite: (\S+ is [^;]+; )*hybrid_layer_pattern is '\*-\*-', the family has None alone"),
])  # fmt: skip
def test_hybrid_models_that_transformers_would_compute_differently_are_rejected(flags, reason, tmp_path):
    with pytest.raises(UserError, match=reason):
        save_hf(random_model(flags.split(), 61), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_a_router_without_a_factor_is_written_with_the_factor_1(family, tmp_path):
    flags = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --ffn-hidden-size 48 --max-position-embeddings 64 "
        "--swiglu --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-6 --position-embedding-type rope "
        "--multi-latent-attention --kv-lora-rank 12 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8 "
        "--rope-type rope --qk-layernorm --num-experts 4 --moe-ffn-hidden-size 16 "
        "--moe-router-load-balancing-type none --moe-shared-expert-intermediate-size 16 "
    )
    router = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
    flags += router if family == "deepseek_v3" else "--moe-router-pre-softmax"
    save_hf(random_model(flags.split(), 61), tmp_path / "out", family=family)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["routed_scaling_factor"] == 1


def test_tensors_that_do_not_fit_the_settings_are_not_written(tmp_path):
    model = load_hf(write(tmp_path / "a", random_weights(CONFIG)))
    more = Interchange(model.settings, {**model.tensors, "model.extra.weight": LazyTensor.of(torch.zeros(3))})
    with pytest.raises(UserError, match=re.escape("model.extra.weight [3] is not expected")):
        save_hf(more, tmp_path / "b")
    name = "model.decoder.layers.0.mlp.linear_fc2.weight"
    less = Interchange(model.settings, {k: v for k, v in model.tensors.items() if k != name})
    with pytest.raises(UserError, match=re.escape(f"{name} is missing, expected [32, 48]")):
        save_hf(less, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_files_that_go_along_and_ids_of_tokens_survive(tmp_path):
    folder = write(tmp_path / "a", random_weights(CONFIG))
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "do_sample": true, "eos_token_id": 4}')
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "model.py").write_text("raise SystemExit")
    (folder / "pytorch_model.bin.index.json").write_text("{}")
    save_hf(load_hf(folder), tmp_path / "b", dtype=torch.bfloat16)
    result = {path.name for path in (tmp_path / "b").iterdir()}
    assert result == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["eos_token_id"] == [2, 3] and config["torch_dtype"] == "bfloat16"
    generation = json.loads((tmp_path / "b" / "generation_config.json").read_text())
    assert generation == {"temperature": 0.6, "do_sample": True, "eos_token_id": 4, "bos_token_id": 1}
    stored = load_file(tmp_path / "b" / "model.safetensors")
    assert all(torch.equal(value, random_weights(CONFIG)[name].bfloat16()) for name, value in stored.items())


def test_a_folder_may_be_links_into_a_cache_as_the_hub_makes_it(tmp_path):
    plain = {**CONFIG, "rope_scaling": {"type": "default", "factor": 1.0}}
    cached = write(tmp_path / "blobs", random_weights(CONFIG), plain)
    (cached / "vocab.txt").write_text("a")
    snapshot = tmp_path / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    for path in cached.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    result = load_hf(snapshot)
    assert result.tensors.keys() == load_hf(cached).tensors.keys()
    save_hf(result, tmp_path / "copy")
    assert (tmp_path / "copy" / "vocab.txt").read_text() == "a"


@pytest.mark.parametrize("name", ["vocab.txt", "tokenizer.json", "config.json", "generation_config.json"])
@pytest.mark.parametrize("cache", [False, True], ids=["folder", "cache whose blobs are a link"])
def test_a_file_that_links_out_of_its_folder_is_rejected(name, cache, tmp_path):
    secrets = tmp_path / "private"
    secrets.mkdir()
    (secrets / "secret").write_text(json.dumps(CONFIG))
    folder = tmp_path / "repository" / "snapshots" / "0" if cache else tmp_path / "folder"
    folder.parent.mkdir(parents=True, exist_ok=True)
    write(folder, random_weights(CONFIG))
    (folder / name).unlink(missing_ok=True)
    if cache:
        (tmp_path / "repository" / "blobs").symlink_to(secrets)
    (folder / name).symlink_to("../../blobs/secret" if cache else secrets / "secret")
    refused(folder, f"{name}: is a link out of its folder, to {secrets / 'secret'}")
    (folder / name).unlink()
    (folder / "same").write_text(json.dumps(CONFIG))
    (folder / name).symlink_to("same")
    assert load_hf(folder).tensors


def test_of_many_problems_some_are_listed(tmp_path):
    message = refused(write(tmp_path / "a", {"x.weight": torch.ones(2)}))
    problems = "(22 problems; config.json says that lm_head.weight is not tied): model.embed_tokens.weight is missing, "
    assert problems in message and message.endswith("; …")


def test_names_may_leave_out_the_base_as_files_of_gpt2_do(tmp_path):
    config = {"model_type": "gpt2", "vocab_size": 53, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    weights = random_weights(config)
    folder = write(tmp_path / "a", weights, config)
    bare = {name.removeprefix("transformer."): value for name, value in weights.items()}
    bare |= {"h.0.attn.bias": torch.ones(1, 1, 64, 64)}
    other = load_hf(write(tmp_path / "b", bare, config))
    assert "h.0.attn.bias" in other.notes[0]
    one, two = tensors_of(load_hf(folder)), tensors_of(other)
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_layers_of_multi_token_prediction_come_over_both_ways(tmp_path):
    """DeepSeek stores them after the last layer, with a second copy of embedding and output layer."""
    config = {
        **CONFIG, "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "rms_norm_eps": 1e-6,
        "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
        "v_head_dim": 6, "n_routed_experts": 2, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 12, "routed_scaling_factor": 1.0, "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 2,
    }  # fmt: skip
    weights = random_weights(config)
    for layer in "23":
        weights[f"model.layers.{layer}.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        weights[f"model.layers.{layer}.shared_head.head.weight"] = weights["lm_head.weight"].clone()
    folder = write(tmp_path / "a", weights, config)
    model = load_hf(folder)
    assert model.settings["mtp_num_layers"] == 2 and not model.notes
    second = model.tensors["model.mtp.layers.1.final_layernorm.weight"].read()
    assert torch.equal(second, weights["model.layers.3.shared_head.norm.weight"])
    save_hf(model, tmp_path / "one")
    save_hf(load_hf(folder), tmp_path / "many", max_shard_bytes=20_000)
    repeated = load_file(tmp_path / "one" / "model.safetensors")
    assert repeated.keys() == weights.keys() and all(torch.equal(repeated[name], weights[name]) for name in weights)
    assert json.loads((tmp_path / "one" / "config.json").read_text())["num_nextn_predict_layers"] == 2
    assert load_hf(tmp_path / "many").settings["mtp_num_layers"] == 2
    written = {name: value for name, value in weights.items() if not re.match(r"model\.layers\.[23]\.", name)}
    assert load_hf(write(tmp_path / "b", written, config)).settings["mtp_num_layers"] is None
    one = {name: value for name, value in weights.items() if not name.startswith("model.layers.3.")}
    other = load_hf(write(tmp_path / "c", one, {**config, "num_nextn_predict_layers": 0}))
    assert other.settings["mtp_num_layers"] is None and "model.layers.2.eh_proj.weight" in other.notes[0]
    refused(write(tmp_path / "d", {**weights, "model.layers.3.shared_head.head.weight": torch.ones(53, 32)}, config),
            "model.layers.3.shared_head.head.weight: differs from lm_head.weight")  # fmt: skip
    refused(write(tmp_path / "e", one, config), "model.layers.3.enorm.weight is missing, expected [32]")


def test_read_holds_one_native_tensor_at_a_time(tmp_path):
    """Experts are read one at a time if the source supports it: one read of rows per HF tensor."""
    config = {**CONFIG, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
    model = load_hf(write(tmp_path / "a", random_weights(config), config))
    rows = []

    def counting(lazy):
        return LazyTensor(lazy.shape, lazy.dtype, lazy.read, lambda a, b: rows.append(b - a) or lazy.read()[a:b])

    model.tensors = {name: counting(lazy) for name, lazy in model.tensors.items()}
    save_hf(model, tmp_path / "b")
    assert rows == [1] * (2 * 4 * 3)


def test_native_tensor_is_read_once_for_all_exported_ones(tmp_path):
    model = load_hf(write(tmp_path / "a", random_weights(CONFIG)))
    reads = []

    def counting(name, lazy):
        return LazyTensor(lazy.shape, lazy.dtype, lambda: reads.append(name) or lazy.read())

    model.tensors = {name: counting(name, lazy) for name, lazy in model.tensors.items()}
    save_hf(model, tmp_path / "b")
    assert sorted(reads) == sorted(model.tensors)


def test_heads_of_keys_and_values_make_groups_where_they_are_fewer():
    family = known_families()["llama"]
    for count, grouped in ((2, True), (4, False)):
        settings = family.load_settings({**CONFIG, "num_key_value_heads": count})
        assert (settings["num_query_groups"], settings["group_query_attention"]) == (count, grouped)


def test_linear_rope_scaling_is_exported_as_transformers_expects():
    family = known_families()["llama"]
    settings = complete(family.load_settings({**CONFIG, "rope_scaling": {"type": "linear", "factor": 4}}))
    factor = family.save_settings(settings)["rope_scaling"]["factor"]
    assert isinstance(factor, float) and factor == settings["rotary_seq_len_interpolation_factor"] == 4


def test_hidden_sizes_that_transformers_rejects_are_not_exported():
    transformers = pytest.importorskip("transformers")
    llama = known_families()["llama"].load_settings({**CONFIG, "head_dim": 16})
    settings = complete({**llama, "hidden_size": 66})
    names = []
    for name, family in known_families().items():
        try:
            if name in transformers.CONFIG_MAPPING and family.model_family == "gpt":
                transformers.CONFIG_MAPPING[name](hidden_size=66, num_attention_heads=4, head_dim=16)
        except Exception as error:  # the classes of configurations raise several kinds
            if "is not a multiple of the number of attention" in str(error):
                names.append(name)
                with pytest.raises(UserError, match=r"hidden_size is 66, the family has multiples of num_attention_he"):
                    family.save_settings(settings)
    assert "llama" in names


def test_reference_page_lists_every_family():
    page = (Path(__file__).parents[3] / "docs" / "reference" / "hugging_face_families.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([\w-]+)` \| (`.+?`) \| \S", page, re.MULTILINE))
    rows = {name: re.findall(r"\w+", classes) for name, classes in rows.items()}
    assert rows == {name: [family.architecture, *family.also_read] for name, family in known_families().items()}


def test_a_window_with_a_switch_needs_the_switch():
    window, config = Window(4096, switch=True), {"num_hidden_layers": 2, "sliding_window": 8}
    none = {"window_size": None, "window_attn_skip_freq": None}
    assert window.load(config) == window.load({**config, "use_sliding_window": False}) == none
    assert window.load({**config, "use_sliding_window": True})["window_size"] == (7, 0)


@pytest.mark.parametrize("scale, expected_scale", [(1.0, 1.0), (8**-0.5, None), (0.5, 0.5)])
def test_scale_of_scores_of_granite_is_unset_if_it_is_usual(scale, expected_scale):
    config = {"attention_multiplier": scale, "hidden_size": 32, "num_attention_heads": 4}
    assert FACTORS[0].load(config) == {"softmax_scale": expected_scale}


@pytest.mark.parametrize("groups, chosen, top_k, score", [(1, 1, 8, None), (4, 2, 4, None), (4, 2, 8, 2)])
def test_scores_of_groups_are_unset_if_they_are_usual(groups, chosen, top_k, score):
    config = {"n_group": groups, "topk_group": chosen, "num_experts_per_tok": top_k}
    assert expert_groups(2).load(config)["moe_router_group_score_topk"] == score
