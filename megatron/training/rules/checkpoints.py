"""Rules about the folders of checkpoints, and about paths that are empty."""

from __future__ import annotations

import os

from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.rules.common import Problems, problem

PATHS = (
    "save", "load", "pretrained_checkpoint", "non_persistent_global_ckpt_dir", "non_persistent_local_ckpt_dir",
    "load_hf", "data_path", "train_data_path", "valid_data_path",
    "test_data_path", "data_args_path", "per_split_data_args_path", "data_cache_path", "vocab_file", "merge_file",
    "tokenizer_model", "tensorboard_dir", "wandb_save_dir", "memory_snapshot_path", "nccl_communicator_config_path",
    "yaml_cfg",
)  # fmt: skip
"""Fields that hold paths, one or several."""


def paths_are_not_empty(cfg: PretrainConfig) -> Problems:
    """``--save "$OUT"`` with OUT unset would write into the working directory."""
    for field in PATHS:
        value = getattr(cfg, field)
        paths = value if isinstance(value, list) else [value]
        if any(isinstance(path, str) and not path.strip() for path in paths):
            yield problem(cfg, field, "is an empty path", "is a variable unset? leave the flag out to do without it")


def fast_folder_is_another_one(cfg: PretrainConfig) -> Problems:
    """Checkpoints that replace one another in the folder of those that are kept would delete them."""
    if cfg.non_persistent_ckpt_type == "local" and cfg.non_persistent_local_ckpt_dir is None:
        yield problem(cfg, "non_persistent_ckpt_type", "needs --non-persistent-local-ckpt-dir DIRECTORY")
    for field in ("non_persistent_global_ckpt_dir", "non_persistent_local_ckpt_dir"):
        folder = getattr(cfg, field)
        if folder is not None and cfg.save and os.path.abspath(folder) == os.path.abspath(cfg.save):
            yield problem(cfg, field, "is the folder of --save", "give it one of its own")


def starting_over_is_no_resuming(cfg: PretrainConfig) -> Problems:
    if cfg.start_over and not cfg.save:
        yield problem(cfg, "start_over", "needs --save DIRECTORY")
    if cfg.start_over and cfg.save and cfg.load == cfg.save and not cfg.finetune:
        yield problem(cfg, "start_over", f"contradicts --load {cfg.load}, which continues from there", "leave one out")


def weights_come_from_one_place(cfg: PretrainConfig) -> Problems:
    if cfg.load_hf is None:
        return
    if cfg.pretrained_checkpoint:
        yield problem(cfg, "load_hf", "contradicts --pretrained-checkpoint", "leave one of them out")
    if cfg.use_checkpoint_args:
        yield problem(cfg, "load_hf", "contradicts --use-checkpoint-args", "settings come from its config.json")
    if cfg.spec:
        yield problem(cfg, "load_hf", "contradicts --spec", "its config.json says what the layers are")
    if cfg.moe_use_upcycling:
        fix = "tools/checkpoint/convert.py --saver native, then --pretrained-checkpoint"
        yield problem(cfg, "load_hf", "contradicts --moe-use-upcycling, which starts from a checkpoint", fix)


def exports_follow_saves(cfg: PretrainConfig) -> Problems:
    if cfg.save_hf_interval is None or not cfg.save:
        return
    if cfg.save_interval is None or cfg.save_hf_interval % cfg.save_interval:
        yield problem(cfg, "save_hf_interval", "is not a multiple of --save-interval", "it converts checkpoints")
