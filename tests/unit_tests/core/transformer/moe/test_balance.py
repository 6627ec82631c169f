"""Balancing losses and z-loss against their definitions, summed token by token in fp64."""

import math

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.attention.token_layout import TokenLayout
from megatron.core.config.errors import UserError
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.pipeline_parallel.loss_weights import AuxLossWeights
from megatron.core.random.dropout import DropoutCoordinates
from megatron.core.random.philox import DropoutStream
from megatron.core.sharding.placement import initialize_parameters
from megatron.core.statistics import StatisticsSum
from megatron.core.transformer.context import ForwardContext
from megatron.core.transformer.moe.balance import (
    SideLossRule,
    choice_counts,
    fractions,
    normalize_counts,
    side_loss,
    summarize,
)
from megatron.core.transformer.moe.routing import top_k

DOUBLE = torch.float64
S, B, E, K = 6, 3, 5, 2


def shares(z, function):
    """Scores of one token, which add up to 1."""
    raw = z.exp() if function == "softmax" else z.sigmoid() if function == "sigmoid" else z.exp().log1p().sqrt()
    return raw / raw.sum()


def loss_by_definition(z_sbe, function, last_e=None):
    """E * sum over experts of f_e P_e, over all tokens of ``z_sbe``; ``last_e`` are counts from elsewhere."""
    tokens = z_sbe.flatten(0, 1)
    counts = torch.zeros(E, dtype=DOUBLE)
    for z in tokens:
        for e in z.topk(K).indices:
            counts[e] += 1
    if last_e is not None:
        counts = last_e.to(DOUBLE)
    mean = torch.stack([shares(z, function) for z in tokens]).mean(0)
    return E * (counts / counts.sum() * mean).sum()


def z_by_definition(z_sbe):
    return torch.stack([z.exp().sum().log() ** 2 for z in z_sbe.flatten(0, 1)]).mean()


LAST = torch.tensor([5, 1, 0, 2, 4])
TOKENS = torch.tensor([6.0, 2.0, 5.0])
RULES = [
    (("aux_loss",), (0.3,), 0.0),
    (("seq_aux_loss",), (0.3,), 0.0),
    (("global_aux_loss",), (0.3,), 0.0),
    (("none",), (0.0,), 0.2),
    (("aux_loss", "seq_aux_loss", "global_aux_loss"), (0.3, 0.5, 0.7), 0.2),
]


@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("setting", RULES, ids=str)
def test_losses_and_their_gradients_follow_the_definition(setting, function):
    torch.manual_seed(1)
    rule = SideLossRule(*setting, function)
    logits = (2 * torch.randn(S, B, E, dtype=DOUBLE)).requires_grad_()
    coefficients = rule.coefficient_of
    expected, logged = torch.zeros((), dtype=DOUBLE), {}
    if "aux_loss" in coefficients:
        value = loss_by_definition(logits, function)
        expected = expected + 0.3 * value * TOKENS.sum()
        logged["load_balancing_loss"] = value
    parts = [logits[:, b : b + 1] for b in range(B)]
    for name, label, last in [
        ("seq_aux_loss", "seq_load_balancing_loss", None), ("global_aux_loss", "global_load_balancing_loss", LAST)
    ]:  # fmt: skip
        if name in coefficients:
            values = [loss_by_definition(part, function, last) for part in parts]
            expected = expected + coefficients[name] * sum(v * n for v, n in zip(values, TOKENS))
            logged[label] = sum(v * n for v, n in zip(values, TOKENS)) / TOKENS.sum()
    if rule.z_coefficient:
        values = [z_by_definition(part) for part in parts]
        expected = expected + 0.2 * sum(v * n for v, n in zip(values, TOKENS))
        logged["z_loss"] = sum(v * n for v, n in zip(values, TOKENS)) / TOKENS.sum()
    (gradient,) = torch.autograd.grad(expected, logits)

    sums = summarize(logits, top_k(logits.detach(), K), function)
    shares_of_choices = fractions(rule, sums.choices_be, S * K, LAST, SINGLE_PROCESS.tp_cp)
    loss, statistics = side_loss(rule, sums, shares_of_choices, TOKENS, (S, S))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], gradient)
    assert statistics.keys() == logged.keys() == rule.statistics.keys()
    for name, (total, count) in statistics.items():
        assert count == TOKENS.sum() and (total / count).item() == pytest.approx(logged[name].item(), rel=1e-12)


