"""Both formats of Megatron-LM's checkpoints, written here in its layout, against the model that they were cut from."""

import argparse
import io
import pickle
import shutil
from functools import partial

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron.core.config.errors import UserError
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.export.interchange import Interchange
from megatron.export.megatron_lm import (
    load_megatron_torch,
    load_megatron_torch_dist,
    save_megatron_torch_dist,
)
from megatron.export.megatron_lm.buckets import cut_buckets
from megatron.export.megatron_lm.model import checkpoint_objects
from megatron.export.megatron_lm.names import find_place
from megatron.export.megatron_lm.splits import join_ranks
from megatron.export.native import load_native
from megatron.export.unpickler import Record
from megatron.tools.checkpoint import convert
from megatron.tools.checkpoint.compare_logits import our_logits
from tests.test_utils.megatron_torch import (
    ARGS,
    GROUPS,
    HIDDEN,
    LAYER,
    LAYERS,
    MOMENTS,
    PADDED,
    SCHEDULE,
    SQUARES,
    VOCABULARY,
    WEIGHTS,
    WIDTH,
    write_torch,
)

FUSED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def ours(name, tensor, rows=VOCABULARY):
    """A global tensor as this project has it."""
    if "word_embeddings" in name or "output_layer" in name:
        return tensor[:rows]
    if "linear_qkv.weight" in name:
        return tensor.reshape(GROUPS, -1, HIDDEN)
    return tensor.reshape(2, -1, HIDDEN) if "linear_fc1.weight" in name else tensor


def expect(loaded, rows=VOCABULARY, optimizer=True):
    kinds = {"model": WEIGHTS}
    if optimizer:
        kinds |= {"optimizer.exp_avg": MOMENTS, "optimizer.exp_avg_sq": SQUARES}
    wanted = {f"{kind}.{name}": ours(name, item, rows) for kind, model in kinds.items() for name, item in model.items()}
    assert loaded.tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert loaded.tensors[name].shape == tuple(tensor.shape), name
        assert torch.equal(loaded.tensors[name].read(), tensor), name
    assert loaded.settings["vocab_size"] == rows and loaded.settings["num_query_groups"] == GROUPS
    assert loaded.objects["iteration"] == 7 and loaded.objects["train_state"]["consumed_train_samples"] == 28
    assert loaded.objects["scheduler"]["num_steps"] == 28 and loaded.objects["scheduler"]["init_lr"] == 0.0
    assert not optimizer or loaded.objects["optimizer"] == {"step": 7, "grad_scaler": {}}


@pytest.mark.parametrize(
    ("tp", "pp", "vpp", "distributed"), [(1, 1, 1, False), (2, 1, 1, False), (2, 2, 1, False), (1, 2, 2, False),
                                         (1, 1, 1, True), (2, 2, 1, True)],
)  # fmt: skip
def test_torch_format_of_any_layout_holds_the_full_model(tp, pp, vpp, distributed, tmp_path):
    write_torch(tmp_path, tp, pp, vpp, distributed)
    expect(load_megatron_torch(tmp_path))
    expect(load_megatron_torch(tmp_path, padded_vocabulary=True), rows=PADDED)


def test_names_before_megatron_core_are_read(tmp_path):
    old = {
        "embedding.": "language_model.embedding.", "decoder.": "language_model.encoder.",
        ".input_layernorm.": ".input_norm.",
        "self_attention.linear_qkv": "self_attention.query_key_value",
        "self_attention.linear_proj": "self_attention.dense",
        "mlp.linear_fc1": "mlp.dense_h_to_4h", "mlp.linear_fc2": "mlp.dense_4h_to_h", "final_layernorm": "final_norm",
        ".pre_mlp_layernorm.": ".post_attention_norm.", "output_layer.": "language_model.output_layer.",
    }  # fmt: skip

    def rename(name):
        for new, former in old.items():
            name = name.replace(new, former)
        return name

    write_torch(tmp_path, 2, 2, rename=rename)
    expect(load_megatron_torch(tmp_path))


