"""Whole runs with tensor parallelism: the losses, gradient norms and checkpoints of one rank."""

import warnings

import numpy as np
import pytest

from tests.test_utils.gpt_runs import losses, read_records, train

LAYOUTS = {
    "dp2-outermost": (4, ["--tensor-model-parallel-size", "2", "--use-tp-pp-dp-mapping"]),
    "tp4-shared-kv-heads": (4, ["--tensor-model-parallel-size", "4", "--sequence-parallel"]),
    "sp-dropped": (1, ["--sequence-parallel"]),
}
"""Layouts that the layout table lacks, or with evaluation."""
MODEL = [
    "--group-query-attention", "--num-query-groups", "2", "--swiglu", "--normalization", "RMSNorm", "--qk-layernorm",
]  # fmt: skip
FOUR_STEPS = ["--train-iters", "4", "--eval-interval", "2", "--log-interval", "1"]


def run(gloo_pool, dataset, folder, world_size, flags):
    argv = MODEL + ["--data-path", str(dataset), "--split", "80,10,10", "--save", str(folder)]
    assert gloo_pool.run(train, world_size, argv + [*FOUR_STEPS, *flags]) == [0] * world_size
    return folder


@pytest.fixture(scope="module")
def one_rank(gloo_pool, dataset, tmp_path_factory):
    return run(gloo_pool, dataset, tmp_path_factory.mktemp("runs") / "one", 1, [])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_full_run_has_the_losses_of_one_rank(gloo_pool, dataset, one_rank, tmp_path, layout):
    world_size, flags = LAYOUTS[layout]
    folder = run(gloo_pool, dataset, tmp_path / layout, world_size, flags)
    np.testing.assert_allclose(losses(folder), losses(one_rank), rtol=2e-5)
    records = [read_records(path / "metrics.jsonl") for path in (folder, one_rank)]
    for key in ("lm loss", "grad_norm"):
        mine, reference = ([record[key] for record in item if key in record] for item in records)
        assert len(mine) == len(reference) >= 4
        np.testing.assert_allclose(mine, reference, rtol=2e-4, err_msg=key)


def _train_without_warnings(rank, world_size, argv):
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        return train(rank, world_size, argv)


@pytest.mark.parametrize(
    "flags",
    [
        ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--use-distributed-optimizer"],
        ["--context-parallel-size", "2", "--cp-comm-type", "allgather", "--attention-dropout", "0"],
    ],
    ids=["tensor", "context"],
)
def test_no_name_is_used_that_torch_warns_of(gloo_pool, flags):
    argv = ["--mock-data", "--train-iters", "3", "--eval-iters", "0", *flags]
    assert gloo_pool.run(_train_without_warnings, 2, argv) == [0, 0]


def test_a_checkpoint_of_one_layout_continues_on_another(gloo_pool, dataset, one_rank, tmp_path):
    folder = tmp_path / "run"
    flags = ["--save-interval", "2", "--load", str(folder)]
    for world_size, more in ((4, [*LAYOUTS["tp4-shared-kv-heads"][1], "--exit-interval", "2"]), (1, [])):
        run(gloo_pool, dataset, folder, world_size, flags + more)
    np.testing.assert_allclose(losses(folder), losses(one_rank), rtol=2e-5)
