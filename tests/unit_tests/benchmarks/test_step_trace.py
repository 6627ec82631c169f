"""Reading one step out of a trace, on a trace made by hand: microseconds in, milliseconds out."""

import gzip
import json

import pytest

from benchmarks.harness import kernel_classes as kinds
from benchmarks.harness import step_trace

WEIGHTS = {(6, 4)}  # one linear layer, 4 -> 6, on 8 tokens


class Trace:
    """Host on thread 1, autograd on thread 2, device on stream 7."""

    def __init__(self):
        self.events, self.correlation = [], 0

    def host(self, name, start, duration, thread=1, cat="cpu_op", **args):
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": duration, "pid": 1, "tid": thread, "args": args}
        )

    def call(self, name, at, duration=1, thread=1, **args):
        self.host(name, at, duration, thread, "cuda_runtime", **args)

    def kernel(self, name, start, duration, launched, thread=1, cat="kernel", stream=7):
        self.correlation += 1
        self.call("cudaLaunchKernel", launched, thread=thread, correlation=self.correlation)
        self.events.append({
            "ph": "X", "cat": cat, "name": name, "ts": start, "dur": duration, "pid": 0, "tid": stream,
            "args": {"correlation": self.correlation, "stream": stream},
        })  # fmt: skip

    def step(self, at, number):
        """100 us: forward, backward, a collective half hidden, a wait, the optimizer."""
        self.host(f"iteration {number}", at, 100, cat="user_annotation")
        self.host("aten::linear", at + 1, 4)
        self.host("aten::mm", at + 2, 2, **{"Input Dims": [[8, 4], [4, 6]]})
        self.kernel("nvjet_tst_128x256", at + 10, 10, at + 3)
        self.host("autograd::engine::evaluate_function: LinearBackward0", at + 6, 6, thread=2)
        self.host("aten::mm", at + 7, 2, thread=2, **{"Input Dims": [[8, 6], [6, 4]]})
        self.kernel("nvjet_tst_64x64", at + 20, 10, at + 8, thread=2)
        self.host("aten::addmm", at + 10, 2, thread=2, **{"Input Dims": [[6, 4], [6, 8], [8, 4]]})
        self.kernel("nvjet_tst_64x64", at + 30, 10, at + 11, thread=2)
        self.kernel("ncclDevKernel_AllReduce", at + 35, 15, at + 12, thread=2, stream=9)  # exposed: 40 to 50
        self.host("aten::item", at + 52, 8)
        self.call("cudaStreamSynchronize", at + 53, 6)
        self.kernel("Memcpy DtoH (Device -> Pageable)", at + 51, 1, at + 50, cat="gpu_memcpy")
        self.host("optimizer", at + 60, 20, cat="user_annotation")
        self.kernel("void at::native::vectorized_elementwise_kernel<4, x>", at + 70, 20, at + 61)


@pytest.fixture
def two_steps():
    trace = Trace()
    trace.step(1000, 3)
    late = {"ph": "X", "cat": "kernel", "name": "late", "ts": 995, "dur": 8, "pid": 0, "tid": 7}
    trace.events.append({**late, "args": {"correlation": 99}})  # launched before the trace began
    trace.step(1100, 4)
    return trace.events


def test_every_instant_of_a_step_is_attributed_once(two_steps):
    actual = step_trace.profile(two_steps, WEIGHTS)
    assert actual.iteration == 3
    assert actual.step_ms == pytest.approx(0.1)
    assert sum(actual.ms.values()) == pytest.approx(actual.step_ms)
    expected = {
        kinds.GEMM_FORWARD: 10, kinds.GEMM_DGRAD: 10, kinds.GEMM_WGRAD: 10, kinds.COMMUNICATION: 10,
        kinds.COPIES: 1, kinds.OPTIMIZER: 20, kinds.IDLE: 39,
    }  # fmt: skip
    assert {name: round(ms * 1e3, 6) for name, ms in actual.ms.items() if ms} == expected
    assert actual.busy_ms[kinds.COMMUNICATION] == pytest.approx(0.015)


def test_launches_waits_and_copies_to_the_host_are_counted(two_steps):
    result = step_trace.profile(two_steps, WEIGHTS)
    assert result.launches == 6
    assert result.host_calls == {"cudaLaunchKernel": 6}
    assert result.synchronizations == [
        {"name": "cudaStreamSynchronize", "scope": "aten::item", "count": 1, "ms": 0.006}
    ]
    assert result.device_to_host_copies == 1


def test_gaps_name_the_host_operation(two_steps):
    max_length, second = step_trace.profile(two_steps, WEIGHTS).gaps[:2]
    assert max_length["ms"] == pytest.approx(0.020)
    assert (max_length["after"], max_length["before"]) == ("vectorized_elementwise_kernel", "nvjet_tst_128x256")
    assert second["ms"] == pytest.approx(0.018)
    assert second["host"] == "optimizer" and second["host_waited_ms"] == pytest.approx(0.006)


def test_a_trace_without_marks_is_one_step(two_steps):
    unmarked = [event for event in two_steps if not event["name"].startswith("iteration")]
    result = step_trace.profile(unmarked, WEIGHTS)
    assert result.iteration is None and result.launches == 13


def test_a_launch_from_an_unknown_thread_belongs_to_the_operator_of_its_number():
    trace = Trace()
    trace.host("aten::mm", 0, 5, thread=2, **{"Input Dims": [[8, 4], [4, 6]], "External id": 17})
    trace.kernel("nvjet_tst_64x64", 10, 10, 2, thread=99)
    trace.events[-1]["args"]["External id"] = 17
    assert step_trace.profile(trace.events, WEIGHTS).ms[kinds.GEMM_FORWARD] == pytest.approx(0.01)


