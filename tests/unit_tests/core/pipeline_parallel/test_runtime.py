"""The executor on one rank: deferred work, freed tensors, start of data-parallel reductions, rejected calls."""

import gc
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from megatron.core.config.model_parallel_config import ModelParallelConfig
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.pipeline_parallel.actions import Schedule
from megatron.core.pipeline_parallel.p2p import Messages, MessageShape
from megatron.core.pipeline_parallel.runtime import PipelineRun, Work, chunk_iterators
from megatron.core.pipeline_parallel.schedule_interleaved import interleaved
from megatron.core.pipeline_parallel.schedule_zero_bubble import zero_bubble
from megatron.core.sharding.placement import Ones
from megatron.core.tensor_parallel.layers import ColumnParallelLinear

WIDTH, BATCHES = 4, 3


class Chunk(nn.Module):
    """A linear layer and a scale; later chunks take their input from the chunk before. Records its no_sync()."""

    def __init__(self, first):
        super().__init__()
        config = ModelParallelConfig(params_dtype=torch.float64)
        built = {"config": config, "init_method": Ones(), "groups": SINGLE_PROCESS}
        self.linear = ColumnParallelLinear(WIDTH, WIDTH, bias=False, **built)
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.first, self.received, self.syncing = first, None, True
        self.seen = []
        for name, parameter in self.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.seen.append((name, self.syncing)))

    def set_input_tensor(self, tensor):
        self.received = tensor

    @contextmanager
    def no_sync(self):
        self.syncing = False
        yield
        self.syncing = True

    def forward(self, batch):
        x = (batch if self.first else self.received) * self.scale
        return torch.tanh(self.linear(x)[0] / WIDTH)


def batches():
    return list(torch.randn(BATCHES, 2, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))


def run(schedule: Schedule, chunks, outputs=None, shapes=((2, WIDTH),), kind=Messages, **options):
    def forward_step(iterator, chunk):
        output = chunk(next(iterator))
        if outputs is not None:
            outputs.append(weakref.ref(output))
        return output, lambda out: {"loss": (out.sum(), torch.tensor(out.numel()))}

    work = Work(forward_step, chunks, chunk_iterators(iter(batches()), len(chunks)))
    shape = MessageShape(shapes, torch.float64, torch.device("cpu"))
    return PipelineRun(schedule, 0, work, kind(schedule, SINGLE_PROCESS, shape), **options).run()


def gradients(chunks):
    return [parameter.grad for chunk in chunks for parameter in chunk.parameters()]


def expected():
    """Both chunks as one function, one backward."""
    chunks = [Chunk(True), Chunk(False)]
    for batch in batches():
        chunks[1].set_input_tensor(chunks[0](batch))
        chunks[1](None).sum().backward()
    return gradients(chunks)


@pytest.mark.parametrize("schedule", [interleaved(1, 2, BATCHES, 2), zero_bubble(1, BATCHES, 2)])
def test_chunks_of_one_rank_equal_one_function(schedule):
    chunks = [Chunk(True), Chunk(False)]
    results = run(schedule, chunks)
    torch.testing.assert_close(gradients(chunks), expected(), rtol=1e-13, atol=1e-13)
    assert [result.logged["loss"][1].item() for result in results] == [2 * WIDTH] * BATCHES


def test_split_backward_leaves_the_weight_gradient_for_later():
    """With one rank W follows B directly, so only the order within a micro-batch distinguishes them."""
    chunk = Chunk(True)
    run(zero_bubble(1, BATCHES), [chunk])
    assert [name for name, _ in chunk.seen] == ["scale", "linear.weight"] * BATCHES
    assert chunk.linear.weight_gradient_store is None  # nothing is deferred outside of a run


@pytest.mark.parametrize("split", [False, True])
def test_sums_may_start_with_the_last_micro_batch_of_each_chunk_only(split):
    chunks = [Chunk(True), Chunk(False)]
    run(zero_bubble(1, BATCHES, 2) if split else interleaved(1, 2, BATCHES, 2), chunks)
    for chunk in chunks:
        for name, _ in chunk.named_parameters():
            assert [syncing for item, syncing in chunk.seen if item == name] == [False] * (BATCHES - 1) + [True]


def test_outputs_are_let_go_before_their_backward():
    """Only the edge of the graph is kept: no output of an earlier micro-batch is alive when the next one is made."""
    outputs, chunks = [], [Chunk(True), Chunk(False)]
    alive = []

    class Counting(list):
        def append(self, reference):
            gc.collect()
            alive.append(sum(item() is not None for item in self))
            super().append(reference)

    outputs = Counting()
    run(interleaved(1, 2, BATCHES, BATCHES), chunks, outputs)
    assert max(alive) <= 1 and all(reference() is None for reference in outputs)
    assert chunks[1].received is None  # nor does a model keep its last input


def test_iterators_for_other_numbers_of_chunks_are_rejected():
    with pytest.raises(ValueError, match="3 data iterators for 2 model chunks"):
        chunk_iterators([iter(())] * 3, 2)


