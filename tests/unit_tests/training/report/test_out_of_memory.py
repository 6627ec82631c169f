"""A failed allocation ends in one message: what memory holds, the estimate, and the flags that help most."""

import gc
from dataclasses import replace
from unittest import mock

import pytest
import torch

from megatron.training.arguments import parse_args, validate_args
from megatron.training.report.advice import LIBRARIES_GIB, NONE_FITS, fit_rows, memory_advice, peak_memory
from megatron.training.report.dry_run import dry_run_report
from megatron.training.report.memory import activations_by_kind, estimate_memory, stage_activations
from megatron.training.report.out_of_memory import HeldMemory, is_out_of_memory, measure, out_of_memory
from megatron.training.report.pipeline import run_stages
from megatron.training.report.rates import cost_rows, model_kind, nearest_rate
from tests.test_utils.gpt_runs import train_with_errors

LLAMA_8B = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --bf16 --lr 1e-4 "
    "--seq-length 8192 --max-position-embeddings 8192 --train-iters 1000 --mock-data --eval-iters 0 "
    "--tokenizer-type NullTokenizer --vocab-size 128256 --micro-batch-size 2 --global-batch-size 64 --dry-run "
)
EXPERTS = f"{LLAMA_8B} --num-experts 8 --moe-router-topk 2 "
MODELS = {
    "dense": LLAMA_8B,
    "recompute": f"{LLAMA_8B} --recompute-granularity selective --recompute-modules layernorm mlp ",
    "full": f"{LLAMA_8B} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 ",
    "experts": EXPERTS,
}
CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB"


def settings(text, world_size):
    argv = [*text.split(), "--dry-run-world-size", str(world_size)]
    return validate_args(parse_args(argv), world_size, announce=False)


@pytest.mark.parametrize("model", MODELS)
def test_activations_by_kind_add_up(model):
    cfg = settings(MODELS[model] + "--pipeline-model-parallel-size 2", 8)

    described = cfg.describe(128256)
    for rank, stage in enumerate(run_stages(cfg, 128256)):
        kinds = activations_by_kind(cfg, described, stage)
        assert int(sum(kinds.values())) == stage_activations(cfg, described, stage)
        result = estimate_memory(cfg, 128256)[rank]
        assert abs(sum(result.kinds.values()) - result.activations) <= len(result.kinds)
        assert list(result.kinds.values()) == sorted(result.kinds.values(), reverse=True)


@pytest.mark.parametrize("layout, world_size", [("", 1), ("", 8), ("--tensor-model-parallel-size 2", 8)])
@pytest.mark.parametrize("model", ["dense", "experts"])
def test_advice_names_flags_with_the_memory_that_they_give(model, layout, world_size):
    flags = f"{MODELS[model]} {layout} {'--sequence-parallel' if layout and model == 'experts' else ''}"
    cfg = settings(flags, world_size)
    now, advice = peak_memory(cfg, 128256), memory_advice(cfg, 128256)
    assert 1 <= len(advice) <= 3 and [item.bytes for item in advice] == sorted(item.bytes for item in advice)
    for item in advice:
        assert item.bytes < now
        typed = settings(f"{flags} {item.flags}", world_size)  # passes every rule as typed
        assert peak_memory(typed, 128256) == item.bytes


def test_no_attention_dropout_is_the_first_advice():
    """Scores of one layer at 8,192 tokens: weights and dropped weights in bf16 and the mask, 5 bytes per pair."""
    dropout = LLAMA_8B.replace("--attention-dropout 0 ", "--attention-dropout 0.1 ")
    cfg, without = settings(dropout, 8), settings(LLAMA_8B, 8)
    advice = memory_advice(cfg, 128256)
    assert (advice[0].flags, advice[0].bytes) == ("--attention-dropout 0", peak_memory(without, 128256))
    assert len(advice) == 3 and advice[1].bytes <= advice[2].bytes
    assert not any("--attention-dropout" in item.flags for item in memory_advice(without, 128256))
    scores = 2 * 32 * 8192**2 * 5  # micro-batch x heads x pairs x bytes
    saved = [stage_activations(item, item.describe(128256), run_stages(item, 128256)[0]) for item in (cfg, without)]
    log_sum_exp, copies = 4 * 32, (32 + 8) * 128 * 2
    assert saved[0] - saved[1] == 32 * (scores + (copies - log_sum_exp) * 2 * 8192)


@pytest.mark.parametrize("sequence", ["", "--sequence-parallel"])
def test_advice_keeps_tensor_parallelism_inside_a_host(sequence):
    flags = f"{LLAMA_8B} --num-query-groups 32 --vocab-size 131072 --tensor-model-parallel-size 8 {sequence}"
    assert not any("--tensor" in item.flags for item in memory_advice(settings(flags, 64), 131072))


