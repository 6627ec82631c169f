"""Replayed routes give the recorded experts although the weights changed, in other layouts too, with gradients."""

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.config.errors import UserError
from megatron.core.transformer.moe.replay import record_routes, replay_routes
from tests.unit_tests.core.models.test_gpt_model import LLAMA, VOCAB, make_config, make_model

FIELDS = {**LLAMA, "num_moe_experts": 6, "moe_router_topk": 2, "moe_ffn_hidden_size": 20, "hidden_size": 32,
          "moe_token_dispatcher_type": "alltoall"}  # fmt: skip
LAYOUTS = {
    "cp2": {"context_parallel_size": 2},
    "tp2, sp, ep2": {
        "tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1,
    },  # fmt: skip
    "recompute": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def batches():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCAB, (2, 17), generator=generator) for _ in range(2)]


def losses(model, ids):
    layout = model.layout
    tokens, labels = (layout.local(x, 1) for x in (ids[:, :-1], ids[:, 1:]))
    return model(tokens, layout.positions(tokens.shape[1], ids.device).expand(2, -1), labels=labels)


def changed(model):
    """Other weights of the routers, which choose other experts."""
    for name, parameter in model.named_parameters():
        if "router" in name:
            parameter.data.neg_()
    return model


def recorded(rank, world_size, fields):
    sizes = {name: size for name, size in fields.items() if name.endswith("_size")}
    parallel_state.initialize_model_parallel(**sizes)
    if fields.get("tensor_model_parallel_size"):
        fields = {**fields, "sequence_parallel": True}
    model = make_model(make_config(**FIELDS, **fields))
    with record_routes([model]) as routes:
        for ids in batches():
            losses(model, ids)
    changed(model)
    with record_routes([model]) as free:
        losses(model, batches()[0])
    with record_routes([model]) as again, replay_routes([model], routes), record_routes([model]) as replayed:
        for ids in batches():
            losses(model, ids).sum().backward()
    gradient = model.decoder.layers[0].mlp.router.weight.grad
    return dict(routes), dict(replayed), dict(free), gradient is not None and gradient.abs().sum() > 0, dict(again)


def test_routes_are_recorded_and_replayed_in_every_layout(gloo_pool):
    expected = gloo_pool.run(recorded, 1, {})[0][0]
    assert expected.keys() == {1, 2} and all(len(x) == 2 and x[0].shape == (16, 2, 2) for x in expected.values())
    for fields in ({}, *LAYOUTS.values()):
        world_size = 2 if any(name.endswith("_size") for name in fields) else 1
        for routes, replayed, free, has_gradient, _ in gloo_pool.run(recorded, world_size, fields):
            assert has_gradient
            for layer, passes in expected.items():
                assert all(map(torch.equal, routes[layer], passes))
                assert all(map(torch.equal, replayed[layer], passes)) and len(replayed[layer]) == len(passes)
                assert not torch.equal(free[layer][0], passes[0])


def test_replayed_experts_have_the_gradients_of_free_routing_with_equal_choices():
    model = make_model(**FIELDS)
    ids = batches()[0]
    with record_routes([model]) as routes:
        losses(model, ids).sum().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    with replay_routes([model], routes):
        losses(model, ids).sum().backward()
    assert all(torch.equal(parameter.grad, expected[name]) for name, parameter in model.named_parameters())


def test_missing_and_other_routes_are_rejected():
    model = make_model(**FIELDS)
    ids = batches()[0]
    with record_routes([model]) as routes:
        losses(model, ids)
    with replay_routes([model], routes), pytest.raises(UserError, match="more forward passes"):
        losses(model, ids)
        losses(model, ids)
    with replay_routes([model], routes), pytest.raises(UserError, match="replay the micro-batches"):
        losses(model, ids[:, :9])
