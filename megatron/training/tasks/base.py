"""Task: all code that is specific to one kind of model. The training loop depends on this interface only.

To train a custom model, subclass :class:`Task`, or pass the same five functions to ``megatron.training.pretrain``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from megatron.core.pipeline_parallel.loss_weights import LossPairs, LossWeights
from megatron.core.timers import Timers
from megatron.training.initialize import training_device

if TYPE_CHECKING:
    from torch import Tensor, nn

    from megatron.core.description.model import ModelDescription
    from megatron.training.config.pretrain_config import PretrainConfig
from megatron.core.tokenizers.base import Tokenizer
from megatron.training.data.batches import Batches
from megatron.training.data.datasets import NumSamples
from megatron.training.hooks.base import Hook


class Task:
    """Model, data, loss and cost of one kind of training. ``cfg`` is resolved; ``tokenizer`` may be None."""

    losses: tuple[str, ...] = ("lm loss",)
    """Names of the losses that :meth:`loss_func` returns, the main loss first."""
    base_name: str | None = None
    """Name of the model without its transforms (LoRA) among the frozen models of :meth:`loss_func`; None: not used."""
    stores_reference = False
    """Whether preference data must have the token losses of the reference model before training."""

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
        rewrites them before each iteration. Auxiliary losses use the weight of the main loss (``MainLoss``)."""
        return LossWeights(self.losses, training_device())

    def make_batches(self) -> Batches:
        """Return what a batch of this task is."""
        return Batches(self.cfg)

    @cached_property
    def batches(self) -> Batches:
        """Samples, counts, micro-batches and local parts of batches. Made when process groups exist."""
        return self.make_batches()

    def get_batch(self, data_iterator: Iterator[dict]) -> dict[str, Any]:
        """Return this rank's part of the next micro-batch, on its device."""
        return self.batches.local(next(data_iterator))

    def connect(self, model: Sequence[nn.Module], frozen: Mapping[str, Sequence[nn.Module]]) -> None:
        """Connect this rank's chunks of the model with the same chunks of the frozen models, by name."""

    def loss_func(self, batch: dict[str, Tensor], output: Tensor) -> LossPairs:
        """Return ``{name: (sum of losses, count)}`` of this rank's tokens for all of :attr:`losses`; backward starts
        from the sums times :attr:`loss_weights`. Further names are only logged. With frozen models
        (``ModelFamily.companions``) ``output`` is a ``PairedOutput``."""
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

    def flops_per_sample(self) -> float | None:
        """Return model FLOPs of one training sample, forward and backward, without recomputation; None if unknown."""
        description = self._complete_description()
        return None if description is None else description.flops_per_sample

    def _complete_description(self) -> ModelDescription | None:
        description = self.description()
        return None if description is None or description.unknown else description
