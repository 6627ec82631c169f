"""Hints of the dry run: an expert-parallel layout on the same ranks that fits better, with the reason.

The hints compare sizes only; measure before relying on them. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.config.moe import expert_tensor_ranks
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.report.advice import GPUS_PER_HOST, peak_memory

DEVICE_GIB = 80e9 / 2**30
"""Memory of an H100; allocator and library overhead, which estimates exclude, also need part of it."""


def expert_hints(cfg: PretrainConfig, vocab_size: int) -> Iterator[tuple[str, str]]:
    """Yield at most one hint: EP instead of expert TP if it divides; else a larger EP if the estimate exceeds an 80 GB
    GPU; else a smaller EP if experts span hosts of 8 GPUs and it still fits. Yields nothing without experts."""
    experts, ep, etp = cfg.model.num_moe_experts, cfg.model.expert_model_parallel_size, expert_tensor_ranks(cfg.model)
    if experts is None:
        return
    now = _gib(cfg, vocab_size, ep, etp)
    if etp > 1 and experts % (ep * etp) == 0:
        width = cfg.model.moe_ffn_hidden_size
        memory = f"{_gib(cfg, vocab_size, ep * etp, 1):.0f} GiB per rank, now {now:.0f}"
        reason = f"whole experts, of width {width} and not {(width or 0) // etp}, make larger GEMMs"
        yield "hint", f"{_flags(ep * etp, 1)}: {reason}; {memory}"
        return
    fitting = ((size, _gib(cfg, vocab_size, size, etp)) for size in _sizes(cfg, etp))  # lazy: estimated on demand
    if now > DEVICE_GIB:
        match = next(((size, gib) for size, gib in fitting if size > ep and gib <= DEVICE_GIB), None)
        if match:
            reason = f"{now:.0f} GiB per rank are more than the {DEVICE_GIB:.0f} of a GPU of 80 GB, and these take"
            yield "hint", f"{_flags(match[0], etp)}: {reason} {match[1]:.0f}"
    elif ep * etp > GPUS_PER_HOST:
        inside = [option for option in fitting if option[0] * etp <= GPUS_PER_HOST and option[1] <= DEVICE_GIB]
        if inside:
            size, gib = inside[-1]
            reason = f"tokens stay within a host of {GPUS_PER_HOST} GPUs; {gib:.0f} GiB per rank, now {now:.0f}"
            yield "hint", f"{_flags(size, etp)}: {reason}"


def _sizes(cfg: PretrainConfig, etp: int) -> list[int]:
    """Return the expert-parallel sizes that divide both experts and ranks, in increasing order."""
    experts, ranks = cfg.model.num_moe_experts or 1, cfg.world_size // (etp * cfg.model.pipeline_model_parallel_size)
    return [size for size in range(1, min(experts, ranks) + 1) if experts % size == 0 and ranks % size == 0]


def _flags(ep: int, etp: int) -> str:
    return f"--expert-model-parallel-size {ep} --expert-tensor-parallel-size {etp}"


def _gib(cfg: PretrainConfig, vocab_size: int, ep: int, etp: int) -> float:
    changed = cfg.with_settings(expert_model_parallel_size=ep, expert_tensor_parallel_size=etp)
    return peak_memory(changed, vocab_size) / 2**30
