"""Training with shared sequences gives the numbers of one rank: every form, packed documents, windows, dropout, with
tensor and sequence parallelism; and so does the whole program."""

import numpy as np
import pytest

from tests.test_utils.gpt_runs import read_records, train, write_dataset
from tests.test_utils.layouts import FEW_STEPS, Layout, Matrix

DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
PACKED = "--reset-position-ids --reset-attention-mask"
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --group-query-attention --num-query-groups 2"
    " --untie-embeddings-and-output-weights --attention-dropout 0"
)
CP2, CP4 = "--micro-batch-size 4 --context-parallel-size 2", "--micro-batch-size 4 --context-parallel-size 4"
TABLE = {
    "ring-4": (f"{DROPOUT} {PACKED}", CP4, 4),
    "all-gather-2-dp-2": (f"{LLAMA} --window-size 9,0", f"{CP2} --cp-comm-type allgather", 4),
    "all-to-all-2-tp-2-sp": (
        f"{DROPOUT} {PACKED}", f"{CP2} --cp-comm-type a2a --tensor-model-parallel-size 2 --sequence-parallel", 4,
    ),
    "two-levels": (
        f"{DROPOUT} {PACKED}", f"{CP4} --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2", 4,
    ),
    "one-form-per-layer": (f"{LLAMA} --hidden-dropout 0.1", f"{CP2} --cp-comm-type p2p a2a allgather p2p", 2),
    "ring-2-tp-2-sp": (f"{LLAMA} --hidden-dropout 0.1", f"{CP2} --tensor-model-parallel-size 2 --sequence-parallel", 4),
}  # fmt: skip


@pytest.fixture(scope="module")
def matrix(gloo_pool):
    matrix = Matrix(gloo_pool)
    yield matrix
    matrix.close()


@pytest.mark.parametrize("name", TABLE)
def test_losses_gradients_and_weights_equal_one_rank(matrix, name):
    verdict = matrix.verdict(Layout(*TABLE[name], steps=FEW_STEPS))
    assert verdict.equal, "\n".join(map(str, verdict.differences[:5]))


@pytest.mark.parametrize("form", ["p2p", "allgather"])
def test_the_program_logs_the_losses_of_one_rank(gloo_pool, tmp_path_factory, tmp_path, form):
    """Dropout, packed documents, evaluation, a checkpoint at the end and a resume of it on one rank."""
    dataset = write_dataset(tmp_path_factory.mktemp("data") / "numbers")
    flags = [*PACKED.split(), "--data-path", str(dataset), "--split", "60,30,10", "--eod-mask-loss"]
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
