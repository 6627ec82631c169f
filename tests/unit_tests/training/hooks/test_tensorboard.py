"""TensorBoard holds every point once, under the tags that dashboards know, read back by TensorBoard's own reader."""

import functools
import logging
import math
from unittest import mock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.summary.writer import event_file_writer

from megatron.core.timers import Timers
from megatron.training.config.logging import LoggingConfig
from megatron.training.hooks.base import Hooks
from megatron.training.hooks.build import only_for
from megatron.training.hooks.sinks import FileSink, TensorBoardSink
from megatron.training.hooks.timing import TimingHook
from megatron.training.observe.kinds.evaluation import TEST, VALID
from megatron.training.observe.kinds.timing import TIMING
from megatron.training.observe.records import RunInfo, points
from megatron.training.train_state import TrainState


@pytest.fixture(autouse=True)
def event_files_sort_in_the_order_of_their_making(monkeypatch):
    """A counter distinguishes files of one process and second; they are read in the order of names, 10 before 9."""
    monkeypatch.setattr(event_file_writer._global_uid, "get", iter(range(100, 1000)).__next__)


ALL_TAGS = {
    "log_validation_ppl_to_tensorboard": True,
    "log_throughput": True,
    "log_memory_to_tensorboard": True,
    "log_world_size_to_tensorboard": True,
}


def hooks_of(folder, log_interval=5, point_interval=1):
    files = FileSink(folder)
    cfg = LoggingConfig(tensorboard_dir=str(folder / "tb"), tensorboard_log_interval=point_interval)
    return Hooks(log_interval, [files, TimingHook(Timers()), TensorBoardSink(cfg, files)])


def tagged(kind, values, **logging):
    """Points of a record by tag."""
    run = RunInfo(state=TrainState(), train_iters=9, logging=LoggingConfig(**logging))
    return points(kind, kind.record(1, 8, values), run)


@pytest.fixture
def gpu_run(simulated_run):
    """A run on two GPUs with all tags."""
    info = {"rank": 1, "world_size": 2, "device_name": "NVIDIA H200", "logging": LoggingConfig(**ALL_TAGS)}
    return functools.partial(simulated_run, **info)


def read_points(folder, tag):
    reader = EventAccumulator(str(folder / "tb"), size_guidance={"scalars": 0})
    reader.Reload()
    return [(event.step, event.value) for event in reader.Scalars(tag)]


def tags_of(folder):
    reader = EventAccumulator(str(folder / "tb"))
    reader.Reload()
    return set(reader.Tags()["scalars"])


def test_tags_are_those_that_dashboards_know(tmp_path, gpu_run):
    gpu_run(eval_interval=2).train(hooks_of(tmp_path), 1, 5)
    registered = {
        "learning-rate", "batch-size", "lm loss", "loss-scale", "grad-norm", "world-size", "iteration-time",
        "throughput", "lm loss validation", "lm loss validation ppl", "mfu", "tokens-per-second",
        "mem-resident-bytes", "mem-max-resident-bytes",
    }  # fmt: skip
    assert tags_of(tmp_path) == registered | {f"{tag} vs samples" for tag in registered}


def test_every_iteration_has_a_point_although_written_at_log_points(tmp_path, simulated_run):
    simulated_run().train(hooks_of(tmp_path, log_interval=4), 1, 10)
    assert read_points(tmp_path, "lm loss") == [(i, pytest.approx(10.0 / i)) for i in range(1, 11)]
    assert [step for step, _ in read_points(tmp_path, "lm loss vs samples")] == [8 * i for i in range(1, 11)]


def test_point_interval_thins_the_points(tmp_path, simulated_run):
    simulated_run(eval_interval=5).train(hooks_of(tmp_path, point_interval=4), 1, 10)
    assert [step for step, _ in read_points(tmp_path, "grad-norm")] == [4, 8]
    assert [step for step, _ in read_points(tmp_path, "lm loss validation")] == [5, 10]


