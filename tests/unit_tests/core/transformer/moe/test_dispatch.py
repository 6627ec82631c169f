"""Every way of dispatch, over every layout of experts, gives the outputs and gradients of one rank that has all.

Legend: t tokens, h hidden, f feed-forward, e experts, k choices of a token.
"""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core import parallel_state
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.sharding.placement import initialize_parameters, local_rectangle, local_view
from megatron.core.transformer.moe.dispatch import build_dispatcher
from megatron.core.transformer.moe.experts import SequentialExperts
from megatron.core.transformer.moe.routing import Routing, expert_capacity, within_capacity
from tests.test_utils.layout_faults import through_copy_engines
from tests.test_utils.specs import named_specs

TOKENS, HIDDEN, FFN, EXPERTS, K = 24, 6, 10, 4, 2
DOUBLE = torch.float64


def config_of(**overrides):
    settings = {
        "num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 1, "ffn_hidden_size": FFN, "swiglu": True,
        "num_moe_experts": EXPERTS, "moe_router_topk": K, "params_dtype": DOUBLE, "add_bias_linear": False,
        "init_method_std": 0.5,
    }  # fmt: skip
    return TransformerConfig(**(settings | overrides))


def batch(dropped=0.0, skewed=False):
    """Tokens, weights, choices and upstream gradients of all ranks."""
    generator = torch.Generator().manual_seed(5)
    tokens_th = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=DOUBLE)
    scores_te = torch.randn(TOKENS, EXPERTS, generator=generator, dtype=DOUBLE)
    if skewed:  # no token chooses the experts of the last rank
        scores_te[:, EXPERTS // 2 :] -= 100
    weights_tk, experts_tk = scores_te.softmax(-1).topk(K)
    drop_tk = torch.rand(TOKENS, K, generator=generator) < dropped
    upstream_th = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=DOUBLE)
    return tokens_th, weights_tk.masked_fill(drop_tk, 0), experts_tk.masked_fill(drop_tk, EXPERTS), upstream_th


def run_layer(config, groups, data, experts_class=SequentialExperts):
    """Outputs, gradients of tokens and weights, pieces of the parameters' gradients."""
    dispatcher, experts = build_dispatcher(config, groups=groups), experts_class(config, groups=groups)
    initialize_parameters(experts, 3, groups)
    for name, param in experts.named_parameters():
        if name.endswith("bias"):
            param.data.fill_(0.25)
    tokens, weights, choices, upstream = data
    tokens, weights = tokens.clone().requires_grad_(), weights.clone().requires_grad_()
    dispatched = dispatcher.dispatch(tokens, Routing(choices, weights))
    output = dispatcher.combine(experts(dispatched.rows, dispatched.ends, dispatched.weights), dispatched)
    output.backward(upstream)
    for param in experts.parameters():
        param.grad = torch.zeros_like(param) if param.grad is None else param.grad  # another rank adds the bias
    pieces = [
        (name, spec.shape, local_rectangle(spec, groups), local_view(param.grad, spec, groups).clone())
        for name, param, spec in named_specs(experts)
    ]
    return output.detach(), tokens.grad, weights.grad, pieces


def on_ranks(rank, world, ep, etp, overrides, data):
    groups = parallel_state.initialize_model_parallel(
        expert_model_parallel_size=ep, expert_tensor_parallel_size=etp
    )  # fmt: skip
    local = [item.chunk(world)[rank] for item in data]
    return run_layer(config_of(**overrides), groups, local)


def summed(pieces):
    """{name: sum of all ranks' pieces}; copies add up."""
    full = {}
    for name, shape, rectangle, local in pieces:
        target = full.setdefault(name, torch.zeros(shape, dtype=DOUBLE))
        rectangle.of(target).add_(local)
    return full


def compare(results, expected):
    for index in range(3):
        torch.testing.assert_close(
            torch.cat([result[index] for result in results]), expected[index], rtol=1e-10, atol=1e-12
        )  # fmt: skip
    actual, exact = summed([piece for result in results for piece in result[3]]), summed(expected[3])
    torch.testing.assert_close(actual, exact, rtol=1e-10, atol=1e-12)


def by_hand(config, data):
    """Every token through its experts, one after the other."""
    experts = SequentialExperts(config, groups=SINGLE_PROCESS)
    initialize_parameters(experts, 3, SINGLE_PROCESS)
    tokens, weights, choices, upstream = data
    tokens, weights = tokens.clone().requires_grad_(), weights.clone().requires_grad_()
    fc1 = experts.linear_fc1.weight.detach().view(EXPERTS, 2 * FFN, HIDDEN)
    fc2 = experts.linear_fc2.weight.detach().view(EXPERTS, HIDDEN, FFN)
    rows = []
    for token, weight_k, choice_k in zip(tokens, weights, choices):
        total = torch.zeros(HIDDEN, dtype=DOUBLE)
        for weight, choice in zip(weight_k, choice_k.tolist()):
            if choice < EXPERTS:
                gate, up = (fc1[choice] @ token).chunk(2)
                total = total + weight * (fc2[choice] @ (torch.nn.functional.silu(gate) * up))
        rows.append(total)
    output = torch.stack(rows)
    output.backward(upstream)
    return output.detach(), tokens.grad, weights.grad


