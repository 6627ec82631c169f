"""Losses of routers inside a GPT model weigh as the main loss does, in both conventions of ``loss_func``."""

from dataclasses import replace

import pytest
import torch

from megatron.core.config.errors import UserError
from megatron.core.groups.process_groups import SINGLE_PROCESS, Group
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from tests.unit_tests.core.models.test_gpt_model import BATCH, LENGTH, batch, make_config, make_model

EXPERTS = {"num_moe_experts": 4, "moe_z_loss_coeff": 0.1, "moe_aux_loss_coeff": [0.3], "swiglu": True}
TOKENS = BATCH * LENGTH


def gradients(micro_batches, *, is_sum, masked=None, transform=None, **overrides):
    """By name, of the mean over tokens, for equally long micro-batches; ``masked``: whether the model gets a mask."""
    model = make_model(**{**EXPERTS, **overrides}).train()

    def forward_step(iterator, model):
        tokens, labels, positions = next(iterator)
        mask = torch.ones_like(tokens, dtype=torch.float64) if (is_sum if masked is None else masked) else None
        output = model(tokens, positions, labels=labels, loss_mask=mask)
        return output, loss_of_tokens

    def loss_of_tokens(output):
        return (output.sum(), torch.tensor(output.numel()), {}) if is_sum else (output.mean(), {})

    forward_backward_no_pipelining(
        forward_step_func=forward_step, data_iterator=iter(micro_batches), model=model,
        num_microbatches=len(micro_batches), loss_transform=transform,
    )  # fmt: skip
    count = len(micro_batches) * (TOKENS if is_sum else 1)
    return {name: param.grad / count for name, param in model.named_parameters()}


def test_sums_and_means_have_the_same_gradients():
    """Over several micro-batches and under a loss scale."""
    batches = [batch(seed=seed) for seed in range(3)]
    expected = gradients(batches, is_sum=False)
    scaled = gradients(batches, is_sum=True, transform=lambda loss: loss * 1024 / 7)
    for name, grad in expected.items():
        torch.testing.assert_close(scaled[name] * 7 / 1024, grad, rtol=1e-5, atol=1e-7)
    without = gradients(batches, is_sum=False, moe_z_loss_coeff=None, moe_aux_loss_coeff=[0.0])
    router = "decoder.layers.0.mlp.router.weight"
    assert (without[router] - expected[router]).abs().max() > 0.01 * expected[router].abs().max()


@pytest.mark.parametrize("is_sum, found", [(True, "a sum over 36 tokens.*as of a mean"), (False, "a mean.*of 36 ")])
def test_a_main_loss_of_another_kind_is_refused(is_sum, found):
    """Either would silently scale the routers' losses by the tokens of a micro-batch."""
    with pytest.raises(UserError, match=found):
        gradients([batch()], is_sum=is_sum, masked=not is_sum)
    gradients([batch()], is_sum=is_sum, masked=not is_sum, moe_z_loss_coeff=None, moe_aux_loss_coeff=[0.0])


def test_means_of_context_parallel_ranks_add_up():
    """Each rank's main loss is a mean of its own tokens, and gradients of ranks are added."""
    model = make_model(**EXPERTS).train()
    model.groups = replace(SINGLE_PROCESS, cp=Group("cp", (0, 1)))
    assert model._side_losses(4, None, torch.device("cpu")).tokens_b.sum() == 2


def test_tensor_parallel_ranks_that_would_route_the_same_tokens_are_refused():
    config = make_config(**EXPERTS)
    layer = ModuleSpec(MoELayer, submodules=MoESubmodules(shared_experts=None))
    groups = replace(SINGLE_PROCESS, tp=Group("tp", (0, 1)))
    with pytest.raises(UserError, match="needs sequence_parallel"):
        build_module(layer, config, groups=groups)
