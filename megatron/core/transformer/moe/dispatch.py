"""MoE token dispatch: send tokens to the ranks of their experts and combine the results.

  dispatch   tokens [t, h], routing  ->  rows [r, h] sorted by local expert, row weights, end of each expert's rows
  combine    rows [r, h]             ->  [t, h], the sum of each token's rows

  local       one rank has all experts unsharded: a sort, without a host sync
  all-gather  each rank all-gathers all tokens, selects the rows of its experts and reduce-scatters the sums
  all-to-all  a row is sent to its expert's rank and back; with expert tensor parallelism to all ranks that share the
              expert, and the partial sums are added on the token's rank

All strategies compute the same sums. Rows of one expert are in the order of ranks and tokens. Without a capacity no
token is dropped. With ``moe_pad_expert_input_to_capacity`` every expert has the same number of rows, zero-padded, and
no host sync is needed. With ``moe_static_rows`` all-gather allocates the maximum number of rows: a token's experts
differ, so at most min(k, e) of its choices are local. That avoids the host sync but needs EP times the memory of a
balanced load. (All-to-all with even splits would send that many rows, k times the volume of all-gather.) Otherwise,
with several expert-parallel ranks, the host reads the number of rows and waits for the device.

Started dispatches and combines overlap with all work until their result is requested.

Legend: t tokens of this rank, h hidden, k choices of a token, r rows, e local experts, n ranks that exchange tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.fusions import permute
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.tensor_parallel.autograd_handle import (
    AutogradHandle,
    start_all_gather,
    start_all_to_all,
    start_reduce_scatter,
)
from megatron.core.tensor_parallel.collectives import begin_all_gather, begin_all_to_all
from megatron.core.transformer.moe.routing import Routing, expert_capacity


class Dispatched(NamedTuple):
    """Inputs of the experts and the state that :meth:`Dispatcher.combine` needs."""

    rows: Tensor
    """[r, h], sorted by expert. Rows after the last end belong to no expert."""
    weights: Tensor
    """[r], router weight of each row."""
    ends: Tensor
    """int32 [e]: end of each local expert's rows."""
    way_back: Any = None
    """State of the dispatcher for ``combine``: a permutation, or the plan of the all-to-all."""


class Dispatcher:
    """Dispatcher of one layer. All ranks of the group must start the same dispatches and combines in the same order."""

    def __init__(self, config: TransformerConfig, *, groups: ProcessGroups) -> None:
        """Set sizes, groups and the row kernels; no communication. ``pad_factor`` is the capacity factor only with
        ``moe_pad_expert_input_to_capacity``: without padding the router drops, not the dispatcher."""
        assert config.num_moe_experts is not None
        self.num_experts, self.k = config.num_moe_experts, config.moe_router_topk
        self.group, self.ep, self.etp = groups.etp_ep, groups.ep, groups.etp
        self.num_local = self.num_experts // groups.ep.size
        self.moves = permute.choose_row_moves(config.params_dtype, config.moe_fusion)
        self.static_rows = config.moe_static_rows
        self.pad_factor = config.moe_expert_capacity_factor if config.moe_pad_expert_input_to_capacity else None

    def capacity(self, tokens: int) -> int | None:
        """Return the rows per expert from each rank with ``tokens`` tokens; None without padding to capacity."""
        if self.pad_factor is None:
            return None
        return expert_capacity(tokens, self.num_experts, self.k, self.pad_factor)

    def dispatch(self, tokens: Tensor, routing: Routing) -> Dispatched:
        """Send ``tokens`` [t, h] to their experts and wait for the received rows."""
        return self.start_dispatch(tokens, routing)()

    def combine(self, rows: Tensor, dispatched: Dispatched) -> Tensor:
        """Return ``rows`` [r, h], in the order of ``dispatched``, to their tokens and sum them: [t, h]. Router weights
        are not applied here: the experts multiply by them."""
        return self.start_combine(rows, dispatched)()

    def start_dispatch(self, tokens: Tensor, routing: Routing) -> Callable[[], Dispatched]:
        """Start :meth:`dispatch`; return a function that waits for the result. Call it exactly once."""
        raise NotImplementedError

    def start_combine(self, rows: Tensor, dispatched: Dispatched) -> Callable[[], Tensor]:
        """Start :meth:`combine`; return a function that waits for the result (CUDA: in stream order). Call it once."""
        raise NotImplementedError

    def _sorted(self, key: Tensor, num_keys: int, capacity: int | None, *, is_complete: bool) -> permute.Permutation:
        permutation = permute.sort_choices(key, num_keys, is_complete=is_complete)
        return permutation if capacity is None else permute.pad_to(permutation, key, capacity)


