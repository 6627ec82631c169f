"""The ``torch`` format of a mixture of experts: one file per tensor, pipeline and expert rank, written here by hand.

Every value differs from every other, so that an expert, a layer or a shard in another place is another tensor. The run
skipped iterations: its optimizer made fewer steps than there were iterations.
"""

import argparse
from types import SimpleNamespace

import pytest
import torch

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.schedules.learning_rate import SchedulePlan, schedule_plan
from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.export.megatron_lm import load_megatron_torch, load_megatron_torch_dist, save_megatron_torch_dist
from megatron.export.megatron_lm.model import checkpoint_objects
from megatron.export.unpickler import Record
from tests.test_utils.megatron_torch import ARGS, SCHEDULE

HIDDEN, LAYERS, EXPERTS, WIDTH, SHARED, ROWS = 16, 4, 8, 12, 20, 64
ITERATION, STEPS, BATCH = 7, 5, 4
SETTINGS = {
    **ARGS, "num_experts": EXPERTS, "moe_ffn_hidden_size": WIDTH, "vocab_size": ROWS, "global_batch_size": BATCH,
    "moe_shared_expert_intermediate_size": SHARED, "moe_shared_expert_gate": True,
    "consumed_train_samples": ITERATION * BATCH, "skipped_train_samples": (ITERATION - STEPS) * BATCH,
}  # fmt: skip
LAYER = {
    "input_layernorm.weight": (HIDDEN,), "self_attention.linear_qkv.weight": (32, HIDDEN),
    "self_attention.linear_proj.weight": (HIDDEN, HIDDEN), "pre_mlp_layernorm.weight": (HIDDEN,),
    "mlp.router.weight": (EXPERTS, HIDDEN), "mlp.shared_experts.gate_weight": (1, HIDDEN),
    "mlp.shared_experts.linear_fc1.weight": (2 * SHARED, HIDDEN),
    "mlp.shared_experts.linear_fc2.weight": (HIDDEN, SHARED),
}  # fmt: skip
EXPERT = {"linear_fc1": (2 * WIDTH, HIDDEN), "linear_fc2": (HIDDEN, WIDTH)}
NAMINGS = {
    "sequential": lambda module, number: f"mlp.experts.local_experts.{number}.{module}.weight",
    "grouped": lambda module, number: f"mlp.experts.{module}.weight{number}",
}
"""Names of a rank's own experts, which it numbers from 0."""


def global_model(seed):
    """Global tensors: the experts' as [experts, ...]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embedding.word_embeddings.weight": (ROWS, HIDDEN)}
    for layer in range(LAYERS):
        shapes |= {f"decoder.layers.{layer}.{name}": shape for name, shape in LAYER.items()}
        shapes |= {f"decoder.layers.{layer}.mlp.experts.{name}.weight": (EXPERTS, *shape)
                   for name, shape in EXPERT.items()}  # fmt: skip
    shapes |= {"decoder.final_layernorm.weight": (HIDDEN,), "output_layer.weight": (ROWS, HIDDEN)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


WEIGHTS, MOMENTS, SQUARES = (global_model(seed) for seed in range(3))


def shard(name, tensor, rank, tp):
    """Return the part of a tensor on tensor-parallel rank ``rank``: its shards of gate and up."""
    if "norm" in name or "router" in name or "gate_weight" in name:
        return tensor
    if "linear_fc1" in name:
        return torch.cat([half.chunk(tp)[rank] for half in tensor.chunk(2)])
    return tensor.chunk(tp, 1 if "linear_proj" in name or "linear_fc2" in name else 0)[rank].clone()


def names_of(stage, pp, ep_rank, ep, naming):
    """Return name in the file -> (global name, expert or None), in the order of a model's parameters."""
    item, custom = LAYERS // pp, EXPERTS // ep
    names = {"embedding.word_embeddings.weight": ("embedding.word_embeddings.weight", None)} if stage == 0 else {}
    for local in range(item):
        layer = f"decoder.layers.{stage * item + local}"
        names |= {f"decoder.layers.{local}.{name}": (f"{layer}.{name}", None) for name in LAYER}
        for number in range(custom):
            for module in EXPERT:
                place = f"{layer}.mlp.experts.{module}.weight", ep_rank * custom + number
                names[f"decoder.layers.{local}.{naming(module, number)}"] = place
    if stage == pp - 1:
        names |= {name: (name, None) for name in ("decoder.final_layernorm.weight", "output_layer.weight")}
    return names


