"""The watchdog over NCCL: it ends the run, and says why, before NCCL's own time-outs of minutes do. Needs two GPUs.

Each rank is a fresh process of a real torchrun. Faults run one after the other: they share the GPUs, and a rank that is
killed must give its GPU back in time for the next test.
"""

import pytest

from tests.test_utils import failures
from tests.test_utils.failures import Fault

PROMISE = 60.0
NCCL_TIMEOUT = 600.0

PIPELINE = "--pipeline-model-parallel-size 2 --global-batch-size 4"
"""Stages wait in their streams for words that the other one writes, and not in kernels."""


def nccl(what, rank=1, layout=""):
    return Fault(what, rank, interpreter=True, device="cuda", timeout=10.0, layout=layout)


FAULTS = {
    nccl("raises"): "iteration 2, waiting for data: ZeroDivisionError",
    nccl("raises", 0): "iteration 2, waiting for data: ZeroDivisionError",
    nccl("is killed"): "its process",
    nccl("is killed", 0): "its process",
    nccl("segfaults"): "its process",
    nccl("leaves"): "its process",
    nccl("hangs in data loading"): "iteration 2, waiting for data: no progress for",
    nccl("hangs in a collective"): "no progress for",
    nccl("has a kernel that does not end"): "no progress for",
    nccl("hangs in evaluation"): "waiting for evaluation data: no progress for",
    nccl("holds the interpreter"): "is stopped, locked or out of reach",
    nccl("is stopped"): "is stopped, locked or out of reach",
    nccl("raises", layout=PIPELINE): "iteration 2, waiting for data: ZeroDivisionError",
    nccl("is killed", layout=PIPELINE): "its process",
    nccl("hangs in data loading", layout=PIPELINE): "iteration 2, waiting for data: no progress for",
}


@pytest.mark.gpu
@pytest.mark.gpus(2)
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_watchdog_ends_a_run_whose_peers_wait_on_the_gpu(tmp_path, fault):
    """The survivor's main thread waits for a kernel that waits for the failed rank: only os._exit gets past it."""
    run, other = failures.run(fault, tmp_path / "run"), 1 - fault.rank
    assert run.code != 0 and not run.left and run.seconds < PROMISE < NCCL_TIMEOUT, (run.code, run.left, run.seconds)
    first = run.first_word(other)
    assert first.startswith(f"watchdog: rank {fault.rank} failed first: ") and FAULTS[fault] in first, run.errors[other]
    assert first in run.stacks[f"rank-{other}"]


@pytest.mark.gpu
@pytest.mark.gpus(2)
@pytest.mark.slow
def test_the_gpus_of_a_failed_run_can_be_used_again_at_once(tmp_path):
    """Nothing of a run that was killed in a save keeps a GPU or the save folder: the same command resumes."""
    run = failures.run(nccl("is killed in the second save", 0), tmp_path / "run")
    assert run.code != 0 and not run.left, run.errors
    repeated = failures.run(Fault("nothing", "none", interpreter=True, device="cuda", timeout=10.0), run.folder)
    assert repeated.code == 0 and "successfully loaded checkpoint" in repeated.errors[0], repeated.output
