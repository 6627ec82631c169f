"""Description of the mixture of experts of ``moe_layer.py``. Torch-free.

Assumes a balanced load: for T tokens per rank, the rank's experts process ``moe_router_topk * T`` rows."""

from __future__ import annotations

from dataclasses import replace

from megatron.core.config.fp8 import experts_in_fp8
from megatron.core.config.moe import expert_tensor_ranks
from megatron.core.description.model import Config, LayerPlace, Op, Param, Piece, Saved
from megatron.core.description.parts import activation_bytes, stream_elements
from megatron.core.transformer.mlp_description import SETTINGS as MLP_SETTINGS
from megatron.core.transformer.mlp_description import describe_mlp

SETTINGS = (
    *MLP_SETTINGS, "num_moe_experts", "moe_ffn_hidden_size", "moe_layer_freq", "moe_router_topk",
    "moe_router_score_function", "moe_router_pre_softmax", "moe_router_num_groups", "moe_router_group_topk",
    "moe_router_group_score_topk", "moe_router_topk_scaling_factor", "moe_router_enable_expert_bias",
    "moe_shared_expert_intermediate_size", "moe_shared_expert_gate",
)  # fmt: skip
"""Settings that the weights of MoE layers depend on."""


def describe_moe(config: Config, place: LayerPlace) -> Piece:
    """Describe router, experts and, if configured, shared expert as one piece with all their parameters and operations.
    Rows per rank assume a balanced load; with ``moe_static_rows`` the maximum."""
    router, experts = _router(config, place), _experts(config, place)
    pieces = [router, experts]
    if config.moe_shared_expert_intermediate_size:
        pieces.append(_shared_expert(config, place))
    return Piece(
        "experts", tuple(param for piece in pieces for param in piece.params),
        tuple(op for piece in pieces for op in piece.ops), settings=SETTINGS,
    )  # fmt: skip


def _router(config: Config, place: LayerPlace) -> Piece:
    """Describe the router: weight [experts, hidden], replicated, a bias if linears have one, one GEMM with fp32 logits
    saved for backward (twice: logits and scores)."""
    experts, hidden = config.num_moe_experts, config.hidden_size
    params = [Param("router.weight", (experts, hidden))]
    if config.add_bias_linear:
        params.append(Param("router.bias", (experts,), ndim=1))
    rows = stream_elements(config) / hidden
    logits = Op(
        "gemm", "router", 2.0 * place.seq_length * experts * hidden, gemm=(experts, hidden),
        saved=(Saved("logits", 2 * rows * experts * 4, ("moe",)),),
    )  # fmt: skip
    return Piece("router", tuple(params), (logits,))


def _experts(config: Config, place: LayerPlace) -> Piece:
    """Describe the routed experts: weights split by EP in dim 0 and by ETP along the feed-forward width, active for
    topk / experts of the tokens; permutation, fc1, activation, fc2 and combination."""
    count, top, width = config.num_moe_experts, config.moe_router_topk, config.moe_ffn_hidden_size
    hidden, item, gated = config.hidden_size, activation_bytes(config), config.gated_linear_unit
    split = expert_tensor_ranks(config)
    wide = (2, width) if gated else (width,)
    mesh = {"ep": 0, "etp": 2 if gated else 1}
    shape = {"active": top / count}
    params = [Param("experts.linear_fc1.weight", (count, *wide, hidden), mesh, **shape)]
    if config.add_bias_linear:
        params.append(Param("experts.linear_fc1.bias", (count, *wide), mesh, **shape))
    params.append(Param("experts.linear_fc2.weight", (count, hidden, width), {"ep": 0, "etp": 2}, **shape))
    if config.add_bias_linear:
        params.append(Param("experts.linear_fc2.bias", (count, hidden), {"ep": 0}, **shape))
    rows = stream_elements(config) / hidden * top * split  # each ETP rank of an expert gets its rows
    if config.moe_static_rows:  # the maximum instead of the balanced number of rows
        ranks = config.expert_model_parallel_size
        rows *= ranks * min(top, count // ranks) / top
    narrow = rows * width / split * item
    saved_share = 1 / item if experts_in_fp8(config) and config.fp8_wgrad else 1  # inputs of GEMMs are saved in fp8
    up = 2 if gated else 1
    flops = 2.0 * place.seq_length * top * width * hidden
    passes = 3 + 5 if gated else 2 + 3
    ops = (
        Op("other", "permutation", traffic=4.0 * rows * hidden * item, gradients=rows * hidden * item,
           saved=(Saved("rows", rows * hidden * item * saved_share, ("moe",), ("expert_fc1",)),)),
        Op("gemm", "linear_fc1", up * flops, gemm=(up * width // split, hidden), gradients=up * narrow,
           saved=(Saved("input of the activation", up * narrow, ("moe",), ("moe_act",)),)),
        Op("activation", "activation", traffic=passes * narrow, gradients=narrow,
           saved=(Saved("output of the activation", narrow * saved_share, ("moe", "moe_act")),)),
        Op("gemm", "linear_fc2", flops, gemm=(hidden, width // split)),
        Op("other", "combination", traffic=4.0 * rows * hidden * item,
           saved=(Saved("experts' outputs", rows * hidden * item, ("moe",)),)),
    )  # fmt: skip
    return Piece("experts", tuple(params), ops)


def _shared_expert(config: Config, place: LayerPlace) -> Piece:
    """Describe the shared expert: an MLP of ``moe_shared_expert_intermediate_size`` under ``shared_experts.``, and with
    ``moe_shared_expert_gate`` its gate weight [1, hidden] and GEMM."""
    mlp = describe_mlp(config, place, width=config.moe_shared_expert_intermediate_size).under("shared_experts.")
    mlp = mlp.inside("shared_experts")
    if not config.moe_shared_expert_gate:
        return mlp
    gate = Op("gemm", "gate", 2.0 * place.seq_length * config.hidden_size, gemm=(1, config.hidden_size))
    params = (*mlp.params, Param("shared_experts.gate_weight", (1, config.hidden_size)))
    return replace(mlp, params=params, ops=(*mlp.ops, gate))