def test_one_iterator_is_read_once_for_all_chunks():
    batches = iter([1, 2])
    (single,) = chunk_iterators(batches, 1)
    assert single is batches and chunk_iterators(None, 2) == [None, None]
    assert [list(chunk_iterator) for chunk_iterator in chunk_iterators(batches, 2)] == [[1, 2]] * 2


def test_a_later_stage_needs_a_way_to_take_its_input():
    with pytest.raises(ValueError, match="Identity is a later pipeline stage: it needs set_input_tensor"):
        run(interleaved(1, 2, 1), [Chunk(True), nn.Identity()])


@pytest.mark.parametrize("options, ahead", [({}, 1), ({"lookahead": 0}, 0), ({"lookahead": 2}, 2)])
def test_receives_are_posted_so_many_actions_ahead(options, ahead):
    schedule, posted = interleaved(1, 2, BATCHES, 2), []

    class Noted(Messages):
        receiving = False

        def post(self, action):
            if not self.receiving:
                posted.append(action)
            super().post(action)

        def receive(self, action):
            self.receiving = True  # it posts what is missing
            result = super().receive(action)
            self.receiving = False
            return result

        def finish(self):
            posted.append("finish")

    run(schedule, [Chunk(True), Chunk(False)], kind=Noted, **options)
    (actions,) = schedule.actions
    soon = [soon for index in range(len(actions)) for soon in actions[index : index + 1 + ahead]]
    assert posted == [*soon, "finish"]


class TwoStreams(Chunk):
    """Passes a second tensor on unchanged, or uses it; the gradients of both are sent back."""

    def __init__(self, first, last=False):
        super().__init__(first)
        self.last = last

    def forward(self, batch):
        x, other = (batch, batch.flip(0) * self.scale) if self.first else self.received
        y = torch.tanh(self.linear(x)[0] / WIDTH)
        return y * other if self.last else (y, other)


@pytest.mark.parametrize("schedule", [interleaved(1, 3, BATCHES), zero_bubble(1, BATCHES, 3)])
def test_stages_may_pass_on_several_tensors(schedule):
    def chunks():
        return [TwoStreams(True), TwoStreams(False), TwoStreams(False, last=True)]

    full, parts = chunks(), chunks()
    for batch in batches():
        message = None
        for chunk in full:
            chunk.set_input_tensor(message)
            message = chunk(batch)
        message.sum().backward()
    shapes = ((2, WIDTH), (2, WIDTH))
    results = run(schedule, parts, shapes=shapes)
    assert len(results) == BATCHES
    for result, requested in zip(gradients(parts), gradients(full), strict=True):
        assert (result is None) == (requested is None)
        if requested is not None:
            torch.testing.assert_close(result, requested)


class Wrapped(nn.Module):
    """A chunk inside another module, as data-parallel wrappers have it."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, batch):
        return self.module(batch)


class OneStream(TwoStreams):
    """Does not use the second tensor."""

    def forward(self, batch):
        return torch.tanh(self.linear(self.received[0])[0])


def test_a_tensor_that_nothing_needs_sends_zeros_back():
    parts, full = ([TwoStreams(True), OneStream(False)] for _ in range(2))
    run(interleaved(1, 2, BATCHES, 2), [Wrapped(part) for part in parts], shapes=((2, WIDTH), (2, WIDTH)))
    for batch in batches():
        full[1].set_input_tensor(full[0](batch))
        full[1](None).sum().backward()
    torch.testing.assert_close(parts[0].linear.weight.grad, full[0].linear.weight.grad)
    assert parts[0].scale.grad.tolist() == [0] * WIDTH  # of the other tensor


def test_a_rank_takes_its_actions():
    schedule = zero_bubble(2, BATCHES)
    assert PipelineRun(schedule, 1, Work(print, [], []), None).actions is schedule.actions[1] != schedule.actions[0]


@pytest.mark.parametrize("schedule", [interleaved(1, 2, BATCHES, 2), zero_bubble(1, BATCHES, 2)])
def test_a_run_and_its_batches_are_freed_without_a_garbage_collection(schedule):
    """Also if the events of forward steps are reported, and the data outlives the run."""
    events, chunks = [], [Chunk(True), Chunk(False)]

    def forward_step(iterator, chunk):
        return chunk(next(iterator)), lambda out: {"loss": (out.sum(), torch.tensor(out.numel()))}

    def read():
        yield from batches()

    reader = read()
    work = Work(forward_step, chunks, chunk_iterators(reader, 2), on_forward=lambda *event: events.append(event))
    messages = Messages(schedule, SINGLE_PROCESS, MessageShape(((2, WIDTH),), torch.float64, torch.device("cpu")))
    gc.disable()
    try:
        pipeline_run = PipelineRun(schedule, 0, work, messages)
        pipeline_run.run()
        references = weakref.ref(pipeline_run), weakref.ref(work), weakref.ref(reader)
        del pipeline_run, work, reader, messages
        assert [reference() for reference in references] == [None] * 3
    finally:
        gc.enable()
    assert [event for event, _ in events].count("has batch") == 2 * BATCHES
