"""Selection of the attention kernel with its reason; flash-attn equals the reference."""

import pytest
import torch
from torch.nn.attention import SDPBackend

from megatron.core.attention.choose import choose_kernel
from megatron.core.attention.context import AttentionContext
from megatron.core.attention.dot_product_attention import CoreAttention
from megatron.core.attention.kernels.base import Request
from megatron.core.attention.kernels.flash_attn import FlashAttentionPackage
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.token_layout import TokenLayout
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.enums import AttnMaskType
from megatron.core.extensions import flash_attn
from megatron.core.groups.process_groups import SINGLE_PROCESS
from tests.test_utils import fake_attention
from tests.test_utils.reference_attention import reference_attention

HOPPER, AMPERE, BLACKWELL = (9, 0), (8, 0), (10, 0)


def request(**changes):
    return Request(**{"backend": "auto", "dtype": torch.bfloat16, "channels": 128, "capability": HOPPER, **changes})


@pytest.mark.parametrize(
    "changes, kernel, reason",
    [
        ({}, "cudnn", "sm_90, bfloat16, head dim 128"),
        ({"capability": BLACKWELL}, "cudnn", "sm_100"),
        ({"capability": AMPERE}, "flash", "sm_80"),
        ({"capability": (7, 5)}, "efficient", "sm_75"),
        ({"channels": 192}, "flash", "multiples of 8 up to 128"),
        ({"channels": 192, "cudnn_version": 91200}, "flash", "multiples of 8 up to 128"),
        ({"channels": 192, "cudnn_version": 91300}, "cudnn", "head dim 192"),
        ({"channels": 256, "cudnn_version": 91900}, "flash", "multiples of 8 up to 192"),
        ({"channels": 100}, "math", "multiples of 8 up to 128"),
        ({"deterministic": True}, "flash", "does not repeat its bits"),
        ({"window": (127, 0)}, "flash", "window 127,0"),
        ({"window": (127, 0), "channels": 320}, "efficient", "no flash kernel takes such heads"),
        ({"backend": "fused", "capability": AMPERE}, "cudnn", "sm_80"),
        ({"backend": "flash"}, "flash", "sm_90"),
        ({"backend": "flash", "flash_packages": (2,)}, "flash", "sm_90"),
        ({"backend": "flash", "flash_packages": (2, 3)}, "flash-attn 3", "installed"),
        ({"backend": "flash", "flash_packages": (3,), "capability": AMPERE}, "flash", "sm_80"),
        ({"flash_packages": (2, 3)}, "cudnn", "sm_90"),
        ({"flash_version": 2, "flash_packages": (2,)}, "flash-attn 2", "--flash-attention-version 2"),
        ({"backend": "unfused"}, "unfused", "--attention-backend unfused"),
        ({"backend": "fused", "dropout": 0.1}, "unfused", "depend on the layout"),
        ({"dtype": torch.float32}, "efficient", "float32"),
        ({"dtype": torch.float64}, "math", "float64"),
        ({"capability": None, "backend": "fused"}, "torch", "no GPU"),
        ({"soft_cap": 50.0}, "unfused", "not cuDNN through torch SDPA: it does not cap logits"),
        ({"soft_cap": 50.0, "window": (127, 0)}, "unfused", "logits capped at 50"),
        ({"soft_cap": 50.0, "dtype": torch.float32}, "unfused", "not torch SDPA, math: it does not cap logits"),
        ({"soft_cap": 50.0, "form": "ring", "flash_packages": (4,)}, "unfused", "not flash-attn, FlashAttention 4: it"),
        ({"soft_cap": 50.0, "capability": None}, "unfused", "no GPU"),
        ({"biased": True}, "triton", "bias by distance"),
        ({"biased": True, "form": "ring"}, "unfused", "whole sequences without sinks, as --cp-comm-type a2a gives"),
        ({"biased": True, "channels": 192}, "unfused", "Triton's kernels take heads of 16, 32, 64 or 128"),
        ({"biased": True, "dtype": torch.float32}, "unfused", "bfloat16 or float16"),
        ({"biased": True, "soft_cap": 5.0}, "unfused", "does not cap logits"),
        ({"biased": True, "capability": None}, "unfused", "no GPU"),
    ],
)
def test_the_kernel_follows_from_machine_shape_and_flags(changes, kernel, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    choice = choose_kernel(request(**changes))
    assert choice.kernel == kernel and reason in str(choice)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"backend": "fused", "channels": 192}, "--attention-backend fused: cuDNN's backward.*head dim 192"),
        ({"backend": "fused", "channels": 192, "cudnn_version": 91200}, "cuDNN's backward.* up to 128"),
        ({"backend": "fused", "channels": 200, "cudnn_version": 91300}, "cuDNN's backward.* up to 192"),
        ({"backend": "fused", "channels": 192, "cudnn_version": 91300, "capability": BLACKWELL}, "up to 128"),
        ({"backend": "fused", "deterministic": True}, "does not repeat its bits"),
        ({"backend": "flash", "channels": 100}, "--attention-backend flash.*multiples of 8"),
        ({"backend": "flash", "dtype": torch.float32}, "--attention-backend flash takes bfloat16 or float16"),
        ({"flash_version": 2}, "--flash-attention-version 2.*pip install flash-attn"),
        ({"flash_version": 3, "flash_packages": (3,), "capability": AMPERE}, "for Hopper"),
        ({"flash_version": 2, "flash_packages": (2,), "backend": "fused"}, "contradicts --attention-backend fused"),
        ({"flash_version": 2, "flash_packages": (2,), "capability": None}, "on a GPU"),
        ({"soft_cap": 50.0, "backend": "fused"}, "it does not cap logits"),
        ({"biased": True, "backend": "fused"}, "it gives no gradient of a bias.*choose --attention-backend auto"),
        ({"biased": True, "backend": "flash"}, "it gives no gradient of a bias"),
        ({"soft_cap": 50.0, "backend": "flash", "window": (9, 0)}, "it does not cap logits"),
        ({"soft_cap": 50.0, "flash_version": 2, "flash_packages": (2,)}, "it does not cap logits"),
    ],
)
def test_backend_flag_is_rejected_if_the_kernel_cannot_run(changes, message):
    with pytest.raises(ValueError, match=message):
        choose_kernel(request(**changes))


