"""Megatron-LM's checkpoints of BERT and T5, written here piece by piece in its layouts."""

import argparse
import pickle
import re

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.export.megatron_lm import load_megatron_torch, load_megatron_torch_dist, save_megatron_torch_dist
from tests.test_utils.hf_folders import random_model
from tests.test_utils.megatron_torch import SCHEDULE

HIDDEN, HEADS, LAYERS, DECODER_LAYERS, VOCABULARY, PADDED, LENGTH = 16, 4, 2, 3, 50, 64, 24
ARGS = {
    "num_layers": LAYERS, "encoder_num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS,
    "ffn_hidden_size": 24, "max_position_embeddings": LENGTH, "seq_length": LENGTH, "vocab_size": VOCABULARY,
    "padded_vocab_size": PADDED, "make_vocab_size_divisible_by": 64, "untie_embeddings_and_output_weights": False,
    "bert_binary_head": True, "decoder_seq_length": 12, "consumed_train_samples": 28, "lr": 0.1, "kv_channels": 4,
    "group_query_attention": False, "num_query_groups": 1, "position_embedding_type": "rope", "decoder_num_layers": 9,
}  # fmt: skip


def linear(name, rows, columns=HIDDEN):
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def norm(name):
    return {f"{name}.weight": (HIDDEN,), f"{name}.bias": (HIDDEN,)}


def layer(name, cross=False):
    shapes = {**norm("input_layernorm"), **linear("self_attention.linear_proj", HIDDEN),
              **linear("self_attention.linear_qkv", 3 * HIDDEN)}  # fmt: skip
    if cross:
        shapes |= {**norm("pre_cross_attn_layernorm"), **linear("cross_attention.linear_proj", HIDDEN),
                   **linear("cross_attention.linear_q", HIDDEN),
                   **linear("cross_attention.linear_kv", 2 * HIDDEN)}  # fmt: skip
    shapes |= {**norm("pre_mlp_layernorm"), **linear("mlp.linear_fc1", 24), **linear("mlp.linear_fc2", HIDDEN, 24)}
    return {f"{name}.{key}": shape for key, shape in shapes.items()}


def stack(name, count, cross=False):
    shapes = {key: shape for i in range(count) for key, shape in layer(f"{name}.layers.{i}", cross).items()}
    return {**shapes, **norm(f"{name}.final_layernorm")}


WORDS = {"embedding.word_embeddings.weight": (PADDED, HIDDEN), "embedding.position_embeddings.weight": (LENGTH, HIDDEN)}
MODELS = {
    "bert": {
        **WORDS, "embedding.tokentype_embeddings.weight": (2, HIDDEN), **stack("encoder", LAYERS),
        **linear("lm_head.dense", HIDDEN), **norm("lm_head.layer_norm"), "output_layer.bias": (PADDED,),
        **linear("binary_head", 2), **linear("pooler.dense", HIDDEN),
    },
    "t5": {
        **WORDS, **stack("encoder", LAYERS), **stack("decoder", DECODER_LAYERS, cross=True),
        "lm_head.output_layer.bias": (PADDED,),
    },
}  # fmt: skip
MODELS["t5 relative"] = {
    name: shape for name, shape in {
        "embedding.word_embeddings.weight": (PADDED, HIDDEN),
        **{f"{each}_relative_pos_emb.relative_attention_bias.weight": (32, HEADS) for each in ("encoder", "decoder")},
        **MODELS["t5"], "lm_head.output_layer.weight": (PADDED, HIDDEN),
    }.items() if name not in ("embedding.position_embeddings.weight", "lm_head.output_layer.bias")
}  # fmt: skip


def weights_of(kind, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in MODELS[kind].items()}


def args_of(kind, **more):
    relative = {"position_embedding_type": "relative", "untie_embeddings_and_output_weights": True}
    positions = relative if "relative" in kind else {"position_embedding_type": "learned_absolute"}
    return argparse.Namespace(**{**ARGS, **({} if kind == "bert" else positions), **more})


