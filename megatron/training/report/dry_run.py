"""Report of --dry-run: layout, parameters, memory, batches and schedule, computed from the settings only.

Torch-free. Parameter counts are exact; for memory see ``memory.py``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from itertools import chain

from megatron.core.config.cli import ConfigError
from megatron.core.config.errors import counted
from megatron.core.config.moe import expert_tensor_ranks
from megatron.core.config.tokenizer import TokenizerConfig
from megatron.core.description.model import ModelDescription
from megatron.core.safe_files import parse_json, read_text, why_not_creatable
from megatron.core.schedules import batch_size as batch_sizes
from megatron.core.schedules import learning_rate as schedules
from megatron.training.arguments import validate_args
from megatron.training.config.launcher import is_first_rank, launched_world_size
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.resolve import rank_order, resolve
from megatron.training.report.advice import fit_rows
from megatron.training.report.expert_hints import expert_hints
from megatron.training.report.memory import memory_rows
from megatron.training.report.pipeline import pipeline_rows
from megatron.training.report.plan.summary import prediction_rows
from megatron.training.report.rates import cost_rows
from megatron.training.report.variable_lengths import variable_length_rows
from megatron.training.rules.checkpoints import load_folders_exist, save_folder_unused, save_folder_writable
from megatron.training.rules.inputs import input_problems
from megatron.training.rules.layer_pairs import stages_of_pairs
from megatron.training.rules.run_all import check

Rows = Iterator[tuple[str, object]]


def known_vocab_size(cfg: TokenizerConfig) -> tuple[int | None, str]:
    """Return (unpadded vocabulary size, its source), (None, "unknown") without file or if it is unreadable."""
    if cfg.vocab_size is not None:
        return cfg.vocab_size, "--vocab-size"
    if cfg.tokenizer_type == "ByteLevelTokenizer":
        return 257, cfg.tokenizer_type
    path = cfg.vocab_file
    if path is None or not os.path.isfile(path):
        return None, "unknown"
    try:
        text = read_text(path)
        if not path.endswith(".json"):
            return sum(1 for line in text.splitlines() if line.strip()), path
        return len(dict(parse_json(text))), path
    except (OSError, TypeError, ValueError):  # building the tokenizer reports the error
        return None, "unknown"


def preflight(cfg: PretrainConfig) -> bool:
    """Run all checks that need no torch, and --dry-run, which reports on rank 0; return whether the program is
    finished. Rank 0 also looks at tokenizer, data files and stored settings. ``cfg``: not yet resolved."""
    if cfg.checkpoint.use_checkpoint_args or cfg.checkpoint.load_hf:  # the checkpoint's settings are not known yet
        resolved = resolve(cfg, 1)
        rules = load_folders_exist, save_folder_unused, save_folder_writable
        if problems := [problem for rule in rules for problem in rule(resolved)]:
            raise ConfigError(problems)
        return False
    resolved = validate_args(cfg, launched_world_size() or 1, announce=cfg.program.dry_run)
    if is_first_rank() and (problems := input_problems(resolved, [])):  # before torch is imported
        raise ConfigError(problems)
    if cfg.program.dry_run and is_first_rank():
        sys.stdout.write(dry_run_report(resolved))
    return cfg.program.dry_run


def dry_run_report(cfg: PretrainConfig) -> str:
    """Return the text of ``--dry-run`` for a resolved and checked configuration. Omits empty sections.
    Raises ConfigError for --kd-layer-pairs that do not fit."""
    vocab_size, source = known_vocab_size(cfg.tokenizer)
    model = cfg.describe(vocab_size or 0)
    if vocab_size or cfg.model.pipeline_model_parallel_size == 1:  # the output layer is a part of the last stage
        stages_of_pairs(cfg, vocab_size or 0)
    sections: dict[str, Iterable[tuple[str, object]]] = {
        "layout": _layout(cfg),
        "pipeline": pipeline_rows(cfg, vocab_size),
        "model": _model(cfg, model, vocab_size, source),
        "memory": chain(
            memory_rows(cfg, vocab_size or 0), fit_rows(cfg, vocab_size or 0), expert_hints(cfg, vocab_size or 0)
        ),
        "batches": _batches(cfg, model.flops_per_sample if vocab_size else None),
        "samples of different lengths": variable_length_rows(cfg, model),
        "schedule": _schedule(cfg),
        "missing on this machine": _missing_here(cfg),
    }
    if vocab_size and not model.unknown and cfg.training.train_iters and cfg.family.is_default:
        samples = cfg.training.train_samples or batch_sizes.samples_from_iters(
            cfg.flat, cfg.training.train_iters, cfg.data_parallel_size
        )
        sections["batches"] = chain(sections["batches"], prediction_rows(cfg, vocab_size, samples))
    lines, missing = [], "missing on this machine"
    for title, rows in sections.items():
        section = [f"  {name:<26} {value}" for name, value in rows]
        lines += [title, *section] if section else []
    fails = f', but a run here would fail, see "{missing}"' if missing in lines else ""
    return "\n".join([*lines, f"the settings are consistent{fails}; nothing was started", ""])


def _missing_here(cfg: PretrainConfig) -> Rows:
    for problem in check(cfg.with_settings(dry_run=False)):
        flag, _, reason = str(problem).partition(": ")
        yield flag, reason
    save = cfg.checkpoint.save
    if save is not None and (obstacle := why_not_creatable(save)):
        yield f"--save {save}", obstacle


_AXES = {"tp": "tensor", "cp": "context", "ep": "expert", "dp": "data", "pp": "pipeline"}


def _layout(cfg: PretrainConfig) -> Rows:
    model = cfg.model
    tp, pp, cp = model.tensor_model_parallel_size, model.pipeline_model_parallel_size, model.context_parallel_size
    dp = cfg.data_parallel_size
    yield "ranks", f"{cfg.world_size} = tensor {tp} x pipeline {pp} x context {cp} x data {dp}"
    if model.num_moe_experts is not None:
        ep, etp = model.expert_model_parallel_size, expert_tensor_ranks(cfg.model)
        copies = cfg.world_size // (ep * etp * pp)
        yield "ranks of experts", f"{cfg.world_size} = tensor {etp} x expert {ep} x pipeline {pp} x data {copies}"
    yield "rank order", f"{', '.join(_AXES[axis] for axis in rank_order(cfg).split('-'))} (fastest first)"
    apex = f", apex: {' '.join(model.apex_parts)}" if model.apex_parts else ""
    layers = f"layers: {model.transformer_impl}, attention: {model.attention_backend}{apex}"
    yield "backend", f"{cfg.distributed.distributed_backend}, {layers}"


def _model(cfg: PretrainConfig, model: ModelDescription, vocab_size: int | None, source: str) -> Rows:
    """Without ``vocab_size`` counts exclude the embedding."""
    config = cfg.model
    heads = f"{config.num_attention_heads} heads of {config.kv_channels}, {config.num_query_groups} key-value groups"
    if config.multi_latent_attention:
        sizes = f"{config.qk_head_dim} + {config.qk_pos_emb_head_dim} rotated (values {config.v_head_dim})"
        ranks = f"{config.q_lora_rank or 'none'} for queries, {config.kv_lora_rank} for keys and values"
        heads = f"{config.num_attention_heads} heads of {sizes}, latents: {ranks}"
    widths = f"width {config.hidden_size}, feed-forward {config.ffn_hidden_size}"
    yield "shape", f"{config.num_layers} layers, {widths}, {heads}"
    if cfg.flat.decoder_num_layers is not None:
        yield "decoder", f"{cfg.flat.decoder_num_layers} further layers, with attention to the encoder"
        yield "sequences", f"{cfg.data.seq_length} tokens of the encoder, {cfg.flat.decoder_seq_length} of the decoder"
    if vocab_size is None:
        yield "vocabulary", "known when the tokenizer is loaded; --vocab-size N counts it here"
    if vocab_size is not None:
        yield "vocabulary", f"{vocab_size} ({source}), padded to {model.stored_vocabulary}"
    without = "" if vocab_size else " without the embedding"
    unknown = ""
    if model.unknown:
        unknown = f" and without {', '.join(model.unknown)}, which has no describe(config, place)"
    layers = sorted({sum(branch.num_parameters for branch in layer) for layer in model.layers})
    per_layer = " to ".join(f"{count:,}" for count in (layers[:1] + layers[1:][-1:]))
    stored = f"; {model.padding:,} more of padding" if model.padding else ""
    yield "parameters", f"{model.num_parameters:,}{without}{unknown}, of which {per_layer} per layer{stored}"
    if config.mtp_num_layers is not None:
        num_parameters = sum(piece.num_parameters for piece in model.predictions)
        yield "multi-token prediction", f"{config.mtp_num_layers} further, with {num_parameters:,} of these parameters"
    if config.num_moe_experts is not None:
        widths = f"{config.num_moe_experts} of width {config.moe_ffn_hidden_size}, {config.moe_router_topk} per token"
        shared = config.moe_shared_expert_intermediate_size
        yield "experts", widths + (f", and a shared one of width {shared}" if shared else "")
        yield "active parameters", f"{model.num_active_parameters:,} per token"
    for (name, companion), description in zip(cfg.companions.items(), model.companions):
        shape = f"{companion.model.num_layers} layers, width {companion.model.hidden_size}"
        folder = companion.checkpoint.load_hf or companion.checkpoint.load
        yield f"companion {name}", f"{shape}, {description.num_parameters:,} frozen parameters{without}, of {folder}"


def _batches(cfg: PretrainConfig, flops: float | None) -> Rows:
    """``flops``: per sample; None omits the rows that need it."""
    training, validation = cfg.training, cfg.validation
    dp, micro, length = cfg.data_parallel_size, training.micro_batch_size, cfg.data.seq_length
    for plateau in batch_sizes.batch_size_plateaus(cfg.flat):
        steps = plateau.size // (micro * dp)
        text = (
            f"{plateau.size} sequences = {micro} x {counted(dp, 'rank')} x {steps} micro-batch{'es' * (steps > 1)},"
            f" {plateau.size * length:,} tokens"
        )
        yield f"from sample {plateau.first_sample:,}", text
    if flops is not None:
        per_rank = flops * batch_sizes.batch_size_plateaus(cfg.flat)[-1].size / cfg.world_size
        yield "computation", f"{flops / length:.4g} FLOPs per token, {per_rank:.4g} per rank and iteration"
    if training.train_iters:
        samples = training.train_samples or batch_sizes.samples_from_iters(cfg.flat, training.train_iters, dp)
        if flops is not None:
            yield from cost_rows(cfg, flops * batch_sizes.batch_size_plateaus(cfg.flat)[-1].size, samples)
        yield "training", f"{training.train_iters:,} iterations, {samples:,} sequences, {samples * length:,} tokens"
    if validation.eval_iters:
        every = f"every {validation.eval_interval:,} iterations" if validation.eval_interval else "only after training"
        yield "evaluation", f"{validation.eval_iters} batches of {validation.eval_global_batch_size}, {every}"


def _schedule(cfg: PretrainConfig) -> Rows:
    if cfg.validation.skip_train or cfg.schedule.lr is None:
        yield "learning rate", "none: nothing is trained"
        return
    plan = schedules.schedule_plan(cfg.flat)
    yield "learning rate", f"{cfg.schedule.lr_decay_style}, {plan.init_lr:g} -> {plan.max_lr:g} -> {plan.min_lr:g}"
    warmup, end = (schedules.samples_at(cfg.flat, steps) for steps in (plan.lr_warmup_steps, plan.lr_decay_steps))
    yield "samples", f"{warmup:,} of warm-up, {end:,} until the minimum"
    for share in (0, 0.25, 0.5, 0.75, 1):
        samples = int(share * end)
        rate = schedules.learning_rate(plan, schedules.schedule_position(cfg.flat, samples))
        yield f"at sample {samples:,}", f"{rate:.6E}"
    yield "weight decay", f"{plan.start_wd:g} -> {plan.end_wd:g} ({plan.wd_incr_style})"
