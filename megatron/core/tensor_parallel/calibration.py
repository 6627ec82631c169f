"""Calibration: the magnitudes of the inputs of linear layers, from which static fp8 scales follow.

Legend: r rows, i input features."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.config.quantization import LINEAR
from megatron.core.fusions.e4m3 import rounded, scales
from megatron.core.fusions.fp8_cast import BLOCK
from megatron.core.groups.process_groups import Group
from megatron.core.tensor_parallel.fake_quantization import RoundedGemms, RoundedProducts
from megatron.core.tensor_parallel.gemms import GemmPlace, Gemms, Operands, install_gemms
from megatron.core.tensor_parallel.grouped_linear import GroupedLinear, GroupedProducts

NUM_MAGNITUDES = 2**15
"""Magnitudes of bf16, which are ordered like their bits."""
Inputs = Callable[[Tensor], Tensor]


class Magnitudes:
    """Magnitudes of all inputs of a layer; with ``counts`` also how often each has occurred, after rounding to bf16."""

    def __init__(self, *, counts: bool) -> None:
        self.amax = 0.0
        self.counts = torch.zeros(NUM_MAGNITUDES, dtype=torch.int64) if counts else None

    def __call__(self, x: Tensor) -> Tensor:
        """Record ``x`` [.., i] and return it. Waits for the device."""
        if x.numel():
            self.amax = max(self.amax, float(x.abs().amax()))
        if self.counts is not None:
            bits = x.abs().to(torch.bfloat16).view(torch.int16).flatten().int()
            self.counts += torch.bincount(bits, minlength=NUM_MAGNITUDES).cpu()
        return x

    def scale(self, percentile: float) -> float:
        """Return the scale that maps the largest magnitude, or the smallest that ``percentile`` % of the inputs do not
        exceed, to 448; rounded to bf16, as it is stored."""
        limit = torch.tensor(self.amax)
        if self.counts is not None:
            total = self.counts.cumsum(0)
            index = int((total >= total[-1] * (percentile / 100)).nonzero()[0])
            limit = torch.tensor([index], dtype=torch.int16).view(torch.bfloat16)[0].float()
        return float(scales(limit.view(1)).to(torch.bfloat16))


class _RecordedProducts(RoundedProducts):
    """Records only the rows that belong to an expert: the others are undefined."""

    def pack_input(self, x: Tensor, ends: Tensor, *, for_backward: bool) -> Operands:
        self.inputs(x[: int(ends[-1])])
        return Operands(x, x)


def replace_inputs(model: nn.Module, inputs: Callable[[str], Inputs], *, records: bool = False) -> None:
    """Let each linear layer compute with ``inputs(name)`` of its input. ``records``: these return it as it is."""

    def recipe(place: GemmPlace) -> Gemms | GroupedProducts | None:
        if not LINEAR.fullmatch(place.name):
            return None
        layer, change = place.module, inputs(place.name)
        if isinstance(layer, GroupedLinear):
            return (_RecordedProducts if records else RoundedProducts)(change, None, layer.products)
        return RoundedGemms(change, None, layer.traits.gemms.accumulate)

    install_gemms(model, recipe)


def static_rounding(scale: float) -> Inputs:
    """Return the rounding of inputs to fp8 with a static scale."""
    return lambda x: rounded(x, torch.full((), scale, device=x.device))


def group_rounding(x: Tensor) -> Tensor:
    """Return ``x`` [.., i] rounded to fp8 with a scale per row and 128 features; the last group may be smaller."""
    return torch.cat([rounded(part, scales(part.abs().amax(-1, keepdim=True))) for part in x.split(BLOCK, -1)], -1)


def gather_scales(local: Mapping[str, Magnitudes], percentile: float, world: Group) -> dict[str, float]:
    """Return the scale of each layer that had inputs on any rank. Collective."""
    parts: list[Mapping[str, Magnitudes]] = [local]
    if world.size > 1:
        parts *= world.size
        dist.all_gather_object(parts, dict(local), group=world.handle)
    total: dict[str, Magnitudes] = {}
    for name, entry in (item for part in parts for item in part.items()):
        first = total.setdefault(name, entry)
        if first is not entry:
            first.amax = max(first.amax, entry.amax)
            first.counts = None if first.counts is None or entry.counts is None else first.counts + entry.counts
    return {name: entry.scale(percentile) for name, entry in total.items() if entry.amax}
