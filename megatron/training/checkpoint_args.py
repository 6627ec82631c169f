"""The settings in a checkpoint: taking the architecture from it, refusing another one, reporting what changed."""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import Any

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.manifest import read_manifest
from megatron.training.checkpoint_files import find_checkpoint
from megatron.training.config.pretrain_config import PretrainConfig

logger = logging.getLogger(__name__)

SIZES = (
    "num_layers", "hidden_size", "ffn_hidden_size", "seq_length", "num_attention_heads", "num_query_groups",
    "kv_channels", "max_position_embeddings",
)  # fmt: skip
"""Taken from the checkpoint only where the command line says nothing."""

ARCHITECTURE = (
    "group_query_attention", "position_embedding_type", "rotary_base", "rotary_percent", "rotary_interleaved",
    "use_rope_scaling", "rope_scaling_factor", "add_bias_linear", "add_qkv_bias", "swiglu", "squared_relu",
    "quick_geglu",
    "untie_embeddings_and_output_weights", "apply_layernorm_1p", "normalization", "norm_epsilon", "qk_layernorm",
    "qk_l2_norm", "window_size", "window_attn_skip_freq", "apply_query_key_layer_scaling",
    "apply_residual_connection_post_layernorm", "activation_func_clamp_value", "num_experts", "moe_layer_freq",
    "moe_ffn_hidden_size", "moe_router_topk", "multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim",
    "qk_pos_emb_head_dim", "v_head_dim",
)  # fmt: skip
"""What the weights mean: taken from the checkpoint by --use-checkpoint-args, and refused where it differs."""

ALSO_TAKEN = ("attention_dropout", "hidden_dropout", "make_vocab_size_divisible_by")
LAYOUT = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage",
    "expert_model_parallel_size", "sequence_parallel", "context_parallel_size",
)  # fmt: skip
TOKENIZER = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "vocab_size")

SIZES_OF_WEIGHTS = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
)  # fmt: skip
MUST_MATCH = (*SIZES_OF_WEIGHTS, *ARCHITECTURE)
UNREPORTED = {"explicit", "resolved", "extra", "load", "save", "local_rank", "finetune"}


def load_checkpoint_args(load_dir: str | os.PathLike, step: int | None = None) -> dict[str, Any]:
    """All settings of the run that wrote the checkpoint which ``--load load_dir --ckpt-step step`` means."""
    found = find_checkpoint(load_dir, step)
    if found is None:
        raise CheckpointError(f"--use-checkpoint-args: {load_dir} holds no checkpoint")
    return read_manifest(found.directory)["objects"]["args"]


def apply_checkpoint_args(cfg: PretrainConfig) -> PretrainConfig:
    """``cfg`` (not yet resolved) with what --use-checkpoint-args takes; unchanged without that flag."""
    if not cfg.use_checkpoint_args:
        return cfg
    folder = cfg.load or cfg.pretrained_checkpoint
    if folder is None:
        raise CheckpointError("--use-checkpoint-args: needs --load or --pretrained-checkpoint")
    if cfg.load and cfg.pretrained_checkpoint and find_checkpoint(cfg.load, cfg.ckpt_step) is None:
        folder = cfg.pretrained_checkpoint
    stored = load_checkpoint_args(folder, cfg.ckpt_step if folder == cfg.load else None)
    known = {field.name for field in dataclasses.fields(cfg)}
    names = [name for name in SIZES if name in known and getattr(cfg, name) is None]
    names += [*ARCHITECTURE, *ALSO_TAKEN]
    names += LAYOUT if cfg.use_mp_args_from_checkpoint_args else ()
    names += TOKENIZER if cfg.use_tokenizer_model_from_checkpoint_args else ()
    changes = {n: stored[n] for n in names if n in known and n in stored and stored[n] != getattr(cfg, n)}
    for name, value in changes.items():
        logger.info("%s: %s (from the checkpoint, was %s)", name, value, getattr(cfg, name))
    return dataclasses.replace(cfg, **changes)


def check_args(
    stored: dict[str, Any], current: dict[str, Any], where: str, *, weights_only: bool = False
) -> None:  # fmt: skip
    """Refuse another architecture, listing every difference; report all other differences.

    A run that takes only the weights may change what they mean (a larger rotary base for longer sequences, say): there
    only other sizes are refused.

    Args:
        stored: the checkpoint's settings, as plain JSON values.
        current: this run's.
        where: names the checkpoint in messages.
        weights_only: --finetune and the like.
    """
    differing = {name for name in stored.keys() & current.keys() - UNREPORTED if stored[name] != current[name]}
    refused = [name for name in (SIZES_OF_WEIGHTS if weights_only else MUST_MATCH) if name in differing]
    if refused:
        listed = "; ".join(f"{name} is {current[name]!r}, the checkpoint has {stored[name]!r}" for name in refused)
        raise CheckpointError(
            f"{where} has another architecture: {listed}; change these flags, or give --use-checkpoint-args"
        )
    for name in sorted(differing):
        logger.info("changed since the checkpoint: %s was %s, is %s", name, stored[name], current[name])
