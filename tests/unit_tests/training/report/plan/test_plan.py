"""Planner: clusters, step times, search, goodput, and the command."""

import json
import math
import sys

import pytest

from megatron.console import run_tool
from megatron.core.config.errors import UserError
from megatron.tools.plan import parse_count
from megatron.training.arguments import parse_args
from megatron.training.config.resolve import resolve
from megatron.training.report.advice import LIBRARIES_GIB, peak_memory
from megatron.training.report.memory import estimate_memory
from megatron.training.report.plan import search as search_module
from megatron.training.report.plan import step_time
from megatron.training.report.plan.bounds import Bounds
from megatron.training.report.plan.cluster import build_cluster, find_gpu, gpu_kinds, kind_of_device
from megatron.training.report.plan.goodput import expected_maximum, goodput
from megatron.training.report.plan.search import HEADROOM, apply, layout_sizes, layout_variants, recomputation, search
from megatron.training.report.plan.step_time import gemm_seconds, predict_step
from megatron.training.report.plan.summary import predict_run, prediction_rows, straggler_factor
from megatron.training.report.plan.trials import try_layout
from megatron.training.rules.run_all import check

SMALL = (
    "--num-layers 8 --hidden-size 2048 --num-attention-heads 16 --seq-length 4096 --max-position-embeddings 4096"
    " --vocab-size 32000 --global-batch-size 32 --attention-dropout 0"
)
MOE = f"{SMALL} --num-experts 8 --moe-router-topk 2"
DEFAULTS = {"micro_batch_size": 1, "train_iters": 1, "lr": 1e-4, "bf16": True}


def settings(flags):
    return parse_args(flags.split(), args_defaults=DEFAULTS, needs_data=False)


def predicted(flags, cluster=None, world_size=8):
    cfg = apply(settings(flags), {}, world_size)
    assert not isinstance(cfg, str), cfg
    return predict_step(cfg, cluster or build_cluster("H200", 1, world_size), 32000)


