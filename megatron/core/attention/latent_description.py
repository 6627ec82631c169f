"""Parameters, FLOPs, traffic and saved activations of multi-latent attention. Torch-free."""

from __future__ import annotations

from dataclasses import replace

from megatron.core.attention.description import attention_core, is_unfused, mixed_values, sink_params
from megatron.core.attention.qk_norm import qk_norm
from megatron.core.description.model import Config, LayerPlace, Op, Param, Piece, Saved
from megatron.core.description.parts import activation_bytes, gemm, linear, norm

SETTINGS = (
    "multi_latent_attention", "num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_head_dim",
    "qk_pos_emb_head_dim", "v_head_dim", "rope_type", "mla_down_proj_fusion", "add_bias_linear", "qk_layernorm",
    "rotary_base", "rotary_percent", "rotary_scaling_factor", "mscale", "mscale_all_dim", "window_size",
    "window_attn_skip_freq", "latent_norm_epsilon", "apply_query_key_layer_scaling", "softmax_type",
)  # fmt: skip
"""Configuration fields that determine the layer's weights and the meaning of their values."""


def describe_latent_attention(config: Config, place: LayerPlace) -> Piece:
    """Return a ``Piece`` with parameters (global shapes) and ops of multi-latent attention: down- and up-projections
    with their norms, rotary embedding, core attention, output projection. Counts the padding of values to the key head
    dim where kernels need it. Forward FLOPs count one sequence over all ranks, bytes one token on this rank."""
    heads, value, item = config.num_attention_heads, config.v_head_dim, activation_bytes(config)
    local, key = heads // config.tensor_model_parallel_size, config.qk_head_dim + config.qk_pos_emb_head_dim
    params, ops = _projections(config, place.seq_length)
    # flash kernels and key blocks need equal head dims, so that values are padded copies; otherwise values are views
    # of the up-projection's output, which stays alive as one tensor
    unfused = item > 2 or is_unfused(config)
    in_blocks = config.context_parallel_size > 1 or config.softmax_type != "vanilla"
    is_filled = key != value and (in_blocks or not unfused)
    width = max(key, value)
    both, values = 2 * local * key * item, local * (width if is_filled else config.qk_head_dim + value) * item
    saved_heads = (
        Saved("query and key", both, ("mla_up_proj",), ("core_attn",)),
        Saved("value", values, ("core_attn",) if is_filled else ("mla_up_proj",), ("core_attn",)),
    )
    ops.append(Op("rotary", "rotary", traffic=2.0 * both, gradients=both + values, saved=saved_heads))
    core = attention_core(config, place, local * key, local * key, local * value)
    if is_filled:
        filled = Saved("filled output", local * width * item, ("core_attn",), ("core_attn",))
        core = replace(core, saved=(*core.saved, filled))
    proj = linear("linear_proj", (config.hidden_size,), heads * value, 1, bias=config.add_bias_linear)
    ops += [core, gemm(proj[0], config, place.seq_length, saved=mixed_values(config, local * value))]
    return Piece("attention", (*params, *sink_params(config), *proj), tuple(ops), settings=SETTINGS)


def _projections(config: Config, tokens: int) -> tuple[list[Param], list[Op]]:
    """Return (parameters, ops) of the down-projections, latent norms and up-projections, in the module's construction
    order, with one fused down-projection if configured, and a plain query projection without ``q_lora_rank``.
    ``tokens`` is the sequence length. Down-projections are not sharded."""
    hidden, heads, query_rank, rank = (
        config.hidden_size,
        config.num_attention_heads,
        config.q_lora_rank,
        config.kv_lora_rank,
    )
    key, key_value = config.qk_head_dim + config.qk_pos_emb_head_dim, config.qk_head_dim + config.v_head_dim
    fused, both = config.mla_down_proj_fusion, rank + config.qk_pos_emb_head_dim
    params: list[Param] = []
    ops: list[Op] = []

    def down(name: str, size: int) -> None:
        params.append(Param(f"{name}.weight", (size, hidden)))
        ops.append(gemm(params[-1], config, tokens))

    def up(name: str, norm_name: str, size: int, out: int) -> None:
        """Add an up-projection and its norm; each saves its latent input for this rank's positions."""
        per_rank = config.tensor_model_parallel_size if config.sequence_parallel else 1
        latent_bytes = size / per_rank * activation_bytes(config)
        if qk_norm(config) is not None:
            params.extend(norm(norm_name, size, config))
            ops.append(Op("norm", norm_name, traffic=8.0 * latent_bytes, saved=(Saved("latent", latent_bytes),)))
        params.extend(linear(name, (out,), size, 0, bias=False))
        ops.append(gemm(params[-1], config, tokens, saved=(Saved("normed latent", latent_bytes),)))

    if fused:
        down("linear_qkv_down_proj", query_rank + both)
    elif query_rank is not None:
        down("linear_q_down_proj", query_rank)
    if query_rank is None:
        params.extend(linear("linear_q_proj", (heads * key,), hidden, 0, bias=False))
        ops.append(gemm(params[-1], config, tokens))
    else:
        up("linear_q_up_proj", "q_layernorm", query_rank, heads * key)
    if not fused:
        down("linear_kv_down_proj", both)
    up("linear_kv_up_proj", "kv_layernorm", rank, heads * key_value)
    return params, ops
