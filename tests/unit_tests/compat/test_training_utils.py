"""Helpers of entry scripts: masks and positions by their definition, means over ranks."""

import pytest
import torch

from megatron.compat.training_utils import average_losses_across_data_parallel_group, get_ltor_masks_and_position_ids
from megatron.core import parallel_state

END = 9
DATA = [[1, END, 2, 3, END, END], [END, 4, 5, 6, 7, 8]]


@pytest.mark.parametrize("resets_positions", [False, True])
@pytest.mark.parametrize("resets_mask", [False, True])
@pytest.mark.parametrize("masks_ends", [False, True])
def test_masks_and_positions_equal_the_definition(resets_positions, resets_mask, masks_ends):
    mask, loss_mask, positions = get_ltor_masks_and_position_ids(
        torch.tensor(DATA), END, resets_positions, resets_mask, masks_ends
    )
    for row, tokens in enumerate(DATA):
        starts = [max([0, *(end + 1 for end in range(place) if tokens[end] == END)]) for place in range(len(tokens))]
        first = starts if resets_mask else [0] * len(tokens)
        visible = [[first[query] <= key <= query for key in range(len(tokens))] for query in range(len(tokens))]
        assert (~mask[row if resets_mask else 0, 0]).tolist() == visible
        assert positions[row].tolist() == [place - start * resets_positions for place, start in enumerate(starts)]
        assert loss_mask[row].tolist() == [float(token != END or not masks_ends) for token in tokens]


def averaged(rank, world_size):
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    return average_losses_across_data_parallel_group([torch.tensor(1.0 + rank), torch.tensor(10.0 * rank)])


def test_losses_are_averaged_over_data_and_context_parallel_ranks(gloo_pool):
    assert [losses.tolist() for losses in gloo_pool.run(averaged, 2)] == [[1.5, 5.0]] * 2