def write_torch_dist(folder):
    """``torch_dist`` by torch.distributed.checkpoint: layers stacked, names as Transformer Engine has them."""
    tensors = {}
    states = {"": WEIGHTS, "optimizer.state.exp_avg.": MOMENTS, "optimizer.state.exp_avg_sq.": SQUARES}
    for prefix, model in states.items():
        tensors |= {prefix + name: item for name, item in model.items() if not name.startswith("decoder.layers.")}
        for name in LAYER:
            layers = torch.stack([model[f"decoder.layers.{i}.{name}"] for i in range(LAYERS)])
            tensors[f"{prefix}decoder.layers.{FUSED.get(name, name)}"] = layers
    directory = folder / "iter_0000007"
    dcp.save(tensors, storage_writer=FileSystemWriter(directory), no_dist=True)
    common = {"args": argparse.Namespace(**ARGS), "checkpoint_version": 3.0, "iteration": 7,
              "opt_param_scheduler": SCHEDULE,
              "optimizer": {"state": {"common_step": torch.tensor(7.0)}, "param_groups": []}}  # fmt: skip
    torch.save(common, directory / "common.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_torch_dist(tmp_path_factory.mktemp("dist"))


def test_torch_dist_holds_the_full_model(written):
    expect(load_megatron_torch_dist(written))
    expect(load_megatron_torch_dist(written, 7))
    expect(load_megatron_torch_dist(written / "iter_0000007"))


def test_torch_dist_round_trip_stacks_layers(written, tmp_path):
    save_megatron_torch_dist(load_megatron_torch_dist(written, padded_vocabulary=True), tmp_path)
    expect(load_megatron_torch_dist(tmp_path, padded_vocabulary=True), rows=PADDED)
    with open(tmp_path / "iter_0000007" / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    assert metadata.state_dict_metadata["decoder.layers.mlp.linear_fc1.weight"].size == (LAYERS, 2 * WIDTH, HIDDEN)
    assert "decoder.layers.mlp.linear_fc1.layer_norm_weight" in metadata.state_dict_metadata
    for module in ("mlp.linear_fc1", "mlp.linear_fc2", "self_attention.core_attention", "self_attention.linear_proj"):
        states = {f"decoder.layers.{module}._extra_state/shard_{layer}_{LAYERS}" for layer in range(LAYERS)}
        assert {name for name in metadata.state_dict_metadata if f"{module}._extra_state" in name} == states
        place = metadata.storage_data[MetadataIndex(f"decoder.layers.{module}._extra_state/shard_0_{LAYERS}")]
        data = (tmp_path / "iter_0000007" / place.relative_path).read_bytes()[place.offset :][: place.length]
        assert torch.load(io.BytesIO(data)) == [None]
    groups = torch.load(tmp_path / "iter_0000007/common.pt", weights_only=False)["optimizer"]["param_groups"]
    item = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "default_config": True, "lr": 0.1,
            "max_lr": 0.1, "min_lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "step": 7}  # fmt: skip
    assert groups == [{**item, "wd_mult": mult, "weight_decay": 0.0} for mult in (1.0, 0.0)]
    stored = metadata.state_dict_metadata
    plain = {name: torch.empty(entry.size) for name, entry in stored.items() if hasattr(entry, "size")}
    dcp.load(plain, checkpoint_id=tmp_path / "iter_0000007", no_dist=True)
    assert torch.equal(plain["output_layer.weight"], WEIGHTS["output_layer.weight"])
    with pytest.raises(CheckpointError, match="exists already"):
        save_megatron_torch_dist(load_megatron_torch_dist(written), tmp_path)


def test_a_vocabulary_is_padded_and_layers_that_differ_keep_their_numbers(tmp_path):
    experts = {"decoder.layers.1.mlp.router.weight": (2, HIDDEN),
               "decoder.layers.1.pre_mlp_layernorm.weight": (HIDDEN,),
               "decoder.layers.1.mlp.experts.linear_fc1.weight": (2, 2, WIDTH, HIDDEN),
               "decoder.layers.1.mlp.experts.linear_fc2.weight": (2, HIDDEN, WIDTH)}  # fmt: skip
    dense = {"decoder.layers.0.mlp.linear_fc1.weight": (2, WIDTH, HIDDEN),
             "decoder.layers.0.pre_mlp_layernorm.weight": (HIDDEN,)}  # fmt: skip
    shapes = {"embedding.word_embeddings.weight": (VOCABULARY, HIDDEN), **dense, **experts}
    model = {f"model.{name}": LazyTensor.of(torch.randn(shape)) for name, shape in shapes.items()}
    settings = {**ARGS, "num_layers": 2, "num_moe_experts": 2, "untie_embeddings_and_output_weights": False}
    save_megatron_torch_dist(Interchange(settings, model), tmp_path)
    with open(tmp_path / "release" / ".metadata", "rb") as file:
        names = pickle.load(file).state_dict_metadata
    assert names["embedding.word_embeddings.weight"].size == (PADDED, HIDDEN)
    assert names["decoder.layers.1.mlp.experts.experts.linear_fc1.weight"].size == (2, 2 * WIDTH, HIDDEN)
    assert "decoder.layers.1.pre_mlp_layernorm.weight" in names
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in names
    loaded = load_megatron_torch_dist(tmp_path)
    assert loaded.tensors.keys() == model.keys()
    for name, tensor in model.items():
        assert torch.equal(loaded.tensors[name].read(), tensor.read()), name
    common = torch.load(tmp_path / "release" / "common.pt", weights_only=False)
    assert common["num_floating_point_operations_so_far"] == common["iteration"] == 0
    del settings["make_vocab_size_divisible_by"]
    save_megatron_torch_dist(Interchange(settings, model), tmp_path / "usual")
    with open(tmp_path / "usual" / "release" / ".metadata", "rb") as file:
        assert pickle.load(file).state_dict_metadata["embedding.word_embeddings.weight"].size == (128, HIDDEN)


@pytest.mark.parametrize(("flags", "kept"), [
    ({"fp16": True}, True), ({"fp16": True, "loss_scale": 64.0}, False), ({"bf16": True}, False), ({}, False),
])  # fmt: skip
def test_a_loss_scale_that_moves_comes_over(flags, kept):
    scaler = {"scale": 0.5, "growth_tracker": LazyTensor.of(torch.tensor([3])), "hysteresis_tracker": 2}
    state = {"args": Record("Namespace", (), {}), "optimizer": [{"grad_scaler": scaler}]}
    objects = checkpoint_objects(state, flags, True)
    expected = {"scale": 0.5, "growth_tracker": 3, "hysteresis_tracker": 2} if kept else {}
    assert objects["optimizer"] == {"step": 0, "grad_scaler": expected}
    assert objects["iteration"] == objects["train_state"]["iteration"] == 0


def test_tensor_parallel_dims_of_megatron_lm_names():
    """Readers of the residual stream are split by columns, writers by rows; latents and norms are replicated."""
    attention, mlp = "decoder.layers.0.self_attention", "decoder.layers.0.mlp"
    dims = {
        **dict.fromkeys((f"{attention}.linear_{name}" for name in ("qkv", "q_proj", "q_up_proj", "kv_up_proj")), 0),
        **dict.fromkeys((f"{attention}.linear_{name}" for name in ("q_down_proj", "kv_down_proj")), None),
        f"{attention}.linear_proj": 1, f"{mlp}.linear_fc1": 0, f"{mlp}.linear_fc2": 1, f"{mlp}.router": None,
        f"{mlp}.experts.experts.linear_fc1": 0, f"{mlp}.experts.experts.linear_fc2": 1,
        f"{mlp}.shared_experts.linear_fc1": 0, f"{mlp}.shared_experts.linear_fc2": 1,
        "embedding.word_embeddings": 0, "embedding.position_embeddings": None, "output_layer": 0,
        "decoder.layers.0.input_layernorm": None, f"{attention}.q_layernorm": None, "mtp.layers.0.eh_proj": 0,
    }  # fmt: skip
    assert {name: find_place(f"{name}.weight").row.dim for name in dims} == dims
    assert find_place(f"{attention}.core_attention.softmax_offset").row.dim == 0
    assert [find_place(f"{mlp}.linear_fc{n}.bias").row.dim for n in (1, 2)] == [0, None]


# ---- bad input


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda f: shutil.rmtree(f / "iter_0000007/mp_rank_01"), "mp_rank_01/model_optim_rng.pt: is missing"),
        (lambda f: (f / "latest_checkpointed_iteration.txt").write_text("8"), "iter_0000008: holds no"),
        (lambda f: (f / "latest_checkpointed_iteration.txt").write_text("x/../y"), "instead of an iteration"),
        (lambda f: (f / "latest_checkpointed_iteration.txt").unlink(), "no checkpoint of this format"),
        (lambda f: cut(f / "iter_0000007/mp_rank_00/model_optim_rng.pt"), "not a complete file of torch.save"),
    ],
)
def test_a_damaged_torch_folder_is_one_message(harm, message, tmp_path):
    write_torch(tmp_path, tp=2)
    harm(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        load_megatron_torch(tmp_path)


@pytest.mark.parametrize("name", ["embedding.word_embeddings.weight", "decoder.layers.3.mlp.linear_fc2.weight"])
@pytest.mark.parametrize("values", [WEIGHTS, SQUARES])
def test_a_flipped_bit_in_the_values_of_a_tensor_is_found(name, values, written, tmp_path):
    write_torch(tmp_path / "torch")
    shutil.copytree(written, tmp_path / "dist")
    for file, load in (
        ("torch/iter_0000007/mp_rank_00/model_optim_rng.pt", load_megatron_torch),
        ("dist/iter_0000007/__0_0.distcp", load_megatron_torch_dist),
    ):
        path = tmp_path / file
        data = bytearray(path.read_bytes())
        place = data.index(values[name].numpy().tobytes()) + 7
        data[place] ^= 64  # of an exponent: -0.05 becomes -1.8e37
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=f"{path.name}: damaged: its record .*CRC-32"):
            expect(load(path.parents[2] if "mp_rank" in file else path.parents[1]))


