"""``pretrain_gpt.py`` with the fault FAULT on rank FAULT_RANK (tests/test_utils/failures.py)."""

import os
import signal
import sys
import time
from pathlib import Path

import pretrain_gpt

RANK = int(os.environ["RANK"])


def raise_an_error():
    raise ZeroDivisionError("a bug in somebody's code")


def find_bad_data():
    from megatron.core.config.errors import UserError

    raise UserError("--data-path x: document 7 is damaged; make it again")


def run_out_of_memory():
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has no memory left.")


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def leave():
    """Without an error, as far as the launcher can see."""
    os._exit(0)


def segfault():
    import ctypes

    ctypes.string_at(0)


def hang():
    time.sleep(1000)


def hang_in_collective():
    import torch
    import torch.distributed as dist

    from megatron.training.initialize import training_device

    dist.recv(torch.zeros(4, device=training_device()), src=1 - RANK)
    hang()  # NCCL returns at once


def occupy_the_gpu():
    """A kernel that does not end, and a wait for it."""
    import torch

    for _ in range(1000):
        torch.cuda._sleep(1 << 40)
    torch.cuda.synchronize()


def hold_the_interpreter():
    """A call into C that does not let other Python threads run."""
    import ctypes

    ctypes.PyDLL(None).sleep(1000)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def lose_the_network():
    os.system("ip link set cable down")
    time.sleep(1000)


def stand_still():
    """Stop every rank, as with Ctrl-Z, for longer than the watchdog waits, then continue: this is no fault."""
    if os.fork() == 0:
        time.sleep(float(os.environ["STANDSTILL"]))
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    stop()


def end_a_child():
    """A child process, as of a data loader, is ended: no fault."""
    import multiprocessing as mp

    child = mp.get_context("fork").Process(target=hang)
    child.start()
    time.sleep(0.5)  # a signal before the child has begun is lost
    child.terminate()
    child.join(20)
    assert child.exitcode == -signal.SIGTERM, child.exitcode


def note(event):
    """Writes down this process and the time."""
    Path(os.environ["FAULT_FOLDER"], f"{event}-{RANK}").write_text(f"{os.getpid()} {time.time()}")


FAULTS = {
    "raises": raise_an_error,
    "finds bad data": find_bad_data,
    "runs out of memory": run_out_of_memory,
    "runs out of memory in evaluation": run_out_of_memory,
    "computes NaN": lambda: None,
    "is killed": kill,
    "leaves": leave,
    "segfaults": segfault,
    "aborts": os.abort,
    "hangs in data loading": hang,
    "hangs in a collective": hang_in_collective,
    "has a kernel that does not end": occupy_the_gpu,
    "hangs in evaluation": hang,
    "hangs in a save": hang,
    "is killed in the second save": kill,
    "hangs in a background save": hang,
    "is killed in the second background save": kill,
    "hangs before the first iteration": hang,
    "holds the interpreter": hold_the_interpreter,
    "is stopped": stop,
    "loses the network": lose_the_network,
    "stands still": stand_still,
    "ends a child": end_a_child,
    "never arrives": hang,
}


def shorten_collectives(minutes):
    """--distributed-timeout-minutes, less than the flag can say."""
    from megatron.training import run as program

    validate = program.validate_args
    program.validate_args = lambda *args: validate(*args).with_settings(distributed_timeout_minutes=minutes)


def plant(fault, is_faulty):
    """Puts the fault into the third training batch, the second evaluation batch, a save, or the start. The code is the
    same on every rank, as ranks compare it; ``is_faulty``: whether this one goes wrong."""
    import torch

    from megatron.training.checkpoint.checkpointer import Checkpointer
    from megatron.training.tasks.gpt import GPTTask

    get_batch, save, loss_func = GPTTask.get_batch, Checkpointer.start_save, GPTTask.loss_func
    provider = GPTTask.train_valid_test_datasets_provider
    calls, saves = {True: 0, False: 0}, []
    moment = (False, 2) if fault.endswith("in evaluation") else (True, 3)

    def faulty_get_batch(self, data_iterator):
        training = torch.is_grad_enabled()
        calls[training] += 1
        if is_faulty and (training, calls[training]) == moment:
            go_wrong()
        return get_batch(self, data_iterator)

    def faulty_loss(self, batch, output):
        calls[True] += 1
        return loss_func(self, batch, output * float("nan") if is_faulty and calls[True] >= 3 else output)

    def faulty_save(self, state, **how):
        saves.append(state.iteration)
        if is_faulty and len(saves) == (2 if "second" in fault else 1):
            self.fault = lambda phase: go_wrong() if phase == "before_fsync" else None
        return save(self, state, **how)

    def faulty_provider(self, num_samples):
        if is_faulty:
            go_wrong()
        return provider(self, num_samples)

    def go_wrong():
        note("fault")
        FAULTS[fault]()

    if fault == "computes NaN":
        GPTTask.loss_func = faulty_loss
    elif fault.endswith("save"):
        Checkpointer.start_save = faulty_save
    elif fault == "hangs before the first iteration":
        GPTTask.train_valid_test_datasets_provider = faulty_provider
    else:
        GPTTask.get_batch = faulty_get_batch


if __name__ == "__main__":
    note("start")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as in a fresh interpreter; a forked one has torchrun's handler
    if minutes := os.environ.get("COLLECTIVE_MINUTES"):
        shorten_collectives(float(minutes))
    if fault := os.environ.get("FAULT"):
        is_faulty = os.environ.get("FAULT_RANK") in (str(RANK), "all")
        if fault == "never arrives" and is_faulty:
            hang()
        plant(fault, is_faulty)
    sys.exit(pretrain_gpt.main())
