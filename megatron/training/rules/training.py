"""Rules about batches, schedules, the optimizer, checkpoints, evaluation and logging."""

from __future__ import annotations

from megatron.core.config.problems import Problems, flag_names, missing, problem
from megatron.core.extensions.installed import is_installed
from megatron.core.pipeline_parallel.stages import virtual_pipeline_size
from megatron.core.schedules import batch_size as batch_sizes
from megatron.training.config.pretrain_config import PretrainConfig


def micro_batch_size_given(cfg: PretrainConfig) -> Problems:
    if cfg.training.micro_batch_size is None:
        yield missing(cfg, "micro_batch_size")


def global_batch_size_divides(cfg: PretrainConfig) -> Problems:
    """Reject several sources of the global batch size, and batch sizes that are no multiple of micro-batch size x DP;
    --decrease-batch-size-if-needed permits larger non-multiples."""
    training = cfg.training
    clash = training.step_batch_size_schedule and ({"global_batch_size", "rampup_batch_size"} & cfg.explicit)
    if clash:
        fields = flag_names(cfg, *sorted(clash))
        yield problem(cfg, "step_batch_size_schedule", f"contradicts {fields}", "its last size is the final one")
    if not training.micro_batch_size or not cfg.data.seq_length or clash:
        return
    if not training.global_batch_size and not training.step_batch_size_schedule:
        return
    source = "step_batch_size_schedule" if training.step_batch_size_schedule else "rampup_batch_size"
    try:
        plateaus = batch_sizes.batch_size_plateaus(cfg.flat)
    except batch_sizes.ScheduleError as error:
        yield problem(cfg, source, error.reason)
        return
    unit = training.micro_batch_size * cfg.data_parallel_size
    for size in dict.fromkeys(plateau.size for plateau in plateaus):
        if size < unit or (size % unit and not training.decrease_batch_size_if_needed):
            final = size == training.global_batch_size and not training.step_batch_size_schedule
            field = "global_batch_size" if final else source
            reason = _indivisible(size, training.micro_batch_size, cfg.data_parallel_size)
            yield problem(cfg, field, reason, _near(size, unit))


def _cannot_generate(cfg: PretrainConfig) -> list[str]:
    """Return why the model under training cannot generate text in this layout."""
    model = cfg.model
    excluded = {
        "--context-parallel-size": model.context_parallel_size > 1,
        "virtual pipeline stages": virtual_pipeline_size(model) > 1,
        "--use-torch-fsdp2": cfg.distributed.use_torch_fsdp2,
        "--moe-expert-capacity-factor": model.moe_expert_capacity_factor is not None,
        f"{cfg.family.programs[0].script}, which does not generate": cfg.family.generate is None
        or not cfg.family.is_causal,
    }
    return [f"is not supported with {name}" for name, is_used in excluded.items() if is_used]


def evaluation_batch_size_divides(cfg: PretrainConfig) -> Problems:
    """Require an explicit --eval-global-batch-size to be a multiple of --eval-micro-batch-size x DP."""
    size, micro = cfg.validation.eval_global_batch_size, cfg.validation.eval_micro_batch_size
    if not {"eval_global_batch_size", "eval_micro_batch_size"} & cfg.explicit or not size or not micro:
        return
    unit = micro * cfg.data_parallel_size
    if size % unit:
        field = "eval_global_batch_size" if "eval_global_batch_size" in cfg.explicit else "eval_micro_batch_size"
        yield problem(cfg, field, _indivisible(size, micro, cfg.data_parallel_size), _near(size, unit))


def _indivisible(size: int, micro: int, ranks: int) -> str:
    return f"{size} is not a multiple of micro batch size {micro} x data-parallel size {ranks} = {micro * ranks}"


def _near(size: int, unit: int) -> str:
    low = size // unit * unit
    return f"nearest valid sizes: {low} and {low + unit}" if low else f"smallest valid size: {unit}"


def training_length(cfg: PretrainConfig) -> Problems:
    """Require at least one global batch, unless --skip-train is set."""
    training = cfg.training
    if training.train_samples is not None and training.train_iters == 0 and not cfg.validation.skip_train:
        field = "train_samples" if training.num_epochs is None else "num_epochs"
        reason = f"is less than one global batch of {training.global_batch_size}"
        yield problem(cfg, field, reason, "increase it, or reduce --global-batch-size")
    if "train_iters" in cfg.explicit and not cfg.validation.skip_train and training.train_iters < 1:
        yield problem(cfg, "train_iters", "must be at least 1", "--skip-train only evaluates")


def schedule_units_match(cfg: PretrainConfig) -> Problems:
    """Reject explicit schedule lengths in iterations if training counts samples, and reverse."""
    iters = ("lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters")
    samples = ("lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples")
    by_samples = cfg.training.train_samples is not None
    if by_samples and "train_iters" in cfg.explicit:
        return
    for field in iters if by_samples else samples:
        if field in cfg.explicit and getattr(cfg.flat, field):
            duration, other = ("--train-samples", "-samples") if by_samples else ("--train-iters", "-iters")
            duration = duration if cfg.training.num_epochs is None else "--num-epochs"
            right = flag_names(cfg, field).removesuffix("-iters").removesuffix("-samples") + other
            yield problem(cfg, field, f"does not go with {duration}", f"use {right}")


