"""Hybrid models in both formats of Megatron-LM, written here by hand: sections of projections, tensor-parallel ranks,
layers of one branch, prediction depths."""

import argparse
import pickle

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.export.megatron_lm import load_megatron_torch, load_megatron_torch_dist, save_megatron_torch_dist
from megatron.tools.checkpoint import convert
from tests.test_utils.megatron_torch import ARGS, SCHEDULE

HIDDEN, WIDTH, GROUPS, HEADS, CHANNELS, STATE = 16, 12, 2, 4, 3, 5
KEY_HEADS, VALUE_HEADS, KEY, VALUE = 2, 4, 6, 7
PATTERN = "MG*-/M*"
SETTINGS = {
    **ARGS, "num_layers": 4, "hybrid_layer_pattern": PATTERN, "mtp_num_layers": 1, "mamba_state_dim": STATE,
    "mamba_head_dim": CHANNELS, "mamba_num_groups": GROUPS, "mamba_num_heads": HEADS, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": KEY, "linear_value_head_dim": VALUE, "linear_num_key_heads": KEY_HEADS,
    "linear_num_value_heads": VALUE_HEADS, "position_embedding_type": "none", "is_hybrid_model": True,
}  # fmt: skip
INNER = HEADS * CHANNELS
Z_X_B_C_DT = {"z": INNER, "x": INNER, "B": GROUPS * STATE, "C": GROUPS * STATE, "dt": HEADS}
DELTA = {"query": KEY_HEADS * KEY, "key": KEY_HEADS * KEY, "value": VALUE_HEADS * VALUE, "z": VALUE_HEADS * VALUE,
         "beta": VALUE_HEADS, "alpha": VALUE_HEADS}  # fmt: skip


def sections(name, sizes, *rest):
    return {f"{name}.{section}": (size, *rest) for section, size in sizes.items()}


def first(sizes, start, stop):
    return dict(list(sizes.items())[start:stop])


MAMBA = {
    "mixer.dt_bias": (HEADS,), "mixer.A_log": (HEADS,), "mixer.D": (HEADS,), "mixer.norm.weight": (INNER,),
    **sections("mixer.conv1d.weight", first(Z_X_B_C_DT, 1, 4), 1, 4),
    **sections("mixer.conv1d.bias", first(Z_X_B_C_DT, 1, 4)),
    **sections("mixer.in_proj.weight", Z_X_B_C_DT, HIDDEN), "mixer.in_proj.layer_norm_weight": (HIDDEN,),
    "mixer.out_proj.weight": (HIDDEN, INNER),
}  # fmt: skip
LAYERS = {
    "M": MAMBA,
    "G": {
        "self_attention.dt_bias": (VALUE_HEADS,), "self_attention.A_log": (VALUE_HEADS,),
        "self_attention.out_norm.weight": (VALUE,),
        **sections("self_attention.conv1d.weight", first(DELTA, 0, 3), 1, 4),
        **sections("self_attention.in_proj.weight", DELTA, HIDDEN),
        "self_attention.in_proj.layer_norm_weight": (HIDDEN,),
        "self_attention.out_proj.weight": (HIDDEN, VALUE_HEADS * VALUE),
    },
    "*": {"self_attention.linear_qkv.layer_norm_weight": (HIDDEN,), "self_attention.linear_qkv.weight": (32, HIDDEN),
          "self_attention.linear_proj.weight": (HIDDEN, HIDDEN)},
    "-": {"mlp.linear_fc1.layer_norm_weight": (HIDDEN,), "mlp.linear_fc1.weight": (2 * WIDTH, HIDDEN),
          "mlp.linear_fc2.weight": (HIDDEN, WIDTH)},
}  # fmt: skip


