"""Predicted steps, rates, days and costs equal ``tests/test_utils/planner_definition.py`` on random layouts."""

import json
import random
import re

import pytest

from megatron.console import run_tool
from megatron.core.pipeline_parallel.simulate import simulate
from megatron.training.report.advice import peak_memory
from megatron.training.report.memory import estimate_memory, stored_parameters
from megatron.training.report.pipeline import run_schedule, run_stages, stage_pieces
from megatron.training.report.plan.cluster import build_cluster
from megatron.training.report.plan.search import apply
from megatron.training.report.plan.step_time import calibration, calibration_factor, predict_step, stage_times
from megatron.training.report.plan.summary import prediction_rows
from tests.test_utils import planner_definition as planner
from tests.unit_tests.training.report.plan.test_plan import settings

VOCAB = 50000
VOCAB_ROWS = 50048
"""The vocabulary with padding to a multiple of 128."""
MODEL = (
    "--num-layers 16 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048"
    f" --vocab-size {VOCAB} --group-query-attention --num-query-groups 4 --ffn-hidden-size 3072 --global-batch-size 64"
    " --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear"
    " --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0"
)
EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 1536"


def random_flags(draw):
    """Return (flags, nodes, GPUs per node) of a layout that may be impossible."""
    words = []

    def choose(flag, *values):
        if (value := draw.choice(values)) is not None:
            words.append(f"{flag} {value}" if value is not True else flag)
        return value

    tp = choose("--tensor-model-parallel-size", 1, 1, 2, 4)
    pp = choose("--pipeline-model-parallel-size", 1, 1, 2, 4)
    cp = choose("--context-parallel-size", 1, 1, 2, 4)
    choose("--micro-batch-size", 1, 2)
    if draw.random() < 0.4:
        words.append(EXPERTS)
        ep = choose("--expert-model-parallel-size", 1, 2, 4)
        choose("--expert-tensor-parallel-size", 1, None)
        choose("--moe-token-dispatcher-type", "alltoall", "allgather")
        words += ["--sequence-parallel"] if tp > 1 else []
        words += ["--moe-router-load-balancing-type none"] if ep == 1 else []
    elif tp > 1 and choose("--sequence-parallel", True, True, None):
        choose("--tp-comm-overlap", True, None)
    if cp > 1:
        choose("--cp-comm-type", "p2p", "a2a", "allgather")
    if pp > 1:
        choose("--num-virtual-stages-per-pipeline-rank", None, 2)
        choose("--pipeline-schedule", None, None, "zero-bubble")
    if tp == pp == 1 and choose("--use-torch-fsdp2", True, None):
        choose("--torch-fsdp2-no-reshard-after-forward", True, None)
        words.append("--no-gradient-accumulation-fusion")
    elif choose("--use-distributed-optimizer", True, None):
        if choose("--overlap-grad-reduce", True, None):
            choose("--overlap-param-gather", True, None)
    else:
        choose("--overlap-grad-reduce", True, None)
    choose("--accumulate-allreduce-grads-in-fp32", None, True)
    if EXPERTS not in words:
        choose("--fp8-format hybrid --fp8-recipe", None, None, "tensorwise", "delayed")
    recompute = draw.choice([None, None, "selective --recompute-modules layernorm mlp_act", "selective", "full"])
    if recompute and not (EXPERTS in words and "mlp_act" in recompute):
        full = " --recompute-method uniform --recompute-num-layers 1" if recompute == "full" else ""
        words.append(f"--recompute-granularity {recompute}{full}")
    return " ".join(words), draw.choice([1, 2, 4]), draw.choice([4, 8])


def expected_parts(cfg, hardware, factor):
    description = cfg.describe(VOCAB)
    stages = run_stages(cfg, VOCAB, description)

    def params(chunks):
        stored = [item for chunk in chunks for item in stored_parameters(cfg, stage_pieces(description, chunk))]
        return [(item.elements, item.param.is_expert) for item in stored]

    plan = planner.Plan(cfg, hardware, description, stages, factor)
    schedule = run_schedule(cfg, plan.num_microbatches) if plan.pp > 1 else None
    return plan.predict(lambda stage: stage_pieces(description, stage), params, schedule, simulate), plan.idle


