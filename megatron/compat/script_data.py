"""Data sets and micro-batches of entry scripts.

Megatron-LM's scripts read data on the first tensor-parallel rank of the first and last pipeline stages only, and
broadcast it. Our loop reads it on every rank: dropout masks, document boundaries and the tokens that count in the loss
are then known on all ranks. Custom data sets of the script that exist on some ranks only are
broadcast, a global batch at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core import parallel_state
from megatron.core.config.errors import UserError
from megatron.core.datasets.blended_megatron_dataset_builder import built_on_every_rank
from megatron.training.data.datasets import NumSamples
from megatron.training.initialize import training_device


class AbsentData:
    """Stands for a data set of ``length`` samples that another rank holds; the samples are empty."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, object]:
        return {"loss_mask": np.zeros(1, np.float32)}

    def __iter__(self) -> Iterator[dict[str, object]]:
        """Endless, as data sets of ``--dataloader-type external`` are."""
        return itertools.repeat({})


class HostTensor(Tensor):
    """A batch tensor whose ``cuda()`` leaves it on the CPU, for scripts that call it in a run without GPUs."""

    # results of operations are plain tensors
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def cuda(self, *args: object, **kwargs: object) -> Tensor:  # type: ignore[override]
        return self.as_subclass(Tensor)


class ScriptData:
    """The data sets of one run of a script."""

    def __init__(self) -> None:
        self.source: int | None = None
        """Place in the model-parallel group of the rank that holds the data; None: every rank holds it."""

    def build(self, provider: Callable, num_samples: NumSamples) -> tuple[object, ...]:
        """Return the data sets of ``provider``, built on every rank where they use our builder. If only some ranks of a
        model replica hold them, the first one with the most becomes :attr:`source`, and the others get stand-ins of
        equal length. Collective over the replica. Raises UserError: no rank of a model replica holds all the data sets
        that its other ranks hold."""
        with built_on_every_rank():
            datasets = tuple(provider(list(num_samples)))
        group = parallel_state.get_process_groups().tp_pp
        if group.size == 1:
            return datasets
        by_rank: list[Any] = [None] * group.size
        dist.all_gather_object(by_rank, [_lengths(dataset) for dataset in datasets], group=group.handle)
        counts = [sum(dataset is not None for dataset in lengths) for lengths in by_rank]
        if min(counts) == max(counts):
            return datasets
        self.source = counts.index(max(counts))
        reference = by_rank[self.source]
        for rank, lengths in enumerate(by_rank):
            if any(length is not None and dataset is None for length, dataset in zip(lengths, reference)):
                raise UserError(
                    f"data sets: rank {group.ranks[rank]} holds one that rank {group.ranks[self.source]} does not; "
                    "return all of them on one rank of each tensor-parallel group, or on every rank"
                )
        return tuple(_stand_in(dataset, length) for dataset, length in zip(datasets, reference))

    def share(self, batches: Iterator[object], number: int) -> Iterator[Any]:
        """Return the next ``number`` micro-batches, broadcast from :attr:`source` to the other ranks of the model
        replica (collective; may be fewer at the end of the data). Without a source returns ``batches`` itself."""
        if self.source is None:
            return batches
        group = parallel_state.get_process_groups().tp_pp
        drawn = [list(itertools.islice(batches, number))]
        dist.broadcast_object_list(drawn, group.ranks[self.source], group=group.handle, device=training_device())
        return iter(drawn[0])


def _lengths(dataset: object) -> Any:
    """None for no data, 0 for a data set without a length, a list of lengths for a list."""
    if isinstance(dataset, list | tuple):
        return [_lengths(part) for part in dataset]
    return None if dataset is None else len(dataset) if hasattr(dataset, "__len__") else 0


def _stand_in(dataset: object, lengths: Any) -> Any:
    if dataset is not None or lengths is None:
        return dataset
    return [_stand_in(None, length) for length in lengths] if isinstance(lengths, list) else AbsentData(lengths)


class ScriptBatch(dict[str, Any]):
    """A micro-batch with the tensors that only data sets of earlier releases returned."""

    def __missing__(self, name: str) -> Any:
        """``enc_dec_mask`` of T5, int64 [b, s, e]: 1 where a decoder's token sees an encoder's."""
        if name != "enc_dec_mask" or "enc_mask" not in self:
            raise KeyError(name)
        return self["dec_mask"][:, :, None] * self["enc_mask"][:, None]


class MicroBatches(Iterator[object]):
    """Micro-batches that every rank of a model replica reads, so that scripts need not broadcast. ``on_read`` gets it
    before the script does. On a CPU their tensors are :class:`HostTensor`."""

    def __init__(self, batches: Iterator[object], on_read: Callable[[object], None]) -> None:
        self.batches, self.on_read = batches, on_read

    def __next__(self) -> Any:
        """Return the next micro-batch and pass it to ``on_read`` first. Dictionaries become a ScriptBatch, whose CPU
        tensors ignore ``.cuda()`` if this process trains on the CPU; other objects are returned as they are."""
        batch = next(self.batches)
        self.on_read(batch)
        if not isinstance(batch, Mapping):
            return batch
        if training_device().type == "cpu":
            batch = {name: x.as_subclass(HostTensor) if type(x) is Tensor else x for name, x in batch.items()}
        return ScriptBatch(batch)
