"""Both conventions of loss functions, and gradients that accumulate over micro-batches."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from megatron.core.config.model_parallel_config import ModelParallelConfig
from megatron.core.groups.process_groups import SINGLE_PROCESS, Group
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from megatron.core.pipeline_parallel.results import split_loss


def run(model, batches, returned, **options):
    def forward_step(iterator, chunk):
        return chunk(next(iterator)), returned

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=len(batches),
        **options,
    )


def test_gradients_of_all_micro_batches_add_up():
    model = torch.nn.Linear(3, 1, bias=False)
    batches = [torch.randn(2, 3) for _ in range(4)]
    results = run(model, batches, lambda output: (output.sum(), torch.tensor(2), {"lm loss": (output.sum(), 2)}))
    expected = torch.cat(batches).sum(dim=0, keepdim=True)
    torch.testing.assert_close(model.weight.grad, expected)
    assert sum(result.num_tokens.item() for result in results) == 8
    assert results[0].logged["lm loss"].shape == (2,)


def test_callbacks_of_a_programs_own_configuration_are_called_around_backward():
    model, told = torch.nn.Linear(3, 1, bias=False), []
    model.config = ModelParallelConfig(grad_scale_func=lambda loss: 4 * loss)
    model.config.finalize_model_grads_func = lambda chunks, num_tokens: told.append((chunks, num_tokens.item()))
    batches = [torch.randn(2, 3) for _ in range(3)]
    returned = lambda output: (output.sum(), torch.tensor(2), {})  # noqa: E731
    run(model, batches, returned)
    torch.testing.assert_close(model.weight.grad, 4 * torch.cat(batches).sum(dim=0, keepdim=True))
    assert told == [([model], 6)]
    run(model, batches, returned, forward_only=True)
    assert len(told) == 1


def test_forward_only_leaves_no_gradient():
    model = torch.nn.Linear(3, 1)
    run(model, [torch.randn(2, 3)], lambda output: (output.sum(), torch.tensor(2), {}), forward_only=True)
    assert model.weight.grad is None


def test_a_model_and_an_iterator_may_stand_alone_or_in_lists():
    model, batches = torch.nn.Linear(3, 1, bias=False), [torch.randn(2, 3) for _ in range(3)]

    def forward_step(iterator, chunk):
        return chunk(next(iterator)), lambda output: (output.sum(), torch.tensor(2), {})

    for data, chunks in ((iter(batches), model), ([iter(batches)], (model,))):
        model.weight.grad = None
        call = {"data_iterator": data, "model": chunks, "num_microbatches": 2}
        get_forward_backward_func()(forward_step_func=forward_step, **call)
        torch.testing.assert_close(model.weight.grad, torch.cat(batches[:2]).sum(dim=0, keepdim=True))


def test_tokens_are_counted_exactly():
    model, told, counts = torch.nn.Linear(3, 1, bias=False), [], iter([2**24, 1])
    model.config = ModelParallelConfig(finalize_model_grads_func=lambda _, num_tokens: told.append(num_tokens.item()))
    run(model, [torch.randn(2, 3)] * 2, lambda output: (output.sum(), torch.tensor(next(counts)), {}))
    assert told == [2**24 + 1]


def test_other_data_than_losses_are_collected_without_a_backward_pass():
    model, batches = torch.nn.Linear(3, 1), [torch.randn(2, 3) for _ in range(2)]
    results = run(model, batches, lambda output, non_loss_data: (non_loss_data, output), collect_non_loss_data=True)
    assert [result.num_tokens.item() for result in results] == [0, 0] and model.weight.grad is None
    for result, batch in zip(results, batches, strict=True):
        assert result.non_loss[0] is True and torch.equal(result.non_loss[1], model(batch))


def test_only_ranks_of_a_pipeline_run_its_schedules(monkeypatch):
    for axis in ("dp", "pp"):
        groups = dataclasses.replace(SINGLE_PROCESS, **{axis: Group(axis, (0, 1), 0)})
        monkeypatch.setattr(schedules.parallel_state, "get_process_groups", lambda groups=groups: groups)
        assert (get_forward_backward_func() is schedules.forward_backward_pipelining) == (axis == "pp")


@pytest.mark.parametrize("options, kind", [
    ({}, "chosen"), ({"forward_only": True}, "forward"), ({"collect_non_loss_data": True}, "forward"),
])  # fmt: skip
def test_a_pipeline_runs_the_schedule_of_its_ranks_with_messages_of_its_rows(options, kind, monkeypatch):
    groups = dataclasses.replace(SINGLE_PROCESS, pp=Group("pp", (0, 1), 1), dp=Group("dp", (0, 1, 2), 2))
    monkeypatch.setattr(schedules.parallel_state, "get_process_groups", lambda: groups)
    monkeypatch.setattr(schedules.dist, "get_backend", lambda handle: "gloo")
    monkeypatch.setattr(schedules, "schedule_of", lambda config, *counts: ("chosen", counts))
    monkeypatch.setattr(schedules, "forward_only_schedule", lambda pp, number, size: ("forward", (pp, size, number)))
    monkeypatch.setattr(schedules, "Messages", lambda *given: given)
    monkeypatch.setattr(schedules, "PipelineRun", lambda *given, lookahead: (*given, lookahead))
    monkeypatch.setattr(schedules, "_run", lambda run: run)
    config = SimpleNamespace(sequence_parallel=False, hidden_size=5, pipeline_dtype=torch.half, overlap_p2p_comm=False)
    chunks = [SimpleNamespace(config=each) for each in (config, None)]
    given = {"forward_step_func": print, "data_iterator": iter([7]), "model": chunks, "num_microbatches": 6,
             "seq_length": 16, "micro_batch_size": 3, "loss_transform": abs, **options}  # fmt: skip
    schedule, rank, work, (same, its_groups, shape), lookahead = schedules.forward_backward_pipelining(**given)
    assert schedule == same == (kind, (2, 2, 6)) and (rank, lookahead) == (1, 0) and its_groups is groups
    assert [work.forward_step, work.chunks, work.loss_transform] == [print, chunks, abs]
    assert work.collect_non_loss_data == ("collect_non_loss_data" in options)
    assert [next(each) for each in work.iterators] == [7, 7] and shape.shapes == ((16, 3, 5),)
    rows = schedules.forward_backward_pipelining(**given, row_lengths=[8, 48])[3][2]
    assert rows.shapes == ((48, 1, 5),) and rows.lengths == (8, 48)


@pytest.mark.parametrize("backend, device", [("gloo", "cpu"), ("nccl", "cuda:3")])
@pytest.mark.parametrize("sequence_parallel, length", [(False, 32), (True, 8)])
def test_stages_pass_on_their_part_of_the_sequence_or_what_the_model_says(
    backend, device, sequence_parallel, length, monkeypatch
):
    axes = {name: Group(name, tuple(range(size)), 0) for name, size in (("cp", 2), ("tp", 4))}
    groups = dataclasses.replace(SINGLE_PROCESS, **axes)
    monkeypatch.setattr(schedules.dist, "get_backend", lambda handle: backend)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    config = SimpleNamespace(sequence_parallel=sequence_parallel, hidden_size=5, pipeline_dtype=torch.float16)
    shape = schedules.message_shape(SimpleNamespace(config=config), groups, (64, 40), 3)
    assert shape == (((length, 3, 5),), torch.float16, torch.device(device), *shape[3:])
    of_its_own = SimpleNamespace(config=config, message_shapes=lambda lengths, size: [(*lengths, size)])
    assert schedules.message_shape(of_its_own, groups, (64, 40), 3).shapes == ((64, 40, 3),)


def test_a_mean_loss_counts_once_per_micro_batch():
    loss, num_tokens, logged = split_loss((torch.tensor(2.0), {"lm loss": torch.tensor(2.0)}))
    assert loss == 2.0 and num_tokens == 1 and logged["lm loss"].tolist() == [2.0, 1.0]


def test_other_returns_are_refused():
    with pytest.raises(ValueError, match="loss_func returned 1 values"):
        split_loss((torch.tensor(1.0),))
