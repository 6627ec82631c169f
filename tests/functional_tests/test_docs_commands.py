"""Every command in README.md, docs/ and examples/ runs, and what the pages show as its output is its output.

Blocks marked ``bash`` run in order, page by page, in a folder with some text to work on; a block without a language
that begins with ``$`` is a command and exactly what it prints. Sizes that take a cluster are made small first
(``SMALLER``).
A comment above a block excludes it, with a text for the reader:

    <!-- file: NAME -->              is the file NAME, for the following commands
    <!-- output -->                  is printed by the commands above it (``differences``), numbers within 2 percent
    <!-- output within 10% -->       likewise, for numbers that depend on how the processor rounds
    <!-- needs GPUs -->              runs only where there is one
    <!-- not run: the reason -->     never runs here
"""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron.training.config.resolve import gpu_present

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])

BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^>]*) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)

SMALLER = {
    r"--num-layers \d+": "--num-layers 2",
    r"--hidden-size \d+": "--hidden-size 32",
    r"--num-attention-heads \d+": "--num-attention-heads 4",
    r"--seq-length \d+": "--seq-length 32",
    r"--max-position-embeddings \d+": "--max-position-embeddings 32",
    r"--train-iters \d+": "--train-iters 3 --eval-iters 1 --num-workers 0",
    r"--lr-warmup-iters \d+": "--lr-warmup-iters 1",
    r"--save-interval \d+": "--save-interval 2",
    r"--global-batch-size \d+": "--global-batch-size 8",
    r"--nproc_per_node=\d+": "--nproc_per_node=2",
    r"--vocab-size 8192": "--vocab-size 300",
    r"--workers \d+": "--workers 1",
}
ELSEWHERE = {
    r"^\./(quickstart|run_tests)\.sh\b.*$": "the whole program, run on its own",
    r"^pip install .*$": "the environment is there",
}
"""Lines that other tests, or the tests' own start, stand for."""


@dataclass
class Block:
    """One fenced block of a page."""

    page: Path
    line: int
    mark: str
    language: str
    text: str

    @property
    def shows_output(self):
        return not self.language and self.text.startswith("$ ")

    @property
    def commands(self):
        """The shell script of a ``bash`` block, made small, without what is run elsewhere."""
        text = self.text
        for pattern in ELSEWHERE:
            text = re.sub(pattern, "", text, flags=re.MULTILINE)
        if self.page.name == "README.md":
            for pattern, small in SMALLER.items():
                text = re.sub(pattern, small, text)
        return text.strip()


def blocks_of(page):
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, match.start()) + 1, match["mark"] or "", match["language"], match["text"])
        for match in BLOCK.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


@pytest.fixture(scope="module")
def environment(tmp_path_factory, warm_python):
    """An environment in which ``python`` and ``torchrun`` are this interpreter's, with the suite preloaded."""
    return environment_of(warm_python, tmp_path_factory.mktemp("bin"))


def environment_of(python, programs):
    for name, command in {"python": "", "torchrun": " -m torch.distributed.run", "megatron": " -m megatron"}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec "{python}"{command} "$@"\n')
        (programs / name).chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    gpus = {} if gpu_present() else {"CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "120", **gpus}


@pytest.fixture
def workplace(environment, tmp_path):
    """A copy of the repository as a command sees it, with text and a tokenizer of the names that the pages use."""
    for name in ("pretrain_gpt.py", "pretrain_bert.py", "pretrain_t5.py", "tools", "examples", "megatron"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "parts").mkdir()
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "away", "from", "it"]
    lines = [json.dumps({"text": " ".join(words[i % 7 :] + words[: i % 11])}) for i in range(3000)]
    for name in ("data.jsonl", "corpus.jsonl"):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    yield tmp_path
    for file in tmp_path.glob("*.pid"):  # servers of a page whose commands failed
        with suppress(ProcessLookupError):
            os.kill(int(file.read_text()), signal.SIGTERM)


NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?%?(?![\w.])")