def learning_rate_settings(cfg: PretrainConfig) -> Problems:
    """Require minimum and initial rates that do not exceed the maximum."""
    schedule = cfg.schedule
    if schedule.lr is None:
        return
    if schedule.min_lr > schedule.lr:
        yield problem(cfg, "min_lr", f"must be between 0 and --lr {schedule.lr}")
    if schedule.lr_warmup_init > schedule.lr:
        yield problem(cfg, "lr_warmup_init", f"must be between 0 and --lr {schedule.lr}")
    least, most = cfg.optimizer.decoupled_min_lr, cfg.optimizer.decoupled_lr
    if least is not None and most is not None and least > most:
        yield problem(cfg, "decoupled_min_lr", f"must be between 0 and --decoupled-lr {most}")


def warmup_shorter_than_decay(cfg: PretrainConfig) -> Problems:
    unit = "samples" if cfg.training.train_samples is not None else "iters"
    warmup, decay = getattr(cfg.flat, f"lr_warmup_{unit}"), getattr(cfg.flat, f"lr_decay_{unit}")
    if cfg.schedule.lr_warmup_fraction is None and decay and warmup >= decay:
        reason = f"must be less than the decay length of {decay} {unit}"
        yield problem(cfg, f"lr_warmup_{unit}", reason, f"or give a larger --lr-decay-{unit}")


def wsd_decay_length(cfg: PretrainConfig) -> Problems:
    """Require a WSD decay between 1 and the total decay length, in the unit of the training duration."""
    unit = "samples" if cfg.training.train_samples is not None else "iters"
    length, decay = getattr(cfg.flat, f"lr_wsd_decay_{unit}"), getattr(cfg.flat, f"lr_decay_{unit}")
    if cfg.schedule.lr_decay_style != "WSD":
        return
    if not length:
        yield missing(cfg, f"lr_wsd_decay_{unit}", "is required by --lr-decay-style WSD")
    elif length < 1 or (decay and length > decay):
        yield problem(cfg, f"lr_wsd_decay_{unit}", f"must be between 1 and the decay length of {decay} {unit}")


def save_settings(cfg: PretrainConfig) -> Problems:
    keep, every = cfg.checkpoint.save_retain_interval, cfg.checkpoint.save_interval
    if keep and every and every > 0 and keep % every:
        fix = f"nearest multiple: {max(keep // every, 1) * every}"
        yield problem(cfg, "save_retain_interval", f"is not a multiple of --save-interval {every}", fix)


def validation_sets(cfg: PretrainConfig) -> Problems:
    names, paths = cfg.validation.validation_set_names, cfg.data.valid_data_path
    if names and paths and len(names) != len(paths):
        yield problem(cfg, "validation_set_names", f"has {len(names)} names for {len(paths)} sets")


def profile_range(cfg: PretrainConfig) -> Problems:
    start = cfg.profiling.profile_step_start
    if cfg.profiling.profile and cfg.profiling.profile_step_end <= start:
        yield problem(cfg, "profile_step_end", f"must be larger than --profile-step-start {start}")
    if cfg.profiling.profile and max(cfg.profiling.profile_ranks) >= cfg.world_size:
        yield problem(cfg, "profile_ranks", f"must be below the number of ranks, {cfg.world_size}")


def generates(cfg: PretrainConfig) -> Problems:
    """Reject --eval-tasks and --sample-prompts if the model under training cannot generate text in this layout."""
    tools = {"eval_tasks": "tools/evaluate.py", "sample_prompts": "tools/generate.py"}
    for field, tool in tools.items():
        if getattr(cfg.validation, field) is not None:
            for reason in _cannot_generate(cfg):
                yield problem(cfg, field, reason, f"use {tool} on checkpoints")


def weight_decay_schedule(cfg: PretrainConfig) -> Problems:
    """Require 0 <= start <= end for a weight decay that changes, and no other start or end of a constant one."""
    schedule, decay = cfg.schedule, cfg.optimizer.weight_decay
    start, end = schedule.start_weight_decay, schedule.end_weight_decay
    if schedule.weight_decay_incr_style == "constant":
        for field in sorted({"start_weight_decay", "end_weight_decay"} & cfg.explicit):
            if getattr(schedule, field) != decay:
                fix = "--weight-decay-incr-style linear or cosine"
                yield problem(cfg, field, f"contradicts a constant --weight-decay {decay}", fix)
    elif start is not None and end is not None and not 0 <= start <= end:
        yield problem(cfg, "start_weight_decay", f"must be between 0 and --end-weight-decay {end}")


def wandb_installed(cfg: PretrainConfig) -> Problems:
    if cfg.logging.wandb_project and not cfg.program.dry_run and not is_installed("wandb"):
        yield problem(cfg, "wandb_project", "needs the package wandb", "pip install wandb, or remove the flag")
