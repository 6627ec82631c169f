"""Task: all code that is specific to one kind of model. The training loop depends on this interface only.

To train a custom model, subclass :class:`Task`, or pass the same five functions to ``megatron.training.pretrain``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from megatron.core.timers import Timers

if TYPE_CHECKING:
    from torch import Tensor, nn

    from megatron.core.description.model import ModelDescription
    from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.datasets import NumSamples
from megatron.training.hooks.base import Hook


class Task:
    """Model, data, loss and cost of one kind of training. ``cfg`` is resolved; ``tokenizer`` may be None."""

    def __init__(self, cfg: PretrainConfig, tokenizer: Any = None) -> None:
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

    def train_valid_test_datasets_provider(self, num_samples: NumSamples) -> tuple[Any, Any, Any]:
        """Return three map-style data sets (``ds[i] -> dict``) or None; the second may be a list of validation sets."""
        raise NotImplementedError

    def global_batch(self, data_iterator: Iterator[dict], num_microbatches: int) -> Iterator[dict]:
        """Return an iterator over this rank's next ``num_microbatches`` of training, for losses whose weights depend on
        the full global batch. May be collective over data-parallel ranks. The default returns ``data_iterator``
        itself, which then yields more batches than these."""
        return data_iterator

    def micro_batches(self, data_iterator: Iterator[dict], number: int, size: int) -> dict[str, Any]:
        """Return the arguments of a forward-backward function for the next ``number`` micro-batches of ``size``
        samples, including the sequence lengths that pipeline stages must know before they read a batch."""
        return {
            "data_iterator": data_iterator, "num_microbatches": number, "micro_batch_size": size,
            "seq_length": self.cfg.data.seq_length, "decoder_seq_length": self.cfg.flat.decoder_seq_length,
        }  # fmt: skip

    def get_batch(self, data_iterator: Iterator[dict]) -> dict[str, Tensor]:
        """Return the next micro-batch on this rank's device."""
        raise NotImplementedError

    def loss_func(self, batch: dict[str, Tensor], output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return ``(sum of token losses, number of tokens, {name: [sum, count]})`` of this rank's tokens. The training
        loop reduces them over ranks."""
        raise NotImplementedError

    def forward_step(self, data_iterator: Iterator[dict], model: nn.Module) -> tuple[Tensor, Callable]:
        """Run one forward pass; return the output, and a function that maps it to the triple of :meth:`loss_func`."""
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
