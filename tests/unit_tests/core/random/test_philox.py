"""Random numbers are functions of key and index: known answers, slices, moments."""

import subprocess
import sys

import pytest
import torch

from megatron.core.random import philox as rng
from megatron.core.random.philox import DropoutStream

ONES = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)


@pytest.mark.parametrize(
    "counter, key, words",
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES << 32) | ONES, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (PI, (0x299F31D0 << 32) | 0xA4093822, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_philox_returns_the_published_vectors(counter, key, words):
    result = rng.philox(tuple(torch.tensor(word) for word in counter), key)
    assert tuple(int(word) for word in result) == words


def test_keys_are_equal_in_every_process_and_tell_parts_apart():
    program = "from megatron.core.random import philox; print(philox.key(1234, 'layer', 7))"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(other.stdout) == rng.key(1234, "layer", 7)
    keys = [rng.key(*parts) for parts in ((1,), (2,), (1, "a"), (1, "ab"), (1, "a", "b"), (1, 1), (1, "1"))]
    assert len(set(keys)) == len(keys)


def elements(key, index, transform=rng._normal_from_words):
    """Elements of a stream one by one: word ``i % 4`` of counter ``i // 4``."""
    values = transform(rng._block_words(key, index >> 2))
    return values.gather(-1, (index & 3).unsqueeze(-1)).squeeze(-1)


def test_normal_numbers_have_normal_moments():
    values = torch.empty(1, 1 << 21, dtype=torch.float64)
    rng.fill_runs_(values, rng.key(3, "moments"), torch.tensor([0]))
    n = values.numel()
    for power, expected, variance in ((1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)):
        assert abs(values.pow(power).mean().item() - expected) < 4 * (variance / n) ** 0.5
    assert abs((values[0, 1:] * values[0, :-1]).mean()) < 4 / n**0.5
    inside = (values.abs() < 1).double().mean().item()
    assert inside == pytest.approx(0.682689, abs=2e-3)


def test_normal_numbers_are_those_of_the_logarithm_sine_and_cosine():
    """Series in place of library functions, so that every device computes the same bits, cost no accuracy."""
    index, key = torch.arange(1 << 14), rng.key(3, "series")
    words = elements(key, index, lambda words: words).unflatten(0, (-1, 2))
    radius = (-2 * ((words[:, 0].double() + 0.5) * 2.0**-32).log()).sqrt()
    angle = words[:, 1]
    turn = ((angle & 0x3FFFFFFF).double() - 0x20000000 + 0.5) * (torch.pi / 2**31)
    first = torch.where(angle & 0x40000000 != 0, turn.sin(), turn.cos())
    second = torch.where(angle & 0x40000000 != 0, turn.cos(), turn.sin())
    expected = torch.stack((first, second), 1) * (radius * torch.where(angle >> 31 == 1, -1.0, 1.0))[:, None]
    torch.testing.assert_close(elements(key, index), expected.flatten(), rtol=1e-12, atol=1e-13)


def test_uniform_numbers_fill_the_unit_interval_evenly():
    values = elements(rng.key(5, "u"), torch.arange(1 << 18), rng._uniform_from_words)
    counts = torch.histc(values, bins=64, min=0, max=1)
    chi_squared = ((counts - 4096) ** 2 / 4096).sum().item()
    assert 25 < chi_squared < 120 and values.min() > 0 and values.max() < 1


@pytest.mark.parametrize("distribution", ["normal", "uniform"])
@pytest.mark.parametrize("start, length", [(0, 1), (3, 5), (4, 64), (1, 70001), (8, 65537), (2**33 + 5, 33)])
def test_any_run_equals_the_elements_by_index(distribution, start, length):
    key = rng.key(9, "runs")
    run = rng.fill_runs_(torch.empty(1, length, dtype=torch.float64), key, torch.tensor([start]), distribution)
    by_index = elements(key, torch.arange(start, start + length), getattr(rng, f"_{distribution}_from_words"))
    assert torch.equal(run[0], by_index)


def test_aligned_runs_equal_unaligned_ones():
    key = rng.key(9, "runs")
    starts = torch.tensor([0, 400, 80, 120])
    together = rng.fill_runs_(torch.empty(4, 20), key, starts)
    for row, start in zip(together, starts.tolist()):
        assert torch.equal(row, elements(key, torch.arange(start, start + 20)).float())


def _mask(stream, feature, position, sample, row=0, site=("layer", 3, "mlp")):
    sample, position = torch.tensor(sample)[None, :, None], torch.tensor(position)[:, None, None]
    return stream.keep_mask(0.25, site, sample, position, row, feature)


def test_dropout_masks_do_not_depend_on_the_slice():
    stream = DropoutStream(77)
    full = _mask(stream, range(50), list(range(6)), [4, 2**33, 5])
    part = _mask(stream, range(11, 37), [2, 5], [5, 2**33])
    assert torch.equal(part, full[[2, 5]][:, [2, 1], 11:37])


def test_dropout_masks_differ_by_seed_site_sample_position_and_row():
    stream = DropoutStream(77)
    base = _mask(stream, range(64), [0], [1])
    rest = [
        _mask(DropoutStream(78), range(64), [0], [1]),
        _mask(stream, range(64), [1], [1]),
        _mask(stream, range(64), [0], [2]),
        _mask(stream, range(64), [0], [1 + 2**32]),
        _mask(stream, range(64), [0], [1], row=1),
        _mask(stream, range(64), [0], [1], site=("layer", 4, "mlp")),
    ]
    assert not any(torch.equal(base, other) for other in rest)


def test_dropout_keeps_the_right_share():
    mask = _mask(DropoutStream(1), range(1024), list(range(64)), [0, 1, 2, 3])
    assert mask.double().mean().item() == pytest.approx(0.75, abs=4 * (0.1875 / mask.numel()) ** 0.5)