def test_dry_run_says_whether_the_run_fits_the_gpu():
    need = peak_memory(settings(LLAMA_8B, 8), 128256) / 2**30
    for memory, answer in ((need + LIBRARIES_GIB + 0.1, "yes"), (need + LIBRARIES_GIB - 0.1, "NO")):
        cfg = settings(f"{LLAMA_8B} --gpu-memory {memory:.2f}", 8)
        rows = list(fit_rows(cfg, 128256))
        assert rows[0][0] == "fits the GPU" and rows[0][1].startswith(f"{answer}, {need:.1f} of ")
        assert (len(rows) > 1) == (answer == "NO") and ("fits the GPU" in dry_run_report(cfg))
    for name, text in rows[1:]:
        flags, _, size = text.partition(": ")
        changed = peak_memory(settings(f"{LLAMA_8B} {flags}", 8), 128256) / 2**30
        assert (name, size) == ("  add", f"{changed:.1f} GiB" + ", fits" * (changed <= need - 0.1))
    assert not list(fit_rows(settings(LLAMA_8B, 8), 128256))


@pytest.mark.parametrize("share, is_said", [(0.1, True), (0.99, False)])
def test_dry_run_and_out_of_memory_message_say_that_no_single_flag_is_enough(share, is_said):
    need = peak_memory(settings(LLAMA_8B, 8), 128256) / 2**30
    cfg = settings(f"{LLAMA_8B} --gpu-memory {need * share + LIBRARIES_GIB:.2f}", 8)
    assert ((("", NONE_FITS) in fit_rows(cfg, 128256)), NONE_FITS in dry_run_report(cfg)) == (is_said, is_said)
    retained = HeldMemory(0, 0, 0, capacity=int(cfg.program.gpu_memory * 2**30))
    assert (NONE_FITS in str(out_of_memory(RuntimeError(), cfg, retained, vocab_size=128256, where="here"))) == is_said


def test_time_and_cost_follow_from_the_measured_rate():
    cfg = settings(LLAMA_8B, 8)
    rate = nearest_rate(cfg)
    assert (rate.kind, dict(rate.axes)) == ("dense", {})
    time, cost = dict(cost_rows(cfg, 8e15 * 8 * 3600, 64 * 1000)).values()
    seconds = 8e15 * 3600 / (rate.tflops * 1e12)
    assert time.startswith(f"{seconds:.3g} s at {rate.tflops:.0f} TFLOP/s")
    assert f"{seconds * 1000 / 86400:,.1f} days" in cost and f"{seconds * 1000 / 3600 * 8:,.3g} GPU-hours" in cost
    repeated = settings(MODELS["full"], 8)
    assert next(iter(cost_rows(repeated, 1e18, 64)))[1].startswith(f"{1e18 * 4 / 3 / 8 / rate.tflops / 1e12:.3g} s")


@pytest.mark.parametrize(
    "flags, kind, axes",
    [
        (LLAMA_8B, "dense", {}),
        (f"{LLAMA_8B} --tensor-model-parallel-size 2", "dense", {"tp": 2}),
        (f"{LLAMA_8B} --tensor-model-parallel-size 8", "dense", {"tp": 4}),
        (f"{LLAMA_8B} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4", "dense", {"pp": 4}),
        (EXPERTS, "experts", {}),
        (f"{EXPERTS} --expert-model-parallel-size 8", "experts", {"ep": 4}),
        (f"{EXPERTS} --moe-ffn-hidden-size 768 --expert-model-parallel-size 4", "fine experts", {"ep": 4}),
        (f"{LLAMA_8B} --hidden-size 1024 --kv-channels 32", "small", {}),
    ],
)
def test_the_nearest_measured_row_is_of_the_kind_and_the_slowest_axis(flags, kind, axes):
    cfg = settings(flags, 8)
    assert model_kind(cfg) == kind
    assert (nearest_rate(cfg).kind, dict(nearest_rate(cfg).axes)) == (kind, axes)


def test_no_rate_is_given_for_float32():
    cfg = settings(LLAMA_8B.replace("--bf16", ""), 8)
    assert nearest_rate(cfg) is None and "not measured" in dict(cost_rows(cfg, 1e15, 64))["time"]


