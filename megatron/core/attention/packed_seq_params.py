"""Boundaries of the documents that are packed into a batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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

    @classmethod
    def of_lengths(cls, lengths: Tensor, length: int) -> PackedSeqParams:
        """Rows of ``length`` tokens of which the first ``lengths`` (int [b]) count: padding is a document by itself, so
        that no token sees it."""
        starts = torch.arange(0, len(lengths) * length, length, device=lengths.device)
        bounds = torch.stack((starts, starts + lengths), dim=1).flatten()
        bounds = torch.nn.functional.pad(bounds, (0, 1), value=len(lengths) * length).to(torch.int32)
        return cls(cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=length, max_seqlen_kv=length)

    def document_bounds(self) -> tuple[int, ...] | None:
        """``cu_seqlens_q`` as integers, read from its device once; None without documents."""
        if self.bounds is None and self.cu_seqlens_q is not None:
            self.bounds = tuple(self.cu_seqlens_q.tolist())
        return self.bounds

    def check(self, batch: int, length: int) -> None:
        """ValueError unless the documents are all tokens of ``batch`` rows of ``length``, none of them in two rows; on
        GPUs a device assertion, which does not wait. Kernels leave gradients of other tokens as memory was."""
        bounds = self.cu_seqlens_q
        if bounds is None:
            return
        rows = torch.arange(0, batch * length + 1, length, device=bounds.device)
        ends = (bounds[0] == 0) & (bounds[-1] == batch * length)
        fits = ends & (bounds.diff() >= 0).all() & torch.isin(rows, bounds).all()
        if bounds.is_cuda:
            torch._assert_async(fits)
        elif not fits:
            raise ValueError(
                f"cu_seqlens_q must ascend from 0 to {batch * length} and name the start of each of the {batch} rows "
                f"of {length} tokens, not {bounds.tolist()[:8]} … {bounds.tolist()[-1]}; make padding a document of "
                "its own and mask its losses"
            )
