"""Comparison of a local model with one of ``transformers`` on the same text: logits, loss and every gradient."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tests.test_utils.foreign_models import LENGTH, VOCAB

TOLERANCE = 1e-5
"""Relative to the largest entry of a tensor: two orders of float32 operations."""


CANCELLING = ("A_log", "dt_bias")
"""Parameters whose gradients sum terms of both signs, in fp32 in ``transformers`` too: ten times the tolerance."""


def assert_close(name: str, actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    tolerance *= 10 if name.endswith(CANCELLING) else 1
    error = (actual - expected).abs().max().item() / max(expected.abs().max().item(), 1e-30)
    assert math.isfinite(error) and error <= tolerance, f"{name} is off by {error:.1e} of its largest entry"


def random_text() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels and a mask of the loss, [2, LENGTH] each."""
    generator = torch.Generator().manual_seed(3)
    tokens, labels = (torch.randint(0, VOCAB, (2, LENGTH), generator=generator) for _ in range(2))
    return tokens, labels, (torch.rand(2, LENGTH, generator=generator) < 0.7).float()


def compare_losses(native: nn.Module, foreign: nn.Module) -> None:
    """Logits and losses agree; both models then have the gradients of the mean."""
    tokens, labels, mask = random_text()
    positions = torch.arange(LENGTH).expand(2, -1)
    expected = foreign(input_ids=tokens, use_cache=False).logits
    assert_close("logits", native(tokens, positions)[..., :VOCAB], expected)
    expected_loss = (nn.functional.cross_entropy(expected.transpose(1, 2), labels, reduction="none") * mask).sum()
    loss = (native(tokens, positions, labels=labels) * mask).sum()
    assert_close("loss", loss.detach(), expected_loss.detach())
    (loss / mask.sum()).backward()
    (expected_loss / mask.sum()).backward()


def compare_gradients(native: nn.Module, expected: Mapping[str, Tensor], tolerance: float = TOLERANCE) -> int:
    """Assert that gradients equal ``expected`` (local names, no padding, experts separate or concatenated) and are zero
    in the padding; return the number of compared elements."""
    compared = 0
    for key, parameter in native.named_parameters():
        rows = expected[key].reshape(-1, *parameter.shape[1:])
        assert_close(f"gradient of {key}", parameter.grad[: len(rows)], rows, tolerance)
        assert not parameter.grad[len(rows) :].any(), f"the padding of {key} has a gradient"
        compared += rows.numel()
    return compared
