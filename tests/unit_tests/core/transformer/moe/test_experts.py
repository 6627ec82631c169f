"""Experts: grouped products equal a loop, gradients accumulate and may wait, biases and empty experts.

Legend: e experts, r rows.
"""

import itertools

import pytest
import torch

from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.sharding.placement import initialize_parameters
from megatron.core.tensor_parallel.grouped_linear import (
    GroupedProducts,
    group_of_rows,
    multiply_grouped,
    multiply_loop,
    weight_gradient_grouped,
    weight_gradient_loop,
)
from megatron.core.tensor_parallel.linear import WeightGradientStore
from megatron.core.transformer.moe.experts import GroupedExperts, SequentialExperts
from tests.test_utils.kernels import DEVICE, filled
from tests.test_utils.training_steps import give_main_grad

DOUBLE = torch.float64
ENDS = (3, 3, 10, 14)
ROWS = 16


def build(kind=SequentialExperts, dtype=DOUBLE, **overrides):
    settings = {
        "num_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "ffn_hidden_size": 24, "swiglu": True,
        "num_moe_experts": len(ENDS), "params_dtype": dtype, "add_bias_linear": False, "init_method_std": 0.3,
    }  # fmt: skip
    experts = kind(TransformerConfig(**(settings | overrides)), groups=SINGLE_PROCESS)
    initialize_parameters(experts, 3, SINGLE_PROCESS)
    for index, (name, parameter) in enumerate(experts.named_parameters()):
        if name.endswith("bias"):
            parameter.data.copy_(filled(*parameter.shape, dtype=dtype, seed=index))
    return experts


def inputs(dtype=DOUBLE, device="cpu"):
    rows, weights = filled(ROWS, 16, dtype=dtype), filled(ROWS, dtype=dtype, seed=1).abs()
    ends = torch.tensor(ENDS, dtype=torch.int32, device=device)
    return rows.to(device).requires_grad_(), ends, weights.to(device).requires_grad_()


def upstream(dtype=DOUBLE):
    grad = filled(ROWS, 16, dtype=dtype, seed=2)
    grad[ENDS[-1] :] = 0  # nothing takes rows of no expert
    return grad


def by_hand(experts, rows, ends, weights, **options):
    """One dense network per expert, by its formula."""
    config = {"clamp": None, "offset": 0.0, **options}
    outputs, start = [], 0
    for index, end in enumerate(ends.tolist()):
        fc1 = experts.linear_fc1.weight.view(len(ENDS), -1, 16)[index]
        fc2 = experts.linear_fc2.weight.view(len(ENDS), 16, -1)[index]
        inner = rows[start:end] @ fc1.t()
        if experts.linear_fc1.bias is not None:
            inner = inner + experts.linear_fc1.bias.view(len(ENDS), -1)[index]
        gate, up = inner.chunk(2, -1)
        if config["clamp"] is not None:
            gate, up = gate.clamp(max=config["clamp"]), up.clamp(-config["clamp"], config["clamp"])
        result = (gate * torch.sigmoid(config.get("slope", 1.0) * gate) * (up + config["offset"])) @ fc2.t()
        if experts.linear_fc2.bias is not None:
            result = result + experts.linear_fc2.bias[index]
        outputs.append(result * weights[start:end, None])
        start = end
    return torch.cat(outputs)


