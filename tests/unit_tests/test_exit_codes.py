"""Every program ends with exit code 2 and one message after an error in its input."""

import os
import subprocess
from pathlib import Path

import pytest

from megatron.console import FOLDERS, TOOLS, main, run_tool
from megatron.core.dist_checkpointing.files import may_hold_checkpoint
from megatron.core.models.registry import programs
from megatron.training.checks.self_checks import ReplicasDiffer
from megatron.training.observe.metrics import NonFiniteError
from tests.test_utils.gpt_runs import MODEL_FLAGS, train_with_errors

BAD_INPUT = {
    "sft": "--data nothing --load-hf nothing",
    "dpo": "--data nothing --load-hf nothing",
    "distill": "--teacher nothing --data nothing --load-hf nothing",
    "preprocess": "--input nothing.jsonl --output-prefix out --tokenizer-type ByteLevelTokenizer",
    "train-tokenizer": "--input nothing.jsonl --vocab-size 300 --output out",
    "check-data": "nothing",
    "merge-data": "--input nothing --output-prefix out",
    "energon-to-jsonl": "--input nothing --output out",
    "make-corpus": "--output nothing/corpus.jsonl",
    "convert": "--load-dir nothing --save-dir out --saver hf",
    "inspect": "nothing",
    "verify": "nothing",
    "generate": "--load nothing",
    "serve": "--load nothing",
    "evaluate": "--load nothing --tasks a",
    "fill-mask": "--load nothing --text a",
    "report": "nothing",
    "plot": "nothing --text",
    "verify-layout": "--num-layers -1",
    "verify-generation": "--num-layers -1",
    "check-cluster": "--json nothing/out.json",
    "plan": "--num-layers -1",
    "quantize": "--load nothing --save-hf out --data nothing",
    "lora": "export --load nothing --save out",
    "card": "--load-hf nothing --output card",
    "prune": "--load nothing --save out --mock-data --prune-export-config {}",
    "draw-schedule": "--num-layers -1",
    "inspect-batch": "--load nothing --iteration 1",
    "unigram-baseline": "--num-layers -1",
}


@pytest.mark.parametrize("name", TOOLS)
def test_tools_end_with_2_after_bad_input(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_tool(name, BAD_INPUT[name].split()) == 2
    errors = capsys.readouterr().err
    assert "Traceback" not in errors and ("nothing" in errors or "--num-layers -1" in errors)


@pytest.mark.parametrize("name", TOOLS)
def test_tools_end_with_2_after_an_unknown_flag(name, capsys):
    try:
        code = run_tool(name, ["--nope"])
    except SystemExit as end:
        code = end.code
    assert code == 2 and capsys.readouterr().err


@pytest.mark.parametrize("model", programs())
def test_pretraining_ends_with_2_after_a_wrong_flag(model, capsys):
    with pytest.raises(SystemExit) as end:
        main(["pretrain", model, "--num-layers", "-1"])
    assert end.value.code == 2 and "--num-layers -1" in capsys.readouterr().err


NPROC = "pretrain gpt --mock-data --nproc"


def starts(monkeypatch, words):
    """Return the exit code of ``megatron`` with ``words``, and the command that replaces the process."""
    commands = []
    monkeypatch.setattr(os, "execv", lambda path, command: commands.append(command[1:]))
    try:
        return main(words), commands
    except SystemExit as end:
        return end.code, commands


@pytest.mark.parametrize("count, flags, message", [
    (2, "--num-layers -1", "--num-layers -1: must be"), (3, "--tensor-model-parallel-size 2", "world size 3"),
    (2, "--nope", "--nope: unknown flag"),
])  # fmt: skip
def test_wrong_settings_end_before_torchrun_starts_processes(count, flags, message, monkeypatch, capsys):
    assert starts(monkeypatch, [*NPROC.split(), str(count), *MODEL_FLAGS, *flags.split()]) == (2, [])
    assert message in capsys.readouterr().err and "WORLD_SIZE" not in os.environ


def test_a_dry_run_of_several_processes_needs_one(monkeypatch, capsys):
    words = [*NPROC.split(), "4", *MODEL_FLAGS, "--tensor-model-parallel-size", "2", "--dry-run"]
    assert starts(monkeypatch, words) == (0, [])
    assert "4 = tensor 2 x pipeline 1 x context 1 x data 2" in capsys.readouterr().out


@pytest.mark.parametrize("count", ["2", "auto"])
def test_right_settings_start_torchrun(count, monkeypatch):
    flags = [*MODEL_FLAGS, "--mock-data", "--distributed-backend", "gloo"]
    _, (command,) = starts(monkeypatch, ["pretrain", "gpt", "--nproc", count, *flags])
    launcher = ["-m", "megatron.training.start.torchrun", "--standalone", f"--nproc_per_node={count}"]
    assert command == [*launcher, "-m", "megatron", "pretrain", "gpt", *flags]


@pytest.mark.parametrize("flags", ["--load {folder}/nothing --exit-on-missing-checkpoint --mock-data",
                                   "--data-path {folder}/nothing --split 1,0,0"])  # fmt: skip
def test_training_ends_with_2_after_bad_input(gloo_pool, tmp_path, flags):
    argv = f"--save {tmp_path}/run {flags.format(folder=tmp_path)}".split()
    ((code, errors),) = gloo_pool.run(train_with_errors, 1, argv, True)
    assert code == 2 and "nothing" in errors and "Traceback" not in errors


def test_failures_that_are_not_input_end_with_1():
    assert NonFiniteError("").exit_code == ReplicasDiffer("").exit_code == 1


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_without_a_checkpoint_are_found_without_torch(python_without_torch, name, tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    (tmp_path / "nothing").mkdir()
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}"}
    command = [python_without_torch, "-m", "megatron", name, *BAD_INPUT[name].split()]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 2 and "nothing: holds no checkpoint; give" in result.stderr, result.stderr


@pytest.mark.parametrize("file, holds", [
    ("iter_0000003", True), ("latest_checkpointed_iteration.txt", True), ("release", True), ("metadata.json", True),
    ("mp_rank_00_000", True), (".metadata", True), ("config.json", True), ("model-00001-of-00002.safetensors", True),
    ("pytorch_model.bin", True), ("non_persistent", True), ("metrics.jsonl", False), ("settings.yaml", False),
])  # fmt: skip
def test_names_of_checkpoints(tmp_path, file, holds):
    assert not may_hold_checkpoint(tmp_path)
    (tmp_path / file).touch()
    assert may_hold_checkpoint(tmp_path) == holds and may_hold_checkpoint(tmp_path / file)
