"""All hooks of a rank, called through one object."""

import pytest

from megatron.training.hooks.base import Hook, Hooks
from megatron.training.train_state import TrainState


class Closing(Hook):
    closed = False

    def on_steps(self, steps):
        """Reads values, so that steps are kept for it."""

    def on_train_end(self, state):
        self.closed = True


def test_hooks_are_closed_although_the_last_values_cannot_be_read(monkeypatch):
    hook = Closing()
    hooks = Hooks(10, [hook])

    def unreadable():
        raise RuntimeError("device error")

    monkeypatch.setattr(hooks.interval, "unseen", unreadable)
    with pytest.raises(RuntimeError, match="device error"):
        hooks.on_train_end(TrainState())
    assert hook.closed