def cut(path):
    path.write_bytes(path.read_bytes()[:-50])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint_version": 1.0}, "before 2.0"),
        ({"args": None}, "arguments of its run"),
        ({"model": {"decoder.layers.0.mlp.surprise.weight": torch.ones(2)}, "optimizer": None}, "surprise"),
        ({"model": {"embedding.word_embeddings.weight": torch.ones(64, 16)}}, "holds layers|parameters"),
        ({"opt_param_scheduler": {"max_lr": 1.0}}, "scheduler lacks"),
    ],
)
def test_a_torch_folder_of_another_model_is_one_message(changes, message, tmp_path):
    write_torch(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_megatron_torch(tmp_path)


def list_a_piece_twice(folder):
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    entry = metadata.state_dict_metadata["embedding.word_embeddings.weight"]
    entry.chunks.append(entry.chunks[0])
    path.write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (list_a_piece_twice, r"the piece of embedding.word_embeddings.weight at \(0, 0\) is listed twice"),
        (lambda d: (d / ".metadata").unlink(), "being written"),
        (lambda d: (d / ".metadata").write_bytes(pickle.dumps(cut)), "not metadata|damaged"),
        (lambda d: (d / ".metadata").write_bytes(b"cos\nsystem\n(S'true'\ntR."), "the pickle is rejected"),
        (lambda d: (d / "common.pt").unlink(), "common.pt: is missing"),
        (lambda d: next(d.glob("*.distcp")).unlink(), "distcp: is missing"),
        (lambda d: cut(next(d.glob("*.distcp"))), "ends beyond"),
    ],
)
def test_a_damaged_torch_dist_folder_is_one_message(harm, message, written, tmp_path):
    shutil.copytree(written, tmp_path / "copy")
    harm(tmp_path / "copy" / "iter_0000007")
    with pytest.raises(CheckpointError, match=message):
        load_megatron_torch_dist(tmp_path / "copy")


