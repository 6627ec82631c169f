"""Activation offloading changes where saved tensors are, and no bit of the results."""

import gc

import pytest
import torch
from torch import nn

from megatron.core import parallel_state
from megatron.core.config.cli import ConfigError
from megatron.core.config.errors import UserError
from megatron.core.config.memory import IN_FLIGHT, RecomputeConfig
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.transformer import offload
from megatron.core.transformer.offload import ActivationOffload, Offload, run_offloaded
from megatron.core.transformer.sites import Sited
from tests.test_utils.lazy_streams import LazyStream
from tests.test_utils.training_steps import build, cached_run, compare, frozen, run

DENSE = ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"]
NETWORK = {"num_layers": 3, "swiglu": True, "normalization": "RMSNorm", "qk_layernorm": True, "num_query_groups": 2}
EXPERTS = {**NETWORK, "num_moe_experts": 4, "moe_ffn_hidden_size": 24}
LATENT = {
    "num_layers": 3, "multi_latent_attention": True, "q_lora_rank": 12, "kv_lora_rank": 20, "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4, "v_head_dim": 10, "normalization": "RMSNorm",
}  # fmt: skip
ON = {"fine_grained_activation_offloading": True, "min_offloaded_tensor_size": 1}
RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}
VARIANTS = {
    "dense": (NETWORK, {"offload_modules": DENSE}),
    "half": (NETWORK, {"offload_modules": DENSE, "activation_offload_fraction": 0.5}),
    "attention": ({**NETWORK, "attention_backend": "unfused"}, {"offload_modules": ["core_attn", "attn_proj"]}),
    "recomputed": (NETWORK, {"offload_modules": ["attn_norm", "attn_proj", "mlp_norm"], **RECOMPUTED}),
    "latent": (LATENT, {"offload_modules": DENSE}),
    "experts": (EXPERTS, {"offload_modules": [*DENSE, "expert_fc1", "moe_act"]}),
}


class SitedLinear(Sited, nn.Linear):
    spans = ("attn_norm",)


def sited_linear():
    """A linear layer [6, 6] that offloads at its site, and the state of its stack."""
    config, module = RecomputeConfig(**ON, offload_modules=["attn_norm"]), SitedLinear(6, 6)
    module.open_sites()
    Offload(config).attach(module)
    return module, ActivationOffload(config)


def forward(overrides, **more):
    """Return (output, input, model) of a forward pass of the layers."""
    torch.manual_seed(0)
    model = build(SINGLE_PROCESS, {}, **{**overrides, **more, "hidden_dropout": 0.0, "attention_dropout": 0.0})
    hidden = torch.randn(8, 2, 16, dtype=torch.float64, requires_grad=True)
    return model.decoder(hidden * 1), hidden, model


def results(output, hidden, model):
    output.square().sum().backward()
    return [output, hidden.grad, *(parameter.grad for parameter in model.decoder.parameters())]


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_those_without_offloading(variant):
    network, flags = VARIANTS[variant]
    plain, offloaded = results(*forward(network)), results(*forward(network, **ON, **flags))
    assert all(map(torch.equal, plain, offloaded)) and len(plain) == len(offloaded)


@pytest.mark.parametrize("is_faulty", [False, True])
def test_copies_may_be_as_late_as_their_events(monkeypatch, is_faulty):
    """And a load that does not wait for the copy to the host is found."""
    monkeypatch.setattr(offload, "SideStream", LazyStream)
    if is_faulty:
        monkeypatch.setattr(offload.Offloaded, "_wait", lambda saved: None)
    network = {**NETWORK, "num_layers": 6}
    plain = results(*forward(network))
    offloaded = results(*forward(network, **ON, offload_modules=DENSE))
    assert all(map(torch.equal, plain, offloaded)) is not is_faulty


@pytest.mark.parametrize("layout", [(2, 2, {}), (2, 2, {"sequence_parallel": True}),
                                    (2, 2, {"sequence_parallel": True, "tp_comm_overlap": True})])  # fmt: skip
def test_tensor_parallel_steps_are_those_of_one_rank(gloo_pool, layout):
    world_size, tp, more = layout
    steps = run(gloo_pool, world_size, tp, {}, {**NETWORK, **more, **ON, "offload_modules": DENSE})
    compare(steps, cached_run(gloo_pool, frozen({}), frozen(NETWORK)))


class Recorder:
    """Offloaded storages and the order of their loads."""

    def __init__(self, monkeypatch):
        self.made, self.loads = [], []
        init, load = offload.Offloaded.__init__, offload.Offloaded.load

        def recording_init(saved, streams, source, group):
            init(saved, streams, source, group)
            self.made.append((group, source.numel()))

        def recording_load(saved):
            if saved.on_device is None:
                self.loads.append(saved.group)
            load(saved)

        monkeypatch.setattr(offload.Offloaded, "__init__", recording_init)
        monkeypatch.setattr(offload.Offloaded, "load", recording_load)


