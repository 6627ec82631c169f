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
from megatron.core.attention.tiles import full_tile
from megatron.core.attention.token_layout import Core, TokenLayout
from megatron.core.fusions.batch_invariant_attention import Scores, Span, batch_invariant_attention
from megatron.core.fusions.dispatch import kernels_serve
from megatron.core.fusions.paged_attention import PagedRows, paged_attention
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


def _kernel_serves(query: Tensor) -> bool:
    return query.is_cuda and kernels_serve(query.dtype)


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
    sequences: Tensor
    """Sequence of each row, int64 [n]; 0 for padding."""
    tables: Tensor
    """Pages of each sequence, int64 [sequences, longest]; 0 after the last one."""
    output_rows: Tensor
    """Rows whose logits are computed, int64."""

    def with_tables(self, num_sequences: int) -> _Indices:
        """Return a copy whose flat ``tables`` are one row per sequence."""
        return self._replace(tables=self.tables.view(num_sequences, -1))


@dataclass(frozen=True, eq=False)
class CachedLayout(TokenLayout):
    """New tokens of several sequences on this rank. Build it by :meth:`of_chunks`."""

    cache: PagedCache = field(default_factory=lambda: PagedCache(1, 1))
    chunks: tuple[Chunk, ...] = ()
    max_length: int = 0
    """Maximum length of a sequence."""
    batch_invariant: bool = False
    """Whether attention adds in the order of the trainer with ``batch_invariant_mode``."""
    indices: _Indices | None = None
    _slots_of_keys: dict[int, Tensor] = field(default_factory=dict, repr=False)
    """Cached results of :meth:`_key_slots`; shared by copies."""

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
        slots = [
            chunk.pages[place // size] * size + place % size
            for chunk in chunks
            for place in range(chunk.start, chunk.stop)
        ]
        sequences = [index for index, chunk in enumerate(chunks) for _ in range(chunk.num_new)]
        longest = max(len(chunk.pages) for chunk in chunks)
        tables = [page for chunk in chunks for page in (*chunk.pages, *[0] * (longest - len(chunk.pages)))]
        lists = positions + padding, slots + padding, sequences + padding, tables, list(output_rows)
        # one copy to the device for all
        flat = torch.tensor([x for each in lists for x in each]).to(device, non_blocking=True)
        inherited = {each.name: getattr(base, each.name) for each in fields(TokenLayout) if each.init}
        return cls(
            **inherited,
            cache=cache,
            chunks=tuple(chunks),
            max_length=max_length,
            batch_invariant=batch_invariant,
            indices=_Indices(*flat.split([len(each) for each in lists])).with_tables(len(chunks)),
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
        return self._read(layer, tensors)

    def _read(self, layer: int, like: Sequence[Tensor], skip: int = 0) -> tuple[Tensor, ...]:
        """Return the entries of all sequences after the first ``skip``."""
        at, pools = self._key_slots(skip), self.cache.tensors(layer, like)
        return tuple(pool.flatten(0, 1).index_select(0, at).unsqueeze(1) for pool in pools)

    def _key_slots(self, skip: int) -> Tensor:
        """Return the index in the flattened pages of each key of the sequences after the first ``skip``, int64 [t];
        computed once for all layers."""
        if skip not in self._slots_of_keys:
            size, tables = self.cache.page_size, self._at.tables
            slots = tables.unsqueeze(-1) * size + torch.arange(size, device=tables.device)
            found = [each.flatten()[: chunk.stop] for each, chunk in zip(slots[skip:], self.chunks[skip:])]
            self._slots_of_keys[skip] = torch.cat(found)
        return self._slots_of_keys[skip]

    def _write(self, layer: int, tensors: Sequence[Tensor]) -> None:
        for pool, x in zip(self.cache.tensors(layer, tensors), tensors, strict=True):
            if len(x) < self.num_rows:
                part, x = x.contiguous(), x.new_empty((self.num_rows, *x.shape[1:]))
                collective_names.all_gather(x, part, group=self.stream.handle)
            pool.flatten(0, 1).index_copy_(0, self._at.slots, x[:, 0].to(pool.dtype))

    def attend(self, core: Core, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
        """Map query [n, 1, a, d] to [n, 1, a, e]. Key and value have the new tokens [n, 1, g, .], or all tokens
        [t, 1, g, .] if ``core`` does not cache them (:attr:`Core.caches_keys`).

        On GPUs, chunks of one token at the front read the pages directly (``fusions/paged_attention.py``). Other chunks
        attend to gathered copies of their keys."""
        if self.batch_invariant:
            return self._batch_invariant(core, query, key, value, mask)
        paged = self._num_paged(query) if core.caches_keys else 0
        outputs = []
        if core.caches_keys:
            self._write(core.layer_number, (key, value))
        if paged:
            outputs.append(self._from_pages(core, query[:paged], (key, value), mask))
        if paged < self._num_new:
            if core.caches_keys:
                key, value = self._read(core.layer_number, (key, value), skip=paged)
            outputs.append(self._gathered(core, query[paged : self._num_new], key, value, mask, self.chunks[paged:]))
        if self._num_new < len(query):
            outputs.append(outputs[0].new_zeros((len(query) - self._num_new, *outputs[0].shape[1:])))
        return torch.cat(outputs)

    @property
    def _num_new(self) -> int:
        return sum(chunk.num_new for chunk in self.chunks)

    def _num_paged(self, query: Tensor) -> int:
        """Return how many leading rows read the pages directly."""
        if not _kernel_serves(query):
            return 0
        return next((index for index, chunk in enumerate(self.chunks) if chunk.num_new > 1), len(self.chunks))

    def _batch_invariant(self, core: Core, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
        """Attend all rows by the function of the trainer's forward pass."""
        if core.caches_keys:
            self._write(core.layer_number, (key, value))
            key, value = (pool.flatten(0, 1) for pool in self.cache.tensors(core.layer_number, (key, value)))
            key_rows = self._key_slots(0)
        else:
            key, value = key[:, 0], value[:, 0]
            key_rows = torch.arange(len(key), device=key.device)
        spans, row, first = [], 0, 0
        for chunk in self.chunks:
            spans.append(Span(row, chunk.num_new, chunk.start, first))
            row, first = row + chunk.num_new, first + chunk.stop
        scores = Scores(core.kernel.scale, mask.visibility.limits[0], core.soft_cap, mask.sink)
        return batch_invariant_attention(query[:, 0], key, value, key_rows, spans, scores)[0].unsqueeze(1)

    def _from_pages(self, core: Core, query: Tensor, like: tuple[Tensor, Tensor], mask: Mask) -> Tensor:
        at, rows = self._at, len(query)
        keys, values = self.cache.tensors(core.layer_number, like)
        return paged_attention(
            query[:, 0],
            keys,
            values,
            PagedRows(at.tables, at.sequences[:rows], at.positions[:rows], max(chunk.stop for chunk in self.chunks)),
            scale=core.kernel.scale,
            left=mask.visibility.limits[0],
            soft_cap=core.soft_cap,
            sink=mask.sink,
        ).unsqueeze(1)

    def _gathered(
        self, core: Core, query: Tensor, key: Tensor, value: Tensor, mask: Mask, chunks: tuple[Chunk, ...]
    ) -> Tensor:
        """Attend the rows of ``chunks`` to the keys of their sequences [t, 1, g, .]."""
        flash = isinstance(core.kernel, FlashKernel) and core.kernel.packs_documents
        flash = flash and query.is_cuda and query.dtype in SIXTEEN_BIT
        if flash and mask.sink is None and key.shape[-1] == value.shape[-1]:
            return self._packed(core.kernel, query, key, value, mask, chunks)
        return torch.cat([self._sequence(core, *each, mask) for each in self._sequences(query, key, value, chunks)])

    def _sequences(
        self, query: Tensor, key: Tensor, value: Tensor, chunks: Sequence[Chunk]
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return query, key and value of each sequence."""
        found = []
        row = first = 0
        for chunk in chunks:
            keys = slice(first, first + chunk.stop)
            found.append((query[row : row + chunk.num_new], key[keys], value[keys]))
            row, first = row + chunk.num_new, first + chunk.stop
        return found

    def _sequence(self, core: Core, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
        """Attend the last tokens of one sequence to all its keys."""
        if mask.sink is None:
            return core.form(self)(query, key, value, Mask(mask.visibility))
        tile = full_tile(len(query), len(key), mask.visibility)
        query_basd, key_bgtd, value_bgtd = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out, lse = core.kernel.forward(query_basd, key_bgtd, value_bgtd, tile)
        return with_sink(out.permute(2, 0, 1, 3), lse.permute(2, 0, 1), mask.sink, query.dtype)[0]

    def _packed(
        self, kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, mask: Mask, chunks: Sequence[Chunk]
    ) -> Tensor:
        """Attend in one variable-length call of a flash kernel, whose bands end at the last query and key."""
        bounds = (accumulate(sizes, initial=0) for sizes in zip(*((chunk.num_new, chunk.stop) for chunk in chunks)))
        of_queries, of_keys = (torch.tensor([*each], dtype=torch.int32, device=query.device) for each in bounds)
        documents = PackedSeqParams(
            cu_seqlens_q=of_queries,
            cu_seqlens_kv=of_keys,
            max_seqlen_q=max(chunk.num_new for chunk in chunks),
            max_seqlen_kv=max(chunk.stop for chunk in chunks),
        )
        return kernel.attend(query, key, value, Mask(mask.visibility, documents))
