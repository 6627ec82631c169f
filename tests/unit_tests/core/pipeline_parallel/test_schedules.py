"""Both conventions of loss functions, and gradients that accumulate over micro-batches."""

import pytest
import torch

from megatron.core.config.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.results import split_loss


def run(model, batches, returned, **options):
    def forward_step(iterator, chunk):
        return chunk(next(iterator)), returned

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=len(batches),
        **options,
    )


def test_gradients_of_all_micro_batches_add_up():
    model = torch.nn.Linear(3, 1, bias=False)
    batches = [torch.randn(2, 3) for _ in range(4)]
    results = run(model, batches, lambda output: (output.sum(), torch.tensor(2), {"lm loss": (output.sum(), 2)}))
    expected = torch.cat(batches).sum(dim=0, keepdim=True)
    torch.testing.assert_close(model.weight.grad, expected)
    assert sum(result.num_tokens.item() for result in results) == 8
    assert results[0].logged["lm loss"].shape == (2,)


def test_callbacks_of_a_programs_own_configuration_are_called_around_backward():
    model, told = torch.nn.Linear(3, 1, bias=False), []
    model.config = ModelParallelConfig(grad_scale_func=lambda loss: 4 * loss)
    model.config.finalize_model_grads_func = lambda chunks, num_tokens: told.append((chunks, num_tokens.item()))
    batches = [torch.randn(2, 3) for _ in range(3)]
    returned = lambda output: (output.sum(), torch.tensor(2), {})  # noqa: E731
    run(model, batches, returned)
    torch.testing.assert_close(model.weight.grad, 4 * torch.cat(batches).sum(dim=0, keepdim=True))
    assert told == [([model], 6)]
    run(model, batches, returned, forward_only=True)
    assert len(told) == 1


def test_forward_only_leaves_no_gradient():
    model = torch.nn.Linear(3, 1)
    run(model, [torch.randn(2, 3)], lambda output: (output.sum(), torch.tensor(2), {}), forward_only=True)
    assert model.weight.grad is None


def test_a_mean_loss_counts_once_per_micro_batch():
    loss, num_tokens, logged = split_loss((torch.tensor(2.0), {"lm loss": torch.tensor(2.0)}))
    assert loss == 2.0 and num_tokens == 1 and logged["lm loss"].tolist() == [2.0, 1.0]


def test_other_returns_are_refused():
    with pytest.raises(ValueError, match="loss_func returned 1 values"):
        split_loss((torch.tensor(1.0),))
