"""Token layout of generation: a row of new tokens of several sequences, whose earlier keys are in a paged cache.

A step has one chunk of consecutive tokens per sequence, concatenated to [n, 1, h]. Each layer writes the keys and
values (or latents) of the new tokens to the sequence's pages and attends to the cached and the new ones. Layers see
this as any other layout: ``positions``, ``all_keys`` and ``attend``.

Legend: n rows (new tokens of all sequences), t keys of all sequences, g key/value groups, d head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
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
from megatron.core.fusions.paged_attention import PagedRows, paged_attention, split_tokens, write_pages
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


PADDING = Chunk(0, 1, (0,))
"""A row that fills a step; it uses the reserved page 0."""


def _kernel_serves(query: Tensor) -> bool:
    return query.is_cuda and kernels_serve(query.dtype)


class PagedCache:
    """Cached tensors of all sequences, [pages, page size, ...] per layer, allocated when a layer first stores. Page 0
    is used by padding rows."""

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


class StepIndices(NamedTuple):
    """Integers of a step, int64: NumPy arrays on the host, then tensors on the device of the model."""

    positions: Tensor
    """Position of each row, [n]."""
    slots: Tensor
    """Index of each row in the flattened pages, [n]."""
    sequences: Tensor
    """Sequence of each row, [n]."""
    tables: Tensor
    """Pages of each sequence, [sequences, longest]; 0 after the last one."""
    splits: Tensor
    """Rows of the splits of the rows that read pages directly (:class:`PagedRows`)."""
    first_splits: Tensor
    output_rows: Tensor
    """Rows whose logits are computed."""


def num_single(chunks: Sequence[Chunk]) -> int:
    """Return the number of chunks of one token before the first longer one."""
    return next((index for index, chunk in enumerate(chunks) if chunk.num_new > 1), len(chunks))


def index_arrays(
    chunks: Sequence[Chunk],
    output_rows: Sequence[int],
    page_size: int,
    *,
    num_pages: int = 0,
    num_sequences: int = 0,
    direct: bool = False,
) -> dict[str, np.ndarray]:
    """Return the fields of :class:`StepIndices` for a step with ``chunks``. Tables have at least ``num_sequences`` rows
    and ``num_pages`` columns. ``direct``: all rows read pages directly, not only single tokens at the front."""
    count = len(chunks)
    starts, num_new, held = (
        np.fromiter(each, np.int64, count)
        for each in ((x.start for x in chunks), (x.num_new for x in chunks), (len(x.pages) for x in chunks))
    )
    tables = np.zeros((max(num_sequences, count), max(num_pages, int(held.max()))), np.int64)
    pages = np.fromiter(chain.from_iterable(chunk.pages for chunk in chunks), np.int64, int(held.sum()))
    tables[:count][np.arange(tables.shape[1]) < held[:, None]] = pages
    sequences = np.repeat(np.arange(count), num_new)
    positions = np.arange(len(sequences)) + np.repeat(starts + num_new - np.cumsum(num_new), num_new)
    slots = tables[sequences, positions // page_size] * page_size + positions % page_size
    splits, first_splits = split_tokens(positions if direct else positions[: num_single(chunks)])
    rows = np.fromiter(output_rows, np.int64, len(output_rows))
    found = StepIndices(positions, slots, sequences, tables, splits, first_splits, rows)  # type: ignore[arg-type]
    return found._asdict()


@dataclass(frozen=True, eq=False)
class CachedLayout(TokenLayout):
    """New tokens of several sequences on this rank. Build it by :meth:`of_indices`."""

    cache: PagedCache = field(default_factory=lambda: PagedCache(1, 1))
    chunks: tuple[Chunk, ...] = ()
    max_length: int = 0
    """Maximum length of a sequence."""
    batch_invariant: bool = False
    """Whether attention adds in the order of the trainer with ``batch_invariant_mode``."""
    indices: StepIndices | None = None
    _slots_of_keys: dict[int, Tensor] = field(default_factory=dict, repr=False)
    """Cached results of :meth:`_key_slots`; shared by copies."""

    @classmethod
    def of_indices(
        cls,
        base: TokenLayout,
        cache: PagedCache,
        chunks: Sequence[Chunk],
        indices: StepIndices,
        *,
        max_length: int,
        batch_invariant: bool = False,
    ) -> CachedLayout:
        """Build the layout of a step on the ranks of ``base``, from the tensors of :func:`index_arrays`. If all rows
        read pages directly, layers read only ``indices``, which may then change between replays."""
        inherited = {each.name: getattr(base, each.name) for each in fields(TokenLayout) if each.init}
        return cls(
            **inherited,
            cache=cache,
            chunks=tuple(chunks),
            max_length=max_length,
            batch_invariant=batch_invariant,
            indices=indices,
        )

    @property
    def _at(self) -> StepIndices:
        assert self.indices is not None, "built by CachedLayout.of_indices"
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
        pools = self.cache.tensors(layer, tensors)
        if all(x.dim() == 4 and len(x) == self.num_rows and _kernel_serves(x) for x in tensors):
            (keys, values), (key, value) = pools, tensors
            write_pages(keys, values, self._at.slots, key[:, 0], value[:, 0])
            return
        for pool, x in zip(pools, tensors, strict=True):
            if len(x) < self.num_rows:
                part, x = x.contiguous(), x.new_empty((self.num_rows, *x.shape[1:]))
                collective_names.all_gather(x, part, group=self.stream.handle)
            pool.flatten(0, 1).index_copy_(0, self._at.slots, x[:, 0].to(pool.dtype))

    def attend(self, core: Core, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
        """Map query [n, 1, a, d] to [n, 1, a, e]. Key and value have the new tokens [n, 1, g, .], or all tokens
        [t, 1, g, .] if ``core`` does not cache them (:attr:`Core.caches_keys`).

        On GPUs, chunks of one token at the front read the pages directly (``fusions/paged_attention.py``); in
        short steps all rows do. Other chunks attend to gathered copies of their keys."""
        if self.batch_invariant:
            return self._batch_invariant(core, query, key, value, mask)
        paged = self._num_paged(query) if core.caches_keys else 0
        outputs = []
        if core.caches_keys:
            self._write(core.layer_number, (key, value))
        if paged:
            outputs.append(self._from_pages(core, query[:paged], (key, value), mask))
        if paged < len(query):
            if core.caches_keys:
                key, value = self._read(core.layer_number, (key, value), skip=paged)
            outputs.append(self._gathered(core, query[paged:], key, value, mask, self.chunks[paged:]))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _num_paged(self, query: Tensor) -> int:
        """Return how many leading rows read the pages directly."""
        if not _kernel_serves(query):
            return 0
        return len(self._at.first_splits) - 1

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
            PagedRows(at.tables, at.sequences[:rows], at.positions[:rows], at.splits, at.first_splits),
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
