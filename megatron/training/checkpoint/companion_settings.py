"""Settings of frozen models next to the trained one: sizes of another model, everything else of the run.

A model family names a function (``ModelFamily.companions``) that returns these settings by name. Parallel layout,
precision, kernels, tokenizer and sequence length are the run's, because both models see the same batches on the same
ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from megatron.core.config.distillation import DistillationConfig
from megatron.core.config.errors import UserError, folder_fix
from megatron.core.config.fp8 import Fp8Config
from megatron.core.config.memory import RecomputeConfig
from megatron.core.config.model_parallel_config import PrecisionConfig
from megatron.core.config.pipeline import PipelineConfig
from megatron.core.config.tokenizer import TokenizerConfig
from megatron.core.pipeline_parallel.stages import virtual_pipeline_size
from megatron.export.hf import load_hf_settings
from megatron.training.checkpoint.files import find_checkpoint
from megatron.training.checkpoint.other_formats import MODEL, with_settings
from megatron.training.checkpoint.settings import load_checkpoint_args
from megatron.training.config.checkpointing import CheckpointConfig
from megatron.training.config.flat import FlatConfig, optional_groups
from megatron.training.config.pretrain_config import PretrainConfig, compose
from megatron.training.config.resolve import resolve
from megatron.training.config.validation import ValidationConfig
from megatron.training.stored_settings import stored_family

_SHARED = {"seq_length", "decoder_seq_length"} | {
    field.name for group in (PrecisionConfig, TokenizerConfig) for field in fields(group)
} - {"vocab_size"}
"""Settings of a model that are the run's."""
_AT_DEFAULTS = (PipelineConfig, RecomputeConfig, Fp8Config, CheckpointConfig, ValidationConfig)
"""Groups of settings that are neither the run's nor the model's."""
_OF_TRAINING = {"qk_clip", "log_max_attention_logit"}
"""Settings of a model without a meaning for frozen weights."""
_FIXED = {"skip_train": True, "needs_data": False, "resolved": False, "explicit": frozenset()}


def load_companion_config(
    cfg: PretrainConfig, folder: str, step: int | None = None, *, flag: str = "companions"
) -> PretrainConfig:
    """Return the settings of the model in ``folder``, in the layout of the run ``cfg``.

    Args:
        cfg: resolved settings of the run.
        folder: a --save directory, or a Hugging Face folder if there is no checkpoint and ``step`` is None.
        step: iteration to load; None: the latest.
        flag: source of ``folder``, for messages.

    Raises:
        UserError: the folder holds no model, or one of an unknown family, or adapters only, or is the --save folder
            without ``step``."""
    if not os.path.isdir(folder):
        raise UserError(f"{flag} {folder:.200}: there is no such folder; {folder_fix(folder)}")
    save = None if cfg.validation.skip_train else cfg.checkpoint.save
    if step is None and save is not None and os.path.realpath(save) == os.path.realpath(folder):
        # a continued run would take its own checkpoint for the frozen model: a divergence of 0, and no error
        reason = "is the folder of --save, whose checkpoints would replace the frozen model when the run continues"
        raise UserError(f"{flag} {folder}: {reason}; choose another --save")
    if step is None and os.path.isfile(Path(folder) / "config.json") and find_checkpoint(folder) is None:
        try:
            settings = load_hf_settings(folder, cfg.model_family)
        except UserError as error:
            raise UserError(f"{flag} {error}") from None
        return companion_config(cfg, settings, folder, load_hf=folder)
    settings = load_checkpoint_args(folder, step, flag)
    if settings.get("lora_rank") is not None:
        fix = "merge them with megatron lora merge --saver native"
        raise UserError(f"{flag} {folder}: contains adapters only; {fix}")
    return companion_config(cfg, settings, folder, load=folder, ckpt_step=step)


def files_of_models(cfg: PretrainConfig) -> list[str]:
    """Return the files that every rank reads of --load-hf, the frozen models and stored log-probabilities, in the same
    order on all hosts; a folder that this rank lacks is returned as given."""
    checkpoints = [cfg.checkpoint, *(companion.checkpoint for companion in cfg.companions.values())]
    folders = [checkpoint.load_hf for checkpoint in checkpoints]
    folders += [_latest(checkpoint) for checkpoint in checkpoints[1:] if checkpoint.load is not None]
    folders.append(cfg.group(DistillationConfig).logits_load_dir)
    files: list[str] = []
    for folder in filter(None, folders):
        contents = sorted(path for path in Path(folder).glob("*") if path.is_file())
        files += map(str, contents) if contents else [folder]
    return files


def _latest(checkpoint: CheckpointConfig) -> str | None:
    location = find_checkpoint(checkpoint.load, checkpoint.ckpt_step)
    return checkpoint.load if location is None else location.directory


def companion_config(
    cfg: PretrainConfig, settings: Mapping[str, object], where: str, **checkpoint: str | int | None
) -> PretrainConfig:
    """Return resolved settings, not checked by rules, of a model in the layout of the run ``cfg``.

    Args:
        cfg: resolved settings of the run.
        settings: settings of the model by field, ``model_family`` included (default: the default family). Missing ones
            have the defaults of the flags.
        where: source of ``settings``, for messages.
        checkpoint: fields of ``CheckpointConfig``: the weights to load."""
    family = stored_family(settings, where).name
    groups = (*_AT_DEFAULTS, *optional_groups(family))
    other = {*MODEL, "encoder_num_layers", *(field.name for group in groups for field in fields(group))} - _SHARED
    chunks = virtual_pipeline_size(cfg.model)
    defaults = FlatConfig(model_family=family)
    flat = defaults.with_settings(**{
        **{name: value for name, value in cfg.flat.values().items() if name in defaults.values().keys() - other},
        **_FIXED,
        **checkpoint,
        "model_family": family,
        # as many chunks as the trained model has; the number of layers per chunk follows
        "num_virtual_stages_per_pipeline_rank": chunks if chunks > 1 else None,
        # a list has one value per layer of the trained model
        "cp_comm_type": cfg.model.cp_comm_type[:1],
    })  # fmt: skip
    own = {name: value for name, value in settings.items() if name not in _SHARED | _OF_TRAINING}
    return resolve(with_settings(compose(flat), own, where), cfg.world_size)
