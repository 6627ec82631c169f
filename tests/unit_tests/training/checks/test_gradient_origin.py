"""A run that stops at a NaN or infinite gradient names the ranks that computed it, before the reduction."""

import re
from unittest import mock

import pytest
import torch

from megatron.training.checks.gradient_origin import RecentBatches
from megatron.training.observe.metrics import NonFiniteError
from tests.test_utils.gpt_runs import train_resolved
from tests.test_utils.layout_table import row
from tests.test_utils.layouts import VOCAB_SIZE, configure


def stopped_run(rank, world_size, folder, name, bad_rank, place, log_interval=100, passes=100):
    """Return the message of a run in which rank ``bad_rank`` makes gradients non-finite in the first ``passes`` passes
    of iteration 3, one element of the last MLP's output weight or with ``place`` "logits" all of them; and whether the
    weights are those after iteration 2."""
    from megatron.training.step import TrainStep
    from megatron.training.tasks.gpt import GPTTask
    from megatron.training.verify.layout_trace import with_synthetic_data

    class Spoiled(with_synthetic_data(GPTTask, VOCAB_SIZE)):
        remaining, chunk = passes, None

        def forward_step(self, data_iterator, model):
            self.chunk = model
            return super().forward_step(data_iterator, model)

        def loss_func(self, batch, output):
            if rank == bad_rank and self.remaining > 0 and 16 <= int(batch["sample_index"].max()) < 24:
                self.remaining -= 1
                if place == "logits":
                    output.register_hook(lambda grad: grad * float("inf"))
                else:
                    last = [p for name, p in self.chunk.module.named_parameters() if "linear_fc2.weight" in name][-1]
                    last.main_grad[1, 2] = float("nan")
            return super().loss_func(batch, output)

    weights = []

    def noting_step(steps):
        metrics = step(steps)
        steps.parts.model[0].finish_param_sync()  # the all-gather of the last update may still write
        weights.append([p.detach().clone() for p in steps.parts.model[0].parameters()])
        return metrics

    argv = [*row(name).argv, "--train-iters", "6", "--log-interval", str(log_interval), "--save", folder]
    cfg, step = configure(argv, world_size, "fp32"), TrainStep.run
    with mock.patch.object(TrainStep, "run", noting_step), pytest.raises(NonFiniteError) as error:
        train_resolved(cfg, lambda resolved, tokenizer: Spoiled(resolved))
    return str(error.value), all(map(torch.equal, weights[1], weights[-1]))


@pytest.mark.parametrize("name, log_interval", [
    ("dp2", 1), ("dp2", 100), ("dp2-overlap", 100), ("zero2-gather", 1), ("zero2-gather", 100), ("tp2", 100),
    ("tp2-sp", 1), ("cp2", 100), ("pp2", 1), ("pp2-vpp", 100),
])  # fmt: skip
def test_the_rank_and_parameter_of_a_nan_gradient_are_named(gloo_pool, tmp_path, name, log_interval):
    for message, unchanged in gloo_pool.run(stopped_run, 2, str(tmp_path), name, 1, "mlp", log_interval):
        assert "iteration 3 (samples from 16 on): the gradient norm is not finite though the loss is. " in message
        [(rank, number, parameter)] = re.findall(r"rank (\d+) \((\d+) parameters?, the last ([\w.]+)\)", message)
        assert rank == "1" and number == "1" and parameter.endswith("linear_fc2.weight")
        assert unchanged and "The weights have not been updated" in message


def test_all_parameters_after_the_nan_are_counted(gloo_pool, tmp_path):
    for message, _ in gloo_pool.run(stopped_run, 2, str(tmp_path), "dp2", 0, "logits"):
        [(rank, number)] = re.findall(r"rank (\d+) \((\d+) parameters", message)
        assert rank == "0" and int(number) > 10


