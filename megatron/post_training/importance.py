"""Importance of channels, heads, experts and layers, measured on samples (Minitron, arXiv 2407.14679, section 2.2).

A channel's importance is the L2 norm over samples of the mean over tokens of its |activation|, the paper's best choice:

  hidden channels    outputs of the norms before the mixers, summed over the norms; one ranking for the model
  FFN channels       inputs of fc2, per layer; of routed experts per expert, with sums over its rows in place of means
  heads              inputs of the output projection, per layer; the L2 norm over the head's channels
  experts            mean L2 norm of the rows that they return, router weights included; 0 without rows
  layers             1 - cosine(input, output), mean over tokens (block influence, arXiv 2403.03853)

Legend: s sequence, c channels, h hidden, f feed-forward width, r rows of experts, e experts, a heads, l layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

Importance = dict[str, Tensor]
"""``hidden`` [h], ``layers`` [l], and for each layer (from 0) with these parts ``0.heads`` [a], ``0.ffn`` [f],
``0.experts`` [e], ``0.expert_ffn`` [e, f], ``0.shared_ffn`` [f]; fp32 on the CPU."""


@torch.no_grad()
def measure(model: nn.Module, samples: Iterable[Tensor], num_heads: int) -> Importance:
    """Return the importance of the parts of a GPT with ``num_heads`` query heads, which holds all layers and channels,
    from ``samples`` of token ids int64 [s], all of one length. One forward pass per sample."""
    squares, sums = defaultdict[str, Any](float), defaultdict[str, Any](float)
    handles = list(_watch(model, squares, sums))
    try:
        for tokens in samples:
            model(tokens[None], torch.arange(len(tokens), device=tokens.device)[None])
    finally:
        for handle in handles:
            handle.remove()
    if not squares:
        raise ValueError("samples: empty; pass at least one")
    channels = {name: total.sqrt() for name, total in squares.items()}
    norms = [channels.pop(name) for name in list(channels) if name.startswith("norm ")]
    layers = [sums.pop(name) for name in list(sums) if name.startswith("layer ")]
    result = {"hidden": torch.stack(norms).sum(0), "layers": torch.stack(layers), **channels}
    for name in [name for name in channels if name.endswith(".heads")]:
        result[name] = torch.linalg.vector_norm(channels[name].unflatten(0, (num_heads, -1)), dim=1)
    result |= {name: total_ec[:, 0] / total_ec[:, 1].clamp_min(1) for name, total_ec in sums.items()}
    return {name: scores.float().cpu() for name, scores in result.items()}


def _watch(model: Any, squares: dict[str, Any], sums: dict[str, Any]) -> Iterator[RemovableHandle]:
    """Add hooks to ``model`` that add to ``squares`` [c] and ``sums`` in each forward pass; yield their handles."""

    def add(name: str, activations: Tensor) -> None:
        squares[name] += activations.float().abs().flatten(0, -2).mean(0).square()

    def add_norm(name: str, norm: nn.Module, args: Any, output: Any) -> None:
        add(name, output[1] if isinstance(output, tuple) else output)  # (residual stream, normalized stream)

    def add_layer(name: str, layer: nn.Module, args: Any, output: Tensor) -> None:
        sums[name] += 1 - torch.cosine_similarity(args[0].float(), output.float(), dim=-1).mean()

    def add_expert_channels(name: str, linear: nn.Module, args: Any) -> None:
        squares[name] += _sums_by_expert(args[0].float().abs(), args[1]).square()

    def add_experts(name: str, experts: nn.Module, args: Any, output: Tensor) -> None:
        norms_r = torch.linalg.vector_norm(output.float(), dim=-1)
        sums[name] += _sums_by_expert(torch.stack((norms_r, torch.ones_like(norms_r)), 1), args[1])

    def inputs(linear: nn.Module, name: str) -> RemovableHandle:
        return linear.register_forward_pre_hook(lambda _, args: add(name, args[0]))

    for layer in model.decoder.layers:
        index = layer.layer_number - 1
        yield layer.register_forward_hook(partial(add_layer, f"layer {index}"))
        norms = dict.fromkeys(branch.norm for branch in layer.branches)  # parallel branches may share one
        for number, norm in enumerate(norms):
            yield norm.register_forward_hook(partial(add_norm, f"norm {index}.{number}"))
        yield inputs(layer.self_attention.linear_proj, f"{index}.heads")
        if not hasattr(layer.mlp, "experts"):
            yield inputs(layer.mlp.linear_fc2, f"{index}.ffn")
            continue
        experts = layer.mlp.experts
        yield experts.linear_fc2.register_forward_pre_hook(partial(add_expert_channels, f"{index}.expert_ffn"))
        yield experts.register_forward_hook(partial(add_experts, f"{index}.experts"))
        if layer.mlp.shared_experts is not None:
            yield inputs(layer.mlp.shared_experts.linear_fc2, f"{index}.shared_ffn")


def _sums_by_expert(values_rc: Tensor, ends_e: Tensor) -> Tensor:
    """Return the sums [e, c] of the rows of each expert; rows after the last end are undefined and left out."""
    rows = values_rc[: int(ends_e[-1])]
    experts_r = torch.searchsorted(ends_e, torch.arange(len(rows), device=rows.device, dtype=ends_e.dtype), right=True)
    return rows.new_zeros(len(ends_e), rows.shape[1]).index_add(0, experts_r, rows)
