"""Kernels of NVIDIA apex (github.com/NVIDIA/apex) in three places, for runs that must continue with the kernels that
they were started with. **This file has never been run with the real package**: it follows apex's sources and is tested
with a stand-in of the same call signatures, which tests the reading of the sources, not the package
(``test_apex_gpu.py`` runs if apex is installed). Only this file imports apex, when one of its classes is built.

    wgrad   weight gradients added to ``main_grad`` by the GEMM          fused_weight_gradient_mlp_cuda
    norm    LayerNorm and RMSNorm                                        apex.normalization, fused_layer_norm_cuda
    adam    the Adam update                                              amp_C, through apex.multi_tensor_apply

Formulas and state equal the built-in implementations; only the order of roundings differs. apex.contrib is not used.

Legend: t tokens, o output features, i input features."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megatron.core.config.errors import UserError
from megatron.core.extensions.installed import is_installed

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.core.fusions.adam import AdamStep
    from megatron.core.fusions.residual_norm import NormTraits
    from megatron.core.fusions.storage import OptimizerEntry

FLAG = "--apex-parts"
INSTALL = (
    "APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install -v --no-build-isolation git+https://github.com/NVIDIA/apex "
    "(the package called apex on the Python package index is another one)"
)
EXTENSIONS: Mapping[str, str] = MappingProxyType(
    {"wgrad": "fused_weight_gradient_mlp_cuda", "norm": "fused_layer_norm_cuda", "adam": "amp_C"}
)
"""Compiled module of each part; it exists if apex was built with APEX_CUDA_EXT=1."""


def what_is_missing(part: str) -> str | None:
    """Return why ``part`` cannot be imported, or None, without importing anything."""
    if not is_installed("apex"):
        return "needs NVIDIA apex, which is not installed"
    if not is_installed(EXTENSIONS[part]):
        return f"{part} needs {EXTENSIONS[part]}, without which the installed apex was built"
    return None


def _load(part: str, module: str, *names: str) -> list[Any]:
    """Import ``module`` for ``part`` and return its members ``names``. Raises UserError, with the install command, if
    apex or the part's extension is not installed, the import fails, or a member is missing."""
    reason = what_is_missing(part)
    if reason is None:
        try:
            loaded = importlib.import_module(module)
            return [getattr(loaded, name) for name in names]
        except (ImportError, OSError, RuntimeError, AttributeError) as error:  # built for another torch, or too old
            reason = f"apex is installed, but {module} does not have what is needed ({error})"
    raise UserError(f"{FLAG} {part}: {reason}; {INSTALL}, or remove it")


class ApexWeightGradient:
    """Add ``left @ right`` to ``total`` by the GEMMs of ``csrc/megatron/fused_weight_gradient_dense.cpp``:
    ``wgrad_gemm_accum_fp32(input [t, i], grad_output [t, o], main_grad [o, i])``, or ``wgrad_gemm_accum_fp16`` for a
    16-bit ``main_grad``. They ignore strides: tensors must be contiguous."""

    def __init__(self) -> None:
        self._wide, self._narrow = _load("wgrad", EXTENSIONS["wgrad"], "wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16")

    def __call__(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        assert total.is_contiguous(), "gradients lie in flat buffers"
        accumulate = self._wide if total.element_size() == 4 else self._narrow
        accumulate(right.contiguous(), left.t().contiguous(), total)


class ApexNormalize:
    """``fusions.residual_norm.Normalize`` by ``apex/normalization/fused_layer_norm.py``:
    ``fused_layer_norm_affine(input, weight, bias, normalized_shape, eps)`` and ``fused_rms_norm_affine(input, weight,
    normalized_shape, eps)``, with input and weights of one dtype. The branch is added in a separate operation."""

    def __init__(self) -> None:
        _load("norm", EXTENSIONS["norm"])  # check now: apex imports it only at first use
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
    weight_decay, inv_scale)``. This variant of apex's FusedAdam reads the skip flag and step count (int32), learning
    rate and gradient scale (fp32) from device memory: no host sync. (The other variant, ``multi_tensor_adam``, ignores
    its flag.) Gradients are multiplied by ``factor`` before, because with decay added to them (mode 0) both roundings
    could become one. Low-precision state is widened and written back one tensor at a time."""

    def __init__(self) -> None:
        (self._update,) = _load("adam", EXTENSIONS["adam"], "multi_tensor_adam_capturable")
        (self._apply,) = _load("adam", "apex.multi_tensor_apply", "multi_tensor_applier")

    def __call__(self, entries: Sequence[OptimizerEntry], step: AdamStep) -> None:
        """Update all entries in place. Gradients are multiplied by ``step.factor``, in place if they have the masters'
        dtype, even if ``step.skip`` is 1, which changes no weights or moments. No host sync."""
        from megatron.core.fusions.storage import as_fp32_lists, by_rates

        skip, count, one = step.skip.int(), step.step.int(), step.step.new_ones(1)
        for (lr, weight_decay), group in by_rates(entries).items():
            rate = step.step.new_full((1,), lr)
            for masters, gradients, moments in as_fp32_lists(group, step.factor):
                self._apply(
                    self._update,
                    skip,
                    [gradients, masters, *moments],
                    rate,
                    step.beta1,
                    step.beta2,
                    step.eps,
                    count,
                    int(step.decoupled),
                    1,
                    weight_decay,
                    one,
                )
