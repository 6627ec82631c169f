"""Loops of programs written for Megatron-LM: what they get back, and the scale of their gradients."""

import dataclasses
from dataclasses import replace

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.config.model_parallel_config import ModelParallelConfig
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.groups.process_groups import SINGLE_PROCESS, Group
from megatron.core.pipeline_parallel import get_forward_backward_func, microbatches, schedules
from tests.unit_tests.core.models.test_gpt_model import batch, make_model

EXPERTS = {"num_moe_experts": 4, "moe_z_loss_coeff": 0.1, "moe_aux_loss_coeff": [0.3], "swiglu": True}


def linear(**config):
    model = torch.nn.Linear(3, 1, bias=False)
    model.config = ModelParallelConfig(**config)
    return model


def run(model, batches, returned, **options):
    def forward_step(iterator, chunk):
        return chunk(next(iterator)), returned

    return get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=iter(batches), model=[model], num_microbatches=len(batches),
        seq_length=2, micro_batch_size=1, **options,
    )  # fmt: skip


def test_schedule_returns_loss_function_results_unchanged():
    """Per-token tensors, lists, strings, several counts, or no dictionary at all."""
    batches = [torch.randn(2, 3) for _ in range(4)]
    built = [
        {"lm loss": torch.tensor(1.5), "log_probs": torch.randn(16), "ids": [1, 2, 3], "name": "a"},
        {"lm loss": (torch.tensor(3.0), torch.tensor(2)), "values": torch.randn(4, 5), "none": None},
        [torch.randn(3), {"nested": []}],
        torch.randn(7),
    ]
    left = iter(built)
    result = run(linear(), batches, lambda output: (output.sum(), next(left)))
    assert all(mine is foreign for mine, foreign in zip(result, built, strict=True))
    left = iter(built)
    result = run(linear(), batches, lambda output: (output.sum(), torch.tensor(2), next(left)), forward_only=True)
    assert all(mine is foreign for mine, foreign in zip(result, built, strict=True))


def gradient(batches, weights):
    return sum(weight * item.sum(0, keepdim=True) for weight, item in zip(weights, batches, strict=True))


@pytest.mark.parametrize("kind, weights", [
    ("mean", [1 / 3, 1 / 3, 1 / 3]), ("counted", [1 / 12, 1 / 3, 1 / 6]), ("per token", [1.0, 1.0, 1.0]),
])  # fmt: skip
def test_losses_are_scaled_as_megatron_lm_does(kind, weights):
    """A mean by the number of micro-batches; a sum by its tokens (at least 1) too, unless losses are per token."""
    reported, counts = [], [4, 0, 2]
    model = linear(calculate_per_token_loss=kind == "per token", grad_scale_func=lambda loss: 8 * loss)
    model.config.finalize_model_grads_func = lambda chunks, num_tokens: reported.append((chunks, num_tokens))
    batches, left = [torch.randn(2, 3) for _ in range(3)], iter(counts)
    more = (lambda: ()) if kind == "mean" else lambda: (torch.tensor(next(left)),)
    run(model, batches, lambda output: (output.sum(), *more(), {}))
    torch.testing.assert_close(model.weight.grad, 8 * gradient(batches, weights))
    ((chunks, num_tokens),) = reported
    assert chunks == [model] and (num_tokens.item() == 6 if kind == "per token" else num_tokens is None)
    run(model, batches, lambda output: (output.sum(), {}), forward_only=True)
    assert len(reported) == 1


def test_a_mean_counts_for_every_context_parallel_rank(monkeypatch):
    """The mean is over all ranks' tokens; each rank differentiates its local part."""
    groups = dataclasses.replace(SINGLE_PROCESS, cp=Group("cp", (0, 1), 0))
    monkeypatch.setattr(parallel_state, "get_process_groups", lambda: groups)
    model, batches = linear(), [torch.randn(2, 3) for _ in range(2)]
    run(model, batches, lambda output: (output.sum(), {}))
    torch.testing.assert_close(model.weight.grad, gradient(batches, [1.0, 1.0]))
    model.weight.grad = None
    run(model, batches, lambda output: (output.sum(), torch.tensor(4), {}))
    torch.testing.assert_close(model.weight.grad, gradient(batches, [1 / 8, 1 / 8]))


def test_tokens_are_counted_exactly():
    reported, counts = [], iter([2**24, 1])
    model = linear(finalize_model_grads_func=lambda _, num_tokens: reported.append(num_tokens.item()))
    model.config.calculate_per_token_loss = True
    run(model, [torch.randn(2, 3)] * 2, lambda output: (output.sum(), torch.tensor(next(counts)), {}))
    assert reported == [2**24 + 1]


