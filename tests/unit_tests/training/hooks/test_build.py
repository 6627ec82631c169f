"""Each flag brings its hook, on the ranks it belongs to; nothing optional is imported unasked."""

import enum
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.core.config.errors import UserError
from megatron.core.timers import Timers
from megatron.training.config.flat import FlatConfig
from megatron.training.config.pretrain_config import compose
from megatron.training.hooks import build_hooks
from megatron.training.hooks.build import plain, wandb_options
from megatron.training.hooks.profiler import ProfilerHook
from megatron.training.observe.metrics import read_metrics
from megatron.training.observe.plan_comparison import Prediction


class Kind(enum.Enum):
    """An enum whose names are not its values."""

    FIRST = 1


def names_of(cfg, run):
    hooks = build_hooks(cfg, run, Timers(cfg.logging.timing_log_level))
    return [type(hook).__name__ for hook in hooks]


def config(**changed):
    return compose(FlatConfig(**({"log_interval": 5, "seq_length": 64} | changed)))


def test_files_are_in_the_save_directory_else_with_tensorboard(simulated_run):
    for flags, folder in (({"save": "a", "tensorboard_dir": "b"}, "a"), ({"tensorboard_dir": "b"}, "b")):
        sink = build_hooks(config(**flags), simulated_run().info(), Timers())[0]
        assert [str(file.path) for file in sink.files.values()] == [f"{folder}/metrics.jsonl", f"{folder}/timing.jsonl"]


def test_by_default_the_last_rank_prints(simulated_run):
    assert names_of(config(), simulated_run(rank=1, world_size=2).info()) == ["ConsoleHook", "TimingHook"]
    assert names_of(config(), simulated_run(rank=0, world_size=2).info()) == []


def test_the_metrics_file_comes_first(tmp_path, simulated_run):
    cfg = config(save=str(tmp_path), timing_log_level=1, tensorboard_dir=str(tmp_path / "tb"), log_progress=True)
    assert names_of(cfg, simulated_run().info()) == [
        "FileSink", "ConsoleHook", "TimingHook", "TensorBoardSink", "ProgressHook", "PageHook",
    ]  # fmt: skip


def test_timers_are_gathered_on_every_rank(simulated_run):
    cfg = config(timing_log_level=1)
    assert names_of(cfg, simulated_run(rank=0, world_size=2).info()) == ["TimingHook"]


def test_memory_lines_come_from_one_data_parallel_replica(simulated_run):
    for replica, expected in ((0, ["MemoryHook"]), (1, [])):
        run = simulated_run(rank=0, world_size=4, device="cuda", data_parallel_rank=replica)
        assert names_of(config(), run.info()) == expected


def test_a_profile_on_a_cpu_is_torchs(simulated_run, tmp_path):
    hooks = build_hooks(config(profile=True, save=str(tmp_path)), simulated_run().info(), Timers())
    (hook,) = (item for item in hooks if item.only_for == "--profile")
    assert isinstance(hook, ProfilerHook) and hook.directory == tmp_path / "torch_profile"


def test_profiles_are_taken_on_the_asked_ranks(simulated_run):
    run = simulated_run(rank=0, world_size=3)
    assert names_of(config(profile=True), run.info()) == ["ProfilerHook"]
    assert names_of(config(profile=True, profile_ranks=[1]), run.info()) == []


def test_wandb_needs_a_run_name(simulated_run):
    with pytest.raises(ValueError, match="--wandb-project needs --wandb-exp-name"):
        build_hooks(config(wandb_project="p"), simulated_run().info(), Timers())


def test_wandb_files_fall_back_to_the_save_directory():
    cfg = config(wandb_project="p", wandb_exp_name="n", save="run", wandb_entity="team")
    options = wandb_options(cfg)
    assert (options["project"], options["name"], options["entity"]) == ("p", "n", "team")
    assert options["dir"] == "run/wandb" and wandb_options(config(wandb_save_dir="w", save="run"))["dir"] == "w"
    assert options["config"]["seq_length"] == 64 and options["config"]["exit_signal"] == "SIGTERM"


def test_settings_of_wandb_are_json_types_at_any_depth():
    value = [("a", [Kind.FIRST, {1: 2}]), None, 2.5, True, Path("x")]
    assert plain(value) == [["a", ["FIRST", "{1: 2}"]], None, 2.5, True, "x"]


def test_progress_needs_a_save_directory(simulated_run):
    with pytest.raises(ValueError, match="--log-progress .* --save"):
        build_hooks(config(log_progress=True), simulated_run().info(), Timers())


def test_memory_history_on_a_cpu_is_a_warning(simulated_run, caplog):
    with caplog.at_level(logging.WARNING):
        assert names_of(config(record_memory_history=True), simulated_run().info()) == ["ConsoleHook", "TimingHook"]
    assert "--record-memory-history" in caplog.text


def test_all_hooks_together_survive_a_resume(tmp_path, simulated_run):
    cfg = config(
        save=str(tmp_path / "save"), tensorboard_dir=str(tmp_path / "tb"), log_throughput=True, log_progress=True
    )
    run = simulated_run(train_iters=12, eval_interval=4, save_interval=6)
    run.train(build_hooks(cfg, run.info(), Timers()), 1, 8, crash=True)
    run.train(build_hooks(cfg, run.info(6), Timers()), 7, 12)
    records = list(read_metrics(tmp_path / "save" / "metrics.jsonl"))
    assert [record["iteration"] for record in records if record["kind"] == "train"] == list(range(1, 13))
    assert [record["iteration"] for record in records if record["kind"] == "valid"] == [4, 8, 12]


def test_optional_packages_are_not_imported_unasked():
    code = (
        "import sys, megatron.training.hooks as hooks\n"
        "assert not {'wandb', 'tensorboard', 'matplotlib'} & set(sys.modules), 'imported unasked'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_page_is_written_unless_it_is_turned_off(tmp_path, simulated_run):
    assert "PageHook" in names_of(config(save=str(tmp_path)), simulated_run().info())
    assert "PageHook" not in names_of(config(save=str(tmp_path), write_report=False), simulated_run().info())
    assert "PageHook" not in names_of(config(), simulated_run().info())


def test_the_plan_is_watched_on_known_gpus_only(simulated_run):
    plan = Prediction("H100", 1.0, {}, 0.03)
    names = names_of(config(global_batch_size=8), simulated_run(prediction=plan).info())
    assert names == ["ConsoleHook", "TimingHook", "PlanHook"]
    other = simulated_run(prediction=plan, rank=0, world_size=2).info()
    assert names_of(config(global_batch_size=8), other) == []


@pytest.mark.parametrize(
    ("choice", "terminal", "term", "expected"),
    [
        ("auto", False, "xterm", "ConsoleHook"),
        ("auto", True, "xterm", "LiveHook"),
        ("auto", True, "dumb", "ConsoleHook"),
        ("lines", True, "xterm", "ConsoleHook"),
        ("live", False, "xterm", "LiveHook"),
    ],
)
def test_the_live_view_is_for_terminals(simulated_run, monkeypatch, choice, terminal, term, expected):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    monkeypatch.setenv("TERM", term)
    assert names_of(config(console=choice), simulated_run().info()) == [expected, "TimingHook"]


def test_without_rich_a_terminal_gets_lines_and_a_request_an_error(simulated_run, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delitem(sys.modules, "megatron.training.hooks.live", raising=False)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert names_of(config(), simulated_run().info()) == ["ConsoleHook", "TimingHook"]
    with pytest.raises(UserError, match="--console live needs the rich package"):
        names_of(config(console="live"), simulated_run().info())
