"""Both conventions of a program's loss function: a sum over tokens, or a mean."""

import pytest
import torch

from megatron.core.config.errors import UserError
from megatron.core.pipeline_parallel.loss_weights import MainLoss
from megatron.core.pipeline_parallel.program_losses import MainLossInput, split_loss
from megatron.core.pipeline_parallel.results import as_sum_and_count


def test_a_mean_loss_counts_once_per_micro_batch():
    loss, num_tokens, logged = split_loss((torch.tensor(2.0), {"lm loss": torch.tensor(2.0)}))
    assert loss == 2.0 and num_tokens == 1 and as_sum_and_count(logged["lm loss"]).tolist() == [2.0, 1.0]


LOSS, COUNT, VALUES = torch.tensor(1.0, requires_grad=True), torch.tensor(3), {"lm loss": torch.tensor(1.0)}
EITHER = r"return \(sum of token losses, number of tokens, dict\) or \(mean loss, dict\)"


@pytest.mark.parametrize(
    "returned, reason",
    [
        (LOSS, r"1 values \(tensor \[\]\)"),
        ((LOSS,), r"1 values \(tensor \[\]\)"),
        ((LOSS, COUNT), r"2 values \(tensor \[\], tensor \[\]\)"),
        ((LOSS, VALUES, COUNT), r"3 values \(tensor \[\], dict, tensor \[\]\)"),
        ((1.0, VALUES), r"2 values \(float, dict\)"),
        ((LOSS, COUNT.repeat(2), VALUES), r"3 values \(tensor \[\], tensor \[2\], dict\)"),
        ((LOSS, COUNT, COUNT, VALUES), "4 values"),
        ((LOSS.repeat(2), COUNT, VALUES), r"a loss of shape \[2\]"),
        ((LOSS.repeat(2), VALUES), r"a loss of shape \[2\]"),
    ],
)
def test_other_returns_of_a_loss_function_are_rejected(returned, reason):
    with pytest.raises(UserError, match=f"loss_func: returned {reason}.*{EITHER}"):
        split_loss(returned)


def test_counts_may_be_numbers_or_tensors_of_one_element():
    for count in (3, 3.0, COUNT, COUNT.view(1)):
        loss, num_tokens, _ = split_loss((LOSS, count, VALUES))
        assert loss is LOSS and num_tokens == 3 and num_tokens.shape == ()
    log_probs = torch.zeros(2, 4)  # without a backward pass the loss may be anything
    assert split_loss((log_probs, {}))[0] is log_probs


@pytest.mark.parametrize("first, other", [(2, 3), (3, 2)])
def test_a_loss_function_returns_equally_many_values_for_every_micro_batch(first, other):
    """A mean counts as one token: added to sums over tokens it would weigh almost nothing, or nearly everything."""
    returned = {2: (LOSS, {}), 3: (LOSS, COUNT, {})}
    split_loss(returned[first], first)
    with pytest.raises(UserError, match=rf"loss_func: returned {other} values \(.*, and {first} for the first micro-"):
        split_loss(returned[other], first)


def test_weight_of_the_main_loss_that_a_program_passes_stays():
    default, local = MainLoss(torch.tensor(1.0)), MainLoss(torch.tensor(2.0))
    add = MainLossInput(default)
    assert add(torch.nn.Identity(), (), {})[1] == {"main_loss": default}
    assert add(torch.nn.Identity(), (), {"main_loss": local, "x": 1})[1] == {"main_loss": local, "x": 1}
