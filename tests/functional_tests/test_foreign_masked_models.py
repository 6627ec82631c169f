"""Encoders and encoder-decoders of the package ``transformers`` compute the same as ``pretrain_bert.py`` and
``pretrain_t5.py``: logits, loss and every gradient, from the same weights, in float32 on one CPU."""

import pytest
import torch

from tests.test_utils.foreign_comparison import assert_close
from tests.test_utils.foreign_masked_models import FAMILIES, build, compare_losses, flags_of, random_arrays, to_ours
from tests.test_utils.foreign_models import VOCAB

pytest.importorskip("transformers", reason="pip install transformers: it is what the models are compared with")


def our_task(family):
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.tasks.language_model import task_class

    kind = "t5" if family.is_t5 else "bert"

    class WithoutTokenizer(task_class(kind)):
        vocab_size = VOCAB

    return WithoutTokenizer(validate_args(parse_args(flags_of(family), needs_data=False, model_family=kind), 1))


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_loss_and_gradients_equal_those_of_transformers(name):
    family = FAMILIES[name]
    foreign, arrays = build(family), random_arrays(family)
    native = our_task(family).model_provider()

    weights = to_ours(family, dict(foreign.named_parameters()))
    zero = {key for key, _ in native.named_parameters()} - weights.keys()
    assert all(key.endswith("bias") for key in zero), f"{zero} are not in their model"
    with torch.no_grad():
        for key, parameter in native.named_parameters():
            parameter.zero_()
            if key in weights:
                parameter[: len(weights[key])].copy_(weights[key])
    compare_losses(family, native, foreign, arrays)
    gradients = to_ours(family, {key: value.grad for key, value in foreign.named_parameters()}, gradients=True)
    for key, parameter in native.named_parameters():
        if key in zero:
            continue
        rows = len(gradients[key])
        first = int(key == "embedding.word_embeddings.weight")  # theirs keeps the row of padding as it is
        assert_close(f"gradient of {key}", parameter.grad[first:rows], gradients[key][first:])
        assert not parameter.grad[rows:].any(), f"the padding of {key} has a gradient"
    assert sum(weight.numel() for weight in weights.values()) == sum(item.numel() for item in foreign.parameters())