@pytest.mark.parametrize("seed", range(8))
def test_parts_of_a_step_equal_the_definition_on_random_layouts(seed):
    """Long schedules are extrapolated, by at most 0.2 % of the step."""
    draw, observed, axes = random.Random(seed), 0, set()
    while observed < 15:
        flags, nodes, per_node = random_flags(draw)
        cfg = apply(settings(f"{MODEL} {flags}"), {}, nodes * per_node)
        if isinstance(cfg, str) or cfg.training.global_batch_size % (cfg.training.micro_batch_size):
            continue
        gpu = draw.choice(["H200", "H100", "H800", "A100"])
        nic = draw.choice([400.0, 100.0])
        factor = draw.choice([1.0, 1.3])
        actual = predict_step(
            cfg, build_cluster(gpu, nodes, per_node, nic_gbits=nic), VOCAB, {"dense": factor, "small": factor}
        )
        expected, idle = expected_parts(cfg, planner.Hardware(gpu, nodes, per_node, nic), factor)
        parts = {part: seconds for part, seconds in actual.parts.items() if abs(seconds) > 1e-12}
        assert parts.keys() | {"bubble"} == expected.keys() | {"bubble"}, flags
        for part, seconds in expected.items():
            error = 2e-3 * actual.seconds if part == "bubble" else 1e-9 * seconds
            assert parts.get(part, 0.0) == pytest.approx(seconds, abs=error), (part, flags, gpu, nodes)
        assert actual.seconds == pytest.approx(sum(expected.values()), rel=2e-3)
        assert actual.bubble == pytest.approx(idle, abs=3e-3)
        axes |= {word for word in flags.split() if word.startswith("--")}
        observed += 1
    assert len(axes) >= 15, axes


DELTA = (
    "--experimental-attention-variant gdn --linear-attention-freq 4 --attention-output-gate --linear-num-key-heads 8"
    " --linear-num-value-heads 16"
)


@pytest.mark.parametrize(
    "flags",
    [
        f"{DELTA} --tensor-model-parallel-size 2 --sequence-parallel",
        f"{DELTA} --pipeline-model-parallel-size 2 --recompute-granularity selective --recompute-modules delta_rule",
        "--hybrid-layer-pattern MM-M*-MM-M*-M-M- --mamba-num-heads 32 --use-distributed-optimizer",
    ],
    ids=["delta", "recomputed delta, PP", "hybrid"],
)
def test_parts_of_recurrent_models_equal_the_definition(flags):
    cfg = apply(settings(f"{MODEL} --bf16 {flags}"), {}, 8)
    time = predict_step(cfg, build_cluster("H200", 1, 8), VOCAB, {"dense": 1.0})
    expected, _ = expected_parts(cfg, planner.Hardware("H200", 1, 8), 1.0)
    parts = {part: seconds for part, seconds in time.parts.items() if abs(seconds) > 1e-12}
    assert parts.keys() | {"bubble"} == expected.keys() | {"bubble"} and "recurrence" in parts
    for part, seconds in expected.items():
        error = 2e-3 * time.seconds if part == "bubble" else 1e-9 * seconds
        assert parts.get(part, 0.0) == pytest.approx(seconds, abs=error), part


@pytest.mark.parametrize(
    "layout, nodes",
    [
        ("--tensor-model-parallel-size 2 --micro-batch-size 1", 1),
        ("--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --micro-batch-size 1", 2),
        ("--context-parallel-size 2 --tensor-model-parallel-size 2 --micro-batch-size 1", 1),
    ],
)
def test_rates_days_and_costs_of_the_command_equal_the_definition(capsys, layout, nodes):
    """Ranks differ from data-parallel ranks in every layout."""
    flags = f"{MODEL} {layout}"
    words = ["--gpu", "H100", "--nodes", str(nodes), "--tokens", "3e11", "--gpu-hour-price", "2.5", "--json"]
    assert run_tool("plan", [*flags.split(), *words]) == 0
    records = json.loads(capsys.readouterr().out)["layouts"]
    assert len(records) >= 2
    flops = planner.dense_flops_per_token(16, 1024, 3072, 16, 4, 64, 2048, VOCAB, gated=True)
    ranks = 8 * nodes
    for record in records:
        cfg = apply(settings(f"{flags} {record['flags']}"), {}, ranks)
        time = predict_step(cfg, build_cluster("H100", nodes, 8), VOCAB)
        seconds = time.seconds * planner.slowest_rank(ranks)
        expected = planner.rates(seconds, ranks, 989, 64, 2048, flops, tokens=3e11, price=2.5)
        expected |= {
            "seconds_per_step": seconds,
            "memory_gib": peak_memory(cfg, VOCAB) / 1024**3,
            "bubble": time.parts.get("bubble", 0.0) / time.seconds,
            "exposed_communication": sum(
                seconds for part, seconds in time.parts.items() if part.endswith(" communication")
            )
            / time.seconds,
        }
        for name, value in expected.items():
            assert record[name] == pytest.approx(value, rel=1e-9), (name, record["flags"])


