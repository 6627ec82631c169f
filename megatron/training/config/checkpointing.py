"""Settings of saving and loading checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.core.config.cli import flag
from megatron.core.config.groups import FlagGroup
from megatron.core.config.ranges import NonNegativeInt, PositiveInt, Range


@dataclass(kw_only=True)
class CheckpointConfig(FlagGroup):
    """Checkpoints"""

    save: str | None = None
    """Directory for checkpoints."""

    save_interval: PositiveInt | None = flag("--save-interval", "--persistent-save-interval")
    """Iterations between checkpoints; default: save only at the end of training."""

    save_retain_interval: PositiveInt | None = None
    """Keep only checkpoints whose iteration is a multiple of this number, and the latest."""

    keep_last_checkpoints: PositiveInt | None = None
    """Keep only this many latest checkpoints, and those that --save-retain-interval selects. Checkpoints of earlier
    jobs are kept, except those that this run continues."""

    non_persistent_save_interval: PositiveInt | None = None
    """Iterations between non-persistent checkpoints; each replaces the previous one. They have a separate
    folder, which may be on a fast disk. Loading uses the newest complete checkpoint of both folders."""

    non_persistent_ckpt_type: Literal["global", "local"] = "global"
    """Folder of --non-persistent-save-interval: --non-persistent-global-ckpt-dir, shared by all ranks, or
    --non-persistent-local-ckpt-dir, a local disk of the one host that runs all ranks."""

    non_persistent_global_ckpt_dir: str | None = None
    """Folder of --non-persistent-save-interval; default: <save>/non_persistent."""

    non_persistent_local_ckpt_dir: str | None = None
    """Folder of --non-persistent-save-interval with --non-persistent-ckpt-type local."""

    start_over: bool = False
    """Restart from scratch in a --save directory with checkpoints that this run does not continue: the first save
    archives them in the folder set-aside-001 there. Without this flag the start is rejected."""

    max_failed_saves: PositiveInt = 3
    """Stop, with exit code 75, after this many failed saves in a row."""

    async_save: bool = False
    """Write checkpoints in the background; training pauses only for the copy to host memory. One save at a time; the
    last one is awaited."""

    async_save_staging_gb: Annotated[float, Range(0.0, 2.0**20)] | None = None
    """Host memory per rank for the copy of --async-save, in GB; training waits while larger checkpoints are written in
    parts. Default: the full checkpoint if half of the host's free memory holds it, else 1."""

    load: str | None = None
    """Directory to resume from; training starts from scratch if it contains no checkpoint, unless
    --exit-on-missing-checkpoint is given."""

    finetune: bool = False
    """Load weights only and start at iteration 0 of the data."""

    pretrained_checkpoint: str | None = None
    """Directory of weights to start from if --load contains no checkpoint yet."""

    load_hf: str | None = None
    """Hugging Face folder (config.json, safetensors) to start from if --load contains no checkpoint yet. Its settings
    define the model; its weights are loaded on any layout."""

    save_hf_interval: PositiveInt | None = None
    """Also write checkpoints at multiples of this number, itself a multiple of --save-interval, to <save>/hf in Hugging
    Face's format. Checkpoints saved by a signal, a time limit or the end of the run in between are not converted."""

    ckpt_step: NonNegativeInt | None = None
    """Iteration to load instead of the latest one."""

    no_save_optim: bool = False
    """Omit the optimizer state from checkpoints."""

    no_save_rng: bool = False
    """Omit the random state from checkpoints."""

    no_load_optim: bool = False
    """Do not load the optimizer's state."""

    no_load_rng: bool = False
    """Do not load the random state."""

    use_checkpoint_args: bool = False
    """Take the model's architecture from the checkpoint instead of from this command line."""

    use_mp_args_from_checkpoint_args: bool = False
    """With --use-checkpoint-args: take the model-parallel layout from the checkpoint too."""

    use_tokenizer_model_from_checkpoint_args: bool = flag(
        "--no-use-tokenizer-model-from-checkpoint-args",
        "--disable-use-tokenizer-model-from-checkpoint-args",
        default=True,
    )
    """With --use-checkpoint-args: use the checkpoint's tokenizer, unless --tokenizer-type, --tokenizer-model or
    --vocab-file is given."""

    dist_ckpt_strictness: Literal[
        "assume_ok_unexpected",
        "log_unexpected",
        "log_all",
        "raise_unexpected",
        "raise_all",
        "return_unexpected",
        "return_all",
        "ignore_all",
    ] = "assume_ok_unexpected"
    """Reporting of missing or unexpected keys. Loading fails on either with any value; log_* also lists keys skipped by
    flags; return_* is for programs."""

    exit_on_missing_checkpoint: bool = False
    """Stop instead of starting from scratch if --load contains no checkpoint."""
