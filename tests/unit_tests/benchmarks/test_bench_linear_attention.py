"""The benchmark of linear attention: selected rows, and times by kernel."""

import argparse

import pytest

from benchmarks.bench_linear_attention import contains, per_pass, run


def test_times_by_kernel_are_medians_of_sums_over_a_pass():
    """Three passes launch ``scan`` twice and ``pairs`` once; a slow pass does not count. Spans have any order."""
    spans = [("scan", 7.0, 30.0), ("scan", 0.0, 1.0), ("pairs", 2.0, 5.0), ("scan", 1.0, 2.0), ("scan", 3.0, 2.0),
             ("scan", 4.0, 2.0), ("pairs", 5.0, 7.0), ("scan", 6.0, 20.0), ("pairs", 8.0, 90.0)]  # fmt: skip
    assert list(per_pass(spans, 3).items()) == [("pairs", 7.0), ("scan", 4.0)]


@pytest.mark.parametrize("parts, expected", [(None, True), (["gated"], True), (["kimi", "32"], True), (["64"], False)])
def test_names_are_selected_by_parts(parts, expected):
    assert contains("gated delta net, 32 heads", parts) is expected


def test_a_run_measures_the_selected_rows(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    rows = run(
        argparse.Namespace(smoke=True, sweep=False, kernels=True, shapes=["channels", "space"], variants=["torch"])
    )
    assert [(row["shape"], row["variant"]) for row in rows] == [
        ("channels", "plain torch"), ("state space", "plain torch"),
    ]  # fmt: skip
    assert all(row["both_ms"] > 0 and row["forward_ms"] > 0 for row in rows)
