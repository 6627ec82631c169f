"""Whole runs with every kind of data parallelism: the same numbers, and checkpoints that any of them continues."""

import hashlib

import pytest
import torch

from megatron.core.dist_checkpointing.reader import CheckpointReader
from tests.test_utils.gpt_runs import losses, read_records, train_with_errors

SHARDED = ["--use-distributed-optimizer"]
OVERLAPPED = [*SHARDED, "--overlap-grad-reduce", "--overlap-param-gather"]
SMALL = ["--ddp-bucket-size", "1500"]
SHORT = ["--train-iters", "4", "--lr-decay-iters", "6", "--attention-dropout", "0", "--eval-iters", "0"]
WITH_EVALUATION = ["--train-iters", "6", "--lr-decay-iters", "8", "--eval-iters", "2"]
BF16 = ["--bf16"]


def run(pool, world_size, dataset, save, flags, fp64=False):
    """Trains; returns the folder."""
    argv = ["--data-path", str(dataset), "--split", "80,10,10", "--save", str(save), *SHORT, *flags]
    for code, errors in pool.run(train_with_errors, world_size, argv, fp64):
        assert code == 0, errors
    return save


def tensors(checkpoint):
    """Return name -> full tensor, and the counters; without random states, which belong to ranks."""
    reader = CheckpointReader(checkpoint)
    return {name: reader.read(name) for name in reader.names if not name.startswith("rng.")}


def digests(checkpoint):
    """Name -> sha256 of every tensor."""
    return {
        name: hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in tensors(checkpoint).items()
    }


OFFLOADED = ["--optimizer-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d"]
SAME_ARITHMETIC = {
    "plain, small buckets": SMALL,
    "plain, overlapped": [*SMALL, "--overlap-grad-reduce"],
    "sharded": SHARDED,
    "sharded, small buckets": [*SHARDED, *SMALL],
    "sharded, overlapped": [*OVERLAPPED, *SMALL],
    "sharded, three buckets": [*OVERLAPPED, "--ddp-num-buckets", "3", "--ddp-pad-buckets-for-high-nccl-busbw"],
    "offloaded": OFFLOADED,
    "half offloaded, sharded": [*OVERLAPPED, *SMALL, "--optimizer-cpu-offload", "--optimizer-offload-fraction", "0.5"],
}


FULLY_SHARDED = ["--use-torch-fsdp2"]
KINDS = {
    "adam": [],
    "sgd": ["--optimizer", "sgd", "--lr", "1e-1"],
    "lion": ["--optimizer", "lion", "--disable-bias-linear"],
    "muon": ["--optimizer", "muon", "--muon-extra-scale-factor", "0.2"],
}


def train_records(folder):
    return [record for record in read_records(folder / "metrics.jsonl") if record["kind"] == "train"]


@pytest.mark.parametrize("precision", [[], BF16], ids=["fp32", "bf16"])
def test_sharding_and_overlap_change_no_bit(gloo_pool, dataset, tmp_path, precision):
    """Two ranks, so that a sum has one order; no clipping, since the norm of pieces rounds differently. In
    fp32, without main weights, every second layout."""
    expected = None
    for name, flags in list({"plain": [], **SAME_ARITHMETIC}.items())[:: 1 if precision else 2]:
        folder = run(gloo_pool, 2, dataset, tmp_path / name, [*precision, "--clip-grad", "0", *flags])
        result = digests(folder / "iter_0000004"), losses(folder)
        expected = expected or result
        assert result == expected, name


THREES = ["--micro-batch-size", "3"]  # 12 samples over 4 ranks; over 1, 2 and 3 in twos
KINDS_OF_STATE = {
    "plain": (2, []),
    "sharded": (3, [*OVERLAPPED, "--ddp-bucket-size", "700"]),
    "instances": (4, [*SHARDED, "--num-distributed-optimizer-instances", "2", *THREES]),
    "offloaded": (3, [*SHARDED, *OFFLOADED]),
    "fsdp2": (3, FULLY_SHARDED),
    "hsdp": (4, [*FULLY_SHARDED, "--num-distributed-optimizer-instances", "2", *THREES]),
    "tp": (4, [*SHARDED, *SMALL, "--tensor-model-parallel-size", "2"]),
}
TWELVE = ["--global-batch-size", "12", "--clip-grad", "0.5", "--eod-mask-loss", "--log-params-norm", "--log-interval",
          "1"]  # fmt: skip


def halves(pool, dataset, folder, writer, reader, flags, fp64):
    """Two iterations on one layout (once per writer), two on another; the checkpoint's tensors."""
    half, target = folder / "halves" / writer[0], folder / f"{writer[0]} to {reader[0]}"
    if not half.exists():
        run(pool, writer[1], dataset, half, [*flags, *writer[2], "--exit-interval", "2"], fp64)
    run(pool, reader[1], dataset, target, [*flags, *reader[2], "--load", str(half)], fp64)
    return target / "iter_0000004"