@pytest.mark.parametrize("setting", [
    (("seq_aux_loss",), (0.3,), 0.0), (("global_aux_loss",), (0.3,), 0.0),
    (("seq_aux_loss", "global_aux_loss"), (0.5, 0.7), 0.2),
])  # fmt: skip
def test_packed_samples_have_the_losses_of_separate_rows(setting):
    """Samples of different lengths in one row with padding; the second of two ranks holds the odd tokens."""
    lengths, tokens = [5, 9, 3], torch.tensor([4.0, 7.0, 0.0], dtype=DOUBLE)
    padding, total = 7, 24
    rule = SideLossRule(*setting, "softmax")
    logits = (2 * torch.randn(total, 1, E, dtype=DOUBLE, generator=torch.Generator().manual_seed(3))).requires_grad_()
    expected, counts = torch.zeros((), dtype=DOUBLE), []
    for sample, weight in zip(logits.split([*lengths, padding])[:3], tokens):
        sums = summarize(sample, top_k(sample.detach(), K), "softmax")
        f = fractions(rule, sums.choices_be, len(sample) * K, LAST, SINGLE_PROCESS.tp_cp)
        expected = expected + side_loss(rule, sums, f, weight[None], (len(sample), len(sample)))[0]
        counts.append(sums.choices_be)
    (gradient,) = torch.autograd.grad(expected, logits)

    numbers = torch.repeat_interleave(torch.tensor([0, 1, 2, 4]), torch.tensor([*lengths, padding]))
    sizes, valid = torch.tensor([*lengths, padding]), torch.cat((tokens, tokens.new_zeros(1)))
    halves = []
    for part in (slice(0, None, 2), slice(1, None, 2)):
        samples = numbers[part], sizes
        sums = summarize(logits[part], top_k(logits[part].detach(), K), "softmax", samples)
        halves.append((sums, samples))
    all_choices = halves[0][0].choices_be + halves[1][0].choices_be
    assert torch.equal(all_choices, torch.cat([*counts, torch.zeros(1, E, dtype=DOUBLE)]))
    f = fractions(rule, all_choices, sizes[:, None] * K, LAST, SINGLE_PROCESS.tp_cp)
    shares = [side_loss(rule, sums, f, valid, (total // 2, total), samples) for sums, samples in halves]
    torch.testing.assert_close(shares[0][0] + shares[1][0], expected)
    torch.testing.assert_close(torch.autograd.grad(shares[0][0] + shares[1][0], logits)[0], gradient)
    for name in rule.statistics:
        assert sum(float(share[1][name][1]) for share in shares) == pytest.approx(11.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equal_loads_are_1_in_every_dtype(dtype):
    rule = SideLossRule(("aux_loss", "seq_aux_loss", "global_aux_loss"), (1.0, 1.0, 1.0), 1.0)
    logits = torch.zeros(4, 2, 8, dtype=dtype, requires_grad=True)
    sums = summarize(logits, torch.arange(16).view(4, 2, 2) % 8, "softmax")
    f = fractions(rule, sums.choices_be, 8, torch.zeros(8, dtype=torch.int64), SINGLE_PROCESS.tp_cp)
    loss, statistics = side_loss(rule, sums, f, torch.full((2,), 4.0), (4, 4))
    for name, (total, count) in statistics.items():
        assert total / count == pytest.approx(math.log(8) ** 2 if name == "z_loss" else 1.0, rel=1e-6)
    assert loss.dtype == torch.float32
    loss.backward()
    assert logits.grad.dtype == dtype and logits.grad.isfinite().all()


def test_experts_without_tokens():
    assert normalize_counts(torch.tensor([[0.0, 3.0, 1.0]])).tolist() == [[0.0, 0.75, 0.25]]
    assert normalize_counts(torch.zeros(1, 4)).tolist() == [[0.25] * 4]
    experts = torch.tensor([[[0, 3]], [[2, 3]], [[1, 0]]])  # 3: dropped
    assert choice_counts(experts, 3).tolist() == [[2.0, 1.0, 1.0]]


def test_types_need_coefficients():
    with pytest.raises(UserError, match="moe_aux_loss_coeff has 1 values for the 2 types"):
        SideLossRule(("aux_loss", "seq_aux_loss"), (0.1,))
    assert not SideLossRule(("aux_loss",), (0.0,)).coefficient_of
    assert not SideLossRule(("sinkhorn",), (0.1,)).coefficient_of


# ---- layouts

LENGTH, BATCH, HIDDEN = 8, 4, 16
STEPS = 2
KINDS = {
    "losses": {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
               "moe_aux_loss_coeff": [0.3, 0.5, 0.7], "moe_z_loss_coeff": 0.2, "moe_input_jitter_eps": 0.1},
    "by sequence": {"moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"],
                    "moe_aux_loss_coeff": [0.5, 0.7], "moe_z_loss_coeff": 0.2, "moe_router_num_groups": 4,
                    "moe_router_group_topk": 2, "moe_router_score_function": "sigmoid",
                    "moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.1},
    "one loss": {"moe_aux_loss_coeff": [0.3]},
    "sinkhorn": {"moe_router_load_balancing_type": ["sinkhorn"]},
    "quantiles": {"moe_router_load_balancing_type": ["quantile_balancing"], "moe_router_quantile_balancing_ema": 0.25},
    "forced": {"moe_router_force_load_balancing": True, "moe_aux_loss_coeff": [0.3]},
}  # fmt: skip


def trained(rank, world_size, kind, tp, cp, micro_batch):
    """Two steps on this rank: ({(step, sample, position): experts}, gradient of the weight, statistics, buffers)."""
    groups = parallel_state.initialize_model_parallel(tp, context_parallel_size=cp)
    config = TransformerConfig(
        num_layers=2, hidden_size=HIDDEN, num_attention_heads=4, params_dtype=DOUBLE, num_moe_experts=8,
        moe_router_topk=2, add_bias_linear=True, init_method_std=0.5, tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1, context_parallel_size=cp, **KINDS[kind],
    )  # fmt: skip
    from megatron.core.transformer.moe.router import TopKRouter

    router = TopKRouter(config, layer_number=1, groups=groups)
    initialize_parameters(router, 7, groups)
    assert set(router.weight.spec.grad) == ({"tp"} if tp > 1 else set())
    full = torch.randn(LENGTH, BATCH, HIDDEN, generator=torch.Generator().manual_seed(5), dtype=DOUBLE)
    target = torch.randn(LENGTH, BATCH, 2, generator=torch.Generator().manual_seed(6), dtype=DOUBLE)
    valid = torch.tensor([8.0, 3.0, 8.0, 5.0])
    layout = TokenLayout.of(groups, config.sequence_parallel)
    position = layout.stream_positions(LENGTH // (tp * cp), torch.device("cpu"))
    samples = torch.arange(BATCH).chunk(groups.dp.size)[groups.dp.rank].split(micro_batch)
    routed, totals = {}, []
    summed = StatisticsSum([router], groups)
    for step in range(STEPS):
        for sample_b in samples:
            at = DropoutCoordinates(DropoutStream(3), sample_b + step * BATCH, position)
            side = AuxLossWeights(valid[sample_b], torch.tensor(2.0, dtype=DOUBLE))
            x = (full * (1 + step))[position][:, sample_b]
            experts, weights, _ = router(x, ForwardContext(layout, dropout=at, aux_losses=side))
            (weights.view(len(position), -1, 2) * target[position][:, sample_b]).sum().mul(2.0).backward()
            for (s, b), chosen in zip(
                ((s, b) for s in position.tolist() for b in sample_b.tolist()), experts.tolist()
            ):
                routed[step, b, s] = chosen
        totals.append({name: sums.clone() for name, sums in summed(torch.device("cpu"))["layer 1"].items()})
    gradients = torch.cat([router.weight.grad.flatten(), router.bias.grad])
    if world_size > 1:
        torch.distributed.all_reduce(gradients)
    return routed, gradients, totals, {name: item.clone() for name, item in router.named_buffers()}


LAYOUTS = {"tp2": (2, 2, 1), "cp2": (2, 1, 2), "dp2": (2, 1, 1), "tp2 cp2": (4, 2, 2)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_layouts_change_neither_experts_nor_losses_nor_gradients(gloo_pool, kind, layout):
    world_size, tp, cp = LAYOUTS[layout]
    micro_batch = 2 if kind in ("losses", "one loss", "sinkhorn", "quantiles", "forced") else 1
    _compare(
        gloo_pool.run(trained, world_size, kind, tp, cp, micro_batch),
        gloo_pool.run(trained, 1, kind, 1, 1, 2),
    )


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_micro_batch_size_changes_only_the_loss_that_is_named_after_it(gloo_pool, micro_batch):
    reference = gloo_pool.run(trained, 1, "by sequence", 1, 1, 4)
    _compare(gloo_pool.run(trained, 1, "by sequence", 1, 1, micro_batch), reference)


def _compare(ranks, reference):
    (routed, gradients, totals, buffers), *_ = reference
    result = {}
    for item, *_ in ranks:
        assert not result.keys() & item.keys()
        result |= item
    assert result == routed
    for _, other_gradients, other_totals, other_buffers in ranks:
        torch.testing.assert_close(other_gradients, gradients, rtol=1e-11, atol=1e-12)
        for mine, rest in zip(totals, other_totals):
            assert mine.keys() == rest.keys()
            for name, sums in mine.items():
                torch.testing.assert_close(rest[name], sums, rtol=1e-12, atol=0, msg=name)
        assert buffers.keys() == other_buffers.keys()
        for name, values in buffers.items():
            assert torch.equal(other_buffers[name], values), name
