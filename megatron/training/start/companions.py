"""Frozen models next to the trained one: build them in the same layout, load their weights, pair their stages.

They have no optimizer and no gradient buffers. FSDP2 shards them; otherwise every data-parallel rank holds full
weights. Checkpoints of the run do not contain them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from megatron.core.config.errors import UserError
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.pipeline_parallel.paired_stage import PairedStage
from megatron.core.tokenizers.base import Tokenizer
from megatron.training.checkpoint.base_weights import load_native_weights
from megatron.training.checkpoint.other_formats import load_hf_weights
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.initialize import training_device
from megatron.training.start.base_reference import BaseStage
from megatron.training.start.parallelize import build_model, parallelize
from megatron.training.tasks.base import Task
from megatron.training.tasks.language_model import task_class

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Companion:
    """Frozen model in evaluation mode."""

    name: str
    cfg: PretrainConfig
    model: Sequence[nn.Module]
    """This rank's chunks, as many as the trained model has."""


def build_companion(name: str, cfg: PretrainConfig, tokenizer: Tokenizer | None, groups: ProcessGroups) -> Companion:
    """Build this rank's chunks of the model of ``cfg`` and load the weights of its ``load`` or ``load_hf`` folder.
    Collective. Raises UserError without a folder, CheckpointError if the folder does not fit."""
    if cfg.checkpoint.load is None and cfg.checkpoint.load_hf is None:
        raise UserError(f"companion {name}: has no weights; set load or load_hf in its settings")
    model: Sequence[nn.Module] = build_model(task_class(cfg.model_family)(cfg, tokenizer), training_device())
    for chunk in model:
        chunk.requires_grad_(False).eval()
    if cfg.distributed.use_torch_fsdp2 and groups.dp_cp.size > 1:
        model = [chunk.eval() for chunk in parallelize(model, cfg, groups)]
    if cfg.checkpoint.load_hf is not None:
        load_hf_weights(cfg.checkpoint.load_hf, model, None, groups, model_family=cfg.model_family)
    else:
        load_native_weights(cfg.checkpoint.load, cfg.checkpoint.ckpt_step, model, groups)
    logger.info("companion %s: frozen model of %s", name, cfg.checkpoint.load_hf or cfg.checkpoint.load)
    return Companion(name, cfg, model)


def build_companions(task: Task, model: Sequence[nn.Module], groups: ProcessGroups) -> list[Companion]:
    """Build the frozen models of the family of ``task``, and the base of ``model`` if the task names it. Collective."""
    cfg = task.cfg
    companions = [build_companion(name, other, task.tokenizer, groups) for name, other in cfg.companions.items()]
    if task.base_name is not None:
        stages = [BaseStage(chunk, cfg.transforms, groups) for chunk in model]
        companions.append(Companion(task.base_name, cfg, stages))
    task.connect(model, {companion.name: companion.model for companion in companions})
    return companions


def pair_stages(
    model: Sequence[nn.Module], companions: Sequence[Companion], groups: ProcessGroups
) -> Sequence[nn.Module]:
    """Return the chunks of ``model``, each paired with the same chunk of all companions if there are any."""
    if not companions:
        return model
    return [
        PairedStage(
            chunk,
            {companion.name: companion.model[index] for companion in companions},
            groups,
            is_last=groups.pp.is_last and index == len(model) - 1,
        )
        for index, chunk in enumerate(model)
    ]
