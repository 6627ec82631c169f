"""The page about a run: figures and ids, damaged and missing files, hostile texts, speed; read by an HTML parser."""

import json
import math
import re
from html import escape
from html.parser import HTMLParser

import pytest

from megatron.console import run_tool
from megatron.core.config.errors import UserError
from megatron.training.observe.page.charts import Chart, Frame, Line, draw, short, thinned, ticks
from megatron.training.observe.page.comparison import first_difference
from megatron.training.observe.page.page import build_page, write_page
from megatron.training.observe.run_folder import Series, read_run

VOID = {"meta", "br", "line", "path", "img"}
NOW = 2e9
HOSTILE = "<script>alert('x')</script>\"><img src=x onerror=alert(1)>"


class Page(HTMLParser):
    """Elements by id with their text, counts of tags, and whether every tag is closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.by_id, self.tags, self.attributes, self.bad = [], {}, [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.tags.append(tag)
        self.attributes.append((tag, values))
        if "id" in values:
            assert values["id"] not in self.by_id, f"the id {values['id']} occurs twice"
            self.by_id[values["id"]] = ""
        if tag not in VOID:
            self.open.append((tag, values.get("id")))

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop()[0] != tag:
            self.bad.append(tag)

    def handle_data(self, data):
        for _, key in self.open:
            if key is not None:
                self.by_id[key] += data


def write(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def train(i, **values):
    return {
        "kind": "train",
        "iteration": i,
        "consumed_samples": 4 * i,
        "lm loss": 2 + 8 / i,
        "learning_rate": 1e-3,
        "global_batch_size": 4,
        "num_tokens": 100,
        "grad_norm": 1.0,
        "skipped": False,
        "nan": False,
    } | values


def timing(i, **values):
    memory = {"mem-max-allocated-bytes": 3 << 30}
    return {
        "kind": "timing",
        "iteration": i,
        "consumed_samples": 4 * i,
        "time": NOW - 1000 + i,
        "iterations": 10,
        "seconds_per_iteration": 0.5,
        "tokens_per_second": 1234.0,
        "tflops_per_device": 400.0,
        "mfu": 0.4,
        "world_size": 2,
        "device": "NVIDIA H100",
        "memory": memory,
        "parts_seconds": {"update": 0.1},
    } | values


def start(i=0, **values):
    return {
        "kind": "start",
        "iteration": i,
        "consumed_samples": 4 * i,
        "time": NOW - 1000,
        "train_iters": 100,
        "world_size": 2,
        "settings": {"lr": 1e-3, "seq_length": 8},
        "environment": {"torch": "2.x"},
    } | values


def end(i, ending="finished", reason="training is complete", **values):
    return {
        "kind": "end",
        "iteration": i,
        "consumed_samples": i,
        "time": NOW - 900,
        "ending": ending,
        "reason": reason,
    } | values


def sample(i, text, number=1, prompt="Once", **values):
    return {
        "kind": "sample",
        "iteration": i,
        "consumed_samples": 4 * i,
        "number": number,
        "prompt": prompt,
        "text": text,
    } | values


def write_run(folder, times=None, metrics=None):
    records = [train(i) for i in range(1, 101)]
    records.insert(50, {"kind": "valid", "iteration": 50, "consumed_samples": 200, "lm loss": 2.5, "dataset": "wiki"})
    write(folder / "metrics.jsonl", records if metrics is None else metrics)
    write(
        folder / "timing.jsonl",
        [start(), *(timing(i) for i in range(10, 101, 10)), end(100)] if times is None else times,
    )
    return folder


def page_of(folder, **options):
    page = Page(build_page(read_run(folder, NOW, **options)))
    assert not page.bad and not page.open, (page.bad, page.open)
    return page


def test_the_page_has_the_figures_of_the_run(tmp_path):
    page = page_of(write_run(tmp_path / "run"))
    assert page.by_id["status"] == "finished" and page.by_id["reason"] == "training is complete"
    figures = page.by_id["figures"]
    for text in ("100 of 100", "samples400", "2.5000 at 50", "1.234k", "40.0%", "3.00 GiB"):
        assert text in figures, (text, figures)
    assert {"losses", "speed", "timeline", "time", "settings", "versions", "chart-lm-loss"} <= page.by_id.keys()
    assert "seq_length8" in page.by_id["settings"] and "torch2.x" in page.by_id["versions"]
    assert "validation-wiki" in page.by_id["chart-lm-loss"]
    assert "problems" not in page.by_id and "plan" not in page.by_id


def test_the_page_is_one_file_and_works_without_scripts(tmp_path):
    page = page_of(write_run(tmp_path))
    names = {"src", "href", "srcset", "data", "action"}
    assert not [values for _, values in page.attributes if names & values.keys()]
    assert page.tags.count("svg") >= 6
    policy = next(values["content"] for tag, values in page.attributes if "http-equiv" in values)
    assert "default-src 'none'" in policy and re.search(r"script-src 'sha256-[\w+/=]+'", policy)


def test_texts_of_the_run_are_escaped(tmp_path):
    settings = {"save": HOSTILE, HOSTILE: [HOSTILE]}
    times = [start(settings=settings, environment={"host": HOSTILE}), end(1, "failed", HOSTILE)]
    record = train(1, **{f"{HOSTILE} loss": 1.0}, statistics={f"{HOSTILE}/norm": 1.0})
    valid = {"kind": "valid", "iteration": 1, "consumed_samples": 4, "lm loss": 2.5, "dataset": HOSTILE}
    folder = write_run(tmp_path / "<b>run", times, [record, valid])
    log = tmp_path / "log"
    log.write_text(f"error: {HOSTILE}\n")
    page = page_of(folder, log=log)
    assert page.tags.count("script") == 1 and "img" not in page.tags and "b" not in page.tags[:8]
    assert not [values for _, values in page.attributes if any(name.startswith("on") for name in values)]
    assert page.by_id["reason"] == HOSTILE and HOSTILE in page.by_id["log"] and HOSTILE in page.by_id["settings"]


def test_damaged_lines_and_missing_files_are_one_line_each(tmp_path):
    folder = write_run(tmp_path)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('not json\n{"kind": 3, "iteration": 5}\n[1]\n{"kind": "train", "iteration": 101, "lm lo')
    (folder / "timing.jsonl").unlink()
    page = page_of(folder)
    assert "metrics.jsonl: 3 unreadable lines skipped" in page.by_id["problems"]
    assert "timing.jsonl: missing" in page.by_id["problems"]
    assert "100" in page.by_id["figures"]


@pytest.mark.parametrize("value", ["x", None, [1], {"a": 1}, True, "nan", 1e308])
def test_values_of_other_types_do_not_end_the_page(tmp_path, value):
    def changed(record):
        return [{**record, key: value} for key in record if key not in ("kind", "iteration")]

    times = [start(), *changed(start()), timing(10), *changed(timing(10)), end(10), *changed(end(10))]
    plan = {"kind": "plan", "iteration": 9, "predicted_seconds": 1.0, "measured_seconds": 2.0, "parts_seconds": {}}
    saves = [
        {"kind": kind, "iteration": 9, "seconds": value, "bytes": value, "stall_seconds": value, "time": value}
        for kind in ("save", "evaluation")
    ]
    metrics = [train(1), *changed(train(2)), train(3, statistics={"a/b": value})]
    page_of(write_run(tmp_path, [*times, *saves, *changed(plan)], metrics))


def test_a_run_that_is_still_written_is_running_until_its_files_are_silent(tmp_path):
    folder = write_run(tmp_path, [start(), timing(10)])
    changed = (folder / "timing.jsonl").stat().st_mtime
    assert read_run(folder, changed + 60).status == "running"
    silent = read_run(folder, changed + 3600)
    assert silent.status == "silent" and "no end was recorded" in silent.reason
    assert Page(build_page(silent)).by_id["status"] == "no end recorded"


def test_the_timeline_shows_restarts_rollbacks_failures_and_skipped_iterations(tmp_path):
    times = [
        start(),
        timing(10),
        end(20, "stopped", "SIGTERM"),
        start(20, settings={"lr": 2e-3, "seq_length": 8}),
        timing(30),
        {"kind": "save", "iteration": 30, "bytes": 5e9, "seconds": 2.0, "stall_seconds": 1.0},
        {"kind": "evaluation", "iteration": 30, "seconds": 4.0},
        start(40),
    ]
    folder = write_run(tmp_path, times, [train(i, skipped=i == 7, nan=i == 7) for i in range(1, 61)])
    write(folder / "metrics.jsonl.cut-40", [train(i) for i in range(41, 49)])
    write(folder / "timing.jsonl.cut-40", [timing(45, iterations=5), end(48, "failed", "RuntimeError: no memory")])
    run = read_run(folder, NOW)
    kinds = [(event.iteration, event.kind) for event in run.events]
    assert kinds == [
        (0, "start"),
        (7, "skipped"),
        (7, "NaN"),
        (20, "end"),
        (20, "restart"),
        (30, "save"),
        (30, "evaluation"),
        (40, "restart"),
        (40, "rollback"),
        (48, "failure"),
    ]
    texts = {event.kind: event.text for event in run.events}
    restart = next(event for event in run.events if event[:2] == (20, "restart"))
    assert restart.text == "2 ranks; changed settings: lr 0.001 -> 0.002"
    assert texts["rollback"] == "8 iterations up to 48 computed again"
    assert "recorded no end" not in texts["restart"] and texts["failure"] == "RuntimeError: no memory"
    assert run.seconds == {"iterations": 10.0, "checkpoint saving": 1.0, "evaluation": 4.0, "repeated iterations": 2.5}
    assert "timeline" in page_of(folder).by_id


def test_a_restart_after_a_kill_says_that_no_end_was_recorded(tmp_path):
    run = read_run(write_run(tmp_path, [start(), timing(10), start(10)]), NOW)
    assert run.events[-1].text == "2 ranks; the process before recorded no end"


@pytest.mark.parametrize(("seconds", "verdict"), [(0.5, "slower than planned"), (0.42, "as planned")])
def test_plan_and_measurement_are_compared(tmp_path, seconds, verdict):
    prediction = {"gpu": "H100", "seconds": 0.4, "error": 0.03, "parts": {"GEMM": 0.3, "data communication": 0.1}}
    parts = {"forward and backward": {"predicted": 0.3, "measured": 0.42}}
    plan = {
        "kind": "plan",
        "iteration": 30,
        "predicted_seconds": 0.4,
        "measured_seconds": seconds,
        "limit_seconds": 0.43,
        "parts_seconds": parts,
    }
    page = page_of(write_run(tmp_path, [start(prediction=prediction), timing(10), plan]))
    assert page.by_id["verdict"] == verdict
    for text in ("Predicted on H100: 0.4 s", "forward and backward0.30.42", "exposed communication 0.1 s"):
        assert text in page.by_id["plan"], page.by_id["plan"]


def test_settings_of_the_last_checkpoint_follow_those_that_were_given(tmp_path):
    folder = write_run(tmp_path)
    (folder / "latest_checkpointed_iteration.txt").write_text("100")
    write(folder / "iter_0000100" / "metadata.json", [{"objects": {"args": {"lr": 1e-3, "adam_eps": 1e-8}}}])
    text = page_of(folder).by_id["settings"]
    assert text.index("seq_length") < text.index("adam_eps") and "1 other settings" in text


def test_experts_and_layers_have_charts(tmp_path):
    statistics = {
        f"layer {n}/{name}": 1.0 * n
        for n in range(1, 21)
        for name in ("tokens_per_expert entropy", "tokens_per_expert max", "grad_norm", "z_loss")
    }
    page = page_of(write_run(tmp_path, metrics=[train(i, statistics=statistics) for i in range(1, 9)]))
    assert "layer 1 " in page.by_id["chart-experts-entropy"] and "layer 20 " in page.by_id["chart-experts-entropy"]
    assert page.by_id["chart-layers-grad-norm"].count("layer ") == 8
    assert {"experts", "layers", "chart-layers-z-loss", "chart-grad-norm"} <= page.by_id.keys()


def test_a_spike_of_a_layer_does_not_flatten_the_others(tmp_path):
    values = [1.0] * 39 + [1e6]
    metrics = [train(i, statistics={"layer 1/grad_norm": value}) for i, value in enumerate(values, 1)]
    page = page_of(write_run(tmp_path, metrics=metrics))
    assert "1 above 3, largest 1M" in page.by_id["chart-layers-grad-norm"]


def test_long_runs_keep_their_extremes_on_a_small_page(tmp_path):
    with open(tmp_path / "metrics.jsonl", "w") as file:
        line = json.dumps(train(1))
        for i in range(1, 100_001):
            file.write(line.replace('"iteration": 1', f'"iteration": {i}') + "\n")
        file.write(json.dumps(train(100_001, **{"lm loss": 77.0})) + "\n")
    run = read_run(tmp_path, NOW)
    text = build_page(run)
    assert len(text) < 400_000 and run.iteration == 100_001
    assert max(thinned(run.train["lm loss"]).y) == 77.0


def test_statistics_of_long_runs_are_read_at_intervals(tmp_path):
    statistics = {f"layer {n}/grad_norm": 1.0 for n in range(5)}
    write(tmp_path / "metrics.jsonl", [train(i, statistics=statistics) for i in range(1, 5001)])
    run = read_run(tmp_path, NOW)
    assert len(run.train["lm loss"].y) == 5000
    assert 900 <= len(run.statistics["layer 0/grad_norm"].y) <= 1300


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no metrics.jsonl there"), ("", "no record in it yet"), ("{}\n", "no record in it yet")],
)
def test_a_folder_without_a_run_is_one_message(tmp_path, capsys, content, message):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(UserError, match=message):
        write_page(tmp_path, tmp_path / "report.html")
    assert run_tool("report", [str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1 and not (tmp_path / "report.html").exists()


def test_the_command_writes_the_page(tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    assert run_tool("report", [str(folder)]) == 0
    assert capsys.readouterr().out == f"wrote {folder / 'report.html'}\n"
    assert run_tool("report", [str(folder / "metrics.jsonl"), "--output", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    capsys.readouterr()
    assert run_tool("report", [str(folder), "--output", str(tmp_path / "missing" / "page.html")]) == 2
    problem = f"there is no folder {tmp_path / 'missing'}; create it, or correct the path"
    assert capsys.readouterr().err == f"error: --output {tmp_path / 'missing' / 'page.html'}: {problem}\n"


@pytest.mark.parametrize("values", [[1.0], [2.0, 2.0], [math.nan, 1.0, math.inf], [0.0, 0.0], [1e-300, 1e300]])
def test_charts_of_any_values_have_finite_places(values):
    text = draw(Chart("c", "title", [Line("a", Series(list(range(1, len(values) + 1)), values))]), (1, 3))
    assert "nan" not in text and "inf" not in text.replace("infinite", "")
    assert ("are NaN or infinite" in text) == (not all(map(math.isfinite, values)))


def test_a_chart_without_finite_values_is_not_drawn():
    assert draw(Chart("c", "title", [Line("a", Series([1], [math.nan]))]), (1, 3)) == ""


def test_points_are_placed_by_their_values():
    frame = Frame((0.0, 10.0), (0.0, 4.0))
    assert frame.place(5, 1.0) == (500.0, 225.0)
    assert frame.place(10, 9.0) == (1000.0, 0.0)  # above the axis


@pytest.mark.parametrize(("low", "high"), [(0, 1), (3.1, 3.2), (-5, 120_000), (1e-9, 3e-9)])
def test_ticks_are_few_round_numbers_in_the_range(low, high):
    result = ticks(low, high)
    assert 2 <= len(result) <= 6 and all(low - 1e-12 <= item <= high * (1 + 1e-9) for item in result)


@pytest.mark.parametrize(
    ("high", "step"), [(1, 0.2), (2.4, 0.5), (4.9, 1), (9, 2), (24, 5), (49, 10), (99, 20), (490, 100)]
)
def test_ticks_are_multiples_of_1_2_or_5_times_a_power_of_ten(high, step):
    assert ticks(0, high) == pytest.approx([step * number for number in range(int(high / step + 1e-9) + 1)])


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (1234, "1.234k"), (2.5e9, "2.5G"), (2e-5, "2e-05"), (0.25, "0.25"), (-3e6, "-3M")]
)
def test_numbers_are_short(value, text):
    assert short(value) == text


def test_texts_of_a_prompt_are_spread_over_the_run_and_escaped(tmp_path):
    many = [sample(i, f" text {i}") for i in range(1, 101)]
    other = [sample(5, HOSTILE, 2, HOSTILE), sample(7, "nan", 2), sample(7, "again", 2), sample(9, 3, 2)]
    folder = write_run(tmp_path, metrics=[train(1), *many, *other])
    page = page_of(folder)
    text = page.by_id["samples"]
    printed = [int(item) for item in re.findall(r"iteration (\d+)Once text", text)]
    assert printed == [1, 15, 29, 43, 58, 72, 86, 100] and "8 of 100 samples" in text
    assert f"iteration 5{HOSTILE}{HOSTILE}" in text and not page.bad
    assert text.endswith("iteration 7Onceagain") and text.count("iteration 7Once") == 1  # the later text replaces it


@pytest.mark.parametrize(
    "settings, title",
    [
        ({"save": "runs/story/checkpoints", "num_layers": 4, "hidden_size": 192}, "story: 4 layers of 192"),
        ({"save": "./Weights/ckpt/", "model": "llama3-8b", "num_layers": 32}, "trained: llama3-8b"),
        ({"save": "/data/run-7", "load_hf": "/hub/Qwen3-0.6B/", "hidden_size": 1024}, "run-7: Qwen3-0.6B"),
        ({"save": "a<b", "num_layers": 1, "hidden_size": 8, "num_experts": 16}, "a<b: 1 layer of 8, 16 experts"),
        ({"save": 7, "num_layers": "x"}, "trained"),
        ({}, "trained"),
    ],
)
def test_title_is_the_run_name_and_the_model(tmp_path, settings, title):
    folder = write_run(tmp_path / "trained" / "checkpoints", [start(settings=settings), timing(10), end(100)])
    text = build_page(read_run(folder, NOW))
    assert re.search("<title>(.*?)</title>", text)[1] == re.search("<h1>(.*?)</h1>", text)[1] == escape(title)


def test_rates_of_gpus_are_absent_on_a_cpu(tmp_path):
    rates = {"tokens_per_second": 900.0, "tflops_per_device": 0.006, "mfu": 0.001}
    for device, shown in (("CPU", False), ("NVIDIA H200", True)):
        times = [start(), timing(10, device=device, memory={"mem-max-allocated-bytes": 0}, **rates), end(100)]
        page = page_of(write_run(tmp_path / device, times))
        assert ("TFLOP/s" in page.by_id["figures"]) is ("MFU" in page.by_id["figures"]) is shown, page.by_id["figures"]
        assert ("chart-tflops-per-device" in page.by_id) is shown and "chart-tokens-per-second" in page.by_id
        assert "tokens/s, median900" in page.by_id["figures"] and "0.00 GiB" not in page.by_id["figures"]


def test_cut_texts_are_marked(tmp_path):
    texts = [sample(1, " whole"), sample(2, " part", cut=True), sample(3, "x" * 4001), sample(4, "y" * 4000)]
    page = page_of(write_run(tmp_path, metrics=[train(1), *texts]))
    parts = page.by_id["samples"].split("iteration ")[1:]
    assert parts[0] == "1Once whole" and parts[1] == "2Once part … cut at --sample-tokens"
    assert parts[2] == f"3Once{'x' * 4000} … 4,000 of 4,001 characters" and parts[3] == f"4Once{'y' * 4000}"


def write_pair(folder):
    """Two runs of 100 iterations, equal up to iteration 60 and with another rate; the second one failed."""
    write_run(folder / "a")
    metrics = [train(i, **({"lm loss": 3.5} if i >= 61 else {})) for i in range(1, 101)]
    times = [start(settings={"lr": 2e-3, "seq_length": 8}), timing(10, mfu=0.2), end(100, "failed", "no memory")]
    write_run(folder / "b", times, metrics)
    return [str(folder / "a"), str(folder / "b")]


def test_two_runs_are_compared_on_the_terminal_and_on_a_page(tmp_path, capsys):
    paths, output = write_pair(tmp_path), tmp_path / "both.html"
    assert run_tool("report", [*paths, "--output", str(output)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line[:30].rstrip(): line[30:].split() for line in lines}
    text = "\n".join(lines)
    assert lines[0].split() == ["a", "b"] and rows["status"] == ["finished", "failed"], rows
    assert re.search(r"^MFU, median +40.0% +20.0%$", text, re.MULTILINE), text
    after = lines[lines.index("settings that differ") + 1 :]
    assert after[0].split() == ["lr", "0.001", "0.002"] and after[1] == ""
    expected = f"the first difference is in iteration 61: lm loss {2 + 8 / 61!r} and 3.5"
    assert after[2] == f"a and b: {expected}" and lines[-1] == f"wrote {output}"
    page = Page(output.read_text())
    assert not page.bad and expected in page.by_id["comparison"]
    legend = page.by_id["chart-lm-loss"]
    assert "a: training" in legend and "b: training" in legend and "b: validation-wiki" not in legend
    assert {"losses", "speed"} <= page.by_id.keys() and "samples" not in page.by_id


def test_equal_runs_have_no_difference_and_nan_equals_nan(tmp_path):
    """However many samples the iterations have consumed: a run may have begun with the data of another one."""
    for name, consumed in {"a": 4, "b": 44}.items():
        records = [train(1), train(2, **{"lm loss": "nan"}, consumed_samples=consumed)]
        write(tmp_path / name / "metrics.jsonl", records)
    runs = [read_run(tmp_path / name, NOW) for name in ("a", "b")]
    assert first_difference(*runs) == "no value differs in 2 common iterations"


def test_a_log_belongs_to_a_single_run(tmp_path, capsys):
    with pytest.raises(SystemExit) as ending:
        run_tool("report", [*write_pair(tmp_path), "--log", "out.log"])
    assert ending.value.code == 2
    assert "--log out.log: requires a single run; remove it" in capsys.readouterr().err
