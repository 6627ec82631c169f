"""Choice of the schedule, messages of a pipeline, and both conventions of loss functions, as the trainer runs them."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from megatron.core.config.errors import UserError
from megatron.core.groups.process_groups import SINGLE_PROCESS, Group
from megatron.core.pipeline_parallel import microbatches
from megatron.core.pipeline_parallel.results import split_loss


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
    results = run(model, batches, lambda output: (output.sum(), torch.tensor(2), {"lm loss": (output.sum(), 2)}))
    expected = torch.cat(batches).sum(dim=0, keepdim=True)
    torch.testing.assert_close(model.weight.grad, expected)
    assert sum(result.num_tokens.item() for result in results) == 8
    assert results[0].logged["lm loss"].shape == (2,)


def test_forward_only_leaves_no_gradient():
    model = torch.nn.Linear(3, 1)
    run(model, [torch.randn(2, 3)], lambda output: (output.sum(), torch.tensor(2), {}), forward_only=True)
    assert model.weight.grad is None


def test_other_data_than_losses_are_collected_without_a_backward_pass():
    model, batches = torch.nn.Linear(3, 1), [torch.randn(2, 3) for _ in range(2)]
    results = run(model, batches, lambda output, non_loss_data: (non_loss_data, output), collect_non_loss_data=True)
    assert [result.num_tokens.item() for result in results] == [0, 0] and model.weight.grad is None
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
    monkeypatch.setattr(microbatches, "Messages", lambda *given: given)
    made = lambda *given, lookahead: SimpleNamespace(run=lambda: (*given, lookahead))  # noqa: E731
    monkeypatch.setattr(microbatches, "PipelineRun", made)
    config = SimpleNamespace(sequence_parallel=False, hidden_size=5, pipeline_dtype=torch.half, overlap_p2p_comm=False)
    chunks = [SimpleNamespace(config=each) for each in (config, None)]
    given = {"forward_step_func": print, "data_iterator": iter([7]), "model": chunks, "num_microbatches": 6,
             "seq_length": 16, "micro_batch_size": 3, "loss_transform": abs, **options}  # fmt: skip
    schedule, rank, work, (same, its_groups, shape, varies), lookahead = microbatches.run_pipeline(**given)
    assert varies is False
    assert schedule == same == (kind, (2, 2, 6)) and (rank, lookahead) == (1, 0) and its_groups is groups
    assert [work.forward_step, work.chunks, work.loss_transform] == [print, chunks, abs]
    assert work.collect_non_loss_data == ("collect_non_loss_data" in options)
    assert [next(each) for each in work.iterators] == [7, 7] and shape.shapes == ((16, 3, 5),)
    rows = microbatches.run_pipeline(**given, row_lengths=[8, 48])[3][2]
    assert rows.shapes == ((48, 1, 5),) and rows.lengths == (8, 48)


@pytest.mark.parametrize("backend, device", [("gloo", "cpu"), ("nccl", "cuda:3")])
@pytest.mark.parametrize("sequence_parallel, length", [(False, 32), (True, 8)])
def test_stages_pass_on_their_part_of_the_sequence_or_what_the_model_says(
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


def test_a_mean_loss_counts_once_per_micro_batch():
    loss, num_tokens, logged = split_loss((torch.tensor(2.0), {"lm loss": torch.tensor(2.0)}))
    assert loss == 2.0 and num_tokens == 1 and logged["lm loss"].tolist() == [2.0, 1.0]


LOSS, COUNT, VALUES = torch.tensor(1.0, requires_grad=True), torch.tensor(3), {"lm loss": torch.tensor(1.0)}
EITHER = r"return \(sum of token losses, number of tokens, dict\) or \(mean loss, dict\)"


@pytest.mark.parametrize(
    "returned, reason",
    [
        (LOSS, r"1 values \(tensor \[\]\)"),
        ((LOSS,), r"1 values \(tensor \[\]\)"),
        ((LOSS, COUNT), r"2 values \(tensor \[\], tensor \[\]\)"),
        ((LOSS, VALUES, COUNT), r"3 values \(tensor \[\], dict, tensor \[\]\)"),
        ((1.0, VALUES), r"2 values \(float, dict\)"),
        ((LOSS, COUNT.repeat(2), VALUES), r"3 values \(tensor \[\], tensor \[2\], dict\)"),
        ((LOSS, COUNT, COUNT, VALUES), "4 values"),
        ((LOSS.repeat(2), COUNT, VALUES), r"a loss of shape \[2\]"),
        ((LOSS.repeat(2), VALUES), r"a loss of shape \[2\]"),
    ],
)
def test_other_returns_of_a_loss_function_are_rejected(returned, reason):
    with pytest.raises(UserError, match=f"loss_func: returned {reason}.*{EITHER}"):
        split_loss(returned)


def test_counts_may_be_numbers_or_tensors_of_one_element():
    for count in (3, 3.0, COUNT, COUNT.view(1)):
        loss, num_tokens, _ = split_loss((LOSS, count, VALUES))
        assert loss is LOSS and num_tokens == 3 and num_tokens.shape == ()
    log_probs = torch.zeros(2, 4)  # without a backward pass the loss may be anything
    assert split_loss((log_probs, {}))[0] is log_probs


@pytest.mark.parametrize("first, other", [(2, 3), (3, 2)])
def test_a_loss_function_returns_equally_many_values_for_every_micro_batch(first, other):
    """A mean counts as one token: added to sums over tokens it would weigh almost nothing, or nearly everything."""
    model, returned = torch.nn.Linear(1, 1), {2: lambda loss: (loss, {}), 3: lambda loss: (loss, COUNT, {})}

    def forward_step(data_iterator, model):
        values = next(data_iterator)
        return model(torch.ones(1, 1)), lambda output: returned[values](output.sum())

    run = {"forward_step_func": forward_step, "model": model, "num_microbatches": 3}
    microbatches.run_without_pipeline(data_iterator=iter([first] * 3), **run)
    with pytest.raises(UserError, match=rf"loss_func: returned {other} values \(.*, and {first} for the first micro-"):
        microbatches.run_without_pipeline(data_iterator=iter([first, first, other]), **run)