def same_line(displayed, printed, tolerance):
    """Whether a line is the shown one: numbers may differ by the ``tolerance``, and ``…`` stands for any text."""
    parts = displayed.strip().split("…")
    pattern = ".*".join(f"({NUMBER.pattern})".join(map(re.escape, NUMBER.split(part))) for part in parts)
    result = re.fullmatch(pattern, printed.strip())
    numbers = [float(group.rstrip("%")) for part in parts for group in NUMBER.findall(part)]
    values = [float(group.rstrip("%")) for group in result.groups()] if result else []
    return result is not None and all(abs(a - b) <= tolerance * abs(a) for a, b in zip(numbers, values, strict=True))


def differences(displayed, printed, tolerance=0.02):
    """Return the shown lines that were not printed in this order. A line ``…`` stands for any lines; without it, lines
    follow each other; lines before the first and after the last are free."""
    lines, at, free, missing = printed.splitlines(), 0, True, []
    for line in displayed.splitlines():
        if line.strip() == "…":
            free = True
            continue
        places = range(at, len(lines) if free else min(at + 1, len(lines)))
        place = next((index for index in places if same_line(line, lines[index], tolerance)), None)
        if place is None:
            missing.append(line)
        else:
            at, free = place + 1, False
    return missing


@pytest.mark.parametrize(
    "shown, missing",
    [
        ("loss 2.00 in … s\nend", []),
        ("loss 2.2 in … s", ["loss 2.2 in … s"]),
        ("start\nend", ["end"]),
        ("start\n…\nend", []),
        ("end\n…\nstart", ["start"]),
        ("los 2.01 in 3 s", ["los 2.01 in 3 s"]),
    ],
)
def test_output_that_differs_is_found(shown, missing):
    assert differences(shown, "start\nloss 2.01 in 3.4 s\nend") == missing
    assert differences("loss 2.2", "loss 2.01", 0.1) == [] != differences("loss 2.3", "loss 2.01", 0.1)


def run(script, folder, environment):
    """Run a shell script; its output and errors are one text, as in a terminal."""
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=folder, env={**environment, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600,
    )  # fmt: skip


def runs_here(block):
    """Whether the block is run, written or compared on this machine."""
    if not block.mark or block.mark == "needs GPUs":
        return not block.mark or gpu_present()
    assert block.mark.startswith(("not run: ", "file: ", "output")), block.mark
    return not block.mark.startswith("not run: ")


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_commands_run_in_the_order_of_the_page(page, workplace, environment, tmp_path_factory):
    blocks = [block for block in blocks_of(page) if runs_here(block)]
    scripts = [block for block in blocks if block.language in ("bash", "sh") and block.commands and not block.mark]
    if not scripts:
        pytest.skip("no commands")
    if page == ROOT / "README.md":  # one page's programs start from nothing
        environment = environment_of(sys.executable, tmp_path_factory.mktemp("bin"))
    if any("tokenizer.json" in block.text for block in scripts):
        created = "python tools/train_tokenizer.py --input data.jsonl --vocab-size 300 --output . "
        assert run(created, workplace, environment).returncode == 0
    printed = ""
    for block in blocks:
        if block.mark.startswith("output"):
            percent = re.fullmatch(r"output(?: within (\d+)%)?", block.mark)[1]
            missing = differences(block.text, printed, int(percent or 2) / 100)
            assert missing == [], f"{page.name}:{block.line}\n{printed}"
        elif block in scripts:
            result = run(block.commands, workplace, environment)
            assert result.returncode == 0, f"{page.name}:{block.line}\n{block.commands}\n{result.stdout}"
            printed = result.stdout
        elif block.mark.startswith("file: "):
            (workplace / block.mark.removeprefix("file: ")).write_text(block.text)
        elif block.language == "python":
            result = subprocess.run(
                ["python", "-c", block.text], cwd=workplace, env=environment, capture_output=True, text=True
            )
            assert result.returncode == 0, f"{page.name}:{block.line}\n{result.stderr}"


@pytest.mark.parametrize(
    "block",
    [pytest.param(b, id=f"{b.page.name}:{b.line}") for b in BLOCKS if b.shows_output and "sh" not in b.text.split()[1]],
)
def test_shown_output_is_the_output(block, workplace, environment):
    if not runs_here(block):
        pytest.skip(block.mark)
    command, _, printed = re.sub(r"\\\n\s*", "", block.text).partition("\n")
    result = run(command.removeprefix("$ "), workplace, environment)
    assert result.stdout.strip() == printed.strip()
