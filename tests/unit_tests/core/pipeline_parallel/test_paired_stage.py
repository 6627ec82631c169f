"""A trained stage with the same stage of a frozen model, in schedules of several chunks on one rank."""

import pytest
import torch
from torch import nn

from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.pipeline_parallel.p2p import Messages, MessageShape
from megatron.core.pipeline_parallel.paired_stage import PairedStage, trained_chunk
from megatron.core.pipeline_parallel.runtime import PipelineRun, Work, chunk_iterators
from megatron.core.pipeline_parallel.schedule_interleaved import interleaved
from megatron.core.pipeline_parallel.schedule_zero_bubble import zero_bubble

BATCHES, WIDTH, FROZEN_WIDTH = 4, 3, 2


class Stage(nn.Module):
    """tanh(x W), from a batch on the first stage; scaled by its argument."""

    def __init__(self, seed, width, first):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        shape = (WIDTH if first else width, width)
        self.weight = nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
        self.first, self.width, self.received = first, width, None

    def set_input_tensor(self, tensor):
        self.received = tensor

    def message_shapes(self, lengths, micro_batch_size):
        return [(2, self.width)]

    def forward(self, batch, factor=1.0):
        return factor * ((batch if self.first else self.received) @ self.weight).tanh()


def models(num_chunks=3):
    """Chunks of the trained and the frozen model."""
    widths = (WIDTH, FROZEN_WIDTH)
    return [[Stage(10 * width + index, width, index == 0) for index in range(num_chunks)] for width in widths]


def paired(trained, frozen):
    last = len(trained) - 1
    return [
        PairedStage(chunk, {"frozen": other}, SINGLE_PROCESS, is_last=index == last)
        for index, (chunk, other) in enumerate(zip(trained, frozen))
    ]


def batches():
    return list(torch.randn(BATCHES, 2, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))


def loss(trained, frozen):
    return {"loss": ((trained.sum(1) * frozen.exp().sum(1)).sum(), torch.tensor(2))}


@pytest.mark.parametrize("schedule", [interleaved(1, 3, BATCHES), zero_bubble(1, BATCHES, 3)])
def test_outputs_of_both_models_reach_the_loss_and_only_one_gets_gradients(schedule):
    trained, frozen = models()
    chunks, shapes = paired(trained, frozen), ((2, WIDTH), (2, FROZEN_WIDTH))
    assert chunks[0].num_frozen_tensors == 1 and chunks[0].message_shapes((2, None), 1) == list(shapes)
    frozen_outputs = []

    def loss_func(output):
        frozen_outputs.append(output.frozen["frozen"])
        return loss(output.trained, output.frozen["frozen"])

    def forward_step(iterator, chunk):
        batch = next(iterator)
        return chunk(batch, frozen_arguments={"frozen": {"batch": batch, "factor": 2.0}}), loss_func

    shape = MessageShape(shapes, torch.float64, torch.device("cpu"), num_frozen=1)
    work = Work(forward_step, chunks, chunk_iterators(iter(batches()), len(chunks)))
    results = PipelineRun(schedule, 0, work, Messages(schedule, SINGLE_PROCESS, shape)).run()

    expected_trained, expected_frozen = models()
    for batch, result in zip(batches(), results, strict=True):
        outputs = []
        for chain, factor in ((expected_trained, 1.0), (expected_frozen, 2.0)):
            x = batch
            for stage in chain:
                x = factor * (x @ stage.weight).tanh()
            outputs.append(x)
        value, _ = loss(outputs[0], outputs[1].detach())["loss"]
        value.backward()
        torch.testing.assert_close(result.logged["loss"][0], value.detach())
    for stage, expected in zip(trained, expected_trained):
        torch.testing.assert_close(stage.weight.grad, expected.weight.grad)
    assert all(stage.weight.grad is None for stage in frozen)
    assert not any(output.requires_grad for output in frozen_outputs)
    assert all(stage.received is None for stage in (*trained, *frozen))  # inputs are released


def test_only_the_trained_chunk_is_part_of_the_module():
    (trained,), (frozen,) = models(1)
    (chunk,) = paired([trained], [frozen.eval()])
    assert [parameter is trained.weight for parameter in chunk.parameters()] == [True]
    chunk.eval()
    chunk.train()
    assert trained.training and not frozen.training
    assert trained_chunk(chunk) is trained and trained_chunk(frozen) is frozen


class TwoStreams(Stage):
    """Sends two tensors, as encoder-decoder models do."""

    def message_shapes(self, lengths, micro_batch_size):
        return [(2, self.width)] * 2

    def forward(self, batch):
        return self.received[0] + 1, self.received[1] + 2


def test_a_message_is_split_by_the_number_of_tensors_of_each_model():
    frozen = {"first": Stage(1, WIDTH, first=False), "second": TwoStreams(2, WIDTH, first=False)}
    chunk = PairedStage(TwoStreams(0, WIDTH, first=False), frozen, SINGLE_PROCESS, is_last=False)
    message = tuple(torch.full((2, WIDTH), float(index), dtype=torch.float64) for index in range(5))
    chunk.set_input_tensor(message)
    output = chunk(batch=None)
    assert chunk.num_frozen_tensors == 3
    assert [int(tensor[0, 0]) for tensor in output[:2] + output[3:]] == [1, 3, 4, 6]
    torch.testing.assert_close(output[2], (message[2] @ frozen["first"].weight).tanh())
