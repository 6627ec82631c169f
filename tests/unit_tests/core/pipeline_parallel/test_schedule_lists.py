"""Schedules as data: complete, free of deadlock, with the bubbles and the memory that their papers promise."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.pipeline_parallel.actions import Action, Schedule
from megatron.core.pipeline_parallel.choose import choose_schedule
from megatron.core.pipeline_parallel.schedule_interleaved import group_sizes, interleaved
from megatron.core.pipeline_parallel.schedule_plain import forward_only, one_forward_one_backward, without_pipeline
from megatron.core.pipeline_parallel.schedule_zero_bubble import zero_bubble, zero_bubble_h2
from megatron.core.pipeline_parallel.simulate import DeadlockError, peak_activations, simulate, unit_costs

RANKS, CHUNKS, MICROBATCHES = st.integers(1, 6), st.integers(1, 4), st.integers(1, 24)
MANY = settings(max_examples=250, deadline=None)


def check_complete(schedule):
    """Every chunk runs every micro-batch exactly once, forward and, unless it only evaluates, backward."""
    kinds = {action.kind for actions in schedule.actions for action in actions} | {"F"}
    everything = {
        Action(kind, chunk, m)
        for kind in kinds for chunk in range(schedule.num_chunks) for m in range(schedule.num_microbatches)
    }  # fmt: skip
    for rank, actions in enumerate(schedule.actions):
        if len(actions) != len(everything) or set(actions) != everything:
            raise AssertionError(f"schedule {schedule.name!r}: rank {rank} leaves out or repeats an action")


def check(schedule):
    """Complete, ends for even and for odd costs, and never runs an action before its input exists."""
    check_complete(schedule)
    for cost in (None, lambda stage, action: 1.0 + stage % 3 + (action.kind == "B")):
        timeline = simulate(schedule, cost, latency=0.25)
        ends = {(event.rank, event.action): event.end for events in timeline.events for event in events}
        for (rank, action), end in ends.items():
            source = schedule.source(rank, action)
            if source is not None:
                assert ends[source] + (0.25 if source.rank != rank else 0) < end
                assert schedule.target(source.rank, source.action) == (rank, action)


@given(RANKS, MICROBATCHES)
@MANY
def test_one_forward_one_backward_is_sound_for_all_sizes(ranks, microbatches):
    schedule = one_forward_one_backward(ranks, microbatches)
    check(schedule)
    assert peak_activations(schedule) == [min(ranks - rank, microbatches) for rank in range(ranks)]


@given(st.integers(2, 6), CHUNKS, MICROBATCHES, st.integers(0, 9))
@MANY
def test_interleaving_is_sound_for_any_group_size_and_number_of_micro_batches(ranks, chunks, microbatches, more):
    check(interleaved(ranks, chunks, microbatches, ranks + more))


@given(RANKS, CHUNKS, MICROBATCHES, st.integers(0, 5))
@settings(max_examples=120, deadline=None)
def test_zero_bubble_is_sound_for_all_sizes(ranks, chunks, microbatches, more):
    check(zero_bubble(ranks, microbatches, chunks, ranks + more))


@given(RANKS, CHUNKS, MICROBATCHES)
@MANY
def test_evaluation_is_sound_for_all_sizes(ranks, chunks, microbatches):
    check(forward_only(ranks, microbatches, chunks))


def test_without_a_pipeline_every_backward_follows_its_forward():
    assert without_pipeline(2).actions == ((("F", 0, 0), ("B", 0, 0), ("F", 0, 1), ("B", 0, 1)),)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 16), (8, 32)])
def test_bubbles_are_those_of_the_papers(ranks, microbatches):
    """1F1B waits (P-1)/(M+P-1) of the time; V chunks divide that by V, split weight gradients by three."""
    costs = unit_costs(1.0, 2.0)
    waiting = 3 * (ranks - 1)
    assert simulate(one_forward_one_backward(ranks, microbatches), costs).duration == 3 * microbatches + waiting
    two = simulate(interleaved(ranks, 2, microbatches), unit_costs(0.5, 1.0))
    assert two.duration == 3 * microbatches + waiting / 2
    split = zero_bubble(ranks, microbatches)
    assert simulate(split, unit_costs(1.0, 2.0, 1.0)).duration == 3 * microbatches + waiting / 3
    for schedule, cost in ((split, unit_costs(weight=1.0)), (interleaved(ranks, 2, microbatches), unit_costs())):
        assert simulate(schedule).duration == simulate(schedule, cost).duration  # without a cost: B is F and W is F
    assert peak_activations(split) == [ranks] * ranks  # the most that any rank of 1F1B holds
    both = zero_bubble(ranks, microbatches, 2)
    assert simulate(both, unit_costs(0.5, 1.0, 0.5)).duration == 3 * microbatches + waiting / 6
    assert max(peak_activations(both)) == max(peak_activations(interleaved(ranks, 2, microbatches)))
    bubble = simulate(one_forward_one_backward(ranks, microbatches), costs).bubble
    assert bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 1), (2, 4), (4, 3), (4, 8), (4, 16), (8, 32)])
def test_twice_as_many_forwards_ahead_wait_for_the_first_forward_only(ranks, microbatches):
    """Also where backward of the input takes longer than forward, as with attention."""
    schedule = zero_bubble_h2(ranks, microbatches)
    check(schedule)
    assert max(peak_activations(schedule)) <= 2 * ranks - 1
    if microbatches >= 2 * ranks > 2:
        assert simulate(schedule, unit_costs(1.0, 2.0, 1.0)).duration == 3 * microbatches + ranks - 1
        uneven = unit_costs(1.0, 2.2, 0.8)
        assert simulate(schedule, uneven).duration < simulate(zero_bubble(ranks, microbatches), uneven).duration


def test_more_chunks_with_split_weight_gradients_wait_least():
    bubbles = [
        simulate(choose_schedule(name, 4, chunks, 16), unit_costs(1.0, 2.0, 1.0 if name else None)).bubble
        for name, chunks in [(None, 1), (None, 2), ("zero-bubble", 1), ("zero-bubble", 2)]
    ]
    assert bubbles[0] > bubbles[1] > bubbles[3] and bubbles[0] > bubbles[2] > bubbles[3]


def test_a_circle_of_waiting_ranks_is_reported():
    first = tuple(Action(kind, 0, m) for kind, m in [("F", 0), ("B", 0), ("F", 1), ("B", 1)])
    second = tuple(Action(kind, 0, m) for kind, m in [("F", 1), ("B", 1), ("F", 0), ("B", 0)])
    broken = Schedule("broken", 1, 2, (first, second))
    with pytest.raises(DeadlockError, match="rank 0 waits for the input of B0.0; rank 1 waits for the input of F0.1"):
        simulate(broken)


def test_a_forgotten_or_repeated_action_is_found():
    full = one_forward_one_backward(2, 3)
    for actions in (full.actions[1][:-1], (*full.actions[1][:-1], full.actions[1][0])):
        with pytest.raises(AssertionError, match="rank 1 leaves out or repeats"):
            check_complete(Schedule("broken", 1, 3, (full.actions[0], actions)))


def test_a_remainder_too_small_to_fill_the_pipeline_joins_the_other_groups():
    assert group_sizes(4, 8, 4) == [4, 4]
    assert group_sizes(4, 9, 4) == [5, 4]
    assert group_sizes(2, 11, 4) == [4, 4, 3]
    assert group_sizes(4, 3, 4) == [3]


def test_a_schedule_that_does_not_fit_the_chunks_is_rejected():
    with pytest.raises(ValueError, match="--pipeline-schedule 1f1b does not fit 2 model chunks"):
        choose_schedule("1f1b", 2, 2, 4)
    with pytest.raises(ValueError, match="interleaved"):
        choose_schedule("interleaved", 2, 1, 4)


def test_schedules_import_without_torch():
    import subprocess
    import sys

    program = (
        "import sys, megatron.core.pipeline_parallel.choose, megatron.core.pipeline_parallel.simulate,"
        "megatron.core.pipeline_parallel.stages; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
