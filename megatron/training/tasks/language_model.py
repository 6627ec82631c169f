"""Common code of the language model tasks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib import import_module
from typing import Any

import numpy as np
from torch import Tensor

from megatron.core import parallel_state
from megatron.core.config.errors import UserError
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.description.model import ModelDescription
from megatron.core.models.common.settings import LanguageModelSettings
from megatron.core.models.registry import get_family
from megatron.core.pipeline_parallel.loss_weights import LossPairs
from megatron.core.pipeline_parallel.stages import pipeline_stages
from megatron.training.data.batches import Batches, EqualRows
from megatron.training.data.datasets import NumSamples, check_data_tokenizer, select_data_set
from megatron.training.tasks.base import Task


class LanguageModelTask(Task):
    """Task for token models that their family describes."""

    sequence_keys: Collection[str] = ()
    """Names of batch tensors [b, s, ...] besides the family's, which context-parallel ranks split along dim 1."""
    whole_keys: Collection[str] = ()
    """Names of tensors of two or more dims, besides the family's, that every context-parallel rank needs in full."""

    def make_batches(self) -> Batches:
        return EqualRows(self.cfg, self.sequence_keys, self.whole_keys)

    def model_settings(self, pre_process: bool, post_process: bool, vp_stage: int | None) -> LanguageModelSettings:
        """Return the settings that all models share: vocabulary and positions, rotary settings, seed, process groups,
        and this stage's residual branches. ``vp_stage`` None means chunk 0."""
        cfg = self.cfg
        return LanguageModelSettings(
            vocab_size=self.vocab_size,
            max_sequence_length=cfg.embeddings.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=not cfg.embeddings.untie_embeddings_and_output_weights,
            position_embedding_type=cfg.embeddings.position_embedding_type,
            rotary_percent=cfg.embeddings.rotary_percent,
            rotary_base=cfg.embeddings.rotary_base,
            rope_scaling=cfg.rope_scaling.use_rope_scaling,
            rope_scaling_factor=cfg.rope_scaling.rope_scaling_factor,
            seq_len_interpolation_factor=cfg.embeddings.rotary_seq_len_interpolation_factor,
            seed=cfg.model.seed,
            make_vocab_size_divisible_by=cfg.embeddings.make_vocab_size_divisible_by,
            groups=parallel_state.get_process_groups(),
            branches=self.branches(vp_stage or 0),
            vp_stage=vp_stage,
        )

    def branches(self, vp_stage: int) -> range:
        """Return the range of residual branches in this rank's model chunk. Unlike the model, the task knows the
        training sequence length, on which the balance of stages depends."""
        cfg, pp = self.cfg, parallel_state.get_process_groups().pp
        stages = pipeline_stages(cfg.model, self.description().costs)
        return stages[pp.rank + vp_stage * pp.size].branches

    @property
    def vocab_size(self) -> int:
        """Unpadded size: the tokenizer's or a larger --vocab-size. Raises UserError without a tokenizer."""
        if self.tokenizer is None:
            raise UserError("--tokenizer-type: is required; for token ids without text NullTokenizer with --vocab-size")
        return max(self.tokenizer.vocab_size, self.cfg.tokenizer.vocab_size or 0)

    def description(self) -> ModelDescription:
        return self.cfg.describe(self.vocab_size)

    def train_valid_test_datasets_provider(self, num_samples: NumSamples) -> tuple[Any, ...]:
        """Return the family's data sets (blended, split) from the data flags; random samples with --mock-data."""
        if self.cfg.data.mock_data:
            return mock_data(self, num_samples)
        return self.datasets(*select_data_set(self.cfg, self.tokenizer), num_samples)

    def datasets(
        self, kind: type[MegatronDataset], config: BlendedMegatronDatasetConfig, num_samples: NumSamples
    ) -> tuple[Any, ...]:
        """Return data sets of class ``kind``, blended and split; raises for data of another tokenizer."""
        check_data_tokenizer(config, self.tokenizer)
        return tuple(BlendedMegatronDatasetBuilder(kind, list(num_samples), lambda: True, config).build())

    def loss_func(self, batch: dict[str, Tensor], output: Any) -> LossPairs:
        """Return the masked sum of the token losses ``output`` (fp32 [b, s]), and the token count: of this rank's
        tokens, on the device, without a wait."""
        mask = batch["loss_mask"].to(output.dtype)
        return {"lm loss": ((output * mask).sum(), mask.sum())}

    def random_sample(self, generator: np.random.Generator) -> dict[str, object]:
        """Return a sample of random tokens in the format of the data set; a random subset contributes to the loss."""
        raise NotImplementedError

    def random_length(self, generator: np.random.Generator, max_length: int) -> int:
        """Return a random text length without padding; as in the data sets, a --short-seq-prob fraction is shorter."""
        if generator.random() >= self.cfg.masked_data.short_seq_prob:
            return max_length
        return int(generator.integers(max_length // 4, max_length + 1))


class RandomSamples:
    """Map-style data set of ``length`` random samples of a task; sample i depends only on ``first`` + i."""

    def __init__(self, task: LanguageModelTask, length: int, first: int = 1000) -> None:
        self.task, self.length, self.first = task, length, first

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, object]:
        return self.task.random_sample(np.random.default_rng(self.first + index))

    def attention_costs(self, rows: np.ndarray) -> np.ndarray:
        """Return equal attention work of all rows."""
        return np.zeros(len(rows), dtype=np.int64)

    def sample_lengths(self, samples: np.ndarray) -> np.ndarray:
        """Return the lengths of samples of different lengths."""
        return np.array([len(self[index]["tokens"]) for index in samples.tolist()])  # type: ignore[arg-type]


MOCK_SAMPLES = 1024
"""Number of --mock-data samples if the count is undefined (full validation)."""


def mock_data(task: LanguageModelTask, num_samples: Sequence[int | None]) -> tuple[RandomSamples, ...]:
    """Return the training, validation and test sets of --mock-data."""
    counts = [MOCK_SAMPLES if count is None else count for count in num_samples]
    return tuple(RandomSamples(task, count, split << 40) for split, count in enumerate(counts))


def task_class(model_family: str) -> type[LanguageModelTask]:
    """Import and return the task class of a model family."""
    module, _, name = get_family(model_family).task.partition(":")
    return getattr(import_module(module), name)
