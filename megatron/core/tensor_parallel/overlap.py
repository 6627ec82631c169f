"""Gathers and reduce-scatters cut into one piece per rank, each of which travels while another piece is multiplied.

    all-gather, then multiply        own positions first; then each peer's as they arrive
    multiply, then reduce-scatter    the peers' positions first, each sent off at once; own positions last

Step k of a collective exchanges with the ranks k away on either side, so that no piece waits to be forwarded. These are
plain point-to-point operations of torch.distributed: neither MPI, nor NVLink multicast, nor another package is used.

Legend: s sequence, b batch, i input features, o output features; n ranks.
"""

from __future__ import annotations

import functools
import logging

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.process_groups import Group

logger = logging.getLogger(__name__)


def overlap_is_supported(group: Group) -> bool:
    """Whether the group's backend has asynchronous point-to-point operations; the first refusal is logged."""
    backend = dist.get_backend(group.handle) if group.size > 1 else "none"
    if backend in ("nccl", "gloo"):
        return True
    if backend != "none" and group.rank == 0:
        _warn_once(f"--tp-comm-overlap: backend {backend} cannot exchange pieces; collectives run in one piece")
    return False


@functools.cache
def _warn_once(message: str) -> None:
    """One line per process, not per layer."""
    logger.warning(message)


def _exchange(send: Tensor, receive: Tensor, distance: int, group: Group) -> list[dist.Work]:
    """Starts sending to the rank ``distance`` further on and receiving from the one as far back."""
    to = group.ranks[(group.rank + distance) % group.size]
    source = group.ranks[(group.rank - distance) % group.size]
    operations = [
        dist.P2POp(dist.isend, send, to, group=group.handle),
        dist.P2POp(dist.irecv, receive, source, group=group.handle),
    ]
    return dist.batch_isend_irecv(operations)


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def all_gather_then_multiply(x: Tensor, factor: Tensor, bias: Tensor | None, group: Group) -> tuple[Tensor, Tensor]:
    """(X @ factor + bias [s, b, o], X [s, b, i]) where this rank has ``x``, the s / n positions of its rank."""
    pieces = x.new_empty((group.size, *x.shape))
    pieces[group.rank] = x
    products = x.new_empty((group.size, *x.shape[:-1], factor.shape[1]))
    exchanges = [
        _exchange(pieces[group.rank], pieces[(group.rank - distance) % group.size], distance, group)
        for distance in range(1, group.size)
    ]
    for distance in range(group.size):
        if distance:
            _wait(exchanges[distance - 1])
        owner = (group.rank - distance) % group.size
        flat, out = pieces[owner].flatten(0, -2), products[owner].flatten(0, -2)
        if bias is None:
            torch.mm(flat, factor, out=out)
        else:
            torch.addmm(bias, flat, factor, out=out)
    return products.flatten(0, 1), pieces.flatten(0, 1)


def multiply_then_reduce_scatter(x: Tensor, factor: Tensor, group: Group) -> Tensor:
    """This rank's s / n positions of the sum over ranks of ``x`` [s, b, i] @ factor: [s / n, b, o]."""
    if x.shape[0] % group.size:
        raise ValueError(f"sequence length {x.shape[0]} is not divisible by the {group.name} size {group.size}")
    pieces = x.unflatten(0, (group.size, -1))
    terms = x.new_empty((group.size, *pieces.shape[1:-1], factor.shape[1]))
    exchanges, sent = [], []
    for distance in range(1, group.size):
        product = pieces[(group.rank + distance) % group.size].matmul(factor)
        sent.append(product)  # must outlive its transfer
        exchanges.append(_exchange(product, terms[(group.rank - distance) % group.size], distance, group))
    terms[group.rank] = pieces[group.rank].matmul(factor)
    for works in exchanges:
        _wait(works)
    return terms.sum(dim=0, dtype=torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else None).to(x.dtype)
