"""Whole runs in fp8: resuming changes no bit, precisions and layouts may change at a resume, losses follow bf16."""

import numpy as np
import pytest
import torch

from megatron.core.dist_checkpointing.reader import CheckpointReader
from tests.test_utils.gpt_runs import losses, read_records, train, train_with_errors

DELAYED = ["--fp8-format", "hybrid", "--fp8-amax-history-len", "4", "--fp8-amax-compute-algo", "max"]
RECIPES = {
    "delayed": DELAYED,
    "tensorwise": ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"],
    "blockwise": ["--fp8-format", "e4m3", "--fp8-recipe", "blockwise", "--hidden-size", "128", "--seq-length", "64",
                  "--ffn-hidden-size", "128", "--max-position-embeddings", "64"],
}  # fmt: skip
NO_DROPOUT = ["--hidden-dropout", "0", "--attention-dropout", "0"]


def argv(dataset, save, *flags):
    return ["--data-path", str(dataset), "--split", "80,10,10", "--save", str(save), "--save-interval", "4",
            "--log-interval", "1", *map(str, flags)]  # fmt: skip


def run(pool, dataset, save, *flags, ranks=1, fp64=False):
    assert pool.run(train, ranks, argv(dataset, save, *flags), fp64) == [0] * ranks
    return save


def contents(checkpoint):
    """All tensors of a checkpoint as bytes, and its counters."""
    reader = CheckpointReader(checkpoint)
    tensors = {name: reader.read(name).view(torch.uint8).numpy().tobytes() for name in reader.names}
    return tensors, {key: reader.objects[key] for key in ("train_state", "optimizer", "scheduler")}


ZERO, FULLY = ["--use-distributed-optimizer"], ["--use-torch-fsdp2"]


@pytest.mark.parametrize("recipe, ranks, more", [
    ("delayed", 1, []), ("delayed", 2, ZERO), ("delayed", 2, FULLY), ("tensorwise", 2, FULLY), ("blockwise", 2, ZERO),
])  # fmt: skip
def test_resuming_changes_no_bit(gloo_pool, dataset, tmp_path, recipe, ranks, more):
    """Histories of 4 steps continue in the middle; evaluations before and after change nothing."""
    flags = [*RECIPES[recipe], "--bf16", "--eval-interval", 3, *more]
    full_run = run(gloo_pool, dataset, tmp_path / "full", *flags, ranks=ranks)
    parts = tmp_path / "parts"
    for stop in (["--exit-interval", 4], []):
        run(gloo_pool, dataset, parts, *flags, "--load", parts, *stop, ranks=ranks)
    assert (full_run / "metrics.jsonl").read_bytes() == (parts / "metrics.jsonl").read_bytes()
    tensors, counters = contents(full_run / "iter_0000008")
    assert (tensors, counters) == contents(parts / "iter_0000008")
    scales = {name for name in tensors if name.startswith("fp8.")}
    assert len(scales) == (2 * 4 * 2 * 2 if recipe == "delayed" else 0)
    assert all(np.frombuffer(tensors[name], np.float32).all() for name in scales), "no empty entries after 8 steps"


WIDE_EXPERTS = [
    "--num-experts", "4", "--moe-ffn-hidden-size", "6144", "--moe-token-dispatcher-type", "alltoall",
]  # fmt: skip


def test_resuming_with_experts_changes_no_bit(gloo_pool, dataset, tmp_path):
    flags = [*DELAYED, *WIDE_EXPERTS, "--bf16", "--fp8-amax-history-len", 2, "--train-iters", 4]
    flags += ["--expert-model-parallel-size", 2]
    full_run = run(gloo_pool, dataset, tmp_path / "full", *flags, ranks=2)
    parts = tmp_path / "parts"
    for stop in (["--exit-interval", 2], []):
        run(gloo_pool, dataset, parts, *flags, "--load", parts, *stop, ranks=2)
    assert (full_run / "metrics.jsonl").read_bytes() == (parts / "metrics.jsonl").read_bytes()
    tensors, counters = contents(full_run / "iter_0000004")
    assert (tensors, counters) == contents(parts / "iter_0000004")
    scales = {name for name in tensors if name.startswith("fp8.") and ".experts." in name}
    assert len(scales) == 2 * 2 * 2 * 2
    assert all(np.frombuffer(tensors[name], np.float32).all() for name in scales), "no empty entries after 4 steps"


def test_losses_follow_bf16(gloo_pool, dataset, tmp_path):
    flags = ["--bf16", "--train-iters", 12, "--lr", "3e-3", *NO_DROPOUT, "--seq-length", 64]
    flags += ["--max-position-embeddings", 64]
    sizes = RECIPES["blockwise"][4:]
    plain = losses(run(gloo_pool, dataset, tmp_path / "bf16", *flags, *sizes))
    for recipe, fp8 in RECIPES.items():
        result = losses(run(gloo_pool, dataset, tmp_path / recipe, *flags, *fp8, *sizes))
        assert result != plain and plain[-1] < 0.9 * plain[0]
        np.testing.assert_allclose(result, plain, rtol=0.02, err_msg=recipe)


@pytest.fixture(scope="module")
def delayed(gloo_pool, dataset, tmp_path_factory):
    """Four iterations with delayed scales, in bf16."""
    return run(gloo_pool, dataset, tmp_path_factory.mktemp("runs") / "run", *DELAYED, "--bf16", "--exit-interval", 4)


def continued(pool, dataset, save, base, *flags):
    """Losses of a run that continues ``base``."""
    run(pool, dataset, save, "--load", base, "--bf16", *flags)
    return losses(save)


