"""The optimizer against plain torch; clipping; loss scales; state by global name."""

import copy
import math

import pytest
import torch
from torch import nn

from megatron.core.config.errors import UserError
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler
from megatron.core.optimizer.param_groups import parameter_groups
from megatron.core.sharding.placement import Shard, Zeros, parameter


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)


def wrapped(net):
    return DistributedDataParallel(None, DistributedDataParallelConfig(grad_reduce_in_fp32=True), net)


def settings(**changes):
    return OptimizerConfig(**{"lr": 0.01, "weight_decay": 0.1, "clip_grad": 1.0, "sgd_momentum": 0.9, **changes})


def batch(step, dtype=torch.float32):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).to(dtype)


def train(ddp, optimizer, steps, first=0):
    norms = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss = ddp(batch(step, next(ddp.parameters()).dtype)).float().square().sum()
        optimizer.scale_loss(loss).backward()
        ddp.finish_grad_sync()
        norms.append(optimizer.step()[1])
    return norms


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_updates_and_clipping_equal_plain_torch(kind, dtype):
    local, foreign = network(dtype), network(dtype)
    optimizer = get_megatron_optimizer(settings(optimizer=kind), [ddp := wrapped(local)])
    groups = [
        {"params": [p for p in foreign.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in foreign.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.1 * group["wd_mult"]
    plain = torch.optim.AdamW(groups, lr=0.01) if kind == "adam" else torch.optim.SGD(groups, lr=0.01, momentum=0.9)
    norms = train(ddp, optimizer, 5)
    for step in range(5):
        plain.zero_grad()
        foreign(batch(step, dtype)).float().square().sum().backward()
        norm = nn.utils.clip_grad_norm_(foreign.parameters(), 1.0)
        assert norm.item() == pytest.approx(norms[step], rel=1e-5)
        plain.step()
    for a, b in zip(local.parameters(), foreign.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    assert norms[0] > 1.0, "the test must clip"


def test_parameters_of_one_model_may_have_different_rules():
    """Adam for matrices, SGD for vectors, clipped by one norm; and both kinds of state go through a checkpoint."""
    local, foreign = network(torch.float64), network(torch.float64)
    optimizer = get_megatron_optimizer(
        settings(weight_decay=0.0), [ddp := wrapped(local)],
        update_rule=lambda name, parameter: "adam" if parameter.ndim > 1 else "sgd",
    )  # fmt: skip
    assert {type(part.rule).__name__ for part in optimizer.parts} == {"Adam", "SGD"}
    plain = [
        torch.optim.AdamW([p for p in foreign.parameters() if p.ndim > 1], lr=0.01, weight_decay=0.0),
        torch.optim.SGD([p for p in foreign.parameters() if p.ndim == 1], lr=0.01, momentum=0.9),
    ]
    train(ddp, optimizer, 3)
    for step in range(3):
        foreign.zero_grad()
        foreign(batch(step, torch.float64)).float().square().sum().backward()
        nn.utils.clip_grad_norm_(foreign.parameters(), 1.0)
        for item in plain:
            item.step()
    for a, b in zip(local.parameters(), foreign.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)
    state = optimizer.state_dict()
    assert state["exp_avg"].keys().isdisjoint(state["momentum_buffer"])
    moments = [*state["exp_avg"].values(), *state["exp_avg_sq"].values(), *state["momentum_buffer"].values()]
    assert {moment.dtype for moment in moments} == {torch.float64}
    assert {*state["exp_avg"], *state["momentum_buffer"]} == {name for name, _ in local.named_parameters()}
    optimizer.load_state_dict(copy.deepcopy(state))
    with pytest.raises(
        ValueError, match="optimizer 'soap': there is no such update rule; choose adam, sgd, lion, muon"
    ):
        get_megatron_optimizer(settings(), [wrapped(network())], update_rule=lambda name, parameter: "soap")


@pytest.mark.parametrize("decoupled", [True, False])
def test_lion_equals_its_definition(decoupled):
    local, foreign = network(), network()
    options = {"optimizer": "lion", "decoupled_weight_decay": decoupled, "clip_grad": 0.0, "lion_beta1": 0.8}
    optimizer = get_megatron_optimizer(settings(**options), [ddp := wrapped(local)])
    train(ddp, optimizer, 2)
    momenta = [torch.zeros_like(weight) for weight in foreign.parameters()]
    for step in range(2):
        foreign.zero_grad()
        foreign(batch(step)).square().sum().backward()
        for weight, momentum in zip(foreign.parameters(), momenta):
            grad = weight.grad + (0.0 if decoupled else 0.1) * weight.detach()
            update = (0.8 * momentum + 0.2 * grad).sign() + (0.1 if decoupled else 0.0) * weight.detach()
            weight.data -= 0.01 * update
            momentum.mul_(0.99).add_(grad, alpha=0.01)
    for a, b in zip(local.parameters(), foreign.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_coupled_decay_is_adam_with_l2():
    local, foreign = network(), network()
    optimizer = get_megatron_optimizer(settings(decoupled_weight_decay=False, clip_grad=0.0), [ddp := wrapped(local)])
    plain = torch.optim.Adam(foreign.parameters(), lr=0.01, weight_decay=0.1)
    train(ddp, optimizer, 1)
    foreign(batch(0)).square().sum().backward()
    plain.step()
    torch.testing.assert_close(local[0].weight, foreign[0].weight)


def test_it_works_without_a_data_parallel_wrapper():
    net = network()
    optimizer = get_megatron_optimizer(settings(), [net])
    before = net[0].weight.detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        net(batch(0)).sum().backward()
        assert optimizer.step()[0]
    assert not torch.equal(before, net[0].weight)


def test_a_model_without_trainable_parameters_is_an_error():
    with pytest.raises(UserError, match="the model has no parameter to train"):
        get_megatron_optimizer(settings(), [network().requires_grad_(False)], groups=SINGLE_PROCESS)


def test_steps_are_bit_reproducible():
    results = []
    for _ in range(2):
        optimizer = get_megatron_optimizer(settings(), [ddp := wrapped(net := network(torch.bfloat16))])
        results.append((train(ddp, optimizer, 5), [p.detach().clone() for p in net.parameters()]))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1]))


def test_bf16_keeps_updates_that_bf16_weights_would_lose():
    net = network(torch.bfloat16)
    optimizer = get_megatron_optimizer(settings(lr=1e-5, bf16=True), [ddp := wrapped(net)])
    start = optimizer.storage["0.weight"].read().detach().clone()
    train(ddp, optimizer, 3)
    main = optimizer.storage["0.weight"].read()
    assert main.dtype == torch.float32 and not torch.equal(start, main)
    assert torch.equal(net[0].weight, main.bfloat16())


def test_bf16_gradients_are_accepted():
    net = network(torch.bfloat16)
    ddp = DistributedDataParallel(None, DistributedDataParallelConfig(), net)
    optimizer = get_megatron_optimizer(settings(bf16=True), [ddp])
    assert all(math.isfinite(norm) for norm in train(ddp, optimizer, 2))


def test_the_dynamic_scale_follows_its_rules():
    scaler = DynamicGradScaler(initial_scale=16.0, min_scale=2.0, growth_interval=2, hysteresis=2)
    scales = []
    for overflow in (True, True, True, False, False, True, True, True, True, True):
        scaler.update(overflow)
        scales.append(scaler.scale)
    # the first overflow is forgiven; growth restores the patience; the floor holds
    assert scales == [16, 8, 4, 4, 8, 8, 4, 2, 2, 2]
    twin = DynamicGradScaler(initial_scale=16.0, min_scale=2.0, growth_interval=2, hysteresis=2)
    twin.load_state_dict(scaler.state_dict())
    assert twin.state_dict() == scaler.state_dict()
    for bad in ({"min_scale": 0.0}, {"growth_factor": 1.0}, {"growth_interval": 0}, {"hysteresis": 0}):
        with pytest.raises(ValueError):
            DynamicGradScaler(**bad)
    with pytest.raises(ValueError, match="--loss-scale"):
        ConstantGradScaler(0.0)


def test_a_new_scaler_grows_after_as_many_steps_as_its_window_has():
    scaler = DynamicGradScaler(initial_scale=16.0, min_scale=2.0, growth_interval=3, hysteresis=2)
    scales = []
    for _ in range(7):
        scaler.update(False)
        scales.append(scaler.scale)
    assert scales == [16, 16, 32, 32, 32, 64, 64]


def test_zero_grad_leaves_no_gradient_unless_asked_to_keep_zeros():
    net = network(torch.float32)
    optimizer = get_megatron_optimizer(settings(), [net])
    weight = next(net.parameters())
    weight.grad = torch.ones_like(weight)
    optimizer.zero_grad(set_to_none=False)
    assert not weight.grad.any()
    optimizer.zero_grad()
    assert weight.grad is None


def test_fp16_skips_overflows_and_then_trains():
    net = network(torch.float16)
    config = settings(fp16=True, initial_loss_scale=2.0**20, hysteresis=1)
    optimizer = get_megatron_optimizer(config, [ddp := wrapped(net)])
    start = copy.deepcopy(optimizer.state_dict())
    assert train(ddp, optimizer, 1) == [None] and optimizer.found_nonfinite
    assert optimizer.get_loss_scale() == 2.0**19
    assert torch.equal(optimizer.state_dict()["exp_avg"]["0.weight"], start["exp_avg"]["0.weight"])
    assert optimizer.step_count == 0
    norms = train(ddp, optimizer, 20)
    assert norms[-1] is not None and optimizer.step_count > 0 and not optimizer.found_nonfinite
    reference = get_megatron_optimizer(settings(), [fp32 := wrapped(network())])
    first_good = next(i for i, norm in enumerate(norms) if norm is not None)
    assert train(fp32, reference, 1, first=first_good)[0] == pytest.approx(norms[first_good], rel=1e-2)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_nonfinite_gradient_changes_nothing(value):
    net = network()
    optimizer = get_megatron_optimizer(settings(), [ddp := wrapped(net)])
    before = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    optimizer.zero_grad()
    ddp(batch(0)).sum().backward()
    net[2].weight.main_grad[1, 1] = value
    assert optimizer.step() == (False, None, None) and optimizer.found_nonfinite
    assert all(torch.equal(a, b) for a, b in zip(before[0].values(), net.state_dict().values()))
    assert torch.equal(before[1]["exp_avg_sq"]["0.weight"], optimizer.state_dict()["exp_avg_sq"]["0.weight"])
    assert optimizer.step_count == 0


def test_zeros_and_norms_are_those_of_the_model():
    net = network()
    optimizer = get_megatron_optimizer(settings(log_num_zeros_in_grad=True), [ddp := wrapped(net)])
    expected = math.sqrt(sum(p.double().square().sum().item() for p in net.parameters()))
    assert float(optimizer.params_norm_on_device()) == pytest.approx(expected, rel=1e-6)
    optimizer.zero_grad()
    for p in net.parameters():
        p.main_grad.fill_(2.0)
    net[0].weight.main_grad[0] = 0.0
    count = sum(p.numel() for p in net.parameters()) - 5
    assert optimizer.step() == (True, pytest.approx(2.0 * math.sqrt(count)), 5)
    assert ddp.module is net


class Names(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(4, 3)
        self.q_layernorm, self.k_layernorm = nn.LayerNorm(3), nn.LayerNorm(3, bias=False)
        self.linear = nn.Linear(3, 3)
        self.output_layer = nn.Linear(3, 4, bias=False)


def test_groups_decay_matrices_only_and_decouple_the_ends():
    named = list(Names().named_parameters())
    groups = parameter_groups(settings(decoupled_lr=0.5, decoupled_min_lr=0.1, min_lr=0.01), named)
    assert [(g["wd_mult"], g["max_lr"], g["min_lr"], sorted(g["names"])) for g in groups] == [
        (1.0, None, None, ["linear.weight"]),
        (1.0, 0.5, 0.1, ["output_layer.weight", "word_embeddings.weight"]),
        (0.0, None, None, ["k_layernorm.weight", "linear.bias", "q_layernorm.bias", "q_layernorm.weight"]),
    ]
    groups = parameter_groups(settings(apply_wd_to_qk_layernorm=True), named)
    assert {"q_layernorm.weight", "k_layernorm.weight"} <= {*groups[0]["names"]}
    assert "q_layernorm.bias" in groups[1]["names"]
    groups = parameter_groups(settings(), named, scale_lr=lambda name, p: name == "linear.weight", lr_mult=3.0)
    assert [g["lr_mult"] for g in groups] == [1.0, 3.0, 1.0]


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_restored_state_goes_on_bit_for_bit(kind, dtype):
    config = settings(optimizer=kind, fp16=dtype == torch.float16, initial_loss_scale=128.0)
    first = get_megatron_optimizer(config, [ddp := wrapped(net := network(dtype))])
    train(ddp, first, 3)
    weights, state = copy.deepcopy(net.state_dict()), copy.deepcopy(first.state_dict())
    assert state["step"] == 3 and "0.weight" in state["exp_avg" if kind == "adam" else "momentum_buffer"]
    norms = train(ddp, first, 3, first=3)
    second = get_megatron_optimizer(config, [other := wrapped(twin := network(dtype))])
    twin.load_state_dict(weights)
    second.load_state_dict(state)
    assert train(other, second, 3, first=3) == norms
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), twin.state_dict().values()))