class LocalDispatcher(Dispatcher):
    """Dispatcher for one rank with all experts: a permutation without communication."""

    def start_dispatch(self, tokens: Tensor, routing: Routing) -> Callable[[], Dispatched]:
        """Sort the rows by expert now, without a host sync; drop choices beyond the capacity, or pad to it."""
        permutation = self._sorted(
            routing.experts, self.num_experts, self.capacity(len(tokens)), is_complete=not routing.drops
        )
        rows = permute.gather_rows(tokens, permutation, self.moves)
        weights = permute.gather_choices(routing.weights, permutation)
        return lambda: Dispatched(rows, weights, permutation.ends, permutation)

    def start_combine(self, rows: Tensor, dispatched: Dispatched) -> Callable[[], Tensor]:
        """Start nothing: the returned function sums the rows of each token, in fp32."""
        return partial(permute.combine_rows, rows, dispatched.way_back, self.moves)


ReadHost = Callable[[], list[Any]]


def start_reading(x: Tensor) -> ReadHost:
    """Start copying ``x`` to pinned host memory on the current stream. Returns a function that waits for this copy
    only, not for later GPU work and returns the values as a list."""
    if not x.is_cuda:
        return x.tolist
    on_host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    on_host.copy_(x, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> list[Any]:
        copied.synchronize()
        return on_host.tolist()

    return read


class AllGatherDispatcher(Dispatcher):
    """Dispatcher that all-gathers the tokens of all n ranks and reduce-scatters the expert outputs."""

    def start_dispatch(self, tokens: Tensor, routing: Routing) -> Callable[[], Dispatched]:
        """Start all-gathers of choices, weights and ``tokens``, and sort the choices of all ranks by local expert. The
        returned function reads the number of local rows on the host (not with a capacity or ``moe_static_rows``)."""
        choosing = begin_all_gather(routing.experts, self.group)
        weighting, gathering = start_all_gather(routing.weights, self.group), start_all_gather(tokens, self.group)
        capacity, is_complete = self.capacity(len(tokens)), self.ep.size == 1 and not routing.drops
        # modulo maps local experts to 0..e-1 and all others above, so that clamp turns remote and dropped choices into
        # the drop key
        shifted = (choosing.wait() - self.ep.rank * self.num_local).remainder_(self.num_experts + 1)
        key = shifted.clamp_(max=self.num_local)
        permutation = self._sorted(
            key, self.num_local, capacity and capacity * self.group.size, is_complete=is_complete
        )
        count = None
        if self.ep.size > 1 and capacity is None:  # drop the rows of other ranks' experts
            if self.static_rows:
                permutation = permutation.head(len(key) * min(self.k, self.num_local))
            else:
                count = start_reading(permutation.ends[-1:])
        return partial(self._arrived, gathering, weighting, permutation, count)

    def _arrived(
        self, gathering: AutogradHandle, weighting: AutogradHandle, permutation: permute.Permutation,
        count: ReadHost | None,
    ) -> Dispatched:  # fmt: skip
        """Wait for the all-gathers and return the local rows; ``count`` waits for their number (None: all)."""
        if count is not None:
            permutation = permutation.head(*count())
        rows = permute.gather_rows(gathering.wait(), permutation, self.moves)
        return Dispatched(rows, permute.gather_choices(weighting.wait(), permutation), permutation.ends, permutation)

    def start_combine(self, rows: Tensor, dispatched: Dispatched) -> Callable[[], Tensor]:
        """Sum the local rows of each token (fp32, rounded once) now, and start the reduce-scatter of these sums."""
        return start_reduce_scatter(permute.combine_rows(rows, dispatched.way_back, self.moves), self.group).wait


class _Exchange(NamedTuple):
    """Split sizes of an all-to-all of rows, and the permutations before and after it."""

    sent: permute.Permutation
    send: list[int]
    """Rows to each of the n ranks."""
    receive: list[int]
    """Rows from each of the n ranks."""
    received: permute.Permutation | None = None
    """Permutation of received rows into the order of local experts; None with one local expert."""


class AllToAllDispatcher(Dispatcher):
    """Dispatcher that sends each row to every rank that holds a shard of its expert."""

    def __init__(self, config: TransformerConfig, *, groups: ProcessGroups) -> None:
        """Also compute the strides of EP and ETP ranks in the joint group (0 for one rank)."""
        super().__init__(config, groups=groups)
        # ranks of EP and ETP are strided in the joint group, with strides that depend on the order of the mesh axes
        place = groups.etp_ep.ranks.index
        self.ep_stride, self.etp_stride = (
            place(axis.ranks[1]) - place(axis.ranks[0]) if axis.size > 1 else 0 for axis in (groups.ep, groups.etp)
        )

    def start_dispatch(self, tokens: Tensor, routing: Routing) -> Callable[[], Dispatched]:
        """Sort the rows of ``tokens`` [t, h] by receiving rank, exchange row counts (a host sync; none with a capacity,
        where every pair of ranks exchanges equally many), and start the all-to-alls of rows and weights over the joint
        EP and ETP group. The returned function waits and sorts by local expert."""
        key, capacity = self._keys(routing.experts), self.capacity(len(tokens))
        sent = self._sorted(key, self.group.size * self.num_local, capacity, is_complete=not routing.drops)
        counting = self._begin_counting(sent.ends)
        rows, weights = permute.gather_rows(tokens, sent, self.moves), permute.gather_choices(routing.weights, sent)
        count_ne, send, receive = counting() if capacity is None else self._fixed_counts(capacity, sent.ends)
        sent = sent.head(sum(send))  # dropped choices have the largest key: they are last, and are not sent
        sizes: dict[str, Any] = {"send": send, "receive": receive, "is_even": capacity is not None}
        weighting = start_all_to_all(weights[: sum(send)], self.group, **sizes)
        travelling = start_all_to_all(rows[: sum(send)], self.group, **sizes)
        return partial(self._arrived, travelling, weighting, count_ne, _Exchange(sent, send, receive))

    def _keys(self, experts: Tensor) -> Tensor:
        """Return sort keys [t, k * etp]: receiving rank * local experts + local expert. With expert tensor parallelism
        each choice is sent to all ranks that share the expert. Dropped choices (expert number E) get the largest key,
        after all ranks."""
        if self.etp.size == 1:
            return experts
        owner, local = experts // self.num_local, experts % self.num_local
        copies = torch.arange(self.etp.size, device=experts.device) * self.etp_stride
        rank = (owner * self.ep_stride).unsqueeze(-1) + copies
        key = rank * self.num_local + local.unsqueeze(-1)
        return key.masked_fill((experts == self.num_experts).unsqueeze(-1), self.group.size * self.num_local).flatten(1)

    def _begin_counting(self, ends: Tensor) -> Callable[[], tuple[Tensor, list[int], list[int]]]:
        """All-to-all the row counts of experts. Return a function that waits on the host and returns rows by rank and
        local expert [n, e] received here, and the row counts to and from each rank."""
        count = ends.diff(prepend=ends.new_zeros(1))
        even = [self.num_local] * self.group.size
        coming = begin_all_to_all(count, self.group, send=even, receive=even).wait()
        both = torch.stack((count, coming)).view(2, self.group.size, self.num_local)
        totals = start_reading(both.sum(-1))
        return lambda: (both[1], *totals())

    def _fixed_counts(self, capacity: int, like: Tensor) -> tuple[Tensor, list[int], list[int]]:
        even = [capacity * self.num_local] * self.group.size
        return like.new_full((self.group.size, self.num_local), capacity), even, even

    def _arrived(
        self, travelling: AutogradHandle, weighting: AutogradHandle, count_ne: Tensor, way: _Exchange
    ) -> Dispatched:
        """Wait for weights and rows, which arrive ordered by sending rank, and return them sorted by local expert. With
        one local expert they stay in this order. ``count_ne`` [n, e]: rows from each rank for each local expert."""
        weights, rows = weighting.wait(), travelling.wait()
        if self.num_local == 1:
            return Dispatched(rows, weights, count_ne.sum(0).cumsum(0).int(), way)
        expert = torch.arange(self.num_local, device=rows.device).repeat(self.group.size)
        # without output_size the host would wait for the number of rows
        key = torch.repeat_interleave(expert, count_ne.flatten(), output_size=len(rows)).unsqueeze(-1)
        received = permute.sort_choices(key, self.num_local, is_complete=True)
        rows = permute.gather_rows(rows, received, self.moves)
        weights = permute.gather_choices(weights.unsqueeze(-1), received)
        return Dispatched(rows, weights, received.ends, way._replace(received=received))

    def start_combine(self, rows: Tensor, dispatched: Dispatched) -> Callable[[], Tensor]:
        """Restore the order of the received rows, and start the all-to-all that returns them. The returned function
        adds the rows of each token: sums in fp32, rounded once to the rows' dtype."""
        way: _Exchange = dispatched.way_back
        if way.received is not None:
            rows = permute.combine_rows(rows, way.received, self.moves)
        is_even = self.pad_factor is not None
        returning = start_all_to_all(rows, self.group, send=way.receive, receive=way.send, is_even=is_even)
        return lambda: permute.combine_rows(returning.wait(), way.sent, self.moves)


_KINDS = {"allgather": AllGatherDispatcher, "alltoall": AllToAllDispatcher, "flex": AllToAllDispatcher}


def build_dispatcher(config: TransformerConfig, *, groups: ProcessGroups) -> Dispatcher:
    """Build the dispatcher of ``moe_token_dispatcher_type``; a single rank with all experts uses the local one."""
    kind = LocalDispatcher if groups.etp_ep.size == 1 else _KINDS[config.moe_token_dispatcher_type]
    return kind(config, groups=groups)
