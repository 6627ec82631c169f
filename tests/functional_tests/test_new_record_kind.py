"""A kind of record that only this file knows appears in its file, on the console, in TensorBoard and on the page, and
survives a rollback; programs that do not know it chart its numbers, and compare runs by them."""

import contextlib
import io
import json
import subprocess
import sys

from megatron.training.hooks import Hook
from megatron.training.observe.metrics import TIMING_FILE
from megatron.training.observe.records import RecordKind, register
from tests.test_utils.gpt_runs import MODEL_FLAGS, read_records

TEMPERATURE = register(
    RecordKind(
        name="temperature",
        fields={"celsius": "degrees of the hottest device", "by_device": "degrees by device"},
        file=TIMING_FILE,
        tags=lambda record, run: {"temperature": record["celsius"], "hottest": record["hottest"]},
        console=lambda record, run: [f" temperature at iteration {record['iteration']}: {record['celsius']:.1f} C"],
    )
)


def degrees(iteration):
    return 50.0 + iteration / 4


class Temperature(Hook):
    def on_start(self, run):
        self.emit = run.emit

    def on_step(self, state, metrics):
        if state.iteration % 2 == 0:
            value = degrees(state.iteration)
            self.emit(TEMPERATURE, {"celsius": value, "by_device": {"cpu": value - 1}, "hottest": "socket <0>"})


def train(rank, world_size, argv):
    from megatron.training.arguments import parse_args
    from megatron.training.run import run
    from megatron.training.tasks.gpt import GPTTask

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = run(parse_args([*MODEL_FLAGS, *argv]), GPTTask, hooks=[Temperature()])
    return code, output.getvalue()


def temperatures(folder):
    return [record for record in read_records(folder / "timing.jsonl") if record["kind"] == "temperature"]


def test_a_record_kind_of_one_file_is_in_every_output(gloo_pool, tmp_path):
    folder = tmp_path / "run"
    flags = ["--mock-data", "--save", str(folder), "--load", str(folder), "--tensorboard-dir", str(tmp_path / "board"),
             "--eval-iters", "0", "--save-interval", "4"]  # fmt: skip
    ((code, output),) = gloo_pool.run(train, 1, [*flags, "--exit-interval", "6"])
    assert code == 0
    (folder / "latest_checkpointed_iteration.txt").write_text("4")  # iterations 5 and 6 are computed again
    ((code, more),) = gloo_pool.run(train, 1, flags)
    assert code == 0
    expected = [(i, degrees(i)) for i in (2, 4, 6, 8)]
    records = temperatures(folder)
    assert [(record["iteration"], record["celsius"]) for record in records] == expected
    assert list(records[0])[:4] == ["kind", "iteration", "consumed_samples", "time"]
    lines = [line for line in (output + more).splitlines() if "temperature" in line]
    assert lines == [f" temperature at iteration {i}: {degrees(i):.1f} C" for i in (2, 4, 6, 6, 8)]

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert [(point.step, point.value) for point in events.Scalars("temperature")] == expected
    by_samples = sorted((point.step, point.value) for point in events.Scalars("temperature vs samples"))
    assert by_samples == [(8 * i, value) for i, value in expected]
    assert "socket <0>" in events.Tensors("hottest/text_summary")[0].tensor_proto.string_val[0].decode()

    page = (folder / "report.html").read_text()
    assert 'id="chart-temperature-celsius"' in page and "degrees of the hottest device" in page

    # another process: this kind is unknown there
    other = tmp_path / "other"
    other.mkdir()
    for name in ("metrics.jsonl", "timing.jsonl"):
        (other / name).write_bytes((folder / name).read_bytes())
    output = tmp_path / "both.html"
    command = [sys.executable, "-m", "megatron", "report", str(folder), str(other), "--output", str(output)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "run and other: no value differs in 8 common iterations" in result.stdout
    text = output.read_text()
    chart = text[text.index('id="chart-temperature-celsius"') :].split("</figure>")[0]
    assert "run: celsius" in chart and "other: celsius" in chart
    assert 'id="chart-temperature-by-device-cpu"' in text


def test_records_of_a_rollback_move_to_the_file_of_removed_records(gloo_pool, tmp_path):
    flags = ["--mock-data", "--save", str(tmp_path), "--load", str(tmp_path), "--eval-iters", "0", "--train-iters", "4",
             "--save-interval", "2", "--no-report"]  # fmt: skip
    assert gloo_pool.run(train, 1, flags)[0][0] == 0
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    assert gloo_pool.run(train, 1, flags)[0][0] == 0
    assert [record["iteration"] for record in temperatures(tmp_path)] == [2, 4]
    removed = [json.loads(line) for line in (tmp_path / "timing.jsonl.cut-2").read_text().splitlines()]
    assert [record["iteration"] for record in removed if record["kind"] == "temperature"] == [4]
