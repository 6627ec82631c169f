"""Plain-torch functions with the call signatures of NVIDIA apex, which check what the compiled ones take for granted:
dtypes, shapes and contiguous memory. Signatures after github.com/NVIDIA/apex: csrc/megatron/fused_weight_gradient_dense
(.cpp, _cuda.cu), apex/normalization/fused_layer_norm.py, csrc/layer_norm_cuda.cpp, apex/multi_tensor_apply and
csrc/multi_tensor_adam.cu.
"""

import sys
import types

import torch
import torch.nn.functional as F

HALF = (torch.float16, torch.bfloat16)
CHUNK = 2048 * 32


def weight_gradient(calls):
    """A module ``fused_weight_gradient_mlp_cuda``."""

    def accumulate(name, input, d_output, d_weight):
        assert input.dtype == d_output.dtype and input.shape[:-1] == d_output.shape[:-1]
        assert d_weight.shape == (d_output.shape[-1], input.shape[-1])
        assert all(x.is_contiguous() for x in (input, d_output, d_weight))
        left, right = d_output.flatten(0, -2).t().float(), input.flatten(0, -2).float()
        total = d_weight.float().addmm_(left, right)
        d_weight.copy_(total)
        calls.append(name)

    def wgrad_gemm_accum_fp32(input, d_output, d_weight):
        assert d_weight.dtype == torch.float32 and input.dtype in (torch.float32, *HALF)
        accumulate("wgrad fp32", input, d_output, d_weight)

    def wgrad_gemm_accum_fp16(input, d_output, d_weight):
        assert d_weight.dtype == input.dtype and input.dtype in HALF
        accumulate("wgrad 16 bits", input, d_output, d_weight)

    return module("fused_weight_gradient_mlp_cuda", wgrad_gemm_accum_fp32, wgrad_gemm_accum_fp16)


def norms(calls):
    """A module ``apex.normalization.fused_layer_norm``."""

    def check(input, weights, normalized_shape):
        assert all(x.dtype == input.dtype and x.shape == tuple(normalized_shape) for x in weights)
        assert input.shape[-len(normalized_shape) :] == tuple(normalized_shape)

    def fused_layer_norm_affine(input, weight, bias, normalized_shape, eps=1e-6, memory_efficient=False):
        check(input, (weight, bias), normalized_shape)
        calls.append("LayerNorm")
        return F.layer_norm(input, normalized_shape, weight, bias, eps)

    def fused_rms_norm_affine(input, weight, normalized_shape, eps=1e-6, memory_efficient=False):
        check(input, (weight,), normalized_shape)
        calls.append("RMSNorm")
        return F.rms_norm(input, normalized_shape, weight, eps)

    return module("apex.normalization.fused_layer_norm", fused_layer_norm_affine, fused_rms_norm_affine)


def adam(calls):
    """A module ``amp_C``."""

    def multi_tensor_adam_capturable(
        chunk_size, noop_flag, tensor_lists, lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay,
        inv_scale,
    ):  # fmt: skip
        assert chunk_size == CHUNK and len(tensor_lists) == 4 and len(tensor_lists[0]) > 0
        for scalar, dtype in ((noop_flag, torch.int32), (step, torch.int32), (lr, torch.float32)):
            assert scalar.dtype == dtype and scalar.numel() == 1
        assert inv_scale.dtype == torch.float32 and inv_scale.numel() == 1
        assert all(isinstance(number, float) for number in (beta1, beta2, epsilon, weight_decay))
        assert mode in (0, 1) and bias_correction in (0, 1)
        calls.append("adam")
        if noop_flag.item() == 1:
            return
        corrections = [1 - beta ** step.item() if bias_correction else 1.0 for beta in (beta1, beta2)]
        for g, p, m, v in zip(*tensor_lists, strict=True):
            for x in (g, p, m, v):
                assert x.is_contiguous() and x.dtype == torch.float32 and x.numel() == g.numel()
            g.mul_(inv_scale)
            gradient = g if mode else g + weight_decay * p
            m.copy_(beta1 * m + (1 - beta1) * gradient)
            v.copy_(beta2 * v + (1 - beta2) * gradient * gradient)
            update = (m / corrections[0]) / ((v / corrections[1]).sqrt() + epsilon)
            p.sub_(lr * (update + weight_decay * p if mode else update))

    return module("amp_C", multi_tensor_adam_capturable)


def multi_tensor_applier(op, noop_flag_buffer, tensor_lists, *args):
    """Call ``op`` with the chunk size as first argument, like apex's object of this name."""
    return op(CHUNK, noop_flag_buffer, tensor_lists, *args)


def module(name, *functions):
    created = types.ModuleType(name)
    for function in functions:
        setattr(created, function.__name__, function)
    return created


def install(monkeypatch, without=()):
    """Puts fake modules where ``import`` finds them, but for those named in ``without``; returns the list that their
    calls are added to."""
    calls = []
    plain = ("apex", "apex.normalization", "fused_layer_norm_cuda")
    apply = module("apex.multi_tensor_apply", multi_tensor_applier)
    modules = [*map(module, plain), weight_gradient(calls), norms(calls), adam(calls), apply]
    for item in modules:
        if item.__name__ not in without:
            monkeypatch.setitem(sys.modules, item.__name__, item)
    return calls
