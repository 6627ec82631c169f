"""Token layout: which tokens of the full sequences this rank holds, and how ranks exchange them.

A layout is an argument of a forward pass (``ForwardContext.layout``), not of a layer: positions, rotary tables, dropout
coordinates, documents, expert balance and attention read it at every call. Another context-parallel size for a
micro-batch is another object.

Legend: s sequence (local), b batch, a heads, d head dim, n ranks of the group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.attention.context_parallel import zigzag
from megatron.core.attention.context_parallel.exchange import HeadsAndSequence
from megatron.core.attention.context_parallel.zigzag import CHUNKS, Order, Spans
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.autograd_context import AutogradContext
from megatron.core.groups import collective_names
from megatron.core.groups.process_groups import SINGLE_PROCESS, Group, ProcessGroups, StepGroups

if TYPE_CHECKING:
    from collections.abc import Callable

    from megatron.core.attention.context import AttentionContext
    from megatron.core.attention.context_parallel.forms import Attention
    from megatron.core.attention.kernels.base import Kernel

ANY_ORDER = frozenset(CHUNKS)
"""Declaration of a layer that takes tokens in every order (``transformer/context_parallel_support.py``)."""


class Core(Protocol):
    """Core attention, as a layout calls it."""

    layer_number: int
    soft_cap: float | None

    @property
    def kernel(self) -> Kernel: ...
    def form(self, layout: TokenLayout) -> Attention: ...


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """Tokens of this rank in a micro-batch. The default is one rank that holds full sequences."""

    group: Group = SINGLE_PROCESS.cp
    """Context-parallel ranks: each holds some tokens of every sequence."""
    order: Order = "zigzag"
    """Tokens of each rank (``context_parallel/zigzag.py``)."""
    levels: tuple[Group, Group] = (SINGLE_PROCESS.cp_a2a, SINGLE_PROCESS.cp_p2p)
    """Inner and outer ranks of ``group`` for two-level attention; both of one rank if there are no levels."""
    stream: Group = SINGLE_PROCESS.tp
    """Ranks that split this rank's tokens further in the residual stream (sequence parallelism)."""
    sharers: Group = SINGLE_PROCESS.tp_cp
    """All ranks of ``group`` and ``stream``: their parts of the residual stream make up the sequences."""
    documents: PackedSeqParams | None = None
    """Boundaries of packed documents in the full sequences; None: each sequence is one document."""
    padding: int = 0
    """Number of tokens at the end of the full sequences that only fill them up."""
    _positions: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, groups: ProcessGroups, sequence_parallel: bool = False, order: Order = "zigzag") -> TokenLayout:
        """Return the layout of a program's ``groups``, without documents."""
        sharers = groups.tp_cp if sequence_parallel else groups.cp
        levels = groups.cp_a2a, groups.cp_p2p
        return cls(groups.cp, order, levels, stream=groups.stream(sequence_parallel), sharers=sharers)

    @classmethod
    def of_step(cls, step: StepGroups, stream: Group) -> TokenLayout:
        """Return the layout of a micro-batch that the ranks of ``step`` share."""
        return cls(step.ranks, stream=stream, sharers=step.sharers if stream.size > 1 else step.ranks)

    def with_documents(self, documents: PackedSeqParams | None) -> TokenLayout:
        """Return a copy for a micro-batch with ``documents``."""
        return replace(self, documents=documents)

    @property
    def is_default(self) -> bool:
        """Whether nobody chose it, so that a layer built for several ranks must reject it."""
        return self.group is SINGLE_PROCESS.cp

    @property
    def num_chunks(self) -> int:
        """Number of equal parts of this rank's tokens; a part has consecutive positions."""
        return CHUNKS[self.order] if self.group.size > 1 else 1

    @property
    def has_first_token(self) -> bool:
        """Whether this rank holds the first token of every sequence, in either order."""
        return self.group.is_first

    # ---- positions

    def full_length(self, length: int) -> int:
        """Return the number of tokens of full sequences if each rank holds ``length``."""
        return length * self.group.size

    def spans(self, full_length: int, rank: int | None = None) -> Spans:
        """Return the position ranges [start, stop) of ``rank`` of the group, by default this one."""
        return zigzag.spans(full_length, self.group.rank if rank is None else rank, self.group.size, self.order)

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Return the position in the full sequence of each of this rank's ``length`` tokens, int64 [s]. Cached for the
        micro-batch, except in the default layout, which all callers share: do not write to it."""
        positions = self._positions.get((length, device))
        if positions is None:
            group, full = self.group, self.full_length(length)
            positions = zigzag.positions(full, group.rank, group.size, device, self.order)
            if not self.is_default:
                self._positions[length, device] = positions
        return positions

    def sample_numbers(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the document of each of this rank's tokens of the residual stream, int64 [s / ranks of the stream],
        the number of documents for padding at the end; and the tokens of each document. No host sync."""
        assert self.documents is not None and self.documents.cu_seqlens_q is not None
        bounds = self.documents.cu_seqlens_q.long()
        positions = self.stream_part(self.positions(length, device))
        numbers = torch.bucketize(positions, bounds[1:], right=True)
        is_token = positions < self.full_length(length) - self.padding
        return numbers.where(is_token, len(bounds) - 1), bounds.diff()

    def stream_part(self, x: Tensor) -> Tensor:
        """Return the entries of ``x`` [s, ...], one per token of this rank, for its tokens of the residual stream."""
        return x.chunk(self.stream.size)[self.stream.rank]

    def stream_positions(self, length: int, device: torch.device) -> Tensor:
        """Return the position of each of this rank's ``length`` tokens of the residual stream, int64 [length]."""
        return self.stream_part(self.positions(length * self.stream.size, device))

    @property
    def table_length(self) -> int | None:
        """Length of the position tables that :meth:`positions` indexes; None: tables hold exactly these rows."""
        return None

    def output_rows(self, x: Tensor) -> Tensor:
        """Return the entries of ``x`` [s, ...] of the residual stream for which the output layer is computed."""
        return x

    # ---- attention

    def attention(self, core: Core) -> Attention:
        """Return the attention (query, key, value, mask) -> output [s, b, a, e] of ``core`` for these ranks."""
        return core.form(self)

    def mix_latents(self, mixer: Any, heads: Any, parts: Sequence[Tensor], ctx: AttentionContext) -> Tensor:
        """Return the attention of ``mixer`` over latents: here to the heads that ``heads(*parts, ctx)`` computes."""
        return mixer.attend_heads(heads, parts, ctx)

    def scan(
        self, layer: int, name: str, zeros: Tensor, run: Callable[..., tuple[Tensor, Tensor]], *inputs: Tensor
    ) -> Tensor:
        """Return the outputs [s, b, ...] of a scan over full sequences on this rank.

        Args:
            layer: number of the layer that keeps the state.
            name: name of the state in the mixer's :class:`CacheSpec`.
            zeros: state before the first token of each sequence, [b, ...].
            run: maps ``inputs`` of consecutive tokens and the state before them to (outputs, state after them).
            inputs: [s, b, ...] each."""
        return run(*inputs, zeros)[0]

    # ---- exchanges over the group

    def local(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's tokens of ``x``, full sequences along ``dim``, without communication."""
        return zigzag.local_part(x, self.group.rank, self.group.size, dim, self.order)

    def full(self, x: Tensor, dim: int) -> Tensor:
        """All-gather ``x``, this rank's tokens along ``dim``, to full sequences in natural order; ``x`` itself for one
        rank. The gradient is :meth:`sum_local`, so that each rank may use the result differently."""
        return x if self.group.size == 1 else _Full.apply(x, self, dim)

    def sum_local(self, x: Tensor, dim: int) -> Tensor:
        """Reduce-scatter ``x``, full sequences along ``dim``, in its dtype: return the sum over ranks for this rank's
        tokens, a new tensor; ``x`` itself for one rank. Not differentiable."""
        size = self.group.size
        if size == 1:
            return x
        parts = torch.stack([zigzag.local_part(x, rank, size, dim, self.order) for rank in range(size)])
        result = parts.new_empty(parts.shape[1:])
        collective_names.reduce_scatter(result, parts.flatten(0, 1), group=self.group.handle)
        return result

    def sum(self, x: Tensor) -> Tensor:
        """All-reduce ``x`` in place over the group and return it. Not differentiable."""
        if self.group.size > 1:
            dist.all_reduce(x, group=self.group.handle)
        return x

    def heads(self, *tensors: Tensor) -> Sequence[Tensor]:
        """All-to-all from tokens to heads: each [s, b, a, d] -> [n * s, b, a / n, d], full sequences in natural order
        of this rank's 1 / n of the heads. One collective for all ``tensors``, and its inverse in backward."""
        group = self.group
        return tensors if group.size == 1 else HeadsAndSequence.apply(group, self.order, True, *tensors)

    def tokens(self, x: Tensor) -> Tensor:
        """All-to-all from heads to tokens, [n * s, b, a / n, d] -> [s, b, a, d]: the inverse of :meth:`heads`."""
        return x if self.group.size == 1 else HeadsAndSequence.apply(self.group, self.order, False, x)[0]


class _Full(torch.autograd.Function):
    """:meth:`TokenLayout.full` of several ranks."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, layout: TokenLayout, dim: int) -> Tensor:
        group = layout.group
        ctx.layout, ctx.dim = layout, dim
        parts = x.new_empty((group.size * x.shape[0], *x.shape[1:]))
        collective_names.all_gather(parts, x.contiguous(), group=group.handle)
        return zigzag.merge_parts(parts.chunk(group.size), dim, layout.order)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.layout.sum_local(grad, ctx.dim), None, None


ONE_RANK = TokenLayout()
"""Full sequences on one rank."""
