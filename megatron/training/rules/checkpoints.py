"""Rules about the folders of checkpoints, and about paths that are empty."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from megatron.core.config.errors import UserError, folder_fix
from megatron.core.config.problems import Problems, problem
from megatron.core.dist_checkpointing.files import TRACKER, may_hold_checkpoint
from megatron.core.dist_checkpointing.manifest import MANIFEST
from megatron.core.safe_files import why_not_creatable
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.rules.inputs import Line

PATHS = (
    "save", "load", "pretrained_checkpoint", "non_persistent_global_ckpt_dir", "non_persistent_local_ckpt_dir",
    "load_hf", "data_path", "train_data_path", "valid_data_path",
    "test_data_path", "data_args_path", "per_split_data_args_path", "data_cache_path", "vocab_file", "merge_file",
    "tokenizer_model", "tensorboard_dir", "wandb_save_dir", "memory_snapshot_path", "nccl_communicator_config_path",
    "eval_tasks_path", "yaml_cfg", "export_kd_cfg", "export_kd_teacher_load", "logits_load_dir", "logits_save_dir",
)  # fmt: skip
"""Fields that hold paths, one or several."""


def paths_not_empty(cfg: PretrainConfig) -> Problems:
    """``--save "$OUT"`` with OUT unset would write into the working directory."""
    for field in PATHS:
        value = getattr(cfg.flat, field)
        paths = value if isinstance(value, list) else [value]
        if any(isinstance(path, str) and not path.strip() for path in paths):
            yield problem(cfg, field, "is an empty path", "check whether a shell variable is unset, or remove the flag")


def load_folders_exist(cfg: PretrainConfig) -> Problems:
    """Reject folders to load that do not exist. Does not open files. Checks nothing in a dry run."""
    checkpoint = cfg.checkpoint
    if cfg.program.dry_run:
        return
    resumes = checkpoint.load is not None and os.path.isdir(checkpoint.load)
    if checkpoint.load_hf is not None and not os.path.isdir(checkpoint.load_hf):
        yield problem(cfg, "load_hf", "there is no such folder", folder_fix(checkpoint.load_hf))
    if (
        checkpoint.pretrained_checkpoint is not None
        and not resumes
        and not os.path.isdir(checkpoint.pretrained_checkpoint)
    ):
        yield problem(cfg, "pretrained_checkpoint", "there is no such folder", "check the path")
    elif (
        checkpoint.exit_on_missing_checkpoint
        and checkpoint.load is not None
        and checkpoint.pretrained_checkpoint is None
    ):
        fast = checkpoint.non_persistent_global_ckpt_dir or checkpoint.non_persistent_local_ckpt_dir
        fix = "check the path, or remove --exit-on-missing-checkpoint"
        if not resumes:
            yield problem(cfg, "load", "there is no such folder", fix)
        elif not fast and not may_hold_checkpoint(checkpoint.load):
            yield problem(cfg, "load", "holds no checkpoint", fix)


def load_of_another_format(cfg: PretrainConfig) -> Problems:
    """Reject a --load with a model that no run resumes from, as it would start from random weights. Accepts missing
    and empty folders, which the run may fill."""
    checkpoint = cfg.checkpoint
    if cfg.program.dry_run or checkpoint.load is None:
        return
    folder = checkpoint.load
    if os.path.lexists(folder) and not os.path.isdir(folder):
        yield problem(cfg, "load", "is no folder", "give the --save folder of a run")
    files = set(os.listdir(folder)) if os.path.isdir(folder) and os.access(folder, os.R_OK) else set()
    resumable = files & {TRACKER, MANIFEST} or any(name.startswith("iter_") for name in files)
    for file, reason, fix in (
        ("adapter_config.json", "has adapters of PEFT, which no run loads", "convert them with megatron lora import"),
        *[("config.json", "is a Hugging Face model", "give it as --load-hf")] * (checkpoint.load_hf is None),
    ):
        if file in files and not resumable:
            yield problem(cfg, "load", reason, fix)


def save_folder_unused(cfg: PretrainConfig) -> Problems:
    """Reject a --save folder with checkpoints without --load. ``checkpoint/history.py`` checks the other cases."""
    checkpoint = cfg.checkpoint
    if (
        checkpoint.save is None
        or checkpoint.load is not None
        or cfg.validation.skip_train
        or checkpoint.start_over
        or cfg.program.dry_run
    ):
        return
    existing = glob.glob(os.path.join(glob.escape(checkpoint.save), "iter_" + "[0-9]" * 7))
    if existing:
        newest = max(int(path[-7:]) for path in existing)
        reason = f"holds checkpoints up to iteration {newest}, from which this run would not continue"
        fix = f"to continue: --load {checkpoint.save}; to start again and keep them in a subfolder: --start-over"
        yield problem(cfg, "save", reason, fix)


def save_folder_writable(cfg: PretrainConfig) -> Problems:
    """Reject a --save folder that cannot be created or written."""
    if cfg.checkpoint.save is None or cfg.validation.skip_train or cfg.program.dry_run:
        return
    if reason := why_not_creatable(Path(cfg.checkpoint.save)):
        yield problem(cfg, "save", reason, "choose another folder")


def non_persistent_folder(cfg: PretrainConfig) -> Problems:
    """Reject --save as folder of non-persistent checkpoints, which delete persistent ones."""
    checkpoint = cfg.checkpoint
    for field in ("non_persistent_global_ckpt_dir", "non_persistent_local_ckpt_dir"):
        folder = getattr(cfg.flat, field)
        if folder is not None and checkpoint.save and os.path.realpath(folder) == os.path.realpath(checkpoint.save):
            yield problem(cfg, field, "is the folder of --save", "choose a separate folder")


def start_over_without_load(cfg: PretrainConfig) -> Problems:
    checkpoint = cfg.checkpoint
    if checkpoint.start_over and checkpoint.save and checkpoint.load == checkpoint.save and not checkpoint.finetune:
        reason = f"contradicts --load {checkpoint.load}, which continues from there"
        yield problem(cfg, "start_over", reason, "remove one")


def hf_export_interval(cfg: PretrainConfig) -> Problems:
    checkpoint = cfg.checkpoint
    if checkpoint.save_hf_interval is None or not checkpoint.save:
        return
    if checkpoint.save_interval is None or checkpoint.save_hf_interval % checkpoint.save_interval:
        yield problem(cfg, "save_hf_interval", "is not a multiple of --save-interval", "it converts checkpoints")


def hf_export_family(cfg: PretrainConfig) -> Problems:
    """Reject --save-hf-interval if no Hugging Face family can represent the model. Imports torch."""
    if cfg.checkpoint.save_hf_interval is None or not cfg.checkpoint.save:
        return
    from megatron.core.description.model import weight_shapes
    from megatron.export.hf.family import complete, described  # imports torch, which a command line does without
    from megatron.export.hf.registry import family_for

    try:
        settings = complete({**cfg.flat.values(), "vocab_size": cfg.tokenizer.vocab_size or 1})
        model = cfg.describe(settings["vocab_size"])
    except UserError:  # reported by the rules about sizes and --spec
        return
    names = weight_shapes(model, expert_bias=cfg.model.moe_router_enable_expert_bias).keys()
    if model.unknown or names != described(settings)[0].keys():
        yield problem(cfg, "save_hf_interval", "is not supported with the layers of --spec", "remove it")
        return
    try:
        list(family_for(settings).layouts(settings))
    except UserError as error:
        name = "--save-hf-interval"
        yield Line(name, f"{name} {cfg.checkpoint.save_hf_interval}: {error}. Change these flags or remove {name}")
