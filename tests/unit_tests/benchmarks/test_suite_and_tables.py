"""The suite of GPU measurements, the comparison of loss curves, and the page made from results."""

import json
import math
import re
import sys

import pytest

from benchmarks import bench_training, gpu_suite, loss_curves, tables
from benchmarks.harness import environment, page_figures


def item(code, seconds=1, gpus=0, limit=20):
    return gpu_suite.Item(("-c", code), seconds, gpus, limit)


def test_suite_runs_rows_that_fit_and_skips_finished_rows(tmp_path, capsys):
    plan = {
        "good": item("print('fine')"),
        "bad": item("raise SystemExit(3)"),
        "slow": item("while True: pass", limit=1),
        "large": item("", seconds=1000),
        "four": item("", gpus=4),
    }
    finished = gpu_suite.suite(plan, tmp_path, budget=30, devices=1)
    assert json.loads((tmp_path / "suite.json").read_text()) == finished
    ended = {name: entry["ended"] for name, entry in finished.items()}
    assert (ended["good"], ended["bad"], ended["slow"]) == ("ok", "exit code 3", "stopped at its limit")
    assert ended["large"].startswith("not run: about 1000 s") and ended["four"].startswith("not run: needs 4 GPUs")
    assert finished["good"]["output"] == "fine\n"
    assert list(tmp_path.iterdir()) == [tmp_path / "suite.json"]
    repeated = gpu_suite.suite({"good": item("raise SystemExit(1)")}, tmp_path, budget=30, devices=1)
    assert repeated["good"]["ended"] == "ok" and "done before" in capsys.readouterr().out
    assert "exit code 3" in gpu_suite.summary(finished, list(plan))


def test_command_line_runs_named_rows_into_the_folder(tmp_path, capsys, monkeypatch):
    words = ["gpu_suite.py", "--only", "row:one", "row:dp4+te", "--budget", "20", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", words)
    assert gpu_suite.main() == 0
    assert list(json.loads((tmp_path / "out" / "suite.json").read_text())) == ["row:one", "row:dp4+te"]
    assert "not run" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["gpu_suite.py", "--min-gpus", "4", "--list"])
    assert gpu_suite.main() == 0
    assert "row:dp4 " in (listed := capsys.readouterr().out) and "row:one " not in listed


def test_items_are_known_by_name_and_any_row_with_variants_is_one():
    registered = gpu_suite.items(2)
    tests = ["tests:kernels", "tests:core", "tests:rest"]
    assert list(registered)[:5] == [*tests, "ceilings", "row:one"]
    plan = gpu_suite.chosen(["row:dp4+te", "tests"], 1)
    assert list(plan) == ["row:dp4+te", *tests] and plan["row:dp4+te"].gpus == 4
    for name in ("nothing", "row:nothing", "row:one+nothing"):
        with pytest.raises(ValueError, match="there are"):
            gpu_suite.chosen([name], 1)


def test_rows_are_merged_in_the_order_of_the_table(tmp_path):
    path = tmp_path / "training.json"
    for name, device in (("dp4", "X"), ("one+te", "X"), ("one", "X"), ("one", "Y"), ("one", "X")):
        bench_training.merge(path, name, {"environment": {"device": device}})
    assert list(json.loads(path.read_text())["rows"]) == ["one", "one on Y", "one+te", "dp4"]
    assert bench_training.stored_name("one", ["--attention-backend", "flash"]) == "one+flash"
    assert bench_training.stored_name("one", ["--lr", "1"]) == "one+--lr 1"
    assert "failed: died" in bench_training.line("one", {"error": "died"})


