"""The pool of gloo ranks reports every rank of a task that fails."""

import pytest
import torch.distributed as dist

from tests.test_utils.gloo_pool import WorkerError


def gather_or_return(rank, world_size):
    if rank == 1:
        return 2, "error: --output scores.json: cannot be written" + " " * 5000
    raise RuntimeError(f"rank {rank} waits")


def count_ranks(rank, world_size):
    return dist.get_world_size()


def test_failure_reports_tracebacks_and_shortened_values_of_other_ranks(gloo_pool):
    with pytest.raises(WorkerError, match="(?s)rank 0:.*RuntimeError: rank 0 waits") as failure:
        gloo_pool.run(gather_or_return, 2)
    message = str(failure.value)
    assert "rank 1 returned (2, 'error: --output scores.json: cannot be written" in message and len(message) < 3000
    assert gloo_pool.run(count_ranks, 2) == [2, 2], "new workers serve the next task"
