"""Load a checkpoint's model for inference, on one process or on the ranks of torchrun."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from megatron.core.config.errors import UserError
from megatron.core.config.rope_parameters import parse_rope_parameters
from megatron.core.config.tokenizer import TOKENIZER_FILES, TokenizerConfig
from megatron.core.config.vision import PIXELS, VisionConfig
from megatron.core.dist_checkpointing.manifest import read_manifest
from megatron.core.groups.process_groups import SINGLE_PROCESS, ProcessGroups
from megatron.core.inference.image_prompts import ImageLoader
from megatron.core.inference.images import PromptImages
from megatron.core.models.family import ModelFamily
from megatron.core.models.registry import families, get_family
from megatron.core.models.vlm.towers import tower_kind
from megatron.core.tokenizers import build_tokenizer
from megatron.core.tokenizers.base import Tokenizer
from megatron.export.hf import load_hf_settings
from megatron.training.arguments import parse_args, validate_args
from megatron.training.checkpoint.base_weights import load_base, with_base
from megatron.training.checkpoint.checkpointer import Checkpointer
from megatron.training.checkpoint.files import find_checkpoint
from megatron.training.checkpoint.other_formats import apply_hf_settings, load_hf_weights
from megatron.training.checkpoint.run_tokenizer import find_run_tokenizer
from megatron.training.checkpoint.settings import apply_checkpoint_args, load_checkpoint_args
from megatron.training.config.launcher import launched_world_size
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.initialize import initialize_megatron, training_device
from megatron.training.stored_settings import stored_family
from megatron.training.tasks.language_model import task_class

logger = logging.getLogger(__name__)

ASKED = ("--skip-train", "--micro-batch-size", "1", "--eval-iters", "0")
"""Flags of a run that does not train."""

AS_TRAINED = ("moe_router_load_balancing_type", "moe_aux_loss_coeff", *PIXELS)
"""Settings that a resumed run may change but an inference model must keep as trained: some balancing types select
experts differently (both settings hold one value per type), and images must have the size and colors of training."""


@dataclass(frozen=True)
class TrainedModel:
    """A model in evaluation mode, its settings and its tokenizer."""

    cfg: PretrainConfig
    tokenizer: Tokenizer
    model: nn.Module
    cuda_graphs: bool = True
    """Whether generation may record its steps."""
    num_ranks: int = 1
    """Ranks that each hold a part of the model."""
    is_chat: bool = False
    """Whether prompts are rendered conversations, which have all special tokens already."""
    images: PromptImages | None = None
    """Images of every prompt."""

    def tokenize(self, prompt: str) -> list[int]:
        """Return the ids of a prompt."""
        ids = (self.tokenizer.tokenize_chat if self.is_chat else self.tokenizer.tokenize)(prompt)
        loader = self.image_loader
        return ids if self.images is None or loader is None else loader.expanded(ids, self.images.sizes)

    @property
    def image_loader(self) -> ImageLoader | None:
        """Reader of images; None for a model of text."""
        if VisionConfig not in self.cfg.family.groups:
            return None
        vision = self.cfg.group(VisionConfig)
        assert vision.image_token_id is not None, "required"
        return ImageLoader(tower_kind(vision).images(vision), vision.image_token_id)

    def with_images(self, paths: Sequence[str]) -> TrainedModel:
        """Return the model with the images of ``paths`` in every prompt. UserError if it cannot read them."""
        if (loader := self.image_loader) is None:
            raise UserError(f"--image {paths[0]}: the model reads text only; remove it")
        return replace(self, images=loader.load(paths, loader.sizes(paths)))


def load_trained_model(
    folder: str,
    step: int | None,
    tool: str,
    module: str | None = None,
    layout: Sequence[str] = (),
    tokenizer: Mapping[str, str] | None = None,
    *,
    images: bool = False,
) -> TrainedModel:
    """Return model (evaluation mode), settings and tokenizer of a --save directory, or of a Hugging Face folder if
    there is no checkpoint and ``step`` is None. Loads weights only. With ``layout``, starts torch.distributed.

    Args:
        folder: value for --load.
        step: iteration to load; None: the latest.
        tool: path of the calling program. A tool of this package (``ModelFamily.tool``) takes the families that it
            serves, any other program every family.
        module: module of a family outside of ``megatron``, which checkpoints name but must not import.
        layout: flags of the parallel layout on the ranks of torchrun; empty: the full model on this process.
        tokenizer: ``tokenizer_type`` and ``tokenizer_model``, to use another tokenizer than the run's or the
            folder's.
        images: read the vision tower of a Hugging Face folder, too, if it has one.

    Raises:
        UserError: the model family belongs to another tool, or checkpoint or tokenizer are missing or damaged."""
    if module is not None:
        get_family(module)
    if step is None and (Path(folder) / "config.json").is_file() and find_checkpoint(folder) is None:
        return _load_hugging_face(folder, tool, [*layout, *_tokenizer_flags(tokenizer, None)], images)
    stored = load_checkpoint_args(folder, step)
    family = _checked_family(stored, folder, tool)
    argv = ["--load", folder, "--use-checkpoint-args", "--exit-on-missing-checkpoint", "--finetune", *ASKED, *layout]
    argv += [] if step is None else ["--ckpt-step", str(step)]
    argv += _tokenizer_flags(tokenizer, stored.get("tokenizer_type"))
    parsed = apply_checkpoint_args(parse_args(argv, needs_data=False, model_family=family.name))
    parsed = parsed.with_settings(**{name: stored[name] for name in AS_TRAINED if name in stored})
    names, checkpoint = [field.name for field in fields(TokenizerConfig)], find_checkpoint(folder, step)
    settings, built_tokenizer = TokenizerConfig(**{name: getattr(parsed.flat, name) for name in names}), None
    if not tokenizer and checkpoint is not None:
        fingerprint = read_manifest(checkpoint.directory)["objects"].get("tokenizer")
        settings, built_tokenizer = find_run_tokenizer(settings, checkpoint.directory, fingerprint)
    parsed = with_base(parsed.with_settings(**{name: getattr(settings, name) for name in names}), folder, step)
    cfg, groups = _start(parsed, layout)
    built = _build(cfg, groups, built_tokenizer)
    checkpointer = Checkpointer(cfg, [built.model], None, None, groups=groups, tokenizer=built.tokenizer)
    if (base := load_base([built.model], cfg, groups)) is not None:
        checkpointer.name_base(base)
    checkpointer.load()
    for transform in cfg.transforms:
        transform.merge(built.model)
    if (text := cfg.model.rope_parameters) is not None:
        length, original = cfg.data.seq_length or 0, parse_rope_parameters(text).original_max_position_embeddings
        if length > original:
            logger.warning(
                f"--rope-parameters: all texts use the rotary frequencies of the trained rows of {length} tokens; "
                f"transformers uses others for texts of up to {original} tokens"
            )
    return built


def _tokenizer_flags(tokenizer: Mapping[str, str] | None, tokenizer_type: object) -> list[str]:
    """Return the flags of another ``tokenizer``; by default of type ``tokenizer_type``, if that has a file."""
    if not tokenizer:
        return []
    default = tokenizer_type if tokenizer_type not in (None, *TOKENIZER_FILES) else "HuggingFaceTokenizer"
    values = {"tokenizer_type": default, **tokenizer}
    return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def _start(cfg: PretrainConfig, layout: Sequence[str]) -> tuple[PretrainConfig, ProcessGroups]:
    if not layout:
        return validate_args(cfg, 1, announce=False), SINGLE_PROCESS
    if cfg.model.num_moe_experts and (cfg.model.tensor_model_parallel_size or 1) > 1:
        cfg = cfg.with_settings(sequence_parallel=True)
    resolved = validate_args(cfg, launched_world_size() or 1, announce=False)
    return resolved, initialize_megatron(resolved)


def _load_hugging_face(folder: str, tool: str, layout: Sequence[str], images: bool) -> TrainedModel:
    """Return the model of a Hugging Face folder on this process's device, in evaluation mode, with settings from its
    config.json. Sequence lengths are the model's maximum positions; with dynamic or longrope scaling, the length up to
    which rotary frequencies are constant. Raises UserError for a family of another tool, or without a tokenizer."""
    readers = [family.name for family in families().values() if images and VisionConfig in family.groups]
    family = _checked_family(load_hf_settings(folder, next(iter(readers), None)), folder, tool)
    cfg = apply_hf_settings(
        parse_args(["--load-hf", folder, *ASKED, *layout], needs_data=False, model_family=family.name)
    )
    if cfg.tokenizer.tokenizer_type is None:
        raise UserError(f"--load {folder}: contains no tokenizer; add its tokenizer.json or vocab.txt")
    longest = cfg.embeddings.max_position_embeddings or cfg.data.seq_length
    if cfg.model.rope_parameters is not None and longest:  # transformers changes the frequencies of longer texts
        longest = min(longest, parse_rope_parameters(cfg.model.rope_parameters).original_max_position_embeddings)
    lengths: dict[str, Any] = {"seq_length": longest, "max_position_embeddings": longest}
    lengths |= {field: getattr(cfg.flat, field) or longest for field in family.lengths[1:]}
    resolved, groups = _start(cfg.with_settings(**lengths), layout)
    built = _build(resolved, groups)
    load_hf_weights(folder, [built.model], None, groups, model_family=family.name)
    return built


def _checked_family(settings: Mapping[str, object], folder: str, tool: str) -> ModelFamily:
    family = stored_family(settings, f"--load {folder}")
    served = {other.tool for other in families().values()}
    if family.tool != tool and tool in served:  # a program of the user takes every family
        raise UserError(f"--load {folder} contains a {family.name!r} model; use {family.tool or 'another program'}")
    return family


def _build(cfg: PretrainConfig, groups: ProcessGroups, tokenizer: Tokenizer | None = None) -> TrainedModel:
    """Build this rank's part of the model of resolved settings on this process's device, and ``tokenizer`` if None."""
    tokenizer = tokenizer or build_tokenizer(cfg.tokenizer)
    provider = task_class(cfg.model_family)(cfg, tokenizer).model_provider
    model = provider(groups.pp.is_first, groups.pp.is_last).to(training_device())
    for transform in cfg.transforms:
        transform.apply(model, groups)
    model.eval()
    return TrainedModel(cfg, tokenizer, model, num_ranks=groups.world.size)
