"""Measured training speed, the basis of the time and cost that a dry run predicts. Torch-free.

``tools/generate_docs.py`` writes ``rates.tsv`` from ``benchmarks/results/training.json``: one line per measured row,
with the kind of model and the rank axes in use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files

from megatron.core.config.layer_kinds import recurrent_kinds
from megatron.training.config.pretrain_config import PretrainConfig

AXES = ("tp", "pp", "cp", "ep")
SMALL_WIDTH = 1536
"""Maximum hidden size at which kernels are so short that host or memory bandwidth limits the speed."""
WIDE_EXPERT = 4096
"""Feed-forward width per rank from which experts reach the speed of Mixtral instead of fine-grained experts."""


@dataclass(frozen=True)
class MeasuredRate:
    """One measured row."""

    row: str
    """Name in ``benchmarks/results/training.json``."""
    kind: str
    """``dense``, ``small``, ``experts``, ``fine experts``, ``recurrent``, ``other recurrent`` (with experts, or
    Kimi delta attention), or the name of a model family."""
    axes: Mapping[str, int]
    """Sizes of the axes in :data:`AXES` with more than one rank."""
    tflops: float
    """Model TFLOP/s per GPU."""
    device: str


def measured_rates() -> list[MeasuredRate]:
    """Return all rows of the packaged ``rates.tsv``, in file order. Reads the file at each call; comment lines start
    with ``#``. Raises ValueError for a malformed row."""
    lines = files("megatron.training.report").joinpath("rates.tsv").read_text(encoding="utf-8").splitlines()
    cells = [line.split("\t") for line in lines if not line.startswith("#")]
    return [
        MeasuredRate(row, kind, {axis[:2]: int(axis[2:]) for axis in axes.split()}, float(tflops), device)
        for row, kind, axes, tflops, device in cells
    ]


def model_kind(cfg: PretrainConfig) -> str:
    """Return the kind of model with the most similar speed, as measured rows name it; in fp8 followed by the recipe."""
    kind = _kind_in_bf16(cfg)
    return kind if cfg.model.fp8 is None else f"{kind}, fp8 {cfg.model.fp8_recipe}"


def _kind_in_bf16(cfg: PretrainConfig) -> str:
    if not cfg.family.is_default:
        return cfg.model_family
    if kinds := recurrent_kinds(cfg.model):
        other = "kimi_delta_attention" in kinds or cfg.model.num_moe_experts is not None
        return "other recurrent" if other else "recurrent"
    if cfg.model.num_moe_experts is not None:
        return "experts" if (cfg.model.moe_ffn_hidden_size or 0) >= WIDE_EXPERT else "fine experts"
    return "small" if cfg.model.hidden_size <= SMALL_WIDTH else "dense"


def used_axes(cfg: PretrainConfig) -> dict[str, int]:
    """Return the sizes of the axes in :data:`AXES` with more than one rank."""
    model = cfg.model
    sizes = (
        model.tensor_model_parallel_size,
        model.pipeline_model_parallel_size,
        model.context_parallel_size,
        model.expert_model_parallel_size,
    )
    return {axis: size for axis, size in zip(AXES, sizes) if size > 1}


def nearest_rate(cfg: PretrainConfig) -> MeasuredRate | None:
    """Return the slowest of the measured rows of this kind of model: one row per rank axis in use, and one without
    axes. The row of an axis is the largest that does not exceed this run's size; axes without a row are ignored. With
    fp8 the rate in bf16 is multiplied by the gain of one GPU, if that was measured for this kind. None for runs not in
    16 bits and for families without rows, which were not measured."""
    if not (cfg.model.bf16 or cfg.model.fp16):
        return None
    used, rates = used_axes(cfg), measured_rates()
    same = [rate for rate in rates if rate.kind == _kind_in_bf16(cfg)]
    if not same:
        return None
    without_axes = max((rate for rate in same if not rate.axes), key=lambda rate: rate.tflops)
    per_axis = [
        max(smaller, key=lambda rate: rate.axes[axis])
        for axis, size in used.items()
        if (smaller := [rate for rate in same if set(rate.axes) == {axis} and rate.axes[axis] <= size])
    ]
    slowest = min([without_axes, *per_axis], key=lambda rate: rate.tflops)
    in_fp8 = [rate for rate in rates if cfg.model.fp8 and rate.kind == model_kind(cfg) and not rate.axes]
    if not in_fp8:
        return slowest
    tflops = slowest.tflops * in_fp8[0].tflops / without_axes.tflops
    return replace(slowest, row=f"{slowest.row}, {in_fp8[0].row}", tflops=tflops)


def cost_rows(cfg: PretrainConfig, flops_per_iteration: float, samples: int) -> Iterator[tuple[str, str]]:
    """Yield rows of the dry run: seconds per iteration, days and GPU-hours of ``samples`` at the nearest measured rate.
    ``flops_per_iteration``: of the model, for one global batch of the final size."""
    rate = nearest_rate(cfg)
    if rate is None or cfg.model.attention_dropout:
        unfused = "not measured with unfused attention (--attention-dropout): only predicted, below"
        others = "not measured for this kind of model or precision: only predicted, below"
        yield "time", others if rate is None else unfused
        return
    factor = 4 / 3 if cfg.model.recompute_granularity == "full" else 1.0  # includes a second forward pass
    seconds = flops_per_iteration * factor / cfg.world_size / (rate.tflops * 1e12)
    where = f"at {rate.tflops:.0f} TFLOP/s per GPU, measured on {rate.device} ({rate.row})"
    yield "time per iteration", f"{seconds:.3g} s {where}" + (", x 4/3 for full recomputation" if factor > 1 else "")
    total = seconds * samples / (cfg.training.global_batch_size or 1)
    hours = total / 3600
    yield "full run", f"{_duration(hours)}, {hours * cfg.world_size:,.3g} GPU-hours, without evaluation and saves"


def _duration(hours: float) -> str:
    return f"{hours / 24:,.1f} days" if hours >= 48 else f"{hours:.3g} hours" if hours >= 1 else f"{60 * hours:.3g} min"
