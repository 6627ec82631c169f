"""Validation of the planner: its calibration and the table in its guide match the measured rows."""

from dataclasses import replace

import pytest

from benchmarks import plan_validation
from benchmarks.plan_validation import Row, calibrate, factors, left_out, pairs


def row(name, measured, predicted, host=0.0, workload="w"):
    return Row(name, workload, measured, predicted, 1 / measured, ("dense",), host=host)


def test_the_calibration_and_the_table_of_errors_are_current():
    rows = plan_validation.own_rows()
    lines = [f"{kind}\t{factor:.3f}\t{count}\n" for kind, (factor, count) in factors(rows).items()]
    written = plan_validation.CALIBRATION.read_text(encoding="utf-8")
    assert written == plan_validation.HEADER + "".join(lines), "run python benchmarks/plan_validation.py"
    page, guide = (path.read_text(encoding="utf-8") for path in (plan_validation.PAGE, plan_validation.GUIDE))
    assert plan_validation.table(left_out(rows)) in page, "run python benchmarks/plan_validation.py"
    assert plan_validation.summary(left_out(rows), 0.05) in guide, "run python benchmarks/plan_validation.py"


def test_rows_are_calibrated_by_the_device_time_of_others():
    rows = [row("a", 2.0, 1.0), row("b", 3.0, 1.0), row("c", 5.0, 3.0, host=1.0)]
    first = left_out(rows)[0]
    assert first.predicted == pytest.approx(3.0)  # c waits for the host too long to calibrate
    assert calibrate(rows[2], rows[:1]).predicted == pytest.approx(1.0 + 2.0 * 2.0)


def test_pairs_are_calibrated_without_both_rows_and_ties_are_wrong():
    tie = [row("a", 1.0, 1.0), row("b", 2.0, 1.0)]
    assert pairs(tie) == (0, 1)
    assert pairs([*tie, row("c", 9.0, 1.0, workload="other")]) == (0, 1)
    assert pairs([tie[0], replace(tie[1], uncalibrated=1.1)]) == (1, 1)
    assert pairs([tie[0], row("b", 1.04, 1.0)]) == (0, 0)
