"""Rules about the model and its precision. How it is split over ranks: ``layout.py``."""

from __future__ import annotations

from megatron.core.config.model_rules import model_problems
from megatron.core.config.problems import Problems, as_given, flag_names, missing, problem
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.rules.common import sequence_lengths


def architecture_given(cfg: PretrainConfig) -> Problems:
    for field in ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings"):
        if getattr(cfg.flat, field) is None:
            yield missing(cfg, field)
    if cfg.data.seq_length is None:
        yield missing(cfg, "seq_length")


def rules_of_the_library(cfg: PretrainConfig) -> Problems:
    """Apply the rules of the model's settings alone, which ``TransformerConfig`` applies too."""
    yield from model_problems(cfg.model, cfg.explicit)


def query_groups_need_their_flag(cfg: PretrainConfig) -> Problems:
    is_explicit = "num_query_groups" in cfg.explicit and cfg.model.num_query_groups != cfg.model.num_attention_heads
    if is_explicit and not cfg.embeddings.group_query_attention:
        yield problem(cfg, "num_query_groups", "requires --group-query-attention", "add that flag")


def positions_cover_sequence(cfg: PretrainConfig) -> Problems:
    for field, length in sequence_lengths(cfg):
        if cfg.embeddings.max_position_embeddings and cfg.embeddings.max_position_embeddings < length:
            reason = f"is smaller than {flag_names(cfg, as_given(cfg, field))} {length}"
            yield problem(cfg, "max_position_embeddings", reason, f"give at least {length}")


def position_embedding_consistent(cfg: PretrainConfig) -> Problems:
    if not cfg.embeddings.add_position_embedding and cfg.embeddings.position_embedding_type == "learned_absolute":
        yield problem(cfg, "add_position_embedding", "contradicts learned positions", "--position-embedding-type none")


def position_offset_needs_learned_positions(cfg: PretrainConfig) -> Problems:
    if cfg.model.learned_position_offset and cfg.embeddings.position_embedding_type != "learned_absolute":
        yield problem(cfg, "learned_position_offset", "requires learned positions", "remove it")


def rotary_settings_need_rotary(cfg: PretrainConfig) -> Problems:
    """Reject rotary settings with other position embeddings. Checks nothing for multi-latent attention."""
    if cfg.model.multi_latent_attention:
        return
    rotary = cfg.embeddings.position_embedding_type in ("rope", "yarn")
    for field in ("use_rope_scaling", "rotary_seq_len_interpolation_factor", "rotary_interleaved"):
        if getattr(cfg.flat, field) and not rotary:
            yield problem(cfg, field, "needs rotary positions", "--position-embedding-type rope")


def rotary_channels_even(cfg: PretrainConfig) -> Problems:
    model = cfg.model
    if (
        cfg.embeddings.position_embedding_type in ("rope", "yarn")
        and model.kv_channels
        and not model.multi_latent_attention
    ):
        channels = int(model.kv_channels * cfg.embeddings.rotary_percent)
        if channels % 2 or not channels:
            reason = f"rotates {channels} of {model.kv_channels} channels per head; the number must be even and not 0"
            yield problem(cfg, "rotary_percent", reason)


def yarn_original_length_given(cfg: PretrainConfig) -> Problems:
    if cfg.embeddings.position_embedding_type == "yarn" and cfg.model.yarn_original_max_position_embeddings is None:
        yield missing(cfg, "yarn_original_max_position_embeddings", "is required by --position-embedding-type yarn")


