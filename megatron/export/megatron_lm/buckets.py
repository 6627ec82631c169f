"""Splitting of the flat buckets of Megatron-LM's distributed optimizer into parameters.

A rank's buffer holds its parameters in the reverse of the order in which they were made, each beginning at a multiple
of 64 elements of its bucket."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.export.interchange import Settings
from megatron.export.megatron_lm.names import detect_family, find_place, layer_indices
from megatron.export.megatron_lm.splits import join_ranks, rank_part

STATES = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "fp32_param": "main_param", "param": "main_param"}
"""Optimizer state name in Megatron-LM -> local name."""

Order = Sequence[tuple[str, tuple[int, ...]]]
"""Names and shapes of a rank's parameters, in creation order."""
_ALIGNMENT = 64
_FLAT = re.compile(r"optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_.*\.bucket_idx_(\d+)\.(\w+)")
_CREATION_ORDER = (
    "input_layernorm",
    "linear_proj",
    "linear_qkv",
    "q_layernorm",
    "k_layernorm",
    "pre_mlp_layernorm",
    "linear_fc1",
    "linear_fc2",
)
"""Creation order of modules in Megatron-LM's local layers; Transformer Engine fuses norms into linear layers."""


def cut_buckets(
    order: Order, buckets: Mapping[str, Sequence[LazyTensor]], where: str
) -> dict[str, dict[str, LazyTensor]]:
    """Split the ``buckets`` of one buffer (state kind -> 1-d buckets) into parameters, which fill them in reverse
    ``order``. Raises CheckpointError if kinds differ in size, or the parameters do not fill the buckets exactly."""
    by_kind = {kind: [bucket.shape[0] for bucket in parts] for kind, parts in buckets.items()}
    sizes = next(iter(by_kind.values()))
    if any(other != sizes for other in by_kind.values()):
        raise CheckpointError(f"{where}: flat states have different sizes: {by_kind}")
    # embeddings that two stages share have a separate bucket; buckets joined to one do not say where it begins
    for unpadded in (False, True) if len(sizes) == 1 else (False,):
        places = _places(order, sizes, unpadded)
        if places is not None:
            break
    else:
        raise CheckpointError(f"{where}: flat state of {sizes} elements does not match {len(order)} parameters")
    return {
        kind: {name: _slice(parts[bucket], start, shape) for name, shape, bucket, start in places}
        for kind, parts in buckets.items()
    }


