"""The benchmark of the output layer runs, and its candidates agree."""

import argparse

from benchmarks.bench_cross_entropy import measure


def test_all_candidates_compute_the_same():
    rows = measure(argparse.Namespace(smoke=True, tp=1))["rows"]
    assert list(rows) == ["gemms", "eager", "plain", "chunks of 16", "chunks of 7"]
    for name, row in rows.items():
        assert row["ms"] > 0 and (name == "gemms" or max(row["loss error"], row["input gradient error"]) < 0.02)