def latent_attention_sizes(cfg: PretrainConfig) -> Problems:
    """Require an explicit --kv-lora-rank (unless --use-checkpoint-args) and an even number > 0 of rotated channels."""
    if not cfg.model.multi_latent_attention:
        return
    if "kv_lora_rank" not in cfg.explicit and not cfg.checkpoint.use_checkpoint_args:
        fix = "for example --kv-lora-rank 512 (Megatron-LM's default is 32)"
        yield missing(cfg, "kv_lora_rank", "is required by --multi-latent-attention", fix)
    rotated = cfg.model.qk_pos_emb_head_dim
    width = int(rotated * cfg.embeddings.rotary_percent) if cfg.model.rope_type == "rope" else rotated
    if rotated % 2 == 0 and (width % 2 or not width):
        reason = f"rotates {width} of {rotated} channels; the number must be even and not 0"
        yield problem(cfg, "rotary_percent", reason)


def latent_attention_positions(cfg: PretrainConfig) -> Problems:
    """Reject grouped queries, RoPE scaling and interpolation, and yarn positions with --multi-latent-attention."""
    if not cfg.model.multi_latent_attention:
        return
    scaled = "contradicts --multi-latent-attention, which scales positions by --rotary-scaling-factor"
    reasons = {
        "group_query_attention": "contradicts --multi-latent-attention, where all heads share one key/value latent",
        "use_rope_scaling": scaled,
        "rotary_seq_len_interpolation_factor": scaled,
    }
    for field, reason in reasons.items():
        if getattr(cfg.flat, field):
            yield problem(cfg, field, reason, "remove it")
    if cfg.embeddings.position_embedding_type == "yarn":
        fix = "--position-embedding-type rope --rope-type yarn"
        yield problem(cfg, "position_embedding_type", "is not supported with --multi-latent-attention", fix)


def latent_settings_need_latent_attention(cfg: PretrainConfig) -> Problems:
    """Without --multi-latent-attention, reject a --rope-type that differs
    from --position-embedding-type."""
    model = cfg.model
    if model.multi_latent_attention:
        return
    if model.rope_type is not None and model.rope_type != cfg.embeddings.position_embedding_type:
        fix = f"--position-embedding-type {model.rope_type}"
        yield problem(cfg, "rope_type", "requires --multi-latent-attention, or an equal --position-embedding-type", fix)


def one_query_key_norm(cfg: PretrainConfig) -> Problems:
    """The library takes both, as Megatron-LM does, and uses the L2 norm."""
    if cfg.model.qk_layernorm and cfg.model.qk_l2_norm:
        yield problem(cfg, "qk_l2_norm", "contradicts --qk-layernorm", "choose one of the two")


def local_rotary_base(cfg: PretrainConfig) -> Problems:
    """Require --window-size and rope or yarn for --rotary-base-local without latent attention."""
    if cfg.model.rotary_base_local is None or cfg.model.multi_latent_attention:
        return
    if cfg.model.window_size is None:
        yield problem(cfg, "rotary_base_local", "requires --window-size", "add --window-size LEFT,0")
    if cfg.embeddings.position_embedding_type not in ("rope", "yarn"):
        yield problem(cfg, "rotary_base_local", "needs rotary positions", "--position-embedding-type rope")


def no_rope_pattern(cfg: PretrainConfig) -> Problems:
    """Require rope or yarn for --no-rope-freq without latent attention, and one entry per layer of a list."""
    model = cfg.model
    pattern = model.no_rope_freq
    if pattern is None or model.multi_latent_attention:
        return
    if cfg.embeddings.position_embedding_type not in ("rope", "yarn"):
        yield problem(cfg, "no_rope_freq", "needs rotary positions", "add --position-embedding-type rope")
    if isinstance(pattern, list) and model.num_layers and len(pattern) != model.num_layers:
        yield problem(cfg, "no_rope_freq", f"has {len(pattern)} entries for {model.num_layers} layers")


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


def encoder_num_layers_agrees(cfg: PretrainConfig) -> Problems:
    if cfg.model.num_layers is not None and cfg.embeddings.encoder_num_layers != cfg.model.num_layers:
        yield problem(
            cfg, "encoder_num_layers", f"contradicts --num-layers {cfg.model.num_layers}", "give one of the two"
        )
