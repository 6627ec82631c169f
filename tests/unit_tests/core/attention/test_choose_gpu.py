"""On a GPU: the chosen kernel is the one that runs, nothing is copied around it, and a kernel that cannot run says
why."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megatron.core.attention.context import AttentionContext
from megatron.core.attention.dot_product_attention import CoreAttention
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.token_layout import TokenLayout
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.test_utils.reference_attention import reference_attention

pytestmark = pytest.mark.gpu

LENGTH, BATCH, HEADS, CHANNELS = 512, 2, 8, 64


def make_config(groups, **overrides):
    sizes = {"num_layers": 1, "hidden_size": HEADS * CHANNELS, "num_attention_heads": HEADS, "num_query_groups": groups}
    return TransformerConfig(**sizes, attention_dropout=0.0, **{"params_dtype": torch.bfloat16, **overrides})


def inputs(groups, dtype=torch.bfloat16, length=LENGTH):
    """Queries as the rotary embedding writes them; keys and values as views of the projection."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    draw = {"device": "cuda", "dtype": dtype, "generator": generator}
    query = torch.randn(length, BATCH, HEADS, CHANNELS, **draw)
    packed = torch.randn(length, BATCH, groups, 3 * CHANNELS, **draw)
    key, value = packed[..., :CHANNELS], packed[..., CHANNELS : 2 * CHANNELS]
    return [x.detach().requires_grad_() for x in (query, key, value)]


def kernels_of(core, tensors):
    """Names of the GPU kernels of forward and backward, after a first round."""
    for round_number in range(2):
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
            mixed = core(*tensors)
            gradient = torch.ones_like(mixed)  # [s, b, a * d], as the projection's backward writes it
            torch.autograd.grad(mixed, tensors, gradient)
            torch.cuda.synchronize()
        if round_number:
            on_gpu = torch.autograd.DeviceType.CUDA
            return [event.name for event in trace.events() if event.device_type == on_gpu]


@pytest.mark.parametrize("groups", [HEADS, 2])
def test_cudnn_runs_where_it_was_chosen_and_nothing_is_copied(groups):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("cuDNN is the first choice from Hopper on")
    core = CoreAttention(make_config(groups), 1, groups=SINGLE_PROCESS)
    assert core.choice.kernel == "cudnn"
    names = kernels_of(core, inputs(groups))
    assert any("cudnn" in name for name in names), names
    copies = [name for name in names if any(word in name.lower() for word in ("copy", "memcpy"))]
    assert copies == [], copies


@pytest.mark.parametrize("groups", [HEADS, 2])
@pytest.mark.parametrize(
    "choice",
    [
        {"attention_backend": "auto"}, {"attention_backend": "flash"}, {"attention_backend": "fused"},
        {"window_size": (100, 0)}, {"window_size": (0, 0)}, {"attention_backend": "flash", "window_size": (31, 0)},
        {"params_dtype": torch.float32},
    ],
)  # fmt: skip
def test_every_choice_equals_the_reference_in_float32(choice, groups, length=LENGTH):
    config = make_config(groups, **choice)
    tensors = inputs(groups, config.params_dtype, length)
    exact = [x.detach().float().requires_grad_() for x in tensors]
    reference = reference_attention(config, 1)(*exact)
    mixed = CoreAttention(config, 1, groups=SINGLE_PROCESS)(*tensors)
    gradient = torch.randn_like(reference)
    expected = torch.autograd.grad(reference, exact, gradient)
    actual = torch.autograd.grad(mixed, tensors, gradient.to(mixed.dtype))
    for one, other in zip((mixed, *actual), (reference, *expected)):
        # a query that sees only itself has no gradient: nonzero values there are rounding
        assert (one.float() - other).norm() < 0.02 * other.norm() + 1e-3


