"""flash-attn-4 equals plain torch: rows, windows, documents, blocks of rings; where it is chosen, and what it costs.

On a CPU with its functions played in plain torch, on a GPU itself. It compiles kernels at the first call of each kind,
about six seconds each: FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 keeps them for the next process.
"""

import pytest
import torch

from megatron.core.attention import choose
from megatron.core.attention.choose import choose_kernel
from megatron.core.attention.dot_product_attention import CoreAttention
from megatron.core.attention.kernels import flash_attn_4
from megatron.core.attention.kernels.base import Request
from megatron.core.attention.kernels.flash_attn_4 import FlashAttention4, WhereFaster
from megatron.core.attention.kernels.torch_sdpa import TorchAttention
from megatron.core.attention.kernels.unfused import UnfusedAttention
from megatron.core.attention.masks import Mask
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.tiles import Tile, Visibility
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.extensions.flash_attn import installed_versions
from megatron.core.groups.process_groups import SINGLE_PROCESS
from tests.test_utils import fake_attention
from tests.unit_tests.core.attention.context_parallel import test_block_attention

HOPPER = (9, 0)
DOCUMENTS = [100, 3, 409, 256, 244, 0, 1, 700, 311]  # two rows of 1012, and no document in both
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(4 not in installed_versions(), reason="needs flash-attn-4")]


def request(**changes):
    return Request(**{"backend": "auto", "dtype": torch.bfloat16, "channels": 128, "capability": HOPPER,
                      "flash_packages": (4,), **changes})  # fmt: skip


@pytest.mark.parametrize(
    "changes, kernel, words",
    [
        ({}, "flash-attn 4", "from 8192 tokens on, else cuDNN through torch SDPA"),
        ({"form": "ring"}, "flash-attn 4", "compiled in the first iteration"),
        ({"form": "gather", "dtype": torch.float16}, "flash-attn 4", ""),
        ({"flash_packages": ()}, "cudnn", "(sm_90, bfloat16, head dim 128)"),
        ({"channels": 64}, "cudnn", "not flash-attn, FlashAttention 4: it was measured on sm_90 with head dim 128"),
        ({"capability": (10, 0)}, "cudnn", "measured on sm_90"),
        ({"window": (127, 0)}, "flash", "not measured with windows"),
        ({"deterministic": True}, "flash", "not measured with"),
        ({"dropout": 0.1}, "unfused", "depend on the layout"),
        ({"dtype": torch.float32}, "efficient", "float32"),
        ({"backend": "fused"}, "cudnn", "(sm_90, bfloat16, head dim 128)"),
        ({"backend": "flash", "flash_packages": (2, 3, 4)}, "flash-attn 4", "compiled"),
        ({"backend": "flash", "window": (127, 0), "channels": 64}, "flash-attn 4", "window 127,0"),
        ({"backend": "flash", "capability": (10, 0)}, "flash-attn 4", "sm_100"),
        ({"backend": "flash", "capability": (10, 3), "channels": 256}, "flash-attn 4", "sm_103"),
        ({"backend": "flash", "capability": (10, 0), "channels": 192}, "flash", "on Blackwell it takes"),
        ({"backend": "flash", "channels": 192}, "flash-attn 4", "head dim 192"),
        ({"backend": "flash", "capability": (8, 0)}, "flash", "for Hopper and Blackwell"),
        ({"flash_version": 4, "form": "ring"}, "flash-attn 4", "--flash-attention-version 4"),
        ({"flash_version": 4, "channels": 64}, "flash-attn 4", "--flash-attention-version 4"),
    ],
)
def test_it_is_chosen_where_it_was_measured_to_be_faster_or_is_asked_for(changes, kernel, words):
    choice = choose_kernel(request(**changes))
    assert choice.kernel == kernel and words in str(choice)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"flash_packages": ()}, "--flash-attention-version 4: the package is not installed; .*pip install"),
        ({"capability": (8, 0)}, "for Hopper and Blackwell"),
        ({"channels": 100}, "multiples of 8 up to 256"),
        ({"channels": 136, "capability": (10, 0)}, "on Blackwell it takes head dims up to 128, and 256"),
        ({"dtype": torch.float32}, "bfloat16 or float16"),
        ({"backend": "fused"}, "contradicts --attention-backend fused"),
    ],
)
def test_asked_for_by_its_version_it_is_rejected_where_it_cannot_serve(changes, message):
    with pytest.raises(ValueError, match=message):
        choose_kernel(request(flash_version=4, **changes))