def test_a_failure_that_does_not_repeat_is_described_so(gloo_pool, tmp_path):
    for message, _ in gloo_pool.run(stopped_run, 2, str(tmp_path), "dp2", 1, "mlp", 100, 1):
        assert "Run again, the iteration has finite gradients on every rank" in message
        assert "rank 0 (" not in message and "rank 1 (" not in message


@pytest.mark.parametrize("name, ranks", [("fsdp2", 2), ("fsdp4-instances", 4)])
def test_fully_sharded_data_parallelism_names_ranks_and_units(gloo_pool, tmp_path, name, ranks):
    for message, unchanged in gloo_pool.run(stopped_run, ranks, str(tmp_path), name, 1, "logits"):
        [(rank, number)] = re.findall(r"rank (\d+) \((\d+) FSDP units, the last decoder.layers.1[a-z.]*\)", message)
        assert rank == "1" and int(number) > 2 and unchanged


def test_gradients_of_experts_that_are_not_reduced_are_read(gloo_pool, tmp_path):
    """One rank holds an expert. The dispatcher brings infinite gradients to the experts of the other rank."""
    for message, _ in gloo_pool.run(stopped_run, 2, str(tmp_path), "fp8-wide-experts-delayed-ep2-fsdp2", 1, "logits"):
        assert set(re.findall(r"rank (\d+) \(\d+ FSDP units, the last [a-z.0-9]*experts", message)) == {"0", "1"}


def skipping_run(rank, world_size, folder, name, place):
    """Return the warnings of a run that skips the update of iteration 3, in which the loss ("loss") or the gradients
    ("logits") of rank 1 are not finite."""
    import logging

    from megatron.training.tasks.gpt import GPTTask
    from megatron.training.verify.layout_trace import with_synthetic_data

    class Spoiled(with_synthetic_data(GPTTask, VOCAB_SIZE)):
        def loss_func(self, batch, output):
            if rank == 1 and 16 <= int(batch["sample_index"].max()) < 24:
                if place == "logits":
                    output.register_hook(lambda grad: grad * float("inf"))
                else:
                    output = output * float("nan")
            return super().loss_func(batch, output)

    lines = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("megatron.training.checks.step_check")
    logger.addHandler(handler)
    argv = [*row(name).argv, "--train-iters", "4", "--save", folder, "--no-check-for-nan-in-loss-and-grad"]
    try:
        cfg = configure(argv, world_size, "fp32")
        train_resolved(cfg, lambda resolved, tokenizer: Spoiled(resolved))
    finally:
        logger.removeHandler(handler)
    return lines


@pytest.mark.parametrize("name", ["dp2", "fsdp2", "pp2"])
def test_ranks_of_a_skipped_update_are_named(gloo_pool, tmp_path, name):
    for (line,) in gloo_pool.run(skipping_run, 2, str(tmp_path), name, "loss"):
        expected = "iteration 3 (samples from 16 on): no update: losses are not finite on rank 1 (lm loss)"
        assert line == expected


def test_skipped_update_with_finite_losses_names_the_check(gloo_pool, tmp_path):
    for (line,) in gloo_pool.run(skipping_run, 2, str(tmp_path), "dp2", "logits"):
        assert "gradients are not finite though all losses are; without --no-check-for-nan-in-loss-and-grad" in line


def test_two_global_batches_are_saved_as_they_are_read():
    recent, shared = RecentBatches(), torch.arange(3).share_memory_()
    for iteration in (1, 2, 4):
        batches = [{"tokens": shared + iteration, "name": "text"}, {"tokens": shared}]
        assert list(recent.save(iteration, 8, torch.tensor([5.0]), batches)) == batches
    saved = recent.of_iteration(2)
    assert saved.size == 8 and [batch["tokens"].tolist() for batch in saved.batches] == [[2, 3, 4], [0, 1, 2]]
    assert saved.batches[0]["name"] == "text" and not saved.batches[1]["tokens"].is_shared()
    assert recent.of_iteration(4).iteration == 4
    with pytest.raises(ValueError, match="not enough values"):
        recent.of_iteration(1)
