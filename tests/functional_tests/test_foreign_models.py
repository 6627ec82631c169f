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
    foreign, ours = build(model), our_model(model)
    weights = to_ours(foreign.state_dict(), model)
    with torch.no_grad():
        biases = [(key, each) for key, each in ours.named_buffers() if key.endswith("expert_bias")]
        for key, parameter in (*ours.named_parameters(), *biases):
            value = weights[key].reshape(-1, *parameter.shape[1:])
            assert len(value) <= len(parameter), key
            parameter[: len(value)].copy_(value)
    return foreign, ours


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_loss_and_gradients_equal_those_of_transformers(name):
    model = FAMILIES[name]
    foreign, ours = both_models(model)
    compare_losses(ours, foreign)
    gradients = {key: value.grad for key, value in foreign.named_parameters()}
    compared = compare_gradients(ours, to_ours(gradients, model))
    assert compared == sum(each.numel() for each in foreign.parameters()), "a weight of theirs has no place here"


def test_the_table_holds_thirty_models():
    assert len({(model.architecture, model.flags) for model in MODELS.values()}) >= 30 and len(MIXTURES) >= 7
