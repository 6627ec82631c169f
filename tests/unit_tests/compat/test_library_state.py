"""Objects that programs ask the library for: values, order and identity."""

import itertools

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.fusions import fused_cross_entropy
from megatron.core.pipeline_parallel import schedules
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.transformer import utils


def test_the_memory_buffer_reuses_memory_by_name_and_dtype():
    buffer = parallel_state.get_global_memory_buffer()
    assert buffer is parallel_state.get_global_memory_buffer()
    large = buffer.get_tensor((4, 6), torch.float32, "reuse")
    small = buffer.get_tensor([2, 3, 2], torch.float32, "reuse")
    assert small.shape == (2, 3, 2) and small.data_ptr() == large.data_ptr()
    remaining = buffer.get_tensor((4, 6), torch.bfloat16, "reuse"), buffer.get_tensor((4, 6), torch.float32, "other")
    assert len({large.data_ptr(), *(tensor.data_ptr() for tensor in remaining)}) == 3
    assert buffer.get_tensor((5, 6), torch.float32, "reuse").shape == (5, 6)


@pytest.mark.parametrize("count, chunks, size", [(8, 2, 4), (7, 3, 2), (3, 2, 5), (5, 1, 1)])
def test_the_schedule_table_lists_groups_of_micro_batches_by_chunk(count, chunks, size):
    table = schedules.get_schedule_table(count, chunks, size)
    pairs = itertools.product(range(count), range(chunks))
    assert table == sorted(pairs, key=lambda pair: (pair[0] // size, pair[1], pair[0]))


def test_the_largest_logit_is_of_the_local_entries():
    logits = torch.randn(3, 2, 7, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    wide, largest = fused_cross_entropy.calculate_logits_max(logits)
    assert wide.dtype == largest.dtype == torch.float32 and torch.equal(wide, logits.float())
    assert largest.tolist() == [[max(row) for row in rows] for rows in logits.tolist()]


def test_metadata_gets_the_data_parallel_group_once():
    parallel_state.initialize_model_parallel()
    try:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        assert utils.ensure_metadata_has_dp_cp_group(None) == {"dp_cp_group": group}
        metadata = {"dp_cp_group": "mine", "x": 1}
        assert utils.ensure_metadata_has_dp_cp_group(metadata) is metadata and metadata["dp_cp_group"] == "mine"
    finally:
        parallel_state.destroy_model_parallel()


def test_batches_are_returned_again_until_the_iterator_advances():
    iterator = RerunDataIterator(iter([{"x": 0}, {"x": 1}, {"x": 2}, {"x": 3}]))
    first = [next(iterator), next(iterator)]
    first[0]["x"] = 99
    iterator.rewind()
    assert [next(iterator), next(iterator)] == [{"x": 0}, {"x": 1}]
    state = iterator.state_dict()
    iterator.advance()
    assert next(iterator) == {"x": 2}
    repeated = RerunDataIterator(iter([]))
    repeated.load_state_dict(state)
    repeated.rewind()
    assert next(repeated) == {"x": 0}


def test_strategies_of_checkpoints_have_the_name_of_the_format():
    from megatron.core.dist_checkpointing.strategies.torch import (
        TorchDistLoadShardedStrategy,
        TorchDistSaveShardedStrategy,
    )

    assert TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=2).name == "torch_dist"
    assert TorchDistLoadShardedStrategy().name == "torch_dist"


def test_latent_attention_is_an_instance_of_the_base_class_there():
    from megatron.core.transformer import multi_latent_attention

    assert issubclass(multi_latent_attention.MLASelfAttention, multi_latent_attention.MultiLatentAttention)
