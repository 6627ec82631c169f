"""Messages name commands that exist where they are read: scripts in a checkout, subcommands after an installation."""

import re
import sys
from pathlib import Path

import pytest

from megatron import console
from megatron.core.config.commands import SUBCOMMANDS, as_typed
from megatron.core.models.registry import programs

ROOT = Path(__file__).resolve().parents[4]
SCRIPT = re.compile(r"(?:tools/[a-z_/]+|pretrain_[a-z0-9]+)\.py")

TEXTS = {
    "then use tools/checkpoint/convert.py --saver native": "then use megatron convert --saver native",
    "    python tools/train_tokenizer.py --input x": "    megatron train-tokenizer --input x",
    "torchrun --nproc_per_node=2 pretrain_gpt.py ...": "torchrun --nproc_per_node=2 -m megatron pretrain gpt ...",
    "python pretrain_t5.py, or pretrain_bert.py": "megatron pretrain t5, or megatron pretrain bert",
    "add --program pretrain_bert.py": "add --program pretrain_bert.py",
    "mytools/generate.py, tools/other.py, repretrain_gpt.py": "mytools/generate.py, tools/other.py, repretrain_gpt.py",
}


@pytest.mark.parametrize("text", TEXTS)
def test_the_console_command_names_its_subcommands(text, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["megatron pretrain gpt"])
    assert as_typed(text) == TEXTS[text]
    monkeypatch.setattr(sys, "argv", ["tools/generate.py"])
    assert as_typed(text) == text


def test_every_tool_has_its_script_and_subcommand():
    assert {script.replace("/", "."): name for script, name in SUBCOMMANDS.items()} == {
        module: name for name, (module, _) in console.TOOLS.items()
    }
    assert all((ROOT / "tools" / f"{script}.py").is_file() for script in SUBCOMMANDS)


@pytest.mark.parametrize("words", [[name] for name in console.TOOLS] + [["pretrain", name] for name in programs()])
def test_help_of_the_console_command_names_no_script(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["megatron", *words, "--help"])
    try:
        console.main()
    except SystemExit as end:
        assert not end.code
    text = re.sub(r"--program(?: \S+|\s+\{[^}]*\})|\[pretrain_gpt\.py\]", "", capsys.readouterr().out)
    assert text.startswith("usage: megatron ") and not SCRIPT.findall(text), SCRIPT.findall(text)


FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    " --micro-batch-size 2 --lr 1e-3 --train-iters 4 --tokenizer-type NullTokenizer --vocab-size 100"
)


@pytest.mark.parametrize("words, said", [
    (["pretrain", "gpt", "--tensor-model-parallel-size", "2"], "torchrun --nproc_per_node=2 -m megatron pretrain gpt "),
    (["pretrain", "bert", "--num-experts", "4"], "megatron pretrain hybrid and megatron pretrain vlm; remove it"),
    (["pretrain", "gpt", "--data-path", "{text}"], "with the tokenizer flags of this run: megatron preprocess --input"),
    (["generate", "--load", "{text}", "--prompt", "x"], "to take the model's settings from; check the path"),
])  # fmt: skip
def test_problems_of_the_console_command_name_no_script(words, said, tmp_path, monkeypatch, capsys):
    text = tmp_path / "corpus.jsonl"
    text.write_text('{"text": "a"}\n')
    line = [word.format(text=text) for word in words]
    if words[0] == "pretrain":
        line += FLAGS.split()
        line += [] if "--data-path" in line else ["--mock-data"]
    monkeypatch.setattr(sys, "argv", ["megatron", *line])
    try:
        code = console.main()
    except SystemExit as end:
        code = end.code
    errors = capsys.readouterr().err
    assert code == 2 and said in errors and not SCRIPT.findall(errors), errors
