"""Linear layers in fp8: two formats, three recipes of scales, three products.

    Y = q(X) q(W)^T        dX = q(dY) q(W)        dW = q(dY)^T q(X)        q(x) = round(x factor) / factor

Formats: Micikevicius et al. 2022; finite values beyond the largest are clipped. Delayed scales: Transformer Engine's
rule, once per step. Blocks: DeepSeek-V3 (2024), section 3.3, with factors that are powers of two. Values, factors and
inverses are rounded to fp32, and so are the values times their factors; everything else is fp64. X and W are e4m3.

Legend: b batch, s sequence, t tokens (position by position), o output features, i input features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.reference.settings import Settings

BLOCK = 128
EXPERT_WIDTH = 6144
FP32_MAX = float(torch.finfo(torch.float32).max)


class Format(NamedTuple):
    mantissa: int
    """Bits after the point."""
    lowest: int
    """Exponent of the smallest normal numbers; smaller ones have their step."""
    largest: float


E4M3, E5M2 = Format(3, -6, 448.0), Format(2, -14, 57344.0)


def fp32(x: Tensor) -> Tensor:
    """Round to fp32; of a product or quotient of fp32 numbers, which fp64 holds well enough, as fp32 would."""
    return x.float().double()


def power_of_two(exponent: Tensor) -> Tensor:
    return (exponent.long() + 1023 << 52).view(torch.float64)


def rounded(x: Tensor, to: Format) -> Tensor:
    """Nearest number of the format, ties to the even one, clipped to the largest; NaN where ``x`` is not finite."""
    clipped = x.clamp(-to.largest, to.largest)
    exponent = torch.frexp(clipped).exponent - 1
    step = power_of_two(exponent.clamp(min=to.lowest) - to.mantissa)
    return torch.where(x.isfinite(), (clipped / step).round() * step, torch.nan)


def codes(x: Tensor, of: Format) -> Tensor:
    """Bytes of numbers of a format: sign, exponent, mantissa. NaN: all bits but the sign."""
    size = x.abs()
    exponent = torch.where(size > 0, torch.frexp(size).exponent - 1, of.lowest).clamp(min=of.lowest)
    steps = (size / power_of_two(exponent - of.mantissa)).nan_to_num().long()  # with the leading 1 of normal numbers
    code = (exponent - of.lowest << of.mantissa) + steps
    return torch.where(x.isnan(), 0x7F, code | x.signbit().long() << 7).to(torch.uint8)


def find_factor(amax: Tensor, largest: float) -> Tensor:
    """1 where the largest magnitude is 0, infinite or NaN; quotients beyond fp32 are its largest number."""
    quotient = fp32(largest / amax).clamp(max=FP32_MAX)
    return torch.where(amax.isfinite() & (amax > 0), quotient, 1.0)


class Quantized(NamedTuple):
    grid: Tensor
    """Numbers of the format [m, k]."""
    scale: Tensor
    """Inverse factors [1], [m, k / 128] or [m / 128, k / 128], rounded up."""

    @property
    def values(self) -> Tensor:
        scale = self.scale
        if scale.dim() == 2:
            down = 1 if len(scale) == len(self.grid) else BLOCK
            scale = scale.repeat_interleave(down, 0)[: len(self.grid)]
            scale = scale.repeat_interleave(BLOCK, 1)[:, : self.grid.shape[1]]
        return self.grid * scale


def scaled(x: Tensor, factor: Tensor, to: Format) -> Tensor:
    """-0 becomes 0."""
    product = fp32((x * factor).clamp(-to.largest, to.largest)) + 0.0
    return rounded(torch.where(x.isfinite(), product, torch.nan), to)


def find_amax(x: Tensor) -> Tensor:
    """NaN if there is one; 0 of nothing."""
    return fp32(x).abs().amax().view(1) if x.numel() else x.new_zeros(1)


def per_tensor(x: Tensor, to: Format, factor: Tensor | None = None) -> Quantized:
    """Cast with ``factor`` [1]; None: the factor that follows from ``x``."""
    factor = find_factor(find_amax(x), to.largest) if factor is None else factor
    return Quantized(scaled(fp32(x), factor, to), fp32(1 / factor))


def in_blocks(x: Tensor, to: Format, height: int = 1) -> Quantized:
    """With a factor, a power of two, per block of ``height`` x 128; blocks at the edges are smaller."""
    m, k = x.shape
    padded = F.pad(fp32(x), (0, -k % BLOCK, 0, -m % height))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, height))
    factor = find_factor(blocks.abs().amax((1, 3), keepdim=True), to.largest)
    factor = power_of_two(torch.frexp(factor).exponent - 1)
    grid = scaled(blocks, factor, to).flatten(2).flatten(0, 1)[:m, :k]
    return Quantized(grid, fp32(1 / factor)[:, 0, :, 0])


class History:
    """Largest magnitudes of one matrix in the last steps, newest first, and the factor that follows."""

    def __init__(self, largest: float) -> None:
        self.largest, self.entries = largest, []
        self.observed = torch.zeros(1, dtype=torch.float64)
        self.factor: Tensor | None = None
        """None: no magnitude yet; matrices are scaled by their values."""

    def end_step(self, c: Settings) -> None:
        newest = self.observed if self.observed.isfinite() else torch.zeros_like(self.observed)
        self.observed, self.entries = torch.zeros_like(newest), [newest, *self.entries][: c.fp8_amax_history_len]
        amax = max(self.entries) if c.fp8_amax_compute_algo == "max" else newest
        if amax > 0:
            self.factor = fp32(fp32(self.largest / amax) / 2**c.fp8_margin).clamp(max=FP32_MAX)


Histories = dict[str, History]


def covers(c: Settings, name: str) -> bool:
    """Whether a layer is in fp8: all of transformer layers but routers, narrow experts, experts with block scales, and
    the first and last layers on request."""
    words = name.split(".")
    if "experts" in words:
        width = c.moe_ffn_hidden_size or c.ffn_hidden_size or 0
        if c.fp8_recipe == "blockwise" or width < EXPERT_WIDTH:
            return False
    if c.fp8_format is None or words[1:2] != ["layers"] or words[0] == "mtp" or words[-1] == "router":
        return False
    first, last = c.num_layers_at_start_in_bf16, c.num_layers - c.num_layers_at_end_in_bf16
    return not c.first_last_layers_bf16 or first <= int(words[2]) < last


def linear(
    c: Settings, x: Tensor, weight: Tensor, name: str, histories: Histories, size: int, training: bool
) -> Tensor:
    """X W^T of [b, s, i]; micro-batches of ``size`` are cast separately."""
    parts = []
    for part in x.split(size):
        x_ti = part.transpose(0, 1).flatten(0, 1)
        y_to = _Linear.apply(x_ti, weight, c, name, histories, training)
        parts.append(y_to.unflatten(0, (-1, len(part))).transpose(0, 1))
    return torch.cat(parts)


def expert_linear(
    c: Settings, x: Tensor, weight: Tensor, name: str, histories: Histories, size: int, training: bool
) -> Tensor:
    """X_e W_e^T of experts [e, b, s, i], zero where an expert is not chosen: one scale for the rows of all experts, and
    one per weight. Delayed scales are used once input and gradient have one; before nothing is rounded."""
    parts = []
    for part in x.split(size, dim=1):
        y_eto = _Linear.apply(part.transpose(1, 2).flatten(1, 2), weight, c, name, histories, training)
        parts.append(y_eto.unflatten(1, (-1, part.shape[1])).transpose(1, 2))
    return torch.cat(parts, dim=1)


def is_calibrated(c: Settings, name: str, histories: Histories) -> bool:
    result = [histories.get(f"{name}.{matrix}") for matrix in ("input", "gradient")]
    return c.fp8_recipe != "delayed" or all(item is not None and item.factor is not None for item in result)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, c, name, histories, training):
        ctx.save_for_backward(x, weight)
        ctx.c, ctx.name, ctx.histories, ctx.training = c, name, histories, training
        ctx.plain = x.dim() == 3 and not is_calibrated(c, name, histories)
        rows, _ = cast(c, x, E4M3, f"{name}.input", histories, training)
        return x @ weight.mT if ctx.plain else rows @ cast_weight(c, weight).mT

    @staticmethod
    def backward(ctx, grad):
        (x, weight), c, name = ctx.saved_tensors, ctx.c, ctx.name
        to = E5M2 if c.fp8_format == "hybrid" else E4M3
        rows, columns = cast(c, grad, to, f"{name}.gradient", ctx.histories, ctx.training)
        if ctx.plain:
            return grad @ weight, grad.mT @ x, None, None, None, None
        if c.no_fp8_wgrad:
            columns, x_ti = grad, x
        else:
            _, x_ti = cast(c, x, E4M3, f"{name}.input", ctx.histories, ctx.training)
        return rows @ cast_weight(c, weight), columns.mT @ x_ti, None, None, None, None


def cast(c: Settings, x: Tensor, to: Format, name: str, histories: Histories, training: bool) -> tuple[Tensor, Tensor]:
    """Values of a matrix [t, i] as the product along i and the product along t read it."""
    if c.fp8_recipe == "blockwise":
        return in_blocks(x, to).values, in_blocks(x.T, to).values.T
    factor = None
    if c.fp8_recipe == "delayed":
        history = histories.setdefault(name, History(to.largest))
        factor = history.factor
        if training:
            history.observed = torch.maximum(history.observed, find_amax(x))
    values = per_tensor(x, to, factor).values
    return values, values


def cast_weight(c: Settings, weight: Tensor) -> Tensor:
    """Values of a weight [o, i] or of experts [e, o, i], always scaled by the weight of this step."""
    if weight.dim() == 3:
        return torch.stack([cast_weight(c, item) for item in weight])
    return (in_blocks(weight, E4M3, BLOCK) if c.fp8_recipe == "blockwise" else per_tensor(weight, E4M3)).values