def test_the_first_share_of_an_odd_number_of_groups_is_rounded_up(monkeypatch):
    observed = Recorder(monkeypatch)
    flags = {**ON, "offload_modules": ["mlp_norm"], "activation_offload_fraction": 0.5}
    _, hidden, model = forward(NETWORK, **flags)  # three groups
    assert {group for group, _ in observed.made} == {0, 1, 2}  # their number is known after the first pass
    observed.made.clear()
    model.decoder(hidden * 1)
    assert {group for group, _ in observed.made} == {0, 1}


@pytest.mark.parametrize("modules, per_layer", [
    (["attn_norm"], [1]), (["qkv_linear"], [1]), (["mlp_norm"], [1]), (["core_attn", "attn_proj"], [2, 0]),
    (["attn_norm", "core_attn", "attn_proj"], [1, 2, 0]),
])  # fmt: skip
def test_a_storage_is_copied_once_in_execution_order(monkeypatch, modules, per_layer):
    """Attention saves queries, keys and values, views of one tensor, and its output; the projection saves that too."""
    observed = Recorder(monkeypatch)
    network = {**NETWORK, "qk_layernorm": False, "num_query_groups": 4}
    results(*forward(network, **{**ON, "min_offloaded_tensor_size": 65}, offload_modules=modules))
    counts = [sum(group == index for group, _ in observed.made) for index in range(3 * len(per_layer))]
    assert counts == per_layer * 3
    stream = 8 * 2 * 16 * 8
    assert {size for _, size in observed.made} == ({stream, 3 * stream} if "core_attn" in modules else {stream})


def test_groups_return_before_backward_reaches_them(monkeypatch):
    observed = Recorder(monkeypatch)
    output, hidden, model = forward({**NETWORK, "num_layers": 8}, **ON, offload_modules=["mlp_norm"])
    released = 8 - IN_FLIGHT + 1
    assert not observed.loads
    output.sum().backward()
    assert observed.loads == sorted(observed.loads, reverse=True) and set(observed.loads) == set(range(released))


def test_memory_is_freed_with_the_graph():
    before = [get_object for get_object in gc.get_objects() if isinstance(get_object, offload.Offloaded)]
    saved = forward(NETWORK, **ON, offload_modules=DENSE)
    stored = [get_object for get_object in gc.get_objects() if isinstance(get_object, offload.Offloaded)]
    on_device = [item for item in stored if item.on_device is not None]
    assert len(stored) > 12 and len({item.group for item in on_device}) < IN_FLIGHT and not before
    results(*saved)
    del stored, on_device
    assert not [get_object for get_object in gc.get_objects() if isinstance(get_object, offload.Offloaded)]


@pytest.mark.parametrize("flags", [{"min_offloaded_tensor_size": 257}, {"activation_offload_fraction": 0.0}])
def test_small_tensors_and_calls_beyond_the_fraction_stay(monkeypatch, flags):
    observed = Recorder(monkeypatch)
    output, hidden, model = forward(NETWORK, **{**ON, "offload_modules": ["attn_norm", "mlp_norm"], **flags})
    first = len(observed.made)
    model.decoder(hidden * 1)
    assert len(observed.made) == first == (0 if "min_offloaded_tensor_size" in flags else 12)


def test_parameters_changed_tensors_and_parts_of_large_tensors_stay_or_are_copied_again():
    """Autograd still sees what it saved: views of other memory, and a tensor that is changed between two saves."""
    module, stack = sited_linear()
    observed = []

    def function(x):
        buffer = torch.zeros(20, 6)
        total = 0.0
        for factor in (1.0, 2.0):
            buffer[:4].copy_(x.detach() * factor)
            full = buffer[:4].clone()
            total = total + module.at.attn_norm(
                lambda full: (module(x) * buffer[:4].clone()).sum() + (x * full).sum() + (x * x).sum(), full
            )
            observed.append(len(stack._in_flight))
        return total.expand(1)

    actual = []
    for item in (stack, None):
        x = torch.arange(24.0).view(4, 6).requires_grad_()
        output = function(x) if item is None else run_offloaded(item, function, x)
        output.sum().backward()
        actual.append((x.grad, module.weight.grad.clone()))
        module.zero_grad()
    assert all(map(torch.equal, *actual))


def test_a_tensor_changed_in_place_between_two_saves_is_stored_twice():
    """Autograd does not check versions of tensors with hooks. Later groups release the device memory of both saves."""
    module, stack = sited_linear()
    x = torch.arange(24.0).view(4, 6).requires_grad_()
    buffer = torch.arange(24.0).view(4, 6).flip(0) + 0.5
    first = buffer.clone()

    def function():
        output = module.at.attn_norm(lambda: (x * buffer).sum())
        buffer.mul_(3.0)
        output = output + module.at.attn_norm(lambda: (x * buffer).sum())
        for _ in range(IN_FLIGHT + 1):
            output = output + module.at.attn_norm(lambda: (x * torch.ones(4, 6)).sum())
        return output

    output = run_offloaded(stack, function)
    output.backward()
    assert torch.equal(x.grad, first + 3 * first + IN_FLIGHT + 1)


