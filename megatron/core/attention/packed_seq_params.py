"""Document boundaries of packed or padded batches."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron.core.config.errors import UserError
from megatron.core.groups.process_groups import AnyGroup
from megatron.core.host_memory import copied


def is_on_host(x: Tensor) -> bool:
    """Return whether ``x`` is on the CPU, so that Python may branch on its values (on a GPU: a sync, and the branch
    would be fixed in CUDA graphs)."""
    return not x.is_cuda


def mask_lengths(mask: Tensor) -> Tensor:
    """Return the number of tokens per row, int64 [b], of a mask [b, s] with 1 for tokens, followed by 0 for padding.
    Raises ValueError if padding precedes a token (not checked on GPUs, as that would wait)."""
    mask = mask.long()
    if is_on_host(mask) and bool((mask.diff(dim=1) > 0).any()):
        raise ValueError("attention_mask: padding must follow all tokens of a row, here it precedes some")
    return mask.sum(1)


def _require_equal(queries: Tensor, keys: Tensor) -> None:
    """Raise ValueError unless query and key bounds are equal. On GPUs a device assertion, which does not wait."""
    equal = (queries == keys).all() if queries.shape == keys.shape else torch.zeros((), dtype=torch.bool)
    if not is_on_host(equal):
        torch._assert_async(equal)
    elif not equal:
        raise ValueError("cu_seqlens_kv: must equal cu_seqlens_q, because queries and keys have the same tokens")


def _with_padding(actual: Tensor, padded: Tensor, num_tokens: int) -> Tensor:
    """Return int32 bounds [2n + 2] of documents, each followed by its padding, up to ``num_tokens``. ``actual``
    [n + 1]: cumulative lengths without padding; ``padded`` [n + 1]: starts of padded documents. Raises ValueError if a
    document exceeds its padded length (not checked on GPUs)."""
    starts, ends = padded[:-1], padded[:-1] + actual.diff()
    if is_on_host(padded) and bool((ends > padded[1:]).any()):
        raise ValueError("cu_seqlens_q: a document is longer than its place in cu_seqlens_q_padded")
    bounds = torch.stack((starts, ends), dim=1).flatten()
    tail = torch.stack((padded[-1], torch.full_like(padded[-1], num_tokens)))
    return torch.cat((bounds, tail)).to(torch.int32)


@dataclass
class PackedSeqParams:
    """Cumulative document lengths, int32 [documents + 1], over the flattened batch; same fields as Megatron-LM's class.
    The batch is flattened row by row ([b, s] -> [b * s]), every row boundary is a document boundary, and documents
    attend only to themselves. The first entry is 0, the last b * s. ``max_seqlen_*`` is the longest document; without
    it kernels launch blocks for the row length. Megatron-LM's programs may pass lengths without padding in
    ``cu_seqlens_*`` and the starts of the padded documents in ``cu_seqlens_*_padded``; :meth:`documents` converts them.
    """

    qkv_format: str | None = None
    """Ignored, except that "thd" is rejected with context parallelism: Megatron-LM's programs then split each document
    over the ranks, while this library splits rows (``get_batch_on_this_cp_rank``)."""
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    bounds: tuple[int, ...] | None = None
    """``cu_seqlens_q`` on the host, so that it is not read from the GPU, which would wait."""
    key_bounds: tuple[int, ...] | None = None
    """``cu_seqlens_kv`` on the host, in cross-attention."""
    _split: tuple[int, PackedSeqParams | None] | None = field(default=None, repr=False, compare=False)
    """Result of :meth:`split_full_rows`, used by all layers: cached, or known from :meth:`of_lengths`."""
    _ranges: Tensor | None = field(default=None, init=False, repr=False, compare=False)
    """Cached result of :meth:`ranges`, used by all layers."""
    local_cp_size: int | None = field(default=None, kw_only=True)
    """Context-parallel size of this micro-batch; None: the program's. Its ranks are ``get_step_groups()`` of this
    size, for which ``initialize_model_parallel`` needs ``hybrid_context_parallel``."""
    samples: tuple[int, ...] | None = field(default=None, kw_only=True)
    """Sample counter of each document, if documents are samples: dropout of attention weights depends on it."""
    cp_group: AnyGroup = field(default=None, kw_only=True)
    total_tokens: int | None = field(default=None, kw_only=True)
    seq_idx: Tensor | None = field(default=None, kw_only=True)
    pad_between_seqs: bool | None = field(default=None, kw_only=True)
    """Ignored, like ``cp_group``, ``total_tokens`` and ``seq_idx``; accepted for Megatron-LM's programs."""

    def documents(self, num_tokens: int, context_parallel_size: int = 1) -> PackedSeqParams:
        """Normalize the bounds of a batch of ``num_tokens`` tokens (in full sequences) for self-attention.

        With ``cu_seqlens_q_padded``, each document's padding becomes a separate document, which no other token sees;
        the result then has bounds only. Returns ``self`` if nothing changes. Raises UserError for "thd" or padded
        bounds with context parallelism, and ValueError if a document exceeds its padded length (not checked on GPUs, as
        that would wait) or key bounds differ from query bounds (on GPUs a device assertion)."""
        if context_parallel_size > 1 and (self.qkv_format == "thd" or self.cu_seqlens_q_padded is not None):
            raise UserError(
                f"packed_seq_params: {context_parallel_size} context-parallel ranks split rows, not documents; split "
                "batches by get_batch_on_this_cp_rank, and leave out qkv_format and cu_seqlens_*_padded"
            )
        queries, padded = self.cu_seqlens_q, self.cu_seqlens_q_padded
        if queries is not None and self.cu_seqlens_kv is not None and self.cu_seqlens_kv is not queries:
            _require_equal(queries, self.cu_seqlens_kv)
            return replace(self, cu_seqlens_kv=queries).documents(num_tokens, context_parallel_size)
        if queries is None or padded is None or padded is queries:
            return self
        bounds = _with_padding(queries, padded, num_tokens)
        # the longest document is unknown: it may be padding
        return PackedSeqParams(cu_seqlens_q=bounds, cu_seqlens_kv=bounds)

    @classmethod
    def of_lengths(cls, lengths: Tensor, length: int, full_rows: int = 0) -> PackedSeqParams:
        """Build from padded rows [b, length]: each row becomes two documents, its first ``lengths[i]`` tokens (int [b])
        and its padding, so that no token sees padding. No host sync. ``full_rows``: number of leading rows without
        padding that the caller knows of, so that kernels may compute them as full rows."""
        starts = torch.arange(0, len(lengths) * length, length, device=lengths.device)
        bounds = torch.stack((starts, starts + lengths), dim=1).flatten()
        bounds = torch.nn.functional.pad(bounds, (0, 1), value=len(lengths) * length).to(torch.int32)
        packed = cls(cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=length, max_seqlen_kv=length)
        if full_rows:
            rest = None if full_rows == len(lengths) else cls.of_lengths(lengths[full_rows:], length)
            packed._split = full_rows, rest
        return packed

    @classmethod
    def of_padding(cls, lengths: Tensor, length: int, full_rows: int = 0) -> PackedSeqParams | None:
        """Return :meth:`of_lengths`, or None if ``lengths`` is on the CPU and no row has padding."""
        if is_on_host(lengths) and int(lengths.min()) == length:
            return None
        return cls.of_lengths(lengths, length, full_rows)

    @classmethod
    def of_keys(cls, lengths: Tensor, num_queries: int, num_keys: int) -> PackedSeqParams:
        """Build for cross-attention: the ``num_queries`` queries of row i see the first ``lengths[i]`` (int [b], at
        least 1) of its ``num_keys`` keys; the remaining keys form a document without queries. Raises ValueError for a
        row without keys (not checked on GPUs, as that would wait)."""
        if is_on_host(lengths) and bool((lengths < 1).any()):
            raise ValueError("a row contains only padding, so that the other sequence has no key to attend to")
        keys = cls.of_lengths(lengths, num_keys).cu_seqlens_q
        assert keys is not None
        queries = cls.of_lengths(torch.full_like(lengths, num_queries), num_queries).cu_seqlens_q
        return cls(cu_seqlens_q=queries, cu_seqlens_kv=keys, max_seqlen_q=num_queries, max_seqlen_kv=num_keys)

    def on(self, device: torch.device) -> PackedSeqParams:
        """Return a copy with bounds on ``device`` (non-blocking copy) and also on the host; ``self`` if there are no
        bounds or they are on ``device`` already. First reads the bounds into ``self.bounds``, which waits if they are
        on another GPU."""
        queries, keys = self.cu_seqlens_q, self.cu_seqlens_kv
        if queries is None or queries.device == device:
            return self
        self.all_bounds()
        moved = copied(queries, device)
        of_keys = moved if keys is None or keys is queries else copied(keys, device)
        return replace(self, cu_seqlens_q=moved, cu_seqlens_kv=of_keys)

    @property
    def cu_seqlens_k(self) -> Tensor | None:
        """Key bounds: ``cu_seqlens_kv``, or ``cu_seqlens_q`` if unset."""
        return self.cu_seqlens_q if self.cu_seqlens_kv is None else self.cu_seqlens_kv

    @property
    def known(self) -> bool:
        """Whether the bounds are available on the host without waiting for a GPU."""
        return self.bounds is not None or self.cu_seqlens_q is None or is_on_host(self.cu_seqlens_q)

    def all_bounds(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return (query bounds, key bounds) as tuples of integers, equal without separate key bounds; None without
        documents. The first call may wait for a GPU; the result is stored."""
        queries = self.document_bounds()
        if queries is None or self.cu_seqlens_kv is None or self.cu_seqlens_kv is self.cu_seqlens_q:
            return None if queries is None else (queries, queries)
        if self.key_bounds is None:
            self.key_bounds = tuple(self.cu_seqlens_kv.tolist())
        return queries, self.key_bounds

    def document_bounds(self) -> tuple[int, ...] | None:
        """Return ``cu_seqlens_q`` as integers (None without documents). The first call waits for a GPU; cached."""
        if self.bounds is None and self.cu_seqlens_q is not None:
            self.bounds = tuple(self.cu_seqlens_q.tolist())
        return self.bounds

    def split_full_rows(self, batch: int) -> tuple[int, PackedSeqParams | None]:
        """Split off the leading rows that are one document each; return (their number, documents of all other rows).
        The second is None if no row remains. Returns (0, ``self``) if ``bounds`` is unset, as reading the device's may
        wait, and the number was not given. Cached: ``batch``, the number of rows, must not change."""
        if self._split is None:
            if self.bounds is None or self.cu_seqlens_q is None:
                return 0, self
            self._split = self._split_full_rows(batch)
        return self._split

    def _split_full_rows(self, batch: int) -> tuple[int, PackedSeqParams | None]:
        """Return (number of leading rows that are one document for queries and for keys, documents of the other rows).
        The latter have bounds from 0, also on the host; None if all rows are full. Returns (0, ``self``) if the first
        row is not full. Uses host bounds; not cached."""
        bounds = self.all_bounds()
        assert bounds is not None and self.cu_seqlens_q is not None and self.cu_seqlens_k is not None
        lengths = [ends[-1] // batch for ends in bounds]
        full_rows = min(
            next((place // length for place in ends if place % length), batch) for ends, length in zip(bounds, lengths)
        )
        start = tuple(full_rows * length for length in lengths)
        # empty documents repeat a boundary: take the last index at which queries and keys are both there
        first = max((index for index, pair in enumerate(zip(*bounds)) if pair == start), default=0)
        if full_rows == batch or not first:
            return (full_rows, None) if full_rows == batch else (0, self)
        queries, keys = self.cu_seqlens_q[first:] - start[0], self.cu_seqlens_k[first:] - start[1]
        of_queries, of_keys = (tuple(x - x0 for x in ends[first:]) for ends, x0 in zip(bounds, start))
        return full_rows, replace(self, cu_seqlens_q=queries, cu_seqlens_kv=keys, bounds=of_queries, key_bounds=of_keys)

    def ranges(self, batch: int, length: int) -> Tensor:
        """Return the start and end position in its row of each token's document, int32 [2, batch, length]. Cached; no
        host sync. Requires equal query and key bounds (self-attention)."""
        bounds = self.cu_seqlens_q
        assert bounds is not None and self.cu_seqlens_k is bounds, "documents of one sequence"
        if self._ranges is None:
            tokens = torch.arange(batch * length, device=bounds.device, dtype=torch.int32)
            number, start = torch.bucketize(tokens, bounds[1:], right=True), tokens - tokens % length
            self._ranges = torch.stack((bounds[number] - start, bounds[number + 1] - start)).view(2, batch, length)
        return self._ranges

    def check(self, batch: int, length: int) -> None:
        """Raise ValueError unless the query bounds ascend from 0 to ``batch * length`` and every row of ``length``
        starts a document; nothing without documents. On GPUs this is a device assertion, which does not wait. Kernels
        do not write the gradients of uncovered tokens, so that they would contain uninitialized memory."""
        bounds = self.cu_seqlens_q
        if bounds is None:
            return
        rows = torch.arange(0, batch * length, length, device=bounds.device)
        ends = (bounds[0] == 0) & (bounds[-1] == batch * length)
        # searchsorted instead of isin, which syncs with the host for the number of unique elements
        starts = bounds[torch.searchsorted(bounds, rows).clamp(max=len(bounds) - 1)] == rows
        fits = ends & (bounds.diff() >= 0).all() & starts.all()
        if not is_on_host(bounds):
            torch._assert_async(fits)
        elif not fits:
            raise ValueError(
                f"cu_seqlens_q must ascend from 0 to {batch * length} and name the start of each of the {batch} rows "
                f"of {length} tokens, not {bounds.tolist()[:8]} … {bounds.tolist()[-1]}; make padding a document of "
                "its own and mask its losses"
            )
