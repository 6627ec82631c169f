"""Time and cost of the dry run: the slowest measured row of the axes in use decides, on all ranks."""

import re

import pytest

from megatron.training.report import rates
from megatron.training.report.dry_run import dry_run_report
from megatron.training.report.plan.search import apply
from megatron.training.report.rates import MeasuredRate, cost_rows, measured_rates, nearest_rate
from tests.test_utils import planner_definition as planner
from tests.unit_tests.training.report.plan.test_plan import settings

MODEL = (
    "--num-layers 8 --hidden-size 2048 --num-attention-heads 16 --seq-length 4096 --max-position-embeddings 4096"
    " --vocab-size 32000 --global-batch-size 32 --untie-embeddings-and-output-weights --disable-bias-linear"
    " --attention-dropout 0"
)
TP4, PP2, CP2 = (
    "--tensor-model-parallel-size 4", "--pipeline-model-parallel-size 2", "--context-parallel-size 2",
)  # fmt: skip
FP8 = "--fp8-format hybrid --fp8-recipe tensorwise"
TABLE = [
    MeasuredRate("one-slow", "dense", {}, 500.0, "GPU"),
    MeasuredRate("one", "dense", {}, 600.0, "GPU"),
    MeasuredRate("tp2", "dense", {"tp": 2}, 560.0, "GPU"),
    MeasuredRate("tp4", "dense", {"tp": 4}, 450.0, "GPU"),
    MeasuredRate("tp8", "dense", {"tp": 8}, 300.0, "GPU"),
    MeasuredRate("pp2", "dense", {"pp": 2}, 550.0, "GPU"),
    MeasuredRate("tp2-pp2", "dense", {"tp": 2, "pp": 2}, 100.0, "GPU"),
    MeasuredRate("fp8", "dense, fp8 tensorwise", {}, 900.0, "GPU"),
    MeasuredRate("fp8-tp2", "dense, fp8 tensorwise", {"tp": 2}, 50.0, "GPU"),
    MeasuredRate("experts", "experts", {}, 10.0, "GPU"),
]


def resolved(flags, ranks):
    cfg = apply(settings(f"{MODEL} {flags}"), {}, ranks)
    assert not isinstance(cfg, str), cfg
    return cfg


@pytest.mark.parametrize(
    "flags, ranks, row, tflops",
    [
        ("", 8, "one", 600.0),  # the fastest without axes
        (TP4, 8, "tp4", 450.0),  # the largest that does not exceed 4
        ("--tensor-model-parallel-size 2", 8, "tp2", 560.0),
        (PP2, 8, "pp2", 550.0),
        (f"{TP4} {PP2}", 8, "tp4", 450.0),  # the slowest of both axes; rows of two axes do not count
        (f"--tensor-model-parallel-size 2 {PP2}", 8, "pp2", 550.0),
        (CP2, 8, "one", 600.0),  # an axis without a row
        (FP8, 8, "one, fp8", 900.0),
        (f"{TP4} {FP8}", 8, "tp4, fp8", 450.0 * 900 / 600),
    ],
)
def test_the_slowest_row_of_the_used_axes_is_the_nearest(monkeypatch, flags, ranks, row, tflops):
    monkeypatch.setattr(rates, "measured_rates", lambda: TABLE)
    nearest = nearest_rate(resolved(flags, ranks))
    assert (nearest.row, nearest.tflops) == (row, pytest.approx(tflops))


def numbers(text):
    return [float(number.replace(",", "")) for number in re.findall(r"[\d,]*\.?\d+(?:e[+-]?\d+)?", text)]


