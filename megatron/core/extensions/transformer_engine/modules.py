"""Transformer Engine modules in place of local modules. The only file that imports the package, on first use.

Transformer Engine provides the kernels: GEMMs, norms, attention. This library keeps the parameters (placement, names
and initial values, so that checkpoints do not depend on the implementation), the tensor-parallel collectives (around
a single-rank GEMM), and the destination of weight gradients. On one tensor-parallel rank the norm before a GEMM is
fused with it (``TEColumnParallelLinear.adopt_norm``); the norm module still owns its parameters.

Each module here owns its parameters and holds a Transformer Engine module outside the module tree, built on the meta
device, whose parameters are then replaced by the local ones. Names, ``state_dict`` and hooks are therefore exactly
as in the built-in modules, and the package's own state (``_extra_state``) is in no checkpoint.

The GEMM itself adds the gradient of a weight with ``main_grad`` to it (``fuse_wgrad_accumulation``); the package then
marks the weight ``grad_added_to_main_grad`` and passes a dummy tensor of its size to autograd.

Legend: s sequence, b batch, h hidden, a query heads, g key/value groups, d head dim, t tokens."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any, cast

from torch import Tensor, nn

from megatron.core.attention.context import AttentionContext
from megatron.core.config.errors import UserError
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.extensions.cudnn import one_cudnn
from megatron.core.extensions.installed import is_installed
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.sharding.moved_parameters import MovableParameters
from megatron.core.sharding.placement import Init, Ones, Shard, Zeros, parameter
from megatron.core.tensor_parallel import operators
from megatron.core.tensor_parallel.layers import RowParallel, StackedSize

NAME = "transformer_engine"
MODULE = "transformer_engine.pytorch"
INSTALL = "pip install --no-build-isolation 'transformer_engine[pytorch]'"


def transformer_engine_is_installed() -> bool:
    """Return whether the package is installed, without importing it."""
    return is_installed(NAME)


def missing_package(reason: str = "the package is not installed") -> ValueError:
    """Return the error, with the install command, for transformer_engine without a usable package."""
    return ValueError(f"--transformer-impl {NAME}: {reason}; install it: {INSTALL}; or take --transformer-impl local")


def load_transformer_engine() -> ModuleType:
    """Return ``transformer_engine.pytorch``, imported at the first call so that it uses torch's cuDNN if that is loaded
    (:func:`one_cudnn`). Raises ValueError, with the install command, if it is missing or its import fails; UserError if
    libraries of several cuDNN installations are loaded after the import."""
    if not transformer_engine_is_installed():
        raise missing_package()
    if MODULE not in sys.modules:
        with one_cudnn():
            try:
                importlib.import_module(MODULE)
            except (ImportError, OSError, RuntimeError) as error:  # libraries for another CUDA or torch
                raise missing_package(f"it is installed but cannot be imported ({error})") from error
    return sys.modules[MODULE]


def fp8_context(config: TransformerConfig) -> Callable[[], AbstractContextManager[Any]]:
    """Return the function that opens the package's context for GEMMs in fp8, by the recipe (tensorwise or blockwise,
    which have no state) and format of ``config``. Raises UserError if the package is too old for the recipe."""
    te, recipes = load_transformer_engine(), importlib.import_module(f"{NAME}.common.recipe")
    name = {"tensorwise": "Float8CurrentScaling", "blockwise": "Float8BlockScaling"}[config.fp8_recipe]
    if not hasattr(recipes, name):
        raise UserError(f"--fp8-recipe {config.fp8_recipe}: the installed {NAME} has no {name}; update it: {INSTALL}")
    recipe = getattr(recipes, name)(fp8_format=getattr(recipes.Format, str(config.fp8).upper()))
    if hasattr(te, "autocast"):
        return partial(te.autocast, enabled=True, recipe=recipe)
    return partial(te.fp8_autocast, enabled=True, fp8_recipe=recipe)


class Gemm:
    """``x W^T + b`` by a single-rank ``te.Linear`` on the local parameters themselves; no collective. With
    ``fuse_weight_gradient`` the GEMM adds dW to ``weight.main_grad`` if that exists when it is called."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, *, fuse_weight_gradient: bool) -> None:
        out_features, in_features = weight.shape
        self.weight, self.bias, self.fuse_weight_gradient = weight, bias, fuse_weight_gradient
        self.context: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Opens the context of a call."""
        self.linear = load_transformer_engine().Linear(
            in_features, out_features, bias=bias is not None, params_dtype=weight.dtype, device="meta"
        )
        self.linear.weight = weight
        if bias is not None:
            self.linear.bias = bias

    @property
    def fuses(self) -> bool:
        """Whether the GEMM adds the weight gradient to ``main_grad``, if there is one."""
        return self.fuse_weight_gradient and hasattr(self.weight, "main_grad")

    def __call__(self, x: Tensor) -> Tensor:
        self.linear.fuse_wgrad_accumulation = self.fuses
        with self.context():
            return self.linear(x)


class NormGemm:
    """``norm(x) W^T + b`` by ``te.LayerNormLinear``, on the parameters of a local norm and linear layer; the module
    inside ``gemm`` is then unused. The weight gradient is as in :class:`Gemm`."""

    def __init__(self, norm: TENorm, gemm: Gemm) -> None:
        self.gemm = gemm
        weight, bias = gemm.weight, gemm.bias
        out_features, in_features = weight.shape
        self.linear = load_transformer_engine().LayerNormLinear(
            in_features,
            out_features,
            eps=norm.eps,
            bias=bias is not None,
            normalization=norm.kind,
            zero_centered_gamma=norm.zero_centered,
            params_dtype=weight.dtype,
            device="meta",
        )
        self.linear.weight, self.linear.layer_norm_weight = weight, norm.weight
        if bias is not None:
            self.linear.bias = bias
        if norm.bias is not None:
            self.linear.layer_norm_bias = norm.bias

    def __call__(self, x: Tensor) -> Tensor:
        self.linear.fuse_wgrad_accumulation = self.gemm.fuses
        with self.gemm.context():
            return self.linear(x)


def column_parameters(
    input_size: int, size: StackedSize, *, bias: bool, init: Init, config: TransformerConfig, groups: ProcessGroups
) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Return weight and bias (zeros; None without ``bias``) of a column-parallel layer, placed as in
    ``tensor_parallel.layers.ColumnParallelLinear``: output dim split over ``tp``, folded to 2-d and 1-d. Raises
    UserError if several ranks would share one K/V head."""
    if size.is_shared_over(groups.tp.size):
        raise UserError(
            f"--transformer-impl {NAME}: {size.shape[0]} key and value heads (num_query_groups) for "
            f"{groups.tp.size} tensor-parallel ranks: several ranks would share a head; take --transformer-impl "
            "local, or fewer ranks"
        )
    placed = {"mesh": {"tp": Shard(size.split_dim)}, "groups": groups, "dtype": config.params_dtype}
    weight = parameter((*size.shape, input_size), init=init, ndim=2, **placed)
    return weight, parameter(size.shape, init=Zeros(), ndim=1, **placed) if bias else None


