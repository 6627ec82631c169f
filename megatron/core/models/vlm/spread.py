"""Images of a micro-batch over the ranks that share it: each rank of tensor and context parallelism computes some of
them, balanced by patches, and all ranks gather the embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.autograd_context import AutogradContext
from megatron.core.groups import collective_names
from megatron.core.groups.process_groups import Group
from megatron.core.host_memory import copied


def share_images(patches: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the images of each rank, in ascending order. ``patches``: size of each image. The largest of the remaining
    images goes to the rank with the fewest patches."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    work = [0] * ranks
    for image in sorted(range(len(patches)), key=lambda image: (-patches[image], image)):
        rank = min(range(ranks), key=lambda rank: (work[rank], rank))
        shares[rank].append(image)
        work[rank] += patches[image]
    return [sorted(share) for share in shares]


class Gathering(NamedTuple):
    """Places of the embeddings that ranks computed."""

    group: Group
    most: int
    """Largest number of embeddings of a rank."""
    order: Tensor
    """Place of each embedding, in the order of images, among ``most`` places of each rank, int64 [t]."""
    copies: int
    """Ranks whose gradients of the embeddings are equal, and not parts of a sum."""


def gathering(tokens: Sequence[int], shares: Sequence[Sequence[int]], group: Group, copies: int) -> Gathering:
    """Return the gathering of images with ``tokens`` embeddings each, which ranks computed by ``shares``."""
    counts = [sum(tokens[image] for image in share) for share in shares]
    most = max(counts)
    starts: dict[int, int] = {}
    for rank, share in enumerate(shares):
        place = rank * most
        for image in share:
            starts[image] = place
            place += tokens[image]
    order = [torch.arange(starts[image], starts[image] + tokens[image]) for image in range(len(tokens))]
    return Gathering(group, most, torch.cat([torch.empty(0, dtype=torch.int64), *order]), copies)


class GatherImages(torch.autograd.Function):
    """This rank's embeddings [k, h] -> all [t, h], in the order of images. Backward: the sum over ranks."""

    @staticmethod
    def forward(ctx: AutogradContext, mine: Tensor, plan: Gathering) -> Tensor:
        ctx.plan, ctx.count = plan, len(mine)
        padded = mine.new_zeros((plan.most, mine.shape[1]))
        padded[: len(mine)] = mine
        parts = mine.new_empty((plan.group.size * plan.most, mine.shape[1]))
        collective_names.all_gather(parts, padded, group=plan.group.handle)
        return parts[copied(plan.order, mine.device)]

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        plan = ctx.plan
        parts = grad.new_zeros((plan.group.size * plan.most, grad.shape[1]))
        parts[copied(plan.order, grad.device)] = grad / plan.copies
        result = grad.new_empty((plan.most, grad.shape[1]))
        collective_names.reduce_scatter(result, parts, group=plan.group.handle)
        return result[: ctx.count], None