def test_without_a_gpu_operators_stand_for_kernels(tmp_path):
    trace = Trace()
    trace.host("_RMSNorm", 0, 50)
    trace.host("aten::mul", 10, 30)
    trace.host("aten::linear", 60, 40)
    trace.host("aten::mm", 65, 30, **{"Input Dims": [[8, 4], [4, 6]]})
    trace.host("gloo:all_reduce", 90, 30, cat="user_annotation")  # behind the end of aten::linear, then exposed
    path = tmp_path / "rank-0.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": [*trace.events, {"ph": "M"}]}).encode()))
    result = step_trace.profile(step_trace.read_events(path), WEIGHTS)
    assert result.ms[kinds.NORM] == pytest.approx(0.05) and result.ms[kinds.GEMM_FORWARD] == pytest.approx(0.03)
    assert result.ms[kinds.OTHER] == result.ms[kinds.IDLE] == pytest.approx(0.01)  # aten::linear around the GEMM
    assert result.ms[kinds.COMMUNICATION] == pytest.approx(0.02)
    assert step_trace.profile([]) is None


def test_the_table_names_every_class_that_took_time(two_steps):
    text = step_trace.text(step_trace.profile(two_steps, WEIGHTS))
    assert "GEMM weight gradient" in text and "host waits 1" in text


@pytest.mark.parametrize(
    ("kernel", "scope", "kind"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "", kinds.ATTENTION_FORWARD),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "", kinds.ATTENTION_BACKWARD),
        ("void pytorch_flash::flash_fwd_kernel<cutlass::bfloat16_t>", "", kinds.ATTENTION_FORWARD),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "optimizer/c10d::reduce_scatter", kinds.COMMUNICATION),
        ("_rms_norm_backward_kernel", "autograd::engine::evaluate_function: X", kinds.NORM),
        ("void at::native::vectorized_elementwise_kernel<4>", "_RMSNorm/aten::mul", kinds.NORM),
        ("void at::native::vectorized_elementwise_kernel<4>", "forward-backward/_SwiGLU/aten::mul", kinds.ACTIVATION),
        ("triton_poi_fused_mul_silu_0", "CompiledFunction", kinds.ACTIVATION),
        ("_rotary_kernel", "", kinds.ROPE),
        ("_forward_kernel", "forward-backward/_Normalize", kinds.NORM),
        ("_forward_kernel", "forward-backward/_GatedNorm", kinds.NORM),
        ("_pairs_kernel", "forward-backward/_LinearAttention", kinds.LINEAR_ATTENTION),
        ("_backward_kernel", "autograd::engine::evaluate_function: _ConvolutionSiLUBackward", kinds.LINEAR_ATTENTION),
        ("triton_per_fused_add_mean_mul_rsqrt_0", "CompiledFunction", kinds.NORM),
        ("_gradient_kernel", "_LinearCrossEntropy", kinds.CROSS_ENTROPY),
        ("nvjet_tst_256x128", "_LinearCrossEntropy/aten::mm", kinds.GEMM_FORWARD),
        ("_gated_backward", "autograd::engine::evaluate_function: _GatedBackward/_GatedBackward", kinds.ACTIVATION),
        ("_dropout_kernel", "_DropoutAdd", kinds.DROPOUT),
        ("_merge_kernel", "_Ring", kinds.ATTENTION_FORWARD),
        ("_adam_kernel", "forward-backward", kinds.OPTIMIZER),
        ("void at::native::multi_tensor_apply_kernel<LpNormFunctor>", "", kinds.OPTIMIZER),
        ("sm90_xmma_gemm_bf16bf16_bf16f32", "CrossEntropyBackward", kinds.GEMM_OTHER),
        ("_cross_entropy_forward_kernel", "", kinds.CROSS_ENTROPY),
        ("Memset (Device)", "aten::zero_", kinds.COPIES),
        ("void at::native::vectorized_elementwise_kernel<4>", "forward-backward/aten::add", kinds.OTHER),
    ],
)  # fmt: skip
def test_kernels_are_classified_by_name_and_launching_scope(kernel, scope, kind):
    assert kinds.classify(kernel, scope) == kind


@pytest.mark.parametrize(
    ("shape", "backward", "kind"),
    [
        ((8192, 4096, 6144), False, kinds.GEMM_FORWARD),
        ((8192, 6144, 4096), True, kinds.GEMM_DGRAD),
        ((6144, 8192, 4096), True, kinds.GEMM_WGRAD),
        ((6144, 8192, 4096), False, kinds.GEMM_WGRAD),  # put off by a pipeline schedule: outside of the engine
        ((8192, 4096, 6144), True, kinds.GEMM_FORWARD),  # recomputed
        ((8192, 4096, 4096), False, kinds.GEMM_FORWARD),
        ((8192, 4096, 4096), True, kinds.GEMM_DGRAD),
        ((4096, 8192, 4096), True, kinds.GEMM_WGRAD),
        ((4096, 4096, 4096), True, kinds.GEMM_OTHER),  # as many tokens as channels
        ((3, 5, 7), False, kinds.GEMM_OTHER),
        (None, False, kinds.GEMM_FORWARD),
    ],
)  # fmt: skip
def test_three_gemms_of_a_linear_layer_are_distinguished(shape, backward, kind):
    assert kinds.gemm_class(shape, {(6144, 4096), (4096, 4096)}, backward) == kind