@pytest.mark.parametrize("kind", KINDS)
def test_any_layout_continues_any_other(gloo_pool, dataset, tmp_path, kind):
    """Half a run on one layout, the other half on another: losses, norms, weights and moments of a whole run."""
    flags = [*TWELVE, *KINDS[kind]]
    layouts = [(name, *layout) for name, layout in KINDS_OF_STATE.items()]
    full = run(gloo_pool, 1, dataset, tmp_path / "whole", flags, fp64=True)
    expected, records = tensors(full / "iter_0000004"), train_records(full)
    places = {"sgd": (1, 4), "lion": (3, 6), "muon": (0, 2, 4, 6)}.get(kind, range(len(layouts)))
    for place in places:  # other kinds of state than Adam's: half of the layouts
        writer = layouts[place]
        reader = layouts[(place + (1 if kind == "adam" else 3)) % len(layouts)]  # every layout writes and reads once
        checkpoint = halves(gloo_pool, dataset, tmp_path, writer, reader, flags, fp64=True)
        resumed, text = tensors(checkpoint), f"{writer[0]} to {reader[0]}"
        assert resumed.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.allclose(resumed[key], tensor, rtol=1e-9, atol=1e-11), (text, key)
        for record, whole in zip(train_records(checkpoint.parent), records[-2:], strict=True):
            for field in ("iteration", "lm loss", "grad_norm", "params_norm"):
                assert record[field] == pytest.approx(whole[field], rel=1e-9), (text, field)


@pytest.mark.parametrize("precision", ["--bf16", "--fp16"])
def test_changing_the_layout_changes_no_bit_of_half_precision(gloo_pool, dataset, tmp_path, precision):
    """fp32 main weights and moments survive exactly, and two ranks' sums of one micro-batch each have one order."""
    flags = ["--micro-batch-size", "4", "--clip-grad", "0", precision, "--initial-loss-scale", "1024"]
    flags += ["--no-gradient-accumulation-fusion"]  # fully_shard rounds weight gradients to half precision too
    layouts = [("plain", 2, []), ("sharded", 2, [*OVERLAPPED, *SMALL]), ("fsdp2", 2, FULLY_SHARDED)]
    expected = digests(run(gloo_pool, 2, dataset, tmp_path / "whole", flags) / "iter_0000004")
    for place, writer in enumerate(layouts):
        for distance in (0, 1) if precision == "--bf16" else (1,):
            reader = layouts[(place + distance) % 3]
            assert digests(halves(gloo_pool, dataset, tmp_path, writer, reader, flags, False)) == expected, writer[0]


def test_another_precision_is_rejected_with_the_fix(gloo_pool, dataset, tmp_path):
    run(gloo_pool, 2, dataset, tmp_path, ["--exit-interval", "2", *SHARDED])
    argv = ["--data-path", str(dataset), "--split", "80,10,10", *SHORT, "--bf16", "--load", str(tmp_path)]
    for code, errors in gloo_pool.run(train_with_errors, 2, argv):
        assert code != 0 and "--no-load-optim" in errors and "run in fp32, this run is in bf16: train in fp32" in errors
    assert gloo_pool.run(train_with_errors, 2, [*argv, "--no-load-optim"])[0] == (0, "")


RAMP = [
    *WITH_EVALUATION, "--global-batch-size", "24", "--rampup-batch-size", "12", "12", "36",
    "--eval-interval", "3", "--full-validation", "--check-replicas", "2",
]  # fmt: skip


@pytest.fixture(scope="module")
def one_rank_with_a_ramp(gloo_pool, dataset, tmp_path_factory):
    return run(gloo_pool, 1, dataset, tmp_path_factory.mktemp("one"), RAMP)


@pytest.mark.parametrize("name", ["offloaded", "instances", "hsdp"])
def test_resuming_on_the_same_layout_changes_no_bit(gloo_pool, dataset, one_rank_with_a_ramp, tmp_path, name):
    """A ramp of the batch size and evaluations whose last batch is ragged included; replicas are checked."""
    world_size, layout = KINDS_OF_STATE[name]
    flags = [*layout, *RAMP]
    full, parts = run(gloo_pool, world_size, dataset, tmp_path / "whole", flags), tmp_path / "parts"
    run(gloo_pool, world_size, dataset, parts, [*flags, "--load", str(parts), "--exit-interval", "3"])
    run(gloo_pool, world_size, dataset, parts, [*flags, "--load", str(parts)])
    assert (full / "metrics.jsonl").read_bytes() == (parts / "metrics.jsonl").read_bytes()
    assert digests(full / "iter_0000006") == digests(parts / "iter_0000006")
    sizes = [record["consumed_samples"] for record in train_records(full)]
    assert sizes == [12, 24, 36, 60, 84, 108]
    assert losses(one_rank_with_a_ramp) == pytest.approx(losses(full), rel=1e-5)
