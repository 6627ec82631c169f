"""Losses of routers inside a GPT model weigh as the main loss does, in both conventions of ``loss_func``."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.attention.context_parallel import zigzag
from megatron.core.config.errors import UserError
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.groups.process_groups import SINGLE_PROCESS, Group
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.loss_weights import MainLoss
from megatron.core.pipeline_parallel.program_losses import MainLossInput
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from tests.test_utils import training_steps as steps
from tests.unit_tests.core.models.test_gpt_model import BATCH, LENGTH, batch, make_config, make_model

EXPERTS = {"num_moe_experts": 4, "moe_z_loss_coeff": 0.1, "moe_aux_loss_coeff": [0.3], "swiglu": True}
TOKENS = BATCH * LENGTH


def gradients(micro_batches, *, is_sum, masked=None, scale=None, **overrides):
    """By name, of the mean over tokens, for equally long micro-batches; ``masked``: whether the model gets a mask."""
    model = make_model(**{**EXPERTS, **overrides}).train()

    def forward_step(iterator, model):
        tokens, labels, positions = next(iterator)
        mask = torch.ones_like(tokens, dtype=torch.float64) if (is_sum if masked is None else masked) else None
        output = model(tokens, positions, labels=labels, loss_mask=mask)
        return output, loss_of_tokens

    def loss_of_tokens(output):
        return (output.sum(), torch.tensor(output.numel()), {}) if is_sum else (output.mean(), {})

    model.config.calculate_per_token_loss, model.config.grad_scale_func = is_sum, scale
    get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=iter(micro_batches), model=model,
        num_microbatches=len(micro_batches),
    )  # fmt: skip
    count = len(micro_batches) * TOKENS if is_sum else 1
    return {name: param.grad / count for name, param in model.named_parameters()}


def test_sums_and_means_have_the_same_gradients():
    """Over several micro-batches and under a loss scale."""
    batches = [batch(seed=seed) for seed in range(3)]
    expected = gradients(batches, is_sum=False)
    scaled = gradients(batches, is_sum=True, scale=lambda loss: loss * 1024 / 7)
    for name, grad in expected.items():
        torch.testing.assert_close(scaled[name] * 7 / 1024, grad, rtol=1e-5, atol=1e-7)
    without = gradients(batches, is_sum=False, moe_z_loss_coeff=None, moe_aux_loss_coeff=[0.0])
    router = "decoder.layers.0.mlp.router.weight"
    assert (without[router] - expected[router]).abs().max() > 0.01 * expected[router].abs().max()


@pytest.mark.parametrize("is_sum, found", [(True, "a sum over 36 tokens.*as of a mean"), (False, "a mean.*of 36 ")])
def test_a_main_loss_of_another_kind_is_rejected(is_sum, found):
    """Either would silently scale the routers' losses by the tokens of a micro-batch."""
    for coefficients in ({}, {"moe_z_loss_coeff": None, "moe_aux_loss_coeff": [0.0]}):
        model, passed = make_model(**{**EXPERTS, **coefficients}).train(), MainLossInput()
        tokens, labels, positions = batch()
        mask = None if is_sum else torch.ones_like(tokens, dtype=torch.float64)
        passed(model, (tokens, positions), {"labels": labels, "loss_mask": mask})
        with nullcontext() if coefficients else pytest.raises(UserError, match=found):
            passed.check(torch.tensor(TOKENS) if is_sum else None)
        passed.check(torch.tensor(1))  # later micro-batches are not read


def test_means_of_context_parallel_ranks_add_up():
    """Each rank's main loss is a mean over its local tokens, and the ranks' gradients are added."""
    cp = Group("cp", (0, 1))
    for mean, mask in ((MainLoss(), None), (MainLoss(is_mean=True), torch.ones(4, 8))):
        assert mean.aux_weights(mask, torch.device("cpu"), 4, cp).tokens_b.sum() == 2


def gradients_of_ranks(rank, size, sizes, is_sum):
    """Return this rank's gradient shards for a global batch of two micro-batches with only valid tokens."""
    groups = parallel_state.initialize_model_parallel(**sizes)
    aux = {"moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"], "moe_aux_loss_coeff": [0.3, 0.2]}
    dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    model = steps.build(groups, **{**EXPERTS, **aux, **dropout, **sizes, "sequence_parallel": groups.tp.size > 1})
    ddp = DistributedDataParallel(None, DistributedDataParallelConfig(), model, groups=groups)
    tokens = torch.randint(0, steps.VOCAB, (4, steps.LENGTH + 1), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(steps.LENGTH).expand(4, -1)
    rows = torch.arange(4).chunk(groups.dp.size)[groups.dp.rank]

    def forward_step(iterator, model):
        part = next(iterator)
        full = (tokens[part, :-1], positions[part], tokens[part, 1:])
        ids, at, labels = (zigzag.local_part(item, groups.cp.rank, groups.cp.size) for item in full)
        mask = torch.ones_like(ids, dtype=torch.float64) if is_sum else None
        return model(ids, at, labels=labels, loss_mask=mask), loss_of

    def loss_of(output):
        mean = output.mean() / groups.cp.size  # over the tokens of all context-parallel ranks
        return (output.sum(), torch.tensor(output.numel()), {}) if is_sum else (mean, {})

    ddp.zero_grad_buffer()
    model.config.calculate_per_token_loss = is_sum
    model.config.finalize_model_grads_func = finalize_model_grads
    get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=iter(rows.chunk(2)), model=ddp, num_microbatches=2
    )
    return steps.shards(model, groups, lambda parameter: parameter.main_grad)


@pytest.mark.parametrize(
    "size, sizes",
    [
        (2, {}),
        (2, {"context_parallel_size": 2}),
        (4, {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "expert_model_parallel_size": 2,
             "expert_tensor_parallel_size": 1}),
    ],
    ids=["dp2", "cp2", "tp2-cp2-ep2"],
)  # fmt: skip
def test_sums_and_means_have_the_same_gradients_on_any_ranks(gloo_pool, size, sizes):
    """A router's losses weigh the same whether the main loss is a sum over tokens or a mean of each micro-batch."""
    expected = steps.assembled(gloo_pool.run(gradients_of_ranks, 1, {}, True))
    for is_sum in (True, False):
        actual = steps.assembled(gloo_pool.run(gradients_of_ranks, size, sizes, is_sum))
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


def test_tensor_parallel_ranks_that_would_route_the_same_tokens_are_rejected():
    config = make_config(**EXPERTS)
    layer = ModuleSpec(MoELayer, submodules=MoESubmodules(shared_experts=None))
    groups = replace(SINGLE_PROCESS, tp=Group("tp", (0, 1)))
    with pytest.raises(UserError, match="needs sequence_parallel"):
        build_module(layer, config, groups=groups)