def test_state_that_does_not_fit_is_rejected_with_every_name():
    optimizer = get_megatron_optimizer(settings(), [wrapped(network())])
    state = copy.deepcopy(optimizer.state_dict())
    state["exp_avg"]["9.weight"] = state["exp_avg"].pop("0.weight")
    del state["exp_avg_sq"]
    words = "exp_avg.0.weight is missing; exp_avg.9.weight is unknown; exp_avg_sq is missing"
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(state)
    with pytest.raises(ValueError, match="optimizer 'soap'"):
        get_megatron_optimizer(settings(optimizer="soap"), [network()])


@pytest.mark.parametrize("remainders", [True, False])
def test_new_weights_reach_the_main_copies(remainders):
    net = network(torch.bfloat16)
    optimizer = get_megatron_optimizer(settings(store_param_remainders=remainders), [net])
    optimizer.storage["0.weight"].write(torch.full_like(optimizer.storage["0.weight"].read(), 1.0001))
    with torch.no_grad():
        net[0].weight.fill_(3.0)
    optimizer.reload_model_params()
    assert optimizer.storage["0.weight"].read().unique().tolist() == [3.0]


def test_a_state_with_a_loss_scale_is_for_any_optimizer():
    """An optimizer without loss scale ignores it; one with a loss scale keeps it if the state has no loss scale."""
    scaled, plain = (
        get_megatron_optimizer(settings(fp16=fp16), [wrapped(network(torch.float16 if fp16 else torch.float32))])
        for fp16 in (True, False)
    )
    plain.load_state_dict(plain.state_dict() | {"grad_scaler": scaled.state_dict()["grad_scaler"]})
    before = scaled.get_loss_scale()
    scaled.load_state_dict(scaled.state_dict() | {"grad_scaler": plain.state_dict()["grad_scaler"]})
    assert scaled.get_loss_scale() == before