def write(folder, tp, pp, ep, naming, chunks=1, **changes):
    """Write all files of a layout with ``chunks`` virtual stages per rank, including the state of two Adam optimizers:
    one for dense parameters, one for experts."""
    args = {**SETTINGS, "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp,
            "expert_model_parallel_size": ep, **changes}  # fmt: skip
    for stage, rank, ep_rank in ((s, t, e) for s in range(pp) for t in range(tp) for e in range(ep)):
        models = [
            names_of(chunk * pp + stage, pp * chunks, ep_rank, ep, NAMINGS[naming]) for chunk in range(chunks)
        ]  # fmt: skip
        names = {(chunk, name): place for chunk, model in enumerate(models) for name, place in model.items()}

        def part(model, place, rank=rank):
            name, expert = place
            return shard(name, model[name] if expert is None else model[name][expert], rank, tp)

        state = {
            "args": argparse.Namespace(**args), "checkpoint_version": 3.0, "iteration": ITERATION,
            "opt_param_scheduler": SCHEDULE,
            **{f"model{chunk}" if chunks > 1 else "model": {name: part(WEIGHTS, place) for name, place in model.items()}
               for chunk, model in enumerate(models)},
            "optimizer": [
                adam({name: place for name, place in names.items() if (place[1] is not None) == experts}, part, experts)
                for experts in (False, True)
            ],
        }  # fmt: skip
        name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else "") + (f"_{ep_rank:03d}" if ep > 1 else "")
        (folder / "iter_0000007" / name).mkdir(parents=True)
        torch.save(state, folder / "iter_0000007" / name / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("7")


def adam(names, part, experts):
    """The state of one optimizer, by number of the parameter: weights, then norms, which do not decay."""
    groups = [[place for name, place in names.items() if ("norm" in name[1]) == late] for late in (False, True)]
    numbered = [place for group in groups for place in group]
    return {
        "state": {
            number: {"step": torch.tensor(float(STEPS)), "exp_avg": part(MOMENTS, place),
                     "exp_avg_sq": part(SQUARES, place)} for number, place in enumerate(numbered)
        },
        "param_groups": [
            {"wd_mult": float(not late), "is_expert_parallel": experts,
             "params": [numbered.index(place) for place in groups[late]]} for late in (0, 1)
        ],
    }  # fmt: skip


def ours(name, tensor):
    """A global tensor in this project's shape."""
    if "shared_experts.linear_fc1" in name:
        return tensor.reshape(2, SHARED, HIDDEN)
    if "experts.linear_fc1" in name:
        return tensor.reshape(EXPERTS, 2, WIDTH, HIDDEN)
    return tensor.reshape(2, -1, HIDDEN) if "linear_qkv" in name else tensor


def expect(loaded):
    kinds = {"model": WEIGHTS, "optimizer.exp_avg": MOMENTS, "optimizer.exp_avg_sq": SQUARES}
    expected = {f"{kind}.{name}": ours(name, item) for kind, model in kinds.items() for name, item in model.items()}
    assert loaded.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded.tensors[name].read(), tensor), name
    counters = loaded.objects["train_state"]
    assert loaded.objects["iteration"] == counters["iteration"] == ITERATION
    assert counters["consumed_train_samples"] == ITERATION * BATCH
    assert counters["skipped_train_samples"] == (ITERATION - STEPS) * BATCH
    assert loaded.objects["optimizer"] == {"step": STEPS, "grad_scaler": {}}, "skipped iterations are no steps"


LAYOUTS = [(1, 1, 2), (2, 1, 1), (2, 1, 2), (1, 2, 4), (2, 2, 4), (4, 1, 2), (1, 4, 1)]


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize(("tp", "pp", "ep"), LAYOUTS)
def test_experts_of_any_layout_have_their_places(tp, pp, ep, naming, tmp_path):
    write(tmp_path, tp, pp, ep, naming)
    expect(load_megatron_torch(tmp_path))


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (1, 2), (2, 4)])
def test_experts_of_virtual_stages_have_their_places(tp, ep, naming, tmp_path):
    write(tmp_path, tp, 2, ep, naming, chunks=2)
    expect(load_megatron_torch(tmp_path))


