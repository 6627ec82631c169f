"""Whole runs with every kind of data parallelism: the same numbers, and checkpoints that any of them continues."""

import hashlib

import pytest
import torch

from megatron.core.dist_checkpointing.reader import CheckpointReader
from tests.test_utils.gpt_runs import losses, read_records, train_with_errors, write_dataset

SHARDED = ["--use-distributed-optimizer"]
OVERLAPPED = [*SHARDED, "--overlap-grad-reduce", "--overlap-param-gather"]
SMALL = ["--ddp-bucket-size", "1500"]
SHORT = ["--train-iters", "6", "--lr-decay-iters", "8", "--attention-dropout", "0"]
BF16 = ["--bf16"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data") / "numbers")


def run(pool, world_size, dataset, save, flags, fp64=False):
    """Trains; returns the folder."""
    argv = ["--data-path", str(dataset), "--split", "80,10,10", "--save", str(save), *SHORT, *flags]
    for code, errors in pool.run(train_with_errors, world_size, argv, fp64):
        assert code == 0, errors
    return save


def tensors(checkpoint):
    """Name -> the whole tensor, and its counters; random states are of ranks and left out."""
    reader = CheckpointReader(checkpoint)
    return {name: reader.read(name) for name in reader.names if not name.startswith("rng.")}


def digests(checkpoint):
    """Name -> sha256 of every tensor."""
    return {
        name: hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in tensors(checkpoint).items()
    }


SAME_ARITHMETIC = {
    "plain, small buckets": SMALL,
    "plain, overlapped": [*SMALL, "--overlap-grad-reduce"],
    "sharded": SHARDED,
    "sharded, small buckets": [*SHARDED, *SMALL],
    "sharded, overlapped": [*OVERLAPPED, *SMALL],
    "sharded, three buckets": [*OVERLAPPED, "--ddp-num-buckets", "3", "--ddp-pad-buckets-for-high-nccl-busbw"],
}


FULLY_SHARDED = ["--use-torch-fsdp2"]
LAYOUTS = {
    "plain 2": (2, []),
    "sharded 2": (2, OVERLAPPED + SMALL),
    "sharded 4": (4, OVERLAPPED + SMALL),
    "two instances": (4, [*OVERLAPPED, *SMALL, "--num-distributed-optimizer-instances", "2"]),
    "fsdp2 2": (2, FULLY_SHARDED),
    "fsdp2 4": (4, [*FULLY_SHARDED, "--torch-fsdp2-no-reshard-after-forward"]),
    "hsdp": (4, [*FULLY_SHARDED, "--num-distributed-optimizer-instances", "2"]),
    "tp and sharded": (4, [*OVERLAPPED, *SMALL, "--tensor-model-parallel-size", "2", "--sequence-parallel"]),
    "tp and fsdp2": (4, [*FULLY_SHARDED, "--tensor-model-parallel-size", "2", "--sequence-parallel"]),
}
KINDS = {"adam": [], "sgd": ["--optimizer", "sgd", "--lr", "1e-1"]}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_every_layout_trains_like_one_rank(gloo_pool, dataset, tmp_path, kind, tied):
    """Losses, norms, zeros, weights and moments after 6 steps with clipping, dropout and masked tokens."""
    flags = [*KINDS[kind], "--eod-mask-loss", "--clip-grad", "0.5", "--log-params-norm"]
    flags += [] if tied else ["--untie-embeddings-and-output-weights", "--swiglu", "--normalization", "RMSNorm"]
    reference = run(gloo_pool, 1, dataset, tmp_path / "one", flags, fp64=True)
    expected, records = tensors(reference / "iter_0000006"), train_records(reference)
    for name, (world_size, layout) in LAYOUTS.items():
        if (kind, tied) != ("adam", True) and name not in ("sharded 4", "fsdp2 2", "tp and sharded"):
            continue
        folder = run(gloo_pool, world_size, dataset, tmp_path / name, [*flags, *layout], fp64=True)
        found = tensors(folder / "iter_0000006")
        assert found.keys() == expected.keys(), name
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, rtol=1e-9, atol=1e-11, msg=lambda m: f"{name} {key} {m}")
        for record, reference_record in zip(train_records(folder), records, strict=True):
            for field in ("lm loss", "grad_norm", "params_norm"):
                assert record[field] == pytest.approx(reference_record[field], rel=1e-9), (name, field)


def train_records(folder):
    return [record for record in read_records(folder / "metrics.jsonl") if record["kind"] == "train"]


@pytest.mark.parametrize("precision", [[], BF16], ids=["fp32", "bf16"])
def test_sharding_and_overlap_change_no_bit(gloo_pool, dataset, tmp_path, precision):
    """Two ranks, so that a sum has one order; no clipping, since the norm of pieces rounds differently."""
    expected = None
    for name, flags in {"plain": [], **SAME_ARITHMETIC}.items():
        folder = run(gloo_pool, 2, dataset, tmp_path / name, [*precision, "--clip-grad", "0", *flags])
        result = digests(folder / "iter_0000006"), losses(folder)
        expected = expected or result
        assert result == expected, name
