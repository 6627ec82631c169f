"""Token layout of generation: a row of new tokens of several sequences, whose earlier keys are in a paged cache.

A step has one chunk of consecutive tokens per sequence, concatenated to [n, 1, h]. Each layer writes the keys and
values (or latents) of the new tokens to the sequence's pages and attends to the cached and the new ones. Layers see
this as any other layout: ``positions`` and ``attend``; latent attention calls ``attend_latents``.

Legend: n rows (new tokens of all sequences), t keys of all sequences, g key/value groups, d head dim."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron.core.attention.kernels.base import SIXTEEN_BIT, FlashKernel, Kernel
from megatron.core.attention.masks import Mask
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.sequence_states import NUM_RESERVED, StateCache, StateSlots
from megatron.core.attention.sink import with_sink
from megatron.core.attention.tiles import full_tile
from megatron.core.attention.token_layout import Core, TokenLayout
from megatron.core.fusions.batch_invariant_attention import Scores, Span, batch_invariant_attention
from megatron.core.fusions.dispatch import kernels_serve
from megatron.core.fusions.paged_attention import SPLIT, PagedRows, paged_attention, split_tokens, write_pages

if TYPE_CHECKING:
    from megatron.core.attention.context import AttentionContext
    from megatron.core.attention.context_parallel.forms import Attention

CACHED = frozenset({"cached"})
"""Declaration of a layer that supports this layout (``transformer/context_parallel_support.py``)."""


class Chunk(NamedTuple):
    """New tokens of one sequence in a step."""

    start: int
    """Position of the first new token: the number of cached tokens."""
    num_new: int
    pages: tuple[int, ...]
    """Pages of the sequence, for at least ``start + num_new`` tokens."""
    states: StateSlots = StateSlots()

    @property
    def stop(self) -> int:
        return self.start + self.num_new

    @property
    def is_direct(self) -> bool:
        """Whether its tokens are so few that each reads the cached pages, without copies or expanded latents."""
        splits = self.num_new * (self.stop // SPLIT + 1)
        return self.num_new == 1 or (32 * self.num_new <= self.start and splits <= 512)


PADDING = Chunk(0, 1, (0,))
"""A row that fills a step; it uses the reserved page 0."""


class LatentHeads(Protocol):
    """Keys and values as linear functions of latents, ``key = [Uk latent, rope key]`` and ``value = Uv latent``.

    Legend: d channels of a query, e of a value, r of a latent, p of a rope key."""

    @property
    def absorbs(self) -> bool:
        """Whether :meth:`absorb` and :meth:`values` are available."""

    def expand(self, latent: Tensor, rope_key: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys [t, 1, a, d] and values [t, 1, a, e] of latents [t, 1, r] and rope keys [t, 1, 1, p]."""
        ...

    def absorb(self, query: Tensor) -> Tensor:
        """Map queries [n, 1, a, d] to ``[Uk^T query, its rope channels]`` [n, 1, a, r + p], which attend to latents."""
        ...

    def values(self, latent: Tensor) -> Tensor:
        """Map each head's mean of latents [n, 1, a, r] to its mean of values [n, 1, a, e]."""
        ...


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
        tensors = self._tensors.get(layer)
        if tensors is None:
            # zeros: masked positions of an unused page must not be NaN
            tensors = tuple(x.new_zeros((self.num_pages, self.page_size, *x.shape[2:])) for x in like)
            self._tensors[layer] = tensors
        return tensors

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers that have stored."""
        tensors = [x for layer in self._tensors.values() for x in layer]
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
    states: Tensor
    """:class:`StateSlots` of each sequence, [sequences, 3]."""
    splits: Tensor
    """Rows of the splits of the rows that read pages directly (:class:`PagedRows`)."""
    first_splits: Tensor
    output_rows: Tensor
    """Rows whose logits are computed."""


def num_direct(chunks: Sequence[Chunk]) -> int:
    """Return the number of chunks before the first that does not read pages directly."""
    return next((index for index, chunk in enumerate(chunks) if not chunk.is_direct), len(chunks))


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
    and ``num_pages`` columns. ``direct``: all rows read pages directly, not only of direct chunks."""
    count = len(chunks)
    starts, num_new, page_counts = (
        np.fromiter(values, np.int64, count)
        for values in ((x.start for x in chunks), (x.num_new for x in chunks), (len(x.pages) for x in chunks))
    )
    tables = np.zeros((max(num_sequences, count), max(num_pages, int(page_counts.max()))), np.int64)
    pages = np.fromiter(chain.from_iterable(chunk.pages for chunk in chunks), np.int64, int(page_counts.sum()))
    tables[:count][np.arange(tables.shape[1]) < page_counts[:, None]] = pages
    states = np.array([*(chunk.states for chunk in chunks), *[StateSlots()] * (len(tables) - count)], np.int64)
    sequences = np.repeat(np.arange(count), num_new)
    positions = np.arange(len(sequences)) + np.repeat(starts + num_new - np.cumsum(num_new), num_new)
    slots = tables[sequences, positions // page_size] * page_size + positions % page_size
    splits, first_splits = split_tokens(positions if direct else positions[: int(num_new[: num_direct(chunks)].sum())])
    rows = np.fromiter(output_rows, np.int64, len(output_rows))
    indices = StepIndices(positions, slots, sequences, tables, states, splits, first_splits, rows)  # type: ignore[arg-type]
    return indices._asdict()


@dataclass(frozen=True, eq=False)
class CachedLayout(TokenLayout):
    """New tokens of several sequences on this rank. Build it by :meth:`of_indices`."""

    cache: PagedCache = field(default_factory=lambda: PagedCache(1, 1))
    state_cache: StateCache = field(default_factory=lambda: StateCache(NUM_RESERVED))
    chunks: tuple[Chunk, ...] = ()
    max_length: int = 0
    """Maximum length of a sequence."""
    batch_invariant: bool = False
    """Whether attention adds in the order of the trainer with ``batch_invariant_mode``."""
    indices: StepIndices | None = None
    _slots_of_keys: dict[tuple[int, int], Tensor] = field(default_factory=dict, repr=False)
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
        state_cache: StateCache | None = None,
    ) -> CachedLayout:
        """Build the layout of a step on the ranks of ``base``, from the tensors of :func:`index_arrays`. If all rows
        read pages directly, layers read only ``indices``, which may then change between replays."""
        inherited = {entry.name: getattr(base, entry.name) for entry in fields(TokenLayout) if entry.init}
        return cls(
            **inherited,
            cache=cache,
            state_cache=state_cache or StateCache(NUM_RESERVED),
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
        assert length == self.num_rows
        return self._at.positions

    def output_rows(self, x: Tensor) -> Tensor:
        """Return the rows of hidden states [n, 1, h] whose logits are needed. Under sequence parallelism all rows:
        :meth:`requested_logits` selects after the output layer has gathered them."""
        return x if self.stream.size > 1 else x.index_select(0, self._at.output_rows)

    def requested_logits(self, logits: Tensor) -> Tensor:
        """Return the logits [rows, v] of the requested rows from the model's output [1, ., v]."""
        return logits[0] if self.stream.size == 1 else logits[0].index_select(0, self._at.output_rows)

    # ---- the cache

    def _write(self, layer: int, tensors: tuple[Tensor, Tensor]) -> None:
        """Write ``tensors``, each [n, 1, g, .] of the new tokens, to the pages of ``layer``."""
        pools = self.cache.tensors(layer, tensors)
        if all(map(_kernel_serves, tensors)):
            (keys, values), (key, value) = pools, tensors
            write_pages(keys, values, self._at.slots, key[:, 0], value[:, 0])
            return
        for pool, x in zip(pools, tensors, strict=True):
            pool.flatten(0, 1).index_copy_(0, self._at.slots, x[:, 0].to(pool.dtype))

    def _read(self, layer: int, like: tuple[Tensor, Tensor], first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return the cached and new entries [t, 1, g, .] of the sequences of chunks ``first`` to ``last``."""
        at, (keys, values) = self._key_slots(first, last), self.cache.tensors(layer, like)
        return tuple(pool.flatten(0, 1).index_select(0, at).unsqueeze(1) for pool in (keys, values))  # type: ignore[return-value]

    def _key_slots(self, first: int, last: int) -> Tensor:
        """Return the index in the flattened pages of each key of these sequences, int64 [t]; cached for all layers."""
        if (first, last) not in self._slots_of_keys:
            size, tables = self.cache.page_size, self._at.tables
            slots = tables[first:last].unsqueeze(-1) * size + torch.arange(size, device=tables.device)
            rows = [row.flatten()[: chunk.stop] for row, chunk in zip(slots, self.chunks[first:last])]
            self._slots_of_keys[first, last] = torch.cat(rows)
        return self._slots_of_keys[first, last]

    @cached_property
    def _direct(self) -> tuple[int, int]:
        """Number of leading chunks that read pages directly, and number of their rows."""
        rows = len(self._at.first_splits) - 1
        ends = [0, *accumulate(chunk.num_new for chunk in self.chunks)]
        return ends.index(rows), rows

    # ---- states of sequences

    def scan(
        self, layer: int, name: str, zeros: Tensor, run: Callable[..., tuple[Tensor, Tensor]], *inputs: Tensor
    ) -> Tensor:
        """Run each sequence from its state, and store the states after its new tokens."""
        slots = self._at.states[: len(self.chunks)]
        states = self.state_cache.tensor(layer, name, zeros)
        before, rows = states.index_select(0, slots[:, 0]), [chunk.num_new for chunk in self.chunks]
        parts = [run(*part, before[i : i + 1]) for i, part in enumerate(zip(*(x.split(rows) for x in inputs)))]
        after = torch.cat([state for _, state in parts])
        for column in (1, 2):
            states.index_copy_(0, slots[:, column], after.to(states.dtype))
        return torch.cat([output for output, _ in parts])

    # ---- attention

    def mix_latents(self, mixer: Any, heads: Any, parts: Sequence[Tensor], ctx: AttentionContext) -> Tensor:
        return mixer.attend_cached(*parts, self, ctx)

    def attention(self, core: Core) -> Attention:
        return partial(self._attend, core)

    def _attend(self, core: Core, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
        """Map query [n, 1, a, d] to [n, 1, a, e]. Key and value have the new tokens, [n, 1, g, .].

        On GPUs, direct chunks at the front read the pages (``fusions/paged_attention.py``); in short steps all rows
        do. Other chunks attend to gathered copies of their keys."""
        layer, new, count = core.layer_number, (key, value), len(self.chunks)
        self._write(layer, new)
        if self.batch_invariant:
            keys, values = (pool.flatten(0, 1) for pool in self.cache.tensors(layer, new))
            return self._batch_invariant(core, query, keys, values, self._key_slots(0, count), mask)
        chunks, rows = self._direct if _kernel_serves(query) else (0, 0)
        outputs = []
        if rows:
            outputs.append(self._from_pages(core, query[:rows], new, mask))
        if rows < len(query):
            key, value = self._read(layer, new, chunks, count)
            outputs.append(self._gathered(core, query[rows:], key, value, mask, self.chunks[chunks:]))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def attend_latents(
        self, core: Core, heads: LatentHeads, query: Tensor, latent: Tensor, rope_key: Tensor, mask: Mask
    ) -> Tensor:
        """Map query [n, 1, a, d] to [n, 1, a, e]; caches ``latent`` [n, 1, 1, r] and ``rope_key`` [n, 1, 1, p] of the
        new tokens.

        Rows that read pages directly attend to the latents themselves, as one key and value head of all query heads.
        Other chunks, and all in ``batch_invariant_mode``, expand the latents of their sequences to keys and values as
        the trainer does."""
        layer, new, count = core.layer_number, (rope_key, latent), len(self.chunks)
        self._write(layer, new)
        chunks, rows = self._direct if heads.absorbs and not self.batch_invariant else (0, 0)
        outputs = []
        if rows:
            absorbed = heads.absorb(query[:rows])
            if _kernel_serves(query):
                mixed = self._from_pages(core, absorbed, new, mask)
            else:
                keys, latents = self._read(layer, new, 0, chunks)
                keys = torch.cat((latents, keys), dim=-1)
                mixed = self._gathered(core, absorbed, keys, latents, mask, self.chunks[:chunks])
            outputs.append(heads.values(mixed))
        if rows < len(query):
            rope_keys, latents = self._read(layer, new, chunks, count)
            key, value = heads.expand(latents[:, :, 0], rope_keys)
            if self.batch_invariant:
                return self._batch_invariant(core, query, key[:, 0], value[:, 0], None, mask)
            outputs.append(self._gathered(core, query[rows:], key, value, mask, self.chunks[chunks:]))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _batch_invariant(
        self, core: Core, query: Tensor, keys: Tensor, values: Tensor, key_rows: Tensor | None, mask: Mask
    ) -> Tensor:
        """Attend all rows by the function of the trainer's forward pass, to the entries ``key_rows`` [t], or all, of
        ``keys`` and ``values`` [., g, .]."""
        spans, row, first = [], 0, 0
        for chunk in self.chunks:
            spans.append(Span(row, chunk.num_new, chunk.start, first))
            row, first = row + chunk.num_new, first + chunk.stop
        scores = Scores(core.kernel.scale, mask.visibility.limits[0], core.soft_cap, mask.sink)
        return batch_invariant_attention(query[:, 0], keys, values, key_rows, spans, scores)[0].unsqueeze(1)

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
        return torch.cat([self._sequence(core, *part, mask) for part in self._sequences(query, key, value, chunks)])

    def _sequences(
        self, query: Tensor, key: Tensor, value: Tensor, chunks: Sequence[Chunk]
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return query, key and value of each sequence."""
        sequences = []
        row = first = 0
        for chunk in chunks:
            keys = slice(first, first + chunk.stop)
            sequences.append((query[row : row + chunk.num_new], key[keys], value[keys]))
            row, first = row + chunk.num_new, first + chunk.stop
        return sequences

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
        of_queries, of_keys = (torch.tensor([*values], dtype=torch.int32, device=query.device) for values in bounds)
        documents = PackedSeqParams(
            cu_seqlens_q=of_queries,
            cu_seqlens_kv=of_keys,
            max_seqlen_q=max(chunk.num_new for chunk in chunks),
            max_seqlen_kv=max(chunk.stop for chunk in chunks),
        )
        return kernel.attend(query, key, value, Mask(mask.visibility, documents))
