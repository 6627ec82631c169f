"""Reader of Megatron-LM's ``torch`` format: ``mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt``, one file per model rank.

Merges tensor-, pipeline- (with virtual stages) and expert-parallel shards. Optimizer state is stored in the same file
by parameter index, or in ``distrib_optim.pt`` as flat buffers."""

from __future__ import annotations

import os
import re
from collections import ChainMap, Counter, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.export.interchange import Interchange, Settings, check_names
from megatron.export.megatron_lm.buckets import STATES, cut_buckets
from megatron.export.megatron_lm.model import build_interchange, find_folder
from megatron.export.megatron_lm.names import current_names, detect_family, find_place, is_no_weight
from megatron.export.megatron_lm.splits import join_ranks
from megatron.export.torch_file import read_torch_file
from megatron.export.unpickler import Record

_LAYER = re.compile(r"^((?:module\.)?(?:language_model\.)?(encoder|decoder|transformer)\.layers\.)(\d+)(\..*)$")
_EXPERT = re.compile(r"(.*\.mlp\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)))(\d+)(.*)$")
Named = dict[str, LazyTensor]


def load_megatron_torch(
    folder: str | os.PathLike, step: int | None = None, *, padded_vocabulary: bool = False
) -> Interchange:
    """Open a ``--ckpt-format torch`` folder of any parallel layout: model and training state, with lazy tensors.

    Args:
        folder: the --load folder, or one ``iter_…`` directory in it.
        step: the iteration; None: the tracker's.
        padded_vocabulary: keep the padding rows of the vocabulary, which Megatron-LM's softmax includes.

    Raises:
        CheckpointError: a file is missing, damaged or incomplete, a pickle is unsafe, a layer has no counterpart, the
            checkpoint_version is below 2, or experts have another tensor-parallel size."""
    directory = find_folder(Path(folder), step, "mp_rank_*/*.pt")
    first = _rank_file(directory, sorted(path.name for path in directory.glob("mp_rank_*"))[0])
    args = first.get("args")
    if not isinstance(args, Record):
        raise CheckpointError(f"{directory}: lacks the arguments of its run (args), needed to interpret its weights")
    if not isinstance(version := first.get("checkpoint_version", 0), int | float) or version < 2:
        raise CheckpointError(
            f"{directory}: checkpoint_version {version!r:.20}: before 2.0 queries, keys and values were in another"
            " order; load it with an older Megatron-LM and save it again"
        )
    table = args.attributes
    tp, pp, ep = (
        table.get(name) or 1
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
    )
    if any(type(size) is not int or not 0 < size < 10**5 for size in (tp, pp, ep)):
        raise CheckpointError(f"{directory}: impossible sizes of its layout: {tp!r:.20}, {pp!r:.20}, {ep!r:.20}")
    if type(experts := table.get("num_experts") or 0) is not int or not 0 <= experts < 10**6:
        raise CheckpointError(f"{directory}: impossible num_experts: {experts!r:.20}")
    if experts and (shards := table.get("expert_tensor_parallel_size") or tp) != tp:
        raise CheckpointError(
            f"{directory}: expert_tensor_parallel_size {shards!r:.20} differs from tensor_model_parallel_size {tp}: not"
            " supported in files of --ckpt-format torch; save the run with --ckpt-format torch_dist"
        )
    files = {
        (stage, rank, expert): _rank_file(directory, _name(rank, stage, expert, pp, ep))
        for stage in range(pp)
        for rank in range(tp)
        for expert in range(ep)
    }
    parts = _numbered(files, (pp, tp, ep), table, directory)
    where = str(directory)
    weights = {rank: dict(ChainMap(*reversed(chunks))) for rank, chunks in parts.items()}
    kinds: dict[str, dict[tuple[int, int, int], Named]] = {}
    if not table.get("no_save_optim"):
        for rank, chunks in parts.items():
            path = directory / _name(rank[1], rank[0], rank[2], pp, ep)
            for kind, named in _optimizer(files[rank], chunks, path).items():
                kinds.setdefault(kind, {})[rank] = named
        for kind, ranks in kinds.items():
            for stage, tp_rank, expert in sorted(parts.keys() - ranks.keys()):
                raise CheckpointDamagedError(
                    f"{directory / _name(tp_rank, stage, expert, pp, ep)}: has no {kind}, which other ranks have; the "
                    "checkpoint is damaged, copy it again"
                )
    return build_interchange(
        first,
        _merged(weights, (pp, tp, ep), table, where),
        {kind: _merged(ranks, (pp, tp, ep), table, where) for kind, ranks in kinds.items()},
        where=where,
        padded_vocabulary=padded_vocabulary,
    )


