"""The rows of the speed table are possible runs, and their limits count what the model's closed form counts."""

from collections import Counter

import pytest

from benchmarks.harness import jobs, roofline, rows
from benchmarks.harness import kernel_classes as kinds
from megatron.training.arguments import parse_args
from megatron.training.config.resolve import resolve
from megatron.training.report.advice import LIBRARIES_GIB, peak_memory
from megatron.training.rules.run_all import check

CEILINGS = roofline.load_ceilings()


def config_of(name, **how):
    row, _ = rows.split_name(name)
    words = [*rows.row_flags(name, **how), "--train-iters", "9"]
    return resolve(parse_args(words, model_family=row.family), row.gpus, gpus=True)


@pytest.mark.parametrize("name", rows.ROWS)
def test_rows_are_possible_also_when_they_are_small(name):
    for how in ({}, {"smoke": True}):
        assert check(config_of(name, **how)) == []


@pytest.mark.parametrize("name", rows.ROWS)
def test_rows_fit_into_the_memory_of_an_h200(name):
    cfg = config_of(name)
    assert peak_memory(cfg, cfg.tokenizer.vocab_size) / 2**30 + LIBRARIES_GIB < 139


def test_moonlight_has_the_published_numbers_of_parameters():
    """Its paper (arXiv:2502.16982) counts 15.29 billion without embeddings, and 2.24 billion active ones."""
    cfg = config_of("moonlight-ep8")
    model, embeddings = cfg.describe(cfg.tokenizer.vocab_size), 2 * 163840 * 2048
    assert round((model.num_parameters - embeddings) / 1e9, 2) == 15.29
    assert round((model.num_active_parameters - embeddings) / 1e9, 2) == 2.24
    assert config_of("moonlight").model.moe_layer_freq == [0] + 6 * [1]


@pytest.mark.parametrize("variant", rows.VARIANTS)
def test_variants_are_possible_where_their_packages_are(variant):
    row = "qwen3-moe-ep2" if "--moe" in rows.VARIANTS[variant] else "bert-large" if variant == "packed" else "one"
    problems = check(config_of(f"{row}+{variant}"))
    assert all("not installed" in problem.reason or "NVIDIA GPU" in problem.reason for problem in problems)


@pytest.mark.parametrize("name", ["one", "gpt-345m", "tp4-sp", "cp4-s32768", "dp2-tp2", "gdn", "moonlight-ep4"])
def test_limits_count_the_model_flops(name):
    """Attention kernels compute seven GEMMs; six count as model FLOPs. All ranks of these rows do the same work."""
    cfg = config_of(name)
    work = roofline.limits(cfg, cfg.tokenizer.vocab_size, CEILINGS)
    gemms = sum(work[kind].flops for kind in (kinds.GEMM_FORWARD, kinds.GEMM_DGRAD, kinds.GEMM_WGRAD))
    attention = (work[kinds.ATTENTION_FORWARD].flops + work[kinds.ATTENTION_BACKWARD].flops) * 6 / 7
    expected = cfg.describe(cfg.tokenizer.vocab_size).flops_per_sample * cfg.training.global_batch_size / cfg.world_size
    assert gemms + attention + work[kinds.LINEAR_ATTENTION].flops == pytest.approx(expected, rel=1e-9)


def test_linear_attention_is_limited_by_memory():
    cfg = config_of("gdn")
    work = roofline.limits(cfg, cfg.tokenizer.vocab_size, CEILINGS)[kinds.LINEAR_ATTENTION]
    layers, channels = cfg.model.num_layers * 3 // 4, 2 * 16 * 128 + 32 * 128
    assert work.bytes == 16 * 2 * channels * layers * 8192 * cfg.training.global_batch_size
    assert work.ms == pytest.approx(work.bytes / CEILINGS["copy_terabytes_per_second"] / 1e9)
    assert work.ms > 4 * work.flops / 700e9


def test_optimizer_bytes_follow_the_formats_and_are_shared_out():
    cfg = config_of("one")
    assert roofline.optimizer_bytes_per_parameter(cfg) == 32
    assert roofline.optimizer_bytes_per_parameter(config_of("one+precision-aware")) == 24
    assert roofline.optimizer_ranks(config_of("dp4")) == 4


def test_a_pipeline_waits_for_its_bubble_and_for_its_slowest_stage():
    waits = {name: roofline.limits(config_of(name), 128256, CEILINGS)[kinds.COMMUNICATION].ms
             for name in ("one", "pp4", "pp4-zero-bubble")}  # fmt: skip
    assert waits["one"] == 0 < waits["pp4-zero-bubble"] < waits["pp4"]


