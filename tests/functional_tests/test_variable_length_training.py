"""Training on documents of different lengths with a context-parallel size per micro-batch: the whole program."""

import json

import numpy as np
import pytest

from tests.test_utils.gpt_runs import read_records, train

VARLEN = [
    "--use-varlen-dataset", "--micro-batch-size", "1", "--attention-dropout", "0", "--hidden-dropout", "0.1",
    "--eod-mask-loss", "--split", "70,20,10", "--eval-interval", "3",
]  # fmt: skip
DYNAMIC = ["--hybrid-context-parallel", "--max-seqlen-per-dp-cp-rank", "16"]


def records(folder, kind="train"):
    return [read_record for read_record in read_records(folder / "metrics.jsonl") if read_record["kind"] == kind]


@pytest.fixture(scope="module")
def one_rank(gloo_pool, dataset, tmp_path_factory):
    """Folder of the run on one rank, with its flags."""
    folder, flags = tmp_path_factory.mktemp("one"), [*VARLEN, "--data-path", str(dataset)]
    gloo_pool.run(train, 1, [*flags, "--save", str(folder)])
    return folder, flags


@pytest.mark.parametrize("ranks, layout", [(2, DYNAMIC), (4, DYNAMIC)])
def test_the_program_logs_the_losses_of_one_rank(gloo_pool, one_rank, tmp_path, ranks, layout):
    folder, flags = one_rank
    gloo_pool.run(train, ranks, [*flags, *layout, "--save", str(tmp_path)])
    for kind in ("train", "valid", "test"):
        one, many = records(folder, kind), records(tmp_path, kind)
        assert len(one) == len(many) > 0
        for first, second in zip(one, many):
            np.testing.assert_allclose(second["lm loss"], first["lm loss"], rtol=2e-5, err_msg=str(first))
            if kind == "train":
                assert first["num_tokens"] == second["num_tokens"]
                assert first["plan"]["tokens"] == second["plan"]["tokens"]
    plans = [record["plan"] for record in records(tmp_path)]
    assert {"1", "2"} <= {size for plan in plans for size in plan["cp_sizes"]}
    assert all(0 <= plan["imbalance"] < 1 for plan in plans)
    assert {size for record in records(folder) for size in record["plan"]["cp_sizes"]} == {"1"}


def test_a_resume_within_an_epoch_writes_the_same_bytes(gloo_pool, one_rank, tmp_path):
    flags = [*one_rank[1], *DYNAMIC]
    gloo_pool.run(train, 2, [*flags, "--save", str(tmp_path / "whole")])
    parts = [*flags, "--save", str(tmp_path / "parts")]
    gloo_pool.run(train, 2, [*parts, "--exit-interval", "3"])
    gloo_pool.run(train, 2, [*parts, "--load", str(tmp_path / "parts")])
    full, resumed = (records(tmp_path / name) for name in ("whole", "parts"))
    assert len(full) == 8 and json.dumps(full) == json.dumps(resumed)


def test_mock_lengths_are_logged_with_their_tail(gloo_pool, tmp_path):
    lengths = '{"type": "lognormal", "p50": 8, "p95": 60, "max_seq_len": 200}'
    flags = [*VARLEN, "--mock-data", "--varlen-mock-dataset-config-json", lengths, *DYNAMIC, "--eval-iters", "0"]
    gloo_pool.run(train, 2, [*flags, "--save", str(tmp_path), "--train-iters", "2", "--lr-warmup-iters", "0"])
    assert len(records(tmp_path)) == 2
