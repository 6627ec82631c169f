"""Plan against measurement, with made-up numbers: the warning's limit, the part that is named, the warm-up."""

import pytest

from megatron.training.observe.plan_comparison import Prediction, compare, message, plan_shares, worst_part

PREDICTION = Prediction(
    "H100",
    1.0,
    {"GEMM": 0.6, "attention": 0.1, "tensor communication": 0.1, "bubble": 0.05, "optimizer": 0.05,
     "data communication": 0.1},
    error=0.03,
)  # fmt: skip
AS_PLANNED = {"forward_backward": 0.85, "update": 0.15, "data_wait": 0.2, "device_wait": 0.5}


@pytest.mark.parametrize(("seconds", "slower"), [(0.9, False), (1.03, False), (1.08, False), (1.09, True), (2.0, True)])
def test_a_run_is_slower_beyond_five_percent_after_the_error(seconds, slower):
    record = compare(PREDICTION, seconds, AS_PLANNED)
    assert (record["measured_seconds"] > record["limit_seconds"]) is slower


@pytest.mark.parametrize(
    ("seconds", "parts", "worst", "measured"),
    [
        (1.3, AS_PLANNED | {"forward_backward": 1.15}, "forward and backward", 1.15),
        (1.3, AS_PLANNED | {"update": 0.45}, "update", 0.45),
        # the host never waits for the device: the device waits for batches, and for the host without them
        (1.3, {"forward_backward": 1.2, "update": 0.1, "data_wait": 0.29, "device_wait": 0.0}, "data loading", 0.29),
        (1.3, {"forward_backward": 1.2, "update": 0.1, "data_wait": 0.01, "device_wait": 0.0}, "host", 0.29),
    ],
)
def test_the_part_with_the_largest_excess_is_named(seconds, parts, worst, measured):
    record = compare(PREDICTION, seconds, parts)
    times = record["parts_seconds"]
    assert worst_part(record) == worst
    assert times[worst]["measured"] == pytest.approx(measured)
    assert sum(time["predicted"] for time in times.values()) == pytest.approx(1.0)
    assert sum(time["measured"] for time in times.values()) == pytest.approx(seconds)


def test_reading_that_the_device_hides_is_no_cause():
    record = compare(PREDICTION, 1.3, AS_PLANNED | {"forward_backward": 1.15, "data_wait": 0.6})
    assert worst_part(record) == "forward and backward"
    assert record["parts_seconds"]["data loading"] == pytest.approx({"predicted": 0.0, "measured": 0.0})


def test_the_message_names_numbers_and_time_outside_of_iterations():
    record = compare(PREDICTION, 1.3, AS_PLANNED | {"update": 0.45}, {"evaluation": 0.2, "checkpoint saving": 0.0})
    text = message(record, PREDICTION)
    for part in (
        "an iteration takes 1.3 s, planned on H100: 1 s (+30%; the planner's error is 3%)",
        "The largest difference is in update: 0.45 s, planned 0.15 s",
        "compute 0.75 s, exposed communication 0.2 s, bubble 0.05 s",
        "Outside of iterations, evaluation 0.2 s per iteration",
    ):
        assert part in text, text
    assert "\n" not in text and "checkpoint saving" not in text


def test_shares_add_up_to_the_plan():
    assert sum(plan_shares(PREDICTION.parts).values()) == pytest.approx(1.0)