KINDS = {
    "plain": ({}, {}),
    "biases": ({"add_bias_linear": True}, {}),
    "GPT-OSS": (
        {"swiglu": False, "quick_geglu": True, "activation_func_clamp_value": 0.7, "glu_linear_offset": 1.0,
         "add_bias_linear": True},
        {"slope": 1.702, "clamp": 0.7, "offset": 1.0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_independent_networks(kind):
    overrides, options = KINDS[kind]
    experts, (rows, ends, weights) = build(**overrides), inputs()
    output = experts(rows, ends, weights)
    expected = by_hand(experts, rows, ends, weights, **options)
    torch.testing.assert_close(output[: ENDS[-1]], expected)
    leaves = [rows, weights, *experts.parameters()]
    actual = torch.autograd.grad(output, leaves, upstream())
    exact = torch.autograd.grad(expected, leaves, upstream()[: ENDS[-1]])
    for mine, reference in zip(actual, exact):
        torch.testing.assert_close(mine, reference)


@pytest.mark.parametrize("activation", [{"swiglu": False}, {"swiglu": False, "squared_relu": True}])
def test_plain_activations_work_too(activation):
    experts, (rows, ends, weights) = build(**activation), inputs()
    assert torch.autograd.gradcheck(lambda x, w: experts(x, ends, w)[: ENDS[-1]], (rows, weights))


def test_checkpoints_of_both_kinds_are_the_same():
    sequential, grouped = build().state_dict(), build(GroupedExperts).state_dict()
    assert sequential.keys() == grouped.keys() == {"linear_fc1.weight", "linear_fc2.weight"}
    assert all(torch.equal(sequential[name], grouped[name]) for name in sequential)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_experts_equal_sequential_ones(dtype, bias):
    results = []
    for kind in (SequentialExperts, GroupedExperts):
        experts = build(kind, dtype, add_bias_linear=bias).to(DEVICE)
        if kind is GroupedExperts:  # on CPUs too
            for linear in (experts.linear_fc1, experts.linear_fc2):
                linear.products = GroupedProducts(multiply_grouped, weight_gradient_grouped)
        rows, ends, weights = inputs(dtype, DEVICE)
        output = experts(rows, ends, weights)
        output.backward(upstream(dtype).to(DEVICE))
        gradients = [rows.grad[: ENDS[-1]], weights.grad[: ENDS[-1]], *(p.grad for p in experts.parameters())]
        results.append([output[: ENDS[-1]].detach(), *gradients])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for sequential, grouped in zip(*results):
        scale = sequential.abs().max()
        torch.testing.assert_close(grouped / scale, sequential / scale, rtol=0, atol=tolerance)


def give_all_main_grads(experts):
    return {
        name: give_main_grad(p, torch.ones_like(p, dtype=torch.float32 if p.dtype != DOUBLE else DOUBLE))
        for name, p in experts.named_parameters()
    }  # fmt: skip


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("dtype", [DOUBLE, torch.bfloat16])
def test_gradients_accumulate_in_main_grad(dtype, grouped):
    """Two micro-batches add up in fp32: as exact as the factors, which 16 bits hold."""
    experts = build(GroupedExperts if grouped else SequentialExperts, dtype, add_bias_linear=True)
    if grouped:
        for linear in (experts.linear_fc1, experts.linear_fc2):
            linear.products = GroupedProducts(multiply_grouped, weight_gradient_grouped)
    exact = build(add_bias_linear=True)
    exact.load_state_dict(experts.state_dict())
    arrivals = give_all_main_grads(experts)
    for _ in range(2):
        rows, ends, weights = inputs(dtype)
        experts(rows, ends, weights).backward(upstream(dtype))
    rows, ends, weights = inputs(dtype)
    exact(rows.double(), ends, weights.double()).backward(upstream(dtype).double())
    for (name, mine), reference in zip(experts.named_parameters(), exact.parameters()):
        assert len(arrivals[name]) == 2 and mine.grad is None
        expected = 1 + 2 * reference.grad
        tolerance = 1e-10 if dtype == DOUBLE else 2e-2 * expected.abs().max()
        torch.testing.assert_close(mine.main_grad.to(DOUBLE), expected, rtol=tolerance, atol=tolerance)


def test_deferred_weight_gradients_arrive_when_they_are_computed():
    experts, full = build(), build()
    arrivals, store = give_all_main_grads(experts), WeightGradientStore()
    give_all_main_grads(full)
    for linear in (experts.linear_fc1, experts.linear_fc2):
        linear.weight_gradient_store = store
    results = []
    for x in (experts, full):
        rows, ends, weights = inputs()
        x(rows, ends, weights).backward(upstream())
        results.append((rows.grad, weights.grad))
    torch.testing.assert_close(*results)
    assert len(store) == 2 and not any(arrivals.values())
    for complete in store.take():
        complete()
    for mine, expected in zip(experts.parameters(), full.parameters()):
        torch.testing.assert_close(mine.main_grad, expected.main_grad)
    assert all(len(value) == 1 for value in arrivals.values())


@pytest.mark.parametrize("products", [
    (multiply_loop, weight_gradient_loop), (multiply_grouped, weight_gradient_grouped),
])  # fmt: skip
@pytest.mark.parametrize("dtype, rows", itertools.product([torch.float32, torch.bfloat16], [0, 4]))
def test_experts_without_rows_have_zero_gradients(products, dtype, rows):
    experts = build(dtype=dtype, add_bias_linear=True)
    for linear in (experts.linear_fc1, experts.linear_fc2):
        linear.products = GroupedProducts(*products)
    x, ends = filled(rows, 16, dtype=dtype).requires_grad_(), torch.full((len(ENDS),), rows, dtype=torch.int32)
    experts(x, ends, torch.ones(rows, dtype=dtype)).sum().backward()
    for parameter in experts.parameters():
        gradient_eoi = parameter.grad.view(len(ENDS), -1)
        assert not gradient_eoi[1:].any() and (rows == 0 or gradient_eoi[0].any())


def test_the_bias_of_one_rank_has_its_gradient_there():
    experts = build(add_bias_linear=True)  # the others sum zeros to it
    assert [set(p.spec.grad) for p in (experts.linear_fc1.bias, experts.linear_fc2.bias)] == [set(), {"etp"}]


def test_rows_of_no_expert_reach_no_gradient():
    experts = build(add_bias_linear=True)
    gradients = []
    for filler in (0.0, float("nan")):
        rows, ends, weights = inputs()
        rows.data[ENDS[-1] :], weights.data[ENDS[-1] :] = filler, filler
        output = experts(rows, ends, weights)
        result = torch.autograd.grad(output, [rows, weights, *experts.parameters()], upstream())
        gradients.append([item[: ENDS[-1]] if index < 2 else item for index, item in enumerate(result)])
    for clean, with_nan in zip(*gradients):
        assert torch.equal(clean, with_nan)


def test_group_of_rows():
    assert group_of_rows(torch.tensor([0, 2, 2, 3], dtype=torch.int32), 5).tolist() == [1, 1, 3, -1, -1]


def test_xavier_values_are_as_large_as_in_a_single_expert():
    experts = build(init_method_xavier_uniform=True)
    for weight, fan_in, fan_out in ((experts.linear_fc1.weight, 16, 2 * 24), (experts.linear_fc2.weight, 24, 16)):
        bound = (6 / (fan_in + fan_out)) ** 0.5
        assert 0.95 * bound < weight.abs().max() <= bound


def test_recomputed_activations_give_the_same_gradients():
    results = []
    for overrides in ({}, {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}):
        experts, (rows, ends, weights) = build(**overrides), inputs()
        experts(rows, ends, weights).backward(upstream())
        results.append([rows.grad, weights.grad, *(p.grad for p in experts.parameters())])
    for saved, recomputed in zip(*results):
        assert torch.equal(saved, recomputed)
