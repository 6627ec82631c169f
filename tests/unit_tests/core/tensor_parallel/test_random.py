"""Seeds of torch's generators as programs written for Megatron-LM set them, and the named states of the tracker."""

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_data_parallel_rng_tracker_name,
    get_expert_parallel_rng_tracker_name,
    model_parallel_cuda_manual_seed,
)


def drawn(name=None):
    if name is None:
        return torch.rand(2).tolist()
    with get_cuda_rng_tracker().fork(name):
        return torch.rand(2).tolist()


def test_a_forked_state_advances_without_the_generator():
    model_parallel_cuda_manual_seed(11, False, False, False, force_reset_rng=True)
    first, second = drawn(), drawn()
    model_parallel_cuda_manual_seed(11, te_rng_tracker=False, inference_rng_tracker=False, use_cudagraphable_rng=False)
    states = get_cuda_rng_tracker().get_states()
    assert drawn() == first
    forked = [drawn("model-parallel-rng") for _ in range(2)]
    assert drawn() == second and forked[0] != forked[1] and forked[0] not in (first, second)
    get_cuda_rng_tracker().set_states(states)
    assert [drawn("model-parallel-rng") for _ in range(2)] == forked
    with get_cuda_rng_tracker().fork():  # the tensor-parallel state, unless another one is named
        assert torch.rand(2).tolist() not in forked
    torch.manual_seed(11 + 2718)
    assert torch.rand(2).tolist() == forked[0]


def test_many_expert_ranks_have_states_apart_from_tensor_parallel_ones():
    """1024 + 100 * 17 + 0 = 2718 + 6."""
    states = []
    for ep in (16, 17, 18):
        model_parallel_cuda_manual_seed(5, tp_rank=6, ep_rank=ep, etp_rank=0)
        states.append((drawn("model-parallel-rng"), drawn("expert-parallel-rng")))
    assert len({tuple(item) for pair in states for item in pair}) == 4, "one tensor-parallel and three expert states"


def test_mistakes_are_named():
    model_parallel_cuda_manual_seed(1)
    tracker = get_cuda_rng_tracker(True)
    assert tracker.is_initialized()
    with pytest.raises(ValueError, match="random state mine, seed 1: the name or the seed is in use"):
        tracker.add("mine", 1)
    with pytest.raises(ValueError, match="random state mine: does not exist; call model_parallel_cuda_manual_seed"):
        drawn("mine")
    with pytest.raises(TypeError, match="no arguments sed"):
        model_parallel_cuda_manual_seed(1, sed=2)
    tracker.reset()
    assert not tracker.is_initialized()


def _states(rank, world_size):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, expert_model_parallel_size=2)
    model_parallel_cuda_manual_seed(5)
    names = "model-parallel-rng", get_data_parallel_rng_tracker_name(), get_expert_parallel_rng_tracker_name()
    return [drawn(name) for name in names]


def test_ranks_that_share_a_tensor_draw_differently_and_data_parallel_ones_equally(gloo_pool):
    tensor, data, expert = zip(*gloo_pool.run(_states, 4))
    assert tensor[0] == tensor[2] != tensor[1] == tensor[3] and len(set(map(tuple, data))) == 1
    assert len(set(map(tuple, expert))) == 4  # two tensor-parallel ranks of each of two expert-parallel ranks
