"""Rules about the model and its precision. How it is split over ranks: ``layout.py``."""

from __future__ import annotations

from megatron.core.config.problems import Problems, as_given, flag_names, missing, problem
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.rules.common import sequence_lengths


def architecture_given(cfg: PretrainConfig) -> Problems:
    for field in ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings"):
        if getattr(cfg.flat, field) is None:
            yield missing(cfg, field)
    if cfg.data.seq_length is None:
        yield missing(cfg, "seq_length")


def repeated_mtp_layer_needs_mtp(cfg: PretrainConfig) -> Problems:
    if cfg.model.mtp_use_repeated_layer and cfg.model.mtp_num_layers is None:
        yield problem(cfg, "mtp_use_repeated_layer", "requires --mtp-num-layers", "add --mtp-num-layers N")


def heads_divide_hidden_size(cfg: PretrainConfig) -> Problems:
    """Reject a --hidden-size that is no multiple of --num-attention-heads if the head size derives from it. Checks
    nothing with an explicit --kv-channels, another derived head size, or multi-latent attention."""
    hidden, heads = cfg.model.hidden_size, cfg.model.num_attention_heads
    if not hidden or not heads or heads < 1 or "kv_channels" in cfg.explicit or cfg.model.multi_latent_attention:
        return
    if hidden % heads and cfg.model.kv_channels == max(hidden // heads, 1):
        fix = f"nearest width: {max(hidden // heads, 1) * heads}; or give --kv-channels"
        yield problem(cfg, "hidden_size", f"is not a multiple of --num-attention-heads {heads}", fix)


def query_groups_divide_heads(cfg: PretrainConfig) -> Problems:
    """Reject an explicit --num-query-groups other than the number of heads without --group-query-attention, and one
    that does not divide --num-attention-heads."""
    groups, heads = cfg.model.num_query_groups, cfg.model.num_attention_heads
    if not groups or not heads or groups < 1:
        return
    if "num_query_groups" in cfg.explicit and not cfg.embeddings.group_query_attention and groups != heads:
        yield problem(cfg, "num_query_groups", "requires --group-query-attention", "add that flag")
    if heads % groups:
        yield problem(cfg, "num_query_groups", f"does not divide --num-attention-heads {heads}")


def positions_cover_sequence(cfg: PretrainConfig) -> Problems:
    for field, length in sequence_lengths(cfg):
        if cfg.embeddings.max_position_embeddings and cfg.embeddings.max_position_embeddings < length:
            reason = f"is smaller than {flag_names(cfg, as_given(cfg, field))} {length}"
            yield problem(cfg, "max_position_embeddings", reason, f"give at least {length}")


def position_embedding_consistent(cfg: PretrainConfig) -> Problems:
    if not cfg.embeddings.add_position_embedding and cfg.embeddings.position_embedding_type == "learned_absolute":
        yield problem(cfg, "add_position_embedding", "contradicts learned positions", "--position-embedding-type none")


def rotary_settings_need_rotary(cfg: PretrainConfig) -> Problems:
    """Reject --use-rope-scaling, --rotary-seq-len-interpolation-factor and --rotary-interleaved unless
    --position-embedding-type is rope or yarn. Checks nothing for multi-latent attention."""
    if cfg.model.multi_latent_attention:
        return
    rotary = cfg.embeddings.position_embedding_type in ("rope", "yarn")
    for field in ("use_rope_scaling", "rotary_seq_len_interpolation_factor", "rotary_interleaved"):
        if getattr(cfg.flat, field) and not rotary:
            yield problem(cfg, field, "needs rotary positions", "--position-embedding-type rope")


def rotary_channels_even(cfg: PretrainConfig) -> Problems:
    if (
        cfg.embeddings.position_embedding_type in ("rope", "yarn")
        and cfg.model.kv_channels
        and not cfg.model.multi_latent_attention
    ):
        channels = int(cfg.model.kv_channels * cfg.embeddings.rotary_percent)
        if channels % 2 or not channels:
            reason = (
                f"rotates {channels} of {cfg.model.kv_channels} channels per head; the number must be even and not 0"
            )
            yield problem(cfg, "rotary_percent", reason)


def yarn_original_length_given(cfg: PretrainConfig) -> Problems:
    if cfg.embeddings.position_embedding_type == "yarn" and cfg.model.yarn_original_max_position_embeddings is None:
        yield missing(cfg, "yarn_original_max_position_embeddings", "is required by --position-embedding-type yarn")


def latent_attention_sizes(cfg: PretrainConfig) -> Problems:
    """For --multi-latent-attention, require an explicit --kv-lora-rank (unless --use-checkpoint-args), --q-lora-rank
    with --mla-down-proj-fusion, and an even, nonzero number of rotated channels, which --rotary-percent reduces only
    for ``--rope-type rope``."""
    if not cfg.model.multi_latent_attention:
        return
    if "kv_lora_rank" not in cfg.explicit and not cfg.checkpoint.use_checkpoint_args:
        fix = "for example --kv-lora-rank 512 (Megatron-LM's default is 32)"
        yield missing(cfg, "kv_lora_rank", "is required by --multi-latent-attention", fix)
    if cfg.model.mla_down_proj_fusion and cfg.model.q_lora_rank is None:
        reason = "fuses the projections of the query and key/value latents, but there is no query latent"
        yield problem(cfg, "mla_down_proj_fusion", reason, "add --q-lora-rank")
    turned = cfg.model.qk_pos_emb_head_dim
    width = int(turned * cfg.embeddings.rotary_percent) if cfg.model.rope_type == "rope" else turned
    if width % 2 or not width:
        field = "rotary_percent" if turned % 2 == 0 else "qk_pos_emb_head_dim"
        yield problem(cfg, field, f"rotates {width} of {turned} channels; the number must be even and not 0")


def latent_attention_exclusions(cfg: PretrainConfig) -> Problems:
    """With --multi-latent-attention, reject settings of ordinary attention, one problem each: grouped queries,
    --qk-l2-norm, --qk-layernorm-across-heads, --rotary-base-local, --no-rope-freq, --softmax-scale, --add-qkv-bias,
    --rotary-interleaved, RoPE scaling and interpolation, and --position-embedding-type yarn."""
    if not cfg.model.multi_latent_attention:
        return
    reasons = {
        "group_query_attention": "contradicts --multi-latent-attention, where all heads share one key/value latent",
        "qk_l2_norm": "contradicts --multi-latent-attention, whose norms are --qk-layernorm",
        "qk_layernorm_across_heads": "contradicts --multi-latent-attention, whose norms are --qk-layernorm",
        "rotary_base_local": "contradicts --multi-latent-attention, which has one rotary base",
        "no_rope_freq": "contradicts --multi-latent-attention, which uses rotary positions in every layer",
        "softmax_scale": "contradicts --multi-latent-attention, which computes its softmax scale",
        "add_qkv_bias": "contradicts --multi-latent-attention, which has no fused query/key/value projection",
        "rotary_interleaved": "has no effect with --multi-latent-attention, which always interleaves",
        "use_rope_scaling": "contradicts --multi-latent-attention, which scales positions by --rotary-scaling-factor",
        "rotary_seq_len_interpolation_factor":
            "contradicts --multi-latent-attention, which scales positions by --rotary-scaling-factor",
    }  # fmt: skip
    for field, reason in reasons.items():
        if getattr(cfg.flat, field):
            yield problem(cfg, field, reason, "remove it")
    if cfg.embeddings.position_embedding_type == "yarn":
        fix = "--position-embedding-type rope --rope-type yarn"
        yield problem(cfg, "position_embedding_type", "is not supported with --multi-latent-attention", fix)


def latent_settings_need_latent_attention(cfg: PretrainConfig) -> Problems:
    """Without --multi-latent-attention, reject ``mla_up_proj`` in --recompute-modules and a --rope-type that differs
    from --position-embedding-type."""
    if cfg.model.multi_latent_attention:
        return
    if "mla_up_proj" in (cfg.model.recompute_modules or ()):
        yield problem(cfg, "recompute_modules", "mla_up_proj needs --multi-latent-attention", "remove it")
    if cfg.model.rope_type is not None and cfg.model.rope_type != cfg.embeddings.position_embedding_type:
        fix = f"--position-embedding-type {cfg.model.rope_type}"
        yield problem(cfg, "rope_type", "requires --multi-latent-attention, or an equal --position-embedding-type", fix)


def activation_settings(cfg: PretrainConfig) -> Problems:
    """Reject more than one of --swiglu, --squared-relu, --relu, --quick-geglu and --geglu; the exact-GELU flag with an
    activation other than GELU or --geglu; and the clamp value and linear offset of gated units without a gated
    activation."""
    chosen = [field for field in ("swiglu", "squared_relu", "relu", "quick_geglu", "geglu") if getattr(cfg.flat, field)]
    if len(chosen) > 1:
        yield problem(cfg, chosen[1], f"contradicts --{chosen[0].replace('_', '-')}", "give one activation")
    if cfg.model.exact_gelu and chosen not in ([], ["geglu"]):
        yield problem(cfg, "exact_gelu", f"contradicts --{chosen[0].replace('_', '-')}", "use it with GELU or --geglu")
    for field in ("activation_func_clamp_value", "glu_linear_offset"):
        if getattr(cfg.flat, field) and not cfg.model.gated_linear_unit:
            yield problem(cfg, field, "needs a gated activation", "--swiglu, --quick-geglu or --geglu")


def window_settings(cfg: PretrainConfig) -> Problems:
    pattern = cfg.model.window_attn_skip_freq
    if pattern is not None and cfg.model.window_size is None:
        yield problem(cfg, "window_attn_skip_freq", "requires --window-size", "add --window-size LEFT,0")
    if isinstance(pattern, list) and cfg.model.num_layers and len(pattern) != cfg.model.num_layers:
        yield problem(cfg, "window_attn_skip_freq", f"has {len(pattern)} entries for {cfg.model.num_layers} layers")


def one_query_key_norm(cfg: PretrainConfig) -> Problems:
    if cfg.model.qk_layernorm and cfg.model.qk_l2_norm:
        yield problem(cfg, "qk_l2_norm", "contradicts --qk-layernorm", "choose one of the two")


def qk_norm_across_heads(cfg: PretrainConfig) -> Problems:
    """For --qk-layernorm-across-heads without latent attention, require --qk-layernorm, RMSNorm, and query groups that
    are a multiple of the tensor-parallel size."""
    if not cfg.model.qk_layernorm_across_heads or cfg.model.multi_latent_attention:
        return
    field, tp, groups = "qk_layernorm_across_heads", cfg.model.tensor_model_parallel_size, cfg.model.num_query_groups
    if not cfg.model.qk_layernorm:
        yield problem(cfg, field, "requires --qk-layernorm", "add that flag")
    if cfg.model.normalization != "RMSNorm":
        reason = f"is not supported with --normalization {cfg.model.normalization}"
        yield problem(cfg, field, reason, "--normalization RMSNorm")
    if groups and groups % tp:
        reason = f"requires that --tensor-model-parallel-size {tp} divides the {groups} key/value heads"
        yield problem(cfg, field, reason, "use fewer tensor-parallel ranks")


def residual_settings(cfg: PretrainConfig) -> Problems:
    others = {
        "use_parallel_residual": cfg.model.use_parallel_residual,
        "norm_placement": cfg.model.norm_placement == "post",
    }
    for field, is_given in others.items():
        if is_given and cfg.model.apply_residual_connection_post_layernorm:
            yield problem(cfg, field, "contradicts --apply-residual-connection-post-layernorm", "choose one of the two")


def local_rotary_base(cfg: PretrainConfig) -> Problems:
    """For --rotary-base-local without latent attention, require --window-size and --position-embedding-type rope or
    yarn. Another rule rejects it with latent attention."""
    if cfg.model.rotary_base_local is None or cfg.model.multi_latent_attention:
        return
    if cfg.model.window_size is None:
        yield problem(cfg, "rotary_base_local", "requires --window-size", "add --window-size LEFT,0")
    if cfg.embeddings.position_embedding_type not in ("rope", "yarn"):
        yield problem(cfg, "rotary_base_local", "needs rotary positions", "--position-embedding-type rope")


def no_rope_pattern(cfg: PretrainConfig) -> Problems:
    """For --no-rope-freq without latent attention, require --position-embedding-type rope or yarn and, if it is a list,
    one entry per layer. Does not require that any layer rotates."""
    pattern = cfg.model.no_rope_freq
    if pattern is None or cfg.model.multi_latent_attention:
        return
    if cfg.embeddings.position_embedding_type not in ("rope", "yarn"):
        yield problem(cfg, "no_rope_freq", "needs rotary positions", "add --position-embedding-type rope")
    if isinstance(pattern, list) and cfg.model.num_layers and len(pattern) != cfg.model.num_layers:
        yield problem(cfg, "no_rope_freq", f"has {len(pattern)} entries for {cfg.model.num_layers} layers")


def one_precision(cfg: PretrainConfig) -> Problems:
    if cfg.model.fp16 and cfg.model.bf16:
        yield problem(cfg, "fp16", "contradicts --bf16", "choose one of the two")


def loss_scale_settings(cfg: PretrainConfig) -> Problems:
    if cfg.optimizer.loss_scale and not cfg.model.fp16:
        yield problem(cfg, "loss_scale", "requires --fp16", "remove it")
    if cfg.optimizer.min_loss_scale > cfg.optimizer.initial_loss_scale:
        yield problem(cfg, "min_loss_scale", f"is larger than --initial-loss-scale {cfg.optimizer.initial_loss_scale}")


def grad_reduce_dtype(cfg: PretrainConfig) -> Problems:
    if cfg.optimizer.grad_reduce_in_bf16 and "accumulate_allreduce_grads_in_fp32" in cfg.explicit:
        yield problem(cfg, "grad_reduce_in_bf16", "contradicts --accumulate-allreduce-grads-in-fp32", "choose one")
    if cfg.optimizer.grad_reduce_in_bf16 and not cfg.model.bf16:
        yield problem(cfg, "grad_reduce_in_bf16", "needs --bf16")


def embedding_norm_settings(cfg: PretrainConfig) -> Problems:
    """Reject --embed-layernorm together with --norm-placement post, --use-parallel-residual or
    --apply-residual-connection-post-layernorm, one problem each."""
    if not cfg.model.embed_layernorm:
        return
    fix = "choose one of the two"
    if cfg.model.norm_placement == "post":
        reason = "contradicts --norm-placement post, which has no norm before the first layer"
        yield problem(cfg, "embed_layernorm", reason, fix)
    for field in ("use_parallel_residual", "apply_residual_connection_post_layernorm"):
        if getattr(cfg.flat, field):
            yield problem(cfg, field, "contradicts --embed-layernorm", fix)


def encoder_num_layers_agrees(cfg: PretrainConfig) -> Problems:
    if cfg.model.num_layers is not None and cfg.embeddings.encoder_num_layers != cfg.model.num_layers:
        yield problem(
            cfg, "encoder_num_layers", f"contradicts --num-layers {cfg.model.num_layers}", "give one of the two"
        )
