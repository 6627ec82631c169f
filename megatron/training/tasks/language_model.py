"""What the tasks of this package's language models have in common."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.core import parallel_state
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.config.errors import UserError
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.description.model import ModelDescription
from megatron.core.pipeline_parallel.stages import pipeline_stages
from megatron.training.data.batch import to_device
from megatron.training.data.datasets import NumSamples, check_tokenizer_of_data
from megatron.training.initialize import training_device
from megatron.training.model_description import describe_run
from megatron.training.tasks.base import Task


class LanguageModelTask(Task):
    """A model that ``model_description.py`` describes, on tokens."""

    def model_arguments(self, pre_process: bool, post_process: bool, vp_stage: int | None) -> dict[str, Any]:
        """What the constructors of all models take, but the configuration and the specs of layers."""
        cfg = self.cfg
        return {
            "vocab_size": self.vocab_size,
            "max_sequence_length": cfg.max_position_embeddings,
            "pre_process": pre_process,
            "post_process": post_process,
            "share_embeddings_and_output_weights": not cfg.untie_embeddings_and_output_weights,
            "position_embedding_type": cfg.position_embedding_type,
            "rotary_percent": cfg.rotary_percent,
            "rotary_base": cfg.rotary_base,
            "seq_len_interpolation_factor": cfg.rotary_seq_len_interpolation_factor,
            "seed": cfg.seed,
            "make_vocab_size_divisible_by": cfg.make_vocab_size_divisible_by,
            "groups": parallel_state.get_process_groups(),
            "branches": self.branches(vp_stage or 0),
            "vp_stage": vp_stage,
        }

    def branches(self, vp_stage: int) -> range:
        """Branches of this rank's model chunk; unlike the model, the task knows the length of training sequences."""
        cfg, pp = self.cfg, parallel_state.get_process_groups().pp
        stages = pipeline_stages(cfg, self.description().costs)
        return stages[pp.rank + vp_stage * pp.size].branches

    @property
    def vocab_size(self) -> int:
        """The true size, the tokenizer's or a larger --vocab-size; padding is the model's own business."""
        if self.tokenizer is None:
            raise UserError("--tokenizer-type: is required; for token ids without text NullTokenizer with --vocab-size")
        return max(self.tokenizer.vocab_size, self.cfg.vocab_size or 0)

    def description(self) -> ModelDescription:
        """The model of the flags."""
        return describe_run(self.cfg, self.vocab_size)

    def datasets(self, kind: Any, config: Any, num_samples: NumSamples) -> tuple[Any, ...]:
        """Data sets of a ``kind``, blended and split, whose tokenizer is that of the data."""
        check_tokenizer_of_data(config, self.tokenizer)
        return tuple(BlendedMegatronDatasetBuilder(kind, list(num_samples), lambda: True, config).build())

    def loss_func(self, batch: dict[str, Tensor], output: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Masked sum of the token losses ``output`` fp32 [b, s]."""
        mask = batch["loss_mask"].to(output.dtype)
        loss, num_tokens = (output * mask).sum(), mask.sum()
        return loss, num_tokens, {"lm loss": torch.stack([loss.detach().double(), num_tokens.double()])}

    def random_sample(self, generator: np.random.Generator) -> dict[str, Any]:
        """A sample of random tokens in the form of the data set's, of which some count in the loss."""
        raise NotImplementedError

    def random_length(self, generator: np.random.Generator, longest: int) -> int:
        """Tokens of a text before its padding; as in the data sets, --short-seq-prob of them are shorter."""
        if generator.random() >= self.cfg.short_seq_prob:
            return longest
        return int(generator.integers(longest // 4, longest + 1))


def on_device(batch: dict[str, Tensor], documents: PackedSeqParams | None = None) -> dict[str, Any]:
    """A batch and the bounds of its ``documents`` on this rank's device."""
    device = training_device()
    return {**to_device(batch, device), "documents": documents and documents.on(device)}


class RandomSamples:
    """``length`` random samples of a task, every one a function of ``first`` + its index alone."""

    def __init__(self, task: LanguageModelTask, length: int, first: int = 1000) -> None:
        self.task, self.length, self.first = task, length, first

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.task.random_sample(np.random.default_rng(self.first + index))


MOCK_SAMPLES = 1024
"""Samples of --mock-data where nobody says how many: in a full validation."""


def mock_data(task: LanguageModelTask, num_samples: Sequence[int | None]) -> tuple[RandomSamples, ...]:
    """What --mock-data trains, validates and tests on."""
    counts = [MOCK_SAMPLES if count is None else count for count in num_samples]
    return tuple(RandomSamples(task, count, split << 40) for split, count in enumerate(counts))


TASKS = {
    "gpt": ("megatron.training.tasks.gpt", "GPTTask"),
    "bert": ("megatron.training.tasks.bert", "BertTask"),
    "t5": ("megatron.training.tasks.t5", "T5Task"),
}
"""By ``cfg.model_family``."""


def task_class(model_family: str) -> type[LanguageModelTask]:
    """The task of one program."""
    module, name = TASKS[model_family]
    return getattr(importlib.import_module(module), name)