def test_cut_layers_count_by_halves_and_raise_the_limit():
    cut, full = (config_of("pp4", extra=extra) for extra in ([], ["--whole-layers-in-pipeline-split"]))
    counts = Counter(op.name for op in roofline.Share.of(cut, 128256).ops if op.kind == "gemm")
    assert counts == {"linear_qkv": 9, "linear_proj": 9, "linear_fc1": 8, "linear_fc2": 8}
    assert roofline.report(cut, 128256, CEILINGS).limit_ms < 0.98 * roofline.report(full, 128256, CEILINGS).limit_ms


def test_attention_rates_are_those_measured_and_lie_between_them():
    forward, backward = roofline.attention_rates(CEILINGS, 8192)
    assert forward == 565e12
    assert 7 / (2 / forward + 5 / backward) == pytest.approx(502e12)
    assert 543e12 < roofline.attention_rates(CEILINGS, 6000)[0] < 565e12
    assert roofline.attention_rates(CEILINGS, 1024)[0] == 543e12


def test_the_gap_is_the_step_less_the_limit():
    cfg = config_of("one")
    measured = {kinds.GEMM_FORWARD: 900.0, kinds.NORM: 200.0, kinds.IDLE: 30.0}
    report = roofline.report(cfg, cfg.tokenizer.vocab_size, CEILINGS, {"ms": measured, "step_ms": 1130.0})
    result = {row["class"]: row["gap_ms"] for row in report.rows()}
    assert sum(result.values()) == pytest.approx(1130.0 - report.limit_ms)
    assert result[kinds.IDLE] == 30.0
    assert report.rows()[0]["class"] == kinds.NORM
    assert "step" in report.text() and report.as_dict()["step_ms"] == 1130.0


def test_indistinguishable_backward_gemms_are_one_class():
    cfg = config_of("one")
    measured = {kinds.GEMM_FORWARD: 800.0, kinds.GEMM_OTHER: 1700.0}
    report = roofline.report(cfg, cfg.tokenizer.vocab_size, CEILINGS, {"ms": measured, "step_ms": 2500.0})
    rows = {row["class"]: row for row in report.rows()}
    assert kinds.GEMM_WGRAD not in rows and rows["GEMM backward"]["measured_ms"] == 1700.0
    backward = sum(report.limit[kind].ms for kind in (kinds.GEMM_DGRAD, kinds.GEMM_WGRAD))
    assert rows["GEMM backward"]["limit_ms"] == pytest.approx(backward)


@pytest.mark.parametrize(
    ("losses", "wrong"),
    [([3.0, 2.5], None), ([3.0, float("nan")], "not finite"), ([3.0, 3.0], "did not fall"), ([3.0, 1e-6], "learn")],
)
def test_only_runs_that_train_count(losses, wrong):
    assert (jobs.health(losses) is None) if wrong is None else (wrong in jobs.health(losses))


def test_a_row_is_the_median_of_its_jobs_and_an_unhealthy_one_spoils_it():
    job = {"command": "c", "seconds_per_iteration": 1.0, "tokens_per_second_per_gpu": 1.0, "peak_memory_gb": None,
           "spread": 0.1, "seconds": [1.0, 1.1], "losses": [2, 1], "invalid": None, "clocks": {},
           "job_seconds": 3}  # fmt: skip
    runs = [{**job, "tflops_per_gpu": value} for value in (500.0, 520.0, 511.0)]
    assert jobs.combine(runs)["tflops_per_gpu"] == 511.0
    assert jobs.combine(runs)["seconds_of_each_iteration"] == [[1.0, 1.1]] * 3
    assert jobs.combine([*runs, {**runs[0], "invalid": "bad"}])["invalid"] == "bad"
    assert jobs.combine([runs[0], {"command": "c", "error": "died"}])["error"] == "died"


def test_warm_up_and_profiled_iterations_are_left_out():
    timing = [
        {"iteration": i, "seconds_per_iteration": 9.0 if i < 3 or i > 5 else 1.0, "tokens_per_second": 8.0,
         "world_size": 2, "tflops_per_device": 1.0, "memory": {"mem-max-allocated-bytes": 5e9}}
        for i in range(1, 8)
    ]  # fmt: skip
    result = jobs.steady(timing, 2, 5)
    assert result["seconds_per_iteration"] == 1.0 and result["spread"] == 0 and result["peak_memory_gb"] == 5.0
    assert result["seconds"] == [1.0, 1.0, 1.0]
    assert "error" in jobs.steady(timing, 7, 7)