@pytest.mark.parametrize(("tp", "ep", "shards"), [(2, 1, 1), (2, 2, 1), (1, 2, 2)])
def test_experts_with_another_tensor_parallelism_are_rejected(tp, ep, shards, tmp_path):
    write(tmp_path, tp, 1, ep, "grouped", expert_tensor_parallel_size=shards)
    with pytest.raises(CheckpointError, match=f"expert_tensor_parallel_size {shards} differs .* torch_dist"):
        load_megatron_torch(tmp_path)


def test_conversion_to_torch_dist_keeps_iteration_and_optimizer_steps(tmp_path):
    write(tmp_path / "theirs", 2, 1, 2, "grouped")
    save_megatron_torch_dist(load_megatron_torch(tmp_path / "theirs"), tmp_path / "ours")
    expect(load_megatron_torch_dist(tmp_path / "ours"))
    common = torch.load(tmp_path / "ours" / "iter_0000007" / "common.pt", weights_only=False)
    optimizer = common["optimizer"]
    assert common["iteration"] == common["args"].iteration == ITERATION
    assert optimizer["state"] == {"common_step": torch.tensor(float(STEPS))}
    assert [group["step"] for group in optimizer["param_groups"]] == [STEPS, STEPS]


# ---- steps of the optimizer and lengths of schedules


@pytest.mark.parametrize("optimizer", [
    {"state": {"common_step": LazyTensor.of(torch.tensor(5.0))}, "param_groups": []},
    {"optimizer": {"state": {}, "param_groups": [{"params": [0], "step": 5}]}},
    [{"optimizer": {"state": {0: {"step": LazyTensor.of(torch.tensor([5.0]))}}}}],
    {"optimizer": {"state": {"common_step": LazyTensor.of(torch.tensor(5.0))}, "param_groups": [{"step": 5}]}},
], ids=["common", "of groups", "of parameters", "both"])  # fmt: skip
def test_step_runs_the_optimizer_of_the_program(optimizer):
    state = {"args": Record("Namespace", (), {"consumed_train_samples": 28}), "iteration": 7, "optimizer": optimizer}
    objects = checkpoint_objects(state, {}, True)
    assert (objects["optimizer"]["step"], objects["iteration"]) == (5, 7)
    assert "optimizer" not in checkpoint_objects(state, {}, False)


def flags(**changes):
    """Flags of a learning-rate schedule, as this program's and as a checkpoint's arguments."""
    values = {
        "lr": 0.1, "min_lr": 0.01, "lr_decay_style": "WSD", "lr_decay_iters": 40, "lr_decay_samples": None,
        "lr_warmup_iters": 2, "lr_warmup_samples": 0, "lr_warmup_fraction": None, "lr_warmup_init": 0.001,
        "lr_wsd_decay_style": "cosine", "lr_wsd_decay_iters": 5, "lr_wsd_decay_samples": None, "train_iters": 50,
        "train_samples": None, "global_batch_size": 6, "weight_decay": 0.1, "start_weight_decay": 0.0,
        "end_weight_decay": 0.2, "weight_decay_incr_style": "linear",
    }  # fmt: skip
    return {**values, **changes}


BY_SAMPLES = {
    "train_iters": None, "train_samples": 290, "lr_decay_iters": None, "lr_decay_samples": 230, "lr_warmup_iters": 0,
    "lr_warmup_samples": 11, "lr_wsd_decay_iters": None, "lr_wsd_decay_samples": 31,
}  # fmt: skip


@pytest.mark.parametrize(("changes", "annealing"), [
    ({}, 30), (BY_SAMPLES, 31), ({"lr_decay_style": "cosine", "lr_wsd_decay_iters": None}, None),
], ids=["iterations", "samples", "no annealing"])  # fmt: skip
def test_a_schedule_that_is_read_is_the_plan_of_the_same_flags(changes, annealing):
    """Megatron-LM's scheduler stores samples, except for the annealing length, which is in the arguments."""
    settings = flags(**changes)
    plan = schedule_plan(SimpleNamespace(**settings))
    foreign = {name: getattr(plan, name) for name in (
        "max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "lr_decay_style", "start_wd", "end_wd",
        "wd_incr_steps", "wd_incr_style",
    )}  # fmt: skip
    state = {"args": Record("Namespace", (), {}), "iteration": 7, "opt_param_scheduler": {**foreign, "num_steps": 42}}
    result = checkpoint_objects(state, settings, False)["scheduler"]
    assert result.pop("num_steps") == 42 and result["wsd_decay_steps"] == annealing
    assert SchedulePlan(**result) == plan