def test_an_overflow_restarts_the_window_of_finite_steps():
    """Only consecutive finite steps count for the growth of the scale."""
    scaler = DynamicGradScaler(initial_scale=16.0, min_scale=2.0, growth_interval=3, hysteresis=9)
    scales = []
    for overflow in (False, False, True, False, False, True, False, False, False):
        scaler.update(overflow)
        scales.append(scaler.scale)
    assert scales == [16] * 8 + [32]


def test_experts_have_separate_groups():
    net = nn.Module()
    net.experts = parameter((4, 3), init=Zeros(), mesh={"ep": Shard(0)}, groups=SINGLE_PROCESS)
    net.dense = parameter((4, 3), init=Zeros(), mesh={"tp": Shard(0)}, groups=SINGLE_PROCESS)
    groups = parameter_groups(settings(), net.named_parameters())
    assert [(group["is_expert_parallel"], group["names"]) for group in groups] == [
        (False, ["dense"]), (True, ["experts"]),
    ]  # fmt: skip


def test_skipped_steps_do_not_clip_by_a_norm_that_is_not_finite():
    """A custom update rule may scale its gradients although the step is skipped."""
    optimizer = get_megatron_optimizer(settings(clip_grad=1.0), [network()])
    norm = torch.tensor(torch.nan, dtype=torch.float64)
    assert optimizer._factor(norm, torch.tensor(True), None) == 1.0
    assert optimizer._factor(norm, torch.tensor(True), 0.5) == 0.5


def test_update_waits_for_weights_before_and_gathers_them_after():
    optimizer = get_megatron_optimizer(settings(), [ddp := wrapped(network())])
    calls, rule = [], optimizer.parts[0].rule
    ddp.finish_gathers, ddp.start_param_sync = (lambda: calls.append("wait")), (lambda: calls.append("gather"))
    update, rule.update = rule.update, lambda *args: calls.append("update") or update(*args)
    optimizer.update()
    assert calls == ["wait", "update", "gather"]
