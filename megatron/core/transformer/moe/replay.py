"""Recorded choices of experts, replayed in a later pass: the experts of a token are then the same although the weights,
the kernels or the rounding differ (as between a generator and its trainer).

    with record_routes(model) as routes: ...      # forward passes
    with replay_routes(model, routes): ...        # forward and backward passes of the same micro-batches

Routes are those of full sequences, so that record and replay may have different layouts. Weights of the experts follow
from the router's current logits at the replayed experts, and the router gets their gradients. The generator returns the
routes of a request (``Completion.routes``), which ``pack_routes`` arranges for micro-batches of packed sequences.

Legend: s tokens of full sequences, b batch, k choices of a token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from megatron.core.attention.token_layout import TokenLayout
from megatron.core.config.errors import UserError
from megatron.core.tensor_parallel.operators import all_gather_along_first_dim
from megatron.core.transformer.moe.router import TopKRouter

Routes = Mapping[int, Sequence[Tensor]]
"""Layer number -> int64 [s, b, k] of each forward pass, in order. -1: the router chooses."""
SequenceRoutes = Mapping[int, Tensor]
"""Layer number -> int64 [tokens, k] of the leading tokens of a sequence."""
Select = Callable[[Tensor, TokenLayout], Tensor]


def _routers(model: Iterable[nn.Module]) -> Iterator[TopKRouter]:
    for chunk in model:
        yield from (module for module in chunk.modules() if isinstance(module, TopKRouter))


@contextmanager
def _selecting(model: Iterable[nn.Module], make: Callable[[TopKRouter, Select], Select]) -> Iterator[None]:
    """Context in which each router selects by ``make(router, its selection before)``."""
    before = [(router, router.select) for router in _routers(model)]
    for router, select in before:
        router.select = make(router, select)
    try:
        yield
    finally:
        for router, select in before:
            router.select = select


@contextmanager
def record_routes(model: Sequence[nn.Module]) -> Iterator[dict[int, list[Tensor]]]:
    """Context whose forward passes append the experts of every layer of this rank's ``model`` chunks to the yielded
    :data:`Routes`. Collective over the ranks that hold the tokens of the same sequences."""
    routes: dict[int, list[Tensor]] = defaultdict(list)

    def recording(router: TopKRouter, select: Select) -> Select:
        def choose(logits: Tensor, layout: TokenLayout) -> Tensor:
            experts = select(logits, layout)
            all_experts = all_gather_along_first_dim(experts, layout.stream) if layout.stream.size > 1 else experts
            routes[router.layer_number].append(layout.full(all_experts, 0))
            return experts

        return choose

    with _selecting(model, recording):
        yield routes


@contextmanager
def replay_routes(model: Sequence[nn.Module], routes: Routes) -> Iterator[None]:
    """Context in which the routers of ``model`` take the experts of ``routes``, one entry per layer and forward pass
    (recomputation takes none). Raises UserError in a forward pass without routes or with other sizes."""
    entries = {layer: iter(passes) for layer, passes in routes.items()}

    def replaying(router: TopKRouter, select: Select) -> Select:
        def choose(logits: Tensor, layout: TokenLayout) -> Tensor:
            whole = next(entries.get(router.layer_number, iter(())), None)
            if whole is None:
                raise UserError(f"routes: layer {router.layer_number} has more forward passes than were recorded")
            local = layout.stream_part(layout.local(whole, 0))
            if local.shape != (*logits.shape[:2], router.k):
                raise UserError(
                    f"routes: layer {router.layer_number} has routes {tuple(local.shape)} for tokens and choices "
                    f"{(*logits.shape[:2], router.k)}; replay the micro-batches that were recorded"
                )
            local = local.to(logits.device)
            return select(logits, layout).where(local < 0, local)

        return choose

    with _selecting(model, replaying):
        yield


def pack_routes(
    routes: Sequence[SequenceRoutes], rows: Sequence[Sequence[tuple[int, int]]], length: int
) -> dict[int, list[Tensor]]:
    """Return the :data:`Routes` of one forward pass per row of ``length`` tokens. A row lists its sequences as (index
    in ``routes``, first token in the row). Routers choose for tokens without routes, such as padding."""
    packed: dict[int, list[Tensor]] = {}
    for layer, example in routes[0].items():
        packed[layer] = [torch.full((length, 1, example.shape[1]), -1) for _ in rows]
        for whole, places in zip(packed[layer], rows):
            for index, first in places:
                experts = routes[index][layer]
                whole[first : first + len(experts), 0] = experts
    return packed
