"""Odd arguments of the console commands: one message and exit code 2 or 1, never a traceback."""

import errno
import json
import subprocess
import sys

import pytest

from megatron.console import FOLDERS, TOOLS, main, run_tool

CALLS = {
    "preprocess": "--input {} --output-prefix out --tokenizer-type ByteLevelTokenizer",
    "train-tokenizer": "--input {} --vocab-size 300 --output out",
    "check-data": "{}",
    "merge-data": "--input {} --output-prefix out",
    "make-corpus": "--output {} --max-bytes 1000",
    "convert": "--load-dir {} --save-dir out --saver hf",
    "inspect": "{}",
    "verify": "{}",
    "report": "run --output {}",
    "plot": "run --output {}",
    "plan": "--num-layers {}",
    "draw-schedule": "--num-layers {}",
    "inspect-batch": "--load {} --iteration 1",
    "unigram-baseline": "--program {}",
    "verify-layout": "--program {}",
}
ODD = ["", " ", "..", "../..", "a..b", "folder", "x.exe", "nan", "1e999", "-1", "9" * 30, "é", "empty.txt"]


@pytest.fixture
def place(tmp_path, monkeypatch):
    tmp_path = tmp_path / "a" / "b"
    tmp_path.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in ("run", "folder"):
        (tmp_path / name).mkdir()
    (tmp_path / "empty.txt").write_text("")
    records = [
        {"kind": "train", "iteration": n, "consumed_samples": n, "lm loss": value}
        for n, value in enumerate((1e308, -1e308, 1.0))
    ]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


@pytest.mark.parametrize("name", CALLS)
def test_odd_values_end_in_one_message(name, place, capsys):
    for value in ODD:
        arguments = [word.replace("{}", value) for word in CALLS[name].split()]
        try:
            code = run_tool(name, arguments)
        except SystemExit as end:
            code = end.code
        output = capsys.readouterr()
        answer = output.err + output.out  # verify prints what is damaged on stdout
        assert "Traceback" not in answer and answer.strip(), (value, code)
        assert code in (0, 1, 2), (value, code)


def test_records_of_huge_values_have_a_page_and_a_picture(place, capsys):
    assert run_tool("report", ["run", "--output", "page.html"]) == 0
    assert "Losses and learning" in (place / "page.html").read_text()
    assert run_tool("plot", ["run", "--text"]) == 0


@pytest.mark.parametrize("name, flag", [(name, flag) for name in FOLDERS for flag in FOLDERS[name].split() or [""]])
@pytest.mark.parametrize("form", ["{flag} nosuch", "{flag}=nosuch"])
def test_missing_folders_are_answered_before_torch_is_imported(python_without_torch, name, flag, form, tmp_path):
    arguments = form.format(flag=flag).split() if flag else ["nosuch"]
    program = (
        "import sys; from megatron.console import run_tool; "
        f"code = run_tool({name!r}, {arguments!r}); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    finished = subprocess.run([python_without_torch, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert finished.returncode == 2
    assert finished.stderr == f"error: {f'{flag} nosuch'.strip()}: there is no such folder; check the path\n"


@pytest.mark.parametrize("command", [
    *(f"{name} {FOLDERS[name]}" for name in ("generate", "evaluate", "convert")), "plan --load-hf",
    "quantize --data x --save-hf y --load-hf", "card --output x --load-hf", "sft --data x.jsonl --load-hf",
    "dpo --data x.jsonl --load-hf", "pretrain gpt --mock-data --dry-run --load-hf",
])  # fmt: skip
def test_a_name_of_the_hub_is_answered_with_the_command_that_downloads_it(command, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main([*command.split(), "Qwen/Qwen3-0.6B"]) == 2
    message, flag = capsys.readouterr().err.replace("\n", " "), command.split()[-1]
    fix = "nothing is downloaded: run `hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B`, then give "
    assert f"{flag} Qwen/Qwen3-0.6B: there is no such folder; {fix}Qwen3-0.6B instead" in message


@pytest.mark.parametrize("word, answer", [
    ("pretran", "error: megatron pretran: unknown command; did you mean pretrain?\n"),
    ("generat", "error: megatron generat: unknown command; did you mean generate?\n"),
    ("xyz", "error: megatron xyz: unknown command; see --help\n"),
])  # fmt: skip
def test_unknown_commands_get_a_suggestion(word, answer, capsys):
    assert main([word]) == 2
    assert capsys.readouterr().err == answer


def test_unknown_pretraining_programs_are_named(capsys):
    assert main(["pretrain", "bertt"]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: megatron pretrain bertt: there is no such program; did you mean bert?\n")


def test_pictures_need_matplotlib_and_say_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    flags = (
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
        "--global-batch-size 4 --micro-batch-size 1 --pipeline-model-parallel-size 2"
    )
    assert run_tool("draw-schedule", [*flags.split(), "--output", str(tmp_path / "x.svg")]) == 2
    assert "needs matplotlib" in capsys.readouterr().err
    assert TOOLS.keys() >= CALLS.keys()


@pytest.mark.parametrize("file", [None, "out/a"])
def test_a_full_disk_names_the_flag_of_the_output(monkeypatch, capsys, file):
    def fail(arguments):
        raise OSError(errno.ENOSPC, "No space left on device", *([file] if file else []))

    monkeypatch.setattr("megatron.tools.train_tokenizer.main", fail)
    assert run_tool("train-tokenizer", ["--input", "x", "--output=out"]) == 2
    reason = "No space left on device" + (": out/a" if file else "")
    assert capsys.readouterr().err == (
        f"error: --output out: cannot be written ({reason}); make room, or choose another folder\n"
    )
