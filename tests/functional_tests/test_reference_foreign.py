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
from tests.test_utils.foreign_models import LAYERS, LENGTH, MIXTURES, MODELS, VOCAB, build, flags_of, to_ours

pytest.importorskip("transformers", reason="pip install transformers: it is what the reference is compared with")

UNKNOWN = ("--attention-output-gate", "--hybrid-layer-pattern", "--experimental-attention-variant")
"""Flags that the reference does not know: linear attention has recurrences of its own as a definition."""
FAMILIES = {
    name: model for name, model in {**MODELS, **MIXTURES}.items() if not any(flag in model.flags for flag in UNKNOWN)
}
TOLERANCE = 2e-6
"""Relative to the largest entry of a tensor: norms, rotary tables and routers of transformers are float32 in every
model."""


def random_batch():
    generator = np.random.default_rng(3)
    tokens, labels = generator.integers(1, VOCAB, (2, 2, LENGTH))  # theirs keeps the row of token 0, padding, as it is
    mask = (generator.random((2, LENGTH)) < 0.7).astype(float)
    positions = np.tile(np.arange(LENGTH), (2, 1))
    return Batch(tokens, labels, mask, positions, np.zeros_like(tokens), np.arange(2))


def pair(name, more=""):
    """Return (HF model, conversion of its tensors, the reference with its weights, settings, batch)."""
    family = FAMILIES[name]
    foreign, batch = build(family).double(), random_batch()
    c = settings.read([*flags_of(family), "--vocab-size", str(VOCAB), *more.split()])

    def arrange(tensors):
        return to_ours(tensors, family, more)

    leaves, routers = {}, {}
    for key, value in arrange({**dict(foreign.named_parameters()), **dict(foreign.named_buffers())}).items():
        if key.endswith(".router.expert_bias"):
            routers[key.removesuffix(".router.expert_bias")] = router = Router(c)
            router.bias = value
        else:
            leaves[key] = value.detach().clone().requires_grad_()
    return foreign, arrange, Model(c, leaves, batch, routers, len(batch.tokens), training=False), batch


def assert_close(name, actual, expected):
    error = (actual - expected).abs().max().item() / max(expected.abs().max().item(), 1e-30)
    assert math.isfinite(error) and error <= TOLERANCE, f"{name} is off by {error:.1e} of its largest entry"


@pytest.mark.parametrize("name", FAMILIES)
def test_the_reference_computes_the_losses_and_gradients_of_transformers(name):
    foreign, arrange, model, batch = pair(name)
    mask, labels = torch.from_numpy(batch.loss_mask), torch.from_numpy(batch.labels)
    logits = foreign(input_ids=torch.from_numpy(batch.tokens), use_cache=False).logits
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    losses = model.losses()
    assert_close("loss", losses.detach(), expected.detach())
    (losses * mask).sum().backward()
    (expected * mask).sum().backward()
    gradients = arrange({key: value.grad for key, value in foreign.named_parameters()})
    for key, leaf in model.weights.items():
        assert_close(f"gradient of {key}", leaf.grad.reshape(-1), gradients[key].reshape(-1))
    assert sum(leaf.numel() for leaf in model.weights.values()) == sum(item.numel() for item in foreign.parameters())


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_balancing_loss_equals_transformers_over_top_k(name):
    """The HF loss is not divided by that number and pools the tokens of layers: compare each layer separately."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    foreign, arrange, model, batch = pair(name, "--moe-aux-loss-coeff 0.1 --hidden-dropout 0 --attention-dropout 0")
    model.training, k, e = True, model.c.moe_router_topk, model.c.num_experts
    layers = foreign(input_ids=torch.from_numpy(batch.tokens), output_router_logits=True).router_logits
    expected = [load_balancing_loss_func((logits,), e, k) / k for logits in layers]
    model.losses()
    (terms,) = model.aux_losses.values()
    assert len(terms) == len(expected) == 2 and all(coefficient == 0.1 for coefficient, _ in terms)
    for (_, term), reference in zip(terms, expected):
        assert_close("balancing loss", term.detach(), reference.detach())
    sum(term for _, term in terms).backward()
    sum(expected).backward()
    gradients = arrange({key: value.grad for key, value in foreign.named_parameters() if value.grad is not None})
    for key, leaf in model.weights.items():
        if leaf.grad is not None and leaf.grad.any():
            assert_close(f"gradient of {key}", leaf.grad.reshape(-1), gradients[key].reshape(-1))
    assert all(model.weights[f"decoder.layers.{layer}.mlp.router.weight"].grad.any() for layer in (0, 1))


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v3-without-query-latent", "glm4-moe"])
def test_tokens_further_ahead_are_predicted_as_by_transformers(name):
    from transformers.modeling_layers import MtpModel

    foreign, arrange, model, batch = pair(name, "--mtp-num-layers 2")
    torch.manual_seed(3)
    additional = MtpModel(foreign, 2).double().eval()
    local = {key: value for key, value in additional.state_dict().items() if key.startswith("layers.")}
    for value in local.values():
        value.copy_(torch.randn(value.shape) * 0.2 + float(value.dim() == 1))
    parts = [(int(key.split(".")[1]), key.split(".", 2)[2].removeprefix("mtp_block."), local[key]) for key in local]
    as_published = {f"model.layers.{LAYERS + depth}.{name.replace('post_norm', 'shared_head.norm')}": value
                    for depth, name, value in parts}  # fmt: skip
    for key, value in arrange(as_published).items():
        if key.endswith(".router.expert_bias"):
            model.routers[key.removesuffix(".router.expert_bias")] = router = Router(model.c)
            router.bias = value
        else:
            model.weights[key] = value

    tokens, labels, mask = (torch.from_numpy(item) for item in (batch.tokens, batch.labels, batch.loss_mask))
    x, positions = foreign.model(input_ids=tokens).last_hidden_state, torch.arange(LENGTH)[None]
    model.training = True
    model.losses()
    for depth, (total, count) in enumerate(model.later_losses):
        tokens, labels, mask = (torch.nn.functional.pad(item[:, 1:], (0, 1)) for item in (tokens, labels, mask))
        x = additional.forward_layer(depth, x, positions + depth + 1, None, input_ids=tokens)
        logits = foreign.lm_head(x).transpose(1, 2)
        expected = (torch.nn.functional.cross_entropy(logits, labels, reduction="none") * mask).sum()
        assert_close("loss", total.sum().detach(), expected.detach())
        assert torch.equal(count, mask.sum(dim=1))
