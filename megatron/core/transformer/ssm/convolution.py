"""Causal convolution of a few tokens per channel and SiLU, reset at every document.

Legend: s sequence, b batch, a heads, p channels of a head, c = a p, w taps, n chunks.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.attention.token_layout import TokenLayout
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.fusions.dispatch import kernels_serve
from megatron.core.fusions.short_convolution import convolution_silu
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.sharding.placement import Shard, Uniform, parameter
from megatron.core.transformer.ssm.kernel_check import Problem, agree, is_right, random_values
from megatron.core.transformer.ssm.scans import rank_chunks


def causal_convolution(
    x: Tensor, follows: Tensor | None, tail: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (``sum_i weight[:, i] x_(t - w + 1 + i)`` + bias [s, b, c], the last w - 1 inputs [b, w - 1, c]).

    Args:
        x: [s, b, c].
        follows: whether a token follows another one of its document, bool [s, b]: earlier documents count as zeros.
            None: all tokens follow ``tail``.
        tail: the w - 1 inputs before ``x``, [b, w - 1, c], zeros where they do not belong to the last one's document.
        weight: [c, w].
        bias: [c].
    """
    taps = weight.shape[1]
    inputs = torch.cat((tail.transpose(0, 1).to(x.dtype), x))
    links = None
    if follows is not None:  # the tail's own are in its zeros
        links = torch.cat((follows.new_ones(taps - 1, follows.shape[1]), follows)).unsqueeze(-1)
    output, reaches = x * weight[:, -1], None
    for distance in range(1, taps):
        before = inputs[taps - 1 - distance : len(inputs) - distance]
        if links is not None:
            link = links[taps - distance : len(links) - distance + 1]
            reaches = link if reaches is None else reaches & link
            before = before * reaches
        output = output + before * weight[:, -1 - distance]
    if bias is not None:
        output = output + bias
    return output, _tail(inputs, links, taps).transpose(0, 1)


def _tail(inputs: Tensor, links: Tensor | None, taps: int) -> Tensor:
    """Return the last ``taps`` - 1 inputs, zeros where they belong to another document than the last one."""
    last = inputs[len(inputs) - taps + 1 :]
    if links is None:
        return last
    following = links[len(links) - taps + 2 :].flip(0).long().cumprod(0).flip(0)
    return last * torch.cat((following, following.new_ones(1, *following.shape[1:])))


def _last_inputs(x: Tensor, follows: Tensor | None, tail: Tensor, weight: Tensor) -> Tensor:
    """Return the second result of :func:`causal_convolution` from the last inputs [s, b, a, p] only."""
    count = weight.shape[1] - 1
    return causal_convolution(x[-count:].flatten(2), None if follows is None else follows[-count:], tail, weight)[1]


def _activated(
    x: Tensor, follows: Tensor | None, tail: Tensor, weight: Tensor, bias: Tensor | None, parts: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Return SiLU of :func:`causal_convolution` of ``x`` [s, b, a, p], ordered by ``parts``, and the last inputs, by a
    kernel on GPUs."""
    taps, has_bias = weight.shape[1], bias is not None
    if x.is_cuda and kernels_serve(x.dtype) and 2 <= taps <= 4 and is_right(_check_kernel, x, taps, has_bias):
        return convolution_silu(x, follows, tail, weight, bias, parts), _last_inputs(x, follows, tail, weight)
    return _plain(x, follows, tail, weight, bias, parts)


def _plain(
    x: Tensor, follows: Tensor | None, tail: Tensor, weight: Tensor, bias: Tensor | None, parts: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    output, end = causal_convolution(x.flatten(2), follows, tail, weight, bias)
    heads = F.silu(output).unflatten(-1, x.shape[2:])
    return torch.cat([part.flatten(2) for part in heads.split(parts, dim=-1)], dim=-1), end


@cache
def _check_kernel(taps: int, has_bias: bool, device: str) -> bool:
    parts, heads, channels = (32, 32, 64), 2, 256
    shapes = {"inputs": (70, 2, heads, 128), "first inputs": (2, taps - 1, channels), "weights": (channels, taps)}
    shapes |= {"biases": (channels,)} if has_bias else {}
    follows = torch.ones(70, 2, dtype=torch.bool, device=device)
    follows[40, 1] = False

    def kernel(x: Tensor, tail: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return convolution_silu(x, follows, tail, weight, bias, parts)

    def plain(x: Tensor, tail: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return _plain(x, follows, tail, weight, bias, parts)[0]

    inputs = dict(zip(shapes, random_values(*shapes.values())))
    return agree(Problem("the short convolution", inputs), kernel, plain, device)


def convolve(
    layout: TokenLayout, layer: int, x: Tensor, mask: Tensor | None, weight: Tensor, bias: Tensor | None,
    parts: tuple[int, ...],
) -> Tensor:  # fmt: skip
    """Return SiLU of the causal convolution of ``x`` [s, b, a, p] with ``weight`` [c, w] and ``bias`` [c], of documents
    by ``mask`` (``scans.follows``): [s, b, c], with the first of ``parts`` of all heads, then the next. The last inputs
    are the state "conv" of ``layer``."""
    zeros = x.new_zeros((x.shape[1], weight.shape[1] - 1, len(weight)))
    if layout.group.size == 1:
        return layout.scan(layer, "conv", zeros, lambda x, tail: _activated(x, mask, tail, weight, bias, parts), x)
    if len(x) < layout.num_chunks * zeros.shape[1]:  # chunks so short that a token sees several
        links = None if mask is None else layout.full(mask.to(torch.uint8), 0).bool()
        return layout.local(_activated(layout.full(x, 0), links, zeros, weight, bias, parts)[0], 0)
    chunks = list(zip(*rank_chunks(layout, x, mask)))
    tails = torch.stack([_last_inputs(part, links, zeros, weight) for part, links in chunks])
    everyone = layout.full(tails, 0)
    before = layout.local(torch.cat((zeros.unsqueeze(0), everyone[:-1])), 0)
    return torch.cat(
        [_activated(part, links, tail, weight, bias, parts)[0] for (part, links), tail in zip(chunks, before)]
    )


class ShortConvolution(nn.Module):
    """Causal convolution of ``taps`` tokens per channel and SiLU, over a layout. Tensor-parallel ranks split ``heads``,
    which have channels ``parts`` each. The weight is stored as [c, 1, w]."""

    def __init__(
        self,
        heads: int,
        parts: tuple[int, ...],
        taps: int,
        config: TransformerConfig,
        groups: ProcessGroups,
        *,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.parts, channels = parts, (heads, sum(parts))
        common = {"mesh": {"tp": Shard(0)}, "groups": groups, "dtype": config.params_dtype}
        init = Uniform(taps**-0.5)  # as torch.nn.Conv1d
        self.weight = parameter((*channels, 1, taps), init=init, ndim=3, **common)
        self.bias = parameter(channels, init=init, ndim=1, **common) if bias else None

    def forward(self, layout: TokenLayout, layer: int, x: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
        """Return the parts [s, b, a .] of ``x`` [s, b, a, p] (:func:`convolve`)."""
        output = convolve(layout, layer, x, mask, self.weight.squeeze(1), self.bias, self.parts)
        return output.split([x.shape[2] * part for part in self.parts], dim=-1)
