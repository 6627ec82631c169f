"""Adaptive Muon: a second moment of Muon's orthogonal factors, after Newton-Schulz and before the scale by shape.

    adamuon     v <- b2 v + (1 - b2) o^2                    o <- o / (sqrt(v) + eps)              (arXiv 2507.11005)
    normuon     v <- b2 v + (1 - b2) mean(o^2)              o <- |o| / |w| w, w = o / sqrt(max(v, eps))
                                                                                                  (arXiv 2510.05491)

The mean is over the columns of a matrix with at least as many rows as columns, else over its rows; |.| is the Frobenius
norm. Moments start at zero without bias correction, as in Megatron-LM. Matrices, scales and dealing are as in Muon;
the owner of a matrix updates its second moment, so that means and norms cover the full matrix on every layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron.core.fusions.storage import Storage
from megatron.core.optimizer.muon import Muon, row_views
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.sharding.deal import Deal

if TYPE_CHECKING:
    from megatron.core.optimizer.update_rules import Entry


class AdaptiveMuon(Muon):
    """Muon with a second moment ``moment2_buffer``. It has the shape of the weight for both methods: normuon repeats
    the mean in every element of a row or column, so that moments are sharded and saved as all others."""

    def __init__(self, config: OptimizerConfig, storages: Sequence[Storage]) -> None:
        super().__init__(config, storages)
        self.moment_dtypes["moment2_buffer"] = torch.float32

    def factors(self, deal: Deal, directions: Sequence[Tensor], batch: Sequence[Entry], skip: Tensor) -> list[Tensor]:
        """Return the adapted factors for this rank's shards, and update second moments unless ``skip`` is 1."""
        moments = [entry.moments[1] for entry in batch]
        full = deal.collect(moments)
        factors = self.orthogonalized(deal.collect(directions), deal.owned_specs)
        adapted, updated = [], []
        for factor, moment, spec in zip(factors, full, deal.owned_specs):
            target = factor.to(moment.dtype, copy=True, memory_format=torch.contiguous_format)
            second = moment.clone(memory_format=torch.contiguous_format)
            views = (row_views(tensor, spec, self.splits) for tensor in (target, second))
            for (part, height), (old, _) in zip(*views):
                shape = -1, height, part.shape[-1]
                output, new = self._adapt(part.reshape(shape), old.reshape(shape))
                part.copy_(output.view(part.shape))
                old.copy_(torch.where(skip == 0, new.view(old.shape), old))
            adapted.append(self.scaled_down(target, spec))
            updated.append(second)
        for moment, new in zip(moments, deal.give_back(updated, moments)):
            moment.copy_(new)
        return deal.give_back(adapted, moments)

    def _adapt(self, factors: Tensor, moments: Tensor) -> tuple[Tensor, Tensor]:
        """Return the adapted factors and new second moments of matrices [k, m, n]."""
        config, squares = self.config, factors.square()
        if config.adaptive_muon_moment2_method == "adamuon":
            moments = torch.lerp(moments, squares, 1.0 - config.adaptive_muon_beta2)
            return factors / (moments.sqrt() + config.adaptive_muon_eps), moments
        dim = -1 if factors.shape[-2] >= factors.shape[-1] else -2
        means = squares.mean(dim=dim, keepdim=True).expand_as(moments)
        moments = torch.lerp(moments, means, 1.0 - config.adaptive_muon_beta2)
        adapted = factors * moments.clamp(min=config.adaptive_muon_eps).rsqrt()
        norm, target = (x.square().sum(dim=(-2, -1), keepdim=True).sqrt() for x in (adapted, factors))
        return adapted * (target / norm.clamp(min=config.adaptive_muon_eps)), moments
