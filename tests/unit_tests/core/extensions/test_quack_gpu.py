"""Weight gradients of experts by quack-kernels equal the formula; where the package is installed, on a Hopper GPU."""

import pytest
import torch

from megatron.core.extensions import quack
from megatron.core.fusions.grouped_weight_gradient import grouped_weight_gradient_reference

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("ends, rows, out, width", [((70, 70, 300), 320, 256, 136), ((2000, 4096), 4096, 1536, 768)])
def test_quack_adds_the_weight_gradient(ends, rows, out, width):
    pytest.importorskip("quack")
    grad, x = (torch.randn(rows, item, device="cuda", dtype=torch.bfloat16) for item in (out, width))
    assert quack.quack_serves(x, out, width)
    ends_g = torch.tensor(ends, dtype=torch.int32, device="cuda")
    result = torch.randn(len(ends), out, width, device="cuda")
    before, exact = result.clone(), result.double()
    quack.add_grouped_weight_gradient(grad, x, ends_g, result)
    grouped_weight_gradient_reference(grad, x, ends_g, exact)
    assert (result.double() - exact).abs().max() <= 1e-4 * exact.abs().max()
    for group, (start, end) in enumerate(zip((0, *ends), ends)):
        if start == end:
            assert torch.equal(result[group], before[group])
