"""The counters of a run after one iteration."""

from types import SimpleNamespace

import pytest
import torch

from megatron.core.groups.process_groups import SINGLE_PROCESS, Group
from megatron.core.schedules.batch_size import running_global_batch_size
from megatron.training import trainer as trainer_module
from megatron.training.checkpoint.checkpointer import SaveReport
from megatron.training.checks.step_check import ImmediateCheck
from megatron.training.config.flat import FlatConfig
from megatron.training.config.pretrain_config import compose
from megatron.training.data.loader import BatchReader, Shard, TrainSampler, sequential
from megatron.training.observe.kinds.evaluation import EvalResult
from megatron.training.observe.kinds.sample import SAMPLE
from megatron.training.observe.metrics import StepMetrics
from megatron.training.step import TrainStep
from megatron.training.tasks.base import Task
from megatron.training.train_state import TrainState
from megatron.training.trainer import Trainer


@pytest.mark.parametrize(
    "losses, skipped, count",
    [({"lm loss": 1.0}, False, 0), ({"lm loss": 1.0}, True, 1), ({}, True, 0)],  # the last: --iterations-to-skip
)
def test_only_rejected_updates_count_as_skipped_iterations(losses, skipped, count):
    step = TrainStep.__new__(TrainStep)
    step.state, step.flops_per_sample = TrainState(), 3.0
    metrics = StepMetrics(losses=losses, num_tokens=8, learning_rate=0.0, global_batch_size=4, skipped=skipped)
    step._count(4, metrics)
    assert step.state == TrainState(
        iteration=1, consumed_train_samples=4, skipped_iterations=count, floating_point_operations=12.0
    )


def len_of(batch):
    return [len(batch)]