EVIL = (2**62, -1, 0, "x", [1], {}, float("nan"), 10**400)


def with_common(written, folder, change):
    """A copy of the checkpoint ``written`` with a changed common.pt."""
    path = shutil.copytree(written, folder / "copy") / "iter_0000007" / "common.pt"
    common = torch.load(path, weights_only=False)
    change(common)
    torch.save(common, path)
    return folder / "copy"


@pytest.mark.parametrize("name", ["num_layers", "hidden_size", "num_attention_heads", "num_query_groups",
                                  "ffn_hidden_size", "padded_vocab_size"])  # fmt: skip
def test_crafted_sizes_are_one_message(name, written, tmp_path):
    def change(common, value):
        setattr(common["args"], name, value)

    for index, value in enumerate(EVIL):
        folder = with_common(written, tmp_path / str(index), partial(change, value=value))
        with pytest.raises(CheckpointError, match=rf"args.{name} .*: must be an integer from 1 to \d+; the"):
            load_megatron_torch_dist(folder)


@pytest.mark.parametrize("value", [value for value in EVIL if value != 0])
def test_a_crafted_count_of_operations_is_one_message(value, written, tmp_path):
    name = "num_floating_point_operations_so_far"
    folder = with_common(written, tmp_path, lambda common: common.update({name: value}))
    if value in (2**62, {}):  # a large count, and nothing
        assert load_megatron_torch_dist(folder).objects["train_state"]["floating_point_operations"] == (value or 0.0)
        return
    with pytest.raises(CheckpointError, match=f"{name} is .*, expected a count"):
        load_megatron_torch_dist(folder)


