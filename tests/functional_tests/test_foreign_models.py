"""Models of the package ``transformers`` compute the same: logits, loss and every gradient, from the same weights.

Each is built through the command line of ``pretrain_gpt.py``, in float32 on one CPU; what both programs share is
torch.
"""

import math

import pytest
import torch

from tests.test_utils.foreign_models import LENGTH, MIXTURES, MODELS, VOCAB, build, flags_of, to_ours

pytest.importorskip("transformers", reason="pip install transformers: it is what the models are compared with")

FAMILIES = {**MODELS, **MIXTURES}
TOLERANCE = 1e-5
"""Relative to the largest entry of a tensor: two orders of float32 operations."""


def our_model(model):
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.tasks.gpt import GPTTask

    class WithoutTokenizer(GPTTask):
        vocab_size = VOCAB

    cfg = validate_args(parse_args(flags_of(model), needs_data=False), 1)
    return WithoutTokenizer(cfg).model_provider()


def assert_close(name, found, expected):
    error = (found - expected).abs().max().item() / max(expected.abs().max().item(), 1e-30)
    assert math.isfinite(error) and error <= TOLERANCE, f"{name} is off by {error:.1e} of its largest entry"


def folded(theirs, ours):
    """Tensors of many experts, which here are one above the other."""
    return theirs.reshape(-1, *ours.shape[1:])


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_loss_and_gradients_equal_those_of_transformers(name):
    model = FAMILIES[name]
    foreign, ours = build(model), our_model(model)
    weights = to_ours(foreign.state_dict(), model)
    with torch.no_grad():
        biases = [(key, each) for key, each in ours.named_buffers() if key.endswith("expert_bias")]
        for key, parameter in (*ours.named_parameters(), *biases):
            value = folded(weights[key], parameter)
            assert value.shape[1:] == parameter.shape[1:] and len(value) <= len(parameter), key
            parameter[: len(value)].copy_(value)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCAB, (2, LENGTH), generator=generator)
    labels = torch.randint(0, VOCAB, (2, LENGTH), generator=generator)
    mask = (torch.rand(2, LENGTH, generator=generator) < 0.7).float()

    expected = foreign(input_ids=tokens, use_cache=False).logits
    positions = torch.arange(LENGTH).expand(2, -1)
    assert_close("logits", ours(tokens, positions)[..., :VOCAB], expected)

    expected_loss = (torch.nn.functional.cross_entropy(expected.transpose(1, 2), labels, reduction="none") * mask).sum()
    loss = (ours(tokens, positions, labels=labels) * mask).sum()
    assert_close("loss", loss.detach(), expected_loss.detach())
    (loss / mask.sum()).backward()
    (expected_loss / mask.sum()).backward()
    gradients = {key: value.grad for key, value in foreign.named_parameters()}
    expected_gradients = to_ours(gradients, model)
    compared = 0
    for key, parameter in ours.named_parameters():
        expected = folded(expected_gradients[key], parameter)
        rows = len(expected)
        assert_close(f"gradient of {key}", parameter.grad[:rows], expected)
        assert not parameter.grad[rows:].any(), f"the padding of {key} has a gradient"
        compared += parameter[:rows].numel()
    assert compared == sum(each.numel() for each in foreign.parameters()), "a weight of theirs has no place here"


def test_the_table_holds_thirty_models():
    assert len({(model.architecture, model.flags) for model in MODELS.values()}) >= 30 and len(MIXTURES) >= 7