@pytest.mark.parametrize(
    "flags",
    ["--gpu Q7", "--gpu missing.json", "--nodes 0", "--gpus-per-node -1", "--memory nan", "--tokens -5", "--best 0"],
)
def test_bad_cluster_gives_one_line(flags, capsys):
    assert run_tool("plan", [*SMALL.split(), *flags.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {flags.split()[0]} ") and error.count("\n") == 1


def test_gpu_file_must_hold_all_rates(tmp_path):
    path = tmp_path / "gpu.json"
    values = {key: value for key, value in vars(gpu_kinds()["H200"]).items() if key != "name"}
    path.write_text(json.dumps(values))
    assert find_gpu(str(path)).gemm == gpu_kinds()["H200"].gemm
    path.write_text(json.dumps({**values, "gemm": 0}))
    with pytest.raises(UserError, match="gemm must be positive"):
        find_gpu(str(path))


def test_device_names_give_kinds():
    assert kind_of_device("NVIDIA H100 80GB HBM3").name == "H100"
    assert kind_of_device("NVIDIA H200").name == "H200"
    assert kind_of_device("Tesla V100") is None


def test_collectives_across_nodes_are_slower():
    cluster = build_cluster("H100", 4, 8)
    assert cluster.collective(1e8, 1, 1) == 0
    inside, across = cluster.collective(1e8, 4, 1), cluster.collective(1e8, 4, 8)
    assert 3 * inside < across
    assert cluster.collective(1e8, 32, 1) < across  # eight network cards instead of one


def test_gemm_reaches_its_rate_only_at_large_shapes():
    gpu = gpu_kinds()["H200"]

    def rate(m, n, k):
        return 2 * m * n * k / gemm_seconds(gpu, gpu.gemm, (m, n, k)) / 1e12

    assert 0.95 * gpu.gemm < rate(8192, 16384, 4096) < gpu.gemm
    assert rate(256, 1024, 1024) < 0.3 * gpu.gemm


@pytest.mark.parametrize(
    "layout",
    [
        "",
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--pipeline-model-parallel-size 2",
        "--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble",
        "--context-parallel-size 2",
        "--use-torch-fsdp2",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ],
)
def test_parts_add_up_to_the_step(layout):
    time = predicted(f"{SMALL} {layout}")
    assert sum(time.parts.values()) == pytest.approx(time.seconds)
    assert all(seconds >= 0 for seconds in time.parts.values())


def test_full_recomputation_adds_a_forward_pass():
    plain = predicted(SMALL)
    repeated = predicted(f"{SMALL} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    assert 1.2 < repeated.seconds / plain.seconds < 1.35


@pytest.mark.parametrize("ranks, dropout, bytes_per_pair, masks", [
    (1, 0.1, (216, 21), 1), (2, 0.1, (260, 298), 5 * 2), (1, 0.0, (9, 12), 0)])  # fmt: skip
def test_unfused_attention_takes_the_time_of_its_pairs(ranks, dropout, bytes_per_pair, masks):
    """Four samples of 8 layers on each rank (or pair of ranks): every pair of positions is computed and moves the bytes
    counted from the kernel (test_unfused_traffic.py); context-parallel ranks skip hidden blocks and use fp32."""
    length, heads, samples, layers = 4096, 16, 32 // (8 // ranks), 8
    flags = f"{SMALL} --attention-dropout {dropout} --attention-backend unfused --context-parallel-size {ranks}"
    gpu = gpu_kinds()["H200"]
    pairs = heads * length * length * (1.0 if ranks == 1 else (4 + 3 + 2 + 1) / 16 / ranks)  # 10 of 4 x 4 blocks
    gemm = 4 * 128 * pairs / (gpu.gemm * 1e12) / (1.0 if ranks == 1 else 67 / 989)
    forward, backward = (pairs * size / (gpu.memory_rate * 1e12) for size in bytes_per_pair)
    launches = masks / (2 if ranks > 1 else 1) * heads * 230 * 3e-6
    backward = max(backward, launches if ranks > 1 else 0.0)
    expected = max(forward, launches) + backward + gemm * (3.0 if ranks == 1 else 3.5)
    time = predict_step(apply(settings(flags), {}, 8), build_cluster("H200", 1, 8), 32000, {})
    assert time.parts["attention"] == pytest.approx(expected * samples * layers, rel=0.005)


def test_context_parallelism_is_not_planned_because_of_attention_dropout(capsys):
    """With dropout, key blocks are computed in fp32 with masks drawn twice: slower than full sequences."""
    llama = (
        "--num-layers 8 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --seq-length 8192 "
        "--group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear "
        "--position-embedding-type rope --untie-embeddings-and-output-weights --max-position-embeddings 8192 "
        "--vocab-size 128256 --global-batch-size 16"
    )
    rates = {}
    for dropout in ("0.1", "0"):
        flags = [] if dropout == "0.1" else ["--attention-dropout", "0"]
        assert run_tool("plan", ["--gpu", "H100", "--json", *llama.split(), *flags]) == 0
        output = capsys.readouterr()
        assert ("--attention-dropout 0.1 (default, as in Megatron-LM): attention is unfused" in output.err) == (
            not flags
        )
        best = json.loads(output.out)["layouts"][0]
        rates[dropout] = best["tokens_per_second_per_gpu"]
        assert "--context-parallel-size" not in best["flags"]
    assert rates["0"] > 5 * rates["0.1"]


def test_bubble_shrinks_with_virtual_stages_and_zero_bubble():
    pipeline = f"{SMALL} --pipeline-model-parallel-size 4"
    plain, virtual, zero = (
        predicted(f"{pipeline} {extra}").bubble
        for extra in ("", "--num-virtual-stages-per-pipeline-rank 2", "--pipeline-schedule zero-bubble")
    )
    assert plain > virtual and plain > zero


def test_cards_carry_the_part_of_an_all_to_all_that_leaves_the_node():
    cluster = build_cluster("H200", 4, 8)
    inside, across = (cluster.collective(1e9, ranks, 1, "all_to_all") for ranks in (8, 32))
    assert inside == cluster.collective(1e9, 8, 1)
    assert across == pytest.approx(0.75e9 / 45e9, rel=0.02)  # three quarters of the ranks are on other nodes
    assert across > 4 * cluster.collective(1e9, 32, 1)


def test_muon_and_offloaded_state_take_their_time_after_the_backward_pass():
    plain = predicted(f"{SMALL} --tensor-model-parallel-size 2")
    muon = predicted(f"{SMALL} --tensor-model-parallel-size 2 --optimizer muon")
    layer = sum(count * (4 * m * m * n + 2 * m**3) for count, m, n in ((1, 2048, 2048), (2, 2048, 8192)))
    heads = 16 * (4 * 384**2 * 2048 + 2 * 384**3)  # query, key and value of each head
    assert muon.parts["orthogonalization"] == pytest.approx(5 * 8 * (layer + heads) / 2 / 700e12)
    assert muon.seconds > plain.seconds
    offloaded = predicted(f"{SMALL} --tensor-model-parallel-size 2 --optimizer-cpu-offload")
    both = predicted(f"{SMALL} --tensor-model-parallel-size 2 --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d")
    part = "copies of optimizer state"
    assert offloaded.parts[part] == pytest.approx(2 * both.parts[part])
    elements = (8 * 12 * 2048 + 32000) * 2048 / 2
    assert both.parts[part] == pytest.approx(10 * elements / 55e9, rel=0.05)


def test_experts_wait_for_row_counts_of_the_all_to_all(monkeypatch):
    monkeypatch.setattr(step_time, "LAUNCH", 0.0)
    flags = f"{MOE} --expert-model-parallel-size 8 --moe-token-dispatcher-type"
    counted, gathered = predicted(f"{flags} alltoall"), predicted(f"{flags} allgather")
    microbatches = 32 / 8
    assert counted.parts["host"] - gathered.parts.get("host", 0.0) == pytest.approx(8 * microbatches * 2.2e-3)


def test_transposing_fp8_weights_per_micro_batch_takes_two_bytes_of_traffic_per_weight(monkeypatch):
    monkeypatch.setattr(step_time, "LAUNCH", 0.0)
    fp8 = f"{SMALL} --fp8-format hybrid --fp8-recipe tensorwise"
    kept, made = (predicted(f"{fp8} {more}", world_size=1) for more in ("", "--no-fp8-weight-transpose-cache"))
    weights, microbatches = 8 * 12 * 2048**2, 32
    rate = build_cluster("H200", 1, 1).gpu.memory_rate * 1e12
    added = sum(made.parts.values()) - sum(kept.parts.values())
    assert added == pytest.approx(2 * weights * microbatches / rate, rel=0.03)


@pytest.mark.parametrize(
    ("flags", "launches"), [("", 53), ("--fp8-format hybrid --fp8-recipe tensorwise", 71), ("--num-experts 8", 166)]
)
def test_a_step_is_not_faster_than_the_host_starts_its_kernels(monkeypatch, flags, launches):
    monkeypatch.setattr(step_time, "LAUNCH", 1e-3)
    result = predicted(f"{SMALL} {flags}", world_size=1)
    assert result.seconds - result.parts["optimizer"] == pytest.approx(32 * 8 * launches * 1e-3)


def test_factors_apply_to_device_time_only():
    flags = f"{SMALL} --micro-batch-size 1 --seq-length 256"
    cfg = apply(settings(flags), {}, 8)
    cluster = build_cluster("H200", 1, 8)
    plain, slower = (predict_step(cfg, cluster, 32000, {"dense": factor}) for factor in (1.0, 1.5))
    assert plain.parts["host"] > 0
    assert plain.seconds - plain.parts["optimizer"] == pytest.approx(slower.seconds - slower.parts["optimizer"])


@pytest.mark.parametrize("flags", [SMALL, MOE], ids=["dense", "experts"])
def test_proposed_layouts_pass_the_rules_and_fit(flags):
    cluster = build_cluster("H100", 1, 8, memory=40.0)
    result = search(settings(flags), cluster, 32000)
    assert result.layouts and result.tried > 20
    times = [item.time.seconds for item in result.layouts]
    assert times == sorted(times)
    for layout in result.layouts:
        assert not check(layout.cfg)
        assert layout.memory == peak_memory(layout.cfg, 32000) <= HEADROOM * (40 - LIBRARIES_GIB) * 2**30
        typed = settings(f"{flags} {layout.flags}")
        assert not isinstance(apply(typed, {}, 8), str)
        assert predict_step(apply(typed, {}, 8), cluster, 32000).seconds == pytest.approx(layout.time.seconds)


def exhaustive(cfg, cluster, keep):
    """Predict every candidate at its first level of recomputation that fits; return the fastest, as the search."""
    base = resolve(cfg, cluster.world_size, gpus=True)
    room = HEADROOM * (cluster.gpu.memory_gib - LIBRARIES_GIB) * 2**30
    rough = []
    for sizes in layout_sizes(cfg, base, cluster):
        axes = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
        dp = cluster.world_size // math.prod(sizes[axis] for axis in axes)
        for values in layout_variants(cfg, base, sizes, dp):
            for level in recomputation(base):
                changed = apply(cfg, {**values, **level}, cluster.world_size)
                if isinstance(changed, str) or max(rank.total for rank in estimate_memory(changed, 32000)) > room:
                    continue
                rough.append((predict_step(changed, cluster, 32000, rough=True).seconds, len(rough), changed, values))
                break
    best = [(predict_step(item, cluster, 32000).seconds, len(values)) for *_, item, values in sorted(rough)[:keep]]
    return [seconds for seconds, _ in sorted(best)]


@pytest.mark.parametrize(
    "flags, memory, nodes",
    [
        (f"{SMALL} --micro-batch-size 1", 16, 1), (f"{SMALL} --tensor-model-parallel-size 2", 9, 2),
        (f"{MOE} --micro-batch-size 2 --context-parallel-size 1", 40, 1),
        (f"{MOE} --micro-batch-size 1 --pipeline-model-parallel-size 2", 24, 1),
        (f"{SMALL} --experimental-attention-variant gdn --linear-attention-freq 4 --micro-batch-size 1", 24, 1),
    ],
)  # fmt: skip
def test_search_equals_prediction_of_every_candidate(flags, memory, nodes, monkeypatch):
    monkeypatch.setattr(search_module, "REFINED", 6)  # so that bounds skip candidates
    cfg, cluster = settings(flags), build_cluster("H100", nodes, 8, memory=float(memory))
    result = search(cfg, cluster, 32000)
    assert [layout.time.seconds for layout in result.layouts] == pytest.approx(exhaustive(cfg, cluster, 6))
    assert result.slower > 0 and result.tried >= result.slower + result.too_large + result.rejected


@pytest.mark.parametrize("flags", [SMALL, MOE], ids=["dense", "experts"])
def test_no_layout_is_faster_or_smaller_than_its_bounds(flags):
    cfg, cluster = settings(f"{flags} --micro-batch-size 2"), build_cluster("H100", 1, 8)
    base = resolve(cfg, 8, gpus=True)
    bounds = Bounds(base, cluster, 32000, lambda values: apply(cfg, values, 8))
    checked = 0
    for sizes in layout_sizes(cfg, base, cluster):
        axes = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
        for values in layout_variants(cfg, base, sizes, 8 // math.prod(sizes[axis] for axis in axes)):
            changed = apply(cfg, values, 8)
            if isinstance(changed, str):
                continue
            assert bounds.describe(changed, values) == changed.describe(32000)
            time = predict_step(changed, cluster, 32000, rough=True).seconds
            assert 0.2 * time < bounds.seconds(values) <= time * (1 + 1e-9)
            memory = max(rank.weights + rank.gradients for rank in estimate_memory(changed, 32000))
            assert bounds.bytes(values) <= memory
            assert bounds.bytes(values) > 0.4 * memory or "use_torch_fsdp2" in values
            checked += 1
    assert checked > 20


def test_a_search_for_16384_gpus_skips_most_candidates():
    """Estimates of memory take most of a search's time; no number of seconds holds on a busy machine."""
    flags = (
        "--num-layers 32 --hidden-size 8192 --num-attention-heads 64 --seq-length 8192 --max-position-embeddings 8192"
        " --vocab-size 32000 --global-batch-size 4096 --micro-batch-size 1"
    )
    result = search(settings(flags), build_cluster("H100", 2048, 8), 32000)
    assert result.layouts and result.tried > 100 and result.slower + result.too_large > result.tried / 2


def test_the_bound_of_a_pipeline_has_the_closed_form_of_its_bubble():
    """1F1B on p ranks takes (m + p - 1) times a micro-batch's time per rank; zero bubble keeps a third of p - 1."""
    cfg = settings(f"{SMALL} --micro-batch-size 1")
    bounds = Bounds(
        resolve(cfg, 8, gpus=True), build_cluster("H100", 1, 8), 32000, lambda values: apply(cfg, values, 8)
    )
    values = {"pipeline_model_parallel_size": 4}
    ratio = bounds.seconds(values) / bounds.seconds({**values, "pipeline_schedule": "zero-bubble"})
    assert ratio == pytest.approx((16 + 3) / (16 + 1))  # 32 samples on 2 data-parallel ranks


def test_layouts_are_resolved_for_gpus_and_keep_the_flags_of_the_command_line():
    cfg = apply(settings(f"{SMALL} --micro-batch-size 1"), {"tensor_model_parallel_size": 2}, 8)
    assert cfg.distributed.distributed_backend == "nccl"
    assert {"num_layers", "micro_batch_size", "tensor_model_parallel_size"} <= cfg.flat.explicit


def test_a_search_is_cut_only_beyond_its_largest_number_of_candidates(monkeypatch):
    cfg = settings(f"{SMALL} --tensor-model-parallel-size 4 --micro-batch-size 2 --context-parallel-size 1")
    cluster, texts = build_cluster("H100", 1, 8), []
    count = search(cfg, cluster, 32000, texts.append).tried
    for most, num_notices in ((count, 0), (count - 1, 1)):
        texts.clear()
        monkeypatch.setattr(search_module, "MOST_LAYOUTS", most)
        assert search(cfg, cluster, 32000, texts.append).tried == most
        assert len([text for text in texts if text.startswith("only the first")]) == num_notices


def test_search_keeps_sizes_of_the_command_line():
    result = search(
        settings(f"{SMALL} --tensor-model-parallel-size 4 --micro-batch-size 2"), build_cluster("H100", 1, 8), 32000
    )
    assert {layout.cfg.model.tensor_model_parallel_size for layout in result.layouts} == {4}
    assert {layout.cfg.training.micro_batch_size for layout in result.layouts} == {2}


def test_search_tries_powers_of_two_of_context_ranks_and_samples():
    cfg = settings(SMALL.replace("4096", "16384"))
    resolved, cluster = resolve(cfg, 8, gpus=True), build_cluster("H100", 1, 8)
    sizes = list(layout_sizes(cfg, resolved, cluster))
    assert {size["context_parallel_size"] for size in sizes} == {1, 2, 4}
    assert {x["micro_batch_size"] for x in layout_variants(cfg, resolved, sizes[0], dp=5)} == {1, 2, 4}


def test_plan_reports_days_and_cost(capsys):
    words = [*SMALL.split(), "--gpu", "A100", "--tokens", "1e10", "--gpu-hour-price", "3", "--json"]
    assert run_tool("plan", words) == 0
    best = json.loads(capsys.readouterr().out)["layouts"][0]
    assert best["cost"] == pytest.approx(3 * best["gpu_hours"])
    assert best["gpu_hours"] == pytest.approx(1e10 / best["tokens_per_second_per_gpu"] / 3600)
    assert best["gpu_hours"] == pytest.approx(24 * 8 * best["days"])
    assert best["mfu"] == pytest.approx(best["tflops_per_gpu"] / 312)  # of NVIDIA's data sheet


def test_plan_names_the_smallest_need_if_nothing_fits(capsys):
    assert run_tool("plan", [*SMALL.split(), "--gpu", "H100", "--memory", "4"]) == 2
    assert "no layout fits: the smallest of" in capsys.readouterr().err


def test_goodput_matches_youngs_interval():
    result = goodput(1024, 1 / (1024 * 49.5), 10.0, 120.0)
    assert result.failure_hours == pytest.approx(49.5)
    assert result.interval == pytest.approx((2 * 10 * 49.5 * 3600) ** 0.5)
    assert result.share == pytest.approx(0.989, abs=1e-3)


@pytest.mark.parametrize(("stall", "restart", "shortest", "interval"), [
    (8.0, 1800.0, 0.0, 240.0), (8.0, 0.0, 600.0, 600.0), (8.0, 900.0, 100.0, 240.0), (8000.0, 60.0, 0.0, 8000.0),
])  # fmt: skip
def test_goodput_loses_saves_half_an_interval_and_the_restart(stall, restart, shortest, interval):
    """With an hour between failures."""
    result = goodput(100, 0.01, stall, restart, shortest)
    lost = stall / interval + (interval / 2 + restart) / 3600
    assert (result.interval, result.share) == pytest.approx((interval, max(1 - lost, 0.0)))


@pytest.mark.parametrize(("ranks", "expected"), [(1, 0.0), (8, 1.42), (100, 2.51), (1000, 3.24), (16384, 3.97)])
def test_expected_maximum_of_ranks(ranks, expected):
    assert expected_maximum(ranks) == pytest.approx(expected, abs=0.02)


def test_trial_runs_a_tiny_model_on_gloo(warm_python, monkeypatch):
    monkeypatch.setattr(sys, "executable", warm_python)
    flags = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16"
        " --vocab-size 64 --global-batch-size 4 --micro-batch-size 1 --distributed-backend gloo"
    )
    result = search(
        settings(f"{flags} --pipeline-model-parallel-size 1 --tensor-model-parallel-size 1"),
        build_cluster("H100", 1, 2),
        64,
    )
    seconds = try_layout(result.layouts[0], 2, "pretrain_gpt.py", flags.split())
    assert seconds is not None and seconds > 0


def test_dry_run_predicts_time_and_fit():
    cfg = apply(settings(SMALL), {}, 8)
    rows = dict(prediction_rows(cfg, 32000, 3200))
    assert set(rows) == {"predicted on H100", "predicted on H200"}
    assert rows["predicted on H100"].startswith("fits, ") and "days" in rows["predicted on H100"]


def test_a_run_is_predicted_on_known_gpus_in_16_bits(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    cfg = apply(settings(SMALL), {}, 8)
    result = predict_run(cfg, "NVIDIA H200", 32000)
    assert result.gpu == "H200" and result.error == 0.03
    assert sum(result.parts.values()) == pytest.approx(result.seconds)
    plan = predict_step(cfg, build_cluster("H200", 1, 8), 32000)
    assert plan.seconds < result.seconds < 1.02 * plan.seconds  # the slowest of eight ranks
    assert predict_run(apply(settings(MOE), {}, 8), "NVIDIA H200", 32000).error == 0.1
    assert predict_run(cfg, "CPU", 32000) is None and predict_run(cfg, "NVIDIA H200", 0) is None


def test_a_run_without_a_launcher_is_predicted_on_nodes_of_eight_gpus(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    cfg = apply(settings(f"{SMALL} --use-distributed-optimizer"), {}, 16)
    seconds = {}
    for per_node in (8, 16):
        plan = predict_step(cfg, build_cluster("H200", 16 // per_node, per_node), 32000)
        seconds[per_node] = plan.seconds * straggler_factor(16)
    assert predict_run(cfg, "NVIDIA H200", 32000).seconds == seconds[8] != seconds[16]


def test_an_error_of_the_planner_does_not_end_a_run(monkeypatch):
    def fail(*arguments):
        raise ZeroDivisionError("no such model")

    monkeypatch.setattr("megatron.training.report.plan.summary.predict_step", fail)
    assert predict_run(apply(settings(SMALL), {}, 8), "NVIDIA H200", 32000) is None


@pytest.mark.parametrize("missing", ["--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length",
                                     "--max-position-embeddings", "--global-batch-size", "--vocab-size"])  # fmt: skip
def test_a_missing_size_of_the_model_gives_the_message_of_the_trainer(missing, capsys):
    words = SMALL.split()
    at = words.index(missing)
    assert run_tool("plan", words[:at] + words[at + 2 :]) == 2
    errors = capsys.readouterr().err
    assert f": 1 problem with the settings\n  {missing}: is required" in errors


def test_all_problems_of_the_model_are_one_message(capsys):
    assert run_tool("plan", ["--num-layers", "8", "--num-attention-heads", "4", "--hidden-size", "65"]) == 2
    errors = capsys.readouterr().err
    assert "--hidden-size 65: is not a multiple of --num-attention-heads 4" in errors
    for flag in ("--seq-length", "--global-batch-size", "--vocab-size"):
        assert f"\n  {flag}: is required" in errors


def test_the_model_of_a_hugging_face_folder_is_planned(tmp_path, capsys):
    """Layouts and times equal the plan by flags."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048,
              "intermediate_size": 5632, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 4,
              "vocab_size": 32000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu",
              "tie_word_embeddings": False}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    rest = ["--seq-length", "4096", "--global-batch-size", "32", "--json"]
    llama = f"{SMALL} --ffn-hidden-size 5632 --swiglu --normalization RMSNorm --disable-bias-linear " \
            "--hidden-dropout 0 --group-query-attention --num-query-groups 4 --position-embedding-type rope " \
            "--untie-embeddings-and-output-weights"  # fmt: skip
    outputs = []
    for flags in (["--load-hf", str(tmp_path), "--attention-dropout", "0"], llama.split()):
        assert run_tool("plan", [*flags, *rest]) == 0
        outputs.append(json.loads(capsys.readouterr().out)["layouts"])
    assert outputs[0] == outputs[1]
    assert run_tool("plan", ["--load-hf", str(tmp_path / "nosuch"), *rest]) == 2
    assert "nosuch" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "tokens"), [("1T", 1e12), ("1.5b", 1.5e9), ("300M", 3e8), ("2e9", 2e9), ("7k", 7e3)])
def test_tokens_take_suffixes(text, tokens):
    assert parse_count(text) == tokens


@pytest.mark.parametrize("flags", ["--tokens 1Q", "--tokens T", "--save-stall 0", "--save-stall -1", "--tokens 1e20",
                                   "--restart-seconds nan", "--gpu-hour-price x"])  # fmt: skip
def test_bad_numbers_of_a_plan_are_one_message(flags, capsys):
    try:
        code = run_tool("plan", [*SMALL.split(), *flags.split()])
    except SystemExit as end:
        code = end.code
    errors = capsys.readouterr().err
    assert code == 2 and flags.split()[0] in errors.splitlines()[-1] and "Traceback" not in errors


@pytest.mark.parametrize("flags", ["--save-stall 0.001", "--save-stall 1e17", "--restart-seconds 0", "--tokens 1e17"])
def test_extreme_numbers_of_a_plan_are_planned(flags, capsys):
    assert run_tool("plan", [*SMALL.split(), "--best", "1", *flags.split()]) == 0
