"""Encoders and encoder-decoders of the package ``transformers`` compute what the reference (``tests/reference``) says,
from the same weights: logits, loss and every gradient. Two definitions of each model that share no author."""

import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch.nn.functional as F

from tests.reference import settings
from tests.reference.bert import Bert
from tests.reference.t5 import T5
from tests.test_utils.foreign_masked_models import FAMILIES, build, flags_of, random_arrays, run_foreign, to_ours
from tests.test_utils.foreign_models import VOCAB

pytest.importorskip("transformers", reason="pip install transformers: it is what the reference is compared with")

TOLERANCE = {"modern-bert": 2e-6}
"""Relative to the largest entry of a tensor, else 1e-9: its rotary tables are float32 in every model."""


def reference_model(family, weights, arrays):
    c = settings.read([*flags_of(family), "--vocab-size", str(VOCAB)])
    mask, labels = arrays["loss_mask"].double().numpy(), arrays["labels"].numpy()
    batch = SimpleNamespace(labels=labels, loss_mask=mask, samples=np.arange(2), real=arrays["real"].numpy())
    if family.is_t5:
        batch.encoder, batch.decoder = arrays["tokens"].numpy(), arrays["decoder"].numpy()
        return T5(c, weights, batch, {}, 2, training=False)
    batch.tokens, batch.types, batch.swapped = (arrays[name].numpy() for name in ("tokens", "types", "swapped"))
    batch.positions = np.tile(np.arange(batch.tokens.shape[1]), (2, 1))
    return Bert(c, weights, batch, {}, 2, training=False)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_reference_computes_the_losses_and_gradients_of_transformers(name):
    family, limit = FAMILIES[name], TOLERANCE.get(name, 1e-9)
    foreign, arrays = build(family).double(), random_arrays(family)
    for module in foreign.modules():  # T5's norm takes float32 whatever the model is; torch's does not
        if type(module).__name__ == "T5LayerNorm":
            width, epsilon = module.weight.shape, module.variance_epsilon
            module.forward = partial(F.rms_norm, normalized_shape=width, weight=module.weight, eps=epsilon)

    def assert_close(what, actual, expected):
        error = (actual - expected).abs().max().item() / max(expected.abs().max().item(), 1e-30)
        assert math.isfinite(error) and error <= limit, f"{what} is off by {error:.1e} of its largest entry"

    weights = to_ours(family, dict(foreign.named_parameters()))
    leaves = {key: value.detach().clone().requires_grad_() for key, value in weights.items()}
    assert sum(leaf.numel() for leaf in leaves.values()) == sum(parameter.numel() for parameter in foreign.parameters())
    model = reference_model(family, leaves, arrays)
    logits, order, expected = run_foreign(family, foreign, arrays)
    x = model.hidden()
    if family.is_t5:
        assert_close("logits", model.logits(x).detach(), logits.detach())
    else:
        actual = model.logits(model.transformed(x)).detach()
        assert_close("logits", actual[arrays["real"]], logits.detach()[arrays["real"]])
    if order is not None:
        assert_close("logits of the order", model.order(x).detach(), order.detach())
    loss = sum(total / count for total, count in model.terms().values())
    assert_close("loss", loss.detach(), expected.detach())
    loss.backward()
    expected.backward()
    gradients = to_ours(family, {key: value.grad for key, value in foreign.named_parameters()}, gradients=True)
    for key, leaf in leaves.items():
        if key == "embedding.word_embeddings.weight":  # theirs keeps the row of padding as it is
            leaf.grad[0] = gradients[key][0]
        assert_close(f"gradient of {key}", leaf.grad, gradients[key])