def test_a_bf16_checkpoint_continues_in_fp8(gloo_pool, dataset, tmp_path):
    """Delayed scales are calibrated by the first step: its loss equals the loss with tensorwise scales, to the bit."""
    base = run(gloo_pool, dataset, tmp_path / "base", "--bf16", "--exit-interval", 4)
    plain = continued(gloo_pool, dataset, tmp_path / "bf16", base)
    results = [
        continued(gloo_pool, dataset, tmp_path / recipe, base, *RECIPES[recipe]) for recipe in ("delayed", "tensorwise")
    ]
    assert results[0][0] == results[1][0] and results[0] != results[1]
    for result in results:
        assert len(result) == len(plain) == 4 and result != plain
        np.testing.assert_allclose(result, plain, rtol=0.02)


def test_an_fp8_checkpoint_continues_in_bf16_and_with_another_recipe(gloo_pool, dataset, tmp_path, delayed):
    same = continued(gloo_pool, dataset, tmp_path / "same", delayed, *DELAYED)
    for name, flags in (("bf16", []), ("tensorwise", RECIPES["tensorwise"])):
        result = continued(gloo_pool, dataset, tmp_path / name, delayed, *flags)
        assert result != same
        np.testing.assert_allclose(result, same, rtol=0.02)
    repeated = continued(gloo_pool, dataset, tmp_path / "again", delayed, *DELAYED, "--fp8-margin", 1)
    assert repeated[0] == same[0] != repeated[1], "a margin is seen at the next update of scales"


@pytest.mark.parametrize("flags, message", [
    (["--fp8-amax-history-len", "8"], "was trained with --fp8-amax-history-len 4, not 8: give its value"),
    (["--fp8-format", "e4m3"], "was trained with --fp8-format hybrid, not e4m3: give its value"),
])  # fmt: skip
def test_scales_of_another_kind_are_rejected(gloo_pool, dataset, tmp_path, delayed, flags, message):
    words = argv(dataset, tmp_path, *DELAYED, "--bf16", "--load", delayed, *flags)
    code, errors = gloo_pool.run(train_with_errors, 1, words)[0]
    assert code != 0 and message in errors
    continued(gloo_pool, dataset, tmp_path / "finetune", delayed, *DELAYED, *flags, "--finetune")


def test_an_evaluation_of_a_checkpoint_uses_its_scales(gloo_pool, dataset, tmp_path):
    folder = run(gloo_pool, dataset, tmp_path / "run", *DELAYED, "--train-iters", 4)
    run(gloo_pool, dataset, folder, *DELAYED, "--load", folder, "--skip-train", "--lr-decay-iters", 99)
    records = [record for record in read_records(folder / "metrics.jsonl") if record["kind"] == "valid"]
    assert len(records) == 2 and records[0]["lm loss"] == records[1]["lm loss"]


def test_another_layout_continues_a_checkpoint(gloo_pool, dataset, tmp_path):
    """In float64, so that other sums do not change the bytes: losses and stored scales equal one rank's."""
    flags = [*DELAYED, *NO_DROPOUT]
    full_run = run(gloo_pool, dataset, tmp_path / "full", *flags, fp64=True)
    parts = tmp_path / "parts"
    tensor = ["--tensor-model-parallel-size", 2, "--sequence-parallel", "--use-distributed-optimizer"]
    stages = ["--pipeline-model-parallel-size", 2, "--context-parallel-size", 2]
    run(gloo_pool, dataset, parts, *flags, *tensor, "--exit-interval", 4, ranks=4, fp64=True)
    run(gloo_pool, dataset, parts, *flags, *stages, "--load", parts, ranks=4, fp64=True)
    np.testing.assert_allclose(losses(parts), losses(full_run), rtol=1e-9)
    resumed, expected = (CheckpointReader(folder / "iter_0000008") for folder in (parts, full_run))
    names = {name for name in expected.names if name.startswith("fp8.")}
    assert names == {name for name in resumed.names if name.startswith("fp8.")} != set()
    for name in names:
        np.testing.assert_allclose(resumed.read(name).numpy(), expected.read(name).numpy(), rtol=1e-6, err_msg=name)


def test_key_and_value_heads_on_several_ranks_stay_near_one_rank(gloo_pool, dataset, tmp_path):
    """Their gradients are cast as partial sums, so that results differ by roundings of fp8."""
    flags = ["--group-query-attention", "--num-query-groups", 1, "--kv-channels", 16, *NO_DROPOUT, *RECIPES["delayed"],
             "--train-iters", 4, "--eval-iters", 0]  # fmt: skip
    one = run(gloo_pool, dataset, tmp_path / "one", *flags)
    four = run(gloo_pool, dataset, tmp_path / "four", *flags, "--tensor-model-parallel-size", 4, ranks=4)
    assert losses(four) != losses(one)
    np.testing.assert_allclose(losses(four), losses(one), rtol=0.01)


def test_a_checkpoint_with_scales_is_converted_without_them(gloo_pool, dataset, tmp_path):
    from megatron.tools.checkpoint import convert

    llama = ["--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear", "--position-embedding-type", "rope"]
    flags = [*llama, *NO_DROPOUT, *DELAYED, "--ffn-hidden-size", "64", "--train-iters", "4"]
    saved = run(gloo_pool, dataset, tmp_path / "run", *flags)
    for saver in ("hf", "megatron_torch_dist", "native"):
        assert convert.main(["--load-dir", str(saved), "--save-dir", str(tmp_path / saver), "--saver", saver]) == 0
    assert any(name.startswith("fp8.") for name in CheckpointReader(saved / "iter_0000004").names)
