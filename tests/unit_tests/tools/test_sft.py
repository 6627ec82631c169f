"""``megatron sft``: defaults, the printed samples, and the run that it starts."""

import json

import pytest

from megatron import console
from megatron.core.config.errors import UserError
from megatron.tools import sft
from tests.test_utils.chats import CHATML, assistant, sums, tokenizer_folder, user, write_lines
from tests.test_utils.hf_folders import tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    tiny_llama(folder, 1024)
    return tokenizer_folder(folder, CHATML)


@pytest.fixture
def started(monkeypatch):
    """Command lines of the pretraining programs that a tool starts."""
    commands = []
    monkeypatch.setattr(console, "pretrain", lambda arguments: commands.append(arguments) or 0)
    return commands


def value_of(command, flag):
    return command[len(command) - 1 - command[::-1].index(flag) + 1]


def test_defaults_are_replaced_by_flags(tmp_path, model, started):
    path = write_lines(tmp_path / "chats.jsonl", sums(1))
    flags = ["--num-epochs", "3", "--lr", "1e-3", "--nproc", "2", "--save", "run", "--valid-data", path]
    assert sft.main(["--data", path, "--load-hf", model, *flags]) == 0
    (command,) = started
    assert command[:4] == ["gpt", "--nproc", "2", "--sft"]
    values = {"--num-epochs": "3", "--lr": "1e-3", "--load": "run", "--seq-length": "64", "--train-data-path": path}
    values |= {"--valid-data-path": path, "--load-hf": model, "--global-batch-size": "16"}
    assert {flag: value_of(command, flag) for flag in values} == values
    assert command.count("--lr") == 1 and "--eval-iters" not in command


def test_iterations_replace_the_epoch(tmp_path, model, started):
    sft.main(["--data", "chats.jsonl", "--load-hf", model, "--train-iters=7", "--save=run"])
    (command,) = started
    assert "--num-epochs" not in command and value_of(command, "--load") == "run"
    assert value_of(command, "--eval-iters") == "0"


def test_inspection_prints_rows_with_their_masks(tmp_path, model, started, capsys):
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": [user("Hi"), assistant("Hello!")]}])
    assert sft.main(["--data", path, "--load-hf", model, "--inspect", "5"]) == 0
    text = capsys.readouterr().out
    assert "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Hello!<|im_end|>⟧\n" in text
    assert "row 0:" in text and "row 1:" not in text and not started


def test_chat_template_of_a_file_is_used(tmp_path, model, capsys):
    (tmp_path / "t.jinja").write_text(CHATML.replace("im_start|>", "im_start|>the "))
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": [user("Hi"), assistant("Hello!")]}])
    flags = ["--chat-template", str(tmp_path / "t.jinja"), "--inspect", "1"]
    sft.main(["--data", path, "--load-hf", model, *flags])
    assert "<|im_start|>the assistant\n⟦Hello!<|im_end|>⟧" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--inspect", "0"], "--inspect 0: must be at least 1"),
        (["--nproc", "x"], "--nproc x: must be a positive integer"),
        (["--data", "missing.jsonl", "--inspect", "1"], "missing.jsonl: cannot be read"),
        (["--chat-template", "missing.jinja", "--inspect", "1"], "--chat-template missing.jinja: cannot be read"),
    ],
)
def test_wrong_flags_are_named(tmp_path, model, started, flags, message):
    path = write_lines(tmp_path / "chats.jsonl", sums(1))
    with pytest.raises(UserError, match=message):
        sft.main(["--data", path, "--load-hf", model, *flags])
    assert not started


def test_wrong_settings_are_errors_of_the_program(tmp_path, model, capsys):
    path = write_lines(tmp_path / "chats.jsonl", sums(1))
    assert console.main(["sft", "--data", path, "--load-hf", model, "--num-layers", "7"]) == 2
    assert "--num-layers is 7, there it is 2" in capsys.readouterr().err


def test_unreadable_configuration_is_an_error(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps([]))
    path = write_lines(tmp_path / "chats.jsonl", sums(1))
    assert console.main(["sft", "--data", path, "--load-hf", str(tmp_path)]) == 2
    assert "error: " in capsys.readouterr().err
