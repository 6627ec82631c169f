"""A rank that raises, dies, hangs, is stopped or never arrives ends the run: soon, with its name and reason first."""

import multiprocessing as mp
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from tests.test_utils.layouts import MODEL, VOCAB_SIZE

RANKS = 2
TIMEOUT = 5.0  # seconds of --watchdog-timeout-seconds in these tests


def faulty_task(fault, bad_rank):
    """A GPT task whose ``bad_rank`` goes wrong when it asks for its third batch."""
    import torch
    import torch.distributed as dist

    from megatron.training.layout_trace import with_synthetic_data
    from megatron.training.tasks.gpt import GPTTask

    faults = {
        "raises": lambda: 1 // 0,
        "dies": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "hangs in data loading": lambda: time.sleep(1000),
        "hangs in a collective": lambda: dist.recv(torch.zeros(4), src=0),
        "is stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    }

    class FaultyTask(with_synthetic_data(GPTTask, VOCAB_SIZE)):
        batches = 0

        def get_batch(self, data_iterator):
            self.batches += 1
            if self.batches == 3 and dist.get_rank() == bad_rank:
                faults[fault]()
            return super().get_batch(data_iterator)

    return FaultyTask


def one_rank(rank, world_size, port, fault, bad_rank, folder):
    """A rank of its own process: environment of a launcher, stderr to a file, the exit code of the program."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    error = os.open(f"{folder}/stderr-{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(error, 2)
    os.dup2(error, 1)
    sys.stderr = sys.__stderr__ = open(2, "w", closefd=False)  # noqa: SIM115
    from megatron.training.arguments import parse_args
    from megatron.training.program import run

    argv = [*MODEL, "--micro-batch-size", "2", "--watchdog-timeout-seconds", str(TIMEOUT), "--save", f"{folder}/save"]
    cfg = parse_args(argv, needs_data=False)
    make = faulty_task(fault, bad_rank)
    sys.exit(run(cfg, lambda resolved, tokenizer: make(resolved, None)))


EVERY_RANK = range(RANKS)


class Run:
    """What is left of a run: exit codes and what each rank wrote."""

    def __init__(self, folder, fault, bad_rank=1, ranks=EVERY_RANK):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = mp.get_context("forkserver")
        arguments = [(rank, RANKS, port, fault, bad_rank, str(folder)) for rank in ranks]
        processes = [context.Process(target=one_rank, args=each) for each in arguments]
        began = time.monotonic()
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
        self.seconds = time.monotonic() - began
        self.left = [process.pid for process in processes if process.is_alive()]
        for process in processes:
            process.kill()
        self.codes = {rank: process.exitcode for rank, process in zip(ranks, processes)}
        self.errors = {rank: (Path(folder) / f"stderr-{rank}").read_text() for rank in ranks}
        self.stacks = {path.stem: path.read_text() for path in (Path(folder) / "save" / "stacks").glob("*.txt")}


@pytest.mark.parametrize(
    ("fault", "bad_rank", "reason"),
    [
        ("raises", 1, "iteration 2, waiting for data: ZeroDivisionError"),
        ("raises", 0, "ZeroDivisionError"),
        ("dies", 1, "died"),
        ("dies", 0, "died"),
        ("hangs in data loading", 1, "iteration 2, waiting for data: no progress for"),
        ("hangs in a collective", 1, "no progress for"),
        ("is stopped", 1, ""),
    ],
)
def test_a_failing_rank_ends_the_run_and_is_named(tmp_path, fault, bad_rank, reason):
    run = Run(tmp_path, fault, bad_rank)
    other = 1 - bad_rank
    first = next(line for line in run.errors[other].splitlines() if line.startswith("watchdog:"))
    assert first.startswith(f"watchdog: rank {bad_rank} failed first: ") and reason in first, run.errors[other]
    assert not run.left and all(code != 0 for code in run.codes.values()), run.codes
    assert run.seconds < 30
    assert "train_step" in run.stacks[f"rank-{other}"] and first in run.stacks[f"rank-{other}"]
    if fault.startswith("hangs"):
        assert "get_batch" in run.stacks[f"rank-{bad_rank}"]


def test_a_rank_that_never_arrives_is_named(tmp_path):
    run = Run(tmp_path, "raises", ranks=[0])
    assert run.codes == {0: 1} and "1 of 2 ranks did not arrive within 5 s: 1." in run.errors[0]
    run = Run(tmp_path, "raises", ranks=[1])
    assert run.codes == {1: 1} and "rank 0 did not answer within 5 s" in run.errors[1]