@pytest.mark.parametrize(
    "backend, lengths, mask, kernels",
    [
        ("auto", (512, 512), None, [SDPBackend.CUDNN_ATTENTION]),
        ("auto", (192, 192), None, [SDPBackend.FLASH_ATTENTION]),
        ("auto", (128, 192), None, [SDPBackend.FLASH_ATTENTION]),
        ("auto", (512, 512), True, [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]),
        ("fused", (512, 512), None, [SDPBackend.CUDNN_ATTENTION]),
        ("fused", (512, 512), True, [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]),
        ("flash", (192, 192), None, [SDPBackend.FLASH_ATTENTION]),
    ],
)
def test_cudnn_runs_only_lengths_that_it_computes_correctly(backend, lengths, mask, kernels, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: HOPPER)
    core = CoreAttention(
        TransformerConfig(
            num_layers=1, hidden_size=64, num_attention_heads=1, attention_dropout=0.0, params_dtype=torch.bfloat16,
            attention_backend=backend,
        ), 1, groups=SINGLE_PROCESS,
    )  # fmt: skip
    assert core.kernel._kernels(*lengths, mask) == kernels
    if backend == "fused":
        with pytest.raises(ValueError, match="--attention-backend fused: 192 queries .* multiples of 128"):
            core.kernel._kernels(192, 192, None)
        with torch.no_grad():  # it is the backward pass that goes wrong
            assert core.kernel._kernels(192, 192, None) == [SDPBackend.CUDNN_ATTENTION]


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("mask_type", [AttnMaskType.causal, AttnMaskType.no_mask])
@pytest.mark.parametrize("window", [None, (3, 1)])
def test_flash_attn_equals_the_reference_for_rows_windows_and_documents(version, mask_type, window, monkeypatch):
    calls = fake_attention.install(monkeypatch, version)
    config = TransformerConfig(
        num_layers=1, hidden_size=24, num_attention_heads=4, num_query_groups=2, params_dtype=torch.bfloat16,
        attention_dropout=0.0, window_size=window, flash_attention_version=version, attention_backend="flash",
    )  # fmt: skip
    hopper = request(backend="flash", flash_version=version, flash_packages=(version,), channels=8)
    reference = reference_attention(config, 1, mask_type)
    monkeypatch.setattr("megatron.core.attention.dot_product_attention.build_request", lambda *_, **__: hopper)
    core = CoreAttention(config, 1, mask_type, groups=SINGLE_PROCESS)
    assert isinstance(core.kernel, FlashAttentionPackage) and core.choice.kernel == f"flash-attn {version}"
    query, key, value = (torch.randn(9, 2, n, 6, dtype=torch.float64, requires_grad=True) for n in (4, 2, 2))
    documents = PackedSeqParams(cu_seqlens_q=torch.tensor([0, 4, 9, 10, 18], dtype=torch.int32), max_seqlen_q=8)
    for packed in (None, documents):
        results = []
        for x in (core, reference):
            mixed = x(query, key, value, AttentionContext(layout=TokenLayout(documents=packed)))
            gradients = torch.autograd.grad((mixed * torch.arange(24)).sum(), (query, key, value))
            results.append((mixed, *gradients))
        for actual, expected in zip(*results):
            torch.testing.assert_close(actual, expected)
    assert calls == ["dense", "packed"]
    with pytest.raises(ValueError, match="takes no dense masks"):
        core(query, key, value, AttentionContext(attention_mask=torch.zeros(9, 9, dtype=torch.bool)))


def test_a_missing_package_is_found_without_importing(monkeypatch):
    assert 2 not in flash_attn.installed_versions() or pytest.importorskip("flash_attn")
    fake_attention.install(monkeypatch, 3)
    assert 3 in flash_attn.installed_versions()