class TEColumnParallelLinear(nn.Module):
    """Counterpart of ``tensor_parallel.layers.ColumnParallelLinear``: same arguments, results and collectives."""

    implementation = NAME

    def __init__(
        self,
        input_size: int,
        output_size: int | StackedSize,
        *,
        config: TransformerConfig,
        init_method: Init,
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        groups: ProcessGroups,
    ) -> None:
        super().__init__()
        size = output_size if isinstance(output_size, StackedSize) else StackedSize((output_size,), 0)
        self.weight, self.bias = column_parameters(
            input_size, size, bias=bias, init=init_method, config=config, groups=groups
        )
        self.group, self.skip_bias_add = groups.tp, skip_bias_add
        gemm = Gemm(
            self.weight, None if skip_bias_add else self.bias, fuse_weight_gradient=config.gradient_accumulation_fusion
        )
        self._inner_gemm, self._gemm = gemm, cast("Gemm | NormGemm", gemm)
        self._enter: Callable = operators.copy_to_region
        if groups.stream(config.sequence_parallel).size > 1:
            self._enter = operators.gather_from_sequence
        self._leave: Callable = operators.identity
        if gather_output:
            self._leave = operators.gather_from_region

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        output = self._gemm(self._enter(x, self.group))
        return self._leave(output, self.group), self.bias if self.skip_bias_add else None

    def use_fp8(self, config: TransformerConfig) -> None:
        """Compute the GEMMs in fp8 as ``config`` says."""
        self._inner_gemm.context = fp8_context(config)

    def adopt_norm(self, norm: TENorm) -> None:
        """Fuse ``norm`` into this layer's GEMM; ``norm`` then returns its input unchanged. Requires one tensor-parallel
        rank: with more, the sequence is all-gathered between both."""
        assert isinstance(self._gemm, Gemm) and self.group.size == 1
        self._gemm = NormGemm(norm, self._gemm)
        norm.pass_on()


