"""The whole program with context parallelism has the numbers of one rank; training steps: ``test_layouts.py``."""

import numpy as np
import pytest

from tests.test_utils.gpt_runs import read_records, train, write_dataset

PACKED = ["--reset-position-ids", "--reset-attention-mask"]


@pytest.mark.parametrize("form", ["p2p", "allgather"])
def test_the_program_logs_the_losses_of_one_rank(gloo_pool, tmp_path_factory, tmp_path, form):
    """Dropout, packed documents, evaluation, a checkpoint at the end and a resume of it on one rank."""
    dataset = write_dataset(tmp_path_factory.mktemp("data") / "numbers")
    flags = [*PACKED, "--data-path", str(dataset), "--split", "60,30,10", "--eod-mask-loss"]
    flags += ["--eval-interval", "2", "--full-validation"]  # sets that are no multiple of a batch
    gloo_pool.run(train, 1, [*flags, "--save", str(tmp_path / "one")])
    shared = [*flags, "--save", str(tmp_path / "two")]
    gloo_pool.run(train, 2, [*shared, "--context-parallel-size", "2", "--cp-comm-type", form, "--exit-interval", "4"])
    gloo_pool.run(train, 1, [*shared, "--load", str(tmp_path / "two")])
    one, two = (read_records(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    assert [item["kind"] for item in one].count("valid") >= 4 and one[-1]["kind"] == "test"
    assert [(item["kind"], item["iteration"]) for item in one] == [(item["kind"], item["iteration"]) for item in two]
    for first, second in zip(one, two):
        np.testing.assert_allclose(second["lm loss"], first["lm loss"], rtol=2e-5, err_msg=str(first))
