"""Settings of a run as checkpoints store them, and whether a checkpoint fits the run that loads it. Torch-free."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from megatron.core.attention.description import SETTINGS as ATTENTION_SETTINGS
from megatron.core.attention.latent_description import SETTINGS as LATENT_SETTINGS
from megatron.core.config.errors import UserError
from megatron.core.description.model import ModelDescription
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.files import RELEASE, checkpoint_directory, read_tracker
from megatron.core.dist_checkpointing.manifest import read_manifest
from megatron.core.models.common.description import SETTINGS as DECODER_SETTINGS
from megatron.core.models.family import ModelFamily
from megatron.core.models.registry import default_family, families, known_family, scripts_of
from megatron.core.schedules.learning_rate import get_optimizer_param_scheduler
from megatron.core.transformer.mlp_description import SETTINGS as MLP_SETTINGS
from megatron.core.transformer.moe.moe_description import SETTINGS as MOE_SETTINGS
from megatron.core.transformer.ssm.description import MAMBA_SETTINGS
from megatron.core.transformer.ssm.description import SETTINGS as LINEAR_ATTENTION_SETTINGS
from megatron.data.sidecar import same_tokenizer
from megatron.training.config.flat import FlatConfig
from megatron.training.config.pretrain_config import PretrainConfig

if TYPE_CHECKING:
    from megatron.core.tokenizers.base import Tokenizer

SIZES = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "seq_length",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "max_position_embeddings",
    "decoder_num_layers",
    "decoder_seq_length",
)
"""Taken from the checkpoint only if the command line does not set them."""

MAIN_SIZES = ("num_layers", "hidden_size", "num_attention_heads")

ARCHITECTURE = tuple(
    dict.fromkeys(
        (
            *DECODER_SETTINGS,
            *ATTENTION_SETTINGS,
            *LATENT_SETTINGS,
            *LINEAR_ATTENTION_SETTINGS,
            *MAMBA_SETTINGS,
            *MLP_SETTINGS,
            *MOE_SETTINGS,
            *(name for family in families().values() for name in family.weight_settings),
        )
    )
)
"""Settings that define the meaning of the built-in layers' weights. --use-checkpoint-args takes them from the
checkpoint; loading fails if they differ. A custom model's description names further settings of its layers."""


def config_to_dict(cfg: FlatConfig) -> dict[str, object]:
    """Return all settings as plain JSON values, for checkpoints and logs."""
    values = cfg.values()
    values["explicit"] = sorted(values["explicit"])
    values["exit_signal"] = values["exit_signal"].name
    return json.loads(json.dumps(values, default=str))


def weight_settings(model: ModelDescription) -> tuple[str, ...]:
    """Return the names of settings that define the meaning of a model's weights. Layers without a description may
    depend on any architecture setting, so that all of them are included."""
    return tuple(dict.fromkeys((*model.settings, *(ARCHITECTURE if model.unknown else ()))))


def stored_family(stored: Mapping[str, object], where: str | os.PathLike) -> ModelFamily:
    """Return the model family of stored settings, the default one if they name none; raise CheckpointError for an
    unknown family. Imports no module that a file names."""
    name = stored.get("model_family", default_family())
    if (family := known_family(name)) is None:
        raise CheckpointError(f"{where} holds a model of the unknown family {name!r:.80}; import its module first")
    return family


def refuse_other_family(stored: Mapping[str, object], model_family: str, where: str | os.PathLike) -> None:
    """Raise ``CheckpointError`` if the stored settings belong to another model family; the message names the programs
    that train it. Settings without ``model_family`` belong to the default family. Compares nothing else."""
    family = stored.get("model_family", default_family())
    if family != model_family:
        found = known_family(family)
        known = "" if found is None else f" (trained by {scripts_of(found.programs)})"
        said = f"{where} holds a model of the family {family!r}{known}"
        raise CheckpointError(f"{said}, this run trains {model_family!r}")


def with_custom_flags(args: dict[str, object]) -> dict[str, object]:
    """Return settings with the custom flags of a script (``extra``) at the top level."""
    own = args.get("extra")
    return {**own, **args} if isinstance(own, dict) else args


def check_architecture(
    stored: Mapping[str, object],
    current: Mapping[str, Any],
    where: str | os.PathLike,
    *,
    architecture: Sequence[str] = ARCHITECTURE,
    weights_only: bool = False,
) -> None:
    """Raise CheckpointError, which lists every difference, if the settings give the weights another meaning.

    Args:
        stored: settings in the checkpoint, with custom flags at the top level.
        current: settings of this run, in the same form.
        where: name of the checkpoint in messages.
        architecture: settings that define the meaning of weights.
        weights_only: whether only weights are loaded: only other sizes are rejected then."""
    refuse_other_family(stored, current.get("model_family", default_family()), where)
    differing = {name for name in stored.keys() & current.keys() if stored[name] != current[name]}
    refused = [name for name in architecture if name in differing and (name in SIZES or not weights_only)]
    if refused:
        listed = "; ".join(f"{name} is {current[name]!r}, the checkpoint has {stored[name]!r}" for name in refused)
        raise CheckpointError(
            f"{where} has another architecture: {listed}; change these flags, or give --use-checkpoint-args"
        )