class TERowParallelLinear(RowParallel):
    """Counterpart of ``tensor_parallel.layers.RowParallelLinear``: same arguments, results and collectives."""

    implementation = NAME

    def __init__(self, *sizes: int, config: TransformerConfig, **options: Any) -> None:
        super().__init__(*sizes, config=config, **options)
        fused_bias = self.bias if self._bias_is_fused else None
        self._gemm = Gemm(self.weight, fused_bias, fuse_weight_gradient=config.gradient_accumulation_fusion)

    def use_fp8(self, config: TransformerConfig) -> None:
        """Compute the GEMMs in fp8 as ``config`` says."""
        self._gemm.context = fp8_context(config)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        output = self._leave(self._gemm(self._enter(x, self.group)), self.group)
        return (output, None) if self._bias_is_fused else self._with_bias(output)


class TENorm(MovableParameters):
    """LayerNorm or RMSNorm (``config.normalization``) of the last dim. ``partial``: mesh axes over which gradients are
    partial sums; None: ``tp`` under sequence parallelism, else none. With ``apply_layernorm_1p`` the stored weight is
    the true one minus 1. Only LayerNorm has a bias."""

    implementation = NAME

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float,
        *,
        groups: ProcessGroups,
        partial: tuple[str, ...] | None = None,
    ) -> None:
        super().__init__()
        if partial is None:
            partial = ("tp",) if groups.stream(config.sequence_parallel).size > 1 else ()
        placed = {"partial": partial, "groups": groups, "dtype": config.params_dtype}
        self.eps, self.kind, self.zero_centered = eps, config.normalization, config.apply_layernorm_1p
        self.weight = parameter((hidden_size,), init=Zeros() if config.apply_layernorm_1p else Ones(), **placed)
        self.bias: nn.Parameter | None = None
        norm = getattr(load_transformer_engine(), self.kind)(
            hidden_size, eps=eps, zero_centered_gamma=self.zero_centered, device="meta", dtype=config.params_dtype
        )
        norm.weight = self.weight
        if self.kind == "LayerNorm":
            self.bias = norm.bias = parameter((hidden_size,), init=Zeros(), **placed)
        self._norm: tuple[Callable[[Tensor], Tensor]] = (norm,)  # in a tuple: no submodule

    def pass_on(self) -> None:
        """Return inputs unchanged from now on: another layer computes this norm with its parameters."""
        self._norm = (lambda x: x,)

    def forward(self, x: Tensor) -> Tensor:
        return self._norm[0](x)


class TEDotProductAttention(nn.Module):
    """``te.DotProductAttention`` without dropout, causal or not: query [s, b, a, d], key and value [s, b, g, d] ->
    [s, b, a * d]. ``window``: visible keys to the left and right, -1 for all. The package selects the kernel,
    restricted by its environment variables (:func:`kernel_variables`). Dense masks raise UserError."""

    implementation = NAME

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        causal: bool,
        window: tuple[int, int] | None,
        groups: ProcessGroups,
    ) -> None:
        super().__init__()
        tp = groups.tp
        left, right = window or (-1, -1)
        attention = load_transformer_engine().DotProductAttention(
            config.num_attention_heads // tp.size,
            config.kv_channels,
            num_gqa_groups=config.num_query_groups // tp.size,
            attention_dropout=0.0,
            attn_mask_type="causal" if causal else "no_mask",
            window_size=(left, 0 if causal else right),
            layer_number=layer_number,
            softmax_scale=config.softmax_scale,
        )
        self._attention = (attention,)  # in a tuple: no submodule
        self.packed_mask = "padding_causal" if causal else "padding"

    def forward(self, query: Tensor, key: Tensor, value: Tensor, ctx: AttentionContext) -> Tensor:
        """Attend within documents by the variable-length (thd) form. Raises UserError for a dense mask."""
        if ctx.attention_mask is not None:
            raise UserError(
                f"attention_mask: --transformer-impl {NAME} takes no dense masks; describe documents by "
                "packed_seq_params, windows by window_size, or take --transformer-impl local"
            )
        documents = ctx.layout.documents
        if documents is None or documents.cu_seqlens_q is None:
            return self._attention[0](query, key, value)
        length, batch = query.shape[:2]
        # [s, b, ...] -> [b * s, ...]: each document must be contiguous
        flat = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        bounds, longest = documents.cu_seqlens_q, documents.max_seqlen_q or length
        mixed = self._attention[0](
            *flat,
            qkv_format="thd",
            attn_mask_type=self.packed_mask,
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        return mixed.reshape(batch, length, -1).transpose(0, 1)


def kernel_variables(backend: str, *, deterministic: bool = False) -> dict[str, str]:
    """Return the environment variables NVTE_… that restrict the package's attention kernels to ``backend`` (none for
    another backend, such as auto) and, with ``deterministic``, to deterministic algorithms."""
    kinds = ("flash", "fused", "unfused")
    variables = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"} if deterministic else {}
    if backend in kinds:
        variables |= {f"NVTE_{kind.upper()}_ATTN": str(int(kind == backend)) for kind in kinds}
    return variables
