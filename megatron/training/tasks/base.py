"""Task: all code that is specific to one kind of model. The training loop depends on this interface only.

To train a custom model, subclass :class:`Task`, or pass the same five functions to ``megatron.training.pretrain``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from megatron.core.pipeline_parallel.loss_weights import LossPairs, LossWeights
from megatron.core.timers import Timers
from megatron.training.initialize import training_device

if TYPE_CHECKING:
    from torch import Tensor, nn

    from megatron.core.description.model import ModelDescription
    from megatron.core.groups.process_groups import ProcessGroups
    from megatron.training.config.pretrain_config import PretrainConfig
    from megatron.training.observe.loss_sums import LossSums
from megatron.core.tokenizers.base import Tokenizer
from megatron.training.data.datasets import NumSamples
from megatron.training.data.loader import BatchReader, BatchShard, Shard, build_loader
from megatron.training.hooks.base import Hook
from megatron.training.observe.metrics import PlanFigures


class Task:
    """Model, data, loss and cost of one kind of training. ``cfg`` is resolved; ``tokenizer`` may be None."""

    losses: tuple[str, ...] = ("lm loss",)
    """Names of the losses that :meth:`loss_func` returns, the main loss first."""

    def __init__(self, cfg: PretrainConfig, tokenizer: Tokenizer | None = None) -> None:
        self.cfg = cfg
        self.tokenizer = tokenizer
        self.timers = Timers(
            cfg.logging.timing_log_level, cfg.logging.timing_log_option, cfg.logging.barrier_with_L1_time
        )

    def model_provider(
        self, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
    ) -> nn.Module:
        """Build the model, or one pipeline stage of it, with (or without) the embedding and the output layer.
        ``vp_stage`` is the model chunk of an interleaved pipeline. It is passed only to providers that accept it;
        others may call ``parallel_state.get_virtual_pipeline_model_parallel_rank()``, as GPTModel does."""
        raise NotImplementedError

    def train_valid_test_datasets_provider(self, num_samples: NumSamples) -> tuple[object, object, object]:
        """Return three map-style data sets (``ds[i] -> dict``) or None; the second may be a list of validation sets."""
        raise NotImplementedError

    @cached_property
    def loss_weights(self) -> LossWeights:
        """Weights of :attr:`losses` in the current global batch: loss scale / count over all ranks. The trainer
        rewrites them before each iteration. Models with auxiliary losses need that of the main loss (``MainLoss``)."""
        return LossWeights(self.losses, training_device())

    packs_rows = False
    """Whether it supports --use-varlen-dataset."""

    rows_are_shared = True
    """Whether context-parallel ranks read the same rows, so that only the first rank adds its counts."""

    def shard(self, micro_batch_size: int, groups: ProcessGroups) -> BatchShard:
        """Return which samples of a global batch the loader of this rank gets, in lists of one batch."""
        return Shard(micro_batch_size, groups.dp.rank, groups.dp.size)

    def build_loader(
        self, dataset: Any, sampler: Iterable[list[tuple[int, int]]], groups: ProcessGroups
    ) -> Iterable[dict[str, Tensor]]:
        """Return a loader over the batches of ``sampler``, which uses :meth:`shard`."""
        return build_loader(dataset, sampler, self.cfg.data.num_workers, torch.cuda.is_available())

    def num_batches(self, micro_batches: int) -> int:
        """Return the batches that the loader yields for a global batch of ``micro_batches`` per data-parallel rank."""
        return micro_batches

    def loss_counts(self, batch: dict[str, Tensor]) -> Sequence[Tensor | int]:
        """Return how many tokens or samples of ``batch`` each of :attr:`losses` sums over. ``batch`` is a micro-batch
        as the data loader returns it: full sequences, on the host. Default: the sum of ``loss_mask``."""
        return [batch["loss_mask"].sum()]

    def global_batch(self, reader: BatchReader, number: int, following: int = 0) -> tuple[Iterator[dict], Tensor]:
        """Return an iterator over this rank's next ``number`` micro-batches of training, and the sums of their
        :meth:`loss_counts`, fp64 [losses]. Meanwhile up to ``following`` micro-batches of the next global batch are
        read."""
        return reader.take(number, following)

    def expected_counts(self, counts: Tensor) -> dict[str, Tensor]:
        """Return the counts [losses] by name that :meth:`loss_func` must reach in the first global batch."""
        return dict(zip(self.losses, counts))

    def counted(self, sums: LossSums, counts: Tensor, model: Sequence[nn.Module]) -> Tensor:
        """Return the counts of the global batch: ``counts`` [losses], as they were before the forward pass. Called
        after the gradient reduction, for tasks whose losses are normalized only then."""
        return counts

    def micro_batches(self, data_iterator: Iterator[dict], number: int, size: int) -> dict[str, object]:
        """Return the arguments of a forward-backward function for the next ``number`` micro-batches of ``size``
        samples, including the sequence lengths that pipeline stages must know before they read a batch."""
        return {
            "data_iterator": data_iterator,
            "num_microbatches": number,
            "micro_batch_size": size,
            "seq_length": self.cfg.data.seq_length,
            "decoder_seq_length": self.cfg.flat.decoder_seq_length,
        }

    def get_batch(self, data_iterator: Iterator[dict]) -> dict[str, Tensor]:
        """Return the next micro-batch on this rank's device."""
        raise NotImplementedError

    def loss_func(self, batch: dict[str, Tensor], output: Tensor) -> LossPairs:
        """Return ``{name: (sum of losses, count)}`` of this rank's tokens for all of :attr:`losses`; backward starts
        from the sums times :attr:`loss_weights`. Further names are only logged."""
        raise NotImplementedError

    def forward_step(self, data_iterator: Iterator[dict], model: nn.Module) -> tuple[Tensor, Callable]:
        """Run one forward pass; return the output, and a function that maps it to the result of :meth:`loss_func`."""
        raise NotImplementedError

    def hooks(self) -> Sequence[Hook]:
        """Return training loop hooks that the task needs; they run before all others."""
        return ()

    def description(self) -> ModelDescription | None:
        """Return the model description, the basis of parameter counts, FLOPs and self-checks; None if unknown."""
        return None

    def num_parameters(self) -> int | None:
        """Return the parameter count of the full model, which the build is checked against; None if unknown."""
        description = self._complete_description()
        return None if description is None else description.num_parameters

    def plan_figures(self) -> PlanFigures | None:
        """Return figures of the plan of the global batch that was read last; None if batches are not planned."""
        return None

    def flops_per_sample(self) -> float | None:
        """Return model FLOPs of one training sample, forward and backward, without recomputation; None if unknown."""
        description = self._complete_description()
        return None if description is None else description.flops_per_sample

    def _complete_description(self) -> ModelDescription | None:
        description = self.description()
        return None if description is None or description.unknown else description
