"""Encoders and encoder-decoders of the package ``transformers`` compute the same as ``pretrain_bert.py`` and
``pretrain_t5.py``: logits, loss and every gradient, from the same weights, in float32 on one CPU."""

import importlib
import math

import pytest
import torch

from tests.test_utils.foreign_masked_models import FAMILIES, build, flags_of, random_arrays, run_foreign, to_ours
from tests.test_utils.foreign_models import VOCAB
from tests.test_utils.reference_runs import TASKS

pytest.importorskip("transformers", reason="pip install transformers: it is what the models are compared with")

TOLERANCE = 1e-5
"""Relative to the largest entry of a tensor: two orders of float32 operations."""


def our_task(family):
    from megatron.training.arguments import parse_args, validate_args

    kind = "t5" if family.is_t5 else "bert"
    task = getattr(importlib.import_module(f"megatron.training.tasks.{kind}"), TASKS[kind])

    class WithoutTokenizer(task):
        vocab_size = VOCAB

    return WithoutTokenizer(validate_args(parse_args(flags_of(family), needs_data=False, model_family=kind), 1))


def run_ours(family, model, arrays, labels):
    """(logits or losses [b, s], logits of the order or None)."""
    if family.is_t5:
        return model(arrays["tokens"], arrays["decoder"], arrays["real"], lm_labels=labels), None
    return model(arrays["tokens"], arrays["real"], arrays["types"] if "swapped" in arrays else None, labels)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_loss_and_gradients_equal_those_of_transformers(name):
    family = FAMILIES[name]
    foreign, arrays = build(family), random_arrays(family)
    ours = our_task(family).model_provider()

    def assert_close(what, found, expected):
        error = (found - expected).abs().max().item() / max(expected.abs().max().item(), 1e-30)
        assert math.isfinite(error) and error <= TOLERANCE, f"{what} is off by {error:.1e} of its largest entry"

    weights = to_ours(family, dict(foreign.named_parameters()))
    zero = {key for key, _ in ours.named_parameters()} - weights.keys()
    assert all(key.endswith("bias") for key in zero), f"{zero} are not in their model"
    with torch.no_grad():
        for key, parameter in ours.named_parameters():
            parameter.zero_()
            if key in weights:
                parameter[: len(weights[key])].copy_(weights[key])
    logits, order, expected_loss = run_foreign(family, foreign, arrays)
    found, found_order = run_ours(family, ours, arrays, None)
    counted = torch.ones_like(arrays["loss_mask"]) if family.is_t5 else arrays["real"]
    assert_close("logits", found[..., :VOCAB][counted], logits[counted])
    losses, _ = run_ours(family, ours, arrays, arrays["labels"])
    loss = (losses * arrays["loss_mask"]).sum() / arrays["loss_mask"].sum()
    if order is not None:
        assert_close("logits of the order", found_order, order)
        loss = loss + torch.nn.functional.cross_entropy(found_order, arrays["swapped"])
    assert_close("loss", loss.detach(), expected_loss.detach())
    loss.backward()
    expected_loss.backward()
    gradients = to_ours(family, {key: value.grad for key, value in foreign.named_parameters()}, gradients=True)
    for key, parameter in ours.named_parameters():
        if key in zero:
            continue
        rows = len(gradients[key])
        first = int(key == "embedding.word_embeddings.weight")  # theirs keeps the row of padding as it is
        assert_close(f"gradient of {key}", parameter.grad[first:rows], gradients[key][first:])
        assert not parameter.grad[rows:].any(), f"the padding of {key} has a gradient"
    assert sum(weight.numel() for weight in weights.values()) == sum(each.numel() for each in foreign.parameters())
