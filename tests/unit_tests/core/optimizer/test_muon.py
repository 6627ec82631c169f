"""Newton-Schulz against the polar factor, matrices in fused weights, and the update rule against ``torch.optim.Muon``
and its definition in ``tests/reference``."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron.core.config.errors import UserError
from megatron.core.config.muon import is_hidden_matrix
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.fusions.symmetric_product import symmetric_product
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.adaptive_muon import AdaptiveMuon
from megatron.core.optimizer.muon import Muon, Splits, batches, map_matrices
from megatron.core.optimizer.newton_schulz import COEFFICIENTS, orthogonalize
from megatron.core.optimizer.rule_choice import default_rule
from megatron.core.sharding.placement import Normal, RowParts, SubTensor, declare, parameter
from megatron.core.sharding.rectangles import Rectangle
from tests.reference.muon import muon_step

BANDS = {  # steps, lowest and highest singular value for inputs between 0.1 and 1
    "simple": (5, 0.65, 1.15), "quintic": (5, 0.95, 1.05), "polar_express": (8, 0.99, 1.01), "cans": (5, 0.85, 1.15),
    "deepseekv4": (10, 0.99, 1.01), "cubic5": (5, 0.75, 1.3),
}  # fmt: skip


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def polar_factor(matrix):
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    return u @ v


def conditioned(rows, columns, seed=0):
    """Matrix with singular values from 0.1 to 1."""
    u, _, v = torch.linalg.svd(random(rows, columns, seed=seed, dtype=torch.float64), full_matrices=False)
    return u @ torch.linspace(0.1, 1.0, min(rows, columns), dtype=torch.float64).diag() @ v


@pytest.mark.parametrize("kind", COEFFICIENTS)
@pytest.mark.parametrize("shape", [(24, 24), (8, 40), (40, 8), (1, 16), (16, 1)])
def test_singular_values_are_near_one_and_singular_vectors_are_kept(kind, shape):
    steps, low, high = BANDS[kind]
    matrix = conditioned(*shape)
    result = orthogonalize(matrix[None], COEFFICIENTS[kind].take(steps), "highest")[0]
    values = torch.linalg.svdvals(result)
    assert low <= values.min() and values.max() <= high
    # same singular vectors: found = (a polynomial of X X^T) X, so that polar^T found is symmetric and positive
    product = polar_factor(matrix).mT @ result
    torch.testing.assert_close(product, product.mT, rtol=0, atol=1e-12)
    assert torch.linalg.eigvalsh(product).min() > -1e-12


def test_ten_deepseek_steps_give_the_polar_factor():
    matrix = conditioned(12, 20)
    result = orthogonalize(matrix[None], COEFFICIENTS["deepseekv4"].take(10), "highest")[0]
    torch.testing.assert_close(result, polar_factor(matrix), rtol=0, atol=5e-3)


@pytest.mark.parametrize("precision, tolerance", [("medium", 0.04), ("high", 1e-5), ("highest", 1e-5)])
def test_precisions_differ_from_fp64_by_their_rounding(precision, tolerance):
    matrix, steps = conditioned(16, 24), COEFFICIENTS["quintic"].take(5)
    result = orthogonalize(matrix.float()[None], steps, precision)
    assert result.dtype == (torch.bfloat16 if precision == "medium" else torch.float32)
    torch.testing.assert_close(result.double(), orthogonalize(matrix[None], steps, "highest"), rtol=0, atol=tolerance)


def test_coefficient_lists_start_again_or_repeat_their_last():
    assert COEFFICIENTS["quintic"].take(6)[5] == COEFFICIENTS["quintic"].take(1)[0]
    assert COEFFICIENTS["cans"].take(7)[4:] == [COEFFICIENTS["cans"].steps[-1]] * 3
    assert COEFFICIENTS["deepseekv4"].take(10) == [COEFFICIENTS["simple"].steps[0]] * 8 + [(2.0, -1.5, 0.5)] * 2


@pytest.mark.parametrize("kind", COEFFICIENTS)
def test_no_singular_value_changes_its_sign(kind):
    """A matrix of rank one has the singular value 1 after the division by its norm."""
    values = torch.linspace(1e-3, 1.0, 1000, dtype=torch.float64)[:, None, None]
    result = values
    for a, b, c in COEFFICIENTS[kind].take(BANDS[kind][0]):
        result = a * result + b * result**3 + c * result**5
        assert result.min() > 0


@pytest.mark.parametrize("kind", COEFFICIENTS)
@pytest.mark.parametrize("rank", [1, 2, 16])
def test_no_singular_value_grows_in_bf16(kind, rank):
    generator = torch.Generator().manual_seed(rank)
    matrices = torch.randn(4, 64, rank, generator=generator) @ torch.randn(4, rank, 96, generator=generator)
    for steps in {5, 10} if kind != "cubic5" else {5}:
        result = orthogonalize(matrices, COEFFICIENTS[kind].take(steps), "medium")
        assert torch.linalg.matrix_norm(result.float(), 2).max() < 1.4


def test_scale_of_the_input_has_no_effect_and_zeros_stay_zeros():
    matrix, steps = conditioned(6, 9), COEFFICIENTS["quintic"].take(5)
    one, other = (orthogonalize(factor * matrix[None], steps, "highest") for factor in (1.0, 1e-9))
    torch.testing.assert_close(one, other)
    assert not orthogonalize(torch.zeros(2, 3, 4), steps, "medium").any()


def weight(shape, *, parts=None, ndim=None, mesh=None, subtensor=None):
    param = parameter(
        shape if subtensor is None else subtensor, init=Normal(1.0), groups=SINGLE_PROCESS, ndim=ndim, mesh=mesh
    )
    if parts is not None:
        declare(param, row_parts=RowParts(*parts))
    return param.spec


def seen(spec, splits, full):
    """The matrices that are computed, as a list; and the joined result, which must be the input."""
    results = []

    def identity(matrices):
        results.extend(matrices)
        return matrices.clone()

    (result,) = map_matrices(identity, [full], [spec], splits)
    assert torch.equal(result, full)
    return results


QKV = ((8, 4, 4), (4, 4, 4, 4))  # two heads of four channels per group


def test_queries_keys_and_values_of_all_groups_are_three_matrices():
    full = random(3, 16, 5)
    results = seen(weight((3, 16, 5), parts=QKV, ndim=2), Splits(), full)
    expected = [full[:, :8].reshape(24, 5), full[:, 8:12].reshape(12, 5), full[:, 12:].reshape(12, 5)]
    assert all(map(torch.equal, results, expected)) and len(results) == 3


def test_a_fused_projection_may_be_one_matrix():
    full = random(3, 16, 5)
    (result,) = seen(weight((3, 16, 5), parts=QKV, ndim=2), Splits(qkv=False), full)
    assert torch.equal(result, full.reshape(48, 5))


def test_each_head_may_be_a_matrix():
    full = random(3, 16, 5)
    results = seen(weight((3, 16, 5), parts=QKV, ndim=2), Splits(heads=True), full)
    assert all(map(torch.equal, results, full.reshape(12, 4, 5))) and len(results) == 12


@pytest.mark.parametrize("splits, shapes", [
    (Splits(), {(30, 7)}), (Splits(heads=True), {(6, 7), (4, 7)}),
])  # fmt: skip
def test_latent_projections_are_one_matrix_or_one_per_head(splits, shapes):
    results = seen(weight((30, 7), parts=((10,), (6, 4))), splits, random(30, 7))
    assert {tuple(result.shape) for result in results} == shapes


def test_parts_of_a_shared_projection_hold_the_same_matrices():
    full = random(3, 16, 5)
    together = seen(weight((3, 16, 5), parts=QKV, ndim=2), Splits(), full)
    results = []
    for first, length in ((0, 8), (8, 8)):
        part = SubTensor((3, 16, 5), "weight", Rectangle((0, first, 0), (3, length, 5)))
        results += seen(weight(None, parts=QKV, ndim=2, subtensor=part), Splits(), full[:, first : first + length])
    assert all(map(torch.equal, results, together)) and len(results) == 3


@pytest.mark.parametrize("splits, count, rows", [(Splits(), 4, 12), (Splits(gate_up=True), 8, 6)])
def test_experts_are_separate_and_their_gate_and_up_by_choice(splits, count, rows):
    spec = weight((4, 2, 6, 5), ndim=2, mesh={"ep": torch.distributed.tensor.Shard(0)})
    results = seen(spec, splits, random(4, 2, 6, 5))
    assert len(results) == count and results[0].shape == (rows, 5)
    assert len(seen(spec, splits, random(2, 2, 6, 5))) == count // 2  # on one of two expert-parallel ranks


def test_hidden_matrices_are_selected_by_name_and_dims():
    layer = "decoder.layers.0"
    yes = (f"{layer}.mlp.router.weight", f"{layer}.mlp.linear_fc1.weight", "mtp.layers.0.eh_proj.weight")
    no = (
        "embedding.word_embeddings.weight", "embedding.position_embeddings.weight", "output_layer.weight",
        "encoder_relative_pos_emb.relative_attention_bias.weight", f"{layer}.mlp.experts.linear_fc1.bias",
    )  # fmt: skip
    assert all(is_hidden_matrix(name, 2) for name in yes) and not any(is_hidden_matrix(name, 2) for name in no)
    assert not is_hidden_matrix("decoder.layers.0.input_layernorm.weight", 1)


def test_a_matrix_that_a_program_marks_as_embedding_or_output_is_updated_by_adam():
    """Megatron-LM's attribute selects the rule, not the parameter's name."""
    config = settings(muon_scalar_optimizer="adam", weight_decay=0.0)
    model, plain = network(), network()
    model[0].weight.is_embedding_or_output_parameter = True
    model[2].weight.is_embedding_or_output_parameter = False
    assert default_rule(config, "0.weight", model[0].weight) == "adam"
    assert default_rule(config, "2.weight", model[2].weight) == "muon"
    start = [model[index].weight.detach().clone() for index in (0, 2)]
    _, gradients = train(model, config, steps=1)
    train(plain, replace(config, optimizer="adam"), steps=1)
    assert torch.equal(model[0].weight, plain[0].weight)
    adam = start[0] - 0.02 * gradients[0]["0.weight"].sign()  # Adam's first step, up to its epsilon
    torch.testing.assert_close(model[0].weight.detach(), adam, rtol=0, atol=1e-5)
    moved = (start[1] - model[2].weight.detach()) / 0.02
    singular = torch.linalg.svdvals(moved) / 10**0.5  # spectral scale: the root of the larger size
    assert singular.min() > 0.5 and singular.max() < 1.5


# ---- the rule


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4)).to(dtype)


def settings(**changes):
    fixed = {"optimizer": "muon", "lr": 0.02, "weight_decay": 0.1, "clip_grad": 0.0}
    return OptimizerConfig(**{**fixed, "muon_fp32_matmul_prec": "highest", **changes})


def wrapped(model):
    return DistributedDataParallel(None, DistributedDataParallelConfig(), model, groups=SINGLE_PROCESS)


def train(model, config, steps=4):
    ddp = wrapped(model)
    optimizer = get_megatron_optimizer(config, [ddp], groups=SINGLE_PROCESS)
    gradients = []
    for step in range(steps):
        optimizer.zero_grad()
        ddp(random(5, 6, seed=step, dtype=next(model.parameters()).dtype)).square().sum().backward()
        ddp.finish_grad_sync()
        gradients.append({name: item.main_grad.clone() for name, item in model.named_parameters()})
        optimizer.step()
    return optimizer, gradients


VARIANTS = {
    "defaults": {},
    "nesterov": {"muon_nesterov": True, "muon_momentum": 0.95},
    "scales": {"muon_scale_mode": "unit_rms_norm", "muon_extra_scale_factor": 0.2},
    "other scale": {"muon_scale_mode": "shape_scaling", "muon_num_ns_steps": 7, "muon_coefficient_type": "cans"},
    "cubic": {"muon_coefficient_type": "cubic5"},
    "l2": {"decoupled_weight_decay": False},
    "bf16": {"muon_fp32_matmul_prec": "medium"},
    "adamuon": {"optimizer": "adaptive_muon"},
    "normuon": {"optimizer": "adaptive_muon", "adaptive_muon_moment2_method": "normuon", "adaptive_muon_beta2": 0.7},
    "normuon, bf16": {
        "optimizer": "adaptive_muon", "adaptive_muon_moment2_method": "normuon", "muon_fp32_matmul_prec": "medium",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_steps_equal_the_definition(name):
    model, start, config = network(), network(), settings(**VARIANTS[name])
    _, gradients = train(model, config)
    weights = {key: item.detach().double() for key, item in start.named_parameters() if item.ndim == 2}
    kinds = ("momentum", "second") if config.optimizer == "adaptive_muon" else ("momentum",)
    moments = {key: [torch.zeros_like(item) for _ in kinds] for key, item in weights.items()}
    for gradient in gradients:
        for key in weights:
            state = dict(zip(kinds, moments[key]))
            weights[key], *moments[key] = muon_step(weights[key], gradient[key].double(), c=config, **state)
    # adamuon divides every element by its root mean square: elements near zero keep their absolute rounding error
    tolerance = 0.02 if "bf16" in name else 1e-4 if name == "adamuon" else 1e-5
    for key, item in weights.items():
        torch.testing.assert_close(model.get_parameter(key).double(), item, rtol=0, atol=tolerance)


@pytest.mark.parametrize("nesterov", [False, True])
def test_equals_torch_muon_where_definitions_agree(nesterov):
    """Their sum of gradients is 1 / (1 - momentum) times the mean here, which orthogonalization removes. Both use the
    simple coefficients, bf16 GEMMs and max(1, rows / columns)."""
    local, foreign = network(), network()
    config = settings(
        muon_nesterov=nesterov, muon_coefficient_type="simple", muon_scale_mode="shape_scaling",
        muon_fp32_matmul_prec="medium",
    )  # fmt: skip
    _, gradients = train(local, config)
    matrices = {name: item for name, item in foreign.named_parameters() if item.ndim == 2}
    peer = torch.optim.Muon(matrices.values(), lr=0.02, weight_decay=0.1, momentum=0.9, nesterov=nesterov)
    for gradient in gradients:
        for name, param in matrices.items():
            param.grad = gradient[name].clone()
        peer.step()
    for name, param in matrices.items():
        moved, difference = param - network().get_parameter(name), local.get_parameter(name) - param
        assert difference.norm() < 0.1 * moved.norm()  # it rounds to bf16 before the division by the norm


def test_other_parameters_are_updated_by_adam():
    local, foreign = network(), network()
    optimizer, gradients = train(local, settings(), steps=3)
    peer = torch.optim.AdamW([foreign[0].bias, foreign[2].bias], lr=0.02, weight_decay=0.1)
    for gradient in gradients:
        foreign[0].bias.grad, foreign[2].bias.grad = gradient["0.bias"], gradient["2.bias"]
        peer.step()
    torch.testing.assert_close(local[0].bias, foreign[0].bias)
    state = optimizer.state_dict()
    assert {*state["momentum_buffer"]} == {"0.weight", "2.weight"} and {*state["exp_avg"]} == {"0.bias", "2.bias"}


@pytest.mark.parametrize("kind", ["muon", "adaptive_muon"])
def test_zero_gradients_change_nothing_and_nan_skips_the_step(kind):
    model, start = network(), network()
    ddp = wrapped(model)
    optimizer = get_megatron_optimizer(settings(optimizer=kind, weight_decay=0.0), [ddp], groups=SINGLE_PROCESS)
    optimizer.zero_grad()
    optimizer.step()
    assert all(map(torch.equal, model.parameters(), start.parameters()))
    model[0].weight.main_grad[0, 0] = float("nan")
    model[2].weight.main_grad.fill_(1.0)
    assert optimizer.step()[0] is False
    assert all(map(torch.equal, model.parameters(), start.parameters()))
    state = optimizer.state_dict()
    moments = [state[name] for name in ("momentum_buffer", "moment2_buffer") if name in state]
    assert not any(value.any() for kind in moments for value in kind.values())
    assert len(moments) == (2 if kind == "adaptive_muon" else 1)


def test_permuted_heads_commute_with_the_step_per_head():
    """The matrices of heads are separate: a permutation of heads before the step equals one after it."""
    spec, order = weight((1, 16, 5), parts=((8, 4, 4), (4, 4, 4, 4)), ndim=2), torch.tensor([1, 0, 2, 3])
    heads = random(1, 16, 5)

    def orthogonalized(rule, full):
        return rule.orthogonalized([full], [spec])[0]

    def permuted(full):
        return full.view(1, 4, 4, 5)[:, order].reshape(1, 16, 5)

    rule = Muon(settings(muon_split_qkv_per_head=True), [])
    assert torch.equal(orthogonalized(rule, permuted(heads)), permuted(orthogonalized(rule, heads)))
    # queries as one matrix commute as well, up to rounding: X X^T is permuted, or X^T X the same
    rule = Muon(settings(), [])
    torch.testing.assert_close(
        orthogonalized(rule, permuted(heads)), permuted(orthogonalized(rule, heads)), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("mode, expected", [
    ("spectral", math.sqrt(10)), ("unit_rms_norm", math.sqrt(10 / 6)), ("shape_scaling", math.sqrt(10 / 6)),
])  # fmt: skip
def test_scales_are_those_of_the_matrix(mode, expected):
    spec, direction = weight((10, 6)), conditioned(10, 6)
    config = settings(muon_scale_mode=mode, muon_coefficient_type="deepseekv4", muon_num_ns_steps=10)
    rule = Muon(config, [])
    (actual,) = rule.orthogonalized([direction], [spec])
    torch.testing.assert_close(rule.scale(spec) * actual, expected * polar_factor(direction), rtol=0, atol=0.03)


def test_matrices_of_a_fused_weight_have_their_scales():
    """Queries have more rows than keys and values: one factor of the parameter, and smaller factors of its parts."""
    spec, full = weight((2, 24, 5), parts=((16, 4, 4), (4,) * 6), ndim=2), random(2, 24, 5, dtype=torch.float64)
    config = settings(muon_scale_mode="unit_rms_norm", muon_coefficient_type="deepseekv4", muon_num_ns_steps=10)
    rule = Muon(config, [])
    actual = rule.scale(spec) * rule.scaled_down(rule.orthogonalized([full], [spec])[0], spec)
    for rows in (slice(16), slice(16, 20), slice(20, 24)):
        expected = polar_factor(full[:, rows].reshape(-1, 5)) * math.sqrt(full[:, rows, 0].numel() / 5)
        torch.testing.assert_close(actual[:, rows].reshape(-1, 5), expected, rtol=0, atol=0.03)


def test_heads_of_latent_keys_and_values_have_their_scales():
    """Values may be wider than keys: the first part of a head does not have the largest factor."""
    spec, full = weight((20, 5), parts=((10,), (4, 6))), random(20, 5, dtype=torch.float64)
    config = settings(muon_scale_mode="unit_rms_norm", muon_coefficient_type="deepseekv4", muon_num_ns_steps=10)
    rule = Muon(replace(config, muon_split_qkv_per_head=True), [])
    actual = rule.scale(spec) * rule.scaled_down(rule.orthogonalized([full], [spec])[0], spec)
    for rows in (slice(4), slice(4, 10), slice(10, 14), slice(14, 20)):
        expected = polar_factor(full[rows]) * math.sqrt(len(full[rows]) / 5)
        torch.testing.assert_close(actual[rows], expected, rtol=0, atol=0.03)


def test_a_matrix_without_gradient_is_left_out_of_a_step():
    model, config = nn.Module(), settings()
    shapes = {"first": (6, 4), "middle": (4, 9), "last": (7, 5)}
    for name, shape in shapes.items():
        model.register_parameter(name, nn.Parameter(random(*shape)))
    expected = {name: (random(*shape).double(), torch.zeros(shape).double()) for name, shape in shapes.items()}
    optimizer = get_megatron_optimizer(config, [model], groups=SINGLE_PROCESS)
    for step, names in enumerate((("first", "middle", "last"), ("first", "last"), ("first", "middle", "last"))):
        optimizer.zero_grad()
        for name in names:
            gradient = model.get_parameter(name).grad = random(*shapes[name], seed=step + 1)
            weight, momentum = expected[name]
            expected[name] = muon_step(weight, gradient.double(), c=config, momentum=momentum)
        optimizer.step()
    for name, (weight, _) in expected.items():
        torch.testing.assert_close(model.get_parameter(name).detach().double(), weight, rtol=0, atol=1e-5)


def test_an_unknown_precision_is_rejected():
    with pytest.raises(UserError, match="muon_fp32_matmul_prec low: torch has no precision below bf16; use medium"):
        Muon(replace(settings(), muon_fp32_matmul_prec="low"), [])


def test_the_symmetric_product_is_chosen_by_its_flag():
    for expected in (False, True):
        rule = Muon(settings(muon_use_syrk=expected), [])
        assert (rule._product is symmetric_product) is expected


@pytest.mark.parametrize("method", ["adamuon", "normuon"])
def test_adaptive_muon_leaves_matrices_without_gradient(method):
    config = settings(optimizer="adaptive_muon", adaptive_muon_moment2_method=method)
    factors, moments = torch.zeros(2, 3, 4), torch.zeros(2, 3, 4)
    adapted, new = AdaptiveMuon(config, [])._adapt(factors, moments)
    assert not adapted.any() and not new.any()  # and no NaN


@pytest.mark.parametrize(("rows", "columns", "dim"), [(3, 4, 1), (4, 4, 2), (5, 4, 2)])
def test_normuon_means_squares_per_row_unless_a_matrix_is_wide(rows, columns, dim):
    """Square matrices have means per row (output), as tall ones; wide ones have means per column."""
    config = settings(
        optimizer="adaptive_muon", adaptive_muon_moment2_method="normuon", adaptive_muon_beta2=0.75,
    )  # fmt: skip
    factors = random(2, rows, columns, seed=3)
    adapted, moments = AdaptiveMuon(config, [])._adapt(factors, torch.zeros_like(factors))
    expected = 0.25 * factors.square().mean(dim, keepdim=True)
    torch.testing.assert_close(moments, expected.expand_as(factors))
    scaled = factors / expected.sqrt()
    norms = [x.flatten(1).norm(dim=1)[:, None, None] for x in (factors, scaled)]
    torch.testing.assert_close(adapted, scaled * norms[0] / norms[1])


def test_batches_end_when_they_reach_their_size():
    def entry(size):
        parameter = torch.nn.Parameter(torch.zeros(size, 1))
        shard = SimpleNamespace(parameter=parameter, rows_over=None)
        return SimpleNamespace(
            shard=shard, copies=SINGLE_PROCESS.dp, groups=SINGLE_PROCESS, moments=(torch.zeros(size, 1),)
        )

    sizes = [[len(item.shard.parameter) for item in batch] for _, batch in batches([entry(n) for n in (3, 4, 9, 2)], 6)]
    assert sizes == [[3, 4], [9], [2]]
