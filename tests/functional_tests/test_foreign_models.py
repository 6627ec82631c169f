"""Models of the package ``transformers`` compute the same: logits, loss and every gradient, from the same weights.

Each is built through the command line of ``pretrain_gpt.py``, in float32 on one CPU; what both programs share is
torch.
"""

import pytest
import torch

from tests.test_utils.foreign_comparison import compare_gradients, compare_losses
from tests.test_utils.foreign_models import MIXTURES, MODELS, VOCAB, build, flags_of, to_ours

pytest.importorskip("transformers", reason="pip install transformers: it is what the models are compared with")

FAMILIES = {**MODELS, **MIXTURES}


def our_model(model):
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.tasks.gpt import GPTTask

    class WithoutTokenizer(GPTTask):
        vocab_size = VOCAB

    return WithoutTokenizer(validate_args(parse_args(flags_of(model), needs_data=False), 1)).model_provider()


def both_models(model):
    """The model of transformers and the local one, with equal weights."""
    foreign, native = build(model), our_model(model)
    weights = to_ours(foreign.state_dict(), model)
    with torch.no_grad():
        biases = [(key, item) for key, item in native.named_buffers() if key.endswith("expert_bias")]
        for key, parameter in (*native.named_parameters(), *biases):
            value = weights[key].reshape(-1, *parameter.shape[1:])
            assert len(value) <= len(parameter), key
            parameter[: len(value)].copy_(value)
    return foreign, native


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_loss_and_gradients_equal_those_of_transformers(name):
    model = FAMILIES[name]
    foreign, native = both_models(model)
    compare_losses(native, foreign)
    gradients = {key: value.grad for key, value in foreign.named_parameters()}
    compared = compare_gradients(native, to_ours(gradients, model))
    assert compared == sum(item.numel() for item in foreign.parameters()), "a weight of theirs has no place here"


def test_the_table_holds_thirty_models():
    assert len({(model.architecture, model.flags) for model in MODELS.values()}) >= 30 and len(MIXTURES) >= 7
