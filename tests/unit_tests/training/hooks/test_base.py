"""All hooks of a rank, called through one object."""

import pytest

from megatron.training.hooks.base import Hook, Hooks
from megatron.training.observe.kinds.save import SAVE, SAVING
from megatron.training.observe.kinds.train import INTERVAL
from megatron.training.observe.records import RecordKind, kinds, register


class Closing(Hook):
    closed = False

    def on_record(self, kind, record):
        """Reads values, so that steps are kept for it."""

    def on_end(self):
        self.closed = True


def test_hooks_are_closed_although_the_last_values_cannot_be_read(monkeypatch):
    hook = Closing()
    hooks = Hooks(10, [hook])

    def unreadable():
        raise RuntimeError("device error")

    monkeypatch.setattr(hooks.interval, "unseen", unreadable)
    with pytest.raises(RuntimeError, match="device error"):
        hooks.on_end()
    assert hook.closed


class Noted(Hook):
    """Notes what it receives."""

    def __init__(self, *kinds):
        self.kinds, self.seen = kinds or None, []

    def on_record(self, kind, record):
        self.seen.append((record["kind"], record["iteration"]))


def test_records_come_in_the_order_of_events_and_hooks_get_their_kinds_only(simulated_run):
    everything, saves = Noted(), Noted(SAVE, SAVING)
    simulated_run(eval_interval=3, save_interval=4).train(Hooks(4, [everything, saves]), 1, 5)
    assert everything.seen == [
        ("start", 0), ("train", 1), ("interval", 1), ("train", 2), ("train", 3), ("valid", 3), ("train", 4),
        ("interval", 4), ("saving", 4), ("save", 4), ("train", 5),
    ]  # fmt: skip
    assert saves.seen == [("saving", 4), ("save", 4)]


def test_values_of_iterations_are_read_only_for_hooks_that_take_them(simulated_run, monkeypatch):
    """A hook on every rank that sees saves must not make every rank wait for the device."""
    read = []
    monkeypatch.setattr("megatron.training.hooks.interval.materialize", read.extend)
    simulated_run(eval_interval=2, save_interval=2).train(Hooks(1, [Noted(SAVING), Hook()]), 1, 4)
    assert read == []


def test_a_record_that_a_hook_emits_reaches_hooks_before_it_too(simulated_run, monkeypatch):
    pulse = RecordKind(name="pulse", fields={"beats": "count"}, file=None)
    monkeypatch.setitem(kinds(), "pulse", pulse)

    class Pulse(Hook):
        kinds = (INTERVAL,)

        def on_start(self, run):
            self.emit = run.emit

        def on_record(self, kind, record):
            self.emit(pulse, {"beats": record["iterations"]})

    before = Noted(pulse, INTERVAL)
    simulated_run().train(Hooks(2, [before, Pulse()]), 1, 4)
    assert before.seen == [(name, i) for i in (1, 2, 4) for name in ("interval", "pulse")]


def test_two_kinds_of_one_name_are_rejected():
    with pytest.raises(ValueError, match="record kind 'train': declared twice"):
        register(RecordKind(name="train", fields={}, file=None))
