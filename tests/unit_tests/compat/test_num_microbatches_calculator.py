"""The number of micro-batches that programs read equals the pure schedule."""

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron.compat import num_microbatches_calculator as calculator
from megatron.core.schedules import batch_size as batch_schedule


@pytest.fixture(autouse=True)
def forgotten():
    calculator.destroy_num_microbatches_calculator()
    yield
    calculator.destroy_num_microbatches_calculator()


def test_a_ramp_is_followed_as_samples_are_consumed(caplog):
    calculator.init_num_microbatches_calculator(0, [8, 8, 64], 24, 2, 2)
    settings = calculator.BatchSettings(2, 24, [8, 8, 64])
    caplog.clear()  # where an earlier test made logging louder
    with caplog.at_level(logging.INFO):
        for consumed in (0, 31, 32, 64, 1000):
            calculator.update_num_microbatches(consumed, consistency_check=False, verbose=True)
            assert calculator.get_num_microbatches() == batch_schedule.num_microbatches(settings, consumed, 2)
            assert calculator.get_current_global_batch_size() == batch_schedule.global_batch_size(settings, consumed)
    assert [record.getMessage() for record in caplog.records] == [
        "global batch size: 8 -> 16", "global batch size: 16 -> 24"
    ]  # fmt: skip
    assert calculator.get_micro_batch_size() == 2


def test_a_size_that_ranks_cannot_share_is_lowered_if_asked_else_rejected():
    with pytest.raises(ValueError, match="nearest valid sizes: 8 and 12"):
        calculator.init_num_microbatches_calculator(0, None, 10, 2, 2)
    calculator.init_num_microbatches_calculator(0, None, 10, 2, 2, decrease_batch_size_if_needed=True)
    assert calculator.get_num_microbatches() == 2
    assert calculator.get_current_running_global_batch_size() == 8 < calculator.get_current_global_batch_size() == 10


def test_arguments_of_newer_programs_are_taken_by_name():
    """Megatron-LM since 0.16: no ramp, and a schedule of batch sizes by samples or tokens."""
    with pytest.raises(ValueError, match="pass global_batch_size"):
        calculator.init_num_microbatches_calculator(rank=0, micro_batch_size=2, data_parallel_size=2)
    calculator.init_num_microbatches_calculator(rank=0, global_batch_size=32, micro_batch_size=8, data_parallel_size=2)
    assert calculator.get_num_microbatches() == 2
    calculator.reconfigure_num_microbatches_calculator(
        rank=0, global_batch_size=32, micro_batch_size=2, data_parallel_size=2,
        step_batch_size_schedule="0:16 1K:32", seq_length=8,
    )  # fmt: skip
    sizes = []
    for consumed in (0, 124, 125):  # 1,000 tokens are 125 samples
        calculator.update_num_microbatches(consumed)
        sizes.append(calculator.get_current_global_batch_size())
    assert sizes == [16, 16, 32]


def test_calculator_rejects_early_reads_and_second_initialization():
    with pytest.raises(RuntimeError, match="call init_num_microbatches_calculator"):
        calculator.get_num_microbatches()
    calculator.init_num_microbatches_calculator(1, None, 8, 2, 2)
    with pytest.raises(RuntimeError, match="reconfigure_num_microbatches_calculator"):
        calculator.init_num_microbatches_calculator(1, None, 8, 2, 2)
    calculator.reconfigure_num_microbatches_calculator(1, None, 16, 2, 2)
    assert calculator.get_num_microbatches() == 4


def test_messages_name_threads():
    """On GPUs autograd recomputes layers in separate threads."""
    calculator.init_num_microbatches_calculator(0, None, 8, 2, 2)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(calculator.get_num_microbatches).result() == 2
