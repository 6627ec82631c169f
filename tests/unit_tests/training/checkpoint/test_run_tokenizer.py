"""A run's tokenizer away from its training folder: the copy in the checkpoint, or the one that flags name."""

import shutil

import pytest

from megatron.console import run_tool
from tests.functional_tests.test_conversion import run
from tests.test_utils.scripted_model import byte_tokenizer, scripted_folder
from tests.unit_tests.core.tokenizers.test_end_tokens import TEXT, TRAIN, generated


@pytest.fixture
def moved_run(gloo_pool, tmp_path):
    """(Folder of the tokenizer, moved run) of a model that writes ``TEXT``; relative paths, as typed by a user."""
    folder = scripted_folder(tmp_path / "f", TEXT, {"eos_token_id": 258}, post="<s> $A")
    save = tmp_path / "run"
    assert gloo_pool.run(run, 1, [*TRAIN.split(), "--load-hf", folder, "--save", str(save)]) == [(0, "")]
    return tmp_path / "f", shutil.move(save, tmp_path / "elsewhere")


def test_a_run_is_used_without_its_training_folder(moved_run, tmp_path, capsys, caplog):
    folder, save = moved_run
    assert generated(str(save), capsys) == "bc" and "copy" not in caplog.text
    shutil.move(folder, tmp_path / "gone")
    assert generated(str(save), capsys) == "bc"
    assert "no such file or folder" in caplog.text and "Taking the copy in" in caplog.text
    named = ["--tokenizer-model", str(tmp_path / "gone"), "--prompt", "A", "--temperature", "0"]
    assert run_tool("generate", ["--load", str(save), *named]) == 0
    assert capsys.readouterr().out == "Abc\n"
    copy = save / "iter_0000001" / "tokenizer" / "tokenizer.json"
    copy.write_text(copy.read_text().replace("<|im_end|>", "<|im_enc|>"))
    assert run_tool("generate", ["--load", str(save), "--prompt", "A"]) == 2
    error = capsys.readouterr().err
    assert "no such file or folder" in error and f"{copy}: is not the tokenizer of" in error


def test_a_tokenizer_that_changed_since_is_not_the_runs(moved_run, capsys, caplog):
    folder, save = moved_run
    byte_tokenizer(folder, post="$A </s>", specials=("<|im_end|>", "</s>", "<s>", "<|im_start|>"))
    assert generated(str(save), capsys) == "bc"
    assert f"{folder}: is not the tokenizer of" in caplog.text
    shutil.rmtree(save / "iter_0000001" / "tokenizer")
    assert run_tool("generate", ["--load", str(save), "--prompt", "A"]) == 2
    assert "is not the tokenizer of" in capsys.readouterr().err
