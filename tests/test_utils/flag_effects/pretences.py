"""Simulated conditions around an observed run: each a context manager on a rank of the pool."""

import contextlib
import os
import signal
import sys
from unittest import mock

nothing = contextlib.nullcontext


@contextlib.contextmanager
def kernels():
    """Modules are built as on a GPU; on values in host memory their plain forms run."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("megatron.")]
    with contextlib.ExitStack() as stack:
        for module in modules:
            if hasattr(module, "kernels_serve"):
                stack.enter_context(mock.patch.object(module, "kernels_serve", lambda dtype, expected=True: expected))
        yield


@contextlib.contextmanager
def clock_of_half_minutes():
    """Every look at the clock that exits go by finds half a minute more."""
    from megatron.training.exits import conditions as exit_conditions

    class Clock:
        now = 0.0

        @classmethod
        def monotonic(cls):
            cls.now += 30.0
            return cls.now

    with mock.patch.object(exit_conditions, "time", Clock):
        yield


def sigterm():
    """SIGTERM arrives in the first iteration."""
    return _signalled(signal.SIGTERM)


def sigusr2():
    """SIGUSR2 arrives in the first iteration."""
    return _signalled(signal.SIGUSR2)


def sigterm_of_a_terminal():
    """SIGTERM arrives in the first iteration, and would end a process that does not handle it: then it stays away."""
    return _signalled(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def _signalled(number, before=signal.SIG_IGN):
    """Send the signal once; ``before`` is the handler if the run installs no handler."""
    from megatron.training.step import TrainStep

    correct, sent = TrainStep.run, []

    def step(self):
        if not sent and signal.getsignal(number) != signal.SIG_DFL:
            sent.append(number)
            os.kill(os.getpid(), number)
        return correct(self)

    signal.signal(number, before)
    with mock.patch.object(TrainStep, "run", step):
        yield


def full_disk():
    """No checkpoint can be written."""
    from megatron.core.dist_checkpointing.errors import CheckpointError
    from megatron.training.checkpoint import checkpointer as checkpointing

    return mock.patch.object(checkpointing.writer, "write", side_effect=CheckpointError("no space left on device"))