def global_model(seed):
    """Tensors by their names in ``torch_dist``."""
    generator = torch.Generator().manual_seed(seed)
    layers, depth = PATTERN.split("/")
    shapes = {"embedding.word_embeddings.weight": (64, HIDDEN)}
    for prefix, pattern in (("decoder.layers.", layers), ("mtp.layers.0.mtp_model_layer.layers.", depth)):
        shapes |= {
            f"{prefix}{index}.{name}": shape
            for index, symbol in enumerate(pattern) for name, shape in LAYERS[symbol].items()
        }  # fmt: skip
    shapes |= {f"mtp.layers.0.{name}.weight": (HIDDEN,) for name in ("enorm", "hnorm", "final_layernorm")}
    shapes |= {"mtp.layers.0.eh_proj.weight": (HIDDEN, 2 * HIDDEN)}
    shapes |= {"decoder.final_norm.weight": (HIDDEN,), "output_layer.weight": (64, HIDDEN)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


WEIGHTS, MOMENTS, SQUARES = (global_model(seed) for seed in range(3))
STATE_KINDS = {"model": WEIGHTS, "optimizer.exp_avg": MOMENTS, "optimizer.exp_avg_sq": SQUARES}


def stem(name):
    """Return the name of a section's tensor; of other tensors, their name."""
    inside, _, section = name.rpartition(".")
    return inside if inside.endswith(("in_proj.weight", "conv1d.weight", "conv1d.bias")) else name


def blocks(parts, count):
    """Interleave sections: the rows of block 0 of each section, then of block 1 …"""
    rows = [torch.cat([part.chunk(count)[block] for part in parts]) for block in range(count)]
    return torch.stack(rows)


def local_tensors(model):
    """Return the tensors of ``model`` with local names and shapes."""
    result = {}
    for name in dict.fromkeys(map(stem, model)):
        parts = [tensor for key, tensor in model.items() if stem(key) == name]
        tensor = blocks(parts, GROUPS if ".mixer." in name else KEY_HEADS) if name not in model else parts[0]
        layer = name.rpartition("self_attention.")[0] or name.rpartition("mixer.")[0] or name.rpartition("mlp.")[0]
        if "layer_norm_weight" in name:
            norm = {"M": "norm", "G": "input_layernorm", "-": "pre_mlp_layernorm"}
            name = layer + norm["M" if ".mixer." in name else "-" if ".mlp." in name else "G"] + ".weight"
        name = name.replace("out_norm", "norm").replace("final_norm", "final_layernorm")
        if "embedding" in name or "output_layer" in name:
            tensor = tensor[:50]
        elif "linear_qkv.weight" in name or "linear_fc1.weight" in name:
            tensor = tensor.unflatten(0, (2, -1))
        result[name] = tensor
    return result


def expect(loaded):
    expected = {f"{kind}.{name}": tensor for kind, model in STATE_KINDS.items()
                for name, tensor in local_tensors(model).items()}  # fmt: skip
    assert loaded.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert loaded.tensors[name].shape == tuple(tensor.shape), name
        assert torch.equal(loaded.tensors[name].read(), tensor), name
    assert loaded.settings["hybrid_layer_pattern"] == PATTERN


def write_torch_dist(folder, args=SETTINGS, leave_out=(), changed=()):
    tensors = {f"{kind.replace('optimizer.', 'optimizer.state.')}.{name}".removeprefix("model."): tensor
               for kind, model in STATE_KINDS.items() for name, tensor in (model | dict(changed)).items()
               if name not in leave_out}  # fmt: skip
    dcp.save(tensors, storage_writer=FileSystemWriter(folder / "iter_0000007"), no_dist=True)
    common = {"args": argparse.Namespace(**args), "checkpoint_version": 3.0, "iteration": 7,
              "opt_param_scheduler": SCHEDULE,
              "optimizer": {"state": {"common_step": torch.tensor(7.0)}, "param_groups": []}}  # fmt: skip
    torch.save(common, folder / "iter_0000007" / "common.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return tensors


def shard(name, model, rank, tp):
    """Return the part of a rank: its shards of all sections."""
    parts = [tensor for key, tensor in model.items() if stem(key) == name]
    if "linear_fc1.weight" in name:
        parts = parts[0].chunk(2)
    if name.endswith(("layer_norm_weight", "layernorm.weight", "final_norm.weight", "out_norm.weight", "enorm.weight",
                      "hnorm.weight")):  # fmt: skip
        return parts[0]
    dim = 1 if name.endswith(("out_proj.weight", "linear_proj.weight", "linear_fc2.weight")) else 0
    return torch.cat([part.chunk(tp, dim)[rank] for part in parts], dim)


def write_torch(folder, tp, pp):
    names = list(dict.fromkeys(map(stem, WEIGHTS)))
    for stage in range(pp):
        for rank in range(tp):
            local = {}
            for name in names:
                match = name.split(".") if name.startswith("decoder.layers.") else None
                last = name.startswith(("mtp.", "decoder.final", "output_layer"))
                if (int(match[2]) * pp // 4 if match else (pp - 1) * last) == stage:
                    number = [*match[:2], str(int(match[2]) % (4 // pp)), *match[3:]] if match else name.split(".")
                    local[".".join(number).replace("mixer.conv1d.", "mixer.conv1d_")] = name
            groups = [[name for name in local.values() if (len(shard(name, WEIGHTS, rank, tp).shape) < 2) == vectors]
                      for vectors in (False, True)]  # fmt: skip
            numbered = sum(groups, [])
            state = {
                "args": argparse.Namespace(
                    **SETTINGS, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp
                ),
                "checkpoint_version": 3.0, "iteration": 7, "opt_param_scheduler": SCHEDULE,
                "model": {key: shard(name, WEIGHTS, rank, tp) for key, name in local.items()},
                "optimizer": {
                    "state": {index: {"step": torch.tensor(7.0), "exp_avg": shard(name, MOMENTS, rank, tp),
                                      "exp_avg_sq": shard(name, SQUARES, rank, tp)}
                              for index, name in enumerate(numbered)},
                    "param_groups": [{"wd_mult": 1.0 - vectors, "params": [numbered.index(name) for name in group]}
                                     for vectors, group in enumerate(groups)],
                },
            }  # fmt: skip
            path = folder / "iter_0000007" / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else ""))
            path.mkdir(parents=True)
            torch.save(state, path / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("7")


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (2, 2)])
def test_torch_format_holds_the_hybrid_model(tp, pp, tmp_path):
    write_torch(tmp_path, tp, pp)
    expect(load_megatron_torch(tmp_path))


def test_torch_dist_is_read_and_written_with_the_same_names_and_values(tmp_path):
    tensors = write_torch_dist(tmp_path / "theirs")
    loaded = load_megatron_torch_dist(tmp_path / "theirs")
    expect(loaded)
    line = ["--load-dir", str(tmp_path / "theirs"), "--keep-vocab-padding", "--no-checking"]
    assert convert.main([*line, "--saver", "native", "--save-dir", str(tmp_path / "native")]) == 0
    line = ["--load-dir", str(tmp_path / "native"), "--save-dir", str(tmp_path / "again")]
    assert convert.main([*line, "--saver", "megatron_torch_dist"]) == 0
    with open(tmp_path / "again" / "iter_0000007" / ".metadata", "rb") as file:
        stored = pickle.load(file).state_dict_metadata
    plain = {name: torch.empty(entry.size) for name, entry in stored.items() if hasattr(entry, "size")}
    assert plain.keys() == tensors.keys()
    dcp.load(plain, checkpoint_id=tmp_path / "again" / "iter_0000007", no_dist=True)
    assert all(torch.equal(plain[name], tensor) for name, tensor in tensors.items())
    modules = {name.partition("._extra_state")[0] for name in stored if "_extra_state" in name}
    assert {"decoder.layers.0.mixer.in_proj", "decoder.layers.0.mixer.out_proj"} <= modules


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_gates_follow_their_queries_here_and_all_queries_of_a_group_there(groups, tmp_path):
    heads, channels = 4, 4
    sizes = {**SETTINGS, "num_attention_heads": heads, "num_query_groups": groups, "kv_channels": channels,
             "group_query_attention": True, "attention_output_gate": True}  # fmt: skip
    rows = torch.arange(groups * (2 * heads // groups + 2) * channels * HIDDEN).float().view(-1, HIDDEN)
    name = "decoder.layers.2.self_attention.linear_qkv.weight"
    depth = "mtp.layers.0.mtp_model_layer.layers.1.self_attention.linear_qkv.weight"
    tensors = write_torch_dist(tmp_path / "theirs", sizes, changed={name: rows, depth: rows})
    loaded = load_megatron_torch_dist(tmp_path / "theirs")
    for group, stored in enumerate(rows.chunk(groups)):
        queries, gates, rest = stored.split(([heads // groups * channels] * 2) + [2 * channels])
        expected = [x for pair in zip(queries.split(channels), gates.split(channels)) for x in pair]
        assert torch.equal(loaded.tensors[f"model.{name}"].read()[group], torch.cat([*expected, rest]))
    save_megatron_torch_dist(loaded, tmp_path / "again")
    again = {key: torch.empty_like(tensors[key]) for key in (name, f"optimizer.state.exp_avg.{name}")}
    dcp.load(again, checkpoint_id=tmp_path / "again" / "iter_0000007", no_dist=True)
    assert all(torch.equal(again[key], tensors[key]) for key in again)


def test_older_spelling_of_the_pattern_is_read(tmp_path):
    older = {**SETTINGS, "hybrid_layer_pattern": None, "hybrid_override_pattern": "MG*-",
             "mtp_hybrid_override_pattern": "M*"}  # fmt: skip
    write_torch_dist(tmp_path, older)
    expect(load_megatron_torch_dist(tmp_path))


def test_missing_section_is_rejected(tmp_path):
    write_torch_dist(tmp_path, leave_out=("decoder.layers.0.mixer.in_proj.weight.B",))
    with pytest.raises(CheckpointError, match=r"layers.0.mixer.in_proj.weight: has sections C, dt, x, z only"):
        load_megatron_torch_dist(tmp_path)


def test_sections_of_another_size_are_rejected(tmp_path):
    write_torch_dist(tmp_path, {**SETTINGS, "mamba_head_dim": 4})
    with pytest.raises(CheckpointError, match=r"layers.0.mixer.conv1d.weight has shape .*, expected 36 rows"):
        load_megatron_torch_dist(tmp_path)
