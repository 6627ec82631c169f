"""Boundaries of the documents that are packed into a batch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


def host_may_read(x: Tensor) -> bool:
    """Whether a decision may depend on the values of ``x``: the host would wait for a GPU, and a CUDA graph repeats
    what was decided while it was recorded."""
    return not x.is_cuda


def lengths_of_mask(mask: Tensor) -> Tensor:
    """Tokens of each row [b] of a mask [b, s] that is 1 for tokens and 0 for the padding behind them.

    Raises:
        ValueError: padding before a token (on GPUs nothing is raised: that would wait).
    """
    mask = mask.long()
    if host_may_read(mask) and bool((mask.diff(dim=1) > 0).any()):
        raise ValueError("attention_mask: padding stands behind all tokens of a row, here it is before some")
    return mask.sum(1)


@dataclass
class PackedSeqParams:
    """Cumulative document lengths, int32 [documents + 1], over the flattened batch.

    The batch is flattened row by row ([b, s] -> [b * s]), every row boundary is a document boundary, and documents
    attend only to themselves. The first entry is 0, the last b * s. ``max_seqlen_*`` (the longest document) saves
    attention kernels some empty blocks; without it the row length stands in.
    """

    qkv_format: str = "thd"
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    bounds: tuple[int, ...] | None = None
    """``cu_seqlens_q`` on the host: reading it from a GPU would wait for it."""
    key_bounds: tuple[int, ...] | None = None
    """The same of ``cu_seqlens_kv``, where keys are of another sequence than queries."""
    _split: tuple[int, PackedSeqParams | None] | None = field(default=None, repr=False, compare=False)
    """What :meth:`whole_rows` found: all layers ask."""
    _ranges: Tensor | None = field(default=None, init=False, repr=False, compare=False)
    """What :meth:`ranges` found: all layers ask for the same."""

    @classmethod
    def of_lengths(cls, lengths: Tensor, length: int) -> PackedSeqParams:
        """Rows of ``length`` tokens of which the first ``lengths`` (int [b]) count: padding is a document by itself, so
        that no token sees it."""
        starts = torch.arange(0, len(lengths) * length, length, device=lengths.device)
        bounds = torch.stack((starts, starts + lengths), dim=1).flatten()
        bounds = torch.nn.functional.pad(bounds, (0, 1), value=len(lengths) * length).to(torch.int32)
        return cls(cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=length, max_seqlen_kv=length)

    @classmethod
    def of_padding(cls, lengths: Tensor, length: int) -> PackedSeqParams | None:
        """:meth:`of_lengths`; None where no row has padding and the host can know."""
        return None if host_may_read(lengths) and int(lengths.min()) == length else cls.of_lengths(lengths, length)

    @classmethod
    def of_keys(cls, lengths: Tensor, num_queries: int, num_keys: int) -> PackedSeqParams:
        """Rows of ``num_queries`` queries that see the first ``lengths`` (int [b], at least 1) of their row's
        ``num_keys`` keys; the other keys are a document without queries.

        Raises:
            ValueError: a row without keys (on GPUs nothing is raised: that would wait).
        """
        if host_may_read(lengths) and bool((lengths < 1).any()):
            raise ValueError("a row of padding alone gives the other sequence nothing to see")
        keys = cls.of_lengths(lengths, num_keys).cu_seqlens_q
        assert keys is not None
        queries = cls.of_lengths(torch.full_like(lengths, num_queries), num_queries).cu_seqlens_q
        return cls(cu_seqlens_q=queries, cu_seqlens_kv=keys, max_seqlen_q=num_queries, max_seqlen_kv=num_keys)

    def on(self, device: torch.device) -> PackedSeqParams:
        """The same on ``device``; what is on the host now is remembered there."""
        queries, keys = self.cu_seqlens_q, self.cu_seqlens_kv
        if queries is None or queries.device == device:
            return self
        self.all_bounds()
        moved = queries.to(device, non_blocking=True)
        of_keys = moved if keys is None or keys is queries else keys.to(device, non_blocking=True)
        return replace(self, cu_seqlens_q=moved, cu_seqlens_kv=of_keys)

    @property
    def cu_seqlens_k(self) -> Tensor | None:
        """Bounds of the documents' keys: those of queries unless others are given."""
        return self.cu_seqlens_q if self.cu_seqlens_kv is None else self.cu_seqlens_kv

    @property
    def known(self) -> bool:
        """Whether the host knows the boundaries, or may read them."""
        return self.bounds is not None or self.cu_seqlens_q is None or host_may_read(self.cu_seqlens_q)

    def all_bounds(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """:meth:`document_bounds` of queries and of keys, each read from its device once."""
        queries = self.document_bounds()
        if queries is None or self.cu_seqlens_kv is None or self.cu_seqlens_kv is self.cu_seqlens_q:
            return None if queries is None else (queries, queries)
        if self.key_bounds is None:
            self.key_bounds = tuple(self.cu_seqlens_kv.tolist())
        return queries, self.key_bounds

    def document_bounds(self) -> tuple[int, ...] | None:
        """``cu_seqlens_q`` as integers, read from its device once; None without documents."""
        if self.bounds is None and self.cu_seqlens_q is not None:
            self.bounds = tuple(self.cu_seqlens_q.tolist())
        return self.bounds

    def whole_rows(self, batch: int) -> tuple[int, PackedSeqParams | None]:
        """How many of the ``batch`` rows at the front are one document each, and the documents of the others, None
        where none are left. (0, all) where the boundaries are on a device alone: reading them would wait."""
        if self.bounds is None or self.cu_seqlens_q is None:
            return 0, self
        if self._split is None:
            self._split = self._whole_rows(batch)
        return self._split

    def _whole_rows(self, batch: int) -> tuple[int, PackedSeqParams | None]:
        bounds = self.all_bounds()
        assert bounds is not None and self.cu_seqlens_q is not None and self.cu_seqlens_k is not None
        lengths = [each[-1] // batch for each in bounds]
        whole = min(
            next((place // length for place in each if place % length), batch) for each, length in zip(bounds, lengths)
        )
        start = tuple(whole * length for length in lengths)
        # empty documents share a boundary: the last that both sides have there
        first = max((index for index, pair in enumerate(zip(*bounds)) if pair == start), default=0)
        if whole == batch or not first:
            return (whole, None) if whole == batch else (0, self)
        queries, keys = self.cu_seqlens_q[first:] - start[0], self.cu_seqlens_k[first:] - start[1]
        of_queries, of_keys = (tuple(x - x0 for x in each[first:]) for each, x0 in zip(bounds, start))
        return whole, replace(self, cu_seqlens_q=queries, cu_seqlens_kv=keys, bounds=of_queries, key_bounds=of_keys)

    def ranges(self, batch: int, length: int) -> Tensor:
        """int32 [2, batch, length]: where in its row each token's document begins, and where it has ended."""
        bounds = self.cu_seqlens_q
        assert bounds is not None and self.cu_seqlens_k is bounds, "documents of one sequence"
        if self._ranges is None:
            tokens = torch.arange(batch * length, device=bounds.device, dtype=torch.int32)
            number, start = torch.bucketize(tokens, bounds[1:], right=True), tokens - tokens % length
            self._ranges = torch.stack((bounds[number] - start, bounds[number + 1] - start)).view(2, batch, length)
        return self._ranges

    def check(self, batch: int, length: int) -> None:
        """ValueError unless the documents are all tokens of ``batch`` rows of ``length``, none of them in two rows; on
        GPUs a device assertion, which does not wait. Kernels leave gradients of other tokens as memory was."""
        bounds = self.cu_seqlens_q
        if bounds is None:
            return
        rows = torch.arange(0, batch * length, length, device=bounds.device)
        ends = (bounds[0] == 0) & (bounds[-1] == batch * length)
        # not isin, which sorts out duplicates and waits for how many are left
        starts = bounds[torch.searchsorted(bounds, rows).clamp(max=len(bounds) - 1)] == rows
        fits = ends & (bounds.diff() >= 0).all() & starts.all()
        if not host_may_read(bounds):
            torch._assert_async(fits)
        elif not fits:
            raise ValueError(
                f"cu_seqlens_q must ascend from 0 to {batch * length} and name the start of each of the {batch} rows "
                f"of {length} tokens, not {bounds.tolist()[:8]} … {bounds.tolist()[-1]}; make padding a document of "
                "its own and mask its losses"
            )
