"""tools/make_corpus.py: sample corpora of stories and from Python's standard library."""

import json
import re
import shutil
import sysconfig
from pathlib import Path

import pytest

from megatron.console import run_tool
from megatron.tools.make_corpus import docstrings
from megatron.tools.stories import grammar


def corpus(folder, *flags):
    assert run_tool("make-corpus", ["--output", str(folder / "c.jsonl"), "--max-bytes", "400000", *flags]) == 0
    return [json.loads(line) for line in (folder / "c.jsonl").read_text().splitlines()]


@pytest.fixture
def small_library(tmp_path, monkeypatch):
    """Three packages in place of the standard library, which takes 5 seconds to parse."""
    library = Path(sysconfig.get_path("stdlib"))
    for name in ("email", "logging", "unittest"):
        shutil.copytree(library / name, tmp_path / "library" / name)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "library"))


def test_documentation_is_prose_in_an_order_that_the_seed_decides(small_library, tmp_path):
    rows = corpus(tmp_path, "--documents", "docs")
    assert sum(len(row["text"]) for row in rows) >= 400_000 and rows == corpus(tmp_path, "--documents", "docs")
    text = "\n".join(row["text"] for row in rows)
    assert text.count(" the ") > 2000 and text.count("\nimport ") < 100
    kinds = ["topics" in row["path"] for row in rows]
    assert any(kinds) and not all(kinds[:5]) and rows != corpus(tmp_path, "--documents", "docs", "--seed", "1")


@pytest.mark.parametrize("path, count", [("json/encoder.py", 1), ("test/test_x.py", 0)])
def test_long_docstrings_outside_of_tests_are_taken(path, count):
    source = f'"""{"A long text. " * 20}"""\ndef f():\n    """Short."""\n'
    results = list(docstrings({"path": path, "text": source}))
    assert len(results) == count and all(result["text"].startswith("A long text.") for result in results)


def test_stories_are_complete_sentences_of_one_child(tmp_path):
    rows = corpus(tmp_path, "--documents", "stories")
    assert rows == corpus(tmp_path, "--documents", "stories")
    assert rows != corpus(tmp_path, "--documents", "stories", "--seed", "1")
    texts = [row["text"] for row in rows]
    assert sum(map(len, texts)) >= 400_000 and len(set(texts)) == len(texts)
    for text in texts:
        assert text[0] in '"' + text[0].upper() and text[-1] in '.!?"' and not re.search(r"[{}|]|  | a [aeiou]", text)


def test_every_slot_of_a_plot_has_a_value():
    slots, plots = grammar()
    used = {slot.lower() for plot in plots for part in plot for text in part for slot in re.findall(r"{(\w+)}", text)}
    rest = {"hero", "child", "she", "her", "them", "self"}
    assert used - rest == set(slots) - {"girl", "boy"} and len(plots) == 10
