"""Settings in a checkpoint: take the architecture from them, reject a different one, warn about other changes."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Sequence
from typing import Any

from megatron.core.config.cli import flags_of, from_object
from megatron.core.config.lora import SETTINGS as LORA_SETTINGS
from megatron.core.config.tokenizer import TokenizerConfig
from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.manifest import MANIFEST, read_manifest
from megatron.core.models.registry import default_family, get_family, known_family
from megatron.training.checkpoint.environment import software_versions
from megatron.training.checkpoint.files import find_checkpoint
from megatron.training.checkpoint.history import fast_folder, find_resumable, same_folder
from megatron.training.config.flat import FlatConfig, flags_by_field
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.stored_settings import (
    ARCHITECTURE,
    SIZES,
    check_architecture,
    refuse_other_family,
    with_custom_flags,
)

logger = logging.getLogger(__name__)

ALSO_TAKEN = ("attention_dropout", "hidden_dropout", "make_vocab_size_divisible_by")
COMPUTED_WITH = (
    "bias_gelu_fusion",
    "rotary_seq_len_interpolation_factor",
    "yarn_original_max_position_embeddings",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_correction_range_round_to_int",
)
"""Settings of the function that the weights were trained in; values on the command line take precedence."""

LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "sequence_parallel",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
TOKENIZER = tuple(field.name for field in dataclasses.fields(TokenizerConfig))

CONVERTED = (*SIZES, *ARCHITECTURE, *ALSO_TAKEN, *COMPUTED_WITH, *LAYOUT, *TOKENIZER)

DATA_STREAM = (
    "seed", "seq_length", "split", "data_path", "train_data_path", "valid_data_path", "test_data_path",
    "data_args_path", "per_split_data_args_path", "mock_data", "dataloader_type", "reset_position_ids",
    "reset_attention_mask", "eod_mask_loss", "allow_ambiguous_pad_tokens", "mid_level_dataset_surplus",
    "global_batch_size", "rampup_batch_size", "step_batch_size_schedule", "mask_prob", "short_seq_prob",
    "decoder_seq_length", "sft", "sft_packing", "dpo", "chat_template", "sft_tokenizer_prompt_format",
    "train_iters", "train_samples",
)  # fmt: skip
"""Settings that determine which samples come next; the last two fix the number of epochs and thus the order."""

NUMBERS = (
    "optimizer", "clip_grad", "adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum", "decoupled_lr",
    "decoupled_min_lr", "attention_dropout", "hidden_dropout", "fp16", "bf16", "loss_scale",
    "rotary_seq_len_interpolation_factor", "bias_gelu_fusion", "dpo_loss", "dpo_beta", "dpo_label_smoothing",
    "dpo_reference_load",
    "attention_softmax_in_fp32", "iterations_to_skip", "exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype",
    "grad_reduce_in_bf16", "fp32_residual_connection", "apply_wd_to_qk_layernorm",
    "loss_scale_window", "min_loss_scale", "hysteresis",
    "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate",
    "moe_router_dtype", "moe_input_jitter_eps", "moe_router_force_load_balancing", "moe_expert_capacity_factor",
    "moe_token_drop_policy", "moe_router_quantile_balancing_ema",
    "fp8", "fp8_recipe", "fp8_margin", "fp8_amax_compute_algo", "fp8_wgrad", "first_last_layers_bf16",
    "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16",
    "qk_clip", "qk_clip_threshold", "qk_clip_alpha",
    "muon_momentum", "muon_nesterov", "muon_split_qkv", "muon_split_qkv_per_head", "muon_split_gate_up",
    "muon_scale_mode", "muon_extra_scale_factor", "muon_coefficient_type", "muon_num_ns_steps",
    "muon_fp32_matmul_prec", "muon_scalar_optimizer", "lion_beta1", "lion_beta2",
    "adaptive_muon_moment2_method", "adaptive_muon_beta2", "adaptive_muon_eps",
)  # fmt: skip
"""Settings that affect computed values. Learning rate and weight decay are checked by the scheduler."""

FORGOTTEN = ("seed", "split", "dataloader_type", "global_batch_size", "mask_prob", "short_seq_prob")
"""Settings that must not silently revert to defaults when a run that set them is resumed without them."""

UNREPORTED = {"explicit", "resolved", "extra", "load", "save", "finetune"}


def load_checkpoint_args(load_dir: str | os.PathLike, step: int | None = None, flag: str = "--load") -> dict[str, Any]:
    """Return all settings of the checkpoint selected by ``flag load_dir --ckpt-step step``: names in ``CONVERTED``
    and weight settings of the family as command-line types, others as stored. CheckpointError if there is no valid
    checkpoint or a setting cannot be converted."""
    selected = find_checkpoint(load_dir, step)
    if selected is None:
        raise CheckpointError(
            f"{flag} {load_dir}: holds no checkpoint to take the model's settings from; check the path"
        )
    path = os.path.join(selected.directory, MANIFEST)
    args = read_manifest(selected.directory)["objects"].get("args")
    if not isinstance(args, dict):
        raise CheckpointDamagedError(f"{path}: args is not a table")
    family = known_family(args.get("model_family")) or get_family(default_family())
    kinds, converted, wrong = flags_by_field(family.name), {}, []
    for name in args.keys() & kinds.keys() & {*CONVERTED, *family.weight_settings}:
        try:
            converted[name] = from_object(kinds[name], args[name])
        except ValueError as error:
            wrong.append(f"{name} is {args[name]!r:.60}: {error}")
    if wrong:
        raise CheckpointDamagedError(f"{path}: not as training writes it: {'; '.join(sorted(wrong))}")
    return {**args, **converted}


def apply_checkpoint_args(cfg: PretrainConfig) -> PretrainConfig:
    """Return ``cfg`` (not yet resolved) with the checkpoint's settings that --use-checkpoint-args takes: sizes that are
    None, the architecture (over the command line), `COMPUTED_WITH` unless explicit, and with their flags layout and
    tokenizer. Logs each change. Unchanged without that flag, or, with a warning, if --load holds no checkpoint yet and
    the flags describe a model. May raise CheckpointError."""
    checkpoint, model = cfg.checkpoint, cfg.model
    if not checkpoint.use_checkpoint_args:
        return cfg
    folder = checkpoint.load or checkpoint.pretrained_checkpoint
    if folder is None:
        raise CheckpointError("--use-checkpoint-args: needs --load or --pretrained-checkpoint")
    resumable = find_resumable(checkpoint) if checkpoint.load else None
    if resumable is None and checkpoint.load and checkpoint.pretrained_checkpoint:
        folder = checkpoint.pretrained_checkpoint
    if resumable is not None and same_folder(os.path.dirname(resumable.directory), fast_folder(checkpoint)):
        folder = resumable.directory
    sizes = model.num_layers or cfg.embeddings.encoder_num_layers, model.hidden_size, model.num_attention_heads
    is_new = resumable is None and folder == checkpoint.load and not checkpoint.exit_on_missing_checkpoint
    if is_new and None not in sizes:
        logger.warning("--use-checkpoint-args: %s holds no checkpoint yet: this command line's settings apply", folder)
        return cfg
    is_load = folder == checkpoint.load
    flag = "--load" if is_load else "--pretrained-checkpoint"
    stored = load_checkpoint_args(folder, checkpoint.ckpt_step if is_load else None, flag)
    refuse_other_family(stored, cfg.model_family, folder)
    fields = {*cfg.flat.values()}
    if cfg.upcycling.moe_use_upcycling and stored.get("num_moe_experts") is None:
        fields = {name for name in fields if "moe_" not in name}  # expert settings come from the command line
    names = [name for name in SIZES if name in fields and getattr(cfg.flat, name) is None]
    names += [name for name in (*ARCHITECTURE, *cfg.family.weight_settings, *ALSO_TAKEN) if name not in SIZES]
    names += [name for name in COMPUTED_WITH if name not in cfg.explicit]
    if stored.get("lora_rank") is None:  # adapters of the command line are added to the model of the checkpoint
        names = [name for name in names if name not in LORA_SETTINGS]
    names += LAYOUT if checkpoint.use_mp_args_from_checkpoint_args else ()
    if checkpoint.use_tokenizer_model_from_checkpoint_args:
        named = bool({"tokenizer_type", "tokenizer_model", "vocab_file"} & cfg.explicit)
        explicit = (
            {*TOKENIZER} if named and stored.get("tokenizer_type") != cfg.tokenizer.tokenizer_type else cfg.explicit
        )
        names += [name for name in TOKENIZER if not (named and name in explicit)]
    changes = {n: stored[n] for n in names if n in fields and n in stored and stored[n] != getattr(cfg.flat, n)}
    for name, value in changes.items():
        logger.info("%s: %s (from the checkpoint, was %s)", name, value, getattr(cfg.flat, name))
    return cfg.with_settings(**changes)


def check_args(
    objects: dict[str, Any],
    current: dict[str, object],
    where: str,
    *,
    architecture: Sequence[str] = ARCHITECTURE,
    weights_only: bool = False,
) -> list[str]:
    """Reject another architecture and forgotten flags, listing every difference; log all others. Return one line per
    difference that changes the order of samples or the computed values. With ``weights_only`` the meaning of weights
    may change (a larger rotary base, say): only other sizes are rejected. ``objects``: JSON objects of the checkpoint,
    already checked by ``schema.py``; ``current``: settings of this run as JSON; ``where``: name of the checkpoint in
    messages; ``architecture``: settings that define the meaning of weights, custom flags included."""
    stored, current = with_custom_flags(objects["args"]), with_custom_flags(current)
    check_architecture(stored, current, where, architecture=architecture, weights_only=weights_only)
    differing = {name for name in stored.keys() & current.keys() - UNREPORTED if stored[name] != current[name]}
    if not weights_only:
        _refuse_forgotten(stored, current, differing, where)
    for name in sorted(differing):
        logger.info("changed since the checkpoint: %s was %s, is %s", name, stored[name], current[name])
    if weights_only:
        return []
    versions, current_versions = objects.get("versions", {}), software_versions()
    return [
        *(f"data: {name} was {stored[name]}, is {current[name]}" for name in DATA_STREAM if name in differing),
        *(f"numbers: {name} was {stored[name]}, is {current[name]}" for name in NUMBERS if name in differing),
        *(
            f"software: {name} was {versions[name]}, is {current_versions[name]}"
            for name in current_versions
            if name in versions and versions[name] != current_versions[name]
        ),
    ]


def _refuse_forgotten(stored: dict[str, object], current: dict[str, Any], differing: set[str], where: str) -> None:
    """Raise CheckpointError for ``FORGOTTEN`` settings that the stored run set explicitly and this run does not."""
    explicit = stored.get("explicit")
    stored_explicit = (
        set(explicit) if isinstance(explicit, list) and all(isinstance(name, str) for name in explicit) else set()
    )
    forgotten = [name for name in FORGOTTEN if name in differing & stored_explicit and name not in current["explicit"]]
    if forgotten:
        flags = {spec.field: spec.names[0] for spec in flags_of(FlatConfig)}
        listed = "; ".join(
            f"{flags[name]} {stored[name]} is not given any more and would become {current[name]}" for name in forgotten
        )
        raise CheckpointError(
            f"{where}: {listed}: the next samples would differ from the run that saved it. Give the same flags again,"
            f" or the new values explicitly if they are meant (such as {flags[forgotten[0]]} {current[forgotten[0]]})"
        )


def in_a_box(lines: list[str]) -> str:
    """Return ``lines`` as a warning framed by asterisks."""
    title = "WARNING: this run differs from a continuation of the run that saved the checkpoint"
    width = max(map(len, (title, *lines))) + 2
    return "\n".join(["", "*" * width, title, *(f"  {line}" for line in lines), "*" * width])
