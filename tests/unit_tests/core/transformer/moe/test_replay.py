"""Replayed routes give the recorded experts although the weights changed, in other layouts too, with gradients."""

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.config.errors import UserError
from megatron.core.inference.engine import Engine
from megatron.core.inference.requests import Request
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.scheduler import Limits
from megatron.core.rl.log_probabilities import token_statistics
from megatron.core.transformer.moe.replay import pack_routes, record_routes, replay_routes
from tests.unit_tests.core.models.test_gpt_model import LLAMA, VOCAB, make_config, make_model

FIELDS = {**LLAMA, "num_moe_experts": 6, "moe_router_topk": 2, "moe_ffn_hidden_size": 20, "hidden_size": 32,
          "moe_token_dispatcher_type": "alltoall"}  # fmt: skip
LAYOUTS = {
    "cp2": {"context_parallel_size": 2},
    "tp2, sp, ep2": {
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
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
    with record_routes([model]) as repeated, replay_routes([model], routes), record_routes([model]) as replayed:
        for ids in batches():
            losses(model, ids).sum().backward()
    gradient = model.decoder.layers[0].mlp.router.weight.grad
    return dict(routes), dict(replayed), dict(free), gradient is not None and gradient.abs().sum() > 0, dict(repeated)


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


PROMPTS = [[5, 7, 1], [8] * 9, [3, 2, 8, 4, 1, 5], [9, 9, 2, 30]]
ROW = 20
RANKS = {
    "tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size", "etp": "expert_tensor_parallel_size",
}  # fmt: skip
ROPE = {"position_embedding_type": "rope", "rotary_percent": 1.0}


def rank_model(ranks):
    """The model of this rank: a dense layer, then two of experts."""
    sizes = {RANKS[name]: size for name, size in ranks.items()}
    groups = parallel_state.initialize_model_parallel(**sizes)
    fields = {**FIELDS, **sizes, "num_layers": 4, "moe_layer_freq": [0, 1, 1, 0], "ffn_hidden_size": 48}
    if ranks.get("tp", 1) > 1:
        fields["sequence_parallel"] = True
    ends = {"pre_process": groups.pp.is_first, "post_process": groups.pp.is_last}
    return make_model(make_config(**fields), **ends, **ROPE)


def generated(rank, world_size, ranks):
    """Completions with routes, in small steps with preemption."""
    engine = Engine(rank_model(ranks), Limits(max_length=16, max_tokens=5, max_sequences=3), num_pages=8, page_size=4)
    requests = [Request(prompt=x, max_new_tokens=6, sampling=Sampling(seed=n), return_routes=n != 3)
                for n, x in enumerate([*PROMPTS, PROMPTS[1]])]  # fmt: skip
    results = [(x.tokens, [y.logprob for y in x.scores], x.routes) for x in engine.generate(requests)]
    return results, engine.scheduler.num_preemptions


def replayed(rank, world_size, ranks, sequences, routes):
    """Statistics with free and replayed routes, and with other routers."""
    model = rank_model(ranks)
    free = token_statistics([model], sequences, row_length=ROW, routes=None)
    result = token_statistics([model], sequences, row_length=ROW, routes=routes)
    return free, result, token_statistics([changed(model)], sequences, row_length=ROW)


def test_the_trainer_replays_the_routes_of_generated_texts(gloo_pool):
    ((finished, preemptions),) = gloo_pool.run(generated, 1, {})
    assert preemptions and finished[3][2] == {}
    for ranks in ({"tp": 2, "ep": 2, "etp": 1}, {"pp": 2}):
        (rest, _), *_ = gloo_pool.run(generated, 2, ranks)
        for (tokens, _, routes), (expected, _, requested) in zip(rest, finished, strict=True):
            assert tokens == expected and routes.keys() == requested.keys()
            assert all(torch.equal(routes[layer], requested[layer]) for layer in requested)
    finished, prompts = finished[:3] + finished[4:], [*PROMPTS[:3], PROMPTS[1]]
    sequences = [[*prompt, *tokens] for prompt, (tokens, _, _) in zip(prompts, finished)]
    routes = [item for _, _, item in finished]
    assert all(route.keys() == {2, 3} for route in routes)
    assert [len(route[2]) for route in routes] == [len(x) - 1 for x in sequences]
    for ranks in ({}, {"cp": 2}, {"pp": 2}, {"tp": 2, "ep": 2, "etp": 1}, {"ep": 2}):
        world_size = 1 if not ranks else 2
        for free, actual, other in gloo_pool.run(replayed, world_size, ranks, sequences, routes):
            for prompt, (_, scores, _), x, y, z in zip(prompts, finished, free, actual, other, strict=True):
                expected = torch.tensor(scores, dtype=torch.float64)
                torch.testing.assert_close(y.log_probabilities[len(prompt) - 1 :], expected, atol=1e-10, rtol=0)
                torch.testing.assert_close(x.log_probabilities, y.log_probabilities, atol=1e-10, rtol=0)
                assert not torch.allclose(z.log_probabilities, y.log_probabilities, atol=1e-3)


@pytest.fixture
def discards_groups():
    yield
    parallel_state.destroy_model_parallel()


@pytest.mark.usefixtures("discards_groups")
def test_replayed_experts_are_those_of_the_generator_although_the_router_changed():
    model = rank_model({})
    engine = Engine(model, Limits(max_length=16), num_pages=8, page_size=4)
    (finished,) = engine.generate([Request(prompt=PROMPTS[0], max_new_tokens=6, return_routes=True)])
    ids = torch.tensor([[*PROMPTS[0], *finished.tokens]])
    packed = pack_routes([finished.routes], [[(0, 0)]], ids.shape[1])
    with record_routes([changed(model)]) as free, replay_routes([model], packed), record_routes([model]) as used:
        model(ids, torch.arange(ids.shape[1])[None])
    for layer, experts in finished.routes.items():
        assert torch.equal(used[layer][0][:-1, 0], experts)
        assert not torch.equal(free[layer][0][:-1, 0], experts)
        assert torch.equal(free[layer][0][-1], used[layer][0][-1])  # no pass of the engine computed the last token


def test_routes_are_packed_at_the_places_of_their_sequences():
    routes = [{2: torch.tensor([[1, 0], [2, 3]])}, {2: torch.tensor([[3, 1]])}]
    packed = pack_routes(routes, [[(1, 0), (0, 2)], []], 5)
    free = [-1, -1]
    assert [x[:, 0].tolist() for x in packed[2]] == [[[3, 1], free, [1, 0], [2, 3], free], [free] * 5]


@pytest.mark.parametrize(("routes", "problem"), [
    ([{1: torch.zeros(2, 2)}], "1 sequences have routes, 2 have tokens"),
    ([{1: torch.zeros(2, 2)}, {2: torch.zeros(2, 2)}], r"sequence 1 has layers \[2\], sequence 0 \[1\]"),
    ([{1: torch.zeros(3, 2)}, {1: torch.zeros(4, 2)}], "sequence 1 has 3 tokens, and routes of 4"),
])  # fmt: skip
@pytest.mark.usefixtures("discards_groups")
def test_routes_of_other_sequences_are_rejected(routes, problem):
    parallel_state.initialize_model_parallel()
    with pytest.raises(UserError, match=problem):
        token_statistics([make_model(**FIELDS)], [[1, 2, 3]] * 2, row_length=ROW, routes=routes)


def test_only_models_with_experts_return_routes():
    engine = Engine(make_model(**LLAMA), Limits(max_length=16), num_pages=4, page_size=4)
    with pytest.raises(UserError, match="return_routes: the model has no experts"):
        engine.add(Request(prompt=[1], return_routes=True))