def samples_of(rank, ranks, cfg, iterations):
    """Stream positions that data-parallel rank ``rank`` of ``ranks`` trains on, by iteration; and the counters."""
    step, selected, moments = TrainStep.__new__(TrainStep), {}, []
    step.cfg, step.state, step.flops_per_sample = cfg, TrainState(), None
    shard = Shard(cfg.training.micro_batch_size, rank, ranks)
    sampler = TrainSampler(
        shard, lambda consumed: running_global_batch_size(cfg.flat, consumed, ranks), sequential, 0, 10**6
    )
    group = {"lr": 0.1, "is_decoupled_lr": False}
    step.parts = SimpleNamespace(
        groups=SimpleNamespace(dp=Group("dp", tuple(range(ranks)), rank), tp=SINGLE_PROCESS.tp),
        task=Task(cfg), on_forward=None, reader=BatchReader(iter(sampler), len_of, reads_ahead=True),
        optimizer=SimpleNamespace(param_groups=[group], get_loss_scale=lambda: 1.0, weight_edits=[]),
        scheduler=SimpleNamespace(set_samples=moments.append),
        num_samples=None,
    )  # fmt: skip

    def prepare(size):
        batches, counts = step._read(size)
        batches = list(batches)
        assert counts.tolist() == [size // ranks]
        selected[step.state.iteration + 1] = [position for batch in batches for position, _ in batch]
        return {}, counts

    step.timers = step.parts.task.timers
    step._prepare, step.forward_backward, step.device = prepare, lambda: [], torch.device("cpu")
    step.mark = lambda: 0.0
    step._update = lambda size, local, counts, forward: StepMetrics(
        losses={"lm loss": 1.0}, num_tokens=1, learning_rate=0.0, global_batch_size=size
    )
    metrics = [step.run() for _ in range(iterations)]
    assert [metric.skipped for metric in metrics] == [
        number in cfg.training.iterations_to_skip for number in range(1, iterations + 1)
    ]
    return selected, step.state, moments


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("rampup", [None, [8, 8, 20]], ids=["constant", "ramp"])
def test_skipped_iterations_consume_one_batch_of_samples(ranks, rampup):
    """On any number of ranks, the other iterations have the batches of a run without skips."""
    settings = FlatConfig(
        micro_batch_size=2, global_batch_size=24, rampup_batch_size=rampup, step_batch_size_schedule=None,
        decrease_batch_size_if_needed=False, seq_length=4, data_parallel_size=ranks, iterations_to_skip=[],
        train_iters=7, timing_log_level=0, timing_log_option="max", barrier_with_L1_time=False,
        weight_decay_incr_style="constant",
    )  # fmt: skip
    all_of_them, full, all_moments = samples_of(0, 1, compose(settings), 7)
    cfg = compose(settings).with_settings(iterations_to_skip=[1, 3, 4, 7])
    results = [samples_of(rank, ranks, cfg, 7) for rank in range(ranks)]
    for number in (2, 5, 6):
        result = sorted(position for selected, *_ in results for position in selected[number])
        assert result == sorted(all_of_them[number]), f"samples of iteration {number}"
    skipped = sum(len(all_of_them[number]) for number in cfg.training.iterations_to_skip)
    for selected, state, moments in results:
        assert selected.keys() == {2, 5, 6} and moments == all_moments, "the schedule counts what was skipped too"
        assert state == TrainState(
            iteration=7, consumed_train_samples=full.consumed_train_samples, skipped_train_samples=skipped
        )


def test_an_iteration_has_the_learning_rate_of_the_samples_before_it():
    """Under a ramp, too: sizes 8, 8, 16, 24, 24."""
    settings = FlatConfig(
        micro_batch_size=2, global_batch_size=24, rampup_batch_size=[8, 8, 20], step_batch_size_schedule=None,
        decrease_batch_size_if_needed=False, seq_length=4, data_parallel_size=1, iterations_to_skip=[2],
        train_iters=5, timing_log_level=0, timing_log_option="max", barrier_with_L1_time=False,
        weight_decay_incr_style="constant",
    )  # fmt: skip
    assert samples_of(0, 1, compose(settings), 5)[2] == [0, 8, 16, 32, 56]


def test_records_are_written_before_a_checkpoint_and_the_checkpoint_is_reported_after_it():
    """A process that dies during the save must find the records of all iterations that the checkpoint covers."""
    events = []
    trainer = Trainer.__new__(Trainer)
    trainer.cfg, trainer.state = compose(FlatConfig(save="folder")), TrainState(iteration=3)
    trainer.check, trainer.last_mark = SimpleNamespace(read=lambda *_: events.append("values are finite")), 0.0
    report = SaveReport(TrainState(iteration=3), "folder", True, False)

    def start_save(state, **how):
        events.append(f"save {how['background']}")
        return report

    trainer.parts = SimpleNamespace(
        checkpointer=SimpleNamespace(saving=None, finish_save=lambda wait: events.append("earlier save ends"),
                                     start_save=start_save),
    )  # fmt: skip
    trainer.hooks = SimpleNamespace(emit=lambda kind, values, state=None: events.append(kind.name))
    trainer.save()
    assert events == ["values are finite", "earlier save ends", "saving", "save False", "save"]


@pytest.mark.parametrize("work", ["evaluate", "measure", "save"])
def test_work_between_iterations_is_not_part_of_the_next_iterations_time(monkeypatch, tmp_path, work):
    """Evaluation, texts and saves take 100 s each, and their records 100 s; the iteration after them takes 2 s."""
    seconds = [1000.0]
    monkeypatch.setattr(trainer_module, "time", SimpleNamespace(perf_counter=lambda: seconds[0]))

    def take_time(*args, **options):
        seconds[0] += 100.0

    def take_texts(*args, **options):
        take_time()
        return [(SAMPLE, {})]

    def evaluate(*args, **options):
        take_time()
        return [EvalResult("validation", None, {})]

    trainer = Trainer.__new__(Trainer)
    trainer.cfg = compose(FlatConfig(save=str(tmp_path)))
    trainer.state, trainer.check = TrainState(3), ImmediateCheck(SINGLE_PROCESS.world, False, False)
    trainer.last_validation = None
    trainer.hooks, trainer.evaluator = SimpleNamespace(emit=take_time), SimpleNamespace(evaluate=evaluate)
    checkpointer = SimpleNamespace(start_save=take_time, finish_save=lambda wait: None, saving=None)
    trainer.parts = SimpleNamespace(valid_sets=["validation"], checkpointer=checkpointer)
    trainer.last_mark = seconds[0]
    getattr(trainer, work)(*[take_texts] * (work == "measure"))
    assert seconds[0] == 1200.0
    seconds[0] += 2.0
    assert trainer.restart_timer() == 2.0
