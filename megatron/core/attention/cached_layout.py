"""Token layout of generation: a row of new tokens of several sequences, whose earlier keys are in a paged cache.

A step has one chunk of consecutive tokens per sequence, concatenated to [n, 1, h]. Each layer writes the keys and
values (or latents) of the new tokens to the sequence's pages and attends to the cached and the new ones. Layers see
this as any other layout: ``positions``, ``all_keys`` and ``attend``.

Legend: n rows (new tokens of all sequences, then padding), t keys of all sequences, g key/value groups, d head dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.attention.kernels.base import SIXTEEN_BIT, FlashKernel, Kernel
from megatron.core.attention.masks import Mask
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.sink import with_sink
from megatron.core.attention.tiles import Visibility, full_tile
from megatron.core.attention.token_layout import Core, TokenLayout
from megatron.core.groups import collective_names

CACHED = frozenset({"cached"})
"""Declaration of a layer that supports this layout (``transformer/context_parallel_support.py``)."""


class Chunk(NamedTuple):
    """New tokens of one sequence in a step."""

    start: int
    """Position of the first new token: the number of cached tokens."""
    num_new: int
    pages: tuple[int, ...]
    """Pages of the sequence, for at least ``start + num_new`` tokens."""

    @property
    def stop(self) -> int:
        return self.start + self.num_new


class PagedCache:
    """Cached tensors of all sequences, [pages, page size, ...] per layer, allocated when a layer first stores. Page 0
    takes the writes of padding rows."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self._tensors: dict[int, tuple[Tensor, ...]] = {}

    def tensors(self, layer: int, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the tensors of ``layer`` whose entries have the shapes and dtypes of ``like``, each [n, 1, ...]."""
        found = self._tensors.get(layer)
        if found is None:
            # zeros: masked positions of an unused page must not be NaN
            found = tuple(x.new_zeros((self.num_pages, self.page_size, *x.shape[2:])) for x in like)
            self._tensors[layer] = found
        return found

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers that have stored."""
        tensors = [x for each in self._tensors.values() for x in each]
        return sum(x[0, 0].numel() * x.element_size() for x in tensors)


class _Indices(NamedTuple):
    """Integers of a step, on the device of the model."""

    positions: Tensor
    """Position of each row, int64 [n]; 0 for padding."""
    slots: Tensor
    """Index of each row in the flattened pages, int64 [n]; 0 for padding."""
    keys: Tensor
    """Index of each key in the flattened pages, int64 [t], sequence after sequence."""
    output_rows: Tensor
    """Rows whose logits are computed, int64."""


@dataclass(frozen=True, eq=False)
class CachedLayout(TokenLayout):
    """New tokens of several sequences on this rank. Build it by :meth:`of_chunks`."""

    cache: PagedCache = field(default_factory=lambda: PagedCache(1, 1))
    chunks: tuple[Chunk, ...] = ()
    max_length: int = 0
    """Maximum length of a sequence."""
    batch_invariant: bool = False
    """Whether attention of a token must not depend on the other tokens of the step."""
    indices: _Indices | None = None

    @classmethod
    def of_chunks(
        cls,
        base: TokenLayout,
        cache: PagedCache,
        chunks: Sequence[Chunk],
        output_rows: Sequence[int],
        *,
        device: torch.device,
        max_length: int,
        row_multiple: int = 1,
        batch_invariant: bool = False,
    ) -> CachedLayout:
        """Build the layout of a step on the ranks of ``base``. Rows are padded to a multiple of
        ``row_multiple`` and the number of ranks that split the residual stream."""
        rows = sum(chunk.num_new for chunk in chunks)
        padding = [0] * (-rows % math.lcm(row_multiple, base.stream.size))
        size = cache.page_size
        positions = [position for chunk in chunks for position in range(chunk.start, chunk.stop)]
        of_keys = [
            [chunk.pages[place // size] * size + place % size for place in range(chunk.stop)] for chunk in chunks
        ]
        slots = [slot for chunk, found in zip(chunks, of_keys) for slot in found[chunk.start :]]
        keys = [slot for found in of_keys for slot in found]
        lists = positions + padding, slots + padding, keys, list(output_rows)
        # one copy to the device for all four
        flat = torch.tensor([x for each in lists for x in each]).to(device, non_blocking=True)
        inherited = {each.name: getattr(base, each.name) for each in fields(TokenLayout) if each.init}
        return cls(
            **inherited,
            cache=cache,
            chunks=tuple(chunks),
            max_length=max_length,
            batch_invariant=batch_invariant,
            indices=_Indices(*flat.split([len(each) for each in lists])),
        )

    @property
    def _at(self) -> _Indices:
        assert self.indices is not None, "built by CachedLayout.of_chunks"
        return self.indices

    @property
    def num_rows(self) -> int:
        """Rows of the step, padding included."""
        return len(self._at.positions)

    @property
    def table_length(self) -> int | None:
        return self.max_length

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Return the position of each row in its sequence, int64 [n]."""
        assert length == self.num_rows
        return self._at.positions

    def output_rows(self, x: Tensor) -> Tensor:
        """Return the rows of hidden states [n, 1, h] whose logits are needed. Under sequence parallelism all rows:
        :meth:`requested_logits` selects after the output layer has gathered them."""
        return x if self.stream.size > 1 else x.index_select(0, self._at.output_rows)

    def requested_logits(self, logits: Tensor) -> Tensor:
        """Return the logits [rows, v] of the requested rows from the model's output [1, ., v]."""
        return logits[0] if self.stream.size == 1 else logits[0].index_select(0, self._at.output_rows)

    def all_keys(self, layer: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Write ``tensors``, each [n, 1, ...] of the new tokens, to the pages of ``layer``; return the cached and the
        new entries [t, 1, ...] of all sequences, one sequence after another. All-gathers tensors that hold this rank's
        part of the residual stream."""
        self._write(layer, tensors)
        pools = self.cache.tensors(layer, tensors)
        return tuple(pool.flatten(0, 1).index_select(0, self._at.keys).unsqueeze(1) for pool in pools)

    def _write(self, layer: int, tensors: Sequence[Tensor]) -> None:
        for pool, x in zip(self.cache.tensors(layer, tensors), tensors, strict=True):
            if len(x) < self.num_rows:
                part, x = x.contiguous(), x.new_empty((self.num_rows, *x.shape[1:]))
                collective_names.all_gather(x, part, group=self.stream.handle)
            pool.flatten(0, 1).index_copy_(0, self._at.slots, x[:, 0].to(pool.dtype))

    def attend(self, core: Core, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
        """Map query [n, 1, a, d] to [n, 1, a, e]. Key and value have the new tokens [n, 1, g, .], or all tokens
        [t, 1, g, .] if ``core`` does not cache them (:attr:`Core.caches_keys`)."""
        if core.caches_keys:
            key, value = self.all_keys(core.layer_number, key, value)
        flash = isinstance(core.kernel, FlashKernel) and query.is_cuda and query.dtype in SIXTEEN_BIT
        if flash and mask.sink is None and not self.batch_invariant and key.shape[-1] == value.shape[-1]:
            return self._packed(core.kernel, query, key, value, mask)
        outputs = [self._sequence(core, *each, mask) for each in self._sequences(query, key, value)]
        rows = sum(map(len, outputs))
        if rows < len(query):
            outputs.append(outputs[0].new_zeros((len(query) - rows, *outputs[0].shape[1:])))
        return torch.cat(outputs)

    def _sequences(self, query: Tensor, key: Tensor, value: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return query, key and value of each sequence; if batch-invariant, of each query with the keys up to it, so
        that shapes and the order of sums depend on the position only."""
        found = []
        row = first = 0
        for chunk in self.chunks:
            step = 1 if self.batch_invariant else chunk.num_new
            for done in range(step, chunk.num_new + 1, step):
                keys = slice(first, first + chunk.start + done)
                each = query[row + done - step : row + done], key[keys], value[keys]
                # equal alignment of equal values: CPU kernels may sum views in another order
                found.append(tuple(x.clone() for x in each) if self.batch_invariant else each)
            row, first = row + chunk.num_new, first + chunk.stop
        return found  # type: ignore[return-value]

    def _sequence(self, core: Core, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
        """Attend the last tokens of one sequence to all its keys."""
        if mask.sink is None:
            return core.form(self)(query, key, value, Mask(mask.visibility))
        tile = full_tile(len(query), len(key), mask.visibility)
        query_basd, key_bgtd, value_bgtd = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out, lse = core.kernel.forward(query_basd, key_bgtd, value_bgtd, tile)
        return with_sink(out.permute(2, 0, 1, 3), lse.permute(2, 0, 1), mask.sink, query.dtype)[0]

    def _packed(self, kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
        """Attend in one variable-length call of a flash kernel, whose bands end at the last query and key."""
        assert isinstance(kernel, FlashKernel)
        rows = list(accumulate((chunk.num_new for chunk in self.chunks), initial=0))
        bounds = rows, list(accumulate((chunk.stop for chunk in self.chunks), initial=0))
        of_queries, of_keys = (torch.tensor(each, dtype=torch.int32, device=query.device) for each in bounds)
        documents = PackedSeqParams(
            cu_seqlens_q=of_queries,
            cu_seqlens_kv=of_keys,
            max_seqlen_q=max(chunk.num_new for chunk in self.chunks),
            max_seqlen_kv=max(chunk.stop for chunk in self.chunks),
        )
        out = query.new_zeros((*query.shape[:3], value.shape[-1]))
        out[: rows[-1]] = FlashKernel._documents(
            kernel, query[: rows[-1]], key, value, Mask(Visibility(*mask.visibility), documents)
        )
        return out