def test_message_compares_allocated_memory_with_the_estimate():
    cfg = settings(LLAMA_8B, 8)
    retained = HeldMemory(15 * 2**30, 30 * 2**30, 20 * 2**30, 78 * 2**30, 80 * 2**30, "NVIDIA H100")
    text = str(out_of_memory(torch.OutOfMemoryError(CUDA), cfg, retained, vocab_size=128256, where="in iteration 3"))
    first, header, weights, gradients, state, rest, *others = text.splitlines()
    assert first == "out of memory for 2.00 GiB in iteration 3 (NVIDIA H100: 78.0 GiB in tensors of 80.0)"
    estimate = estimate_memory(cfg, 128256)[0]
    assert header.split() == ["GiB", "held", "estimate"]
    assert weights.split() == ["weights", "15.00", f"{estimate.weights / 2**30:.2f}"]
    assert gradients.split() == ["gradients", "30.00", f"{estimate.gradients / 2**30:.2f}"]
    assert state.split()[-2:] == ["20.00", f"{estimate.optimizer / 2**30:.2f}"]
    assert rest.split()[-2:] == ["13.00", f"{(estimate.activations + estimate.working) / 2**30:.2f}"]
    assert [line.split()[0] for line in others[: len(estimate.kinds)]] == [name.split()[0] for name in estimate.kinds]
    assert sum(line.startswith("  --") for line in others) == 3
    for capacity, fits in ((2**34, False), (2**40, True)):
        changed = replace(retained, capacity=capacity)
        text = str(out_of_memory(torch.OutOfMemoryError(CUDA), cfg, changed, vocab_size=128256, where="here"))
        last = "none of them alone fits this GPU: combine them, or split the model over more GPUs"
        assert text.endswith(last) == (not fits)


def test_errors_of_both_allocators_are_recognized():
    cpu = RuntimeError("[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you "
                       "tried to allocate 4294967296 bytes. Error code 12 (Cannot allocate memory)")  # fmt: skip
    assert is_out_of_memory(cpu) and is_out_of_memory(torch.OutOfMemoryError(CUDA))
    assert not is_out_of_memory(RuntimeError("a bug")) and not is_out_of_memory(ValueError("can't allocate memory"))
    text = str(out_of_memory(cpu, settings(LLAMA_8B, 1), HeldMemory(), where="here"))
    assert text.startswith("out of memory for 4.00 GiB here\n")


def run_out(rank, world_size, argv):
    """Train; the last rank's third forward pass finds no memory. Return exit code and messages."""
    from megatron.training.tasks.gpt import GPTTask

    forward, calls = GPTTask.forward_step, []

    def forward_step(self, *arguments):
        calls.append(1)
        if rank == world_size - 1 and len(calls) == 3:
            raise torch.OutOfMemoryError(CUDA)
        return forward(self, *arguments)

    with mock.patch.object(GPTTask, "forward_step", forward_step):
        return train_with_errors(rank, world_size, argv)


def test_a_run_out_of_memory_ends_in_one_message(gloo_pool):
    argv = ["--mock-data", "--micro-batch-size", "2", "--global-batch-size", "4"]
    [(code, text)] = gloo_pool.run(run_out, 1, argv)
    assert code != 0 and "Traceback" not in text
    assert text.startswith("error: out of memory for 2.00 GiB in iteration 2\n") and "optimizer state" in text
    assert text.count("out of memory") == 1


def run_out_in_build(rank, world_size, argv):
    with mock.patch("megatron.training.run.build_model", side_effect=torch.OutOfMemoryError(CUDA)):
        return train_with_errors(rank, world_size, argv)


def test_a_model_that_does_not_fit_is_reported_while_it_is_built(gloo_pool):
    for code, text in gloo_pool.run(run_out_in_build, 2, ["--mock-data"]):
        assert code != 0 and "out of memory for 2.00 GiB while the model was built" in text
        assert "weights                           -" in text  # not measured: only the estimate is known


@pytest.mark.gpu
def test_gpu_out_of_memory_report_equals_the_estimate():
    """A real allocator: the table's first three rows equal the estimate, and the rest is counted."""
    from megatron.core.parallel_state import destroy_model_parallel
    from megatron.training.initialize import initialize_megatron
    from megatron.training.run import _cause, build_components
    from megatron.training.tasks.gpt import GPTTask
    from megatron.training.verify.layout_trace import with_synthetic_data

    text = (
        "--num-layers 4 --hidden-size 1024 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 "
        "--micro-batch-size 4 --global-batch-size 4 --lr 1e-3 --train-iters 2 --bf16 --vocab-size 32000 --eval-iters 0 "
        "--attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer --mock-data"
    )
    gc.collect()
    before = torch.cuda.memory_allocated()  # tensors of other tests of this process
    cfg = validate_args(parse_args(text.split()), 1)
    groups = initialize_megatron(cfg)
    try:
        parts = build_components(cfg, with_synthetic_data(GPTTask, 32000)(cfg), groups)
        retained, estimate = measure(parts.model, parts.optimizer), estimate_memory(cfg, 32000)[0]
        assert retained.weights == estimate.weights and retained.gradients == estimate.gradients
        assert abs(retained.optimizer - estimate.optimizer) < 0.01 * estimate.optimizer
        assert retained.rest - before < 0.05 * (retained.total - before)
        saved = torch.empty(2**28, dtype=torch.uint8, device="cuda")
        assert measure(parts.model, parts.optimizer).rest >= 2**28
        with pytest.raises(torch.OutOfMemoryError) as error:
            torch.empty(2**50, dtype=torch.uint8, device="cuda")
        message = str(_cause(error.value, cfg, parts))
        assert "GiB in tensors of" in message and "these flags help most" in message, message
        del saved
    finally:
        destroy_model_parallel()
