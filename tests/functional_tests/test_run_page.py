"""The page that training writes when it ends: complete, stopped and continued, or failed. Metrics stay the same."""

from pathlib import Path

import pytest

from megatron.training.observe.run_folder import read_run
from tests.test_utils.gpt_runs import read_records, train, train_with_errors

SHORT = [
    "--train-iters", "6", "--eval-iters", "1", "--eval-interval", "3", "--save-interval", "3", "--lr-decay-iters", "6",
]  # fmt: skip


@pytest.fixture
def argv(dataset):
    return ["--data-path", str(dataset), "--split", "80,10,10", *SHORT]


def test_a_run_that_continues_has_one_page_with_both_processes(gloo_pool, argv, tmp_path):
    flags = [*argv, "--save", str(tmp_path), "--load", str(tmp_path), "--pipeline-model-parallel-size", "2"]
    assert gloo_pool.run(train, 2, [*flags, "--exit-interval", "3"]) == [0, 0]
    first = (tmp_path / "report.html").read_text()
    assert '<span id="status" class="status stopped">stopped</span>' in first
    assert gloo_pool.run(train, 2, flags) == [0, 0]
    page = (tmp_path / "report.html").read_text()
    assert '<span id="status" class="status finished">finished</span>' in page
    assert "exit_interval 3 -> None" in page.replace("-&gt;", "->")
    run = read_run(tmp_path, 0.0)
    assert [(event.iteration, event.kind) for event in run.events if event.kind not in ("evaluation", "save")] == [
        (0, "start"), (3, "end"), (3, "restart"), (6, "end")
    ]  # fmt: skip
    assert len([event for event in run.events if event.kind == "save"]) == 2
    assert run.settings["pipeline_model_parallel_size"] == 2 and run.world_size == 2 and not run.problems
    names = ("forward_backward", "update", "data_wait", "device_wait")
    assert set(run.timing) >= {f"parts_seconds/{name}" for name in names}
    parts = [
        record["parts_seconds"] for record in read_records(tmp_path / "timing.jsonl") if record["kind"] == "timing"
    ]
    assert all(value >= 0 for part in parts for value in part.values())


def test_an_error_is_the_reason_on_the_page(gloo_pool, argv, tmp_path):
    ((code, errors),) = gloo_pool.run(train_with_errors, 1, [*argv, "--save", str(tmp_path), "--lr", "1e30"])
    assert code == 1 and "is nan" in errors
    page = (tmp_path / "report.html").read_text()
    assert '<span id="status" class="status failed">failed</span>' in page and "lm loss is nan" in page


def test_metrics_are_the_same_bytes_with_and_without_the_page(gloo_pool, argv, tmp_path):
    for name, flags in {"with": [], "without": ["--no-report"]}.items():
        assert gloo_pool.run(train, 1, [*argv, "--save", str(tmp_path / name), *flags]) == [0]
    folders = [Path(tmp_path / name) for name in ("with", "without")]
    assert [(folder / "report.html").exists() for folder in folders] == [True, False]
    assert len({(folder / "metrics.jsonl").read_bytes() for folder in folders}) == 1
