"""Base weights: the frozen tensors that checkpoints of a run do not contain, such as the model below its adapters."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.exchange import from_first_rank
from megatron.core.dist_checkpointing.manifest import read_manifest
from megatron.core.dist_checkpointing.reader import Source, load_from, together_reader
from megatron.core.distributed import unwrapped
from megatron.core.fp8.recipe import PREFIX as SCALES
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.sharding.sharded_tensor import ShardedTensor, module_tensors
from megatron.export.interchange import COUNTER
from megatron.training.checkpoint.files import find_checkpoint
from megatron.training.checkpoint.other_formats import load_hf_weights
from megatron.training.config.pretrain_config import PretrainConfig

FINAL_NORM = "model.decoder.final_layernorm.weight"


def load_native_weights(
    folder: str | None,
    step: int | None,
    chunks: Sequence[nn.Module],
    groups: ProcessGroups,
    includes: Callable[[str], bool] = bool,
) -> Source:
    """Fill the tensors that ``includes`` selects by global name from the checkpoint ``step`` of ``folder`` (None: the
    latest), and nothing else; return it. Collective. Raises CheckpointError on all ranks if there is none, it is
    damaged, has adapters only, or names or shapes differ."""

    def find() -> str:
        checkpoint = find_checkpoint(folder, step)
        if checkpoint is None:
            raise CheckpointError(f"{folder}: holds no checkpoint; give the --save folder of a run")
        if isinstance(read_manifest(checkpoint.directory)["objects"].get("base"), dict):
            fix = "merge them with megatron lora merge --saver native, or give the base"
            raise CheckpointError(f"{checkpoint.directory}: contains adapters only; {fix}")
        return checkpoint.directory

    reader = together_reader(from_first_rank(find, groups.world), groups.world)
    tensors: dict[str, ShardedTensor] = {}
    for chunk in chunks:
        tensors |= module_tensors(unwrapped(chunk), prefix="model.", groups=groups, includes=includes)
    load_from(reader, tensors, allow_unused=("optimizer.", "rng.", SCALES), group=groups.world)
    return reader


def load_base(chunks: Sequence[nn.Module], cfg: PretrainConfig, groups: ProcessGroups) -> dict[str, str] | None:
    """Fill the base of the transforms of ``cfg`` from --load-hf or --pretrained-checkpoint and complete them. Return
    its folder and identity; None if checkpoints of the run contain the full model. Collective. Raises as the loads."""
    if not cfg.reads_base:
        return None
    checkpoint = cfg.checkpoint

    def is_base(name: str) -> bool:
        return not cfg.stores(name)

    source: Source
    if checkpoint.load_hf is not None:
        source = load_hf_weights(checkpoint.load_hf, chunks, None, groups, is_base, model_family=cfg.model_family)
    else:
        source = load_native_weights(checkpoint.pretrained_checkpoint, None, chunks, groups, is_base)
    for transform in cfg.transforms:
        for chunk in chunks:
            transform.base_loaded(unwrapped(chunk), groups)
    folder = checkpoint.load_hf or checkpoint.pretrained_checkpoint or ""
    identity = from_first_rank(lambda: base_identity(source, cfg.model.hidden_size), groups.world)
    return {"folder": os.path.abspath(folder), "identity": identity}


def with_base(cfg: PretrainConfig, folder: str, step: int | None) -> PretrainConfig:
    """Return ``cfg`` with the base that the checkpoint in ``folder`` names as --load-hf or --pretrained-checkpoint,
    unless the checkpoint contains a full model. Raises CheckpointError if the base does not exist any more."""
    checkpoint = find_checkpoint(folder, step)
    base = {} if checkpoint is None else read_manifest(checkpoint.directory)["objects"].get("base")
    if not base:
        return cfg
    place = base.get("folder") if isinstance(base, dict) else None
    if not isinstance(place, str) or not os.path.isdir(place):
        raise CheckpointError(
            f"{folder} contains adapters of the base {place!r:.200}, which does not exist; restore it"
        )
    if os.path.isfile(os.path.join(place, "config.json")) and find_checkpoint(place) is None:
        return cfg.with_settings(use_checkpoint_args=False, load_hf=place)
    return cfg.with_settings(use_checkpoint_args=False, pretrained_checkpoint=place)


def base_identity(source: Source, width: int) -> str:
    """Return a hash of the names of all weights and of the final norm [width], whose values differ between fine-tuned
    versions of a model. Equal for a Hugging Face folder and its conversion."""
    names = [name for name in source.names if name.startswith("model.") and not name.endswith(COUNTER)]
    digest = hashlib.sha256("\n".join(names).encode())
    if FINAL_NORM in names:
        norm = torch.empty(width)
        source.read_into(ShardedTensor(FINAL_NORM, norm, (width,), (0,)))
        digest.update(norm.numpy().tobytes())
    return digest.hexdigest()[:16]


def other_base(stored: object, current: Mapping[str, str] | None, where: str) -> list[str]:
    """Return the problem that the checkpoint ``where``, which names the base ``stored``, does not fit the base of the
    run, or an empty list. None: the checkpoint or the run has a full model."""
    if not isinstance(stored, dict):
        if current is None:
            return []
        fix = "give it as --pretrained-checkpoint, and --load only for a checkpoint with adapters"
        return [f"{where} contains a full model without adapters: {fix}"]
    folder = stored.get("folder")
    if current is None:
        return [f"{where} contains adapters only: add --lora-rank and its base, {folder!r:.200}"]
    if stored.get("identity") != current["identity"]:
        return [f"{where} contains adapters of another base than {current['folder']}: give {folder!r:.200}"]
    return []