LAYOUTS = {
    "ep2": (2, 2, 1), "ep4": (4, 4, 1), "etp2": (2, 1, 2), "ep2·etp2": (4, 2, 2), "ep2·edp2": (4, 2, 1),
}  # fmt: skip

KINDS = {
    "allgather": {}, "static": {"moe_static_rows": True}, "alltoall": {"moe_token_dispatcher_type": "alltoall"},
}  # fmt: skip


@pytest.mark.parametrize("dropped", [0.0, 0.4])
def test_one_rank_computes_every_token_through_its_experts(dropped):
    data = batch(dropped)
    for actual, expected in zip(run_layer(config_of(), SINGLE_PROCESS, data), by_hand(config_of(), data)):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dropped, skewed", [(0.0, False), (0.4, False), (0.0, True)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_equals_one_rank(gloo_pool, layout, kind, dropped, skewed):
    world, ep, etp = LAYOUTS[layout]
    data = batch(dropped, skewed)
    results = gloo_pool.run(on_ranks, world, ep, etp, KINDS[kind], data)
    compare(results, run_layer(config_of(), SINGLE_PROCESS, data))


@pytest.mark.parametrize("kind", ["allgather", "alltoall"])
def test_plain_activations_and_biases_equal_one_rank_too(gloo_pool, kind):
    overrides, data = {"swiglu": False, "add_bias_linear": True, "moe_token_dispatcher_type": kind}, batch(0.2)
    expected = run_layer(config_of(**overrides), SINGLE_PROCESS, data)
    compare(gloo_pool.run(on_ranks, 4, 2, 2, overrides, data), expected)


FACTOR = 1.25
PADDED = {"moe_expert_capacity_factor": FACTOR, "moe_pad_expert_input_to_capacity": True}


def through_engines(rank, world, ep, etp, overrides, data):
    """Run the dispatch through copy engines; also return their transfers and the calls that NCCL received."""
    with through_copy_engines(rank), mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as nccl:
        groups = parallel_state.initialize_model_parallel(
            expert_model_parallel_size=ep, expert_tensor_parallel_size=etp
        )  # fmt: skip
        result = run_layer(config_of(**overrides), groups, [item.chunk(world)[rank] for item in data])
    engines = groups.etp_ep.engines
    return *result, (engines._gathers._number > 0, engines._exchanges._number > 0, nccl.call_count)


@pytest.mark.parametrize("kind", ["allgather", "static", "padded"])
@pytest.mark.parametrize("layout", ["ep2", "ep2·etp2"])
def test_copy_engines_dispatch_rows_of_known_sizes(gloo_pool, layout, kind):
    """All-gather dispatch gathers tokens and exchanges sums; all-to-all needs rows of equal number."""
    world, ep, etp = LAYOUTS[layout]
    data, padded = batch(), kind == "padded"
    if padded:
        data = limited(data, world)
    overrides = KINDS["alltoall"] | PADDED if padded else KINDS[kind]
    results = gloo_pool.run(through_engines, world, ep, etp, overrides, data)
    compare(results, run_layer(config_of(), SINGLE_PROCESS, data))
    assert {result[4] for result in results} == {(not padded, True, int(padded))}, "only counts go through NCCL"


def limited(data, ranks):
    """Drop each rank's choices beyond the capacity for its local tokens."""
    tokens, weights, choices, upstream = data
    capacity = expert_capacity(TOKENS // ranks, EXPERTS, K, FACTOR)
    shares = zip(choices.chunk(ranks), weights.chunk(ranks))
    saved = torch.cat([within_capacity(*share, EXPERTS, capacity) for share in shares])
    return tokens, weights.where(saved, 0), choices.where(saved, EXPERTS), upstream


@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("kind", ["allgather", "alltoall"])
@pytest.mark.parametrize("layout", [None, "ep2", "etp2", "ep2·etp2"])
def test_padding_to_capacity_changes_nothing(gloo_pool, layout, kind, skewed):
    world, ep, etp = LAYOUTS.get(layout, (1, 1, 1))
    data = limited(batch(skewed=skewed), world)
    overrides = PADDED | {"moe_token_dispatcher_type": kind}
    results = gloo_pool.run(on_ranks, world, ep, etp, overrides, data)
    compare(results, run_layer(config_of(), SINGLE_PROCESS, data))


def no_host(*_):
    raise AssertionError("the host waits for the device")


@contextmanager
def without_the_host(monkeypatch):
    """Nothing reads a tensor's values."""
    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "__bool__", "__int__", "__index__"):
            patch.setattr(torch.Tensor, name, no_host)
        yield