def test_a_newer_measurement_replaces_a_row_and_keeps_a_profile_until_there_is_another(tmp_path):
    path = tmp_path / "training.json"

    def stored(tflops, commit, **profile):
        record = {"device": "H", "commit": commit}
        bench_training.merge(path, "one", {"tflops_per_gpu": tflops, "environment": record, **profile})
        row = json.loads(path.read_text())["rows"]["one"]
        return row["tflops_per_gpu"], row.get("profile"), row.get("profiled_at")

    assert stored(1.0, "a") == (1.0, None, None)
    assert stored(2.0, "b", profile={"x": 1}) == (2.0, {"x": 1}, None)
    assert stored(3.0, "c") == stored(3.0, "d") == (3.0, {"x": 1}, "b")
    assert stored(4.0, "e", profile={"x": 2}) == (4.0, {"x": 2}, None)


def curve(losses, tokens="a"):
    return {"losses": losses, "grad_norms": [1.0] * len(losses), "tokens": tokens}


def test_loss_curves_are_compared_within_bands_bit_for_bit_or_not_at_all(tmp_path):
    falling = [5.0 - 0.02 * step for step in range(60)]
    near, far = [loss * 1.001 for loss in falling], [*falling[:30], *(loss * 1.05 for loss in falling[30:])]
    curves = {"cpu-fp32": curve(falling), "gpu-bf16": curve(near), "gpu-bf16-te": curve(far),
              "cpu-bf16": curve(falling, tokens="b"), "gpu-deterministic-1": curve(near),
              "gpu-deterministic-2": curve([*near[:-1], math.nextafter(near[-1], 9.0)])}  # fmt: skip
    result = {(row["reference"], row["other"]): row["passed"] for row in loss_curves.compare(curves)}
    assert result == {
        ("cpu-fp32", "gpu-bf16"): True, ("gpu-bf16", "gpu-bf16-te"): False, ("cpu-fp32", "gpu-deterministic-1"): True,
        ("gpu-deterministic-1", "gpu-deterministic-2"): False,
    }  # fmt: skip
    assert loss_curves.deviations(falling, near)["window"] == pytest.approx(0.001)
    path = tmp_path / "curves.json"
    path.write_text(json.dumps({"curves": curves}))
    retained = loss_curves.merged(path, {"gpu-bf16": curve(near)}, 60)["curves"]
    assert "cpu-fp32" in retained and "cpu-bf16" not in retained  # other tokens: another corpus


def test_clocks_are_those_of_a_busy_gpu():
    text = "345, 1980, 90.1, 700, 30, 0\n1700, 1980, 690, 700, 60, 100\n1720, 1980, 700, 700, 62, 99\n[N/A], 1, 1, 1\n"
    result = environment.busy_medians(text)
    assert result["sm_clock_mhz"] == 1710 and result["power_w"] == 695 and result["samples"] == 2
    assert environment.busy_medians("") == {}
    assert {"torch", "python", "device", "commit"} <= set(environment.environment(cpu=True))
    assert environment.output_of(sys.executable, "-c", "raise SystemExit(1)") is None


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_the_pages_are_up_to_date(page, python_without_torch, monkeypatch):
    monkeypatch.setattr(sys, "executable", python_without_torch)  # of dry runs of recipes
    text = page.read_text(encoding="utf-8")
    assert tables.page(text, page) == text, "run python benchmarks/tables.py"


def test_figures_are_replaced_by_results_and_patterns_match_once():
    results = {"side_by_side": {"rows": {"1 GPU": {"theirs": 1.4, "theirs_gb": 20, "ours": 1234.5, "ours_gb": 7}}}}
    page_figures.FIGURES["x.md"] = [(page_figures.SPEEDS_OF_ONE_GPU, page_figures.PAIR)]
    try:
        line = "| one H200 | 550 TFLOP/s, 107 GB | **585 TFLOP/s, 89 GB** |\n"
        filled = page_figures.filled("x.md", line, results.get)
        assert filled == "| one H200 | 1 TFLOP/s, 20 GB | **1234 TFLOP/s, 7 GB** |\n"
        for text in ("", line * 2):
            with pytest.raises(ValueError, match="x.md: [02] places match"):
                page_figures.filled("x.md", text, results.get)
    finally:
        del page_figures.FIGURES["x.md"]