@pytest.fixture
def on_hopper(monkeypatch):
    """A machine with a GPU and the package, as far as the choice sees."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: HOPPER)
    for module in (choose, flash_attn_4):
        monkeypatch.setattr(module, "installed_versions", lambda: (4,))
    flash_attn_4.is_usable.cache_clear()
    yield
    flash_attn_4.is_usable.cache_clear()


@pytest.mark.parametrize("error", [ImportError, OSError, TypeError, AttributeError])
def test_one_that_cannot_be_imported_is_left_aside(monkeypatch, on_hopper, error):
    """Incompatible releases of its dependencies break its import in many ways."""

    def fail(name):
        raise error("no such thing")

    monkeypatch.setattr(flash_attn_4.importlib, "import_module", fail)
    assert core().choice.kernel == "cudnn"


def test_deterministic_algorithms_of_torch_are_asked_of_it_too(monkeypatch, on_hopper):
    fake_attention.install(monkeypatch, 4)
    for requested in (False, True):
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda requested=requested: requested)
        kernel = core(attention_backend="flash").kernel
        assert isinstance(kernel, FlashAttention4) and kernel.deterministic == requested


@pytest.mark.parametrize(
    "queries, keys, right, taken",
    [
        (8192, 8192, 0, True), (4096, 4096, 0, False), (8192, 4096, None, True), (4096, 4096, None, False),
        (16384, 4096, None, True), (8128, 8128, 0, False), (8193, 8193, 0, True),
    ],
)  # fmt: skip
def test_unasked_it_computes_tiles_of_sizes_at_which_it_was_faster(queries, keys, right, taken):
    cudnn = TorchAttention("cudnn", 0.1)
    tile = Tile(None, 0, queries, 0, keys, None, right, 0, 0)
    kernel = WhereFaster(FlashAttention4(0.1), cudnn)
    assert kernel.kernel_for(tile) is (kernel.fast if taken else cudnn)
    assert kernel.kernel_for(tile._replace(left=7)) is cudnn


def tensors(length, batch, heads, groups, channels, dtype=torch.bfloat16, device="cuda", keys=None):
    """Queries as the rotary embedding writes them; keys and values as views of the projection; the output's
    gradient."""
    generator = torch.Generator().manual_seed(0)
    keys = keys or length
    query = torch.randn(length, batch, heads, channels, generator=generator).to(device, dtype)
    packed = torch.randn(keys, batch, groups, 3 * channels, generator=generator).to(device, dtype)
    grad = torch.randn(length, batch, heads * channels, generator=generator).to(device, dtype)
    return [query, packed[..., :channels], packed[..., channels : 2 * channels], grad.unflatten(-1, (heads, channels))]


def results(kernel, inputs, mask):
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    output = kernel.attend(*leaves, mask)
    return [output.detach(), *torch.autograd.grad(output, leaves, inputs[3])]


def errors(kernel, inputs, mask, scale):
    """Relative errors of output and gradients against plain torch in float32."""
    exact = results(UnfusedAttention(scale), [x.double() for x in inputs], mask)
    result = results(kernel, inputs, mask)
    return [((x.double() - y).norm() / (y.norm() + 1e-3)).item() for x, y in zip(result, exact, strict=True)]


def documents(device="cuda", lengths=DOCUMENTS):
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    packed = PackedSeqParams(cu_seqlens_q=bounds, max_seqlen_q=max(lengths))
    packed.check(2, sum(lengths) // 2)
    return packed


VISIBILITIES = {
    "causal": Visibility(True), "all pairs": Visibility(False), "window": Visibility(True, (150, 0)),
    "two-sided window": Visibility(False, (70, 300)),
}  # fmt: skip


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
@pytest.mark.parametrize("visibility", VISIBILITIES.values(), ids=VISIBILITIES.keys())
def test_its_functions_are_called_as_they_are_declared(monkeypatch, visibility, packed):
    calls = fake_attention.install(monkeypatch, 4)
    small = [5, 0, 20, 12, 12, 0, 0, 35, 14]
    mask = Mask(visibility, documents("cpu", small) if packed else None)
    inputs = tensors(sum(small) // 2, 2, 4, 2, 8, torch.float64, "cpu")
    assert max(errors(FlashAttention4(0.3), inputs, mask, 0.3)) < 1e-12
    assert calls == ["forward", "backward"]


@pytest.mark.parametrize("shape", [(1024, 1012, 2, 8, 2, 128), (256, 261, 1, 4, 4, 64)], ids=str)
@pytest.mark.parametrize("visibility", VISIBILITIES.values(), ids=VISIBILITIES.keys())
@pytest.mark.parametrize("even", [True, False], ids=["even", "odd"])
class TestOnAGpu:
    """Heads with 128 channels in groups of four, or 64 channels without groups; even and odd lengths."""

    pytestmark = on_gpu

    def test_rows_equal_plain_torch(self, visibility, shape, even):
        length, odd, *sizes = shape
        inputs = tensors(length if even else odd, *sizes)
        assert max(errors(FlashAttention4(0.1), inputs, Mask(visibility), 0.1)) < 2e-2


@pytest.mark.gpu
@on_gpu[1]
@pytest.mark.parametrize("visibility", VISIBILITIES.values(), ids=VISIBILITIES.keys())
def test_documents_equal_plain_torch(visibility):
    inputs = tensors(sum(DOCUMENTS) // 2, 2, 8, 2, 128)
    assert max(errors(FlashAttention4(0.1), inputs, Mask(visibility, documents()), 0.1)) < 2e-2


@pytest.mark.gpu
@on_gpu[1]
@pytest.mark.parametrize("queries, keys", [(1, 700), (130, 700)])
def test_fewer_queries_align_with_the_last_keys(queries, keys):
    inputs = tensors(queries, 2, 8, 2, 128, keys=keys)
    assert max(errors(FlashAttention4(0.1), inputs, Mask(), 0.1)) < 2e-2


@pytest.mark.gpu
@on_gpu[1]
def test_deterministic_gradients_repeat_their_bits():
    inputs, kernel = tensors(2048, 1, 8, 2, 128), FlashAttention4(0.1, deterministic=True)
    first = results(kernel, inputs, Mask())
    assert all(torch.equal(x, y) for _ in range(5) for x, y in zip(first, results(kernel, inputs, Mask())))
    assert max(errors(kernel, inputs, Mask(), 0.1)) < 2e-2


def core(**overrides):
    return CoreAttention(
        TransformerConfig(
            num_layers=1, hidden_size=1024, num_attention_heads=8, num_query_groups=2, kv_channels=128,
            params_dtype=torch.bfloat16, attention_dropout=0.0, **overrides,
        ), 1, groups=SINGLE_PROCESS,
    )  # fmt: skip


def kernel_names(module, inputs):
    """Kernels of forward and backward, after a first round."""
    from torch.profiler import ProfilerActivity, profile

    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    for _ in range(2):
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
            mixed = module(*leaves)
            torch.autograd.grad(mixed, leaves, inputs[3].flatten(2))
            torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    return [event.name.lower() for event in trace.events() if event.device_type == on_device]


@pytest.mark.gpu
@on_gpu[1]
@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() != HOPPER, reason="needs Hopper")
def test_it_runs_from_8192_tokens_on_unless_cudnn_is_asked_for_and_nothing_is_copied():
    for length, backend, expected in [(8192, "auto", "flash"), (4096, "auto", "cudnn"), (8192, "fused", "cudnn"),
                                      (4096, "flash", "flash")]:  # fmt: skip
        module = core(attention_backend=backend)
        names = kernel_names(module, tensors(length, 1, 8, 2, 128))
        assert any(expected in name for name in names), (length, backend, str(module.choice), names)
        copies = [name for name in names if any(word in name for word in ("copy", "memcpy"))]
        assert copies == [], (length, backend, copies)


@pytest.mark.gpu
@on_gpu[1]
def test_a_cuda_graph_replays_its_bits():
    kernel, inputs = FlashAttention4(0.1, deterministic=True), tensors(1024, 1, 8, 2, 128)
    expected = results(kernel, inputs, Mask())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        results(kernel, inputs, Mask())
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(kernel, inputs, Mask())
    for _ in range(2):
        for x in captured:
            x.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(x, y) for x, y in zip(captured, expected, strict=True))


@pytest.mark.gpu
@on_gpu[1]
@pytest.mark.parametrize(
    "visibility, packed, whole_keys",
    [("causal", False, False), ("causal", False, True), ("causal", True, False), ("window", False, False)],
)
def test_merged_blocks_equal_attention_over_everything(visibility, packed, whole_keys):
    """Two ranks of a ring or an all-gather, simulated on one device."""
    inputs = test_block_attention.tensors(1024, 128, torch.bfloat16, "cuda")
    bounds = test_block_attention.DOCUMENTS if packed else None
    play = test_block_attention.play_ring
    exact = play(UnfusedAttention(0.1), [x.float() for x in inputs], VISIBILITIES[visibility], bounds, 1)
    result = play(FlashAttention4(0.1), inputs, VISIBILITIES[visibility], bounds, 2, whole_keys)
    output, *gradients = test_block_attention.errors(result, exact)
    assert output < 5e-3 and max(gradients) < 2e-2, (output, gradients)
