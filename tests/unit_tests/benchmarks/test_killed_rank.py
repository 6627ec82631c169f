"""A run that loses a rank and continues on fewer ranks: the stored result, the comparison, the program in small."""

import json
import sys

import numpy as np
import pytest

from benchmarks import killed_rank
from megatron.data.indexed_dataset import IndexedDatasetBuilder


def test_losses_before_the_signal_agree_in_every_bit_and_later_ones_at_the_end():
    expected = [4.0 - step / 100 for step in range(60)]
    continued = [*expected[:20], *(loss + 0.001 for loss in expected[20:])]
    result = killed_rank.compare(expected, expected[:30], continued, 20)
    assert result["passed"] and result["before"] == 0 and result["after"]["largest"] == pytest.approx(1e-3)
    assert result["last_relative"] == pytest.approx(0.001 / (4 - 0.495))
    lost = [*expected[:25], *(loss + 1e-9 for loss in expected[25:30])]
    assert not killed_rank.compare(expected, lost, continued, 20)["passed"]
    assert not killed_rank.compare(expected, expected[:30], continued[:-1], 20)["passed"]
    assert not killed_rank.compare(expected, expected[:30], [loss + 0.01 for loss in continued], 20)["passed"]


def test_stored_result_follows_from_the_stored_losses_and_log():
    folder = killed_rank.RESULTS
    result, log = json.loads((folder / "result.json").read_text()), (folder / "log.txt").read_text()
    resumed, continued = result["resumed_from"], killed_rank.losses(folder)
    killed = continued[:resumed] + result["killed"]["losses"]
    assert len(continued) == result["steps"] and len(killed) >= result["killed"]["iteration"] > resumed
    assert killed_rank.compare(result["uninterrupted"], killed, continued, resumed) == result["differences"]
    assert result["differences"]["passed"] and result["killed"]["exit_code"] == 1
    before, after = log.split(f"=== SIGKILL to rank {result['killed']['rank']} ")
    assert f"successfully saved checkpoint from iteration {resumed:>7} " in before
    assert f"watchdog: rank {result['killed']['rank']} failed first" in after
    assert f"loading checkpoint from OUTPUT/run at iteration {resumed}\n" in after
    assert sum(path.stat().st_size for path in folder.iterdir()) < 300_000


@pytest.mark.slow
def test_killed_run_continues_in_another_layout_with_the_same_losses(tmp_path, warm_python, monkeypatch):
    """Only the job that loses a rank starts cold: its ranks are found among the processes of torchrun."""
    cold, launch = sys.executable, killed_rank.launch

    def start(words, ranks, log):
        sys.executable = cold if ranks == 2 and "--save" in words else warm_python
        return launch(words, ranks, log)

    monkeypatch.setattr(sys, "executable", cold)
    monkeypatch.setattr(killed_rank, "launch", start)
    tokens = np.random.default_rng(0).integers(0, 64, 3000, dtype=np.uint16)
    with IndexedDatasetBuilder(str(tmp_path / "text.bin"), np.uint16) as builder:
        builder.add_documents(tokens, np.full(60, 50))
        builder.finalize(str(tmp_path / "text.idx"))
    words = f"--data {tmp_path} --shape tiny --steps 32 --save-interval 4 --kill-at 12 --ranks 2 --after= --output"
    layout = "--before=--tensor-model-parallel-size 2 --sequence-parallel"
    assert killed_rank.main([*words.split(), str(tmp_path / "out"), layout]) == 0
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    killed, differences = result["killed"], result["differences"]
    assert killed["rank"] == 1 and killed["exit_code"] not in (0, None)
    assert 4 <= result["resumed_from"] <= killed["iteration"] and result["resumed_from"] % 4 == 0
    assert differences["before"] == 0 and differences["after"]["largest"] < 1e-4
    assert result["uninterrupted"][0] - result["uninterrupted"][-1] > 0.05
    log = (tmp_path / "out" / "log.txt").read_text()
    assert "rank 1 failed first" in log and f"at iteration {result['resumed_from']}\n" in log
    assert str(tmp_path) not in log and (tmp_path / "out" / "report.html").stat().st_size > 10_000