@pytest.mark.parametrize(("stop", "crash_at"), [(10, 10), (10, 14), (0, 4)])
@pytest.mark.parametrize("tag", ["lm loss", "lm loss validation", "learning-rate", "iteration-time"])
def test_each_value_is_there_once_after_a_resume(tmp_path, simulated_run, stop, crash_at, tag):
    full, resumed = tmp_path / "whole", tmp_path / "resumed"
    run = simulated_run(eval_interval=4, save_interval=5)
    run.train(hooks_of(full), 1, 20)
    first = hooks_of(resumed)
    run.train(first, 1, crash_at, crash=crash_at > stop)
    first.hooks[-1].writer.close()  # a process that dies flushes nothing more; its file is closed all the same
    run.train(hooks_of(resumed), stop + 1, 20)
    if tag != "iteration-time":  # has a point more: the first iteration after a resume is a log point
        assert read_points(resumed, tag) == read_points(full, tag)
    steps = [step for step, _ in read_points(resumed, tag)]
    assert steps == sorted(set(steps))
    by_samples = [step for step, _ in read_points(resumed, f"{tag} vs samples")]
    assert by_samples and sorted(by_samples) == [8 * step for step in steps]


def test_a_rollback_restores_no_later_points_if_the_history_cannot_be_cut(tmp_path, simulated_run, monkeypatch):
    run = simulated_run()
    run.train(hooks_of(tmp_path), 1, 10)
    monkeypatch.setattr("megatron.training.observe.metrics.create_file", mock.Mock(side_effect=OSError(28, "full")))
    run.train(hooks_of(tmp_path), 6, 8)
    assert [step for step, _ in read_points(tmp_path, "lm loss vs samples")] == [8 * step for step in range(1, 9)]


def test_test_results_do_not_overwrite_validation():
    values = {"dataset": "code", "lm loss": 1.0, "sop loss": 25.0}
    test = tagged(TEST, values, log_validation_ppl_to_tensorboard=True)
    losses = {"lm loss test-code": 1.0, "sop loss test-code": 25.0}
    assert test == losses | {"lm loss test-code ppl": math.exp(1), "sop loss test-code ppl": math.exp(20)}
    assert set(tagged(VALID, {"dataset": "web", "lm loss": 1.0})) == {"lm loss validation-web"}


def test_optional_tags_follow_their_flags(tmp_path, simulated_run):
    run = simulated_run(eval_interval=2, logging=LoggingConfig(log_loss_scale_to_tensorboard=False))
    run.train(hooks_of(tmp_path), 1, 5)
    optional = {"loss-scale", "world-size", "throughput", "mfu", "lm loss validation ppl", "mem-resident-bytes"}
    assert not optional & tags_of(tmp_path)


def test_timers_become_seconds():
    values = {"seconds_per_iteration": 1.0, "timers_ms": {"optimizer": 20.0}, "memory": {}}
    expected = {"iteration-time": 1.0, "optimizer-time": 0.02}
    assert tagged(TIMING, values, log_timers_to_tensorboard=True) == expected


def test_an_unwritable_directory_costs_one_warning(tmp_path, simulated_run, caplog):
    (tmp_path / "tb").write_text("a file where the directory should be")
    hook = hooks_of(tmp_path).hooks[-1]
    with caplog.at_level(logging.WARNING):
        simulated_run(eval_interval=2, save_interval=2).train([only_for("--tensorboard-dir x", hook)], 1, 10)
    assert len(caplog.records) == 1
    assert caplog.messages[0].startswith("--tensorboard-dir x: ") and "Training continues" in caplog.messages[0]


def test_settings_are_texts_and_hyperparameters(tmp_path, simulated_run):
    settings = {"lr": 1e-3, "bf16": True, "data_path": ["a", "b"], "save": None}
    run = simulated_run(settings=settings, environment={"torch": "2.x"})
    run.train(hooks_of(tmp_path), 1, 5)
    reader = EventAccumulator(str(tmp_path / "tb"))
    reader.Reload()
    (text,) = reader.Tensors("settings/text_summary")
    assert "| lr | 0.001 |" in text.tensor_proto.string_val[0].decode()
    (text,) = reader.Tensors("environment/text_summary")
    assert "| torch | 2.x |" in text.tensor_proto.string_val[0].decode()
    content = HParamsPluginData.FromString(reader.SummaryMetadata("_hparams_/session_start_info").plugin_data.content)
    values = content.session_start_info.hparams
    assert values["lr"].number_value == 1e-3 and values["bf16"].number_value == 1
    assert values["data_path"].string_value == "['a', 'b']" and values["save"].string_value == "None"


def test_times_of_evaluations_are_points(tmp_path, simulated_run):
    run, hooks = simulated_run(), hooks_of(tmp_path)
    hooks.on_start(run.info())
    run.evaluate(hooks, run.state_at(4), seconds=3.0)
    hooks.on_end()
    assert read_points(tmp_path, "evaluation-time") == [(4, 3.0)]
