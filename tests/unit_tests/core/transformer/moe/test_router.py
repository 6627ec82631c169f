"""The router as a module: its numerics, what it draws, what it counts, what outlives a step."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from megatron.core.attention.token_layout import TokenLayout
from megatron.core.config.errors import UserError
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.fusions.dispatch import ByDevice
from megatron.core.groups.process_groups import SINGLE_PROCESS, Group
from megatron.core.pipeline_parallel.loss_weights import AuxLossWeights
from megatron.core.random.dropout import DropoutCoordinates
from megatron.core.random.philox import DropoutStream
from megatron.core.sharding.placement import initialize_parameters
from megatron.core.transformer.context import ForwardContext
from megatron.core.transformer.moe import router as router_module
from megatron.core.transformer.moe import routing
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.recompute import recompute
from tests.test_utils.training_steps import give_main_grad

DOUBLE = torch.float64


def make_router(layer_number=1, **overrides):
    settings = {
        "num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "params_dtype": DOUBLE, "num_moe_experts": 8,
        "moe_router_topk": 2, "add_bias_linear": False, "init_method_std": 0.5, **overrides,
    }  # fmt: skip
    router = TopKRouter(TransformerConfig(**settings), layer_number=layer_number, groups=SINGLE_PROCESS)
    initialize_parameters(router, 7, SINGLE_PROCESS)
    return router


def hidden(s=6, b=3, h=16, dtype=DOUBLE):
    return torch.randn(s, b, h, generator=torch.Generator().manual_seed(5), dtype=DOUBLE).to(dtype)


def context(s=6, b=3, first_sample=0):
    coordinates = DropoutCoordinates(DropoutStream(3), first_sample + torch.arange(b), torch.arange(s))
    return ForwardContext(dropout=coordinates)


def test_routing_of_a_plain_router():
    router, x = make_router(), hidden()
    experts, weights, _ = router(x)
    logits = F.linear(x, router.weight).view(18, 8)
    assert experts.dtype == torch.int64 and torch.equal(experts, logits.topk(2).indices)
    torch.testing.assert_close(weights, logits.topk(2).values.softmax(-1))


def test_counts_of_a_step():
    router, x = make_router(moe_expert_capacity_factor=0.5), hidden()
    experts, weights, _ = router(x)
    sums = taken(router)
    assert sums["tokens_per_expert"].tolist() == experts.flatten().bincount(minlength=9)[:8].tolist()
    assert sums["tokens_per_expert"].max() <= 3 and sums["dropped"].item() == 36 - sums["tokens_per_expert"].sum()
    assert sums["nonfinite_router_logit"].item() == 0 and torch.equal(weights == 0, experts == 8)
    router.eval()(x)
    assert not router.statistics.take(x.device).any()


@pytest.mark.parametrize("settings", [
    {}, {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    {"moe_expert_capacity_factor": 0.5},
], ids=["plain", "expert bias", "capacity"])  # fmt: skip
def test_padding_of_a_layout_is_not_counted(settings):
    """Of six positions the last two are padding: as many tokens go to each expert as from four positions."""
    router, x = make_router(**settings), hidden()
    experts, *_ = router(x, ForwardContext(layout=TokenLayout(padding=2)))
    expected = experts.view(6, 3, 2)[:4].flatten().bincount(minlength=9)[:8]
    counts = taken(router)["tokens_per_expert"]
    assert counts.tolist() == expected.tolist() and 0 < counts.sum() <= 24


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, DOUBLE])
@pytest.mark.parametrize("router_dtype", [None, "fp32", "fp64"])
def test_precision_of_the_router(dtype, router_dtype):
    router = make_router(params_dtype=dtype, moe_router_dtype=router_dtype, add_bias_linear=True)
    with torch.no_grad():
        router.bias.copy_(torch.linspace(-1, 1, 8))
    x = hidden(dtype=dtype).requires_grad_()
    experts, weights, _ = router(x)
    wide = max(dtype, {None: dtype, "fp32": torch.float32, "fp64": DOUBLE}[router_dtype], key=lambda d: d.itemsize)
    assert weights.dtype == wide
    exact, w, bias = x.detach().to(wide).requires_grad_(), *(p.detach().to(wide) for p in (router.weight, router.bias))
    w.requires_grad_()
    logits = F.linear(exact, w, bias)
    chosen = logits.flatten(0, 1).gather(1, experts).to(torch.promote_types(wide, torch.float32)).softmax(1).to(wide)
    torch.testing.assert_close(weights, chosen, rtol=1e-2 if wide == torch.bfloat16 else 1e-6, atol=1e-6)
    target = torch.randn(18, 2, dtype=wide)
    (weights * target).sum().backward()
    (chosen * target).sum().backward()
    loose = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    assert router.weight.grad.dtype == x.grad.dtype == dtype and router.bias.grad is not None
    torch.testing.assert_close(x.grad, exact.grad.to(dtype), **loose)
    torch.testing.assert_close(router.weight.grad, w.grad.to(dtype), **loose)


def test_jitter_depends_only_on_the_token_and_on_training():
    router, x = make_router(moe_input_jitter_eps=0.25), hidden()
    jittered = router._jittered(x, context())
    factor = jittered / x
    assert factor.min() > 0.75 and factor.max() < 1.25 and 0.1 < (factor - 1).std() < 0.18
    assert len(factor.unique()) > 0.9 * factor.numel()
    parts = [router._jittered(x[:, b : b + 1], context(b=1, first_sample=b)) for b in range(3)]
    assert torch.equal(torch.cat(parts, 1), jittered)  # any micro-batch size
    assert not torch.equal(router._jittered(x, context(first_sample=3)), jittered)  # the next step
    assert not torch.equal(make_router(2, moe_input_jitter_eps=0.25)._jittered(x, context()), jittered)
    with pytest.raises(ValueError, match="coordinates"):
        router(x)
    assert router.eval()._jittered(x, ForwardContext()) is x


def test_jitter_scales_gradients():
    router, x = make_router(moe_input_jitter_eps=0.25), hidden().requires_grad_()
    factor = (router._jittered(x, context()) / x).detach()
    experts, weights, _ = router(x, context())
    weights[:, 0].sum().backward()
    y = (x.detach() * factor).requires_grad_()
    make_router().rule.weigh(F.linear(y, router.weight), experts.view(6, 3, 2))[..., 0].sum().backward()
    torch.testing.assert_close(x.grad, y.grad * factor)


def test_forced_balance_is_exact_and_keeps_the_gradient():
    router, x = make_router(moe_router_force_load_balancing=True, moe_router_topk=4), hidden().requires_grad_()
    experts, weights, _ = router(x)
    assert experts.flatten().bincount(minlength=8).tolist() == [9] * 8
    torch.testing.assert_close(weights, F.linear(x, router.weight).view(18, 8).gather(1, experts).softmax(1))
    weights[:, 0].sum().backward()
    assert router.weight.grad.abs().sum() > 0 and torch.equal(router.eval()(x).experts, experts)


@pytest.mark.parametrize("k", [1, 2])
def test_sinkhorn_balances_in_training_only(k):
    router, x = make_router(moe_router_load_balancing_type=["sinkhorn"], moe_router_topk=k), hidden(32, 8)
    logits = F.linear(x, router.weight).view(256, 8)
    experts, weights, _ = router(x)
    torch.testing.assert_close(weights, (logits.sigmoid() if k == 1 else logits.softmax(1)).gather(1, experts))
    even = router.eval()(x)
    assert torch.equal(even.experts, logits.topk(k).indices)
    assert _spread(experts) < 0.5 * _spread(even.experts)


def test_quantiles_give_every_expert_as_many_tokens():
    router, x = make_router(moe_router_load_balancing_type=["quantile_balancing"], moe_router_topk=3), hidden(32, 8)
    logits_te = F.linear(x, router.weight).view(256, 8)
    spread = []
    for _ in range(8):
        experts, weights, _ = router(x)
        assert torch.equal(experts, (logits_te + router.expert_bias).topk(3).indices)
        torch.testing.assert_close(weights, logits_te.gather(1, experts).softmax(1))
        spread.append(_spread(experts))
        fourth_t = (logits_te + router.expert_bias).sort(1, descending=True).values[:, 3]
        level_e = (logits_te - fourth_t[:, None]).sort(0, descending=True).values[256 * 3 // 8]
        router.end_step(taken(router))
        torch.testing.assert_close(router.expert_bias, (level_e.mean() - level_e).float())
    assert spread[-1] < 0.2 * spread[0], spread
    router.eval()(x)
    assert not router.statistics.take(x.device).any()


def test_quantiles_are_of_all_tokens_of_shared_sequences_in_float32(monkeypatch):
    logits, bias = hidden(8, 3, 8, torch.bfloat16), torch.linspace(-1, 1, 8)
    full = routing.quantile_levels(logits.float(), bias, 2, SINGLE_PROCESS.cp)
    assert torch.equal(routing.quantile_levels(logits, bias, 2, SINGLE_PROCESS.cp), full)
    parts, sharers = [], Group("cp", (0, 1), 0)

    def begin_all_gather(x, group):
        assert group is sharers
        parts.append(x)
        return SimpleNamespace(wait=lambda: torch.cat(parts[-2:]))

    monkeypatch.setattr(routing, "begin_all_gather", begin_all_gather)
    first, both = (routing.quantile_levels(half, bias, 2, sharers) for half in logits.chunk(2))
    assert torch.equal(both, full) and not torch.equal(first, full)


def test_a_part_of_the_quantiles_stays():
    settings = {"moe_router_load_balancing_type": ["quantile_balancing"], "moe_router_quantile_balancing_ema": 0.75}
    router = make_router(**settings)
    router.expert_bias.fill_(4.0)
    router.end_step({"_levels": torch.tensor([2.0, 6, 4, 4, 4, 4, 4, 4, 2], dtype=DOUBLE)})  # of two micro-batches
    assert router.expert_bias.tolist() == [3.25, 2.75, *[3.0] * 6]


@pytest.mark.parametrize("settings, message", [
    ({"moe_router_topk": 8}, "below 8"), ({"num_moe_experts": 5}, "5 experts do not divide 18 tokens x 2 choices"),
    ({"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}, "a separate bias"),
])  # fmt: skip
def test_quantiles_that_are_none_are_rejected(settings, message):
    with pytest.raises(UserError, match=message):
        make_router(moe_router_load_balancing_type=["quantile_balancing"], **settings)(hidden())


def _spread(experts):
    return experts.flatten().bincount(minlength=8).double().std()


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_capacity_drops_choices_and_keeps_the_others(policy):
    settings = {"moe_expert_capacity_factor": 0.75, "moe_token_drop_policy": policy}
    full, x = make_router()(hidden()), hidden().requires_grad_()
    router = make_router(**settings)
    experts, weights, _ = router(x)
    dropped = experts == 8
    assert dropped.any() and torch.equal(experts[~dropped], full.experts[~dropped])
    torch.testing.assert_close(weights, full.weights.where(~dropped, 0.0))
    capacity = 4  # ceil(18 * 2 / 8 * 0.75)
    for e in range(8):
        places = (full.experts == e).nonzero()
        if policy == "probs":
            places = places[full.weights[places[:, 0], places[:, 1]].sort(descending=True).indices]
        assert not dropped[places[:capacity, 0], places[:capacity, 1]].any()
        assert dropped[places[capacity:, 0], places[capacity:, 1]].all()
    weights[dropped].sum().backward()
    assert not x.grad.any()


def test_nonfinite_logits_are_counted():
    router, x = make_router(), hidden()
    x[2, 1, 3] = torch.nan
    x[0, 0] = torch.inf
    experts, *_ = router(x)
    assert taken(router)["nonfinite_router_logit"].item() == 16 and experts.min() >= 0 and experts.max() < 8


def test_expert_bias_moves_towards_equal_load():
    router = make_router(
        moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid", moe_router_bias_update_rate=0.01
    )
    counts = torch.tensor([3, 1, 2, 2, 2, 2, 2, 2], dtype=DOUBLE)
    router.end_step({"tokens_per_expert": counts})
    assert router.expert_bias.tolist() == pytest.approx([-0.01, 0.01, 0, 0, 0, 0, 0, 0])
    router.end_step({"tokens_per_expert": torch.full((8,), 2.0**52 / 3 // 1, dtype=DOUBLE)})  # equal: no rounding
    assert router.expert_bias.tolist() == pytest.approx([-0.01, 0.01, 0, 0, 0, 0, 0, 0])
    x = hidden()
    for _ in range(300):
        router(x)
        router.end_step(taken(router))
    experts, weights, _ = router(x)
    assert experts.flatten().bincount(minlength=8).max() <= 6  # of 4.5 in the mean
    scores = F.linear(x, router.weight).view(18, 8).sigmoid().gather(1, experts)
    torch.testing.assert_close(weights, scores / scores.sum(1, keepdim=True))  # of scores without the bias


def test_expert_bias_stays_fp32():
    router = make_router(moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid")
    router.end_step({"tokens_per_expert": torch.arange(8.0, dtype=DOUBLE)})
    before = router.expert_bias.clone()
    router.bfloat16()
    assert router.weight.dtype == torch.bfloat16 and router.expert_bias.dtype == torch.float32
    assert torch.equal(router.expert_bias, before)
    assert router.to("meta").expert_bias.is_meta
    assert "expert_bias" in router.state_dict() and "expert_bias" not in make_router().state_dict()


def test_expert_bias_of_softmax_is_rejected():
    with pytest.raises(UserError, match="moe_router_enable_expert_bias"):
        make_router(moe_router_enable_expert_bias=True)


def test_recomputation_routes_as_the_first_pass_did_and_counts_once():
    settings = {"moe_expert_capacity_factor": 0.75, "moe_aux_loss_coeff": [0.1], "moe_router_num_groups": 4,
                "moe_router_group_topk": 2, "moe_router_enable_expert_bias": True,
                "moe_router_score_function": "sigmoid"}  # fmt: skip
    ctx = ForwardContext(aux_losses=AuxLossWeights(torch.ones(3), torch.ones(())))
    plain, x = make_router(**settings), hidden().requires_grad_()
    (plain(x, ctx).weights ** 2).sum().backward()
    router, y = make_router(**settings), hidden().requires_grad_()

    def run(y):
        if not first.pop():  # more than rounding might do
            router.expert_bias.add_(torch.linspace(3, -3, 8))
        return router(y, ctx).weights

    first = [False, True]
    (recompute(run, y) ** 2).sum().backward()
    torch.testing.assert_close(y.grad, x.grad)
    torch.testing.assert_close(router.weight.grad, plain.weight.grad)
    for (name, sums), rest in zip(taken(router).items(), taken(plain).values()):
        assert torch.equal(sums, rest), name


def taken(router):
    """Statistics since the last call, by name."""
    sizes = router.statistics.sizes
    return dict(zip(sizes, router.statistics.take(router.weight.device).split([*sizes.values()])))


def test_gradients_of_an_fp32_router_are_rounded_once():
    router, x = make_router(params_dtype=torch.bfloat16, moe_router_dtype="fp32"), hidden(64, 8, dtype=torch.bfloat16)
    x.requires_grad_()
    logits, target = router._logits(x), torch.randn(64, 8, 8)
    logits.backward(target)
    exact_w = target.double().flatten(0, 1).t() @ x.detach().double().flatten(0, 1)
    for mine, exact in ((router.weight.grad, exact_w), (x.grad, target.double() @ router.weight.detach().double())):
        error = (mine.double() - exact).abs() - 2.0**-8 * exact.abs()  # minus the error of the last rounding
        assert error.max() < 1e-4 * exact.abs().max()


def test_gradients_of_an_fp64_router_are_rounded_once():
    router, x = make_router(params_dtype=torch.bfloat16, moe_router_dtype="fp64"), hidden(64, 8, dtype=torch.bfloat16)
    x.requires_grad_()
    target = torch.randn(64, 8, 8, dtype=DOUBLE)
    router._logits(x).backward(target)
    exact = target @ router.weight.detach().double()  # of the two bf16 factors that serve fp32, some would be off
    assert torch.equal(x.grad, exact.bfloat16())


def test_gradients_of_a_router_in_the_dtype_of_activations_add_up_in_main_grad():
    router, x = make_router(params_dtype=torch.bfloat16), hidden(dtype=torch.bfloat16)
    arrivals = give_main_grad(router.weight, torch.zeros_like(router.weight, dtype=torch.float32))
    router._logits(x).sum().backward()
    assert len(arrivals) == 1 and router.weight.grad is None and router.weight.main_grad.any()


def test_only_a_gpu_multiplies_16_bits_into_fp32(monkeypatch):
    class OnGPU(torch.Tensor):
        is_cuda = True

    def mm(left, right, out_dtype):
        requested.append(out_dtype)
        return left.to(out_dtype) @ right.to(out_dtype)

    requested, x = [], torch.randn(3, 4).bfloat16()
    monkeypatch.setattr(torch, "mm", mm)
    for dtype in (torch.float32, DOUBLE):
        result = router_module.wide_product(x.as_subclass(OnGPU), x.t(), dtype)
        torch.testing.assert_close(result.as_subclass(torch.Tensor), x.to(dtype) @ x.t().to(dtype))
    assert requested == [torch.float32]


def test_global_losses_take_the_last_batch_and_no_other():
    router = make_router(moe_router_load_balancing_type=["global_aux_loss"], moe_aux_loss_coeff=[1.0])
    for counts in (torch.arange(8), torch.arange(8).flip(0)):
        router.end_step({"_choices_per_expert": counts.double()})
        assert torch.equal(router.last_choices, counts)


@pytest.mark.parametrize("balancing", ["none", "global_aux_loss"])
def test_state_dicts_have_choices_only_for_losses_that_read_them(balancing):
    """mbridge's rule: every name of a state dict is one of Megatron-LM's. Checkpoints ask for ``keep_vars``."""
    router, other = (
        make_router(moe_router_load_balancing_type=[balancing], moe_aux_loss_coeff=[0.5]) for _ in range(2)
    )
    state = router.state_dict()
    assert state.keys() == {"weight"} | ({"last_choices"} if balancing == "global_aux_loss" else set())
    assert router.state_dict(keep_vars=True).keys() == {"weight", "last_choices"}
    state["weight"] = state["weight"] + 1.0
    assert not any(other.load_state_dict(state))
    torch.testing.assert_close(other.weight, router.weight + 1.0, rtol=0, atol=0)


QUANTILES = {"moe_router_load_balancing_type": ["quantile_balancing"]}
BIASED = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
GROUPED = {"moe_router_num_groups": 4, "moe_router_group_topk": 1}


@pytest.mark.parametrize("other", [BIASED, GROUPED, {"moe_expert_capacity_factor": 0.5}], ids=str)
def test_balancing_losses_know_no_bias_groups_and_capacity(other):
    settings = {"moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"], "moe_aux_loss_coeff": [1.0, 1.0],
                "moe_router_score_function": "sigmoid"}  # fmt: skip
    ctx = ForwardContext(aux_losses=AuxLossWeights(torch.ones(3), torch.ones(())))
    results = []
    for more in ({}, other):
        router = make_router(**{**settings, **more})
        router.last_choices.copy_(torch.arange(8))
        if router.expert_bias is not None:
            router.expert_bias.copy_(torch.linspace(-1, 1, 8))
        routing = router(hidden(), ctx)
        (routing.weights * 0).sum().backward()  # what remains is the losses' gradient
        sums = taken(router)
        loss = sums["seq_load_balancing_loss"]
        results.append((routing.experts, router.weight.grad, sums["_choices_per_expert"], loss))
    (experts, *plain), (other_experts, *rest) = results
    assert not torch.equal(experts, other_experts)
    for mine, foreign in zip(plain, rest):
        torch.testing.assert_close(foreign, mine)
    assert plain[1].tolist() == experts.flatten().bincount(minlength=8).tolist()


@pytest.mark.parametrize(
    ("settings", "weighs", "chooses"),
    [({}, True, True), (QUANTILES, True, True), (GROUPED, True, False),
     ({"moe_router_load_balancing_type": ["sinkhorn"]}, False, False)],
)  # fmt: skip
def test_kernels_are_for_all_but_sinkhorn_and_choices_among_groups(monkeypatch, settings, weighs, chooses):
    for service in (True, False):
        monkeypatch.setattr(router_module, "kernels_serve", lambda dtype, expected, service=service: service)
        router = make_router(**settings)
        results = [isinstance(x, ByDevice) for x in (router._weigh, router._choose_by_score)]
        assert results == [service and weighs, service and chooses]


@pytest.mark.parametrize("settings", [
    {}, {"moe_router_pre_softmax": True}, {**QUANTILES, "moe_router_pre_softmax": True},
    {**QUANTILES, "moe_router_score_function": "sigmoid"}, {**BIASED, "moe_router_topk_scaling_factor": 2.5},
], ids=str)  # fmt: skip
def test_router_kernels_match_the_plain_router(settings):
    pytest.importorskip("triton")
    router = make_router(params_dtype=torch.float32, **settings)
    if router.expert_bias is not None:
        router.expert_bias.copy_(torch.linspace(-1, 1, 8))
    logits = router._logits(hidden(dtype=torch.float32)).detach()
    logits = logits.cuda() if torch.cuda.is_available() else logits
    router.to(logits.device)
    experts = router.rule.choose(logits, router.expert_bias)
    assert torch.equal(router._choose_in_kernel(logits, router.expert_bias), experts)
    experts = logits.sort(-1, descending=True).indices[..., :2]  # also where they do not lie side by side
    for summing in (True, False):
        (weights, sums), (plain, plain_sums) = (
            weigh(logits, experts, summing) for weigh in (router._weigh_in_kernel, router._weigh_plain)
        )
        torch.testing.assert_close(weights, plain)
        assert (sums is None) == (plain_sums is None) == (not summing)
        for mine, foreign in zip(sums or (), plain_sums or ()):
            torch.testing.assert_close(mine, foreign)
