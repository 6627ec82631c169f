"""Recomputation changes memory and nothing else."""

import time
from functools import partial

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.core import parallel_state
from megatron.core.config.memory import RecomputeConfig
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.transformer.recompute import (
    Recompute,
    choose,
    layer_runs,
    recompute,
    recompute_from_split_input,
)
from megatron.core.transformer.sites import Sited, call
from tests.test_utils.training_steps import build, cached_run, compare, frozen, run

NETWORK = {
    "num_layers": 3, "swiglu": True, "normalization": "RMSNorm", "qk_layernorm": True, "num_query_groups": 2,
}  # fmt: skip
FULL = {"recompute_granularity": "full", "recompute_num_layers": 2}
VARIANTS = {
    "uniform": {**FULL, "recompute_method": "uniform"},
    "block": {**FULL, "recompute_method": "block"},
    "attention": {"recompute_granularity": "selective"},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "outputs": {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mlp_act"]},
    "all parts": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp", "layernorm"]},
    "distributed": {**FULL, "recompute_method": "uniform", "distribute_saved_activations": True},
}
LAYOUTS = {
    "one": (1, 1, {}), "tp2": (2, 2, {}), "tp2-sp": (2, 2, {"sequence_parallel": True}),
    "tp4-shared-heads": (4, 4, {"sequence_parallel": True}),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_steps_are_those_without_recomputation(gloo_pool, variant, layout):
    world_size, tp, more = LAYOUTS[layout]
    if variant == "distributed" and layout != "tp2":
        pytest.skip("needs tensor parallelism without sequence parallelism")
    if layout == "tp4-shared-heads" and variant not in ("block", "all parts"):
        pytest.skip("attention that shares heads is recomputed as a layer, or as a part")
    settings = {"overlap_grad_reduce": True, "bucket_size": 100}
    steps = run(gloo_pool, world_size, tp, {}, {**NETWORK, **more, **VARIANTS[variant]}, settings)
    compare(steps, cached_run(gloo_pool, frozen({}), frozen(NETWORK)))


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors made inside that still live, views of ``model``'s parameters apart."""

    def __init__(self, model):
        super().__init__()
        self.storages = {}
        self.parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for tree_leave in tree_leaves(results):
            if isinstance(tree_leave, torch.Tensor):
                storage = tree_leave.untyped_storage()
                if storage.data_ptr() not in self.parameters:
                    self.storages[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        return results

    def total(self):
        """After a moment: threads of gloo let go of a tensor some time after its collective has ended."""
        time.sleep(0.1)
        return sum(size for reference, size in self.storages.values() if not reference.expired())


def kept_bytes(groups, overrides):
    """Return the bytes that the layers save between forward and backward."""
    model = build(
        groups, {}, **{**NETWORK, "num_layers": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0, **overrides}
    )
    hidden = torch.randn(8 // (groups.tp.size if model.config.sequence_parallel else 1), 2, 16, dtype=torch.float64)
    hidden.requires_grad_()
    with LiveBytes(model) as live:
        output = model.decoder(hidden * 1)
    bytes_kept = live.total()
    output.sum().backward()
    return bytes_kept


def test_less_is_kept(gloo_pool):
    variants = {
        **{name: VARIANTS[name] for name in ("block", "mlp", "all parts")},
        "norms": {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
        "activations": {"recompute_granularity": "selective", "recompute_modules": ["mlp_act"]},
        "unfused": {"attention_backend": "unfused"},
        "unfused, attention": {"attention_backend": "unfused", **VARIANTS["attention"]},
        "uniform 1": {**VARIANTS["uniform"], "recompute_num_layers": 1},
        "uniform 4": {**VARIANTS["uniform"], "recompute_num_layers": 4},
    }
    saved = {name: kept_bytes(SINGLE_PROCESS, overrides) for name, overrides in variants.items()}
    everything = kept_bytes(SINGLE_PROCESS, {})
    stream = 8 * 2 * 16 * 8
    assert saved["uniform 4"] < saved["uniform 1"] < saved["block"] < everything
    assert saved["uniform 1"] <= 7 * stream  # four layers' inputs, the final norm's, its output
    assert everything - saved["norms"] == 8 * stream  # two outputs of each of four layers
    assert everything - saved["activations"] == 4 * 8 * 2 * 64 * 8  # fc2's input, 64 wide, in each of four layers
    assert saved["all parts"] < saved["mlp"] < everything
    assert saved["unfused, attention"] < saved["unfused"]


def _kept_on_ranks(rank, world_size, variant):
    groups = parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    return kept_bytes(groups, {**VARIANTS[variant], "recompute_num_layers": 1})


def test_saved_inputs_are_spread_over_the_ranks(gloo_pool):
    full, spread = (gloo_pool.run(_kept_on_ranks, 2, name)[0] for name in ("uniform", "distributed"))
    assert full - spread == 4 * 8 * 2 * 16 * 8 // 2  # half of each of four inputs


class Noisy(torch.nn.Module):
    """A user's module that draws from torch's generators, with and without a dropout of torch."""

    def __init__(self, device):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((6, 6), 0.3, device=device))
        self.dropout = torch.nn.Dropout(0.4)

    def forward(self, x):
        return torch.tanh(self.dropout(x @ self.weight)) * torch.rand_like(x) * torch.rand(1).item()


def drawn(make_run, device):
    """Output, gradients, and the numbers that come after backward; others are drawn between the passes."""
    torch.manual_seed(3)
    module, x = Noisy(device), torch.linspace(-1, 1, 24, device=device).view(4, 6).requires_grad_()
    y = make_run()(module, make_run()(module, x))
    torch.rand(7), torch.rand(7, device=device)
    y.sum().backward()
    return y.detach(), x.grad, module.weight.grad, torch.rand(2), torch.rand(2, device=device)


class Owner(Sited, torch.nn.Module):
    calls = ("core_attn", "mlp", "moe", "shared_experts")


def attached(config, name):
    """The site ``name`` with the policy of ``config``."""
    owner = Owner()
    owner.open_sites()
    Recompute(config, owner, SINGLE_PROCESS).attach(owner)
    return getattr(owner.at, name)


RUNS = {
    "recompute": lambda: recompute,
    **{f"full, {method}": lambda method=method: layer_runs(
        RecomputeConfig(recompute_granularity="full", recompute_method=method, recompute_num_layers=1), 1,
        SINGLE_PROCESS)[0][0] for method in ("uniform", "block")},
    **{name: lambda name=name: attached(
        RecomputeConfig(recompute_granularity="selective", recompute_modules=[name]), name)
       for name in ("core_attn", "mlp", "moe", "shared_experts")},
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", RUNS)
def test_recomputation_repeats_random_numbers_of_custom_modules(name, device):
    """Its gradient uses the forward pass's random numbers, and the generators' next numbers do not change."""
    assert RUNS[name]() is not call
    expected, actual = drawn(lambda: call, device), drawn(RUNS[name], device)
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


def _drawn_on_ranks(rank, world_size):
    groups = parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    split = drawn(lambda: partial(recompute_from_split_input, groups.tp), "cpu")
    return all(torch.equal(one, other) for one, other in zip(split, drawn(lambda: call, "cpu"), strict=True))


def test_recomputation_from_split_input_repeats_random_numbers_of_custom_modules(gloo_pool):
    assert gloo_pool.run(_drawn_on_ranks, 2) == [True, True]


def test_layers_run_in_the_groups_that_were_asked_for():
    def positions(method, count, num_layers):
        config = RecomputeConfig(recompute_granularity="full", recompute_method=method, recompute_num_layers=count)
        return [(run is not call, list(layers)) for run, layers in layer_runs(config, num_layers, SINGLE_PROCESS)]

    assert positions("uniform", 2, 5) == [(True, [0, 1]), (True, [2, 3]), (True, [4])]
    assert positions("block", 2, 4) == [(True, [0]), (True, [1]), (False, [2, 3])]
    assert positions("block", 9, 1) == [(True, [0]), (False, [])]
    assert layer_runs(RecomputeConfig(), 3, SINGLE_PROCESS) == [(call, range(3))]


def test_incomplete_settings_are_rejected():
    with pytest.raises(ValueError, match="recompute_num_layers"):
        layer_runs(RecomputeConfig(recompute_granularity="full"), 2, SINGLE_PROCESS)
    with pytest.raises(ValueError, match=r"\['mlps'\]: choose from core_attn, .*mlp, "):
        attached(RecomputeConfig(recompute_granularity="selective", recompute_modules=["mlps"]), "mlp")


@pytest.mark.parametrize("name", ["self_attention", "cross_attention", "mixer", "mlp"])
def test_a_stage_without_a_branch_accepts_its_name(name):
    config = RecomputeConfig(recompute_granularity="selective", recompute_modules=[name])
    assert Recompute(config, torch.nn.Module(), SINGLE_PROCESS).names == {name}


def test_each_recomputation_replays_the_choices_of_the_first_pass():
    """Two backward passes over one graph recompute twice."""
    built = []

    def function(x):
        for factor in (3.0, 5.0):
            x = x * choose(lambda factor=factor: built.append(factor) or torch.tensor(factor))
        return x.square().sum()

    x = torch.ones(2, requires_grad=True)
    loss = recompute(function, x)
    loss.backward(retain_graph=True)
    loss.backward()
    assert built == [3.0, 5.0] and x.grad.tolist() == [2 * 2 * 15.0**2] * 2
