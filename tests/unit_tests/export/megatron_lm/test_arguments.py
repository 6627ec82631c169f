"""Checkpoints of Megatron-LM that hold all arguments of its parser, as its runs write them: a fourth are ``None``."""

import dataclasses
import functools

import pytest
import torch

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.export.megatron_lm import load_megatron_torch_dist
from megatron.tools.checkpoint import convert
from megatron.training.arguments import parse_args, validate_args
from megatron.training.checkpoint.settings import apply_checkpoint_args, load_checkpoint_args
from tests.test_utils.megatron_arguments import KINDS, VERSIONS, arguments
from tests.unit_tests.export.megatron_lm import test_checkpoints, test_encoders, test_experts

ENCODER = {
    "num_layers": test_encoders.LAYERS, "encoder_num_layers": test_encoders.LAYERS, "ffn_hidden_size": 24,
    "max_position_embeddings": test_encoders.LENGTH, "seq_length": test_encoders.LENGTH,
}  # fmt: skip
MOE = {
    "num_experts": test_experts.EXPERTS, "moe_shared_expert_intermediate_size": test_experts.SHARED,
    "moe_shared_expert_gate": True,
}  # fmt: skip
SIZES = {"dense": {}, "moe": MOE, "bert": ENCODER, "t5": ENCODER}
"""Sizes of the weights that are written here, where the recorded runs had others."""
NEEDED = {"yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0, "yarn_correction_range_round_to_int": True}
"""Settings that are never None here, and the values that Megatron-LM computes with where they are None."""
PROGRAM_FAMILY = {"dense": "gpt", "moe": "gpt", "bert": "bert", "t5": "t5"}


def write(folder, kind, checkpoint_format, args):
    """A checkpoint of a model of ``kind``, by the writers of the other tests, with these arguments."""
    if kind in ("bert", "t5"):
        if checkpoint_format == "torch":
            test_encoders.write_torch(folder, kind, 1)
        else:
            test_encoders.write_torch_dist(folder, kind)
    elif checkpoint_format == "torch":
        test_checkpoints.write_torch(folder, **({"optimizer": None, "model": experts()} if kind == "moe" else {}))
    elif kind == "moe":
        test_experts.write(folder, lambda name: "optimizer.")
    else:
        test_checkpoints.write_torch_dist(folder)
    (path,) = folder.rglob("model_optim_rng.pt" if checkpoint_format == "torch" else "common.pt")
    torch.save({**torch.load(path, weights_only=False), "args": args}, path)
    return folder


def experts():
    """The model of ``test_experts`` by the names of one layer and one expert each."""
    named = {}
    for name, tensor in test_experts.values(0).items():
        stem, stacked, rest = name.partition("decoder.layers.")
        for layer in range(test_experts.LAYERS) if stacked else (None,):
            full = name if layer is None else f"{stem}{stacked}{layer}.{rest}"
            part = tensor if layer is None else tensor[layer]
            if "experts.experts" in name:
                full = full.replace("experts.experts", "experts")
                named |= {f"{full}{expert}": item.clone() for expert, item in enumerate(part)}
            else:
                named[full] = part.clone()
    return named


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("version", "checkpoint_format"),
    [*((version, "torch_dist") for version in VERSIONS), ("0.15", "torch"), ("main", "torch")],
)
def test_complete_arguments_of_a_run_convert_and_can_be_trained_from(
    kind, version, checkpoint_format, tmp_path, monkeypatch
):
    args = arguments(version, kind, monkeypatch, **SIZES[kind])
    assert sum(value is None for value in vars(args).values()) > 70
    folder = write(tmp_path / "theirs", kind, checkpoint_format, args)
    flags = ["--loader", f"megatron_{checkpoint_format}", "--saver", "native"]
    assert convert.main([*flags, "--load-dir", str(folder), "--save-dir", str(tmp_path / "ours")]) == 0
    stored = load_checkpoint_args(tmp_path / "ours")
    assert {name: stored[name] for name in NEEDED} == NEEDED
    for name in ("hidden_size", "num_layers", "num_attention_heads", "ffn_hidden_size", "normalization", "swiglu"):
        assert stored[name] == getattr(args, name), name
    assert stored["norm_epsilon"] == vars(args).get("layernorm_epsilon", vars(args).get("norm_epsilon"))
    assert stored["num_query_groups"] == (args.num_query_groups if args.group_query_attention else 4)
    assert stored["num_moe_experts"] == args.num_experts
    line = f"--pretrained-checkpoint {tmp_path / 'ours'} --use-checkpoint-args --micro-batch-size 1 --skip-train"
    line += f" --eval-iters 0 --seq-length 24 --save {tmp_path / 'run'}"
    line += " --decoder-seq-length 12" if kind == "t5" else ""
    cfg = apply_checkpoint_args(parse_args(line.split(), needs_data=False, model_family=PROGRAM_FAMILY[kind]))
    assert validate_args(cfg, 1).model.hidden_size == args.hidden_size


@dataclasses.dataclass
class Schedule:
    steps: int = 3


def initialize(tensor):
    """A function."""


@pytest.mark.parametrize("checkpoint_format", ["torch", "torch_dist"])
def test_arguments_that_are_objects_are_left_out(checkpoint_format, tmp_path, monkeypatch):
    """Functions, partials, data classes, types: programs on top of Megatron-LM keep such things."""
    objects = {
        "init_method": initialize, "output_layer_init_method": functools.partial(torch.nn.init.normal_, std=0.02),
        "activation_func": torch.nn.functional.gelu, "schedule": Schedule(),
        "layer": torch.nn.Linear, "kinds": {torch.float32, torch.bfloat16},
        "nested": [{"a": Schedule()}, (1, initialize)], "dtype": torch.float8_e4m3fn, "device": torch.device("cuda:0"),
    }  # fmt: skip
    args = arguments("main", "dense", monkeypatch, **objects)
    folder = write(tmp_path / "theirs", "dense", checkpoint_format, args)
    assert convert.main(["--saver", "native", "--load-dir", str(folder), "--save-dir", str(tmp_path / "ours")]) == 0
    stored = load_checkpoint_args(tmp_path / "ours")
    assert not objects.keys() & stored.keys() and stored["num_layers"] == args.num_layers


@pytest.mark.parametrize(
    ("version", "name"), [("0.15", "apply_layernorm_1p"), ("main", "layernorm_zero_centered_gamma")]
)
def test_norm_weights_around_zero_come_over_under_both_names(version, name, tmp_path, monkeypatch):
    args = arguments(version, "dense", monkeypatch, **{name: True})
    loaded = load_megatron_torch_dist(write(tmp_path, "dense", "torch_dist", args))
    assert loaded.settings["apply_layernorm_1p"] is True


def test_arguments_that_make_another_model_are_rejected_together(tmp_path, monkeypatch):
    args = arguments("main", "dense", monkeypatch, openai_gelu=True, moe_latent_size=8)
    with pytest.raises(CheckpointError, match=r"moe_latent_size is 8; openai_gelu is True"):
        load_megatron_torch_dist(write(tmp_path, "dense", "torch_dist", args))