def dispatch_without_the_host(rank, world, ep, etp, overrides, data):
    groups = parallel_state.initialize_model_parallel(expert_model_parallel_size=ep, expert_tensor_parallel_size=etp)
    dispatcher = build_dispatcher(config_of(**overrides), groups=groups)
    tokens, weights, choices, _ = [item.chunk(world)[rank] for item in data]
    with without_the_host(pytest.MonkeyPatch()):
        dispatched = dispatcher.dispatch(tokens, Routing(choices, weights))
        dispatcher.combine(dispatched.rows, dispatched)
    return len(dispatched.rows)


def test_one_rank_needs_no_word_from_the_device(gloo_pool):
    assert gloo_pool.run(dispatch_without_the_host, 1, 1, 1, {}, batch()) == [TOKENS * K]
    etp2 = {"moe_token_dispatcher_type": "allgather"}
    assert gloo_pool.run(dispatch_without_the_host, 2, 1, 2, etp2, batch()) == [TOKENS * K] * 2


def test_static_rows_need_no_word_from_the_device(gloo_pool):
    """Each of a rank's two experts has rows for all tokens of both ranks, so that no choice exceeds them."""
    static = {"moe_static_rows": True}
    assert gloo_pool.run(dispatch_without_the_host, 2, 2, 1, static, batch()) == [TOKENS * K] * 2
    assert gloo_pool.run(dispatch_without_the_host, 4, 4, 1, static, batch()) == [TOKENS] * 4


@pytest.mark.parametrize("kind", ["allgather", "alltoall"])
def test_padded_rows_need_no_word_from_the_device(gloo_pool, kind):
    overrides = PADDED | {"moe_token_dispatcher_type": kind}
    rows = EXPERTS // 2 * 2 * expert_capacity(TOKENS // 2, EXPERTS, K, FACTOR)
    data = limited(batch(), 2)
    assert gloo_pool.run(dispatch_without_the_host, 2, 2, 1, overrides, data) == [rows] * 2


class Operations(TorchDispatchMode):
    """Counts operations that do something: no views, no memory that is only taken."""

    NONE = {"view", "_unsafe_view", "unsqueeze", "squeeze", "select", "slice", "unbind", "detach", "expand", "alias",
            "empty", "new_empty", "empty_like", "promote_types"}  # fmt: skip
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket.__name__ not in self.NONE
        return function(*args, **(kwargs or {}))


def operations(rank, world, overrides, data):
    groups = parallel_state.initialize_model_parallel(expert_model_parallel_size=world)
    dispatcher = build_dispatcher(config_of(**overrides), groups=groups)
    tokens, weights, choices, _ = [item.chunk(world)[rank] for item in data]
    tokens, weights = tokens.clone().requires_grad_(), weights.clone().requires_grad_()
    with Operations() as counted:
        dispatched = dispatcher.dispatch(tokens, Routing(choices, weights, drops=False))
        rows = dispatched.rows * dispatched.weights.unsqueeze(-1)
        dispatcher.combine(rows, dispatched).sum().backward()
    return counted.count


@pytest.mark.parametrize("world, kind, most", [(1, "allgather", 45), (2, "allgather", 68), (2, "alltoall", 91)])
def test_tokens_take_few_operations_there_and_back(gloo_pool, world, kind, most):
    """The host launches each of them, in every layer: with small experts that is what a step waits for. In place of
    the plain gathers and sums here, of four to eight operations, a GPU has a kernel each."""
    assert max(gloo_pool.run(operations, world, KINDS[kind], batch())) <= most


def rows_in_order(rank, world, kind):
    groups = parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    dispatcher = build_dispatcher(config_of(moe_token_dispatcher_type=kind), groups=groups)
    tokens, weights, choices, _ = [item.chunk(world)[rank] for item in batch()]
    return dispatcher.dispatch(tokens, Routing(choices, weights))


@pytest.mark.parametrize("kind", ["allgather", "alltoall"])
def test_rows_of_an_expert_are_in_the_order_of_tokens(gloo_pool, kind):
    tokens, weights, choices, _ = batch()
    for rank, dispatched in enumerate(gloo_pool.run(rows_in_order, 2, kind)):
        places = [place for expert in (2 * rank, 2 * rank + 1) for place in (choices == expert).nonzero().tolist()]
        assert torch.equal(dispatched.rows, tokens[[token for token, _ in places]])
        assert torch.equal(dispatched.weights, torch.stack([weights[token, k] for token, k in places]))


def in_other_order(rank, world, kind, data):
    groups = parallel_state.initialize_model_parallel(
        expert_model_parallel_size=2, expert_tensor_parallel_size=2, order="ep-dp-tp-cp-pp"
    )
    assert groups.etp_ep.ranks.index(groups.ep.ranks[1]) - groups.etp_ep.ranks.index(groups.ep.ranks[0]) == 1
    return run_layer(config_of(moe_token_dispatcher_type=kind), groups, [item.chunk(world)[rank] for item in data])


@pytest.mark.parametrize("kind", ["allgather", "alltoall"])
def test_the_order_of_the_axes_does_not_matter(gloo_pool, kind):
    data = batch(0.2)
    compare(gloo_pool.run(in_other_order, 4, kind, data), run_layer(config_of(), SINGLE_PROCESS, data))