def expect(kind, loaded):
    """Assert that every tensor has the local shape, without vocabulary padding, and that moments match the weights."""
    for prefix, seed in (("model.", 0), ("optimizer.exp_avg.", 1), ("optimizer.exp_avg_sq.", 2)):
        for name, tensor in weights_of(kind, seed).items():
            result = loaded.tensors.pop(prefix + name).read()
            if "word_embeddings" in name or "output_layer" in name:
                tensor = tensor[:VOCABULARY]
            elif "linear_qkv" in name or "linear_kv" in name:  # of each head, one after the other
                tensor = tensor.reshape(HEADS, -1, *tensor.shape[1:])
            assert torch.equal(result, tensor), prefix + name
    assert not loaded.tensors
    assert loaded.settings["model_family"] == kind.split()[0] and loaded.settings["vocab_size"] == VOCABULARY
    if kind == "bert":
        assert loaded.settings["position_embedding_type"] == "learned_absolute" and loaded.settings["bert_binary_head"]
    else:
        assert loaded.settings["decoder_num_layers"] == DECODER_LAYERS


def second_names(kind, named):
    """Return the tensors that T5 stores under a second name."""
    if kind == "bert":
        return {}
    places = {"embedding.position_embeddings.": "position_embeddings.", "lm_head.output_layer.": "output_layer."}
    return {name.replace(a, b): named[name] for a, b in places.items() for name in named if name.startswith(a)}


# ---- torch


ROWS = re.compile(r"linear_(proj|fc2)\.weight")
COLUMNS = re.compile(r"(linear_(qkv|q|kv|fc1)|word_embeddings|output_layer)\.(weight|bias)")


def part(name, tensor, rank, tp):
    dim = 1 if ROWS.search(name) else 0 if COLUMNS.search(name) else None
    return tensor if dim is None else tensor.chunk(tp, dim)[rank].clone()


def old_name(name):
    """Before Megatron Core."""
    changes = [
        ("lm_head.output_layer.bias", "lm_head.bias"), ("lm_head.layer_norm", "lm_head.layernorm"),
        ("linear_qkv", "query_key_value"), ("self_attention.linear_proj", "self_attention.dense"),
        ("linear_fc1", "dense_h_to_4h"), ("linear_fc2", "dense_4h_to_h"), ("linear_proj", "dense"),
        ("linear_q.", "query."), ("linear_kv.", "key_value."), ("cross_attention", "inter_attention"),
    ]  # fmt: skip
    if name.startswith("decoder."):
        changes += [("pre_mlp_layernorm", "post_inter_attention_layernorm")]
    changes += [(f"pre_{each}_layernorm", "post_attention_layernorm") for each in ("mlp", "cross_attn")]
    for new, former in changes:
        name = name.replace(new, former)
    name = "lm_head.bias" if name == "output_layer.bias" else name
    inside = ("embedding.", "encoder.", "decoder.", "pooler.")
    return f"language_model.{name}" if name.startswith(inside) else name


