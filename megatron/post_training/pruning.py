"""Structured pruning after Minitron (arXiv 2407.14679): keep the most important channels, heads, experts and layers.

The hidden channels are the same in the whole model; FFN channels, heads and experts are chosen per layer, channels of
routed experts per expert. Selected parts keep their order, so that the result equals the parent's weights, sliced.

Legend: h hidden, f feed-forward width, e experts, g query groups, p query heads per group, d head dim."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.core.attention.window import has_rotation, layer_window
from megatron.core.config.errors import UserError
from megatron.core.config.hybrid import pattern_kinds
from megatron.core.config.layer_kinds import layer_kinds
from megatron.core.config.moe import has_experts
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.safe_files import parse_json
from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.export.interchange import Interchange
from megatron.post_training.importance import Importance

FIELDS = (
    "hidden_size", "ffn_hidden_size", "num_layers", "num_attention_heads", "num_query_groups", "num_moe_experts",
    "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size",
)  # fmt: skip
"""Sizes that can be pruned, by the names of Megatron-LM."""
KINDS = {"attention", "latent_attention", "mlp", "experts"}
"""Kinds of branches that can be pruned."""
FLAG = "--prune-export-config"
LAYER = re.compile(r"model\.decoder\.layers\.(\d+)\.(.+)")
Axes = tuple[Tensor | None, ...]
"""Indices of the kept elements for each dim of a weight; None: all. Two-dimensional ones [n, k] hold k indices for each
of the n kept elements of the first dim."""


def target_sizes(text: str, config: TransformerConfig) -> dict[str, int]:
    """Return the value of every field of :data:`FIELDS` after pruning a model of ``config`` to the sizes of the JSON
    object ``text``; fields that the model does not have are 0. Query groups of one head follow the heads, and heads
    follow the groups if only these are given. Raises UserError with all problems in one message."""
    try:
        sizes = parse_json(text, unique=True)
    except ValueError as error:
        raise UserError(f"{FLAG} {text:.80}: is not JSON ({error}); write '{{\"hidden_size\": 256}}'") from None
    if not isinstance(sizes, dict):
        raise UserError(f"{FLAG} {text:.80}: must be a JSON object; write '{{\"hidden_size\": 256}}'")
    parent = {name: getattr(config, name) or 0 for name in FIELDS}
    if "mlp" not in _kinds(config):
        parent["ffn_hidden_size"] = 0
    problems = [problem for name, size in sizes.items() if (problem := _size_problem(name, size, parent))]
    if not problems:
        per_group = parent["num_attention_heads"] // parent["num_query_groups"]
        if per_group == 1 and "num_attention_heads" in sizes:
            sizes.setdefault("num_query_groups", sizes["num_attention_heads"])
        elif "num_query_groups" in sizes:
            sizes.setdefault("num_attention_heads", sizes["num_query_groups"] * per_group)
        problems = list(_problems({**parent, **sizes}, parent, config))
    if problems:
        raise UserError(f"{FLAG}: {'; '.join(problems)}")
    return {**parent, **sizes}


def _kinds(config: TransformerConfig) -> set[str]:
    return {kind for number in range(config.num_layers) for kind in layer_kinds(config, number + 1)}


def _size_problem(name: str, size: object, parent: Mapping[str, int]) -> str | None:
    if name not in parent:
        return f"{name} cannot be pruned; use {', '.join(parent)}"
    if type(size) is not int or size < 1:
        return f"{name} {size!r:.40} must be a positive integer"
    if not parent[name]:
        return f"{name} {size}: the model has no such part"
    return f"{name} {size} is larger than the parent's {parent[name]}" if size > parent[name] else None


def _problems(sizes: Mapping[str, int], parent: Mapping[str, int], config: TransformerConfig) -> Any:
    heads, groups = sizes["num_attention_heads"], sizes["num_query_groups"]
    most = parent["num_attention_heads"] // parent["num_query_groups"]
    if heads % groups:
        yield f"num_attention_heads {heads} must be divisible by num_query_groups {groups}"
    elif heads // groups > most:
        yield (
            f"num_attention_heads {heads} with num_query_groups {groups} needs {heads // groups} heads per group, the"
            f" parent has {most}; also reduce num_attention_heads"
        )
    if config.multi_latent_attention and heads < parent["num_attention_heads"]:
        yield "num_attention_heads cannot be pruned with multi-latent attention; remove it"
    if config.use_mup and sizes["hidden_size"] < parent["hidden_size"]:
        yield "hidden_size cannot be pruned with --use-mup, whose logits are scaled by it; remove it"
    if experts := sizes["num_moe_experts"]:
        router_groups = config.moe_router_num_groups or 1
        if experts < config.moe_router_topk:
            yield f"num_moe_experts {experts} is less than the {config.moe_router_topk} experts of a token (top-k)"
        if experts % router_groups:
            yield f"num_moe_experts {experts} must be divisible by the router's {router_groups} groups"
    if sizes == parent:
        yield "no size is smaller than the parent's; give at least one"


def check_prunable(config: TransformerConfig, where: str) -> None:
    """Raise UserError if a model of ``config`` has layers that cannot be pruned."""
    if unsupported := sorted(_kinds(config) - KINDS):
        reason = "pruning supports attention, feed-forward networks and experts only"
        raise UserError(f"{where}: has layers of {', '.join(unsupported)}; {reason}")
    if pattern_kinds(config):
        raise UserError(f"{where}: is a hybrid model; pruning supports layers of attention and a feed-forward network")


def prune(
    source: Interchange, config: TransformerConfig, importance: Importance, sizes: Mapping[str, int]
) -> Interchange:
    """Return the weights of ``source``, a model of ``config``, pruned to ``sizes`` (:func:`target_sizes`), with their
    settings; tensors are sliced when they are read. Prediction depths are left out, with a note."""
    layers = top(importance["layers"], sizes["num_layers"]).tolist()
    hidden = top(importance["hidden"], sizes["hidden_size"])
    outer: dict[str, Axes] = {
        "model.embedding.word_embeddings": (None, hidden),
        "model.embedding.position_embeddings": (None, hidden),
        "model.decoder.final_layernorm": (hidden,),
        "model.output_layer": (None, hidden),
    }
    inner = {layer: _layer_axes(importance, layer, hidden, config, sizes) for layer in layers}
    tensors, notes = {}, list[str]()
    for name, tensor in source.tensors.items():
        if match := LAYER.fullmatch(name):
            layer, rest = int(match[1]), match[2]
            if layer in inner:
                new_name = f"model.decoder.layers.{layers.index(layer)}.{rest}"
                tensors[new_name] = _sliced(tensor, rest, inner[layer])
        elif not name.startswith("model.mtp."):
            tensors[name] = _sliced(tensor, name, outer)
    if config.mtp_num_layers:
        notes.append(f"left out {config.mtp_num_layers} multi-token prediction depth(s)")
    changed = {name: sizes[name] for name in FIELDS if sizes[name]} | _layer_patterns(config, layers)
    changed |= {"kv_channels": config.kv_channels, "mtp_num_layers": None}
    return Interchange({**source.settings, **changed}, tensors, {}, source.assets, notes)


def top(scores: Tensor, count: int) -> Tensor:
    """Return the indices [..., count] of the largest ``scores`` [..., n] in ascending order; of equals the first."""
    return scores.argsort(dim=-1, descending=True, stable=True)[..., :count].sort(-1).values


def _layer_axes(
    importance: Importance, layer: int, hidden: Tensor, config: TransformerConfig, sizes: Mapping[str, int]
) -> dict[str, Axes]:
    """Return the kept elements of the weights of a layer (from 0), by the name of the module."""
    axes = {"layernorm": (hidden,), **_attention_axes(importance[f"{layer}.heads"], hidden, config, sizes)}
    gate: Axes = (None,) if config.gated_linear_unit else ()
    for module, name, size in (
        ("mlp", "ffn", "ffn_hidden_size"),
        ("mlp.shared_experts", "shared_ffn", "moe_shared_expert_intermediate_size"),
    ):
        if (scores := importance.get(f"{layer}.{name}")) is not None:
            channels = top(scores, sizes[size])
            axes |= {f"{module}.linear_fc1": (*gate, channels, hidden), f"{module}.linear_fc2": (hidden, channels)}
    if (scores := importance.get(f"{layer}.experts")) is not None:
        router_groups = config.moe_router_num_groups or 1
        chosen = top(scores.view(router_groups, -1), sizes["num_moe_experts"] // router_groups)
        experts = (chosen + torch.arange(router_groups)[:, None] * (len(scores) // router_groups)).flatten()
        channels = top(importance[f"{layer}.expert_ffn"][experts], sizes["moe_ffn_hidden_size"])
        axes |= {
            "mlp.router": (experts, hidden),
            "mlp.experts.linear_fc1": (experts, *gate, channels, hidden),
            "mlp.experts.linear_fc2": (experts, hidden, channels),
            "mlp.shared_experts": (None, hidden),  # its gate
        }
    return axes


def _attention_axes(
    scores: Tensor, hidden: Tensor, config: TransformerConfig, sizes: Mapping[str, int]
) -> dict[str, Axes]:
    """Return the elements to keep for ``scores`` [heads]: of the groups with the largest L2 norms the best heads."""
    if config.multi_latent_attention:
        downs = ("linear_q_proj", "linear_q_down_proj", "linear_kv_down_proj", "linear_qkv_down_proj")
        all_heads: dict[str, Axes] = {f"self_attention.{name}": (None, hidden) for name in downs}
        return {**all_heads, "self_attention.linear_proj": (hidden, None)}
    heads, groups, channels = config.num_attention_heads, config.num_query_groups, config.kv_channels
    per_group, rows = heads // groups, channels * (1 + config.attention_output_gate)
    scores_gp = scores.view(groups, per_group)
    kept_g = top(torch.linalg.vector_norm(scores_gp, dim=1), sizes["num_query_groups"])
    kept_gp = top(scores_gp[kept_g], sizes["num_attention_heads"] // sizes["num_query_groups"])
    key_value = torch.arange(per_group * rows, per_group * rows + 2 * channels).expand(len(kept_g), -1)
    numbers = (kept_g[:, None] * per_group + kept_gp).flatten()
    axes: dict[str, Axes] = {
        "self_attention.linear_qkv": (kept_g, torch.cat((_blocks(kept_gp, rows), key_value), dim=1), hidden),
        "self_attention.linear_proj": (hidden, _blocks(numbers, channels)),
        "self_attention.core_attention": (numbers,),  # its sinks
    }
    if config.qk_layernorm_across_heads:
        axes["self_attention.q_layernorm"] = (_blocks(numbers, channels),)
        axes["self_attention.k_layernorm"] = (_blocks(kept_g, channels),)
    return axes


def _blocks(index: Tensor, size: int) -> Tensor:
    """Return the elements [..., n * size] of the blocks ``index`` [..., n] of ``size`` elements."""
    return (index[..., None] * size + torch.arange(size)).flatten(-2)


def _sliced(tensor: LazyTensor, name: str, by_module: Mapping[str, Axes]) -> LazyTensor:
    """Return the kept part of the parameter or buffer ``name``; unchanged if ``by_module`` does not list it."""
    module, _, leaf = name.rpartition(".")
    axes = by_module.get(module)
    if axes is None and module.endswith("layernorm") and "." not in module:
        axes = by_module["layernorm"]
    if axes is None:
        return tensor
    if len(axes) > 1 and len(tensor.shape) < len(axes):  # biases, and the router's counters, lack the input dim
        axes = axes[:-1]
    shape = tuple(size if index is None else index.shape[-1] for size, index in zip(tensor.shape, axes))
    return LazyTensor(shape, tensor.dtype, partial(_select, tensor, axes))


def _select(tensor: LazyTensor, axes: Axes) -> Tensor:
    """Read ``tensor`` and gather the elements of ``axes``, whose indices broadcast to the shape of the result."""
    indices = []
    for dim, index in enumerate(axes):
        index = torch.arange(tensor.shape[dim]) if index is None else index
        shape = [1] * len(axes)
        shape[dim] = index.shape[-1]
        if index.ndim > 1:
            shape[0] = index.shape[0]
        indices.append(index.view(shape))
    return tensor.read()[tuple(indices)]


def _layer_patterns(config: TransformerConfig, layers: list[int]) -> dict[str, object]:
    """Return the settings that differ between layers, for the kept ``layers`` (from 0)."""
    numbers = [layer + 1 for layer in layers]
    patterns: dict[str, object] = {}
    if isinstance(config.window_attn_skip_freq, int | list) and config.window_size is not None:
        skip = config.window_attn_skip_freq
        patterns["window_attn_skip_freq"] = [
            int(layer_window(config.window_size, skip, n) is not None) for n in numbers
        ]
    if config.no_rope_freq is not None:
        patterns["no_rope_freq"] = [int(not has_rotation(config.no_rope_freq, number)) for number in numbers]
    if config.num_moe_experts is not None and config.moe_layer_freq != 1:
        patterns["moe_layer_freq"] = [int(has_experts(config, number)) for number in numbers]
    return patterns if len(layers) < config.num_layers else {}
