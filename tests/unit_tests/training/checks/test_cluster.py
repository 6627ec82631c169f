"""``megatron check-cluster`` over gloo: formulas, a planted slow rank, different versions."""

import contextlib
import io
import itertools
import json
import os
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron.console import run_tool
from megatron.training.checks import cluster
from megatron.training.checks.cluster import ClusterCheck, Result


@pytest.mark.parametrize("size", [2, 3, 8])
def test_bus_factors_are_the_bytes_that_leave_a_rank_of_a_ring(size):
    part = 1 / size  # each step of a ring sends one part of the larger buffer
    assert cluster.bus_factor("all-reduce", size) == pytest.approx(2 * (size - 1) * part)
    for operation in ("all-gather", "reduce-scatter", "all-to-all"):
        assert cluster.bus_factor(operation, size) == pytest.approx((size - 1) * part)
    assert cluster.bus_factor("p2p", size) == 1


@pytest.mark.parametrize("size", range(1, 9))
def test_pairings_hold_every_pair_once_in_disjoint_rounds(size):
    ranks = [3 * i + 1 for i in range(size)]
    rounds = list(cluster.pairings(ranks))
    assert sorted(sum(rounds, [])) == list(itertools.combinations(ranks, 2))
    assert all(len(set(sum(pairs, ()))) == 2 * len(pairs) for pairs in rounds)


def test_a_slow_rank_but_not_its_partners_is_below_the_median():
    links = [Result("x", pair, 1.0 if 2 in pair else 10.0) for pair in itertools.combinations(range(5), 2)]
    (slow,) = cluster.outliers(cluster.rank_rates(links), 0.8)
    assert slow == (Result("x of rank", (2,), 1.0), 10.0)


def test_results_at_the_threshold_are_not_outliers():
    rates = [10.0, 10.0, 8.0, 7.9]
    assert [result.rate for result, _ in cluster.outliers([Result("x", (0,), r) for r in rates], 8 / 9)] == [7.9]


def test_node_groups_partition_the_ranks_by_host_and_by_place():
    assert cluster.node_groups(["a", "a", "b", "b", "b"]) == ([[0, 1], [2, 3, 4]], [[0, 2], [1, 3], [4]])


def check(rank, world_size, argv, slow_rank=None, newer_rank=None):
    """Return exit code and output of the tool; ``slow_rank`` sleeps in each of its measurements."""
    seconds, versions = ClusterCheck.seconds, cluster.versions
    out = io.StringIO()
    if rank == slow_rank:
        ClusterCheck.seconds = lambda self, work: seconds(self, lambda: (time.sleep(0.2), work()))
    if rank == newer_rank:
        cluster.versions = lambda: versions() | {"torch": "9.9"}
    try:
        with contextlib.redirect_stdout(out):
            return run_tool("check-cluster", argv), out.getvalue()
    finally:
        ClusterCheck.seconds, cluster.versions = seconds, versions


SMALL = ["--size-mb", "0.1"]


def test_a_planted_slow_rank_is_named(gloo_pool, tmp_path):
    argv = [*SMALL, "--tensor-model-parallel-size", "2", "--tolerance", "0.05", "--json", str(tmp_path / "out.json")]
    ranks = gloo_pool.run(check, 4, argv, 2)
    assert [code for code, _ in ranks] == [1] * 4 and not any(text for _, text in ranks[1:])
    values = json.loads((tmp_path / "out.json").read_text())
    slow = {(result["kind"], tuple(result["ranks"])) for result in values["slow"]}
    assert {("GEMM", (2,)), ("inside nodes p2p of rank", (2,))} <= slow, ranks[0][1]
    assert all(2 in members for _, members in slow), slow
    measured = {result["kind"]: result for result in values["results"]}
    for axis in ("tp", "dp", "world"):
        for operation in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all"):
            assert measured[f"{axis} {operation}"]["rate"] > 0 < measured[f"{axis} {operation}"]["latency"]
    assert abs(values["clock_skew_seconds"][3]) < 0.5  # one clock


def test_different_versions_are_named(gloo_pool):
    codes, texts = zip(*gloo_pool.run(check, 2, [*SMALL, "--tolerance", "0.001"], None, 1), strict=True)
    assert codes == (1, 1) and "DIFFERENT torch differs: " in texts[0] and "9.9 on ranks [1]" in texts[0]


def test_equal_ranks_are_ok(gloo_pool):
    codes, texts = zip(*gloo_pool.run(check, 2, [*SMALL, "--tolerance", "0.001"]), strict=True)
    assert codes == (0, 0) and "ok: all rates above 0.001 x the median" in texts[0]


def late(rank, world_size):
    """Return what rank 0 reports about a link whose other rank starts after the deadline."""
    link = ClusterCheck(torch.device("cpu"), 1000, 0.3)
    codes, err, end = [], io.StringIO(), os._exit
    os._exit = codes.append
    try:
        with contextlib.redirect_stderr(err):
            if rank == 1:
                time.sleep(0.8)
            link.links("inside nodes", [[0, 1]])
    finally:
        os._exit = end
    return codes, err.getvalue()


def test_a_rank_that_does_not_start_within_the_deadline_is_named(gloo_pool):
    codes, message = gloo_pool.run(late, 2)[0]
    assert set(codes) == {1} and "inside nodes p2p of ranks 0,1: rank 0" in message
    assert "did not finish within 0.3 s; ranks without a start: 1" in message


def measure(rank, world_size):
    """Return results of the pair: messages of 8,000 bytes take 0.5 s, of 4 bytes 1 ms, twice as long on rank 1, whose
    clock is 5 s ahead."""
    times = itertools.cycle([0.5 * (rank + 1), 0.001 * (rank + 1)])
    check = ClusterCheck(torch.device("cpu"), 8000, 60.0)
    with mock.patch.object(check, "seconds", lambda work: (work(), next(times))[1]):
        results = [*check.collectives("dp", [[0, 1]]), *check.links("inside nodes", [[0, 1]])]
    with mock.patch.object(cluster, "time", SimpleNamespace(time=lambda: time.time() + 5 * rank)):
        return results, check.clock_skews()


def test_rates_are_bus_bandwidths_of_the_slowest_rank_and_skews_have_a_sign(gloo_pool):
    (results, skews), _ = gloo_pool.run(measure, 2)
    rates = {"all-reduce": 8e-6, "all-gather": 4e-6, "reduce-scatter": 4e-6, "all-to-all": 4e-6}  # 8,000 bytes in 1 s
    for result, (operation, rate) in zip(results, rates.items()):
        assert (result.kind, result.ranks) == (f"dp {operation}", (0, 1))
        assert (result.rate, result.latency) == pytest.approx((rate, 2000))
    link = results[len(rates)]  # one direction takes half of the time there and back
    assert (link.kind, link.rate, link.latency) == ("inside nodes p2p", pytest.approx(16e-6), pytest.approx(1000))
    assert skews == [0, pytest.approx(5, abs=0.5)]
