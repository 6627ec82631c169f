"""All ranks of a group make the same decision whether copy engines carry its messages."""

import socket

import pytest
import torch
import torch.distributed as dist

from megatron.core.groups.copy_engines import choice
from tests.test_utils.shared_window import SharedWindow


def decide(rank, size, trouble):
    """Over gloo, as if it were NCCL; ``trouble`` is rank 1's. What came of it, and what the log says."""
    printed = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend", lambda group=None: "nccl")
        patch.setattr(choice, "DEVICE", "cpu")
        patch.setattr(choice, "SymmetricWindow", SharedWindow)
        patch.setattr(choice, "notice", lambda logger, words, *values: printed.append(words % values))
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        patch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
        if rank == 1:
            trouble(patch)
        engines = choice.start_copy_engines("tp", dist.group.WORLD, range(size), rank)
        if engines is None:
            return None, printed
        return engines.all_gather(torch.tensor([float(rank)])).wait().tolist(), printed


def no_trouble(patch):
    pass


def one_queue(patch):
    patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def another_host(patch):
    patch.setattr(socket, "gethostname", lambda: "elsewhere")


def no_stream_operations(patch):
    class Refusing(SharedWindow):
        def current_queue(self):
            raise RuntimeError("CUDA error 801: the driver takes no such operation on a stream\nmore")

    patch.setattr(choice, "SymmetricWindow", Refusing)


def test_where_everything_works_messages_arrive(gloo_pool):
    assert gloo_pool.run(decide, 3, no_trouble) == [([0.0, 1.0, 2.0], [])] * 3


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [(one_queue, "CUDA_DEVICE_MAX_CONNECTIONS is 1"), (another_host, "several hosts"),
     (no_stream_operations, "CUDA error 801: the driver takes no such operation on a stream")],
)  # fmt: skip
def test_trouble_of_one_rank_sends_all_through_nccl(gloo_pool, trouble, reason):
    outcomes = gloo_pool.run(decide, 3, trouble)
    assert [engines for engines, _ in outcomes] == [None] * 3
    assert all(len(printed) == 1 and printed[0].startswith("tp: messages go through NCCL") for _, printed in outcomes)
    assert outcomes[1][1][0].endswith(reason)


def test_gloo_has_none(gloo_pool):
    assert gloo_pool.run(_over_gloo, 2) == [None, None]


def _over_gloo(rank, size):
    return choice.start_copy_engines("tp", dist.group.WORLD, range(size), rank)