@pytest.mark.parametrize(
    "flags, ranks, tflops, more",
    [
        ("", 8, 600.0, 1.0), (TP4, 16, 450.0, 1.0), (f"{TP4} {PP2}", 32, 450.0, 1.0),
        (f"{TP4} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 16, 450.0, 4 / 3),
    ],
)  # fmt: skip
def test_time_of_a_dry_run_is_all_flops_over_the_rate_of_all_ranks(monkeypatch, flags, ranks, tflops, more):
    monkeypatch.setattr(rates, "measured_rates", lambda: TABLE)
    cfg, samples = resolved(flags, ranks), 500_000_000
    flops = planner.dense_flops_per_token(8, 2048, 8192, 16, 16, 128, 4096, 32000, gated=False)
    rows = dict(cost_rows(cfg, flops * 4096 * 32, samples))
    seconds = flops * 4096 * 32 * more / (ranks * tflops * 1e12)
    assert numbers(rows["time per iteration"])[:2] == pytest.approx([seconds, tflops], rel=6e-3)
    assert ("x 4/3 for full recomputation" in rows["time per iteration"]) == (more > 1)
    hours = seconds * samples / 32 / 3600
    assert hours > 48 and "days" in rows["full run"]
    assert numbers(rows["full run"]) == pytest.approx([hours / 24, hours * ranks], rel=6e-3)


@pytest.mark.parametrize("samples, unit", [(30_000, "min"), (4_000_000, "hours"), (500_000_000, "days")])
def test_the_full_run_of_a_report_is_computed_from_its_iterations(monkeypatch, samples, unit):
    """The report multiplies the FLOPs of a global batch; --train-iters and --train-samples are the same run."""
    monkeypatch.setattr(rates, "measured_rates", lambda: TABLE)
    flops = planner.dense_flops_per_token(8, 2048, 8192, 16, 16, 128, 4096, 32000, gated=False) * 4096 * samples
    hours = flops / (16 * 450.0e12) / 3600
    expected = {"min": hours * 60, "hours": hours, "days": hours / 24}[unit]
    cfg = resolved(TP4, 16).with_settings(train_iters=samples // 32)
    (row,) = (line for line in dry_run_report(cfg).splitlines() if line.startswith("  full run"))
    printed, unit_shown, gpu_hours = re.search(r"([\d,.]+) (\w+), ([\d,.e+]+) GPU-hours", row).groups()
    assert unit_shown == unit
    assert float(printed.replace(",", "")) == pytest.approx(expected, rel=6e-3)
    assert float(gpu_hours.replace(",", "")) == pytest.approx(16 * hours, rel=6e-3)


KIMI, DELTA = {"experimental_attention_variant": "kda"}, {"experimental_attention_variant": "gdn"}


@pytest.mark.parametrize("change", [{"bf16": False}, KIMI, {**DELTA, "num_moe_experts": 8}])
def test_runs_in_32_bits_and_recurrences_that_were_never_measured_have_no_rate(change):
    assert nearest_rate(resolved("", 8).with_settings(**DELTA)).row == "gdn-s32768"
    cfg = resolved("", 8).with_settings(**change)
    assert nearest_rate(cfg) is None and "not measured" in dict(cost_rows(cfg, 1e15, 1000))["time"]


def test_measured_rates_do_not_predict_unfused_attention():
    """Two LLaMA-3-8B layers of 8,192 tokens on an H200 take 0.79 s with a dropout of 0.1 and 0.114 s without."""
    cfg = resolved("--attention-dropout 0.1", 8)
    assert dict(cost_rows(cfg, 1e15, 1000)) == {
        "time": "not measured with unfused attention (--attention-dropout): only predicted, below"
    }


def test_packaged_rates_hold_a_row_without_axes_for_every_kind():
    kinds = {rate.kind for rate in measured_rates()}
    assert {rate.kind for rate in measured_rates() if not rate.axes} == kinds
    assert all(100 < rate.tflops < 989 for rate in measured_rates())


@pytest.mark.parametrize("flags, kind", [
    ("--hidden-size 1536", "small"), ("--hidden-size 1552", "dense"),
    ("--num-experts 4 --moe-ffn-hidden-size 4096", "experts"),
    ("--num-experts 4 --moe-ffn-hidden-size 4064", "fine experts"),
    (FP8, "dense, fp8 tensorwise"), ("--fp8-format hybrid", "dense, fp8 delayed"),
])  # fmt: skip
def test_models_have_the_kind_of_the_measured_rows_with_their_sizes(flags, kind):
    assert rates.model_kind(resolved(flags, 8)) == kind


@pytest.mark.parametrize("hours, text", [
    (0.5, "30 min"), (0.999, "59.9 min"), (1, "1 hours"), (47.9, "47.9 hours"), (48, "2.0 days"),
    (24000, "1,000.0 days"),
])  # fmt: skip
def test_durations_have_the_unit_of_their_size(monkeypatch, hours, text):
    monkeypatch.setattr(rates, "measured_rates", lambda: TABLE)
    flops = 8 * 600.0e12 * 3600  # of an hour
    assert dict(cost_rows(resolved("", 8), flops, hours * 32))["full run"].startswith(f"{text}, ")