def _wrapped_gradients(rank, world_size, per_token, sharded):
    """The gradient after the reduction over two ranks, and what it must be."""
    parallel_state.initialize_model_parallel()
    torch.manual_seed(3)
    module = linear(finalize_model_grads_func=finalize_model_grads)
    module.config.calculate_per_token_loss = per_token
    model = DistributedDataParallel(
        module.config, DistributedDataParallelConfig(use_distributed_optimizer=sharded), module
    )
    batches = [torch.randn(2, 3) for _ in range(4)]
    counts = [1, 5, 2, 2]
    left = iter(counts[2 * rank : 2 * rank + 2])
    run(model, batches[2 * rank : 2 * rank + 2], lambda output: (output.sum(), torch.tensor(next(left)), {}))
    weights = [1 / 10] * 4 if per_token else [1 / (4 * count) for count in counts]
    difference = (module.weight.main_grad - gradient(batches, weights)).abs().flatten()
    owned = [(shard.start, shard.stop) for shard in (model.parameter_shards() or {}).values()] if sharded else [(0, 3)]
    return [value for start, stop in owned for value in difference[start:stop].tolist()]


@pytest.mark.parametrize("per_token, sharded", [(False, False), (True, False), (False, True)])
def test_gradients_of_wrapped_models_are_means_over_data_parallel_ranks(gloo_pool, per_token, sharded):
    differences = sum(gloo_pool.run(_wrapped_gradients, 2, per_token, sharded), [])
    assert len(differences) == (3 if sharded else 6) and max(differences) < 1e-6


def expert_gradients(batches, kind, mask=False):
    model = make_model(**EXPERTS).train()

    def loss_func(output):
        if kind == "mean":
            return output.mean(), {}
        return output.sum(), torch.tensor(output.numel()), {}

    def forward_step(iterator, model):
        tokens, labels, positions = next(iterator)
        mask_bs = torch.ones_like(tokens, dtype=torch.float64) if mask else None
        return model(tokens, positions, labels=labels, loss_mask=mask_bs), loss_func

    model.config.calculate_per_token_loss = kind == "per token"
    get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=iter(batches), model=model, num_microbatches=len(batches)
    )
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_expert_auxiliary_losses_weigh_the_same_for_all_loss_functions():
    """Also if the model receives the loss mask, which newer programs pass for other purposes."""
    batches = [batch(seed=seed) for seed in range(2)]
    expected = expert_gradients(batches, "mean")
    count = batches[0][0].numel() * len(batches)
    kinds = [("mean", True, 1), ("counted", False, 1), ("counted", True, 1), ("per token", True, count)]
    for kind, mask, factor in kinds:
        actual = expert_gradients(batches, kind, mask)
        for name, value in expected.items():
            torch.testing.assert_close(actual[name] / factor, value, rtol=1e-5, atol=1e-7, msg=f"{kind} {mask} {name}")


def test_a_model_and_an_iterator_may_be_single_or_in_lists():
    model, batches = torch.nn.Linear(3, 1, bias=False), [torch.randn(2, 3) for _ in range(3)]

    def forward_step(iterator, chunk):
        return chunk(next(iterator)), lambda output: (output.sum(), {})

    for data, chunks in ((iter(batches), model), ([iter(batches)], (model,))):
        model.weight.grad = None
        call = {"data_iterator": data, "model": chunks, "num_microbatches": 2}
        get_forward_backward_func()(forward_step_func=forward_step, **call)
        torch.testing.assert_close(model.weight.grad, gradient(batches[:2], [0.5, 0.5]))


def test_other_data_than_losses_are_collected_without_a_backward_pass():
    model, batches = linear(), [torch.randn(2, 3) for _ in range(2)]
    results = run(model, batches, lambda output, non_loss_data: (non_loss_data, output), collect_non_loss_data=True)
    assert model.weight.grad is None
    for (flag, output), item in zip(results, batches, strict=True):
        assert flag is True and torch.equal(output, model(item))
    results = run(model, batches, None, forward_only=True)  # no loss function: the outputs themselves
    assert all(torch.equal(output, model(item)) for output, item in zip(results, batches, strict=True))


def test_mistakes_are_named():
    model, batches = linear(), [torch.randn(2, 3)]
    with pytest.raises(ValueError, match="no loss function; return one, or pass forward_only=True"):
        run(model, batches, None)
    with pytest.raises(ValueError, match="loss_func returned 1 values"):
        run(model, batches, lambda output: (output.sum(),))
    with pytest.raises(TypeError, match="no arguments micro_batches"):
        run(model, batches, lambda output: (output.sum(), {}), micro_batches=1)


def test_arguments_of_megatron_lm_are_taken(monkeypatch):
    passed = dict.fromkeys(
        ["first_val_step", "adjust_tensor_shapes_fn", "p2p_communicator", "pg_collection", "decoder_seq_length"]
    )
    run(linear(), [torch.randn(2, 3)], lambda output: (output.sum(), {}), force_all_reduce=False, **passed)
    assert get_forward_backward_func(pp_size=1, vp_size=None) is schedules.forward_backward_no_pipelining
    groups = replace(SINGLE_PROCESS, pp=Group("pp", (0, 1), 0))
    monkeypatch.setattr(microbatches.parallel_state, "get_process_groups", lambda: groups)
    assert get_forward_backward_func() is schedules.forward_backward_pipelining_without_interleaving
