"""Delayed scales follow the rule of the reference, step by step; magnitudes are maxima over micro-batches and ranks."""

from types import SimpleNamespace

import pytest
import torch

from megatron.core.fp8.gemms import PerTensorGemms
from megatron.core.fp8.scales import ScaleHistory, current_amax, raise_over
from megatron.core.fp8.storage import Epoch
from megatron.core.fusions.fp8_cast import E5M2, FLOAT_MAX, amax_parts, new_amax, note_amax
from megatron.core.tensor_parallel.gemms import accumulate_product
from tests.reference import fp8 as reference
from tests.test_utils.kernels import filled

CPU = torch.device("cpu")
INF, NAN = torch.inf, torch.nan


def history(length=1, uses_maximum=False, margin=0, largest=448.0):
    built = ScaleHistory(length, uses_maximum=uses_maximum, margin=margin)
    built.add("layer.input", largest)
    built.state(CPU)
    return built


def step(scales, *amaxes, row=0):
    """Run a step with a micro-batch per entry of ``amaxes`` and return the factor; 0: no scale yet."""
    for amax in amaxes:
        scales.observe(row, torch.tensor([0.0, amax]))
    scales.update(())
    return scales.state(CPU)["factor"][row].item()


SEQUENCES = [
    [(3.0,), (2.0,), (8.0,), (1.0,), (1.0,), (1.0,), (0.5,)],
    [(0.0,), (2.0, 5.0), (0.0,), (0.0,), (0.0,), (INF,), (3.0,)],
    [(NAN,), (INF,), (1e-3,), (NAN, 2.0), (7.0,), (1e-42,), (1e-42,), (1e-42,)],
    [(1e38,), (3.1e-37,), (448.0,), (1e-30, 5e-45), (0.0,)],
]


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("margin", [0, 2])
@pytest.mark.parametrize("sequence", SEQUENCES)
def test_factors_follow_the_rule_of_the_reference(sequence, margin, length, algorithm):
    scales = history(length, algorithm == "max", margin)
    c = SimpleNamespace(fp8_amax_history_len=length, fp8_amax_compute_algo=algorithm, fp8_margin=margin)
    expected = reference.History(448.0)
    for amaxes in sequence:
        for amax in amaxes:
            expected.observed = torch.maximum(expected.observed, reference.fp32(torch.tensor([amax]).double()))
        expected.end_step(c)
        factor = step(scales, *amaxes)
        assert factor == (0.0 if expected.factor is None else expected.factor.item())
        entries = scales.state(CPU)["history"][0].tolist()
        assert entries == [float(entry) for entry in expected.entries] + [0.0] * (length - len(expected.entries))
        scale = scales.scale(0, CPU)
        assert (scale is None) == (factor == 0)
        if scale is not None:
            assert scale.factor.item() == factor and scale.inverse.item() == reference.fp32(
                1 / torch.tensor(factor).double()
            )


@pytest.mark.parametrize("bad", [INF, NAN, 0.0])
def test_a_bad_magnitude_keeps_the_scale_and_is_forgotten(bad):
    scales = history(3, uses_maximum=True)
    before = step(scales, 2.0)
    assert step(scales, bad) == before == 224
    assert step(scales, 4.0) == 112
    assert all(step(scales, 1.0) == value for value in (112, 112, 448))


def test_an_overflowing_quotient_becomes_the_largest_number():
    assert step(history(), 1e-44) == FLOAT_MAX


def test_each_format_has_its_largest_number():
    scales = ScaleHistory(1, uses_maximum=False, margin=1)
    rows = [scales.add(name, largest) for name, largest in (("a", 448.0), ("b", 57344.0))]
    scales.state(CPU)
    for row in rows:
        scales.observe(row, torch.tensor([2.0]))
    scales.update(())
    assert scales.state(CPU)["factor"].tolist() == [112, 14336]


def test_inverses_are_aligned_for_gemms():
    scales = ScaleHistory(1, uses_maximum=False, margin=0)
    for row in range(3):
        scales.add(str(row), 448.0)
        assert scales.known == [False] * (row + 1)
    scales.state(CPU)
    for row in range(3):
        assert step(scales, 2.0, row=row) == 224
        assert scales.scale(row, CPU).inverse.data_ptr() % 16 == 0


# ---- with the GEMMs of a layer


def layer(scales, name="layer"):
    weight = filled(16, 32, dtype=torch.float64)
    return PerTensorGemms(
        [weight], Epoch(), E5M2, accumulate_product, groups=(), weight_groups=(), history=scales, name=name
    )


def factor_used(packed):
    """The factor of a packed input."""
    return 1 / packed.first.scale.item()


