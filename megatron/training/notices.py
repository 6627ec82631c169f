"""Log notices about flags that are overridden or have no effect. Torch-free.

Only overrides that do not change results are allowed; rules reject all others."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.config import cli
from megatron.core.config.cli import flags_of
from megatron.core.config.muon import MUON_OPTIMIZERS
from megatron.core.config.tokenizer import TOKENIZER_FILES
from megatron.core.models.registry import scripts_with
from megatron.training.config.flat import FlatConfig
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.resolve import needs_built_in_layers, overlaps_without_halves

SINKS = ("tensorboard_dir", "wandb_project")
SOURCES = ("load", "pretrained_checkpoint")
PROFILES = ("profile", "record_memory_history")
NEEDS = {
    **dict.fromkeys(("save_interval", "save_retain_interval", "keep_last_checkpoints", "save_hf_interval"), ("save",)),
    **dict.fromkeys(("non_persistent_save_interval", "async_save", "max_failed_saves"), ("save",)),
    **dict.fromkeys(("no_save_optim", "no_save_rng"), ("save",)),
    "async_save_staging_gb": ("async_save",),
    "non_persistent_global_ckpt_dir": ("non_persistent_save_interval", "load"),
    "non_persistent_local_ckpt_dir": ("non_persistent_save_interval", "load"),
    **dict.fromkeys(("no_load_optim", "no_load_rng"), SOURCES),
    **dict.fromkeys(("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"), SOURCES),
    "tensorboard_log_interval": SINKS,
    "tensorboard_queue_size": ("tensorboard_dir",),
    **dict.fromkeys(("log_timers_to_tensorboard", "log_loss_scale_to_tensorboard"), SINKS),
    **dict.fromkeys(("log_validation_ppl_to_tensorboard", "log_memory_to_tensorboard"), SINKS),
    "log_world_size_to_tensorboard": SINKS,
    **dict.fromkeys(("wandb_exp_name", "wandb_save_dir", "wandb_entity"), ("wandb_project",)),
    **dict.fromkeys(("profile_step_start", "profile_step_end", "use_pytorch_profiler"), ("profile",)),
    "profile_ranks": PROFILES,
    "memory_snapshot_path": ("record_memory_history",),
    "manual_gc_interval": ("manual_gc",),
    "eval_interval": ("eval_iters", "full_validation"),
}
"""Field -> fields of which one must be set: without them it has no effect. Rules reject further pairs."""


def notices(given: PretrainConfig, resolved: PretrainConfig) -> Iterator[str]:
    """Yield one sentence per setting that was chosen, overridden or has no effect: backend, split, overlaps,
    tensor-parallel flags, layer implementation, strictness and flags of other features. Logs nothing.

    Args:
        given: settings as parsed.
        resolved: settings as completed by ``resolve``."""
    for name in ("distributed_backend", "split"):
        if name not in given.explicit and getattr(given.flat, name) != getattr(resolved.flat, name):
            yield f"{name}: {getattr(resolved.flat, name)} (default for this run)"
    whole = overlaps_without_halves(given.flat)
    yield from (f"--{name.replace('_', '-')}: off, as {reason}" for name, reason in whole.items())
    for name in ("sequence_parallel", "tp_comm_overlap", "distribute_saved_activations"):
        if getattr(given.flat, name) and not getattr(resolved.flat, name) and name not in whole:
            yield f"{name}: off, as --tensor-model-parallel-size is 1"
    halved = [name for name in ("tp_comm_overlap", "overlap_moe_expert_parallel_comm") if getattr(resolved.flat, name)]
    for name in halved if resolved.training.micro_batch_size % 2 else ():
        size, flag = resolved.training.micro_batch_size, name.replace("_", "-")
        yield f"--{flag}: no effect with the odd --micro-batch-size {size}; use an even size"
    yield from _layers(given, resolved)
    if given.program.dry_run or resembles_llama(resolved):
        yield from unfused_attention(resolved)
    yield from _strictly(given)
    yield from _other_model_flags(given)
    yield from _without_effect(given, resolved)


def _layers(given: PretrainConfig, resolved: PretrainConfig) -> Iterator[str]:
    """Yield a notice if built-in layers replace Transformer Engine, with the flags that need them, and one if attention
    dropout makes attention built-in although the other layers use Transformer Engine."""
    if given.model.transformer_impl != resolved.model.transformer_impl:
        reasons = ", ".join(needs_built_in_layers(resolved.flat))
        asked = f"--transformer-impl {given.model.transformer_impl}"
        yield f"{asked}: built-in layers are used instead, because {reasons} requires them"
    own_attention = resolved.model.context_parallel_size > 1 or resolved.model.attention_backend == "local"
    if (
        resolved.model.transformer_impl == "transformer_engine"
        and resolved.model.attention_dropout
        and not own_attention
    ):
        yield (
            f"--attention-dropout {resolved.model.attention_dropout:g}: built-in attention is used, "
            "because Transformer Engine's dropout masks depend on the layout; --attention-dropout 0 uses its kernels"
        )


def resembles_llama(cfg: PretrainConfig) -> bool:
    """Return whether the model has rotary positions, RMSNorm and SwiGLU, as models trained without dropout have."""
    model = cfg.model
    return cfg.embeddings.position_embedding_type == "rope" and model.normalization == "RMSNorm" and model.swiglu


def unfused_attention(cfg: PretrainConfig) -> Iterator[str]:
    """Yield a notice if attention dropout makes attention unfused."""
    model = cfg.model
    if not model.attention_dropout:
        return
    source = "" if "attention_dropout" in cfg.explicit else " (default, as in Megatron-LM)"
    usual = ", as usual with rope, RMSNorm and SwiGLU" if resembles_llama(cfg) else ""
    yield (
        f"--attention-dropout {model.attention_dropout:g}{source}: attention is unfused; its time and memory grow with "
        f"the square of --seq-length {cfg.data.seq_length}; --attention-dropout 0 uses fused kernels{usual}"
    )


def _other_model_flags(given: PretrainConfig) -> Iterator[str]:
    for group in given.flat.foreign_groups:
        flags = {spec.field: spec.names[0] for spec in flags_of(group)}
        for field in group.HARMLESS:
            if field in given.explicit:
                yield f"{flags[field]}: no effect here, only in {scripts_with(group)}"


def _strictly(given: PretrainConfig) -> Iterator[str]:
    value = given.checkpoint.dist_ckpt_strictness
    if "dist_ckpt_strictness" in given.explicit and given.checkpoint.load and not value.startswith("raise"):
        yield f"--dist-ckpt-strictness {value}: missing and unused names are always listed and rejected"


def _without_effect(given: PretrainConfig, resolved: PretrainConfig) -> Iterator[str]:
    """Yield notices about flags that have no effect with the other settings, extra learned positions with latent
    attention, and the flex dispatcher."""
    names = {spec.field: spec.names[0] for spec in flags_of(FlatConfig)}
    for field, needed in NEEDS.items():
        value = getattr(given.flat, field)
        if field in given.explicit and not any(getattr(given.flat, name) for name in needed):
            flag = names[field] + ("" if isinstance(value, bool) else f" {cli.show(value)}")
            effect = "; nothing is saved" if needed == ("save",) else ""
            yield f"{flag}: no effect without {' or '.join(names[name] for name in needed)}{effect}"
    for field in ("recompute_method", "recompute_num_layers"):
        if getattr(given.flat, field) is not None and getattr(resolved.flat, field) is None:
            flag = f"--{field.replace('_', '-')} {getattr(given.flat, field)}"
            yield f"{flag}: no effect without --recompute-granularity full; whole layers are not recomputed"
    if given.model.delay_wgrad_compute and not resolved.model.delay_wgrad_compute:
        yield "--delay-wgrad-compute: no effect, as --pipeline-model-parallel-size is 1"
    if modules := set(given.model.offload_modules or ()) - set(resolved.model.offload_modules or ()):
        yield f"--offload-modules {' '.join(sorted(modules))}: no effect, as --recompute-modules saves less of them"
    if given.model.fp8_param_gather and not resolved.model.fp8_param_gather:
        yield "--fp8-param-gather: no effect without --bf16; weights are gathered in fp32, with the same results"
    for name in ("use_distributed_optimizer", "overlap_param_gather"):
        if getattr(given.flat, name) and not getattr(resolved.flat, name):
            yield f"--{name.replace('_', '-')}: no effect with --use-torch-fsdp2, which shards all parameters"
    sizes = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "mla_down_proj_fusion")
    unused = [f"--{name.replace('_', '-')}" for name in sizes if name in given.explicit]
    if unused and not resolved.model.multi_latent_attention:
        yield f"{', '.join(unused)}: no effect without --multi-latent-attention"
    if resolved.model.multi_latent_attention and resolved.embeddings.position_embedding_type == "learned_absolute":
        yield (
            "--position-embedding-type learned_absolute: added to the rotary positions of latent attention; "
            "--position-embedding-type rope removes them"
        )
    of_muon = [f"--{name.replace('_', '-')}" for name in sorted(given.explicit) if name.startswith("muon_")]
    of_adaptive = [f"--{name.replace('_', '-')}" for name in sorted(given.explicit) if name.startswith("adaptive_muon")]
    if of_adaptive and resolved.optimizer.optimizer != "adaptive_muon":
        yield f"{', '.join(of_adaptive)}: no effect without --optimizer adaptive_muon"
    if of_muon and resolved.optimizer.optimizer not in MUON_OPTIMIZERS:
        yield f"{', '.join(of_muon)}: no effect without --optimizer muon"
    elif resolved.optimizer.muon_tp_mode == "distributed":
        yield "--muon-tp-mode distributed: deals full matrices to ranks, with the same results up to rounding"
    needed = TOKENIZER_FILES.get(resolved.tokenizer.tokenizer_type or "", ("tokenizer_model",))
    files = [name for name in ("tokenizer_model", "vocab_file", "merge_file") if name in given.explicit - {*needed}]
    if files and not resolved.data.mock_data:
        unread, read = (", ".join(f"--{name.replace('_', '-')}" for name in names) for names in (files, needed))
        kind = resolved.tokenizer.tokenizer_type
        yield f"{unread}: no effect with --tokenizer-type {kind}, which reads {read or 'no file'}"
    relative = [f"--{name.replace('_', '-')}" for name in sorted(given.explicit) if name.startswith("relative_att")]
    if relative and resolved.embeddings.position_embedding_type != "relative":
        yield f"{', '.join(relative)}: no effect without --position-embedding-type relative"
    if "rope_scaling_factor" in given.explicit and not resolved.rope_scaling.use_rope_scaling:
        yield f"--rope-scaling-factor {given.rope_scaling.rope_scaling_factor:g}: no effect without --use-rope-scaling"
    if resolved.upcycling.moe_upcycling_granularity != 1 and not resolved.upcycling.moe_use_upcycling:
        yield "--moe-upcycling-granularity: no effect without --moe-use-upcycling"
    of_experts = [name for name in sorted(given.explicit) if name.startswith(("moe_", "expert_tensor"))]
    if of_experts and resolved.model.num_moe_experts is None:
        yield f"{', '.join(of_experts)}: no effect without --num-experts N"
    elif resolved.model.moe_router_load_balancing_type == ["none"] and any(resolved.model.moe_aux_loss_coeff):
        coefficient = resolved.model.moe_aux_loss_coeff[0]
        yield f"--moe-aux-loss-coeff {coefficient:g}: no effect with --moe-router-load-balancing-type none"
    if resolved.model.moe_token_dispatcher_type == "flex" and resolved.model.num_moe_experts is not None:
        yield "--moe-token-dispatcher-type flex: uses the alltoall dispatcher, with the same results"
