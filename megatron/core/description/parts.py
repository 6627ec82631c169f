"""Building blocks of descriptions: activation sizes, linear layers, GEMMs, norms and residual branches. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from megatron.core.config.layer_kinds import norm_places
from megatron.core.description.model import Config, Op, Param, Piece, Saved


def activation_bytes(config: Config) -> int:
    """Return the bytes per element of activations and weights in the compute dtype."""
    return 2 if config.fp16 or config.bf16 else 8 if config.fp64 else 4


def input_bytes(config: Config) -> int:
    """Return the bytes per element that a linear layer saves of its input: 1 for a copy in fp8. Models with experts
    count as without fp8: routers and experts read the same inputs."""
    saves_copy = config.fp8 is not None and config.fp8_wgrad and config.num_moe_experts is None
    return 1 if saves_copy else activation_bytes(config)


def stream_bytes(config: Config) -> int:
    """Return the bytes per element of the residual stream."""
    return max(activation_bytes(config), 4) if config.fp32_residual_connection else activation_bytes(config)


def stream_elements(config: Config) -> float:
    """Return the elements of the residual stream per token on this rank; sequence parallelism divides them by TP."""
    return config.hidden_size / (config.tensor_model_parallel_size if config.sequence_parallel else 1)


def linear(
    name: str,
    out: tuple[int, ...],
    into: int,
    dim: int,
    *,
    bias: bool,
    shared: int = 0,
    row_parts: tuple[int, ...] = (),
) -> list[Param]:
    """Return a weight ``(*out, into)`` that tensor parallelism splits along ``dim``, and its bias if ``bias``."""
    params = [Param(f"{name}.weight", (*out, into), {"tp": dim}, shared=shared, row_parts=row_parts)]
    if bias:  # with a split input dim, the bias is replicated
        params.append(Param(f"{name}.bias", out, {"tp": dim} if dim < len(out) else {}, shared=shared, ndim=1))
    return params


def gemm(weight: Param, config: Config, tokens: int, *, gradients: float = 0.0, saved: tuple[Saved, ...] = ()) -> Op:
    """Return the GEMM with ``weight`` on ``tokens`` tokens per sequence: FLOPs of all ranks, local sizes."""
    shapes = weight.local_shapes({"tp": config.tensor_model_parallel_size})
    local = (sum(rows for rows, _ in shapes), shapes[0][1])
    name = weight.name.removesuffix(".weight").rpartition(".")[2]
    return Op("gemm", name, 2.0 * tokens * math.prod(weight.shape), gemm=local, gradients=gradients, saved=saved)


def norm(name: str, size: int, config: Config) -> list[Param]:
    """Return the weight and, for LayerNorm with ``norm_bias``, the bias of a norm."""
    kinds = ("weight", "bias") if config.normalization == "LayerNorm" and config.norm_bias else ("weight",)
    return [Param(f"{name}.{kind}", (size,), ndim=1) for kind in kinds]


RESIDUAL_SETTINGS = (
    "hidden_size",
    "normalization",
    "norm_epsilon",
    "apply_layernorm_1p",
    "norm_bias",
    "norm_placement",
    "apply_residual_connection_post_layernorm",
    "embed_layernorm",
    "residual_multiplier",
)
"""Settings that every branch and the final norm depend on."""
NormDescription = Callable[[str, int, Config], list[Param]]


def _residual_norm(name: str, branch: str, config: Config) -> Op:
    """Describe the norm before the mixer of ``branch``. It saves its input, and the branch's first GEMM saves its
    output, with --tp-comm-overlap at the positions of all ranks."""
    elements, item = stream_elements(config), activation_bytes(config)
    gathered = config.hidden_size if config.tp_comm_overlap else elements
    reader = ("qkv_linear",) if branch == "self_attention" else ()
    normed = Saved("normed", gathered * input_bytes(config), ("layernorm",), reader)
    offload = "mlp_norm" if branch == "mlp" else "attn_norm"
    saved = (Saved("stream", elements * stream_bytes(config), offload=(offload,)), normed)
    return Op("norm", name, traffic=8.0 * item * elements, saved=saved)


def _no_norm(config: Config) -> Op:
    """Describe the start of a branch without a pre-norm: its first GEMM saves the stream itself."""
    elements = config.hidden_size if config.tp_comm_overlap else stream_elements(config)
    return Op("other", "stream", saved=(Saved("stream", elements * activation_bytes(config)),))


def one_piece(pieces: Iterable[Piece]) -> Piece:
    """Combine the branches of a layer that stages cannot split into one piece ``layer``: parameters, ops and settings
    in order. It is known only if there are branches and all are known."""
    pieces = list(pieces)
    return Piece(
        "layer",
        tuple(param for piece in pieces for param in piece.params),
        tuple(op for piece in pieces for op in piece.ops),
        is_branch=True,
        is_known=bool(pieces) and all(piece.is_known for piece in pieces),
        settings=tuple(name for piece in pieces for name in piece.settings),
    )


def residual_branch(
    mixer: Piece,
    config: Config,
    *,
    name: str,
    norm_name: str,
    describe_norm: NormDescription = norm,
    reads_norm: bool = False,
    layer_number: int = 1,
) -> Piece:
    """Describe the branch x + dropout(mixer(norm(x))): ``mixer`` with its parameters under ``name``, and norms before
    or after it by ``norm_placement`` and the layer. The last op also saves the dropout mask. ``reads_norm``: it reads
    an earlier branch's norm (``share_parallel_norm``)."""
    before, behind = norm_places(config, layer_number)
    before = before and not reads_norm
    post_name = f"post_{name}_layernorm"
    entry = describe_norm(norm_name, config.hidden_size, config) if before else []
    leave = describe_norm(post_name, config.hidden_size, config) if behind else []
    mask = Saved("dropout mask", stream_elements(config) * bool(config.hidden_dropout))  # one byte per element
    ops = [_residual_norm(norm_name, name, config) if before else _no_norm(config), *mixer.inside(name).ops]
    if behind:
        elements, item = stream_elements(config), activation_bytes(config)
        kept = Saved("mixer output", elements * item)
        ops.append(Op("norm", post_name, traffic=5.0 * item * elements, saved=(kept,)))
    ops[-1] = replace(ops[-1], saved=(*ops[-1].saved, mask))
    return replace(
        mixer,
        params=(*entry, *mixer.under(f"{name}.").params, *leave),
        ops=tuple(ops),
        is_branch=True,
        settings=(*RESIDUAL_SETTINGS, *mixer.settings),
    )
