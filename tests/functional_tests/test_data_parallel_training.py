"""Whole runs with every kind of data parallelism: the same numbers, and checkpoints that any of them continues."""

import hashlib

import pytest
import torch

from megatron.core.dist_checkpointing.reader import CheckpointReader
from tests.test_utils.gpt_runs import losses, train_with_errors, write_dataset

SHARDED = ["--use-distributed-optimizer"]
OVERLAPPED = [*SHARDED, "--overlap-grad-reduce", "--overlap-param-gather"]
SMALL = ["--ddp-bucket-size", "1500"]
SHORT = ["--train-iters", "6", "--lr-decay-iters", "8", "--attention-dropout", "0"]
BF16 = ["--bf16"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data") / "numbers")


def run(pool, world_size, dataset, save, flags):
    """Trains; returns the folder."""
    argv = ["--data-path", str(dataset), "--split", "80,10,10", "--save", str(save), *SHORT, *flags]
    for code, errors in pool.run(train_with_errors, world_size, argv):
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


@pytest.mark.parametrize("precision", [[], BF16], ids=["fp32", "bf16"])
def test_sharding_and_overlap_change_no_bit(gloo_pool, dataset, tmp_path, precision):
    """Two ranks, so that a sum has one order; no clipping, since the norm of pieces rounds differently."""
    expected = None
    for name, flags in {"plain": [], **SAME_ARITHMETIC}.items():
        folder = run(gloo_pool, 2, dataset, tmp_path / name, [*precision, "--clip-grad", "0", *flags])
        result = digests(folder / "iter_0000006"), losses(folder)
        expected = expected or result
        assert result == expected, name
