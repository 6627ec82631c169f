"""Plain-torch modules with the constructor arguments, attributes and gradient conventions of Transformer Engine 2.20.

Parameters on ``device="meta"`` are left for the owner to replace, as in the package. ``DTYPES`` of the real package are
not enforced: the fake also computes in float64 on a CPU.
"""

import sys
import types

import torch
import torch.nn.functional as F
from torch import nn

from tests.test_utils.fake_attention import attention, packed_attention


class _Product(torch.autograd.Function):
    """x W^T + b, whose weight gradient goes to ``main_grad`` where asked; autograd then gets rubbish."""

    @staticmethod
    def forward(ctx, x, weight, bias, fuse):
        ctx.save_for_backward(x, weight)
        ctx.fuse, ctx.parameter = fuse, weight
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        if ctx.fuse:
            ctx.parameter.main_grad.add_(grad_weight)
            grad_weight = None
            if hasattr(ctx.parameter, "grad_added_to_main_grad"):
                ctx.parameter.grad_added_to_main_grad = True
                grad_weight = torch.full_like(weight, torch.nan)
        return grad.matmul(weight), grad_weight, grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None, None


class _Module(nn.Module):
    def get_extra_state(self):
        return torch.zeros(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        pass


def _empty(*shape, device, dtype):
    return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))


class Linear(_Module):
    def __init__(
        self, in_features, out_features, sequence_parallel=False, fuse_wgrad_accumulation=False, tp_group=None,
        tp_size=1, get_rng_state_tracker=None, rng_tracker_name=None, init_method=None, bias=True, return_bias=False,
        params_dtype=None, parallel_mode=None, parameters_split=None, device="cuda", ub_overlap_ag=False,
        ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_dgrad=False, ub_bulk_wgrad=False, ub_name=None,
        delay_wgrad_compute=False, symmetric_ar_type=None, save_original_input=False, name=None,
    ):  # fmt: skip
        super().__init__()
        assert tp_size == 1 and parallel_mode is None
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.weight = _empty(out_features, in_features, device=device, dtype=params_dtype)
        self.bias = _empty(out_features, device=device, dtype=params_dtype) if bias else torch.Tensor()

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        bias = self.bias if isinstance(self.bias, nn.Parameter) else None
        return _Product.apply(inp, self.weight, bias, self.fuse_wgrad_accumulation)


class LayerNormLinear(_Module):
    def __init__(
        self, in_features, out_features, eps=1e-5, sequence_parallel=False, fuse_wgrad_accumulation=False,
        tp_group=None, tp_size=1, get_rng_state_tracker=None, init_method=None, bias=True, normalization="LayerNorm",
        return_bias=False, params_dtype=None, parallel_mode=None, return_layernorm_output=False,
        return_layernorm_output_gathered=False, parameters_split=None, zero_centered_gamma=False, device="cuda",
        ub_overlap_ag=False, ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_wgrad=False,
        ub_bulk_dgrad=False, ub_name=None, delay_wgrad_compute=False, symmetric_ar_type=None, name=None,
    ):  # fmt: skip
        super().__init__()
        assert tp_size == 1 and parallel_mode is None
        self.fuse_wgrad_accumulation, self.eps = fuse_wgrad_accumulation, eps
        self.normalization, self.zero_centered_gamma = normalization, zero_centered_gamma
        located = {"device": device, "dtype": params_dtype}
        self.layer_norm_weight = _empty(in_features, **located)
        self.layer_norm_bias = _empty(in_features, **located) if normalization == "LayerNorm" else None
        self.weight = _empty(out_features, in_features, **located)
        self.bias = _empty(out_features, **located) if bias else torch.Tensor()

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        weight = self.layer_norm_weight + float(self.zero_centered_gamma)
        normed = _norm(inp, weight, self.layer_norm_bias, self.eps, self.normalization)
        bias = self.bias if isinstance(self.bias, nn.Parameter) else None
        return _Product.apply(normed, self.weight, bias, self.fuse_wgrad_accumulation)


def _norm(x, weight, bias, eps, kind):
    if kind == "LayerNorm":
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


class LayerNorm(_Module):
    kind = "LayerNorm"

    def __init__(
        self, normalized_shape=None, eps=1e-5, sequence_parallel=None, params_dtype=None, zero_centered_gamma=False,
        hidden_size=None, **kwargs,
    ):  # fmt: skip
        super().__init__()
        assert kwargs.keys() <= {"device", "dtype", "sm_margin"}
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.weight = _empty(normalized_shape, **kwargs)
        self.bias = _empty(normalized_shape, **kwargs) if self.kind == "LayerNorm" else None

    def forward(self, input):
        return _norm(input, self.weight + float(self.zero_centered_gamma), self.bias, self.eps, self.kind)


class RMSNorm(LayerNorm):
    kind = "RMSNorm"


class DotProductAttention(_Module):
    def __init__(
        self, num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.0, qkv_format="sbhd",
        attn_mask_type="causal", window_size=None, bottom_right_diagonal=None, softcap=0.0, sequence_parallel=False,
        tp_size=1, get_rng_state_tracker=None, tp_group=None, layer_number=None, attention_type="self", cp_group=None,
        cp_global_ranks=None, cp_stream=None, cp_comm_type="p2p", softmax_scale=None, softmax_type="vanilla",
        return_max_logit=False, name=None,
    ):  # fmt: skip
        super().__init__()
        assert tp_size == 1 and attention_dropout == 0.0
        self.heads = num_attention_heads, num_gqa_groups
        self.scale = kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.mask_type, self.window = attn_mask_type, window_size

    def forward(
        self, query_layer=None, key_layer=None, value_layer=None, attention_mask=None, qkv_format=None,
        cu_seqlens_q=None, cu_seqlens_kv=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, max_seqlen_q=None,
        max_seqlen_kv=None, attn_mask_type=None,
    ):  # fmt: skip
        assert (query_layer.shape[-2], key_layer.shape[-2]) == self.heads
        mask_type = attn_mask_type or self.mask_type
        choices = self.scale, "causal" in mask_type, self.window or (-1, -1)
        if qkv_format == "thd":
            assert mask_type.startswith("padding")
            return packed_attention(query_layer, key_layer, value_layer, cu_seqlens_q, *choices).flatten(1)
        batch_first = (x.transpose(0, 1) for x in (query_layer, key_layer, value_layer))
        return attention(*batch_first, *choices).transpose(0, 1).flatten(2)


def install(monkeypatch):
    """Puts the fake where ``import transformer_engine.pytorch`` finds it."""
    package, pytorch = types.ModuleType("transformer_engine"), types.ModuleType("transformer_engine.pytorch")
    for kind in (Linear, LayerNormLinear, LayerNorm, RMSNorm, DotProductAttention):
        setattr(pytorch, kind.__name__, kind)
    package.pytorch = pytorch
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", pytorch)