OF_KERNELS = {"docs/STATUS.md": {770}, "docs/guides/kernels.md": {415, 200}, "docs/guides/optimizers.md": {670, 730},
              "docs/guides/rl.md": {350, 540}}  # fmt: skip
"""TFLOP/s of GEMMs and attention, which are no training runs."""


def speeds(results):
    """Return the rounded speeds of all runs in a result file."""
    if isinstance(results, list):
        return set().union(*map(speeds, results))
    if not isinstance(results, dict):
        return set()
    local = {round(results[key]) for key in ("tflops_per_gpu", "ours", "theirs") if results.get(key)}
    return local | speeds([*results.values()])


def test_every_speed_on_a_page_is_stored():
    """A figure that is typed by hand and differs from the stored one of the same run fails here."""
    stored = speeds([tables.stored(path.stem) for path in tables.RESULTS.glob("*.json")])
    for path in (page for pages in ("*.md", "docs/*.md", "docs/guides/*.md") for page in tables.ROOT.glob(pages)):
        name = path.relative_to(tables.ROOT).as_posix()
        shown = re.findall(r"((?:\d+ (?:/|to|and) )*)(\d+) TFLOP/s", path.read_text())
        figures = {int(figure) for row in shown for figure in re.findall(r"\d+", " ".join(row))}
        assert figures - stored - OF_KERNELS.get(name, set()) == set(), name


def test_cards_name_a_commit_and_no_check_failed():
    for path in (tables.RESULTS / "cards").glob("*.json"):
        card = json.loads(path.read_text())
        assert {check["verdict"] for check in card["checks"].values()} <= {"passed", "not applicable"}, path.name
        assert re.fullmatch("[0-9a-f]{40}", card["environment"]["commit"]), path.name


COMPUTED = ("training", "limits", "recipes")


def test_tables_show_every_kind_of_result(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    from_results = [render for name, render in tables.TABLES.items() if not name.startswith(COMPUTED)]
    assert all(render() == tables.NOTHING for render in from_results)
    row = {"command": "c", "repeats": 2, "tflops_per_gpu": 600.0, "tokens_per_second_per_gpu": 21000.0,
           "seconds_per_iteration": 3.0, "peak_memory_gb": 85.0, "invalid": None, "environment": {"device": "X"},
           "profile": {"launches": 7, "synchronizations": [], "device_to_host_copies": 1},
           "roofline": {"limit_ms": 1.0, "step_ms": 2.0, "rows": [
               {"class": "norm", "limit_ms": 1.0, "measured_ms": 2.0, "gap_ms": 1.0, "tflops": None,
                "tb_per_second": 2.0}]}}  # fmt: skip
    rows = {"one": row, "dp4": {**row, "invalid": "the loss did not fall"}, "tp4-sp": {"command": "c", "error": "died"}}
    (tmp_path / "training.json").write_text(json.dumps({"rows": rows}))
    steps = [{"kernel": "adam", "ms": 1.5, "us": [1, 2.5]}]
    (tmp_path / "optimizer.json").write_text(json.dumps({"device": "X", "rows": steps}))
    text = tables.training("training")
    assert "| `one` | 1 GPU, 16 layers, s 8192, batch 8 | 600.0 | 100% | 21,000 |" in text
    assert "`dp4`: the loss did not fall" in text and "`tp4-sp`: died" in text
    assert "| norm | 1 | 2 | 1 | – | 2 |" in tables.profiles()
    assert "| adam | 1.5 | 1 / 2.5 |" in tables.TABLES["optimizer"]()
    with pytest.raises(ValueError, match="no table 'x'"):
        tables.page("<!-- table: x -->\n<!-- end of table -->")


def test_rates_of_the_dry_run_are_the_measured_ones(capsys):
    from benchmarks import write_rates

    assert write_rates.main(["--check"]) == 0, "run python benchmarks/write_rates.py"
