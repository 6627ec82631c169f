"""Models of the package ``transformers`` compute what the reference (``tests/reference``) says, from the same weights:
logits, loss and every gradient. Two definitions of each model that share no author."""

import math

import numpy as np
import pytest
import torch

from tests.reference import settings
from tests.reference.data import Batch
from tests.reference.experts import Router
from tests.reference.model import Model
from tests.reference.weights import head_dim, num_groups
from tests.test_utils.foreign_models import LENGTH, MODELS, VOCAB, build, flags_of, to_ours

pytest.importorskip("transformers", reason="pip install transformers: it is what the reference is compared with")

TOLERANCE = 2e-6
"""Relative to the largest entry of a tensor: norms, rotary tables and routers of theirs are float32 whatever the model
is."""


def random_batch():
    generator = np.random.default_rng(3)
    tokens, labels = generator.integers(0, VOCAB, (2, 2, LENGTH))
    mask = (generator.random((2, LENGTH)) < 0.7).astype(float)
    positions = np.tile(np.arange(LENGTH), (2, 1))
    return Batch(tokens, labels, mask, positions, np.zeros_like(tokens), np.arange(2))


def reference_model(c, weights, batch):
    """The function of leaves, and the leaves."""
    biases = {name.removesuffix(".router.expert_bias"): weights.pop(name) for name in list(weights) if "expert_b" in name}
    routers = {name: Router.new(c) for name in biases}
    for name, bias in biases.items():
        routers[name].bias = bias.double()
    leaves = {name: weight.detach().double().requires_grad_() for name, weight in weights.items()}
    return Model(c, leaves, batch, routers, len(batch.tokens), training=False), leaves


def assert_close(name, found, expected, tolerance=TOLERANCE):
    error = (found - expected).abs().max().item() / max(expected.abs().max().item(), 1e-30)
    assert math.isfinite(error) and error <= tolerance, f"{name} is off by {error:.1e} of its largest entry"


@pytest.mark.parametrize("name", MODELS)
def test_the_reference_computes_the_losses_and_gradients_of_transformers(name):
    family = MODELS[name]
    foreign, batch = build(family).double(), random_batch()
    c = settings.read([*flags_of(family), "--vocab-size", str(VOCAB)])
    arrange = family.names, num_groups(c), head_dim(c)
    model, leaves = reference_model(c, to_ours(dict(foreign.state_dict()), *arrange), batch)
    mask = torch.from_numpy(batch.loss_mask)

    logits = foreign(input_ids=torch.from_numpy(batch.tokens), use_cache=False).logits
    labels = torch.from_numpy(batch.labels)
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    losses = model.losses()
    assert_close("loss", losses.detach(), expected.detach())
    (losses * mask).sum().backward()
    (expected * mask).sum().backward()
    gradients = to_ours({key: value.grad for key, value in foreign.named_parameters()}, *arrange)
    for key, leaf in leaves.items():
        assert_close(f"gradient of {key}", leaf.grad.reshape(-1), gradients[key].reshape(-1))
    assert sum(leaf.numel() for leaf in leaves.values()) == sum(each.numel() for each in foreign.parameters())
