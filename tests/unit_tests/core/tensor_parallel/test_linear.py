"""The GEMM of linear layers: torch's results; gradients in ``main_grad``, deferred on request."""

import pytest
import torch
import torch.nn.functional as F

from megatron.core import parallel_state
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.tensor_parallel.linear import LinearTraits, WeightGradientStore, parallel_linear
from tests.test_utils.training_steps import give_main_grad

DOUBLE = torch.float64
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def tensors(dtype, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(5, 3, 7), (9, 7), (9,), (5, 3, 9)]
    x, weight, bias, grad = (torch.randn(shape, generator=generator, dtype=DOUBLE).to(dtype) for shape in shapes)
    return x.requires_grad_(), torch.nn.Parameter(weight), torch.nn.Parameter(bias), grad


def plain_gradients(dtype):
    x, weight, bias, grad = tensors(dtype)
    output = F.linear(x, weight, bias)
    return output.detach(), torch.autograd.grad(output, (x, weight, bias), grad)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_outputs_and_gradients_equal_torch(dtype):
    x, weight, bias, grad = tensors(dtype)
    output = parallel_linear(x, weight, bias, LinearTraits(SINGLE_PROCESS.tp))
    output.backward(grad)
    expected, gradients = plain_gradients(dtype)
    assert torch.equal(output, expected)
    for mine, reference in zip((x.grad, weight.grad, bias.grad), gradients):
        torch.testing.assert_close(mine, reference, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_weight_gradients_add_into_main_grad_in_its_dtype(grad_dtype):
    x, weight, bias, grad = tensors(torch.bfloat16)
    arrivals = give_main_grad(weight, torch.ones(9, 7, dtype=grad_dtype))
    for _ in range(2):
        parallel_linear(x, weight, bias, LinearTraits(SINGLE_PROCESS.tp)).backward(grad)
    exact = 1 + 2 * grad.double().flatten(0, 1).t() @ x.detach().double().flatten(0, 1)
    tolerance = 1e-6 if grad_dtype == torch.float32 else 2e-2
    torch.testing.assert_close(weight.main_grad.double(), exact, rtol=tolerance, atol=tolerance * 10)
    assert len(arrivals) == 2 and weight.grad is None


def test_bias_gradients_add_into_main_grad_without_rounding():
    x, weight, bias, grad = tensors(torch.bfloat16)
    arrivals = give_main_grad(bias, torch.ones(9))
    for _ in range(2):
        parallel_linear(x, weight, bias, LinearTraits(SINGLE_PROCESS.tp)).backward(grad)
    assert len(arrivals) == 2 and bias.grad is None
    torch.testing.assert_close(bias.main_grad, 1 + 2 * grad.float().sum((0, 1)))


def test_a_weight_with_other_uses_keeps_their_gradient():
    """As with a tied embedding, one use adds to ``main_grad`` directly, the other through ``grad``."""
    x, weight, _, grad = tensors(DOUBLE)
    arrivals = give_main_grad(weight, torch.zeros(9, 7, dtype=DOUBLE))

    def accumulate(parameter):
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None

    weight.register_post_accumulate_grad_hook(accumulate)
    output = parallel_linear(x, weight, None, LinearTraits(SINGLE_PROCESS.tp, weight_has_other_uses=True))
    ((output * grad).sum() + 3 * weight.sum()).backward()
    assert not arrivals
    expected = torch.autograd.grad((F.linear(x, weight) * grad).sum() + 3 * weight.sum(), weight)[0]
    torch.testing.assert_close(weight.main_grad, expected)


@pytest.mark.parametrize("fused", [False, True])
def test_a_deferred_weight_gradient_arrives_when_it_is_computed(fused):
    x, weight, bias, grad = tensors(DOUBLE)
    calls = []
    if fused:
        calls = give_main_grad(weight, torch.zeros(9, 7, dtype=DOUBLE))
    else:
        weight.register_post_accumulate_grad_hook(calls.append)
    store = WeightGradientStore()
    parallel_linear(x, weight, bias, LinearTraits(SINGLE_PROCESS.tp), store).backward(grad)
    _, (grad_x, grad_weight, grad_bias) = plain_gradients(DOUBLE)
    torch.testing.assert_close((x.grad, bias.grad), (grad_x, grad_bias))
    assert calls == [] and weight.grad is None and len(store) == 1
    for compute in store.take():
        compute()
    assert len(calls) == 1 and len(store) == 0
    torch.testing.assert_close(weight.main_grad if fused else weight.grad, grad_weight)


def test_frozen_tensors_get_no_gradient():
    x, weight, bias, grad = tensors(DOUBLE)
    weight.requires_grad_(False)
    parallel_linear(x, weight, bias, LinearTraits(SINGLE_PROCESS.tp), WeightGradientStore()).backward(grad)
    assert weight.grad is None and bias.grad is not None
    with torch.no_grad():
        assert parallel_linear(x, weight, bias, LinearTraits(SINGLE_PROCESS.tp), WeightGradientStore()).grad_fn is None


def _across_ranks(rank, world_size, traits, deferred):
    """Column product, then row product, of a sequence that is split or not, on ranks that split 8 features."""
    group = parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size).tp
    traits = LinearTraits(**{**traits, "group": group})
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, grad = (torch.randn(*shape, generator=generator, dtype=DOUBLE) for shape in
                             [(4, 2, 3), (8, 3), (8,), (4, 2, 8)])  # fmt: skip
    mine = slice(rank * 8 // world_size, (rank + 1) * 8 // world_size)
    local = slice(rank * 4 // world_size, (rank + 1) * 4 // world_size)
    weight, bias = torch.nn.Parameter(weight[mine].clone()), torch.nn.Parameter(bias[mine].clone())
    x = (x[local] if traits.gather_input else x).clone().requires_grad_()
    store = WeightGradientStore() if deferred else None
    output = parallel_linear(x, weight, bias, traits, store)
    output.backward(grad[..., mine])
    for compute in store.take() if deferred else ():
        compute()
    grad_x = x.grad if traits.gather_input or rank == 0 else x.grad[:0]
    return output.detach(), grad_x, weight.grad, bias.grad


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("traits", [
    {"reduce_input_gradient": True}, {"gather_input": True},
], ids=["replicated", "gathered"])  # fmt: skip
def test_column_products_over_ranks_equal_one(gloo_pool, traits, deferred):
    ((output, grad_x, grad_weight, grad_bias),) = gloo_pool.run(_across_ranks, 1, {}, False)
    for world_size in (2, 4):
        split = gloo_pool.run(_across_ranks, world_size, traits, deferred)
        for dim, full, parts in zip((-1, 0, 0, 0), (output, grad_x, grad_weight, grad_bias), zip(*split)):
            torch.testing.assert_close(torch.cat(parts, dim=dim), full, rtol=1e-12, atol=1e-12)
