"""Pictures of runs: every format asked for, side by side, from files that may still grow; refusals in one line."""

import math
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from megatron.console import run_tool
from megatron.tools import plot_metrics
from megatron.tools.plot_metrics import Series, choose_panels, load, run_labels, smoothed, text_chart
from megatron.training.observe.kinds.evaluation import VALID
from megatron.training.observe.kinds.train import TRAIN, train_values
from megatron.training.observe.metrics import MetricsFile, StepMetrics

main = partial(run_tool, "plot")


def write_run(folder, iterations=40, timing=True, dataset=None):
    file = MetricsFile(folder / "metrics.jsonl")
    for i in range(1, iterations + 1):
        loss = math.nan if i == 3 else 2 + 8 / i
        step = StepMetrics(
            losses={"lm loss": loss}, num_tokens=100, learning_rate=1e-3, global_batch_size=4, grad_norm=1.0
        )
        file.append(TRAIN.record(i, 4 * i, train_values(step)))
        if i % 10 == 0:
            name = {} if dataset is None else {"dataset": dataset}
            file.append(VALID.record(i, 4 * i, name | {"lm loss": loss + 0.1}))
    file.flush()
    if timing:
        clock = MetricsFile(folder / "timing.jsonl")
        for i in range(10, iterations + 1, 10):
            clock.append(
                {"kind": "timing", "iteration": i, "tokens_per_second": 5e4, "tflops_per_device": 400.0, "mfu": None}
            )
        clock.flush()
    return folder


def test_two_runs_side_by_side_make_a_picture(tmp_path, capsys):
    first, second = write_run(tmp_path / "a"), write_run(tmp_path / "b", 30, timing=False)
    output = tmp_path / "pictures" / "plot.png"
    assert main([str(first), str(second), "--output", str(output), "--smooth", "--x", "tokens"]) == 0
    data = output.read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 20_000
    assert capsys.readouterr().out == f"wrote {output}\n"


def test_the_default_picture_shows_loss_rate_norm_and_speed(tmp_path):
    run = load(write_run(tmp_path), "run")
    assert choose_panels([run], None) == ["lm loss", "learning_rate", "grad_norm", "tflops_per_device"]
    assert choose_panels([load(write_run(tmp_path / "b", timing=False), "b")], None)[-1] == "grad_norm"


def test_the_load_of_experts_is_a_panel_and_statistics_can_be_asked_for(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for i in range(1, 9):
        statistics = {"layer 1/tokens_per_expert entropy": 0.9, "layer 2/tokens_per_expert entropy": 0.1 * i,
                      "layer 2/dropped": 3.0, "layer 2/z_loss": 1.0}  # fmt: skip
        step = StepMetrics(losses={"lm loss": 1.0}, num_tokens=9, learning_rate=1e-3, global_batch_size=4,
                           statistics=statistics)  # fmt: skip
        file.append(TRAIN.record(i, 4 * i, train_values(step)))
    file.flush()
    run = load(tmp_path, "run")
    assert choose_panels([run], None) == ["lm loss", "learning_rate", "load of experts"]
    assert run.train["load of experts"].y == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8])
    requested = ["--keys", "layer 2/dropped", "load of experts"]
    assert main([str(tmp_path), "--output", str(tmp_path / "p.png"), *requested]) == 0


def test_requested_keys_are_drawn_and_unknown_ones_rejected_with_a_list(tmp_path, capsys):
    folder = write_run(tmp_path)
    assert main([str(folder), "--output", str(tmp_path / "p.svg"), "--keys", "num_tokens"]) == 0
    assert (tmp_path / "p.svg").read_text().startswith("<?xml")
    assert main([str(folder), "--output", str(tmp_path / "q.png"), "--keys", "los"]) == 2
    assert "--keys 'los': not in any run; available: " in capsys.readouterr().err
    assert not (tmp_path / "q.png").exists()


def test_x_axis_counts_the_unit_of_its_label(tmp_path):
    folder = write_run(tmp_path)
    assert load(folder, "a").train["lm loss"].x[-1] == 40
    assert load(folder, "a", "samples").train["lm loss"].x[-1] == 160
    assert load(folder, "a", "tokens").train["lm loss"].x[-1] == 4000
    assert load(folder, "a", "tokens").evaluation["lm loss", "validation"].x == [1000, 2000, 3000, 4000]
    assert load(folder, "a", "tokens").timing["tflops_per_device"].x == [1000, 2000, 3000, 4000]


def test_named_validation_sets_are_separate_series(tmp_path):
    assert set(load(write_run(tmp_path, dataset="code"), "a").evaluation) == {("lm loss", "validation-code")}


def test_a_run_that_is_still_writing_can_be_drawn(tmp_path):
    folder = write_run(tmp_path)
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(b'{"kind": "train", "iter')
    assert len(load(folder, "a").train["lm loss"].x) == 40


