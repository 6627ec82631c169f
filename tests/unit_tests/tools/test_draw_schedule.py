"""Pictures and tables of a user's own pipeline."""

import sys
from functools import partial

import pytest

from megatron.console import run_tool

main = partial(run_tool, "draw-schedule")

FLAGS = [
    "--num-layers", "8", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32",
    "--max-position-embeddings", "32", "--vocab-size", "500", "--global-batch-size", "6",
    "--pipeline-model-parallel-size", "2", "--pipeline-schedule", "zero-bubble",
]  # fmt: skip


def test_the_table_shows_stages_bubble_and_every_rank(capsys):
    assert main([*FLAGS, "--width", "60"]) == 0
    text = capsys.readouterr().out
    assert "embedding + layers 1-4" in text and "zero-bubble, 1 per rank, 6 micro-batches" in text
    rows = [line for line in text.splitlines() if line.startswith("rank ")]
    assert len(rows) == 2 and all(set(row.split()[-1]) <= set("FBW.") for row in rows)


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_a_picture_is_written(tmp_path, suffix):
    path = tmp_path / "new" / f"schedule.{suffix}"
    assert main([*FLAGS, "--output", str(path)]) == 0
    assert path.stat().st_size > 10_000


def test_impossible_pipelines_are_rejected_by_one_message(capsys):
    assert main([flag.replace("zero-bubble", "interleaved") for flag in FLAGS]) == 2
    assert "requires several model chunks per rank" in capsys.readouterr().err
    single = FLAGS[: FLAGS.index("--pipeline-model-parallel-size")]
    assert main(single) == 2
    assert "there is no pipeline to draw" in capsys.readouterr().err


def test_drawing_without_matplotlib_is_one_message_with_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*FLAGS, "--output", str(tmp_path / "schedule.svg")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: drawing needs matplotlib") and error.endswith("pip install matplotlib\n")
    assert error.count("\n") == 1 and not list(tmp_path.iterdir())
