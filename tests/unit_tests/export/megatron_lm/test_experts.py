"""``torch_dist`` of experts with the state of their optimizer, as Megatron-LM stacks them ([layers, experts, …]), by
hand. One optimizer where experts are not divided among ranks, else one for them and one for the rest."""

import argparse
import pickle

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from megatron.export.megatron_lm import load_megatron_torch_dist, save_megatron_torch_dist
from tests.test_utils.megatron_torch import ARGS, SCHEDULE

HIDDEN, LAYERS, EXPERTS, WIDTH, SHARED, GROUPS = 16, 4, 3, 12, 10, 2
SHAPES = {
    "embedding.word_embeddings.weight": (64, HIDDEN), "output_layer.weight": (64, HIDDEN),
    "decoder.final_layernorm.weight": (HIDDEN,),
    "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (LAYERS, HIDDEN),
    "decoder.layers.self_attention.linear_qkv.weight": (LAYERS, 32, HIDDEN),
    "decoder.layers.self_attention.linear_proj.weight": (LAYERS, HIDDEN, HIDDEN),
    "decoder.layers.pre_mlp_layernorm.weight": (LAYERS, HIDDEN),
    "decoder.layers.mlp.router.weight": (LAYERS, EXPERTS, HIDDEN),
    "decoder.layers.mlp.experts.experts.linear_fc1.weight": (LAYERS, EXPERTS, 2 * WIDTH, HIDDEN),
    "decoder.layers.mlp.experts.experts.linear_fc2.weight": (LAYERS, EXPERTS, HIDDEN, WIDTH),
    "decoder.layers.mlp.shared_experts.linear_fc1.weight": (LAYERS, 2 * SHARED, HIDDEN),
    "decoder.layers.mlp.shared_experts.linear_fc2.weight": (LAYERS, HIDDEN, SHARED),
    "decoder.layers.mlp.shared_experts.gate_weight": (LAYERS, 1, HIDDEN),
}  # fmt: skip
STATES = {"": "model", "exp_avg": "optimizer.exp_avg", "exp_avg_sq": "optimizer.exp_avg_sq",
          "fp32_param": "optimizer.main_param"}  # fmt: skip
SETTINGS = {**ARGS, "num_experts": EXPERTS, "moe_ffn_hidden_size": WIDTH, "bf16": True,
            "moe_shared_expert_intermediate_size": SHARED, "moe_shared_expert_gate": True}  # fmt: skip


def values(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def write(folder, prefix_of):
    """Weights, and under ``prefix_of(name)`` the optimizer's state; what quantized layers keep lies among them."""
    tensors = {"decoder.layers.mlp.experts.experts.linear_fc1._extra_state": torch.zeros(LAYERS, 8, dtype=torch.uint8)}
    for seed, kind in enumerate(STATES):
        for name, tensor in values(seed).items():
            tensors[(f"{prefix_of(name)}state.{kind}." if kind else "") + name] = tensor
    directory = folder / "iter_0000007"
    dcp.save(tensors, storage_writer=FileSystemWriter(directory), no_dist=True)
    optimizer = {"state": {"common_step": torch.tensor(7.0)}, "param_groups": []}
    common = {"args": argparse.Namespace(**SETTINGS), "checkpoint_version": 3.0, "iteration": 7,
              "opt_param_scheduler": SCHEDULE, "optimizer": {0: optimizer, 1: optimizer}}  # fmt: skip
    torch.save(common, directory / "common.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return folder


def ours(name, tensor):
    """Return Megatron-LM's layer in the local layout."""
    if "shared_experts.linear_fc1" in name:
        return tensor.reshape(2, SHARED, HIDDEN)
    if "linear_fc1" in name:
        return tensor.reshape(EXPERTS, 2, WIDTH, HIDDEN)
    if "linear_qkv.weight" in name:
        return tensor.reshape(GROUPS, -1, HIDDEN)
    return tensor[:50] if "word" in name or "output" in name else tensor


def expect(loaded):
    result = {name: tensor.read() for name, tensor in loaded.tensors.items()}
    for seed, prefix in enumerate(STATES.values()):
        for name, tensor in values(seed).items():
            local = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
            local = local.replace("experts.experts", "experts")
            stem, stacked, rest = local.partition("decoder.layers.")
            for layer in range(LAYERS) if stacked else (None,):
                key = f"{prefix}.{local}" if layer is None else f"{prefix}.{stacked}{layer}.{rest}"
                assert torch.equal(result.pop(key), ours(name, tensor if layer is None else tensor[layer])), key
    assert not result
    assert loaded.settings["num_moe_experts"] == EXPERTS and loaded.objects["optimizer"]["step"] == 7


@pytest.mark.parametrize("prefix_of", [
    lambda name: "optimizer.", lambda name: f"chained_{int('.experts.' in name)}.optimizer.",
    lambda name: f"optimizer.{int('.experts.' in name)}.",
], ids=["one", "two", "two by number"])  # fmt: skip
def test_states_of_experts_are_read_and_written_back(prefix_of, tmp_path):
    expect(load_megatron_torch_dist(write(tmp_path / "theirs", prefix_of)))
    save_megatron_torch_dist(load_megatron_torch_dist(tmp_path / "theirs", padded_vocabulary=True), tmp_path / "ours")
    with open(tmp_path / "ours" / "iter_0000007" / ".metadata", "rb") as file:
        stored = pickle.load(file).state_dict_metadata
    stored = {name: entry for name, entry in stored.items() if hasattr(entry, "size")}
    expected = {(f"optimizer.state.{kind}." if kind else "") + name: value
              for seed, kind in enumerate(STATES) for name, value in values(seed).items()}  # fmt: skip
    assert stored.keys() == expected.keys()
    result = {name: torch.empty(entry.size) for name, entry in stored.items()}
    dcp.load(result, checkpoint_id=tmp_path / "ours" / "iter_0000007", no_dist=True)
    assert all(torch.equal(result[name], tensor) for name, tensor in expected.items())