def _places(order: Order, sizes: Sequence[int], unpadded: bool) -> list[tuple[str, tuple[int, ...], int, int]] | None:
    """Return (name, shape, bucket, start) of parameters if the reverse of ``order`` fills the buckets; else None."""
    bucket, end, places = 0, 0, []
    for name, shape in reversed(order):
        numel = math.prod(shape)
        aligned = -(-end // _ALIGNMENT) * _ALIGNMENT
        start = end if unpadded and name.endswith("word_embeddings.weight") else aligned
        if start + numel > sizes[bucket]:
            if end != sizes[bucket] or bucket + 1 == len(sizes):
                return None
            bucket, start = bucket + 1, 0
        places.append((name, shape, bucket, start))
        end = start + numel
    return places if bucket + 1 == len(sizes) and end == sizes[bucket] else None


def _slice(flat: LazyTensor, start: int, shape: tuple[int, ...]) -> LazyTensor:
    return LazyTensor(shape, flat.dtype, lambda: flat.rows(start, start + math.prod(shape)).reshape(shape))


def unflatten_distributed(
    flat: Mapping[str, LazyTensor], weights: Mapping[str, LazyTensor], args: Settings, where: str
) -> dict[str, dict[str, LazyTensor]]:
    """Return the optimizer state of the ``dp_reshardable`` format: state kind -> name -> global tensor.

    The checkpoint does not store the offsets of parameters. They are derived from the order in which layers create
    parameters, and verified by reading: the main parameters in the buckets must equal the weights.

    Args:
        weights: global weights by name.
        args: arguments of the run that saved the checkpoint; determine its parallel layout.

    Raises:
        CheckpointError: several buffers, experts, an encoder, or an unknown parameter order."""
    tp, pp = args.get("tensor_model_parallel_size", 1), args.get("pipeline_model_parallel_size", 1)
    buckets: dict[int, dict[str, dict[int, LazyTensor]]] = {}
    for name, tensor in flat.items():
        match = _FLAT.fullmatch(name)
        if match is None or match[2] != "0":
            raise CheckpointError(f"{where}: flat optimizer state of several buffers ({name:.100}): {_ADVICE}")
        buckets.setdefault(int(match[1]), {}).setdefault(match[4], {})[int(match[3])] = tensor
    supported = detect_family(weights) == "gpt" and not any(".experts." in name for name in weights)
    supported = supported and not args.get("hybrid_layer_pattern")
    if not supported or sorted(buckets) != list(range(tp * pp)):
        what = f"of experts, of an encoder, of a hybrid model, or of {len(buckets)} ranks"
        raise CheckpointError(f"{where}: flat optimizer state {what}: {_ADVICE}")
    result: dict[str, dict[tuple[int, int], dict[str, LazyTensor]]] = {}
    for group, kinds in sorted(buckets.items()):
        stage, rank = divmod(group, tp)
        listed = {kind: [parts[index] for index in range(len(parts))] for kind, parts in kinds.items()}
        for order in _orders(weights, (stage, pp), (rank, tp), args):
            try:
                states = cut_buckets([(name, part.shape) for name, part in order.items()], listed, where)
            except CheckpointError:
                continue
            if all(_equal(order[name], main) for name, main in states["param"].items()):
                break
        else:
            raise CheckpointError(f"{where}: the flat state of rank {group} is in no known order: {_ADVICE}")
        for kind, named in states.items():
            result.setdefault(kind, {})[stage, rank] = named
    return {STATES[kind]: join_ranks(ranks, tp, args, where) for kind, ranks in result.items()}


_ADVICE = "save it again in Megatron-LM with --dist-ckpt-optim-fully-reshardable, and convert that"


def _equal(weight: LazyTensor, main: LazyTensor) -> bool:
    return bool((weight.read() == main.read().to(weight.dtype)).all())


def _orders(
    weights: Mapping[str, LazyTensor], pipeline: tuple[int, int], tensor: tuple[int, int], args: Settings
) -> Iterator[dict[str, LazyTensor]]:
    """Yield a rank's shards in each of three creation orders. The last stage gets a copy of a tied embedding."""
    (stage, pp), (rank, tp) = pipeline, tensor
    layers = layer_indices(weights, "decoder")
    share = len(layers) // pp
    mine = layers[stage * share : (stage + 1) * share]
    kinds = list(dict.fromkeys(name.split(".", 3)[3] for name in weights if name.startswith("decoder.layers.")))
    by_creation = sorted(kinds, key=lambda kind: _creation_index(find_place(f"decoder.layers.0.{kind}").name))
    fused = sorted(kinds, key=lambda kind: (_creation_index(kind), "layer_norm" not in kind))
    first = [name for name in weights if name.startswith("embedding.")] if stage == 0 else []
    last = [name for name in weights if not name.startswith(("embedding.", "decoder.layers."))]
    last = last if stage + 1 == pp else []
    if stage + 1 == pp and pp > 1 and "output_layer.weight" not in weights:
        last.append("embedding.word_embeddings.weight")
    for order in (kinds, by_creation, fused):
        names = [*first, *(f"decoder.layers.{layer}.{kind}" for layer in mine for kind in order), *last]
        yield {name: rank_part(name, weights[name], rank, tp, args) for name in names}


def _creation_index(name: str) -> int:
    module = name.split(".")[-2]
    return _CREATION_ORDER.index(module) if module in _CREATION_ORDER else len(_CREATION_ORDER)