def test_smoothing_does_not_lag_and_keeps_constants():
    line = Series(list(range(100)), [5.0] * 50 + [math.nan] + [5.0] * 49)
    assert smoothed(line, 3.0).y == pytest.approx([5.0] * 99)
    ramp = Series(list(range(101)), [float(i) for i in range(101)])
    assert smoothed(ramp, 2.0).y[50] == pytest.approx(50.0)


def test_the_text_chart_shows_the_curve_without_any_package(tmp_path):
    folder = write_run(tmp_path)
    code = (
        "import sys\n"
        "for name in ('matplotlib', 'numpy', 'torch'): sys.modules[name] = None\n"
        "from megatron.tools.plot_metrics import main\n"
        f"sys.exit(main([{str(folder)!r}, '--text']))"
    )
    chart = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    lines = chart.splitlines()
    assert lines[0] == "lm loss" and lines[1].lstrip().startswith("10 |*")
    assert "first 10.0000, last 2.2000, lowest 2.2000" in lines[-2]
    assert "validation: first 2.9000, last 2.3000" in lines[-1]


def test_the_text_chart_puts_points_where_they_belong():
    run = plot_metrics.Run(Path("r"), "r", train={"lm loss": Series([0, 5, 10], [3.0, 2.0, 1.0])})
    rows = text_chart([run], "lm loss", width=20, height=3).splitlines()[1:4]
    assert [row.split("|")[1].index("*") for row in rows] == sorted(row.split("|")[1].index("*") for row in rows)
    assert rows[0].split("|")[1].startswith("*") and rows[2].endswith("*")


def test_a_single_point_and_a_flat_line_can_be_drawn(tmp_path):
    folder = write_run(tmp_path, iterations=1, timing=False)
    assert main([str(folder), "--output", str(tmp_path / "p.png"), "--text"]) == 0


def test_labels_are_the_shortest_ends_that_differ(tmp_path):
    paths = [tmp_path / "x" / "save", tmp_path / "y" / "save" / "metrics.jsonl"]
    assert run_labels(paths) == ["x/save", "y/save"]
    assert run_labels([tmp_path / "x", tmp_path / "y"]) == ["x", "y"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere", "--text"], 2, "nowhere: no metrics.jsonl there; give the folder of --save or --tensorboard-dir"),
        (["RUN"], 2, "give --output PICTURE, or --text"),
        (["RUN", "--text", "--labels", "a", "b"], 2, "--labels a b: 2 names for 1 run; give one name per run"),
        (["RUN", "--text", "--smooth", "-1"], 2, "--smooth: the half-life must not be negative"),
        (["EMPTY", "--text"], 2, "no record in it yet"),
    ],
)
def test_wrong_use_is_rejected_in_one_line(tmp_path, capsys, arguments, code, message):
    write_run(tmp_path / "RUN")
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "EMPTY" / "metrics.jsonl").touch()
    arguments = [str(tmp_path / argument) if argument in ("RUN", "EMPTY") else argument for argument in arguments]
    try:
        assert main(arguments) == code
    except SystemExit as refusal:
        assert refusal.code == code
    assert message in capsys.readouterr().err


def test_without_matplotlib_the_error_names_the_remedy(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([str(write_run(tmp_path)), "--output", str(tmp_path / "p.png")]) == 2
    assert "pip install matplotlib, or use --text" in capsys.readouterr().err


def test_pictures_are_readable_at_1200_pixels(tmp_path, monkeypatch):
    """Long names and a spike: no text leaves the picture, the legend covers no panel, the norm keeps its range."""
    from matplotlib import pyplot

    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    names = ["a-run-with-a-very-long-name-of-all-its-settings-0.1", "another-run-with-a-very-long-name-of-settings-0.2"]
    for name in names:
        file = MetricsFile(tmp_path / name / "metrics.jsonl")
        for i in range(1, 101):
            step = StepMetrics(losses={"lm loss": 2 + 8 / i}, num_tokens=100, learning_rate=1e-3, global_batch_size=4,
                               grad_norm=500.0 if i == 50 else 1.0 + i % 3)  # fmt: skip
            file.append(TRAIN.record(i, 4 * i, train_values(step)))
        file.flush()
    assert main([*(str(tmp_path / name) for name in names), "--output", str(tmp_path / "p.png"), "--smooth"]) == 0
    assert int.from_bytes((tmp_path / "p.png").read_bytes()[16:20], "big") == 1200
    figure = pyplot.gcf()
    canvas, (legend,) = figure.canvas.get_renderer(), figure.legends
    boxes = [axes.get_tightbbox(canvas) for axes in figure.axes]
    assert not any(legend.get_window_extent(canvas).overlaps(box) for box in boxes)
    assert not any(one.overlaps(other) for i, one in enumerate(boxes) for other in boxes[:i])
    assert all(box.x0 >= 0 and box.x1 <= 1200 and box.y0 >= 0 for box in boxes)
    (norm,) = (axes for axes in figure.axes if axes.get_ylabel() == "gradient norm")
    assert norm.get_ylim()[1] < 10 and norm.get_title(loc="right") == "2 values above 9, largest 500"
    assert max(line.get_ydata().max() for line in norm.lines if "smoothed" in line.get_label()) < 4