def _schedule(rank, world_size, flags):
    groups = parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
    model = build(groups, {}, **NETWORK, **flags)
    tokens = torch.arange(16).view(2, 8) % 53
    position = torch.arange(8).expand(2, -1)
    rows = [torch.arange(2) + shift for shift in (0, 9, 5)]
    losses = [model(tokens + row[:1], position, labels=tokens, sample_index=row) for row in rows]
    for loss in losses:  # several micro-batches in flight, as in a pipeline
        loss.sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def test_micro_batches_in_flight_are_kept_apart(gloo_pool):
    plain, offloaded = (gloo_pool.run(_schedule, 1, flags)[0] for flags in ({}, {**ON, "offload_modules": DENSE}))
    assert all(map(torch.equal, plain, offloaded))


@pytest.mark.parametrize("flags, message", [
    ({"offload_modules": ["core_attn"]}, "offload_modules .*: requires fine_grained_activation_offloading"),
    ({**ON}, "fine_grained_activation_offloading: requires offload_modules"),
    ({**ON, "offload_modules": ["moe_act"]}, "moe_act requires"),
    ({**ON, "offload_modules": ["attn_proj"]}, "add core_attn"),
    ({**ON, "offload_modules": ["core_attn"], "recompute_granularity": "selective"}, "core_attn discards"),
    ({**ON, "offload_modules": ["attn_norm"], "recompute_granularity": "full", "recompute_method": "uniform",
      "recompute_num_layers": 1}, "recompute_granularity full"),
    ({**ON, "offload_modules": ["attn_norm"], "transformer_impl": "transformer_engine"}, "transformer_engine"),
])  # fmt: skip
def test_bad_settings_are_rejected(flags, message):
    with pytest.raises(ConfigError, match=message):
        TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=2, **flags)


def test_unknown_sites_are_listed_when_the_model_is_built():
    with pytest.raises(UserError, match=r"offload_modules \['mlps'\]: choose from .*core_attn, delta_rule, expert_fc1"):
        build(SINGLE_PROCESS, {}, num_layers=1, **ON, offload_modules=["mlps"])


@pytest.fixture
def deterministic():
    """Select kernels that repeat their bits: cuDNN's attention, the default on Hopper, sums gradients in any order. New
    memory is filled with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def two_passes(flags):
    """Return (results by name in the order in which they are computed, peak memory of the second pass) of two forward
    and backward passes of a new model."""
    torch.manual_seed(0)
    model = build(SINGLE_PROCESS, {}, **ON_GPU, **flags).to("cuda")
    result = {}
    for number in range(2):
        hidden = torch.randn(4096, 2, 512, dtype=torch.bfloat16).to("cuda").requires_grad_()
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        output = model.decoder(hidden * 1)
        output.float().square().sum().backward()
        peak = torch.cuda.max_memory_allocated() - before
        result[f"pass {number}: output"] = output.detach()
        result |= {f"pass {number}: {name}": item.grad for name, item in reversed([*model.decoder.named_parameters()])}
        result[f"pass {number}: hidden"] = hidden.grad
        del output
    return result, peak


def differences(expected, actual):
    """Return a line for each tensor that differs, with the number of elements and the largest difference."""
    return [
        f"{name}: {int((x != y).sum())} of {x.numel()} elements, by at most "
        f"{(x.double() - y.double()).abs().max():.3g} (largest {x.abs().max():.3g}, NaN {int(y.isnan().sum())})"
        for (name, x), y in zip(expected.items(), actual.values(), strict=True)
        if not torch.equal(x, y)
    ]


ON_GPU = {
    "num_layers": 12, "hidden_size": 512, "num_attention_heads": 8, "swiglu": True, "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "params_dtype": torch.bfloat16, "bf16": True, "use_cpu_initialization": True,
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("direction", ["neither", "store", "load"])
def test_offloading_saves_device_memory_and_changes_no_bit_gpu(monkeypatch, deterministic, direction):
    """Also if the copies of one direction are so slow that a missing wait would show."""
    copy = offload.SideStream.copy

    def slow_copy(stream, pairs, after=()):
        pairs = list(pairs)
        if pairs and pairs[0][1].is_cuda == (direction == "store") and direction != "neither":
            with torch.cuda.stream(stream._stream):
                torch.cuda._sleep(3_000_000)
        return copy(stream, pairs, after)

    plain, plain_peak = two_passes({})
    assert not differences(plain, two_passes({})[0]), "the kernels do not repeat their bits"
    monkeypatch.setattr(offload.SideStream, "copy", slow_copy)
    offloaded, peak = two_passes({**ON, "min_offloaded_tensor_size": 100_000, "offload_modules": DENSE})
    assert not differences(plain, offloaded)
    assert peak < 0.85 * plain_peak
