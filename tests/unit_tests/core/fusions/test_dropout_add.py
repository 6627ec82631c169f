"""The kernel of dropout and residual addition draws the masks of ``core.random``, in backward too."""

import pytest
import torch

pytest.importorskip("triton")

from megatron.core.fusions.dropout_add import Draw, dropout_add_triton
from megatron.core.random import dropout
from megatron.core.random.dropout import Dropout, DropoutCoordinates
from megatron.core.random.philox import DropoutStream
from tests.test_utils.kernels import DEVICE, assert_equal_to_formula, filled

STREAM, SITE = DropoutStream(7), ("layer", 3, "x")


def mask_and_draw(shape, rate, samples=None):
    """Return a mask and its draw; ``samples``: default one per row. Sample indices exceed 32 bits, positions 16."""
    length, batch, width = shape
    sample = torch.arange(samples or batch) * ((3 << 32) + 0x9000_0001) + 5
    position = torch.arange(length).flip(0) * 131_071
    keep = STREAM.keep_mask(rate, SITE, sample.view(-1, batch, 1), position[:, None, None], 0, range(width))
    return keep, Draw(STREAM.key(SITE), sample.to(DEVICE), position.to(DEVICE), round(rate * 65536))


def check(shape, dtype, rate, *, adds, samples=None):
    keep, draw = mask_and_draw(shape, rate, samples)
    scaled = keep.to(DEVICE) / (1 - STREAM.exact_rate(rate))
    ones = torch.ones(shape, device=DEVICE)
    assert torch.equal(dropout_add_triton(ones, None, draw) != 0, keep.to(DEVICE)), "another mask"
    inputs = [filled(*shape, dtype=dtype), *([filled(*shape, dtype=dtype, seed=1)] if adds else [])]
    assert_equal_to_formula(
        lambda x, residual=None: dropout_add_triton(x, residual, draw),
        lambda x, residual=0.0: x * scaled + residual, inputs, [filled(*shape, dtype=dtype, seed=2)],
    )  # fmt: skip


@pytest.mark.parametrize(
    "shape, dtype, rate, adds",
    [
        ((3, 2, 5), torch.float32, 0.5, False), ((2, 3, 77), torch.bfloat16, 0.1, True),
        ((1, 2, 2056), torch.float32, 0.9, True),
    ],
)  # fmt: skip
def test_the_mask_and_the_sum_are_those_of_the_formula(shape, dtype, rate, adds):
    check(shape, dtype, rate, adds=adds)


def test_every_token_of_one_row_may_be_of_another_sample():
    check((5, 1, 12), torch.float32, 0.5, adds=True, samples=5)


@pytest.mark.parametrize("rate", [0.1, 0.9])
def test_a_layer_drops_the_same_in_its_kernel_and_without(rate):
    layer, (length, batch, width) = Dropout(rate, *SITE), (4, 3, 200)
    positions = torch.arange(length, device=DEVICE) + 9
    at = DropoutCoordinates(STREAM, torch.arange(batch, device=DEVICE) + 40, positions)
    x = torch.ones(length, batch, width, device=DEVICE)
    assert torch.equal(layer._drop_in_kernel(x, at, None) != 0, layer._drop_plain(x, at, None) != 0)


def test_a_layer_asks_its_kernel_for_its_rate_to_the_last_of_16_bits(monkeypatch):
    monkeypatch.setattr(dropout, "dropout_add_triton", lambda x, residual, draw: draw.threshold)
    nowhere = torch.zeros(1, dtype=torch.int64)
    at = DropoutCoordinates(STREAM, nowhere, nowhere)
    for rate in (0.0, 0.1, 0.5, 0.75, 0.9):
        assert Dropout(rate, *SITE)._drop_in_kernel(nowhere, at, None) == round(rate * 65536)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape, rate", [((2048, 4, 4096), 0.1), ((255, 3, 1023), 0.5), ((70, 1000, 8), 1e-3)])
def test_the_mask_and_the_sum_are_those_of_the_formula_at_real_sizes(shape, rate, dtype):
    check(shape, dtype, rate, adds=True)
