"""Batch sizes over a run: constant, ramped, stepped; and the number of iterations that follows."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.schedules.batch_size import (
    check_batch_sizes,
    global_batch_size,
    num_microbatches,
    parse_token_count,
    running_global_batch_size,
    samples_from_iters,
    train_iters_from_samples,
)


def config(**changes):
    values = {
        "micro_batch_size": 2, "global_batch_size": 64, "rampup_batch_size": None, "step_batch_size_schedule": None,
        "decrease_batch_size_if_needed": False, "seq_length": 100,
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


def test_a_constant_batch_is_constant():
    assert [global_batch_size(config(), n) for n in (0, 64, 10**9)] == [64, 64, 64]
    assert num_microbatches(config(), 0, 4) == 8


def test_the_ramp_spreads_its_increments_evenly():
    ramp = config(rampup_batch_size=[16, 16, 300])  # 3 increments, one per 100 samples
    expected = {0: 16, 99: 16, 100: 32, 199: 32, 200: 48, 299: 48, 300: 64, 10**9: 64}
    assert {n: global_batch_size(ramp, n) for n in expected} == expected


def test_a_ramp_that_starts_at_the_end_is_constant():
    assert global_batch_size(config(rampup_batch_size=[64, 16, 300]), 0) == 64
    assert global_batch_size(config(rampup_batch_size=[16, 16, 0]), 0) == 64


def test_the_step_schedule_counts_tokens():
    steps = config(global_batch_size=None, step_batch_size_schedule="0:16 2.4K:32 1M:320")
    expected = {0: 16, 23: 16, 24: 32, 9999: 32, 10_000: 320}
    assert {n: global_batch_size(steps, n) for n in expected} == expected


@pytest.mark.parametrize("seq_length", [1, 7, 64, 100, 333])
def test_a_step_begins_at_the_first_sample_whose_tokens_reach_it(seq_length):
    """Thresholds that are no multiple of the sequence length, one that is, and two within one sample."""
    steps = [(0, 16), (1, 8), (50, 24), (700, 32), (705, 40), (1999, 320)]
    text = " ".join(f"{tokens}:{size}" for tokens, size in steps)
    cfg = config(global_batch_size=None, step_batch_size_schedule=text, seq_length=seq_length)
    for consumed in range(2001 // seq_length + 2):
        expected = [size for tokens, size in steps if consumed * seq_length >= tokens][-1]
        assert global_batch_size(cfg, consumed) == expected, consumed
        assert num_microbatches(cfg, consumed, 4) == expected // 8


@pytest.mark.parametrize("start, increment, samples", [(16, 16, 100), (8, 8, 3), (4, 12, 77), (16, 48, 5)])
def test_a_ramp_grows_at_the_first_sample_of_each_equal_share(start, increment, samples):
    ramp, steps = config(rampup_batch_size=[start, increment, samples]), (64 - start) // increment
    for consumed in range(samples + 5):
        grown = min(consumed * steps // samples, steps)
        assert global_batch_size(ramp, consumed) == start + grown * increment, consumed


@pytest.mark.parametrize("text, count", [("0", 0), ("17", 17), ("1.5k", 1500), ("2.4B", 2_400_000_000), ("1T", 10**12)])
def test_token_counts(text, count):
    assert parse_token_count(text) == count


@pytest.mark.parametrize("changes, words", [
    ({"rampup_batch_size": [16, 15, 300]}, "--rampup-batch-size 16 15 300.*--global-batch-size 64"),
    ({"rampup_batch_size": [80, 16, 300]}, "--rampup-batch-size"),
    ({"rampup_batch_size": [16, 16]}, "three numbers"),
    ({"rampup_batch_size": [0, 16, 300]}, "positive"),
    ({"step_batch_size_schedule": "5:16"}, "must be 0"),
    ({"step_batch_size_schedule": "0:16 5X:32"}, "5X"),
    ({"step_batch_size_schedule": "0:16 1K:32 1K:64"}, "rise"),
    ({"step_batch_size_schedule": "0:0"}, "positive"),
    ({"step_batch_size_schedule": "0-16"}, "TOKENS:SIZE"),
    ({"step_batch_size_schedule": ","}, "no entry"),
    ({"step_batch_size_schedule": "0:16", "rampup_batch_size": [16, 16, 300]}, "exclude"),
    ({"global_batch_size": 0}, "--global-batch-size 0"),
])  # fmt: skip
def test_bad_schedules_name_flag_and_reason(changes, words):
    with pytest.raises(ValueError, match=words):
        global_batch_size(config(**changes), 0)


def test_every_size_of_a_schedule_must_be_divisible():
    check_batch_sizes(config(rampup_batch_size=[16, 16, 300]), 8)
    with pytest.raises(ValueError, match="size 16 is not divisible.*size 3; nearest valid sizes: 12 and 18"):
        check_batch_sizes(config(rampup_batch_size=[16, 16, 300]), 3)
    check_batch_sizes(config(decrease_batch_size_if_needed=True), 3)
    with pytest.raises(ValueError, match="size 64"):
        check_batch_sizes(config(decrease_batch_size_if_needed=True), 64)


def test_an_odd_data_parallel_size_lowers_the_batch_if_allowed():
    lowered = config(decrease_batch_size_if_needed=True)
    assert running_global_batch_size(lowered, 0, 3) == 60
    assert num_microbatches(lowered, 0, 3) == 10
    assert running_global_batch_size(config(), 0, 4) == 64


def walk(cfg, dp=1, samples=None, iterations=None, consumed=0):
    """The definition, one iteration at a time, from ``consumed`` samples on."""
    finished = 0
    while iterations is None or finished < iterations:
        size = running_global_batch_size(cfg, consumed, dp)
        if samples is not None and consumed + size > samples:
            break
        consumed, finished = consumed + size, finished + 1
    return finished if samples is not None else consumed


@settings(max_examples=60, deadline=None)
@given(
    start=st.integers(1, 8), increment=st.integers(1, 5), steps=st.integers(0, 6), ramp=st.integers(0, 400),
    length=st.integers(0, 900), lower=st.booleans(),
)  # fmt: skip
def test_iterations_and_samples_convert_as_a_walk_does(start, increment, steps, ramp, length, lower):
    final = 4 * (start + steps * increment)
    ramped = config(
        rampup_batch_size=[4 * start, 4 * increment, ramp], global_batch_size=final, micro_batch_size=1,
        decrease_batch_size_if_needed=lower,
    )  # fmt: skip
    dp = 3 if lower else 1
    stepped = config(
        step_batch_size_schedule=f"0:{4 * start} {1 + 90 * ramp}:{final} {2 + 130 * ramp}:{8 * increment}",
        micro_batch_size=1, decrease_batch_size_if_needed=lower,
    )  # fmt: skip
    assert train_iters_from_samples(stepped, length, dp) == walk(stepped, dp, samples=length)
    assert samples_from_iters(stepped, length // 8, dp) == walk(stepped, dp, iterations=length // 8)
    assert train_iters_from_samples(ramped, length, dp) == walk(ramped, dp, samples=length)
    assert samples_from_iters(ramped, length // 8, dp) == walk(ramped, dp, iterations=length // 8)
    for consumed in (length // 3, ramp, length + 5):  # of an earlier run with other batch sizes
        for cfg in (stepped, ramped):
            assert train_iters_from_samples(cfg, length, dp, consumed) == walk(cfg, dp, length, consumed=consumed)
