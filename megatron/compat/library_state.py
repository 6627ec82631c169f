"""Small objects that programs ask the library for: a buffer of reusable tensors, an order of micro-batches, an iterator
that can be read again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core import parallel_state


class GlobalMemoryBuffer:
    """Tensors by name that callers reuse: the memory of a name and dtype grows to its largest request."""

    def __init__(self) -> None:
        self.buffer: dict[tuple[str, torch.dtype], Tensor] = {}

    def get_tensor(
        self, tensor_shape: Sequence[int], dtype: torch.dtype, name: str, mem_alloc_context: Any = None
    ) -> Tensor:
        """Return a tensor with unspecified values, valid until the next request of this name and dtype. It is on the
        current GPU if there is one. ``mem_alloc_context`` makes the context of allocations."""
        size, key = math.prod(tensor_shape), (name, dtype)
        if key not in self.buffer or self.buffer[key].numel() < size:
            context: AbstractContextManager[object] = mem_alloc_context() if mem_alloc_context else nullcontext()
            device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
            with context:
                self.buffer[key] = torch.empty(size, dtype=dtype, device=device)
        return self.buffer[key][:size].view(*tensor_shape)


_memory_buffer = GlobalMemoryBuffer()


def get_global_memory_buffer() -> GlobalMemoryBuffer:
    """Return the buffer of this process."""
    return _memory_buffer


def get_schedule_table(
    num_microbatches: int, num_model_chunks: int, microbatch_group_size_per_vp_stage: int
) -> list[tuple[int, int]]:
    """Return the order of an interleaved schedule as (micro-batch, chunk): each group of micro-batches passes all
    chunks before the next group starts."""
    size = microbatch_group_size_per_vp_stage
    groups = (range(first, min(first + size, num_microbatches)) for first in range(0, num_microbatches, size))
    return [(microbatch, chunk) for group in groups for chunk in range(num_model_chunks) for microbatch in group]


def calculate_logits_max(vocab_parallel_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits in fp32 and the maximum of each row over the local vocabulary entries. No collective."""
    logits = vocab_parallel_logits.float()
    return logits, logits.amax(dim=-1)


def ensure_metadata_has_dp_cp_group(metadata: dict[str, Any] | None) -> dict[str, Any]:
    """Return ``metadata`` (None: a new dict) with the data- and context-parallel group as ``dp_cp_group``, unless it
    has one. Changes the dict in place."""
    metadata = {} if metadata is None else metadata
    if "dp_cp_group" not in metadata:
        group: dist.ProcessGroup = parallel_state.get_data_parallel_group(with_context_parallel=True)
        metadata["dp_cp_group"] = group
    return metadata


class RerunDataIterator:
    """Iterator over ``iterable`` that can return the batches since the last :meth:`advance` again."""

    def __init__(self, iterable: Iterator[Any]) -> None:
        self.iterable = iterable
        self.saved_microbatches: list[Any] = []
        self.replaying, self.replay_pos = False, 0

    def __iter__(self) -> RerunDataIterator:
        return self

    def __next__(self) -> Any:
        if self.replaying:
            self.replay_pos += 1
            return self.saved_microbatches[self.replay_pos - 1]
        batch = next(self.iterable)
        self.saved_microbatches.append(dict(batch) if isinstance(batch, dict) else batch)
        return batch

    def rewind(self) -> None:
        """Return the saved batches again, from the first one."""
        self.replaying, self.replay_pos = True, 0

    def advance(self) -> None:
        """Forget the saved batches and continue with new ones."""
        self.saved_microbatches, self.replaying = [], False

    def state_dict(self) -> dict[str, Any]:
        """Return the saved batches and the position among them."""
        return {name: getattr(self, name) for name in ("saved_microbatches", "replaying", "replay_pos")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a position that :meth:`state_dict` returned."""
        vars(self).update(state_dict)
