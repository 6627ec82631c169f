"""The only module with state: the process groups of this process, and its current position in the run.

``initialize_model_parallel`` builds a frozen ``ProcessGroups``; models read it once (``get_process_groups``) and pass
it on. It starts torch.distributed from torchrun's environment if needed, over NCCL on GPUs and gloo on CPUs. Without
such an environment the program is one process; torch.distributed is then a group of one, for the program's calls only.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron import serve_other_names
from megatron.core.config.errors import UserError
from megatron.core.config.notices import notice
from megatron.core.groups import process_groups
from megatron.core.groups.copy_engines.choice import start_copy_engines
from megatron.core.groups.nccl_options import DEFAULTS as NCCL_DEFAULTS
from megatron.core.groups.nccl_options import group_options, read_nccl_settings

logger = logging.getLogger(__name__)

_AXES_WITH_HOST_TWIN = ("world", "dp", "dp_cp")
"""Axes that also move CPU tensors (checkpoints, data); over NCCL they get a gloo twin."""


_AXES_WITH_ENGINES = ("tp", "pp", "etp_ep")


@dataclass(frozen=True)
class _State:
    grid: process_groups.RankGrid
    groups: process_groups.ProcessGroups
    virtual_pipeline_size: int | None
    self_group: dist.ProcessGroup | None
    """Handle of a group of this rank only, of a world of several ranks: to torch.distributed, None means the world."""
    virtual_pipeline_rank: int | None = None
    """The model chunk that is being built; None outside of model building."""
    step_groups: dict[int, process_groups.StepGroups] = field(default_factory=dict)
    """Groups by context-parallel size, if that is chosen per micro-batch."""
    further: dict[tuple[int | str | tuple[int, ...], ...], dist.ProcessGroup] = field(default_factory=dict)
    """Groups that getters made, by ranks."""


_state: _State | None = None


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    *,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    expert_tensor_parallel_size: int | None = None,
    order: str = process_groups.DEFAULT_ORDER,
    distributed_timeout_minutes: float = 30,
    num_distributed_optimizer_instances: int = 1,
    hierarchical_context_parallel_sizes: Sequence[int] | None = None,
    hybrid_context_parallel: bool = False,
    nccl_communicator_config_path: str | None = None,
    copy_engines: bool = True,
    group_of_one: bool = True,
    **without_effect: object,
) -> process_groups.ProcessGroups:
    """Build the process groups of every axis, keep them for the getters of this module, and return this process's
    groups. Collective: every process of the world calls it with the same arguments. Starts torch.distributed if needed;
    with copy engines it waits for the device. Raises RuntimeError if groups exist already.

    Sizes must fit the world: its data-parallel size is world / (tensor * pipeline * context); UserError otherwise,
    before any group exists, also for model chunks without a pipeline. ``order`` lists the axes from the fastest to the
    slowest, ``tp-cp-ep-pp-dp`` puts pipeline stages next to each other; axes of size 1 may be left out.
    ``hybrid_context_parallel`` adds groups of every power of two of data- and context-parallel ranks
    (:func:`get_step_groups`). ``nccl_communicator_config_path`` names a YAML file (``nccl_options.py``).
    ``copy_engines``: over NCCL, groups whose ranks share a host get copy engines for supported collectives
    (``copy_engines/``). ``group_of_one``: see :func:`start_single_process_group`. Keywords of Megatron-LM without
    effect here are logged with the reason; unknown keywords raise TypeError."""
    global _state
    _explain_keywords(without_effect)
    if _state is not None:
        raise RuntimeError("model parallelism is already initialised; call destroy_model_parallel() first")
    if (virtual_pipeline_model_parallel_size or 1) > 1 and pipeline_model_parallel_size == 1:
        raise UserError(
            f"virtual_pipeline_model_parallel_size {virtual_pipeline_model_parallel_size}: requires "
            "pipeline_model_parallel_size > 1; leave it out"
        )
    timeout = timedelta(minutes=distributed_timeout_minutes)
    world_size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    grid = process_groups.RankGrid.from_world(
        world_size,
        tp=tensor_model_parallel_size,
        cp=context_parallel_size,
        pp=pipeline_model_parallel_size,
        ep=expert_model_parallel_size,
        etp=expert_tensor_parallel_size,
        order=order,
        optimizer_instances=num_distributed_optimizer_instances,
        cp_levels=hierarchical_context_parallel_sizes,
    )
    settings = NCCL_DEFAULTS
    if nccl_communicator_config_path is not None:
        axes = [each.name for each in fields(process_groups.ProcessGroups)]
        settings = settings | read_nccl_settings(nccl_communicator_config_path, axes)
    _start_distributed(timeout)
    if group_of_one:
        start_single_process_group()
    rank = dist.get_rank() if dist.is_initialized() else 0

    def new_group(name: str, rank_lists: list[list[int]]) -> process_groups.Handles:
        return _new_subgroups(name, rank_lists, timeout, settings.get(name, {}))

    groups = process_groups.SINGLE_PROCESS
    if world_size > 1:
        groups = process_groups.build_process_groups(grid, rank, new_group)
    if groups.pp.size > 1 and dist.get_backend() == "nccl":
        _open_lanes(groups, wrap=virtual_pipeline_model_parallel_size is not None)
    if copy_engines and world_size > 1:
        groups = _with_engines(groups)
    self_group = dist.new_group([rank], use_local_synchronization=True) if world_size > 1 else None
    steps = process_groups.build_step_groups(grid, groups, rank, new_group) if hybrid_context_parallel else {}
    _state = _State(grid, groups, virtual_pipeline_model_parallel_size, self_group, step_groups=steps)
    return groups


def start_single_process_group() -> None:
    """Initialize torch.distributed as a group of one if no launcher started this process (no ``RANK`` in the
    environment) and it is not initialized: programs call it (``get_rank``, ``barrier``) for any number of ranks."""
    if not dist.is_initialized() and "RANK" not in os.environ:
        _start_single_process_world()


def _start_single_process_world() -> None:
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)


def _start_distributed(timeout: timedelta) -> None:
    """Initialize torch.distributed from torchrun's environment, over NCCL on GPUs, else gloo; without effect if it is
    initialized or ``WORLD_SIZE`` or ``RANK`` is not set. Collective over the world."""
    if dist.is_initialized() or "WORLD_SIZE" not in os.environ or "RANK" not in os.environ:
        return
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "nccl"
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    notice(logger, "starting torch.distributed with %s, world size %s", backend, os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, timeout=timeout)
    if backend == "gloo":
        atexit.register(_end_distributed)


def _end_distributed() -> None:
    """End what :func:`_start_distributed` started and the program has not ended: threads of gloo that outlive the
    interpreter may abort the process (torch 2.13: exit code -6 after a correct run)."""
    if dist.is_initialized():
        destroy_model_parallel()
        dist.destroy_process_group()


_WITHOUT_EFFECT = {
    "get_embedding_ranks": "which ranks share tied embeddings follows from the placements",
    "get_position_embedding_ranks": "position embeddings live on one stage",
    "create_gloo_process_groups": "gloo groups are made only where they are used",
    "use_sharp": "NCCL chooses its own algorithms",
    "high_priority_stream_groups": "every group has a stream of its own",
    "pipeline_model_parallel_comm_backend": "stages talk over the backend of the world",
    "rank_offset": "the grid starts at rank 0",
}


def _explain_keywords(given: dict[str, object]) -> None:
    """Raise TypeError for keywords that ``initialize_model_parallel`` does not know, listing all of them. Log why a
    known keyword with a true value has no effect."""
    unknown = sorted(set(given) - set(_WITHOUT_EFFECT))
    if unknown:
        raise TypeError(f"initialize_model_parallel() has no arguments {', '.join(unknown)}")
    for name, value in given.items():
        if value:
            logger.info("initialize_model_parallel: %s has no effect: %s", name, _WITHOUT_EFFECT[name])


def _new_subgroups(
    name: str, rank_lists: list[list[int]], timeout: timedelta, settings: dict[str, object]
) -> process_groups.Handles:
    """Create one torch group per rank list of axis ``name`` and return this rank's (handle, gloo handle of the same
    ranks or None). Collective over the world: all ranks take part in each group."""
    rank, backend = dist.get_rank(), dist.get_backend()
    handle = host_handle = None
    options = group_options(settings) if backend == "nccl" else None
    for ranks in rank_lists:
        group = dist.group.WORLD
        if name != "world":
            group = dist.new_group(ranks, timeout=timeout, pg_options=options, group_desc=name)
        twin = group
        if backend != "gloo":
            twin = None
            if name in _AXES_WITH_HOST_TWIN:
                twin = dist.new_group(ranks, timeout=timeout, backend="gloo", group_desc=f"{name}_host")
        if rank in ranks:
            handle, host_handle = group, twin
    return handle, host_handle


def _open_lanes(groups: process_groups.ProcessGroups, wrap: bool) -> None:
    """Send one message in both directions over every edge of the pipeline, edge by edge; ``wrap`` adds the edge between
    last and first rank. NCCL connects two ranks when they first communicate, and blocks the host of one until the other
    arrives: in the middle of a schedule that could deadlock. Collective over the pipeline; returns nothing."""
    ranks, me = groups.pp.ranks, dist.get_rank()
    edges = list(zip(ranks, ranks[1:]))
    if wrap and len(ranks) > 2:
        edges.append((ranks[0], ranks[-1]))
    message = torch.zeros(1, device="cuda")
    for low, high in edges:
        for lane, source, target in ((groups.pp_up, low, high), (groups.pp_down, high, low)):
            if me == source:
                dist.send(message, target, group=lane.handle)
            elif me == target:
                dist.recv(message, source, group=lane.handle)


def _with_engines(groups: process_groups.ProcessGroups) -> process_groups.ProcessGroups:
    """Return ``groups`` with copy engines in the tensor-parallel, pipeline and expert groups of several ranks that
    support them. Collective over each of these groups; waits for the device. Other groups are unchanged."""
    changed: dict[str, process_groups.Group] = {}
    for name in _AXES_WITH_ENGINES:
        group: process_groups.Group = getattr(groups, name)
        if group.size > 1:
            changed[name] = replace(group, engines=start_copy_engines(name, group.handle, group.ranks, group.rank))
    return replace(groups, **changed)


def destroy_model_parallel() -> None:
    """Discard the groups of this module's getters, if any. torch.distributed and its groups stay up:
    ``torch.distributed.destroy_process_group()`` ends them. No collective."""
    global _state
    _state = None


def model_parallel_is_initialized() -> bool:
    return _state is not None


is_initialized = model_parallel_is_initialized


def _current() -> _State:
    if _state is None:
        raise RuntimeError("model parallelism is not initialised; call initialize_model_parallel() first")
    return _state


def get_process_groups() -> process_groups.ProcessGroups:
    """Return the groups of this process; groups of a single process if none were initialized."""
    return process_groups.SINGLE_PROCESS if _state is None else _state.groups


def get_step_groups() -> dict[int, process_groups.StepGroups]:
    """Return the groups of this process by context-parallel size; empty unless ``hybrid_context_parallel`` is set."""
    return {} if _state is None else _state.step_groups


def get_rank_grid() -> process_groups.RankGrid:
    """Return the grid with the sizes of every axis; a grid of one rank if none was initialized."""
    return process_groups.RankGrid() if _state is None else _state.grid


def _handle(group: process_groups.Group) -> Any:
    """Return the torch.distributed group of ``group``'s ranks, never None: for one rank a group of this rank only.
    Raises RuntimeError before ``initialize_model_parallel`` for it."""
    if group.size > 1:
        return group.handle
    if _current().self_group is None and not dist.is_initialized():
        _start_single_process_world()
    return _current().self_group or dist.group.WORLD


def resolve_group(given: process_groups.AnyGroup = None, axis: str = "tp") -> process_groups.Group:
    """Return the group that a public function works on, with this process's rank in it. A ``Group`` is returned as it
    is; a torch group that belongs to an axis gives the axis's group, any other torch group a new ``Group``. No
    collective.

    Args:
        given: a torch ``ProcessGroup`` or a ``Group``; None takes the running program's group of ``axis``, or a group
            of this process only if no program was initialized.
        axis: a field of ``ProcessGroups``, such as "tp" or "cp".

    Raises:
        ValueError: this process is not in ``given``."""
    groups = get_process_groups()
    if given is None or isinstance(given, process_groups.Group):
        return getattr(groups, axis) if given is None else given
    known = (getattr(groups, each.name) for each in fields(groups))
    for group in (getattr(groups, axis), *known):  # the group of the axis first: other axes may share its handle
        if group.handle is given:
            return group
    ranks, rank = tuple(dist.get_process_group_ranks(given)), dist.get_rank()
    if rank not in ranks:
        raise ValueError(f"group: rank {rank} is not among its ranks {list(ranks)}; pass a group of this process")
    return process_groups.Group(axis, ranks, ranks.index(rank), given if len(ranks) > 1 else None)


def _getters(axis: str) -> tuple[Callable[..., Any], Callable[[], int], Callable[[], int]]:
    """Return three getters of ``axis`` for this process: its torch.distributed group, its size, this rank's index in
    it. They raise RuntimeError before initialization; ``group(check_initialized=False)`` returns None instead."""

    def axis_group() -> process_groups.Group:
        return getattr(_current().groups, axis)

    def group(check_initialized: bool = True) -> Any:
        return None if _state is None and not check_initialized else _handle(axis_group())

    return group, lambda: axis_group().size, lambda: axis_group().rank


get_tensor_model_parallel_group, get_tensor_model_parallel_world_size, get_tensor_model_parallel_rank = _getters("tp")
(
    get_pipeline_model_parallel_group,
    get_pipeline_model_parallel_world_size,
    get_pipeline_model_parallel_rank,
) = _getters("pp")
get_context_parallel_group, get_context_parallel_world_size, get_context_parallel_rank = _getters("cp")
(
    get_tensor_and_context_parallel_group,
    get_tensor_and_context_parallel_world_size,
    get_tensor_and_context_parallel_rank,
) = _getters("tp_cp")
get_model_parallel_group, _, _ = _getters("tp_pp")
get_embedding_group, _, _ = _getters("embedding")
get_expert_model_parallel_group, get_expert_model_parallel_world_size, get_expert_model_parallel_rank = _getters("ep")
(
    get_expert_tensor_parallel_group,
    get_expert_tensor_parallel_world_size,
    get_expert_tensor_parallel_rank,
) = _getters("etp")
_, get_expert_data_parallel_world_size, get_expert_data_parallel_rank = _getters("edp")
(
    get_expert_tensor_and_model_parallel_group,
    get_expert_tensor_and_model_parallel_world_size,
    get_expert_tensor_and_model_parallel_rank,
) = _getters("etp_ep")
get_expert_tensor_model_pipeline_parallel_group, _, _ = _getters("etp_ep_pp")


def get_tensor_model_parallel_src_rank() -> int:
    """Return the global rank of the first member of this rank's tensor-parallel group."""
    return _current().groups.tp.ranks[0]


