"""Complete runs of BERT and T5: a checkpoint continues on any layout, and on the same layout without a changed bit."""

import pytest

from tests.functional_tests.test_data_parallel_training import digests, tensors, train_records
from tests.test_utils.gpt_runs import read_records, train_with_errors

FLAGS = [
    "--mock-data", "--save-interval", "2", "--lr-decay-iters", "8", "--train-iters", "6", "--hidden-dropout", "0.1",
    "--log-interval", "1",
]  # fmt: skip
LAYOUTS = {
    "one": (1, ""),
    "tp2 sp zero": (
        4, "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --ddp-bucket-size 1500",
    ),
    "pp2 cp2": (4, "--pipeline-model-parallel-size 2 --context-parallel-size 2"),
    "fsdp": (2, "--use-torch-fsdp2"),
}  # fmt: skip
LOSSES = {"bert": ("lm loss", "sop loss"), "t5": ("lm loss",)}
OWN = {"bert": ["--attention-dropout", "0"], "t5": ["--decoder-num-layers", "1", "--decoder-seq-length", "16"]}


def run(pool, kind, name, save, flags, fp64=False):
    """Trains in a layout; returns the folder."""
    world_size, layout = LAYOUTS[name]
    argv = [*FLAGS, *OWN[kind], "--save", str(save), *layout.split(), *flags]
    for code, errors in pool.run(train_with_errors, world_size, argv, fp64, kind):
        assert code == 0, errors
    return save


def last_validation(folder):
    return [record for record in read_records(folder / "metrics.jsonl") if record["kind"] == "valid"][-1]


@pytest.mark.parametrize("kind", LOSSES)
def test_a_run_moves_between_layouts(gloo_pool, tmp_path, kind):
    full = run(gloo_pool, kind, "one", tmp_path / "whole", [], fp64=True)
    load, records = [], []
    for name in ("tp2 sp zero", "fsdp", "pp2 cp2"):
        rows = ["--use-packed-sequence"] if kind == "bert" and name == "pp2 cp2" else []
        folder = run(gloo_pool, kind, name, tmp_path / name, [*load, *rows, "--exit-interval", "2"], fp64=True)
        records += train_records(folder)
        load = ["--load", str(folder)]
    for record, train_record in zip(records, train_records(full), strict=True):
        for field in ("iteration", *LOSSES[kind], "grad_norm"):
            assert record[field] == pytest.approx(train_record[field], rel=1e-9), (record["iteration"], field)
    for name in LOSSES[kind]:
        assert last_validation(folder)[name] == pytest.approx(last_validation(full)[name], rel=1e-9)
    actual, train_record = tensors(folder / "iter_0000006"), tensors(full / "iter_0000006")
    assert actual.keys() == train_record.keys()
    for name, tensor in train_record.items():
        assert (actual[name] - tensor).abs().max() <= 1e-9 * tensor.abs().max() + 1e-11, name


@pytest.mark.parametrize("kind", LOSSES)
def test_resuming_on_the_same_layout_changes_no_bit(gloo_pool, tmp_path, kind):
    flags, name, parts = ["--bf16", "--check-replicas", "2", "--train-iters", "4"], "tp2 sp zero", tmp_path / "parts"
    one = run(gloo_pool, kind, name, tmp_path / "whole", flags)
    run(gloo_pool, kind, name, parts, [*flags, "--load", str(parts), "--exit-interval", "2"])
    run(gloo_pool, kind, name, parts, [*flags, "--load", str(parts)])
    assert digests(one / "iter_0000004") == digests(parts / "iter_0000004")
    assert [item["lm loss"] for item in train_records(one)] == [item["lm loss"] for item in train_records(parts)]
