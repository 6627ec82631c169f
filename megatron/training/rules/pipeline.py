"""Rules about pipeline stages, their contents and the schedule that runs them."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.config.errors import UserError
from megatron.core.config.problems import Problems, flag_names, problem
from megatron.core.pipeline_parallel.balance import ModelCosts
from megatron.core.pipeline_parallel.stages import (
    BranchNames,
    LayoutError,
    StageContents,
    parse_layout,
    pipeline_stages,
    virtual_pipeline_size,
)
from megatron.core.schedules import batch_size as batch_sizes
from megatron.training.config.pretrain_config import PretrainConfig

_FAMILIES = (
    ("pipeline_model_parallel_layout",),
    ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)
_CHUNKS = (
    "pipeline_model_parallel_layout",
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage",
)


def one_pipeline_split(cfg: PretrainConfig) -> Problems:
    for families in (_FAMILIES, [(field,) for field in _CHUNKS]):
        used = [next((name for name in family if getattr(cfg.flat, name)), None) for family in families]
        names = [name for name in used if name is not None]
        if len(names) > 1:
            yield problem(cfg, names[1], f"contradicts {flag_names(cfg, names[0])}", "choose one of them")


def pipeline_layout_string(cfg: PretrainConfig) -> Problems:
    """Check --pipeline-model-parallel-layout: syntax first, then layers, stages per rank and MTP layers."""
    model = cfg.model
    text, ranks = model.pipeline_model_parallel_layout, model.pipeline_model_parallel_size
    if text is None:
        return
    try:
        stages = parse_layout(text, _branches(cfg))
    except LayoutError as error:
        yield problem(cfg, "pipeline_model_parallel_layout", str(error), "such as Et*3|(tt|)*29,t|L")
        return
    layers, requirement = len(stages[0].names), f"--num-layers {model.num_layers}"
    if model.num_layers and cfg.flat.decoder_num_layers is not None:
        requirement += f" and {flag_names(cfg, 'decoder_num_layers')} {cfg.flat.decoder_num_layers}"
    if model.num_layers and layers != model.num_layers + (cfg.flat.decoder_num_layers or 0):
        yield problem(cfg, "pipeline_model_parallel_layout", f"has {layers} layers for {requirement}")
    if model.whole_layers_in_pipeline_split and any(stage.cuts_layers for stage in stages):
        reason = f"contradicts the half layers (a, f) in {text!r}"
        yield problem(cfg, "whole_layers_in_pipeline_split", reason, "remove it")
    if ranks > 0 and len(stages) % ranks:
        reason = f"has {len(stages)} stages, not a multiple of --pipeline-model-parallel-size {ranks}"
        fix = f"nearest: {max(len(stages) // ranks, 1) * ranks} or {(len(stages) // ranks + 1) * ranks} stages"
        yield problem(cfg, "pipeline_model_parallel_layout", reason, fix)
    yield from _predictions_are_with_the_loss(cfg, stages)
    for rank in range(ranks if ranks > 0 else 0):
        local = stages[rank::ranks]
        if local and not any(stage.branches or stage.embedding or stage.loss for stage in local):
            reason = f"leaves pipeline rank {rank} without layers, embedding or loss"
            yield problem(cfg, "pipeline_model_parallel_layout", reason)


def _predictions_are_with_the_loss(cfg: PretrainConfig, stages: Sequence[StageContents]) -> Problems:
    """MTP needs the output layer's stage, which then also holds a copy of the embedding."""
    expected, num_predictions = cfg.model.mtp_num_layers or 0, sum(stage.num_mtp for stage in stages)
    if num_predictions != expected:
        reason = f"has {num_predictions} m for --mtp-num-layers {expected}"
        yield problem(cfg, "pipeline_model_parallel_layout", reason, f"give {expected} m before the L")
    elif stages[-1].num_mtp != expected:
        reason = "has an m in a stage without the loss; m layers need the output layer, which is in the stage of L"
        yield problem(cfg, "pipeline_model_parallel_layout", reason, "write all m in the last stage, before the L")


def _branches(cfg: PretrainConfig) -> BranchNames | None:
    """None: standard decoder layers, or other rules report a problem with --spec or the sizes."""
    try:
        return cfg.family.branches(cfg) if cfg.model.num_layers else None
    except UserError:
        return None


def layers_fill_stages(cfg: PretrainConfig) -> Problems:
    """Reject --num-layers if the automatic split cannot fill all stages, including virtual ones."""
    ranks = cfg.model.pipeline_model_parallel_size
    if not cfg.model.num_layers or ranks < 2 or cfg.model.pipeline_model_parallel_layout is not None:
        return
    names = _branches(cfg)
    try:
        pipeline_stages(cfg.model, None if names is None else ModelCosts(tuple(map(tuple, names)), None))
    except LayoutError as error:
        chunks = virtual_pipeline_size(cfg.model)
        stages = f"{ranks} x {chunks} = {ranks * chunks}" if chunks > 1 else str(ranks)
        fix = f"at least {ranks * chunks} layers for {stages} stages, or fewer stages"
        yield problem(cfg, "num_layers", str(error), fix)


def schedule_fits_stages(cfg: PretrainConfig) -> Problems:
    """Reject schedules that do not fit the chunks per rank, and a wrong micro-batch group size. Checks nothing with one
    pipeline rank or an invalid layout."""
    model = cfg.model
    if model.pipeline_model_parallel_size < 2 or not model.num_layers:
        return
    try:
        chunks = virtual_pipeline_size(cfg.model)
    except LayoutError:
        return  # pipeline_layout_string says what is wrong
    if model.pipeline_schedule in ("1f1b", "zero-bubble-h2") and chunks > 1:
        fix = "interleaved or zero-bubble instead, or remove it"
        yield problem(cfg, "pipeline_schedule", f"requires one model chunk per rank, not {chunks}", fix)
    if model.pipeline_schedule == "interleaved" and chunks == 1:
        fix = "--num-virtual-stages-per-pipeline-rank 2"
        yield problem(cfg, "pipeline_schedule", "requires several model chunks per rank", fix)
    yield from _group_size_fits(cfg, chunks)


def _group_size_fits(cfg: PretrainConfig, chunks: int) -> Problems:
    """Require a group of at least the pipeline size, and at most the larger of that and the micro-batches of the
    largest global batch; reject it with one chunk per rank."""
    field, ranks = "microbatch_group_size_per_virtual_pipeline_stage", cfg.model.pipeline_model_parallel_size
    size = getattr(cfg.flat, field)
    if size is None:
        return
    if chunks == 1:
        yield problem(cfg, field, "requires several model chunks per rank", "remove it")
        return
    if size < ranks:
        reason = f"is smaller than --pipeline-model-parallel-size {ranks}: each chunk would wait for the last stage"
        yield problem(cfg, field, reason, f"at least {ranks}")
    most = _most_microbatches(cfg)
    if most is not None and size > max(most, ranks):
        yield problem(cfg, field, f"is larger than the {most} micro-batches of a global batch", f"at most {most}")


def _most_microbatches(cfg: PretrainConfig) -> int | None:
    """Return the micro-batches of the largest global batch of a ramp or schedule; None for invalid inputs."""
    if not cfg.training.micro_batch_size or not cfg.data.seq_length:
        return None
    try:
        sizes = [plateau.size for plateau in batch_sizes.batch_size_plateaus(cfg.flat)]
    except batch_sizes.ScheduleError:
        return None
    return max(sizes) // (cfg.training.micro_batch_size * cfg.data_parallel_size)