def get_model_parallel_src_rank() -> int:
    """Return the global rank of the first member of this rank's model-parallel (tensor x pipeline) group."""
    return _current().groups.tp_pp.ranks[0]


def get_context_parallel_global_ranks(check_initialized: bool = True) -> list[int] | None:
    """Return the global ranks of this rank's context-parallel group; None before initialization if
    ``check_initialized`` is False (else RuntimeError)."""
    return None if _state is None and not check_initialized else list(_current().groups.cp.ranks)


def get_pipeline_model_parallel_first_rank() -> int:
    """Global rank of the first pipeline stage."""
    return _current().groups.pp.ranks[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """Global rank of the last pipeline stage."""
    return _current().groups.pp.ranks[-1]


def get_pipeline_model_parallel_next_rank() -> int:
    """Global rank of the next pipeline stage; the last stage is followed by the first."""
    pp = _current().groups.pp
    return pp.ranks[(pp.rank + 1) % pp.size]


def get_pipeline_model_parallel_prev_rank() -> int:
    """Global rank of the previous pipeline stage; the first stage is preceded by the last."""
    pp = _current().groups.pp
    return pp.ranks[pp.rank - 1]


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    return _current().virtual_pipeline_size


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """Index of this rank's model chunk in construction; None outside of model building."""
    return None if _state is None else _state.virtual_pipeline_rank


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Set the chunk that is built next, for model providers without ``vp_stage``; None afterwards."""
    global _state
    _state = replace(_current(), virtual_pipeline_rank=rank)


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this pipeline rank is the first. With ``ignore_virtual`` False its chunk ``vp_stage`` (default:
    the chunk that is being built) must also be the first, or unknown."""
    chunk = get_virtual_pipeline_model_parallel_rank() if vp_stage is None else vp_stage
    return _current().groups.pp.is_first and (ignore_virtual or not chunk)


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this pipeline rank is the last. With ``ignore_virtual`` False its chunk ``vp_stage`` (default: the
    chunk that is being built) must also be the last, or unknown."""
    chunk = get_virtual_pipeline_model_parallel_rank() if vp_stage is None else vp_stage
    chunks = _current().virtual_pipeline_size
    return _current().groups.pp.is_last and (ignore_virtual or chunks is None or chunk in (None, chunks - 1))


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this rank (its chunk ``vp_stage`` unless ``ignore_virtual``) is the first or the last stage."""
    first, last = (of_stage(ignore_virtual, vp_stage) for of_stage in (is_pipeline_first_stage, is_pipeline_last_stage))
    return first or last


def get_position_embedding_group(check_initialized: bool = True) -> Any:
    """Return the group of this rank only: one stage holds the position embeddings."""
    return None if _state is None and not check_initialized else _handle(process_groups.SINGLE_PROCESS.embedding)


def get_data_parallel_group(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> dist.ProcessGroup:
    """Return the group of ranks that hold the same parameters with other data. ``with_context_parallel`` adds the
    context-parallel ranks; ``partial_data_parallel``: the ranks of one copy of the optimizer state."""
    return _handle(_data_parallel(with_context_parallel, partial_data_parallel))


def get_data_parallel_group_gloo(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> dist.ProcessGroup:
    """:func:`get_data_parallel_group` for CPU tensors."""
    return _host_handle(_data_parallel(with_context_parallel, partial_data_parallel))


def get_data_parallel_world_size(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    return _data_parallel(with_context_parallel, partial_data_parallel).size


def get_data_parallel_rank(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    return _data_parallel(with_context_parallel, partial_data_parallel).rank


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    return _data_parallel(with_context_parallel).ranks[0]


def _data_parallel(with_context_parallel: bool, partial: bool = False) -> process_groups.Group:
    groups = _current().groups
    if partial:
        return groups.dp_cp_shard
    return groups.dp_cp if with_context_parallel else groups.dp


def get_expert_data_parallel_group(check_initialized: bool = True, partial_expert_data_parallel: bool = False) -> Any:
    """Return the group of ranks that hold the same expert parameters; ``partial_expert_data_parallel``: the ranks that
    share one copy of their optimizer state. ``check_initialized`` False: None before initialization."""
    if _state is None and not check_initialized:
        return None
    return _handle(_current().groups.edp_shard if partial_expert_data_parallel else _current().groups.edp)


def get_tensor_and_data_parallel_group(check_initialized: bool = True, with_context_parallel: bool = False) -> Any:
    """Return the group of the tensor- and data-parallel ranks of this pipeline stage; ``with_context_parallel`` adds
    the context-parallel ranks. If no axis has these ranks, the first call creates the group: all its ranks must make
    it. None before initialization if ``check_initialized`` is False (else RuntimeError)."""
    if _state is None and not check_initialized:
        return None
    state = _current()
    lists = state.grid.rank_lists("tp-dp-cp" if with_context_parallel else "tp-dp")
    return _find_group(next(ranks for ranks in lists if state.groups.world.ranks[state.groups.world.rank] in ranks))


def get_amax_reduction_group(with_context_parallel: bool = False, tp_only_amax_red: bool = False) -> dist.ProcessGroup:
    """Return the group over which fp8 statistics are reduced: tensor-parallel ranks, and data-parallel ranks unless
    ``tp_only_amax_red``; ``with_context_parallel`` adds context-parallel ranks. The first call may be collective."""
    if tp_only_amax_red:
        return _handle(_current().groups.tp_cp if with_context_parallel else _current().groups.tp)
    return get_tensor_and_data_parallel_group(with_context_parallel=with_context_parallel)


def _find_group(ranks: list[int]) -> dist.ProcessGroup:
    """Return the torch.distributed group with exactly these ``ranks``: the handle of an axis with the same ranks, or a
    new group, created at the first call and cached. Creating it is collective over ``ranks``."""
    state = _current()
    axes = (getattr(state.groups, each.name) for each in fields(state.groups))
    if (known := next((group for group in axes if group.ranks == tuple(ranks)), None)) is not None:
        return _handle(known)
    if tuple(ranks) not in state.further:
        state.further[tuple(ranks)] = dist.new_group(ranks, use_local_synchronization=True)
    return state.further[tuple(ranks)]


def _host_handle(group: process_groups.Group) -> dist.ProcessGroup:
    """Return a torch.distributed group of ``group``'s ranks that moves CPU tensors: its gloo handle, its handle if that
    supports gloo, or a new gloo group, created at the first call and cached. Creating it is collective."""
    if group.size > 1 and group.host_handle is not None:
        return group.host_handle
    handle, state = _handle(group), _current()
    if "gloo" in dist.get_backend_config(handle):
        return handle
    if ("gloo", group.ranks) not in state.further:
        ranks = dist.get_process_group_ranks(handle)
        state.further["gloo", group.ranks] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return state.further["gloo", group.ranks]


def get_hierarchical_context_parallel_groups() -> list[dist.ProcessGroup]:
    """Return the inner (all-to-all) and the outer (ring) group of two-level context parallelism, in this order."""
    groups = _current().groups
    return [_handle(groups.cp_a2a), _handle(groups.cp_p2p)]


serve_other_names(__name__)
