"""Verify a parallel layout: ``python tools/verify_layout.py <flags of pretrain_gpt.py> [--world-size N]``.

For flags of another program, add for example ``--program pretrain_bert.py``.

Shrinks the model (layers, width, vocabulary, sequence length; keeps the ratios that affect the layout) and trains it
for a few steps in float64 on random data, first in one process, then in N local gloo processes with the given layout.
The base of adapters, the reference model of preference pairs and a teacher are random models of the same small size.
Losses, gradient norms, all gathered gradients and all weights must agree to 1e-10. Flags of data, checkpoints, logging
and precision are reset to their defaults, because they do not affect the layout.

Exit code 0: equal; 1: different, prints the first difference; 2: the flags contradict each other."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import math
import multiprocessing
import os
import socket
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from megatron.core.config.cli import ConfigError
from megatron.core.config.commands import tool_parser
from megatron.core.config.distillation import DistillationConfig
from megatron.core.config.errors import UserError, counted
from megatron.core.config.fp8 import ALIGNED, BLOCK
from megatron.core.config.hybrid import DEPTH
from megatron.core.config.layer_kinds import delta_kinds
from megatron.core.config.lora import LoraConfig
from megatron.core.config.moe import expert_tensor_ranks
from megatron.core.config.optimizer import MixedPrecisionConfig
from megatron.core.config.preferences import PreferenceConfig
from megatron.core.config.problems import Problems, problem
from megatron.core.config.rope_parameters import parse_rope_parameters
from megatron.core.config.tokenizer import TokenizerConfig
from megatron.core.models.registry import find_program
from megatron.core.pipeline_parallel.stages import virtual_pipeline_size
from megatron.training.arguments import parse_args, smallest_world_size, validate_args
from megatron.training.checkpoint.other_formats import apply_hf_settings
from megatron.training.config.checkpointing import CheckpointConfig
from megatron.training.config.data import DataConfig
from megatron.training.config.flat import FlatConfig
from megatron.training.config.learning_rate import LearningRateConfig
from megatron.training.config.logging import LoggingConfig
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.resolve import gpu_present
from megatron.training.config.training import ProfilingConfig
from megatron.training.config.validation import ValidationConfig
from megatron.training.config.variable_lengths import local_multiple
from megatron.training.report.pipeline import run_stages

if TYPE_CHECKING:
    from megatron.training.tasks.language_model import LanguageModelTask
    from megatron.training.verify.layout_trace import Verdict

LEFT_OUT = (
    CheckpointConfig,
    DataConfig,
    LearningRateConfig,
    LoggingConfig,
    MixedPrecisionConfig,
    ProfilingConfig,
    TokenizerConfig,
    ValidationConfig,
)
"""Configuration groups that are reset to their defaults, because they do not affect the layout."""
VOCAB_SIZE = 61
LARGEST_BUCKET = 3000  # elements; small enough that the shrunken model has several buckets


def shrink(cfg: PretrainConfig, world_size: int) -> PretrainConfig:
    """Return ``cfg`` with a small model and the same layout, in fp64 on gloo; not yet resolved by ``validate_args``.
    Raises ConfigError: ``cfg`` is invalid on ``world_size`` ranks."""
    resolved = validate_args(cfg.with_settings(needs_data=False), world_size)
    defaults = FlatConfig()
    values: dict[str, Any] = {
        field.name: getattr(defaults, field.name)
        for group in LEFT_OUT
        for field in dataclasses.fields(group)
        if field.name != "seq_length"
    }
    values |= _small_network(resolved) | _small_mixers(resolved) | _small_experts(resolved) | _small_batches(resolved)
    values |= _small_stages(resolved) if resolved.family.shrink is None else resolved.family.shrink(resolved, values)
    values |= {
        "bf16": False,
        "fp16": False,
        "fp64": True,
        "fp8_param_gather": False,
        "distributed_backend": "gloo",
        "num_workers": 0,
        "eval_iters": 0,
        "train_samples": None,
        "num_epochs": None,
        "lr": 1e-2,
        "adam_eps": 1e-5,
        "dry_run": False,
        "needs_data": False,
        "grad_reduce_in_bf16": False,
        "ddp_reduce_scatter_with_fp32_accumulation": False,
        "yaml_cfg": None,
    }
    if cfg.distributed.overlap_grad_reduce and cfg.distributed.ddp_num_buckets is None:
        values["ddp_bucket_size"] = LARGEST_BUCKET
    explicit = cfg.explicit - {field for field, value in values.items() if value == getattr(defaults, field, None)}
    return cfg.with_settings(**values, explicit=frozenset(explicit | {"distributed_backend"}))


def not_verified(cfg: PretrainConfig) -> Problems:
    """Reject what needs values of another model for the data of the run."""
    reason = "needs the data of the run"
    if cfg.flat.logits_load_dir:
        yield problem(cfg, "logits_load_dir", reason, "use --export-kd-teacher-load, which is verified")
    if cfg.flat.dpo_reference == "stored":
        yield problem(cfg, "dpo_reference", reason, "use model or base, which are verified")


def _small_network(cfg: PretrainConfig) -> dict[str, object]:
    """Few heads, in the same ratio to query groups and ranks, a short sequence that ranks can divide, few layers."""
    model = cfg.model
    tp, cp = model.tensor_model_parallel_size, model.context_parallel_size
    heads, groups = _small_heads(
        model.num_attention_heads, model.num_query_groups or model.num_attention_heads, tp * cp
    )
    channels = _unit(cfg)
    gated = 2 if model.swiglu or model.quick_geglu or model.geglu else 4
    shared = cfg.data_parallel_size * cp if model.hybrid_context_parallel else cp
    length = math.lcm(2 * shared * tp, 16) if model.fp8 is None else 2 * shared * tp * channels
    limit = model.max_seqlen_per_dp_cp_rank
    if limit is not None:  # the longest sample needs as many ranks as the user's
        needed, multiple = math.ceil(cfg.data.seq_length / limit), local_multiple(cfg)
        limit = math.ceil(length / needed / multiple) * multiple
    return {
        "max_seqlen_per_dp_cp_rank": limit,
        "num_layers": _few_layers(cfg),
        "encoder_num_layers": None,
        "num_attention_heads": heads,
        "num_query_groups": groups if cfg.embeddings.group_query_attention else None,
        "hidden_size": heads * channels,
        "kv_channels": channels,
        "ffn_hidden_size": heads * channels * gated,
        "seq_length": length,
        "encoder_seq_length": None,
        "max_position_embeddings": length,
        "window_size": model.window_size and (length // 4, min(model.window_size[1], length // 4)),
        "make_vocab_size_divisible_by": 8,
        "vocab_size": VOCAB_SIZE,
        "yarn_original_max_position_embeddings": model.yarn_original_max_position_embeddings and length,
        "rope_parameters": model.rope_parameters
        and _small_rope_parameters(model.rope_parameters, cfg, length, channels),
        "recompute_num_layers": model.recompute_num_layers and min(model.recompute_num_layers, 2),
    }


def _small_mixers(cfg: PretrainConfig) -> dict[str, object]:
    """Few narrow heads of linear attention and Mamba-2, in the same ratio to key heads or groups and ranks; the leading
    layers of a pattern."""
    model, channels, values = cfg.model, _unit(cfg), dict[str, object]()
    ranks = model.tensor_model_parallel_size * model.context_parallel_size
    if delta_kinds(model):
        heads, keys = _small_heads(model.linear_num_value_heads, model.linear_num_key_heads, ranks)
        values |= {"linear_num_value_heads": heads, "linear_num_key_heads": keys}
        values |= {"linear_key_head_dim": channels, "linear_value_head_dim": channels}
    if model.hybrid_layer_pattern is not None:
        layers, *depths = model.hybrid_layer_pattern.split(DEPTH)
        if (count := _few_layers(cfg)) != model.num_layers:
            layers = layers[:count]
        values["hybrid_layer_pattern"] = DEPTH.join((layers, *depths))
    if "M" in (model.hybrid_layer_pattern or ""):
        assert model.mamba_num_heads is not None, "follows from the hidden size"
        heads, groups = _small_heads(model.mamba_num_heads, model.mamba_num_groups, ranks)
        values |= {"mamba_num_heads": heads, "mamba_num_groups": groups}
        values |= {"mamba_head_dim": channels, "mamba_state_dim": channels}
    return values


def _small_rope_parameters(text: str, cfg: PretrainConfig, length: int, channels: int) -> str:
    """Factors of the first channel pairs; rows of ``length`` tokens are on the same side of the original length."""
    parameters, pairs = parse_rope_parameters(text), int(channels * cfg.embeddings.rotary_percent) // 2
    is_longer = cfg.data.seq_length > parameters.original_max_position_embeddings
    original = length // 2 if is_longer else length
    short, long = ((factors * pairs)[:pairs] for factors in (parameters.short_factor, parameters.long_factor))
    small = parameters._replace(original_max_position_embeddings=original, short_factor=short, long_factor=long)
    return small.to_text()


def _unit(cfg: PretrainConfig) -> int:
    """8, or the divisor that fp8 requires."""
    if cfg.model.fp8 is None:
        return 8
    return BLOCK if cfg.model.fp8_recipe == "blockwise" else ALIGNED


def _small_experts(cfg: PretrainConfig) -> dict[str, object]:
    """A capacity factor is raised so that no token is dropped: capacity is per rank, so drops depend on the layout."""
    model = cfg.model
    if model.num_moe_experts is None:
        return {}
    chosen, together = (
        model.moe_router_topk,
        math.lcm(model.expert_model_parallel_size, model.moe_router_num_groups or 1),
    )
    in_group = max(math.ceil(chosen / (model.moe_router_group_topk or chosen)), model.moe_router_group_score_topk or 1)
    least = max(chosen + 1, in_group * (model.moe_router_num_groups or 1), 4)
    experts = min(model.num_moe_experts, math.ceil(least / together) * together)
    shared = model.moe_shared_expert_intermediate_size and _unit(cfg) * model.tensor_model_parallel_size
    return {
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": 8 * expert_tensor_ranks(cfg.model),
        "moe_shared_expert_intermediate_size": shared,
        "moe_expert_capacity_factor": model.moe_expert_capacity_factor and experts / chosen,
    }


def _small_heads(heads: int, groups: int, ranks: int) -> tuple[int, int]:
    """Return fewer heads and groups of equal ratio, which divide over ``ranks`` like those of the user."""
    ratio = heads // groups
    small = next(
        n
        for n in range(1, groups + 1)
        if math.gcd(n, ranks) == math.gcd(groups, ranks) and (n * ratio) % _part(heads, ranks) == 0
    )
    return small * ratio, small


def _part(heads: int, ranks: int) -> int:
    """Return the number of ranks over which heads can be split evenly."""
    return math.gcd(heads, ranks)


def _few_layers(cfg: PretrainConfig) -> int:
    """All layers if the flags assign layers individually, or stages a hybrid pattern; else the smallest multiple of
    stages and layer patterns (one stage: twice that), plus the remainder; or layers of a pattern with all kinds."""
    model = cfg.model
    stages = model.pipeline_model_parallel_size * virtual_pipeline_size(cfg.model)
    counts = model.decoder_first_pipeline_num_layers, model.decoder_last_pipeline_num_layers
    every = model.window_attn_skip_freq, model.no_rope_freq, model.moe_layer_freq, model.linear_attention_freq
    patterns = [pattern for pattern in every if pattern is not None]
    fixed = (
        cfg.custom_layers.spec
        or model.pipeline_model_parallel_layout
        or any(isinstance(pattern, list) for pattern in patterns)
        or any("layers." in target for target in cfg.flat.lora_target_modules or ())
        or cfg.flat.kd_layer_pairs
    )
    if model.fp8 is not None and model.first_last_layers_bf16:
        return model.num_layers
    if fixed or len(model.cp_comm_type) > 1 or any(counts) or model.num_layers_per_virtual_pipeline_stage:
        return model.num_layers
    if model.hybrid_layer_pattern is not None:
        layers = model.hybrid_layer_pattern.split(DEPTH)[0]
        return model.num_layers if stages > 1 else 1 + max(map(layers.index, layers))
    least = math.lcm(stages, *(pattern for pattern in patterns if isinstance(pattern, int))) * (2 if stages == 1 else 1)
    return min(model.num_layers, least + model.num_layers % stages)


def _small_stages(cfg: PretrainConfig) -> dict[str, object]:
    """The same cuts if stages cut layers in two. One full layer per stage represents all if layers are identical."""
    model = cfg.model
    stages = run_stages(cfg, cfg.tokenizer.vocab_size)
    if model.pipeline_model_parallel_layout or not any(stage.cuts_layers for stage in stages):
        return {}
    differ = any(
        setting is not None for setting in (model.window_attn_skip_freq, model.no_rope_freq, cfg.custom_layers.spec)
    )
    differ = differ or len(model.cp_comm_type) > 1
    differ = differ or (model.num_moe_experts is not None and model.moe_layer_freq != 1)
    words, num_layers = [], 0
    for stage in stages:
        letters = ""
        for part in stage.parts:
            letter = "t" if part.is_whole else "".join("af"[branch == len(part.names) - 1] for branch in part.branches)
            if differ or letter != "t" or "t" not in letters:
                letters += letter
        num_layers += letters.count("t") + letters.count("f")
        words.append("E" * stage.embedding + letters + "L" * stage.loss)
    return {
        "num_layers": num_layers,
        "pipeline_model_parallel_layout": "|".join(words),
        "num_virtual_stages_per_pipeline_rank": None,
        "num_layers_per_virtual_pipeline_stage": None,
    }


def _small_batches(cfg: PretrainConfig) -> dict[str, object]:
    """At most 2 sequences, and up to twice the pipeline size of micro-batches; no batch-size schedule."""
    per_rank = max(1, cfg.training.global_batch_size // (cfg.training.micro_batch_size * cfg.data_parallel_size))
    enough = max(2, 2 * cfg.model.pipeline_model_parallel_size)
    group = cfg.model.microbatch_group_size_per_virtual_pipeline_stage or 1
    count = min(per_rank, max(enough, group))
    micro = min(cfg.training.micro_batch_size, 2)
    return {
        "micro_batch_size": micro,
        "global_batch_size": micro * cfg.data_parallel_size * count,
        "train_iters": 100,
        "rampup_batch_size": None,
        "step_batch_size_schedule": None,
        "decrease_batch_size_if_needed": False,
    }


def one_rank(cfg: PretrainConfig) -> PretrainConfig:
    """Return ``cfg`` without parallelism, with the global batch as one micro-batch, except with samples of different
    lengths, MoE balancing methods that are computed per micro-batch, and fp8, whose scales are."""
    defaults = FlatConfig()
    layout = [
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "sequence_parallel",
        "tp_comm_overlap", "use_distributed_optimizer", "num_distributed_optimizer_instances", "overlap_grad_reduce",
        "overlap_param_gather", "ddp_bucket_size", "ddp_num_buckets", "use_torch_fsdp2", "cp_comm_type",
        "hierarchical_context_parallel_sizes", "hybrid_context_parallel", "max_seqlen_per_dp_cp_rank",
        "min_dynamic_context_parallel_size", "microbatch_group_size_per_virtual_pipeline_stage",
        "overlap_p2p_comm", "delay_wgrad_compute", "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
        "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "pipeline_model_parallel_layout",
        "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "pipeline_schedule",
        "whole_layers_in_pipeline_split",
        "recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules",
        "recompute_activations", "distribute_saved_activations", "expert_model_parallel_size",
        "expert_tensor_parallel_size", "moe_token_dispatcher_type", "moe_shared_expert_overlap", "moe_fusion",
    ]  # fmt: skip
    values = {name: getattr(defaults, name) for name in layout}
    sequence_losses = {"aux_loss", "sinkhorn", "quantile_balancing"}
    if cfg.variable_lengths.use_varlen_dataset:
        values["micro_batch_size"] = 1  # a row of packed samples
    elif cfg.model.fp8 is not None:
        values["micro_batch_size"] = cfg.training.micro_batch_size // (2 if cfg.model.tp_comm_overlap else 1)
    elif cfg.model.num_moe_experts is None or not sequence_losses & set(cfg.model.moe_router_load_balancing_type):
        values["micro_batch_size"] = cfg.training.global_batch_size
    return cfg.with_settings(**values, explicit=cfg.explicit - set(layout))


def with_other_weights(cfg: PretrainConfig, folder: str) -> PretrainConfig:
    """Return ``cfg`` with a base of adapters, a reference model of preference pairs and a teacher of random weights
    each, saved in ``folder``; ``cfg`` itself if it has none."""
    flat = cfg.flat
    is_model = not cfg.reads_base or flat.dpo_reference == "model" or bool(flat.dpo_reference_load)
    needed = {
        "pretrained_checkpoint": cfg.reads_base,
        "dpo_reference_load": flat.dpo and is_model,
        "export_kd_teacher_load": bool(flat.export_kd_teacher_load),
    }
    defaults, groups, values = FlatConfig(), (LoraConfig, PreferenceConfig, DistillationConfig), {}
    reset = {field.name: getattr(defaults, field.name) for group in groups for field in dataclasses.fields(group)}
    for number, name in enumerate([name for name, is_needed in needed.items() if is_needed], start=1):
        values[name] = os.path.join(folder, name)
        plain = one_rank(cfg).with_settings(**reset, save=values[name], seed=cfg.model.seed + number)
        launch(plain.with_settings(explicit=plain.explicit - set(reset)), 1, folder, target=save_weights)
    return cfg.with_settings(**values)


def save_weights(rank: int, cfg: PretrainConfig, world_size: int, place: dict[str, str]) -> None:
    """Save the initial weights of ``cfg`` in its --save folder."""
    resolved, make_task = _start(rank, cfg, world_size, place)
    from megatron.training.initialize import initialize_megatron, shut_down
    from megatron.training.run import build_components

    parts = build_components(resolved, make_task(resolved), initialize_megatron(resolved))
    parts.checkpointer.save(parts.state)
    shut_down()


def run_rank(rank: int, cfg: PretrainConfig, world_size: int, place: dict[str, str], steps: int) -> None:
    """Train in one process; save the trace as ``reference.pt`` in ``place["FOLDER"]``, or if it exists this rank's
    comparison with it as ``<rank>.pt``. ``place`` also holds the rendezvous variables; GPUs are hidden."""
    resolved, make_task = _start(rank, cfg, world_size, place)
    import torch

    from megatron.training.initialize import initialize_megatron, shut_down
    from megatron.training.verify import layout_trace

    traces = layout_trace.trace(resolved, make_task, initialize_megatron(resolved), steps)
    reference = Path(place["FOLDER"]) / "reference.pt"
    if not reference.exists():
        reference_steps = [dataclasses.asdict(step) for step in layout_trace.build_reference(traces)]
        torch.save(reference_steps, reference)
        return
    expected = [layout_trace.ReferenceStep(**step) for step in torch.load(reference, weights_only=True)]
    reports = [layout_trace.compare(one, step) for one, step in zip(traces, expected)]
    plain = [[r.losses, r.norm, [(c.kind, c.name, tuple(c.rectangle), *c[3:]) for c in r.cells]] for r in reports]
    torch.save(plain, f"{place['FOLDER']}/{rank}.pt")
    shut_down()


def _start(
    rank: int, cfg: PretrainConfig, world_size: int, place: dict[str, str]
) -> tuple[PretrainConfig, type[LanguageModelTask]]:
    """Set up this process as ``rank``; return resolved settings and the task on random data."""
    os.environ.update(place, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), CUDA_VISIBLE_DEVICES="")
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    logging.getLogger("megatron").setLevel(logging.WARNING)
    return validate_args(cfg, world_size), _task_class(cfg)


def _task_class(cfg: PretrainConfig) -> type[LanguageModelTask]:
    """Return the class of the task on random data."""
    from megatron.training.tasks.language_model import task_class
    from megatron.training.verify import layout_trace

    return layout_trace.with_synthetic_data(task_class(cfg.model_family), VOCAB_SIZE)


def launch(
    cfg: PretrainConfig, world_size: int, folder: str, *arguments: Any, target: Callable[..., None] = run_rank
) -> None:
    """Run ``target(rank, cfg, world_size, place, *arguments)`` in ``world_size`` new processes of this machine, with
    rendezvous on a free port, and wait; raise the first failure with its traceback, and end the others."""
    import torch.multiprocessing as mp

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "FOLDER": folder}
    preloaded = ["megatron.training.verify.layout_trace", "megatron.training.tasks.gpt", "torch._dynamo"]
    forks = threading.active_count() == 1 and not gpu_present()  # threads and CUDA do not survive a fork
    if forks:  # this process has torch already, a server would import it again
        for name in preloaded:
            importlib.import_module(name)
    multiprocessing.set_forkserver_preload(preloaded)
    arguments_ = (cfg, world_size, place, *arguments)
    mp.start_processes(target, args=arguments_, nprocs=world_size, start_method="fork" if forks else "forkserver")


def verify(cfg: PretrainConfig, world_size: int, steps: int) -> Verdict:
    """Train ``cfg`` on one rank, then on ``world_size`` ranks, in new processes on the CPU and a temporary folder;
    return the verdict of the comparison in fp64 tolerance. Raises the first failure of a process."""
    import torch

    from megatron.core.sharding.rectangles import Rectangle
    from megatron.training.verify import layout_trace

    with tempfile.TemporaryDirectory() as folder:
        launch(one_rank(cfg), 1, folder, steps)
        launch(cfg, world_size, folder, steps)
        expected = [
            layout_trace.ReferenceStep(**step) for step in torch.load(f"{folder}/reference.pt", weights_only=True)
        ]
        reports = []
        for rank in range(world_size):
            read = torch.load(f"{folder}/{rank}.pt", weights_only=True)
            cells = [
                [
                    layout_trace.Compared(kind, name, Rectangle(*place), error, digest)
                    for kind, name, place, error, digest in report[2]
                ]
                for report in read
            ]
            reports.append([layout_trace.StepReport(report[0], report[1], cell) for report, cell in zip(read, cells)])
    return layout_trace.judge(expected, reports, layout_trace.TOLERANCE["fp64"])


def table(verdict: Verdict) -> str:
    """Return a table as text with one row per step: loss (the first one) and gradient norm, each next to the
    reference's, and the largest gradient and weight errors with their names."""
    lines = [f"{'step':>4} {'loss':>12} {'one rank':>12} {'norm':>12} {'one rank':>12}  worst gradient / worst weight"]
    for row in verdict.rows:
        loss, expected = (next(iter(row[key].values()), math.nan) for key in ("losses", "reference losses"))
        norm, norm_expected = (math.nan if row[key] is None else row[key] for key in ("norm", "reference norm"))
        worst = [f"{error:.1e} {name}" for error, name in (row["gradient"], row["weight"])]
        numbers = f"{row['step']:>4} {loss:>12.8f} {expected:>12.8f} {norm:>12.8f} {norm_expected:>12.8f}"
        lines.append(f"{numbers}  {' / '.join(worst)}")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Shrink the model of the flags ``argv``, train it on one rank and in its layout on --world-size ranks for --steps
    steps, and print tables and verdict. Return the exit code: 0 equal, 1 different."""
    parser = tool_parser(__doc__)
    parser.add_argument("--world-size", type=int, help="ranks; default: the smallest number that the layout needs")
    parser.add_argument(
        "--program", default="pretrain_gpt.py", help="program of these flags, or a model family's module"
    )
    parser.add_argument("--steps", type=int, default=5, help="training steps to compare")
    options, flags = parser.parse_known_args(argv)
    if options.steps < 1:  # nothing would be compared, and the verdict would be "equal"
        raise UserError(f"--steps {options.steps}: must be at least 1")
    family, _ = find_program(options.program)
    cfg = apply_hf_settings(parse_args(flags, needs_data=False, model_family=family.name))
    if problems := list(not_verified(cfg)):
        raise ConfigError(problems)
    world_size = options.world_size or smallest_world_size(cfg)
    with tempfile.TemporaryDirectory() as folder:
        return _verify(with_other_weights(shrink(cfg, world_size), folder), world_size, options.steps)


def _verify(small: PretrainConfig, world_size: int, steps: int) -> int:
    """Verify the small model, print tables and verdict, and return the exit code."""
    resolved = validate_args(small, world_size)
    validate_args(one_rank(small), 1)
    _task_class(small)(resolved)  # rejects what depends on the vocabulary
    tp, cp, pp = (
        getattr(small.flat, f"{name}_size")
        for name in ("tensor_model_parallel", "context_parallel", "pipeline_model_parallel")
    )
    print(
        f"{counted(world_size, 'rank')} = tensor {tp} x context {cp} x pipeline {pp} x data"
        f" {resolved.data_parallel_size}, float64"
    )
    lengths = " and ".join(str(getattr(resolved.flat, field)) for field in small.family.lengths)
    print(
        f"a model of {len(resolved.describe(VOCAB_SIZE).layers)} layers, width {resolved.model.hidden_size},"
        f" {resolved.model.num_attention_heads} heads, {resolved.model.num_query_groups} key-value groups,"
        f" sequences of {lengths}, batches of"
        f" {resolved.training.global_batch_size} in micro-batches of {resolved.training.micro_batch_size}"
    )
    model = resolved.model
    if model.num_moe_experts is not None:
        ranks = f"expert {model.expert_model_parallel_size} x tensor {expert_tensor_ranks(model)} ranks"
        print(f"{model.num_moe_experts} experts, {model.moe_router_topk} per token, over {ranks}")
    began = time.perf_counter()
    verdict = verify(small, world_size, steps)
    print(table(verdict))
    seconds = f"({time.perf_counter() - began:.0f} s)"
    if verdict.equal:
        print(f"equal: losses, gradients, norms and weights match one rank to 1e-10 {seconds}")
        return 0
    print(f"DIFFERENT in {len(verdict.differences)} places {seconds}; the first one:\n  {verdict.first}")
    return 1