def _name(rank: int, stage: int, expert: int, pp: int, ep: int) -> str:
    return f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else "") + (f"_{expert:03d}" if ep > 1 else "")


def _rank_file(directory: Path, name: str) -> dict[str, object]:
    """Read ``model_optim_rng.pt`` or else ``model_rng.pt``. Raises CheckpointError unless it is a dictionary."""
    folder = directory / name
    path = folder / "model_optim_rng.pt"
    if not path.exists() and (folder / "model_rng.pt").exists():
        path = folder / "model_rng.pt"
    value = read_torch_file(path)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a dictionary")
    return value


def _numbered(
    files: Mapping[tuple[int, int, int], dict[str, Any]], sizes: tuple[int, int, int], args: Settings, directory: Path
) -> dict[tuple[int, int, int], list[Named]]:
    """Return (stage, tensor rank, expert rank) -> weights per virtual stage, with global layer and expert indices.
    Raises CheckpointError if a file lacks a virtual stage or the ranks of a stage differ in layers."""
    pp, tp, ep = sizes
    experts = (args.get("num_experts") or 0) // ep
    result: dict[tuple[int, int, int], list[Named]] = {key: [] for key in files}
    chunk, offsets = 0, Counter[str]()
    while any(f"model{chunk}" in state for state in files.values()) or chunk == 0:
        key = "model" if "model" in files[0, 0, 0] else f"model{chunk}"
        for stage in range(pp):
            counts = []
            for rank in ((stage, tensor, expert) for tensor in range(tp) for expert in range(ep)):
                if not isinstance(files[rank].get(key), dict):
                    raise CheckpointError(f"{directory}: the file of stage {stage} has no {key}")
                named, count = _weights(files[rank][key], offsets, rank[2] * experts)
                result[rank].append(named)
                counts.append(count)
            if any(count != counts[0] for count in counts):
                listed = sorted({count.total() for count in counts})
                raise CheckpointError(f"{directory}: ranks of stage {stage} differ in layers: {listed}")
            offsets += counts[0]
        chunk += 1
        if key == "model":
            break
    names = [name for chunks in result.values() for named in chunks for name in named]
    check_names(names, directory)
    family = detect_family(names)
    return {rank: [current_names(named, family) for named in chunks] for rank, chunks in result.items()}


def _weights(model: dict[str, object], offsets: Counter[str], first_expert: int) -> tuple[Named, Counter[str]]:
    """Flatten names, add the layer offset of each stack and ``first_expert``; return (tensors, layers per stack)."""
    named: Named = {}
    layers: set[tuple[str, str]] = set()
    todo = deque([("", model)])
    while todo:
        prefix, table = todo.popleft()
        for key, value in table.items():
            name = f"{prefix}{key}"
            if isinstance(value, dict):
                todo.append((f"{name}.", value))
            elif isinstance(value, LazyTensor) and not is_no_weight(name):
                if match := _LAYER.fullmatch(name):
                    layers.add((match[2], match[3]))
                    name = f"{match[1]}{int(match[3]) + offsets[match[2]]}{match[4]}"
                if match := _EXPERT.fullmatch(name):
                    name = f"{match[1]}{int(match[2]) + first_expert}{match[3]}"
                named[name] = value
    return named, Counter(stack for stack, _ in layers)


def _merged(
    ranks: Mapping[tuple[int, int, int], Named], sizes: tuple[int, int, int], args: Settings, where: str
) -> dict[str, LazyTensor]:
    """Expert rank 0 contributes everything, the others only their experts; copies of dense tensors are not compared."""
    pp, tp, ep = sizes
    merged: dict[str, LazyTensor] = {}
    for expert in range(ep):
        shards = {(stage, rank): ranks[stage, rank, expert] for stage in range(pp) for rank in range(tp)}
        if expert:
            shards = {
                key: {name: tensor for name, tensor in named.items() if find_place(name).expert is not None}
                for key, named in shards.items()
            }
        merged |= join_ranks(shards, tp, args, where)
    return merged


