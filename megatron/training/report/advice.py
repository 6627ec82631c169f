"""Flags that reduce the memory of a run, compared by the estimate of ``memory.py``. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.config.errors import UserError
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.resolve import resolve
from megatron.training.report.memory import estimate_memory
from megatron.training.rules.run_all import check

LIBRARIES_GIB = 3.0
"""GPU memory that tensors cannot use: CUDA context, kernel workspaces and NCCL buffers."""
MOST = 3
NONE_FITS = "none of them alone fits this GPU: combine them, or split the model over more GPUs"
GPUS_PER_HOST = 8
"""Largest tensor-parallel size, and ranks of experts on one host, in suggestions."""


@dataclass(frozen=True)
class Advice:
    """One change of flags, and the resulting memory of the rank with the maximum use."""

    flags: str
    bytes: int
    """Estimate for the pipeline rank that needs the most."""


def peak_memory(cfg: PretrainConfig, vocab_size: int) -> int:
    """Return the bytes that the fullest pipeline rank needs."""
    return max(rank.total for rank in estimate_memory(cfg, vocab_size))


def memory_advice(cfg: PretrainConfig, vocab_size: int) -> list[Advice]:
    """Return up to :data:`MOST` changes that save memory: no attention dropout first, which makes unfused attention
    fused, then the most effective. Each keeps the weights of the model and the global batch size and passes all rules.
    Of several changes to one setting (such as recomputation), only the most effective is returned."""
    now = peak_memory(cfg, vocab_size)
    best: dict[str, Advice] = {}
    for topic, values, flags in _changes(cfg):
        changed = _changed(cfg, values)
        if changed is None:
            continue
        advice = Advice(flags, peak_memory(changed, vocab_size))
        if advice.bytes < 0.99 * now and (topic not in best or advice.bytes < best[topic].bytes):
            best[topic] = advice
    return sorted(best.values(), key=lambda advice: (advice is not best.get("dropout"), advice.bytes))[:MOST]


def _changed(cfg: PretrainConfig, values: dict[str, object]) -> PretrainConfig | None:
    """Return ``cfg`` with other values, resolved again; None if a rule rejects them. Checks as in a dry run."""
    try:
        other = resolve(cfg.with_settings(**{"dry_run": True, **values}), cfg.world_size)
        return None if check(other) else other
    except UserError:
        return None


def _changes(cfg: PretrainConfig) -> Iterator[tuple[str, dict[str, object], str]]:
    """Yield (topic, changed fields, flags to type) without checks of rules or memory."""
    model = cfg.model
    if model.attention_dropout:
        yield "dropout", {"attention_dropout": 0.0}, "--attention-dropout 0"
    if model.recompute_granularity != "full":
        selective = ["layernorm", "mlp"] if model.num_moe_experts is None else ["layernorm", "moe_act"]
        values: dict[str, object] = {"recompute_granularity": "selective", "recompute_modules": selective}
        yield "recompute", values, f"--recompute-granularity selective --recompute-modules {' '.join(selective)}"
        values = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        flags = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        yield "recompute", {**values, "recompute_modules": None, "recompute_activations": False}, flags
    if cfg.data_parallel_size * model.context_parallel_size > 1 and not cfg.distributed.use_torch_fsdp2:
        yield "sharding", {"use_distributed_optimizer": True}, "--use-distributed-optimizer"
    if cfg.training.micro_batch_size > 1:
        half = cfg.training.micro_batch_size // 2
        yield "micro-batch", {"micro_batch_size": half, "eval_micro_batch_size": half}, f"--micro-batch-size {half}"
    if model.tensor_model_parallel_size > 1:
        yield "sequence", {"sequence_parallel": True}, "--sequence-parallel"
    if model.bf16 and cfg.optimizer.optimizer == "adam":
        moments = ["exp_avg_dtype"] + ["exp_avg_sq_dtype"] * (cfg.optimizer.adam_beta2 <= 0.99)  # a rule requires it
        values = {**dict.fromkeys(moments, "bf16"), "use_precision_aware_optimizer": True}
        values["use_distributed_optimizer"] = not cfg.distributed.use_torch_fsdp2
        flags = "".join(f" --{name.replace('_', '-')} bf16" for name in moments)
        yield "moments", values, f"--use-distributed-optimizer --use-precision-aware-optimizer{flags}"
    for axis in ("tensor", "pipeline", "context", "expert"):
        field = "context_parallel_size" if axis == "context" else f"{axis}_model_parallel_size"
        size, values = 2 * getattr(cfg.flat, field), {}
        largest = min(GPUS_PER_HOST, cfg.world_size) if axis == "tensor" else cfg.world_size
        if size > largest or axis == "expert" and model.num_moe_experts is None:
            continue
        flags = f"--{field.replace('_', '-')} {size}"
        if axis == "tensor" and not model.sequence_parallel:
            values, flags = {"sequence_parallel": True}, f"{flags} --sequence-parallel"
        yield "layout", {**values, field: size}, flags


def fit_rows(cfg: PretrainConfig, vocab_size: int) -> Iterator[tuple[str, str]]:
    """Yield rows of the dry run: whether the fullest rank fits --gpu-memory less ``LIBRARIES_GIB``, else the changes
    that save the most. Yields nothing without --gpu-memory."""
    if cfg.program.gpu_memory is None:
        return
    need = peak_memory(cfg, vocab_size) / 2**30
    room = cfg.program.gpu_memory - LIBRARIES_GIB
    rest = f"--gpu-memory {cfg.program.gpu_memory:g} less {LIBRARIES_GIB:g} for CUDA and NCCL"
    sizes = f"{need:.1f} of {room:.1f} GiB ({rest})"
    if need <= room:
        yield "fits the GPU", f"yes, {sizes}"
        return
    yield "fits the GPU", f"NO, {sizes}"
    advice = memory_advice(cfg, vocab_size)
    for change in advice:
        fits = ", fits" if change.bytes / 2**30 <= room else ""
        yield "  add", f"{change.flags}: {change.bytes / 2**30:.1f} GiB{fits}"
    if advice and all(change.bytes / 2**30 > room for change in advice):
        yield "", NONE_FITS