def test_a_crafted_decay_is_one_message(written, tmp_path):
    def change(common):
        common["args"].lr_wsd_decay_iters = 5

    with pytest.raises(CheckpointError, match="global_batch_size is None, expected a count"):
        load_megatron_torch_dist(with_common(written, tmp_path, change))


def test_a_piece_larger_than_its_file_says_both_sizes(written, tmp_path):
    path = shutil.copytree(written, tmp_path / "copy") / "iter_0000007" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    name = "output_layer.weight"
    for index, place in metadata.storage_data.items():
        if index.fqn == name:
            place.length = 100
    path.write_bytes(pickle.dumps(metadata))
    size = PADDED * HIDDEN * 4
    with pytest.raises(CheckpointError, match=rf"{name}: the part at \[0, 0\] needs {size} bytes, its file has 100;"):
        load_megatron_torch_dist(tmp_path / "copy")


def test_gpt_checkpoint_becomes_a_hybrid_model_with_the_same_logits_and_optimizer_state(written, tmp_path):
    line = ["--load-dir", str(written), "--saver", "native", "--no-checking"]
    pattern = ["--hybrid-layer-pattern", "*-" * LAYERS]
    assert convert.main([*line, "--save-dir", str(tmp_path / "gpt")]) == 0
    assert convert.main([*line, "--save-dir", str(tmp_path / "hybrid"), *pattern]) == 0
    gpt, hybrid = (load_native(tmp_path / name / "iter_0000007") for name in ("gpt", "hybrid"))
    assert hybrid.settings["hybrid_layer_pattern"] == pattern[1] and hybrid.settings["num_layers"] == 2 * LAYERS
    names = ("model.decoder.layers.{}.mlp.linear_fc2.weight",
             "optimizer.exp_avg_sq.decoder.layers.{}.mlp.linear_fc1.weight",
             "optimizer.exp_avg.decoder.layers.{}.pre_mlp_layernorm.weight")  # fmt: skip
    for layer in range(LAYERS):
        for name in names:
            one, other = gpt.tensors[name.format(layer)], hybrid.tensors[name.format(2 * layer + 1)]
            assert torch.equal(one.read(), other.read())
    tokens = torch.arange(12).reshape(1, -1)
    logits = [our_logits(model, convert.completed(model, [], "native", "here"), tokens) for model in (gpt, hybrid)]
    assert torch.equal(*logits)


@pytest.mark.parametrize("pattern", ["*-", "*-*-*-M-", "*-*-*-*-M", "**--*-*"])
def test_pattern_of_other_layers_is_rejected(pattern, written, tmp_path):
    line = ["--load-dir", str(written), "--saver", "native", "--save-dir", str(tmp_path / "hybrid")]
    with pytest.raises(UserError, match="needs 4 \\* and 4 - or E for 4 layers"):
        convert.main([*line, "--hybrid-layer-pattern", pattern])
    assert not (tmp_path / "hybrid").exists()


def test_a_tied_embedding_that_was_joined_to_other_parameters_has_no_padding_before_it():
    """Parameters fill a bucket from the last one to the first."""
    order = [("embedding.word_embeddings.weight", (5, 2)), ("decoder.final_layernorm.weight", (3,))]
    parts = cut_buckets(order, {"param": [LazyTensor.of(torch.arange(13.0))]}, "file")["param"]
    assert parts["decoder.final_layernorm.weight"].read().tolist() == [0, 1, 2]
    assert parts["embedding.word_embeddings.weight"].read().flatten().tolist() == list(range(3, 13))
    padded = cut_buckets(order, {"param": [LazyTensor.of(torch.arange(74.0))]}, "file")["param"]
    assert padded["embedding.word_embeddings.weight"].read().flatten().tolist() == list(range(64, 74))


def test_shards_of_different_dtypes_are_not_joined():
    name = "decoder.layers.0.self_attention.linear_proj.weight"
    ranks = {(0, rank): {name: LazyTensor.of(torch.ones(2, 2, dtype=dtype))}
             for rank, dtype in enumerate((torch.float32, torch.bfloat16))}  # fmt: skip
    with pytest.raises(CheckpointError, match="expected equal ones"):
        join_ranks(ranks, 2, {}, "file")
