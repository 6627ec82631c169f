"""What is saved, what is loaded, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.core.config.cli import flag
from megatron.core.config.ranges import NonNegativeInt, PositiveInt, Range


@dataclass(kw_only=True)
class CheckpointConfig:
    """Checkpoints"""

    save: str | None = None
    """Directory that checkpoints are written to."""

    save_interval: PositiveInt | None = flag("--save-interval", "--persistent-save-interval")
    """Iterations between checkpoints; without it one is saved only where training stops."""

    save_retain_interval: PositiveInt | None = None
    """Keep only checkpoints whose iteration is a multiple of this number, and the latest."""

    keep_last_checkpoints: PositiveInt | None = None
    """Keep only this many checkpoints, the latest, and those of --save-retain-interval. Those of earlier jobs stay, but
    for as many as the run goes on from."""

    non_persistent_save_interval: PositiveInt | None = None
    """Iterations between checkpoints that the next one of their kind replaces; they go to a folder of their own, which
    may be on a fast disk. The newest complete one of both folders is loaded."""

    non_persistent_ckpt_type: Literal["global", "local"] = "global"
    """Which folder --non-persistent-save-interval saves to: of --non-persistent-global-ckpt-dir, which all ranks share,
    or of --non-persistent-local-ckpt-dir, a disk of the one host that all ranks run on."""

    non_persistent_global_ckpt_dir: str | None = None
    """Folder of --non-persistent-save-interval; default: <save>/non_persistent."""

    non_persistent_local_ckpt_dir: str | None = None
    """The same with --non-persistent-ckpt-type local."""

    start_over: bool = False
    """Start in a --save directory that holds checkpoints from which this run does not continue: its first save moves
    them to the folder set-aside-001 there. Without this flag such a start is refused."""

    max_failed_saves: PositiveInt = 3
    """Stop, with exit code 75, after this many saves in a row that failed."""

    async_save: bool = False
    """Write checkpoints behind training, which waits only until they are copied to host memory. One at a time; the last
    one is waited for."""

    async_save_staging_gb: Annotated[float, Range(0.0, 2.0**20)] | None = None
    """Host memory per rank for that copy, in GB; for what is beyond it training waits until as much is written.
    Default: everything at once where half of the host's free memory holds it, else 1."""

    load: str | None = None
    """Directory to resume from; training starts from scratch if it holds no checkpoint, unless
    --exit-on-missing-checkpoint is given."""

    finetune: bool = False
    """Load weights only and start at iteration 0 of the data."""

    pretrained_checkpoint: str | None = None
    """Directory of weights to start from when --load holds no checkpoint yet."""

    load_hf: str | None = None
    """Hugging Face folder (config.json, safetensors) to start from when --load holds no checkpoint yet: its settings
    are the model's, its weights are loaded on any layout."""

    save_hf_interval: PositiveInt | None = None
    """Write checkpoints of iterations that are multiples of this, itself a multiple of --save-interval, to <save>/hf in
    Hugging Face's format too. What the end of a run, a signal or a time limit saves in between is not converted."""

    ckpt_step: NonNegativeInt | None = None
    """Iteration to load instead of the latest one."""

    no_save_optim: bool = False
    """Leave the optimizer's state out of checkpoints."""

    no_save_rng: bool = False
    """Leave the random state out of checkpoints."""

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
    """With --use-checkpoint-args: keep this command line's tokenizer, as --tokenizer-type, --tokenizer-model and
    --vocab-file do by themselves."""

    dist_ckpt_strictness: Literal[
        "assume_ok_unexpected", "log_unexpected", "log_all", "raise_unexpected", "raise_all", "return_unexpected",
        "return_all", "ignore_all",
    ] = "assume_ok_unexpected"  # fmt: skip
    """What to say of names that model and checkpoint do not share: they are refused, and listed, with every value. log_
    values also log what is left alone as flags ask; return_ values are for programs."""

    exit_on_missing_checkpoint: bool = False
    """Stop instead of starting from scratch when --load holds no checkpoint."""

    moe_use_upcycling: bool = False
    """Where --load or --pretrained-checkpoint holds a dense model: start with experts that are copies of its
    feed-forward networks and fresh routers. A checkpoint with experts is continued."""

    moe_upcycling_granularity: PositiveInt = 1
    """With --moe-use-upcycling: slices that each feed-forward network is cut into; experts are as wide as one."""
