"""Full runs with Muon and Lion: the same bits on any number of data-parallel ranks that hold the state; checkpoints."""

import pytest

from tests.functional_tests.test_data_parallel_training import OVERLAPPED, SAME_ARITHMETIC, SHORT, digests, run
from tests.test_utils.gpt_runs import losses, train_with_errors

MUON = ["--optimizer", "muon", "--swiglu", "--muon-extra-scale-factor", "0.2", "--muon-fp32-matmul-prec", "high"]
ADAPTIVE = ["--optimizer", "adaptive_muon"]
LION = ["--optimizer", "lion"]
LAYOUTS = {  # the last --optimizer counts
    "one rank": (1, []),
    "sharded": (2, OVERLAPPED),
    "fsdp2": (2, ["--use-torch-fsdp2"]),
    "tp and sharded": (4, [*OVERLAPPED, "--tensor-model-parallel-size", "2", "--sequence-parallel"]),
    "pp and sharded": (4, [*OVERLAPPED, "--pipeline-model-parallel-size", "2"]),
    "experts": (2, [*OVERLAPPED, "--num-experts", "4", "--expert-model-parallel-size", "2"]),
    "adamuon, fsdp2": (2, [*ADAPTIVE, "--use-torch-fsdp2"]),
    "normuon, sharded": (2, [*ADAPTIVE, "--adaptive-muon-moment2-method", "normuon", "--bf16", *OVERLAPPED]),
    "lion, sharded": (2, [*LION, "--bf16", *OVERLAPPED]),
    "lion, fsdp2": (2, [*LION, "--use-torch-fsdp2"]),
    "lion for other parameters": (2, ["--muon-scalar-optimizer", "lion", *OVERLAPPED]),
}


def test_sharding_changes_no_bit(gloo_pool, dataset, tmp_path):
    """A matrix is computed from the same bits by one rank, or by each. No clipping, since the norm is a sum of parts;
    two ranks, so that a sum of gradients has one order. FSDP adds micro-batches in another order; the layout table
    covers it to rounding, and fp32."""
    expected = None
    for name, flags in {"plain": [], **SAME_ARITHMETIC}.items():
        folder = run(gloo_pool, 2, dataset, tmp_path / name, [*MUON, "--bf16", "--clip-grad", "0", *flags])
        result = digests(folder / "iter_0000004"), losses(folder)
        expected = expected or result
        assert result == expected, name


@pytest.mark.parametrize("name", LAYOUTS)
def test_resumed_runs_have_the_bits_of_uninterrupted_ones(gloo_pool, dataset, tmp_path, name):
    world_size, layout = LAYOUTS[name]
    flags = [*MUON, *layout]
    full = run(gloo_pool, world_size, dataset, tmp_path / "whole", flags)
    half = run(gloo_pool, world_size, dataset, tmp_path / "half", [*flags, "--exit-interval", "2"])
    rest = run(gloo_pool, world_size, dataset, tmp_path / "rest", [*flags, "--load", str(half)])
    assert digests(rest / "iter_0000004") == digests(full / "iter_0000004")


def resumed(pool, dataset, folder, save, *flags):
    argv = ["--data-path", str(dataset), "--split", "80,10,10", "--save", str(save), "--load", str(folder), *SHORT]
    return pool.run(train_with_errors, 1, [*argv, *flags], False)[0]


@pytest.mark.parametrize("first, second", [
    ("adam", "muon"), ("muon", "adam"), ("sgd", "muon"), ("adam", "lion"), ("muon", "adaptive_muon"),
    ("muon --muon-scalar-optimizer adam", "muon --muon-scalar-optimizer lion"),
])  # fmt: skip
def test_state_of_another_optimizer_is_rejected_with_the_fix(gloo_pool, dataset, tmp_path, first, second):
    flags = ["--optimizer", *second.split()]
    folder = run(gloo_pool, 1, dataset, tmp_path / "half", ["--optimizer", *first.split(), "--exit-interval", "2"])
    code, errors = resumed(gloo_pool, dataset, folder, tmp_path / "rest", *flags)
    expected = (
        f"holds optimizer state of --optimizer {first}, this run has --optimizer {second}: use {first}, or add "
        "--no-load-optim to continue from its weights with fresh optimizer state"
    )
    assert code != 0 and expected in errors, errors
    code, errors = resumed(gloo_pool, dataset, folder, tmp_path / "rest", *flags, "--no-load-optim")
    assert code == 0, errors


def test_gathered_fp8_weights_change_no_bit(gloo_pool, dataset, tmp_path):
    """Both declare something about the same buffers: a storage, and shards of full matrices."""
    flags = [*MUON, "--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "tensorwise", "--clip-grad", "0", *OVERLAPPED]
    plain, gathers = (
        run(gloo_pool, 2, dataset, tmp_path / name, [*flags, *more])
        for name, more in (("plain", []), ("gathers", ["--fp8-param-gather"]))
    )
    assert digests(gathers / "iter_0000004") == digests(plain / "iter_0000004")
