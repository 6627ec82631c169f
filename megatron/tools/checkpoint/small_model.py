"""Small random model with the settings of a large one, to compare two implementations of a model of any size.

Reduced: widths, the numbers of heads and experts, the vocabulary, and repeated layers. Unchanged: activations, norms,
epsilons, windows, rotary parameters, head dimension, top-k, the number of expert groups, the pattern of layers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import SimpleNamespace

import torch

from megatron.core.config.hybrid import STAGE
from megatron.core.config.layer_kinds import layer_kinds
from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.export.hf.attention_settings import layers_with_windows
from megatron.export.hf.conversion import placements
from megatron.export.hf.family import Family
from megatron.export.hf.settings import Table
from megatron.export.interchange import Interchange, with_counters

VOCAB_SIZE = 96
LIMIT = 4200
"""Limit in tokens: only shorter windows and rotary thresholds are exceeded. Attention scores of 2 heads: 141 MB."""

THRESHOLD = re.compile(r"window|local_attention|original_max_position|max_distance")


def shrink(settings: Table) -> dict[str, object]:
    """Return the settings of the small model: fewer heads, layers and experts, narrow widths, no multi-token
    prediction, shorter windows only from ``LIMIT`` on. ``settings`` must be completed by ``family.complete``."""
    heads, groups, channels = (settings[name] for name in ("num_attention_heads", "num_query_groups", "kv_channels"))
    few_groups = min(groups, 2)
    few_heads = few_groups * min(heads // groups, 2)
    hidden = few_heads * channels + (0 if heads * channels == settings["hidden_size"] else 64)
    ffn = 4 * hidden if settings["ffn_hidden_size"] == 4 * settings["hidden_size"] else 48
    small = {
        **settings,
        "num_attention_heads": few_heads,
        "num_query_groups": few_groups,
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "vocab_size": VOCAB_SIZE,
        "num_layers": _different_layers(settings),
        "mtp_num_layers": None,
        "decoder_num_layers": settings["decoder_num_layers"] and 2,
        "kv_lora_rank": min(settings["kv_lora_rank"], 24),
        **_few_experts(settings, ffn),
        "q_lora_rank": settings["q_lora_rank"] and min(settings["q_lora_rank"], 20),
    }
    if settings["hybrid_layer_pattern"]:
        pattern = settings["hybrid_layer_pattern"].replace(STAGE, "")
        small["num_layers"] += small["num_layers"] % 2  # Bamba pairs layers
        small["hybrid_layer_pattern"] = pattern[: small["num_layers"]]
        small["num_layers"] = len(small["hybrid_layer_pattern"])
    for name in ("window_attn_skip_freq", "moe_layer_freq", "linear_attention_freq"):
        if isinstance(small[name], list):
            small[name] = small[name][: small["num_layers"]]
    if small["window_size"] and max(small["window_size"]) >= LIMIT:
        small["window_size"] = tuple(min(side, 40) for side in small["window_size"])
    return small


def _different_layers(settings: Table) -> int:
    """Return how many leading layers contain every layer type (window, kinds of branches); at least min(2, all)."""
    count, config = settings["num_layers"], SimpleNamespace(**settings)
    branches = [layer_kinds(config, number) for number in range(1, count + 1)]
    kinds = list(zip(layers_with_windows(settings), branches))
    return max(min(2, count), 1 + max(kinds.index(kind) for kind in set(kinds)))


def _few_experts(settings: Table, ffn: int) -> dict[str, object]:
    """Narrow experts, at most one more per group than the choice needs; {} for a dense model."""
    if settings["num_moe_experts"] is None:
        return {}
    chosen, groups = settings["moe_router_topk"], settings["moe_router_num_groups"] or 1
    limit, width = settings["moe_router_group_topk"] or groups, settings["moe_ffn_hidden_size"]
    in_group = max(math.ceil(chosen / limit), settings["moe_router_group_score_topk"] or 1) + 1
    shared = settings["moe_shared_expert_intermediate_size"]
    narrow = ffn if width == settings["ffn_hidden_size"] else 24
    return {
        "num_moe_experts": min(settings["num_moe_experts"], groups * in_group),
        "moe_ffn_hidden_size": narrow,
        "moe_shared_expert_intermediate_size": shared and (24 * min(shared // width, 2) if shared % width == 0 else 40),
    }


def tokens_needed(settings: Table, config: Table) -> int:
    """Return a sequence length that exceeds every window and rotary threshold below ``LIMIT`` by 9 tokens, also those
    of config.json (``config``), in case the conversion missed one. At least 32, at most the learned positions."""
    sizes = [*_thresholds(config), *(settings["window_size"] or ())]
    sizes += [settings["yarn_original_max_position_embeddings"] or 0]
    sizes += [2048 if settings["use_rope_scaling"] else 0]  # RoPE scaling changes wavelengths from 2048 tokens on
    if settings["position_embedding_type"] == "relative":
        sizes.append(settings["relative_attention_max_distance"])
    needed = max(32, *(size + 9 for size in sizes if size < LIMIT))
    tables = settings["position_embedding_type"] == "learned_absolute"
    return min(needed, settings["max_position_embeddings"]) if tables else needed


def _thresholds(config: Mapping[str, object]) -> list[int]:
    """Nested tables included."""
    tables = [value for value in config.values() if isinstance(value, dict)]
    named = {name: value for table in (config, *tables) for name, value in table.items() if THRESHOLD.search(name)}
    return [value for value in named.values() if type(value) is int]


def random_weights(family: Family, settings: Mapping[str, object]) -> Interchange:
    """The weights, of a fixed seed, are large enough that every setting affects the logits measurably."""
    generator = torch.Generator().manual_seed(5)
    tensors = {
        f"model.{placement.name}": LazyTensor.of(
            torch.randn(placement.shape, generator=generator) * _spread(placement.name, placement.shape)
            + float("norm" in placement.name and placement.name.endswith("weight"))
        )
        for placement in placements(family, settings)
    }
    return Interchange(dict(settings), with_counters(tensors))


def _spread(name: str, shape: tuple[int, ...]) -> float:
    return 1.5 / math.sqrt(shape[-1]) if len(shape) > 1 and "embedding" not in name else 0.2


def small_config(
    family: Family, config: Mapping[str, object], settings: Mapping[str, object], small: Mapping[str, object]
) -> dict[str, object]:
    """Return config.json of the small model: ``config`` of the large one with other values for keys of rules whose
    output changes from ``settings`` to ``small``. Token ids outside the small vocabulary are removed."""
    flat = family.flat(config)
    kept_keys = {name: value for name, value in flat.items() if not _is_foreign_token(name, value)}
    dropped: set[str] = set()
    for rule in family.config:
        if rule.save(settings) != rule.save(small):
            dropped |= {*rule.hf_keys}
    kept_keys = {name: value for name, value in kept_keys.items() if name not in dropped}
    for rule in family.config:
        kept_keys |= {name: value for name, value in rule.save(small).items() if name in dropped}
    absent = {name: None for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name not in kept_keys}
    return family.nested({**absent, **kept_keys})


def _is_foreign_token(name: str, value: object) -> bool:
    ids = value if isinstance(value, list) else [value]
    return name.endswith("_token_id") and not all(type(token) is int and token < VOCAB_SIZE for token in ids)