def test_the_first_step_is_scaled_by_its_values_and_the_next_by_the_first():
    scales = ScaleHistory(1, uses_maximum=False, margin=0)
    gemms, x = layer(scales), filled(16, 32, dtype=torch.float64)
    x = x / x.abs().max() * 7
    for size in (1, 4, 2):  # micro-batches
        assert factor_used(gemms.pack_input(size * x, for_backward=True)) == pytest.approx(64 / size)
        assert gemms.pack_gradient(size * x[:, :16], for_input=True, for_weight=True).first.data.dtype == E5M2
    scales.update(())
    assert scales.known == [True, True]
    for size in (1, 100):
        packed = gemms.pack_input(size * x, for_backward=True)
        assert factor_used(packed) == pytest.approx(16), "the largest micro-batch of the first step"
    assert packed.first.data.float().abs().max() == 448, "clipped"
    scales.update(())
    assert factor_used(gemms.pack_input(x, for_backward=True)) == pytest.approx(0.64)


def test_evaluation_records_no_magnitude():
    scales = ScaleHistory(1, uses_maximum=False, margin=0)
    gemms, x = layer(scales), torch.ones(16, 32, dtype=torch.float64)
    gemms.pack_input(100 * x, for_backward=False)
    scales.update(())
    assert scales.known == [False, False]
    gemms.pack_input(x, for_backward=True)
    gemms.pack_input(100 * x, for_backward=False)
    scales.update(())
    gemms.pack_input(100 * x, for_backward=False)
    scales.update(())
    assert scales.state(CPU)["factor"].tolist() == [448, 0]


def test_a_layer_without_tokens_or_gradient_keeps_its_scales():
    """In a step with a frozen layer, and for an input of zeros."""
    scales = history()
    assert step(scales, 2.0) == 224
    assert step(scales) == 224
    assert step(scales, 0.0) == 224


def test_weights_are_scaled_by_their_values_of_this_step():
    """Not by a history: a weight that is cast with the scale of the step before has a wrong loss in the first step."""
    scales = ScaleHistory(4, uses_maximum=True, margin=3)
    gemms = layer(scales)
    for _ in range(2):
        result = gemms.weight_copies(gemms.weights[0], columns=False)
        assert result.scale.item() == pytest.approx(gemms.weights[0].abs().max().item() / 448)
        gemms.weights[0].mul_(10)
        scales.update(())
    assert [name.rpartition(".")[2] for name in scales.names] == ["input", "gradient"]


def test_state_of_a_checkpoint_restores_the_scales():
    first, second = (ScaleHistory(3, uses_maximum=True, margin=0) for _ in range(2))
    for scales in (first, second):
        for name in ("a", "b", "never"):
            scales.add(name, 448.0)
        scales.state(CPU)
    for amax in (3.0, 5.0, 1.0):
        first.observe(0, torch.tensor([amax]))
        first.observe(1, torch.tensor([2 * amax]))
        first.update(())
    for (name, stored), (other, live) in zip(first.tensors(CPU), second.tensors(CPU), strict=True):
        assert name == other
        live.copy_(stored)
    second.loaded()
    assert second.known == first.known == [True, True, False]
    for name in ("history", "factor"):
        assert torch.equal(first.state(CPU)[name], second.state(CPU)[name])
    assert first.scale(1, CPU) == second.scale(1, CPU)
    assert step(first, 0.5) == step(second, 0.5)


# ---- over ranks


def maxima(rank, world_size, amaxes):
    """A task of the pool: the maximum over all ranks, and the amax of a matrix that the ranks share."""
    from megatron.core import parallel_state

    group = parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size).tp
    one = raise_over(torch.tensor([amaxes[rank], 1.0]), (group,))
    x = torch.tensor([[-amaxes[rank], 0.5]])
    current = current_amax(x, (group,)).amax().item()
    note_amax(x, new_amax(x.device) + amax_parts(x).view(torch.int32))
    noted = current_amax(x, (group,)).amax().item()
    assert str(amax_parts(x).amax().item()) == str(abs(amaxes[rank])), "the note of this rank has changed"
    return one.tolist(), current, noted


@pytest.mark.parametrize(
    "amaxes, expected", [((2.0, 3.0), 3.0), ((INF, 3.0), INF), ((2.0, NAN), NAN), ((NAN, INF), NAN)]
)
def test_magnitudes_are_maxima_over_ranks_with_nan_as_the_largest(gloo_pool, amaxes, expected):
    for (raised, one), current, noted in gloo_pool.run(maxima, 2, amaxes):
        assert one == 1 and str(raised) == str(current) == str(noted) == str(expected)


def test_parts_of_an_amax_give_the_scale_of_their_maximum():
    x = filled(5, 7, dtype=torch.float32)
    assert torch.equal(current_amax(x, ()), amax_parts(x))