@pytest.mark.parametrize("layout, ranks", [("--tensor-model-parallel-size 4", 16), ("", 8), ("", 2)])
def test_days_and_gpu_hours_of_a_dry_run_are_those_of_all_samples_on_all_ranks(layout, ranks):
    cfg = apply(settings(f"{MODEL} {layout}"), {}, ranks)
    samples = 7_000_000
    need = peak_memory(cfg, VOCAB) / 1024**3
    for gpu, gib, row in zip(("H100", "H200"), (80, 141), prediction_rows(cfg, VOCAB, samples), strict=True):
        cluster = build_cluster(gpu, -(-ranks // 8), min(ranks, 8))
        seconds = predict_step(cfg, cluster, VOCAB).seconds * planner.slowest_rank(ranks)
        expected = planner.rates(seconds, ranks, 1, 64, 2048, 1, tokens=samples * 2048, price=1)
        name, text = row
        assert name == f"predicted on {gpu}" and text.startswith("fits, ")
        numbers = [float(number.replace(",", "")) for number in re.findall(r"[\d,]*\.?\d+(?:e[+-]?\d+)?", text)]
        reserved = gib - numbers[1]
        assert 1 <= reserved <= 5, "CUDA context and libraries"
        printed = [need, gib - reserved, seconds, expected["days"], expected["gpu_hours"]]
        assert numbers == pytest.approx(printed, rel=6e-3), text


def test_a_layout_that_is_too_large_for_one_gpu_kind_is_named():
    large = MODEL.replace("--hidden-size 1024", "--hidden-size 8192").replace("--num-layers 16", "--num-layers 20")
    cfg = apply(settings(large), {}, 8)
    need = peak_memory(cfg, VOCAB) / 1024**3
    assert 80 < need < 138
    on_h100, on_h200 = (text for _, text in prediction_rows(cfg, VOCAB, 1000))
    assert on_h100.startswith("does NOT fit, ") and on_h200.startswith("fits, ")


def test_muon_orthogonalizes_the_matrices_of_a_shard(capsys):
    flags = f"{MODEL} --optimizer muon --tensor-model-parallel-size 2"
    plain, sharded = (
        predict_step(apply(settings(f"{flags} {more}"), {}, 8), build_cluster("H200", 1, 8), VOCAB)
        for more in ("", "--use-distributed-optimizer")
    )
    assert plain.parts["orthogonalization"] == pytest.approx(4 * sharded.parts["orthogonalization"])


def test_frozen_weights_have_no_weight_gradients_reductions_or_updates():
    """Low-rank adapters of rank 16: their parameters by the formula, 2 of 3 GEMMs of the base."""
    cluster, flags = build_cluster("H200", 1, 8), f"{MODEL} --bf16 --use-distributed-optimizer"
    full, lora = (apply(settings(f"{flags} {more}"), {}, 8) for more in ("", "--lora-rank 16 --load-hf FOLDER"))
    complete, low = (predict_step(cfg, cluster, VOCAB) for cfg in (full, lora))
    description = full.describe(VOCAB)
    weight_gradients = sum(
        seconds
        for stage in run_stages(full, VOCAB, description)
        for (phase, part), seconds in stage_times(full, description, stage, cluster).items()
        if (phase, part) == ("W", "GEMM")
    )
    factor = calibration_factor(full, cluster.gpu, calibration())
    number = 64 // 8 // full.training.micro_batch_size
    assert complete.parts["GEMM"] - low.parts["GEMM"] == pytest.approx(number * factor * weight_gradients)
    width, keys, ffn = 1024, 4 * 64, 3072
    adapters = 16 * 16 * (3 * width + width + 2 * keys + 2 * width + 2 * width + 2 * ffn + ffn + width)
    base = 16 * (width * (2 * width + 2 * keys) + 3 * width * ffn + 2 * width) + width + 2 * VOCAB_ROWS * width
    assert (low.parts["optimizer"] - 1e-3) / (complete.parts["optimizer"] - 1e-3) == pytest.approx(adapters / base)
    assert 0 < low.parts["data communication"] < 0.05 * complete.parts["data communication"]


HF_MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 4,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}  # fmt: skip
"""Sizes of ``MODEL``."""


@pytest.mark.parametrize(
    "layout",
    [
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel",
        "--context-parallel-size 2 --use-distributed-optimizer",
        "--use-torch-fsdp2 --no-gradient-accumulation-fusion",
    ],
)
def test_reference_model_of_preferences_takes_a_forward_pass_and_its_weights(tmp_path, layout):
    """Per micro-batch the forward pass of the definition. The base of adapters has no further weights; stored values
    take nothing."""
    (tmp_path / "config.json").write_text(json.dumps(HF_MODEL))
    flags = f"{MODEL} --bf16 {layout} --load-hf {tmp_path}"
    dpo = f"--dpo --tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path} --dpo-reference"
    runs = {"none": "", "stored": f"{dpo} stored", "model": f"{dpo} model"}
    runs |= {"adapters": "--lora-rank 16", "base": f"--lora-rank 16 {dpo} base"}
    runs = {name: apply(settings(f"{flags} {more}"), {}, 8) for name, more in runs.items()}
    assert not [text for text in runs.values() if isinstance(text, str)]
    times = {name: predict_step(cfg, build_cluster("H200", 1, 8), VOCAB) for name, cfg in runs.items()}
    memory = {name: peak_memory(cfg, VOCAB) for name, cfg in runs.items()}
    cfg = runs["none"]
    description = cfg.describe(VOCAB)
    factor = calibration_factor(cfg, build_cluster("H200", 1, 8).gpu, calibration())
    stages = run_stages(cfg, VOCAB, description)
    plan = planner.Plan(cfg, planner.Hardware("H200", 1, 8), description, stages, factor)
    forward = 0.0
    for stage in stages:
        pieces = stage_pieces(description, stage)
        params = [(item.elements, item.param.is_expert) for item in stored_parameters(cfg, pieces)]
        device = [seconds for key, seconds in plan.stage(pieces, params).items() if key[0] == "F" and key[1] != "host"]
        kernels = 53 / 2 * sum(piece.is_branch for piece in pieces) / 3  # a third is started in a forward pass
        forward += max(sum(device), 40e-6 * kernels)
    expected = forward * plan.num_microbatches / plan.pp
    assert times["stored"].parts == times["none"].parts and "frozen models" not in times["adapters"].parts
    for name, other in (("model", "none"), ("base", "adapters")):
        assert times[name].parts["frozen models"] == pytest.approx(expected, rel=1e-9)
        assert times[name].seconds - times[other].seconds >= 0.9 * expected  # of ranks that wait for others
    width, keys, ffn = 1024, 4 * 64, 3072
    matrices = (width * (2 * width + 2 * keys) + 3 * width * ffn) / plan.tp
    weights = 16 * (matrices + 2 * width) + 2 * VOCAB_ROWS * width / plan.tp + width
    frozen = [rank.frozen for rank in estimate_memory(runs["model"], VOCAB)]
    assert sum(frozen) == 2 * weights / (8 if "fsdp2" in layout else 1)
    assert 0 < memory["model"] - memory["none"] - min(frozen) < 2**29  # activations of a piece, gathered weights
    assert memory["stored"] == memory["none"] and memory["base"] == memory["adapters"]


@pytest.mark.parametrize("kind", ["shard", "all_reduce", "all_to_all"])
def test_collectives_equal_the_definition(kind):
    draw = random.Random(kind)
    for _ in range(200):
        nodes, per_node = draw.choice([1, 2, 16]), draw.choice([2, 4, 8])
        nic, gpu = draw.choice([100.0, 400.0]), draw.choice(["H200", "H800"])
        ranks = draw.choice([ranks for ranks in (1, 2, 4, 8, 16, 64) if ranks <= nodes * per_node])
        stride = draw.choice([stride for stride in (1, 2, 4, 8) if ranks * stride <= nodes * per_node])
        size = 10 ** draw.uniform(4, 10)
        cluster, hardware = (
            build_cluster(gpu, nodes, per_node, nic_gbits=nic),
            planner.Hardware(gpu, nodes, per_node, nic),
        )
        assert cluster.collective(size, ranks, stride, kind) == pytest.approx(
            hardware.collective(kind, size, ranks, stride), rel=1e-9
        ), (gpu, nodes, per_node, ranks, stride, size)
        assert cluster.send(size, stride) == pytest.approx(hardware.message(size, stride), rel=1e-9)
