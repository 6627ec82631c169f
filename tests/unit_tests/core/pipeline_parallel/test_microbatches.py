"""Choice of the schedule, messages of a pipeline, and weighted losses, as the trainer runs them."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from megatron.core.config.errors import UserError
from megatron.core.groups.process_groups import SINGLE_PROCESS, Group
from megatron.core.pipeline_parallel import microbatches
from megatron.core.pipeline_parallel.loss_weights import LossWeights


def run(model, batches, returned, **options):
    def forward_step(iterator, chunk):
        return chunk(next(iterator)), returned

    return microbatches.choose_runner()(
        forward_step_func=forward_step, data_iterator=iter(batches), model=[model], num_microbatches=len(batches),
        **options,
    )  # fmt: skip


def test_gradients_of_all_micro_batches_add_up():
    model = torch.nn.Linear(3, 1, bias=False)
    batches = [torch.randn(2, 3) for _ in range(4)]
    results = run(model, batches, lambda output: {"lm loss": (output.sum(), torch.tensor(2))})
    expected = torch.cat(batches).sum(dim=0, keepdim=True)
    torch.testing.assert_close(model.weight.grad, expected)
    assert sum(result.logged["lm loss"][1].item() for result in results) == 8
    assert results[0].logged["lm loss"].shape == (2,)


def test_losses_have_their_weights_and_others_are_logged_only():
    model, batches = torch.nn.Linear(3, 1, bias=False), [torch.randn(2, 3) for _ in range(2)]
    weights = LossWeights(("lm loss", "sop loss", "absent"), torch.device("cpu"))
    weights.set(torch.tensor([0.5, 2.0, 9.0]))
    losses = lambda output: {"sop loss": (output.sum(), 1), "lm loss": (output[0].sum(), 1), "z": (output.sum(), 2)}  # noqa: E731
    results = run(model, batches, losses, loss_weights=weights)
    expected = sum(2.0 * batch.sum(0, keepdim=True) + 0.5 * batch[:1] for batch in batches)
    torch.testing.assert_close(model.weight.grad, expected)
    assert list(results[0].logged) == ["sop loss", "lm loss", "z"]


@pytest.mark.parametrize("returned", [torch.ones(()), (torch.ones(()), {}), {"lm loss": torch.ones(3)}])
def test_losses_without_counts_are_rejected(returned):
    with pytest.raises(UserError, match="loss_func: returned .*; return {name: "):
        run(torch.nn.Linear(3, 1), [torch.randn(2, 3)], lambda output: returned)


def test_events_of_a_forward_step_are_reported():
    events = []
    passed = {"on_forward": lambda event, training: events.append((event, training))}
    for forward_only in (False, True):
        run(torch.nn.Linear(3, 1), [torch.randn(2, 3)] * 2, lambda output: {"loss": (output.sum(), 1)},
            forward_only=forward_only, **passed)  # fmt: skip
    once = ["reads", "has batch", "done"] * 2
    assert events == [(event, True) for event in once] + [(event, False) for event in once]


def test_forward_only_leaves_no_gradient():
    model = torch.nn.Linear(3, 1)
    run(model, [torch.randn(2, 3)], lambda output: {"lm loss": (output.sum(), torch.tensor(2))}, forward_only=True)
    assert model.weight.grad is None


def test_other_data_than_losses_are_collected_without_a_backward_pass():
    model, batches = torch.nn.Linear(3, 1), [torch.randn(2, 3) for _ in range(2)]
    results = run(model, batches, lambda output, non_loss_data: (non_loss_data, output), collect_non_loss_data=True)
    assert [result.logged for result in results] == [{}, {}] and model.weight.grad is None
    for result, batch in zip(results, batches, strict=True):
        assert result.non_loss[0] is True and torch.equal(result.non_loss[1], model(batch))


def test_only_ranks_of_a_pipeline_run_its_schedules(monkeypatch):
    for axis in ("dp", "pp"):
        groups = dataclasses.replace(SINGLE_PROCESS, **{axis: Group(axis, (0, 1), 0)})
        monkeypatch.setattr(microbatches.parallel_state, "get_process_groups", lambda groups=groups: groups)
        assert (microbatches.choose_runner() is microbatches.run_pipeline) == (axis == "pp")


@pytest.mark.parametrize("options, kind", [
    ({}, "chosen"), ({"forward_only": True}, "forward"), ({"collect_non_loss_data": True}, "forward"),
])  # fmt: skip
def test_a_pipeline_runs_the_schedule_of_its_ranks_with_messages_of_its_rows(options, kind, monkeypatch):
    groups = dataclasses.replace(SINGLE_PROCESS, pp=Group("pp", (0, 1), 1), dp=Group("dp", (0, 1, 2), 2))
    monkeypatch.setattr(microbatches.parallel_state, "get_process_groups", lambda: groups)
    monkeypatch.setattr(microbatches.dist, "get_backend", lambda handle: "gloo")
    monkeypatch.setattr(microbatches, "build_schedule", lambda config, *counts: ("chosen", counts))
    monkeypatch.setattr(microbatches, "forward_only_schedule", lambda pp, number, size: ("forward", (pp, size, number)))
    monkeypatch.setattr(microbatches, "Messages", lambda *passed: passed)
    built = lambda *passed, lookahead: SimpleNamespace(run=lambda: (*passed, lookahead))  # noqa: E731
    monkeypatch.setattr(microbatches, "PipelineRun", built)
    config = SimpleNamespace(sequence_parallel=False, hidden_size=5, pipeline_dtype=torch.half, overlap_p2p_comm=False)
    chunks = [SimpleNamespace(config=x) for x in (config, None)]
    passed = {"forward_step_func": print, "data_iterator": iter([7]), "model": chunks, "num_microbatches": 6,
             "seq_length": 16, "micro_batch_size": 3, "loss_weights": {}, **options}  # fmt: skip
    schedule, rank, work, (same, its_groups, shape, varies), lookahead = microbatches.run_pipeline(**passed)
    assert varies is False
    assert schedule == same == (kind, (2, 2, 6)) and (rank, lookahead) == (1, 0) and its_groups is groups
    assert [work.forward_step, work.chunks, work.loss_weights] == [print, chunks, {}]
    assert work.collect_non_loss_data == ("collect_non_loss_data" in options)
    assert [next(iterator) for iterator in work.iterators] == [7, 7] and shape.shapes == ((16, 3, 5),)
    rows = microbatches.run_pipeline(**passed, row_lengths=[8, 48])[3][2]
    assert rows.shapes == ((48, 1, 5),) and rows.lengths == (8, 48)


@pytest.mark.parametrize("backend, device", [("gloo", "cpu"), ("nccl", "cuda:3")])
@pytest.mark.parametrize("sequence_parallel, length", [(False, 32), (True, 8)])
def test_message_shape_is_the_local_sequence_or_set_by_the_model(
    backend, device, sequence_parallel, length, monkeypatch
):
    axes = {name: Group(name, tuple(range(size)), 0) for name, size in (("cp", 2), ("tp", 4))}
    groups = dataclasses.replace(SINGLE_PROCESS, **axes)
    monkeypatch.setattr(microbatches.dist, "get_backend", lambda handle: backend)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    config = SimpleNamespace(sequence_parallel=sequence_parallel, hidden_size=5, pipeline_dtype=torch.float16)
    shape = microbatches.message_shape(SimpleNamespace(config=config), groups, (64, 40), 3)
    assert shape == (((length, 3, 5),), torch.float16, torch.device(device), *shape[3:])
    of_its_own = SimpleNamespace(config=config, message_shapes=lambda lengths, size: [(*lengths, size)])
    assert microbatches.message_shape(of_its_own, groups, (64, 40), 3).shapes == ((64, 40, 3),)