# ---- optimizer state


def _optimizer(state: dict[str, object], chunks: list[Named], folder: Path) -> dict[str, Named]:
    """Return state kind -> name -> this rank's shard, from ``distrib_optim.pt`` if it exists, else from ``state``.
    ``chunks``: weights per virtual stage. Raises CheckpointDamagedError for values of other types."""
    parameters = {name: state for named in chunks for name, state in named.items() if not name.endswith("expert_bias")}
    flat = folder / "distrib_optim.pt"
    kinds: dict[str, Named] = {}
    try:
        if flat.exists():
            return _distributed(read_torch_file(flat), chunks, flat)
        saved = state.get("optimizer")
        for part in [] if saved is None else saved if isinstance(saved, list) else [saved]:
            _by_number(part, parameters, kinds, folder)
    except (AttributeError, KeyError, TypeError, IndexError) as error:  # a value of another type in the pickle
        raise CheckpointDamagedError(
            f"{flat if flat.exists() else folder}: malformed optimizer state ({error!r:.100}); copy the checkpoint "
            "again, or convert its weights only"
        ) from None
    return kinds


def _by_number(saved: Any, parameters: Named, kinds: dict[str, Named], folder: Path) -> None:
    """Add index-keyed state to ``kinds`` in place: groups with weight decay hold matrices, others biases and norms,
    each in the order of ``parameters``. Missing states are skipped."""
    inner = saved.get("optimizer", saved) if isinstance(saved, dict) else {}
    states, groups = inner.get("state", {}), inner.get("param_groups", [])
    mains = saved.get("fp32_from_fp16_params") or saved.get("fp32_from_fp16") or []
    for index, group in enumerate(groups):
        decays, experts = group.get("wd_mult", 1.0) != 0, bool(group.get("is_expert_parallel"))
        names = [
            name
            for name, tensor in parameters.items()
            if (len(tensor.shape) > 1 and not name.endswith(".bias")) == decays and (".experts." in name) == experts
        ]
        numbers = group["params"]
        if len(numbers) != len(names):
            raise CheckpointError(
                f"{folder}: group {index} of its optimizer has {len(numbers)} parameters, expected {len(names)}"
            )
        for place, (number, name) in enumerate(zip(numbers, names)):
            values = {kind: states.get(number, {}).get(kind) for kind in ("exp_avg", "exp_avg_sq")}
            values["main_param"] = mains[index][place] if index < len(mains) and mains[index] else None
            for kind, tensor in values.items():
                if tensor is None:
                    continue
                if not isinstance(tensor, LazyTensor) or tensor.shape != parameters[name].shape:
                    expected = list(parameters[name].shape)
                    raise CheckpointError(f"{folder}: {kind} of {name} does not have the shape {expected}")
                kinds.setdefault(kind, {})[name] = tensor


def _distributed(saved: Any, chunks: list[Named], path: Path) -> dict[str, Named]:
    """Split the flat buffers of ``distrib_optim.pt``, one entry per virtual stage, into lazy shards. Raises
    CheckpointError for experts or other sizes; stages without state are skipped."""
    kinds: dict[str, Named] = {}
    if not isinstance(saved, dict) or any(".experts." in name for named in chunks for name in named):
        raise CheckpointError(f"{path}: flat optimizer state of experts: save it as torch_dist, and convert that")
    for index, named in enumerate(chunks):
        order = [(name, part.shape) for name, part in named.items()]
        for buffer in (saved.get(index) or {}).values():
            flat = {kind: part if isinstance(part, list) else [part] for kind, part in buffer.items() if kind in STATES}
            pieces = [part for parts in flat.values() for part in parts]
            if not pieces or any(not isinstance(part, LazyTensor) or len(part.shape) != 1 for part in pieces):
                raise CheckpointError(f"{path}: a buffer is not flat")
            for kind, shards in cut_buckets(order, flat, str(path)).items():
                kinds.setdefault(STATES[kind], {}).update(shards)
    return kinds
