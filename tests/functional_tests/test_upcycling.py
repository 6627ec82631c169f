"""Experts that start as copies, or slices, of a dense model's feed-forward networks (--moe-use-upcycling)."""

import pytest
import torch

from tests.functional_tests.test_data_parallel_training import run, tensors, train_records
from tests.test_utils.gpt_runs import read_records, train_with_errors

DENSE = "--swiglu --ffn-hidden-size 48 --position-embedding-type rope"
START = "--num-experts 4 --moe-use-upcycling --train-iters 3"
HALVES = "--moe-upcycling-granularity 2 --moe-ffn-hidden-size 24"
ALL = "--moe-token-dispatcher-type alltoall"
LAYOUTS = {
    "ep2": (2, f"--expert-model-parallel-size 2 {ALL}"),
    "etp2": (2, "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 2"),
    "tp2 ep2": (2, "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2"
                " --expert-tensor-parallel-size 1"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "fsdp": (2, "--use-torch-fsdp2"),
}  # fmt: skip


@pytest.fixture(scope="module")
def dense(gloo_pool, dataset, tmp_path_factory):
    """Eight iterations of a dense model, whose weights are saved."""
    return run(gloo_pool, 1, dataset, tmp_path_factory.mktemp("dense"), DENSE.split(), fp64=True)


@pytest.fixture(scope="module")
def again(gloo_pool, dataset, dense, tmp_path_factory):
    """The dense model trained on from its weights: the loss of its first iteration."""
    flags = f"{DENSE} --load {dense} --finetune --train-iters 3"
    return train_records(run(gloo_pool, 1, dataset, tmp_path_factory.mktemp("again"), flags.split(), fp64=True))


def upcycled(pool, dataset, dense, folder, flags, ranks=1):
    return run(pool, ranks, dataset, folder, f"{DENSE} {START} --load {dense} {flags}".split(), fp64=True)


@pytest.mark.parametrize(
    "flags",
    [
        "--moe-router-topk 2",
        "--moe-router-topk 1 --moe-router-score-function sqrtsoftplus --moe-router-topk-scaling-factor 2.5",
        f"--moe-router-topk 2 {HALVES} --moe-router-score-function sigmoid",
        f"--moe-router-topk 4 {HALVES} --num-experts 8",
        "--moe-router-topk 4 --moe-upcycling-granularity 4 --moe-ffn-hidden-size 12 --disable-bias-linear",
        "--moe-router-topk 2 --moe-layer-freq [0,1]",
    ],
    ids=str,
)
def test_the_first_loss_is_that_of_the_dense_model(gloo_pool, dataset, dense, again, tmp_path, flags):
    if "disable-bias" in flags:
        dense = run(gloo_pool, 1, dataset, tmp_path / "dense", [*DENSE.split(), "--disable-bias-linear"], fp64=True)
        again_flags = f"{DENSE} --disable-bias-linear --load {dense} --finetune --train-iters 3".split()
        again = train_records(run(gloo_pool, 1, dataset, tmp_path / "again", again_flags, fp64=True))
    if "topk 1" in flags:  # one weight of a sigmoid's kind depends on the logit, which a zero router makes constant
        flags += " --init-method-std 1e-12"
    folder = upcycled(gloo_pool, dataset, dense, tmp_path / "moe", flags)
    result = train_records(folder)
    assert result[0]["lm loss"] == pytest.approx(again[0]["lm loss"], rel=1e-9)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("slices", [1, 2])
def test_every_layout_starts_with_the_same_experts(gloo_pool, dataset, dense, tmp_path, layout, slices):
    flags = f"--moe-upcycling-granularity {slices} --moe-ffn-hidden-size {48 // slices} --exit-interval 1"  # of rate 0
    ranks, local = LAYOUTS[layout]
    expected = tensors(upcycled(gloo_pool, dataset, dense, tmp_path / "one", flags) / "iter_0000001")
    actual = tensors(upcycled(gloo_pool, dataset, dense, tmp_path / "moe", f"{flags} {local}", ranks) / "iter_0000001")
    weights = [name for name in expected if name.startswith("model.")]
    assert actual.keys() >= set(weights)
    for name in weights:
        torch.testing.assert_close(actual[name], expected[name], rtol=0, atol=0)
    router = expected["model.decoder.layers.0.mlp.router.weight"]
    assert router.std() > 0.01 and torch.equal(router[0], router[1]) is (slices == 2)


def test_a_started_model_is_an_ordinary_one_and_the_same_command_continues_it(gloo_pool, dataset, dense, tmp_path):
    """A job that is queued again finds its own checkpoint first."""
    flags = f"{DENSE} {START} --load {tmp_path / 'moe'} --pretrained-checkpoint {dense} --exit-interval 1".split()
    for iteration in (1, 2):
        folder = run(gloo_pool, 1, dataset, tmp_path / "moe", flags, fp64=True)
        assert (folder / "latest_checkpointed_iteration.txt").read_text().strip() == str(iteration)
    records = [item["iteration"] for item in read_records(folder / "metrics.jsonl") if item["kind"] == "train"]
    assert records == [1, 2]
    plain = f"{DENSE} --num-experts 4 --load {folder} --train-iters 3".split()
    assert train_records(run(gloo_pool, 1, dataset, tmp_path / "plain", plain, fp64=True))[0]["iteration"] == 3


def test_another_width_and_the_dense_folder_are_rejected(gloo_pool, dataset, dense, tmp_path):
    def told(flags, save):
        argv = f"--data-path {dataset} --split 9,1,0 {DENSE} {START} --load {dense} --save {save} {flags}"
        ((code, errors),) = gloo_pool.run(train_with_errors, 1, argv.split(), True)
        assert code == 2, errors
        return errors

    slices = "--moe-upcycling-granularity 2 --moe-ffn-hidden-size"
    assert "its feed-forward width 48 is not 2 (--moe-upcycling-granularity) x 20" in told(f"{slices} 20", tmp_path)
    assert "give --moe-ffn-hidden-size 24" in told(f"{slices} 20", tmp_path)
    assert "hidden_size is 64, the checkpoint has 32" in told("--hidden-size 64", tmp_path)
    assert "holds the dense model to start from; choose another folder" in told("", dense)