def write_torch(folder, kind, tp, rename=lambda name: name):
    for rank in range(tp):
        parts = [{n: part(n, t, rank, tp) for n, t in weights_of(kind, seed).items()} for seed in range(3)]
        groups = [[n for n, t in parts[0].items() if (t.ndim > 1 and not n.endswith("bias")) == decays]
                  for decays in (True, False)]  # fmt: skip
        numbered = [name for group in groups for name in group]
        state = {
            "args": args_of(kind, tensor_model_parallel_size=tp), "checkpoint_version": 3.0, "iteration": 7,
            "opt_param_scheduler": SCHEDULE,
            "model": {rename(name): tensor for name, tensor in {**parts[0], **second_names(kind, parts[0])}.items()},
            "optimizer": {
                "state": {i: {"exp_avg": parts[1][n], "exp_avg_sq": parts[2][n]} for i, n in enumerate(numbered)},
                "param_groups": [{"wd_mult": mult, "params": [numbered.index(name) for name in group]}
                                 for mult, group in zip((1.0, 0.0), groups)],
            },
        }  # fmt: skip
        path = folder / "iter_0000007" / f"mp_rank_{rank:02d}"
        path.mkdir(parents=True)
        torch.save(state, path / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("7")


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", MODELS)
def test_torch_format_holds_the_full_model(kind, tp, tmp_path):
    write_torch(tmp_path, kind, tp)
    expect(kind, load_megatron_torch(tmp_path))


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_names_before_megatron_core_are_read(kind, tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "second_names", lambda kind, named: {})
    write_torch(tmp_path, kind, 2, old_name)
    expect(kind, load_megatron_torch(tmp_path))


# ---- torch_dist


def stacked(kind, seed):
    """Layers under one name, norms within the linears that follow them."""
    named, result = weights_of(kind, seed), {}
    for name, tensor in named.items():
        match = re.fullmatch(r"(..coder\.layers)\.(\d+)\.(.*)", name)
        if match is None:
            result[name] = tensor
            continue
        inside = match[3].replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        inside = inside.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        result.setdefault(f"{match[1]}.{inside}", []).append(tensor)
    result = {name: torch.stack(each) if isinstance(each, list) else each for name, each in result.items()}
    second = second_names(kind, result)
    if not seed:
        return {**result, **second}
    # the optimizer state of these tensors has only the second name
    return {name: each for name, each in result.items() if not any(each is other for other in second.values())} | second


def write_torch_dist(folder, kind):
    prefixes = ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.")
    tensors = {
        prefix + name: each for seed, prefix in enumerate(prefixes) for name, each in stacked(kind, seed).items()
    }  # fmt: skip
    directory = folder / "iter_0000007"
    dcp.save(tensors, storage_writer=FileSystemWriter(directory), no_dist=True)
    common = {"args": args_of(kind), "checkpoint_version": 3.0, "iteration": 7, "opt_param_scheduler": SCHEDULE,
              "optimizer": {"param_groups": [{"step": 7}]}}  # fmt: skip
    torch.save(common, directory / "common.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return tensors


@pytest.mark.parametrize("kind", MODELS)
def test_torch_dist_holds_the_full_model_and_round_trips(kind, tmp_path):
    tensors = write_torch_dist(tmp_path / "theirs", kind)
    expect(kind, load_megatron_torch_dist(tmp_path / "theirs"))
    save_megatron_torch_dist(load_megatron_torch_dist(tmp_path / "theirs", padded_vocabulary=True), tmp_path / "ours")
    with open(tmp_path / "ours" / "iter_0000007" / ".metadata", "rb") as file:
        stored = pickle.load(file).state_dict_metadata
    assert {name for name, entry in stored.items() if hasattr(entry, "size")} == tensors.keys()
    result = {name: torch.empty(stored[name].size) for name in tensors}
    dcp.load(result, checkpoint_id=tmp_path / "ours" / "iter_0000007", no_dist=True)
    assert all(torch.equal(result[name], tensor) for name, tensor in tensors.items())
    modules = {name.partition("._extra_state")[0] for name in stored if "_extra_state" in name}
    assert ("decoder.layers.cross_attention.linear_kv" in modules) == ("t5" in kind)
    assert "encoder.layers.self_attention.core_attention" in modules


@pytest.mark.parametrize("kind", MODELS)
def test_unpadded_vocabulary_is_padded_as_in_megatron_lm(kind, tmp_path):
    tensors = write_torch_dist(tmp_path / "theirs", kind)
    save_megatron_torch_dist(load_megatron_torch_dist(tmp_path / "theirs"), tmp_path / "ours")
    with open(tmp_path / "ours" / "iter_0000007" / ".metadata", "rb") as file:
        stored = pickle.load(file).state_dict_metadata
    assert all(stored[name].size == tensor.shape for name, tensor in tensors.items())
    expect(kind, load_megatron_torch_dist(tmp_path / "ours"))


def test_model_of_flags_equals_a_megatron_lm_encoder(tmp_path):
    """Names and shapes equal the training model's."""
    sizes = "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --ffn-hidden-size 24 --max-position-embeddings 24"
    for kind, flags in (("bert", ""), ("t5", "--decoder-num-layers 3 --decoder-seq-length 12"), (
        "t5 relative", "--decoder-num-layers 3 --decoder-seq-length 12 --position-embedding-type relative"
        " --untie-embeddings-and-output-weights"
    )):  # fmt: skip
        write_torch_dist(tmp_path / kind, kind)
        native = random_model(f"{sizes} --seq-length 24 {flags}".split(), VOCABULARY, model_family=kind.split()[0])
        loaded = load_megatron_torch_dist(tmp_path / kind)
        shapes = {name: tensor.shape for name, tensor in loaded.tensors.items() if name.startswith("model.")}
        assert shapes == {name: tensor.shape for name, tensor in native.tensors.items()}


def test_an_encoder_without_a_layer_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setitem(ARGS, "num_layers", 3)
    write_torch_dist(tmp_path, "bert")
    with pytest.raises(CheckpointError, match=r"holds layers \[0, 1\], its arguments say 3"):
        load_megatron_torch_dist(tmp_path)