def other_tokenizer(stored: str | None, current: str | None, where: str | os.PathLike) -> list[str]:
    """Return the problem that both fingerprints are known and name different tokenizers, or an empty list."""
    if stored is None or current is None or same_tokenizer(stored, current):
        return []
    return [f"{where} was trained with another tokenizer: use its own, or --finetune"]


def is_dense(args: object) -> bool:
    """Whether checkpoint settings ``args`` describe a model without experts; False for damaged settings."""
    return isinstance(args, dict) and args.get("num_moe_experts") is None


def settings_to_compare(architecture: Iterable[str]) -> tuple[str, ...]:
    """Return the settings of ``architecture`` that a dense model shares with its mixture of experts."""
    return tuple(name for name in architecture if "moe_" not in name and name != "ffn_hidden_size")


def check_width(args: Mapping[str, object], cfg: PretrainConfig, where: str) -> None:
    """For upcycling, raise CheckpointError unless the dense checkpoint's ffn_hidden_size equals --moe-ffn-hidden-size x
    --moe-upcycling-granularity. Passes if either width is unknown. The message names a fix."""
    dense, width, slices = (
        args.get("ffn_hidden_size"),
        cfg.model.moe_ffn_hidden_size,
        cfg.upcycling.moe_upcycling_granularity,
    )
    if width is None or not isinstance(dense, int) or dense == width * slices:
        return
    fix = f"--moe-ffn-hidden-size {dense // slices}" if dense % slices == 0 else "another --moe-upcycling-granularity"
    raise CheckpointError(
        f"{where}: its feed-forward width {dense} is not {slices} (--moe-upcycling-granularity) x {width} "
        f"(--moe-ffn-hidden-size); give {fix}"
    )


def misfits(cfg: PretrainConfig, tokenizer: Tokenizer | None, *, consistent: bool) -> Iterator[str]:
    """Yield a message for each reason why the checkpoint of --load or --pretrained-checkpoint does not fit the run, if
    the tracker or --ckpt-step names a complete one; else the load decides, which also searches, repairs and reports.
    ``tokenizer`` None: compare settings only. ``consistent``: whether the settings have passed all rules; if not, only
    their main sizes are compared."""
    directory, weights_only = _named_checkpoint(cfg.checkpoint.load, cfg.checkpoint.ckpt_step), cfg.checkpoint.finetune
    if directory is None:
        directory, weights_only = _named_checkpoint(cfg.checkpoint.pretrained_checkpoint, None), True
    try:
        objects = {} if directory is None else read_manifest(directory)["objects"]
        architecture = weight_settings(cfg.describe(0)) if consistent and objects else MAIN_SIZES
    except UserError:  # reported by the load, or by the rules about --spec
        return
    stored = objects.get("args")
    if directory is None or not isinstance(stored, dict):
        return
    upcycled = cfg.upcycling.moe_use_upcycling and is_dense(stored)
    weights_only = weights_only or upcycled or os.path.basename(directory) == RELEASE
    try:
        if upcycled:
            architecture = settings_to_compare(architecture)
            check_width(stored, cfg, directory)
        check_architecture(
            with_custom_flags(stored),
            with_custom_flags(config_to_dict(cfg.flat)),
            directory,
            architecture=architecture,
            weights_only=weights_only or cfg.validation.skip_train,
        )
    except CheckpointError as error:
        yield str(error)
    if tokenizer is not None and not weights_only:
        yield from other_tokenizer(objects.get("tokenizer"), tokenizer.fingerprint, directory)
    if consistent and not (weights_only or cfg.validation.skip_train or cfg.checkpoint.no_load_optim):
        yield from _other_schedule(objects, cfg)


def _other_schedule(objects: Mapping[str, Any], cfg: PretrainConfig) -> Iterator[str]:
    """Yield the problem that the checkpoint's learning rate schedule differs and no flag selects one."""
    flat = cfg.flat
    if "optimizer" in objects and not (flat.use_checkpoint_opt_param_scheduler or flat.override_opt_param_scheduler):
        try:
            scheduler = get_optimizer_param_scheduler(flat, SimpleNamespace(param_groups=[]))
            scheduler.load_state_dict(objects["scheduler"], objects["train_state"]["consumed_train_samples"])
        except UserError as error:
            yield str(error)
        except (KeyError, TypeError, ValueError):  # damage, which the load reports
            return


def _named_checkpoint(folder: str | None, step: int | None) -> str | None:
    """Return the checkpoint directory that ``step`` (--ckpt-step), or else the tracker of ``folder``, names; None
    without one. Never raises."""
    if folder is None:
        return None
    with suppress(OSError, CheckpointError):
        directory = checkpoint_directory(folder, read_tracker(folder) if step is None else step)
        return directory if os.path.isdir(directory) else None
    return None