@pytest.mark.parametrize("backend", ["auto", "flash"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("keys, values", [(192, 128), (192, 192)])
def test_heads_of_latent_attention_equal_the_reference(backend, packed, sink, keys, values):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("cuDNN takes such heads on Hopper")
    config = make_config(HEADS, attention_backend=backend, softmax_type="off-by-one" if sink else "vanilla")
    core = CoreAttention(config, 1, groups=SINGLE_PROCESS, k_channels=keys, v_channels=values).cuda()
    assert core.choice.kernel == ("cudnn" if backend == "auto" else "flash")
    generator = torch.Generator(device="cuda").manual_seed(0)
    shapes = [(LENGTH, BATCH, HEADS, width) for width in (keys, keys, values)]
    draw = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    tensors = [torch.randn(shape, **draw).requires_grad_() for shape in shapes]
    bounds = list(range(0, LENGTH * BATCH + 1, 256))
    documents = PackedSeqParams(cu_seqlens_q=torch.tensor(bounds, dtype=torch.int32, device="cuda")) if packed else None
    mixed = core(*tensors, AttentionContext(layout=TokenLayout(documents=documents)))
    exact = [x.detach().double().permute(1, 2, 0, 3).requires_grad_() for x in tensors]
    place = torch.arange(LENGTH, device="cuda")
    visible = place[:, None] >= place
    if packed:
        visible &= place[:, None] // 256 == place // 256
    scores = (exact[0] @ exact[1].mT / keys**0.5).masked_fill(~visible, -torch.inf)
    if sink:
        scores = torch.nn.functional.pad(scores, (0, 1))
    reference = (scores.softmax(-1)[..., :LENGTH] @ exact[2]).permute(2, 0, 1, 3).flatten(2)
    gradient = torch.randn_like(reference)
    expected = [x.permute(2, 0, 1, 3) for x in torch.autograd.grad(reference, exact, gradient)]
    actual = torch.autograd.grad(mixed, tensors, gradient.to(mixed.dtype))
    for one, other in zip((mixed, *actual), (reference, *expected)):
        assert (one.double() - other).norm() < 0.02 * other.norm()


@pytest.mark.parametrize("length", [16, 40, 64, 100, 192, 261])
@pytest.mark.parametrize("window", [None, (31, 0)])
def test_lengths_that_cudnn_does_not_take_have_gradients_too(length, window):
    choice = {} if window is None else {"window_size": window}
    test_every_choice_equals_the_reference_in_float32(choice, 2, length)


@pytest.mark.parametrize("groups", [HEADS, 2])
@pytest.mark.parametrize("choice", [{}, {"attention_backend": "flash"}, {"window_size": (31, 0)}])
def test_documents_equal_the_reference_in_one_call(choice, groups):
    config, lengths = make_config(groups, **choice), [100, 3, 409, 0, 256, 255, 1]  # two rows
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    documents = PackedSeqParams(cu_seqlens_q=bounds, max_seqlen_q=max(lengths))
    tensors = inputs(groups)
    exact = [x.detach().float().requires_grad_() for x in tensors]
    context = AttentionContext(layout=TokenLayout(documents=documents))
    reference = reference_attention(config, 1)(*exact, context)
    mixed = CoreAttention(config, 1, groups=SINGLE_PROCESS)(*tensors, context)
    gradient = torch.randn_like(reference)
    expected = torch.autograd.grad(reference, exact, gradient)
    actual = torch.autograd.grad(mixed, tensors, gradient.to(mixed.dtype))
    for one, other in zip((mixed, *actual), (reference, *expected)):
        assert (one.float() - other).norm() < 0.02 * other.norm() + 1e-3


def test_cudnn_asked_for_by_name_refuses_lengths_that_it_does_not_take():
    core = CoreAttention(make_config(HEADS, attention_backend="fused"), 1, groups=SINGLE_PROCESS)
    with pytest.raises(ValueError, match="--attention-backend fused: 192 queries and 192 keys .* multiples of 128"):
        core(*inputs(HEADS, length=192))


@pytest.mark.parametrize("version", [2, 3])
def test_flash_attn_itself_equals_the_reference(version):
    pytest.importorskip({2: "flash_attn", 3: "flash_attn_interface"}[version])
    test_every_choice_equals_the_reference_in_float32({"flash_attention_version": version}, 2)
    test_every_choice_equals_the_reference_in_float32({"flash_attention_version": version, "window_size": (31, 0)}, 2)


def test_a_kernel_that_cannot_run_says_why():
    core = CoreAttention(make_config(HEADS, attention_backend="flash"), 1, groups=SINGLE_PROCESS)
    if core.choice.kernel != "flash":
        pytest.skip("the flash-attn package serves here")
    with pytest.raises(ValueError, match="attention: torch's flash kernel .* does not take query .*float32"):
        core(*inputs(HEADS, torch.float32))


@pytest.mark.parametrize("groups", [HEADS, 2])
def test_under_a_dense_mask_rows_of_small_logits_have_gradients(groups):
    """cuDNN's backward pass returns NaN for them: length 64 modulo 128, log-sum-exps below float32's range."""
    config = make_config(groups)
    query, key, value = (0.1 * x.detach() for x in inputs(groups, length=192))
    query[..., 0], key[..., 0] = 1.0, -120 * CHANNELS**0.5
    tensors = [x.requires_grad_() for x in (query, key, value)]
    exact = [x.detach().float().requires_grad_() for x in tensors]
    mask = torch.zeros(1, 1, 192, 192, dtype=torch.bool, device="cuda")
    mask[..., :7] = torch.arange(192, device="cuda").view(-1, 1) > 7
    context = AttentionContext(attention_mask=mask)
    reference = reference_attention(config, 1)(*exact, context)
    mixed = CoreAttention(config, 1, groups=SINGLE_PROCESS)(*tensors, context)
    gradient = torch.randn_like(reference)
    expected = torch.autograd.grad(reference, exact, gradient)
    results = torch.autograd.grad(mixed, tensors, gradient.to(mixed.dtype))
    assert all(x.isfinite().all() for x in results)
    # of the first channel, which all keys share, a query's gradient is rounding
    for one, other in zip((mixed, *(x[..., 1:] for x in results)), (reference, *(x[..., 1:] for x in expected))):
        assert (one.float() - other).norm() < 0.05 * other.norm() + 1e-3
