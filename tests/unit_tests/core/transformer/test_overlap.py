"""Halves of a micro-batch alternate, and every collective overlaps with the other half's GEMMs."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.attention.token_layout import TokenLayout
from megatron.core.tensor_parallel import autograd_handle, gemms, linear
from megatron.core.transformer.context import NO_CONTEXT, ForwardContext
from megatron.core.transformer.overlap import alternate, drain
from tests.test_utils.training_steps import BATCH, LENGTH, VOCAB, build


def counted(name, number, order):
    for index in range(number):
        order.append(f"{name}{index}")
        yield
    return torch.tensor(number)


def test_two_computations_alternate_with_the_first_two_segments_ahead():
    order = []
    assert [int(result) for result in alternate(counted("a", 5, order), counted("b", 5, order))] == [5, 5]
    assert order == ["a0", "b0", "a1", "a2", "b1", "a3", "b2", "a4", "b3", "b4"]
    assert int(drain(counted("c", 3, order))) == 3 and order[10:] == ["c0", "c1", "c2"]


def test_forward_context_halves_split_the_attention_mask():
    assert NO_CONTEXT.can_be_halved and not ForwardContext(layout=TokenLayout(documents=object())).can_be_halved
    mask = torch.arange(4).view(4, 1, 1, 1)
    halves = ForwardContext(attention_mask=mask).halves(4)
    assert [half.attention_mask.flatten().tolist() for half in halves] == [[0, 1], [2, 3]]
    assert all(half.overlap for half in halves)


def test_collectives_leave_no_garbage_cycles():
    """Runs with --manual-gc would fill the memory with gathered inputs."""

    class Done:
        def __init__(self, x, group):
            self.result = x.clone()

        def wait(self):
            return self.result

    gc.disable()
    try:
        handle = autograd_handle.AutogradHandle(torch.ones(3, requires_grad=True), None, Done, Done)
        left = weakref.ref(handle)
        handle.wait().sum().backward()
        del handle
        assert left() is None
    finally:
        gc.enable()


class _Recorder:
    """Records events in order: s and e for start and end of a collective, * for a layer's GEMM."""

    def __init__(self):
        self.events = []

    def install(self, monkeypatch):
        def recorded(begin):
            def start(x, group):
                self.events.append("s")
                wait = begin(x, group).wait
                return SimpleNamespace(wait=lambda: (self.events.append("e"), wait())[1])

            return start

        def product(*args):
            self.events.append("*")
            return multiply(*args)

        def weight_gradient(*args):
            self.events.append("*")
            return gradient(*args)

        multiply, gradient = gemms.F.linear, linear._weight_gradient
        for name in ("begin_all_gather", "begin_reduce_scatter"):
            monkeypatch.setattr(autograd_handle, name, recorded(getattr(autograd_handle, name)))
        monkeypatch.setattr(gemms, "F", SimpleNamespace(linear=product))
        monkeypatch.setattr(linear, "_weight_gradient", weight_gradient)


def _events(rank, world_size):
    groups = parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    model = build(groups, sequence_parallel=True, tp_comm_overlap=True, attention_dropout=0.0, hidden_dropout=0.0)
    recorder = _Recorder()
    tokens = torch.randint(VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    with pytest.MonkeyPatch.context() as monkeypatch:
        recorder.install(monkeypatch)
        loss = model(tokens, torch.arange(LENGTH).expand(BATCH, -1), labels=tokens).sum()
        forward = "".join(recorder.events)
        recorder.events.clear()
        loss.backward()
    return forward, "".join(recorder.events)


def _odd(rank, world_size):
    groups = parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    model = build(groups, sequence_parallel=True, tp_comm_overlap=True, attention_dropout=0.0, hidden_dropout=0.0)
    tokens = torch.randint(VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    with pytest.MonkeyPatch.context() as monkeypatch:
        recorder = _Recorder()
        recorder.install(monkeypatch)
        model(tokens, torch.arange(LENGTH).expand(3, -1))
    return recorder.events.count("s")


def test_odd_micro_batches_are_not_halved(gloo_pool):
    assert gloo_pool.run(_odd, 2) == [0, 0]


def test_no_collective_is_waited_for_right_after_it_was_started(gloo_pool):
    """Except the first and last, which have no work to overlap with. Four per layer and half, in both directions."""
    for forward, backward in gloo_pool.run(_events, 2):
        layers, per_layer = 2, 4
        assert forward.count("s") == forward.count("e") == backward.count("s") == 2 * layers * per_layer
        assert forward.count("*") == backward.count("*") == 2 * layers * per_layer + 1  # and the output layer
        assert _waits_at_once(forward) <= 2 and _waits_at_once(backward) <= 2, (forward, backward)


def _waits_at_once(events):
    """Count the waits with only starts and waits since the start of their collective."""
    started, count = [], 0
    for position, event in enumerate(events):
        if event == "s":
            started.append(position)
        elif event == "e":  # one group's collectives end in the order in which they started
            begin = started.pop(0)
            count += "*" not in events[begin:position]
    return count
