"""A task: all that is specific to one kind of model. The training loop knows nothing else about it.

To train something of your own, subclass :class:`Task`, or pass the same five functions to
``megatron.training.pretrain``.
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
        self.timers = Timers(cfg.timing_log_level, cfg.timing_log_option, cfg.barrier_with_L1_time)

    def model_provider(
        self, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
    ) -> nn.Module:
        """The model, or the stage of it that has (or lacks) the embedding and the output layer.

        ``vp_stage`` is the model chunk of an interleaved pipeline. It is passed to providers that take it; others may
        ask ``parallel_state.get_virtual_pipeline_model_parallel_rank()``, as GPTModel itself does.
        """
        raise NotImplementedError

    def train_valid_test_datasets_provider(self, num_samples: NumSamples) -> tuple[Any, Any, Any]:
        """Three data sets (or None), the second also a list of validation sets. Map-style: ``ds[i] -> dict``."""
        raise NotImplementedError

    def global_batch(self, data_iterator: Iterator[dict], num_microbatches: int) -> Iterator[dict]:
        """What this rank's next ``num_microbatches`` of training are read from; for losses whose weights depend on the
        whole global batch. Collective over data-parallel ranks."""
        return data_iterator

    def micro_batches(self, data_iterator: Iterator[dict], number: int, size: int) -> dict[str, Any]:
        """The next ``number`` micro-batches of ``size`` samples, and the lengths that pipeline stages must know before
        they read them: arguments of a forward-backward function."""
        return {
            "data_iterator": data_iterator, "num_microbatches": number, "micro_batch_size": size,
            "seq_length": self.cfg.seq_length, "decoder_seq_length": self.cfg.decoder_seq_length,
        }  # fmt: skip

    def get_batch(self, data_iterator: Iterator[dict]) -> dict[str, Tensor]:
        """The next micro-batch on this rank's device."""
        raise NotImplementedError

    def loss_func(self, batch: dict[str, Tensor], output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """``(sum of token losses, number of tokens, {name: [sum, count]})``."""
        raise NotImplementedError

    def forward_step(self, data_iterator: Iterator[dict], model: nn.Module) -> tuple[Tensor, Callable]:
        """One forward pass: the output, and a function of the output that gives :meth:`loss_func`'s triple."""
        raise NotImplementedError

    def hooks(self) -> Sequence[Hook]:
        """Observers of the loop that the task needs; they come before all others."""
        return ()

    def description(self) -> ModelDescription | None:
        """The description of the model; parameter counts, FLOPs and self-checks follow from it. None when unknown."""
        return None

    def num_parameters(self) -> int | None:
        """Parameters of the whole model, which the build must add up to; None when unknown."""
        description = self._whole_description()
        return None if description is None else description.num_parameters

    def flops_per_sample(self) -> float | None:
        """Model FLOPs of one training sample, forward and backward, without recomputation; None when unknown."""
        description = self._whole_description()
        return None if description is None else description.flops_per_sample

    def _whole_description(self) -> ModelDescription | None:
        description = self.description()
        return None if description is None or description.unknown else description
