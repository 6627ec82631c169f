"""Kernels of NVIDIA apex (github.com/NVIDIA/apex) in three slots, for runs that must go on with the kernels that they
began with. **This file has never met the real package**: it is written after apex's sources and tested against a
stand-in with the same call signatures, which proves that reading and not the package (``test_apex_gpu.py`` runs where
it is installed). Nothing else imports apex, and nothing here does before a class below is built.

    wgrad   weight gradients added into ``main_grad`` by the GEMM        fused_weight_gradient_mlp_cuda
    norm    LayerNorm and RMSNorm                                        apex.normalization, fused_layer_norm_cuda
    adam    the update of Adam                                           amp_C, through apex.multi_tensor_apply

Formulas and state are those of the built-in forms; only the order of roundings differs. apex.contrib is not used.

Legend: t tokens, o output features, i input features.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megatron.core.config.errors import UserError
from megatron.core.extensions.installed import is_installed

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.core.fusions.adam import AdamGroup, AdamStep
    from megatron.core.fusions.residual_norm import NormTraits

FLAG = "--apex-parts"
INSTALL = (
    "APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install -v --no-build-isolation git+https://github.com/NVIDIA/apex "
    "(the package called apex on the Python package index is another one)"
)
EXTENSIONS: Mapping[str, str] = MappingProxyType(
    {"wgrad": "fused_weight_gradient_mlp_cuda", "norm": "fused_layer_norm_cuda", "adam": "amp_C"}
)
"""By part: the compiled module that computes, which apex has where it was built with APEX_CUDA_EXT=1."""


def what_is_missing(part: str) -> str | None:
    """Why ``part`` cannot be imported, found without importing anything; None: nothing is missing."""
    if not is_installed("apex"):
        return "needs NVIDIA apex, which is not installed"
    if not is_installed(EXTENSIONS[part]):
        return f"{part} needs {EXTENSIONS[part]}, without which the installed apex was built"
    return None


def _load(part: str, module: str, *names: str) -> list[Any]:
    """Members of a module that ``part`` needs; ValueError with the command that installs it."""
    reason = what_is_missing(part)
    if reason is None:
        try:
            loaded = importlib.import_module(module)
            return [getattr(loaded, name) for name in names]
        except (ImportError, OSError, RuntimeError, AttributeError) as error:  # built for another torch, or too old
            reason = f"apex is installed, but {module} does not have what is needed ({error})"
    raise UserError(f"{FLAG} {part}: {reason}; {INSTALL}, or leave it out")


class ApexWeightGradient:
    """``total += left @ right`` by the GEMMs of ``csrc/megatron/fused_weight_gradient_dense.cpp``:
    ``wgrad_gemm_accum_fp32(input [t, i], grad_output [t, o], main_grad [o, i])``, and ``wgrad_gemm_accum_fp16`` for a
    ``main_grad`` in the 16 bits of the other two. They read and write plain memory: everything must be contiguous.
    """

    description = f"weight gradients: apex ({FLAG} wgrad)"

    def __init__(self) -> None:
        self._wide, self._narrow = _load("wgrad", EXTENSIONS["wgrad"], "wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16")

    def __call__(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """``total`` [o, i], ``left`` [o, t] (that is dY^T), ``right`` [t, i]."""
        assert total.is_contiguous(), "gradients lie in flat buffers"
        accumulate = self._wide if total.element_size() == 4 else self._narrow
        accumulate(right.contiguous(), left.t().contiguous(), total)


class ApexNormalize:
    """``fusions.residual_norm.Normalize`` by ``apex/normalization/fused_layer_norm.py``: ``fused_layer_norm_affine(
    input, weight, bias, normalized_shape, eps)`` and ``fused_rms_norm_affine(input, weight, normalized_shape, eps)``,
    input and weights of one dtype. They do not take the residual stream along, which is added by itself.
    """

    description = f"norms: apex ({FLAG} norm)"

    def __init__(self) -> None:
        _load("norm", EXTENSIONS["norm"])  # which the package itself imports at its first use only
        self._layer_norm, self._rms_norm = _load(
            "norm", "apex.normalization.fused_layer_norm", "fused_layer_norm_affine", "fused_rms_norm_affine"
        )

    def __call__(
        self, x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None, traits: NormTraits
    ) -> tuple[Tensor, Tensor]:
        stream = x if branch is None else x + branch
        whole = (weight + traits.offset if traits.offset else weight).to(stream.dtype)
        if bias is None:
            normed = self._rms_norm(stream, whole, whole.shape, traits.eps)
        else:
            normed = self._layer_norm(stream, whole, bias.to(stream.dtype), whole.shape, traits.eps)
        return stream, normed.to(weight.dtype)


class ApexAdam:
    """``fusions.adam.AdamUpdate`` by ``csrc/multi_tensor_adam.cu``: ``multi_tensor_adam_capturable(chunk_size,
    noop_flag, [gradients, parameters, first, second moments], lr, beta1, beta2, eps, step, mode, bias_correction,
    weight_decay, inv_scale)``, the form of apex's FusedAdam that reads whether to skip (int32), the number of updates
    (int32), the rate and a factor of the gradients (fp32) from device memory: the host waits for nothing. (The other
    form, ``multi_tensor_adam``, ignores its flag.)

    Gradients are multiplied by our factor before, since with decay added to them (mode 0) the two roundings could
    otherwise become one. What is kept in fewer bits is widened and stored again one tensor at a time.
    """

    description = f"adam: apex ({FLAG} adam)"

    def __init__(self) -> None:
        from megatron.core.fusions.master_weights import opened

        (self._update,) = _load("adam", EXTENSIONS["adam"], "multi_tensor_adam_capturable")
        (self._apply,) = _load("adam", "apex.multi_tensor_apply", "multi_tensor_applier")
        self._opened: Callable[..., Any] = opened

    def __call__(self, groups: Sequence[AdamGroup], step: AdamStep) -> None:
        skip, count, one = step.skip.int(), step.step.int(), step.step.new_ones(1)
        for group in groups:
            rate = step.step.new_full((1,), group.lr)
            for masters, gradients, moments in self._opened(group.tensors, step.factor):
                self._apply(
                    self._update, skip, [gradients, masters, *moments], rate, step.beta1, step.beta2, step.eps, count,
                    int(step.decoupled), 1, group.weight_decay, one,
                )  # fmt: skip
