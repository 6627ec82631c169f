"""tools/generate.py: several prompts, and a clear answer to a wrong --load."""

import importlib.util
import sys
from pathlib import Path

import pytest

from tests.test_utils.gpt_runs import train

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def generate(monkeypatch):
    """The tool's ``main`` with a command line."""
    spec = importlib.util.spec_from_file_location("generate_tool", ROOT / "tools" / "generate.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["generate.py", *map(str, arguments)])
        return tool.main()

    return call


def test_several_prompts_give_the_texts_that_each_gives_alone(generate, gloo_pool, tmp_path, capsys):
    assert gloo_pool.run(train, 1, ["--mock-data", "--train-iters", "3", "--save", str(tmp_path / "run")]) == [0]
    (tmp_path / "prompts").write_text("7 8\n9 10 11\n")
    common = ["--load", tmp_path / "run", "--max-new-tokens", 4]
    texts = []
    for prompt in ("1 2", "7 8", "9 10 11"):
        assert generate(*common, "--prompt", prompt) == 0
        texts.append(capsys.readouterr().out)
    assert generate(*common, "--prompt", "1 2", "--prompt-file", tmp_path / "prompts") == 0
    assert capsys.readouterr().out.split("-" * 40 + "\n") == texts
    assert all(text.startswith(prompt) for text, prompt in zip(texts, ("1 2", "7 8", "9 10 11")))


def test_a_folder_without_a_checkpoint_is_named_by_the_flag_that_was_given(generate, tmp_path, capsys):
    assert generate("--load", tmp_path / "nope") == 1
    error = capsys.readouterr().err
    assert "--load" in error and "nope" in error and "--use-checkpoint-args" not in error
