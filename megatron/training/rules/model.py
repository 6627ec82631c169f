"""Rules about the model and its family. How it is split over ranks: ``layout.py``."""

from __future__ import annotations

from megatron.core.config.model_rules import model_problems
from megatron.core.config.optional import used_fields
from megatron.core.config.problems import Problems, as_given, flag_names, missing, problem
from megatron.core.config.rope_parameters import parse_rope_parameters
from megatron.core.models.registry import scripts_with
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.rules.common import sequence_lengths


def architecture_given(cfg: PretrainConfig) -> Problems:
    for field in ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings"):
        if getattr(cfg.flat, field) is None:
            yield missing(cfg, field)
    if cfg.data.seq_length is None:
        yield missing(cfg, "seq_length")


def rules_of_the_library(cfg: PretrainConfig) -> Problems:
    """Apply the rules that need only the model's settings, which ``TransformerConfig`` applies too."""
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


def rope_parameters_fit_heads(cfg: PretrainConfig) -> Problems:
    """Require a factor per rotated channel pair, and two pairs for dynamic scaling."""
    if cfg.model.rope_parameters is None:
        return
    parameters = parse_rope_parameters(cfg.model.rope_parameters)
    pairs = int((cfg.model.kv_channels or 0) * cfg.embeddings.rotary_percent) // 2
    if parameters.rope_type == "longrope" and len(parameters.short_factor) != pairs:
        reason = f"has {len(parameters.short_factor)} factors for {pairs} rotated channel pairs per head"
        yield problem(cfg, "rope_parameters", reason, f"give {pairs} short and long factors")
    if parameters.rope_type == "dynamic" and pairs == 1:
        yield problem(cfg, "rope_parameters", "needs at least 4 rotated channels per head", "remove it")


def latent_attention_sizes(cfg: PretrainConfig) -> Problems:
    """Require an even number > 0 of rotated channels."""
    if not cfg.model.multi_latent_attention:
        return
    rotated = cfg.model.qk_pos_emb_head_dim
    width = int(rotated * cfg.embeddings.rotary_percent) if cfg.model.rope_type == "rope" else rotated
    if rotated % 2 == 0 and (width % 2 or not width):
        reason = f"rotates {width} of {rotated} channels; the number must be even and not 0"
        yield problem(cfg, "rotary_percent", reason)


def latent_settings_need_latent_attention(cfg: PretrainConfig) -> Problems:
    """Without --multi-latent-attention, reject a --rope-type that differs from --position-embedding-type."""
    model = cfg.model
    if model.multi_latent_attention:
        return
    if model.rope_type is not None and model.rope_type != cfg.embeddings.position_embedding_type:
        fix = f"--position-embedding-type {model.rope_type}"
        yield problem(cfg, "rope_type", "requires --multi-latent-attention, or an equal --position-embedding-type", fix)


def no_rope_pattern(cfg: PretrainConfig) -> Problems:
    pattern, model = cfg.model.no_rope_freq, cfg.model
    if model.multi_latent_attention or not isinstance(pattern, list):
        return
    if model.num_layers and len(pattern) != model.num_layers:
        yield problem(cfg, "no_rope_freq", f"has {len(pattern)} entries for {model.num_layers} layers")


def encoder_num_layers_agrees(cfg: PretrainConfig) -> Problems:
    layers = cfg.model.num_layers
    if layers is not None and cfg.embeddings.encoder_num_layers != layers:
        yield problem(cfg, "encoder_num_layers", f"contradicts --num-layers {layers}", "give one of the two")


def family_has_groups(cfg: PretrainConfig) -> Problems:
    """Reject used fields of groups that the model family does not list, except harmless fields."""
    for group in cfg.flat.foreign_groups:
        used = [field for field in used_fields(group, cfg.flat) if field not in group.HARMLESS]
        for field in [field for field in used if field in cfg.explicit] or used:  # others may derive from these
            fix = group.CHOICES[field][1] if field in group.CHOICES else "remove it"
            yield problem(cfg, field, f"is supported only by {scripts_with(group)}", fix)


def family_rules(cfg: PretrainConfig) -> Problems:
    """Apply the rules of the model family."""
    for rule in cfg.family.rules:
        yield from rule(cfg)
