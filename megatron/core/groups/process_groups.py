"""Process groups as plain data: the ranks of every group on every axis, and the handles that layers receive.

``RankGrid`` computes rank lists from the parallel sizes. The dense grid orders its axes from fastest to slowest, by
default ``tp-cp-ep-dp-pp``, with world = tp * cp * dp * pp; expert parallelism reuses these ranks. Expert layers use a
second grid over the same ranks: ``etp`` instead of tp, no cp, ``ep``, and the remaining data parallelism ``edp``.

A group of one rank has the handle None. Collectives over it are the identity: the tensor-parallel operations skip them
automatically. Guard direct ``torch.distributed`` calls with ``group.size > 1``, because ``group=None`` is the world."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from megatron.core.config.errors import UserError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megatron.core.groups.copy_engines.exchange import CopyEngines

DEFAULT_ORDER = "tp-cp-ep-dp-pp"


@dataclass(frozen=True)
class Group:
    """Group of one axis that this process belongs to."""

    name: str
    """Axis, a field of ``ProcessGroups``."""
    ranks: tuple[int, ...] = (0,)
    """Global ranks of the members."""
    rank: int = 0
    """Rank of this process within the group."""
    handle: Any = field(default=None, compare=False)
    """torch.distributed.ProcessGroup; None if and only if the group has one rank."""
    host_handle: ProcessGroup | None = field(default=None, compare=False)
    """gloo group of the same ranks for CPU tensors if ``handle`` is NCCL; only for axes that need it."""
    engines: CopyEngines | None = field(default=None, compare=False)
    """None: all messages use ``handle``."""

    @cached_property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1


Handles: TypeAlias = "tuple[ProcessGroup | None, ProcessGroup | None]"
"""``Group.handle`` and ``Group.host_handle``."""
AnyGroup: TypeAlias = "ProcessGroup | Group | None"
"""Argument of public functions that accept groups of torch and of the library; None: a default."""


class DataParallelGroups(NamedTuple):
    """Groups for gradients, optimizer state and norms of one kind of parameters (dense or expert)."""

    reduce: Group
    """Ranks that hold the same parameters; gradients are summed over it."""
    shard: Group
    """Ranks of ``reduce`` over which one optimizer instance is sharded; equal to ``reduce`` with one instance."""
    replica: Group
    """Ranks of ``reduce`` that hold the same optimizer shard, one per instance."""
    model: Group
    """Ranks that together hold one copy of the parameters."""


class StepGroups(NamedTuple):
    """Ranks that share a micro-batch whose context-parallel size is chosen per micro-batch."""

    ranks: Group
    """Consecutive ranks of ``dp_cp``, which hold some tokens of every sequence."""
    sharers: Group
    """These ranks and their tensor-parallel ranks."""


@dataclass(frozen=True)
class ProcessGroups:
    """Groups of this process, one per axis or combination of axes. The defaults describe a single process."""

    world: Group = Group("world")
    tp: Group = Group("tp")
    cp: Group = Group("cp")
    cp_a2a: Group = Group("cp_a2a")
    """Inner level of two-level context parallelism: adjacent ranks of ``cp`` for the head all-to-all. Without levels:
    one rank."""
    cp_p2p: Group = Group("cp_p2p")
    """Outer level: ranks with the same index in their inner groups, which form the ring. Without levels: one rank."""
    pp: Group = Group("pp")
    dp: Group = Group("dp")
    dp_cp: Group = Group("dp_cp")
    """Ranks that hold the same dense parameters; gradients are summed over it."""
    dp_cp_shard: Group = Group("dp_cp_shard")
    """Ranks of ``dp_cp`` over which one optimizer instance is sharded; equal to ``dp_cp`` with one instance."""
    dp_cp_replica: Group = Group("dp_cp_replica")
    """Ranks of ``dp_cp`` that hold the same optimizer shard, one per instance."""
    tp_cp: Group = Group("tp_cp")
    tp_pp: Group = Group("tp_pp")
    """Ranks that together hold one copy of the model (Megatron-LM's model-parallel group)."""
    ep: Group = Group("ep")
    etp: Group = Group("etp")
    edp: Group = Group("edp")
    """Ranks that hold the same expert parameters; the counterpart of ``dp_cp``."""
    edp_shard: Group = Group("edp_shard")
    edp_replica: Group = Group("edp_replica")
    etp_ep: Group = Group("etp_ep")
    etp_ep_pp: Group = Group("etp_ep_pp")
    """Ranks that together hold one copy of the expert parameters."""
    pp_up: Group = Group("pp_up")
    """Ranks of ``pp`` with a separate communicator for messages to higher ranks."""
    pp_down: Group = Group("pp_down")
    """Ranks of ``pp`` with a separate communicator for messages to lower ranks."""
    embedding: Group = Group("embedding")
    """First and last pipeline stage, for tied embeddings; one rank for middle stages."""

    def stream(self, sequence_parallel: bool) -> Group:
        """Return the group that splits the residual stream by position; one rank without sequence parallelism."""
        return self.tp if sequence_parallel else SINGLE_PROCESS.tp

    @property
    def dense(self) -> DataParallelGroups:
        """Data-parallel groups of dense parameters."""
        return DataParallelGroups(self.dp_cp, self.dp_cp_shard, self.dp_cp_replica, self.tp_pp)

    @property
    def expert(self) -> DataParallelGroups:
        """Data-parallel groups of expert parameters; the dense groups if the ranks are equal, so that both kinds of
        parameters share buffers and collectives."""
        expert = DataParallelGroups(self.edp, self.edp_shard, self.edp_replica, self.etp_ep_pp)
        equal = all(mine.ranks == dense.ranks for mine, dense in zip(expert, self.dense))
        return self.dense if equal else expert

    @property
    def data_parallel(self) -> tuple[DataParallelGroups, ...]:
        """One or two distinct data-parallel groups, equally many in the same order on all ranks."""
        return tuple(dict.fromkeys((self.dense, self.expert)))


SINGLE_PROCESS = ProcessGroups()

_AXES = {"tp": "tp", "cp": "cp", "pp": "pp", "dp": "dp", "dp_cp": "dp-cp", "tp_cp": "tp-cp", "tp_pp": "tp-pp"}
_LANES = ("pp_up", "pp_down")
"""Groups with a separate communicator, although other groups have the same ranks."""
_EXPERT_AXES = {"ep": "ep", "etp": "tp", "edp": "dp", "etp_ep": "tp-ep", "etp_ep_pp": "tp-ep-pp"}


def orthogonal_rank_lists(sizes: dict[str, int], varied: frozenset[str] | set[str]) -> list[list[int]]:
    """Return the groups that vary the axes ``varied`` and fix all others. ``sizes`` orders the axes of the grid from
    fastest to slowest. Ranks ascend within a group, and groups are sorted by their first rank."""
    world_size = math.prod(sizes.values())
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(world_size):
        rest, fixed = rank, []
        for axis, size in sizes.items():
            rest, coordinate = divmod(rest, size)
            if axis not in varied:
                fixed.append(coordinate)
        groups.setdefault(tuple(fixed), []).append(rank)
    return sorted(groups.values())


def _runs(lists: list[list[int]], size: int) -> list[list[int]]:
    return [ranks[i : i + size] for ranks in lists for i in range(0, len(ranks), size)]


def _strided(lists: list[list[int]], size: int) -> list[list[int]]:
    """Split each group into ranks with the same index in its runs."""
    return [ranks[i::size] for ranks in lists for i in range(size)]


@dataclass(frozen=True, kw_only=True)
class RankGrid:
    """Parallel sizes and the rank lists of all groups derived from them. Raises UserError for sizes that do not fit."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    order: str = DEFAULT_ORDER
    optimizer_instances: int = 1
    """Number of copies of the sharded optimizer state; every ``dp_cp`` group is split into this many shard groups."""

    cp_levels: Sequence[int] | None = None
    """(inner, outer) size of two-level context parallelism; None: one level."""

    def __post_init__(self) -> None:
        """Raise UserError for sizes that do not divide each other or the world, an ``order`` with an unknown, repeated
        or missing axis, or an order with which both grids have different pipeline groups."""
        if self.cp_levels is not None and (len(self.cp_levels) != 2 or math.prod(self.cp_levels) != self.cp):
            raise UserError(
                f"hierarchical_context_parallel_sizes {list(self.cp_levels)}: give an inner and an outer size, whose "
                f"product is context-parallel size {self.cp}"
            )
        if self.optimizer_instances < 1 or (self.dp * self.cp) % self.optimizer_instances:
            raise UserError(
                f"{self.optimizer_instances} optimizer instances do not divide the {self.dp * self.cp} ranks of data "
                "and context parallelism"
            )
        for axis in ("tp", "cp", "dp", "pp", "ep"):
            if getattr(self, axis) < 1:
                raise UserError(f"{axis} size is {getattr(self, axis)}; every axis needs a size of at least 1")
        named, axes = self.order.lower().split("-"), DEFAULT_ORDER.split("-")
        unnamed = [axis for axis in axes if axis not in named]
        if len(set(named)) < len(named) or set(named) - set(axes):
            raise UserError(f"order {self.order!r}: must list axes of {DEFAULT_ORDER!r}, each once")
        if large := [axis for axis in unnamed if getattr(self, axis) > 1]:
            sizes = ", ".join(f"{axis} of size {getattr(self, axis)}" for axis in large)
            raise UserError(f"order {self.order!r}: must list {sizes}; an axis may be left out at size 1")
        object.__setattr__(self, "order", "-".join(named + unnamed))
        if self.world_size % (self.expert_tp * self.ep * self.pp):
            raise UserError(
                f"expert grid: world size {self.world_size} is not divisible by expert-tensor-parallel "
                f"{self.expert_tp} x "
                f"expert-model-parallel {self.ep} x pipeline-model-parallel {self.pp}"
            )
        if self.edp % self.optimizer_instances:
            raise UserError(
                f"{self.optimizer_instances} optimizer instances do not divide the {self.edp} data-parallel ranks of "
                "expert parameters"
            )
        if self._rank_lists(self.expert_sizes, "pp") != self._rank_lists(self.sizes, "pp"):
            raise UserError(f"order {self.order!r} gives the expert grid other pipeline groups than the dense grid")

    @classmethod
    def from_world(cls, world_size: int, *, tp: int = 1, cp: int = 1, pp: int = 1, **rest: Any) -> RankGrid:
        """Build the grid with data-parallel size ``world_size / (tp * cp * pp)``; ``rest``: ``ep`` …. Raises UserError
        if the world is not divisible, or as the constructor for sizes that do not fit together."""
        if world_size % (tp * cp * pp):
            raise UserError(
                f"world size {world_size} is not divisible by tensor-model-parallel {tp} x context-parallel {cp} x "
                f"pipeline-model-parallel {pp} = {tp * cp * pp}; choose sizes whose product divides it"
            )
        return cls(tp=tp, cp=cp, pp=pp, dp=world_size // (tp * cp * pp), **rest)

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    @property
    def edp(self) -> int:
        """Data-parallel size of expert parameters."""
        return self.world_size // (self.expert_tp * self.ep * self.pp)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the dense axes, fastest first."""
        return {axis: getattr(self, axis) for axis in self.order.split("-") if axis != "ep"}

    @property
    def expert_sizes(self) -> dict[str, int]:
        """Sizes of the expert axes, fastest first; "tp" is the expert-tensor-parallel size and "dp" is ``edp``."""
        by_axis = {"tp": self.expert_tp, "ep": self.ep, "dp": self.edp, "pp": self.pp}
        return {axis: by_axis[axis] for axis in self.order.split("-") if axis != "cp"}

    @staticmethod
    def _rank_lists(sizes: dict[str, int], axes: str) -> list[list[int]]:
        return orthogonal_rank_lists(sizes, set(axes.split("-")))

    def rank_lists(self, axes: str) -> list[list[int]]:
        """Return all groups over dense axes such as ``"tp"`` or ``"dp-cp"``."""
        return self._rank_lists(self.sizes, axes)

    def expert_rank_lists(self, axes: str) -> list[list[int]]:
        """Return all groups over expert axes such as ``"ep"``, ``"tp"``, ``"dp"``, ``"tp-ep"`` or ``"pp"``."""
        return self._rank_lists(self.expert_sizes, axes)

    def step_rank_lists(self, size: int) -> tuple[list[list[int]], list[list[int]]]:
        """Return the aligned blocks of ``size`` consecutive ranks of every ``dp_cp`` group, and each block with its
        tensor-parallel ranks; without an incomplete last block."""
        tp_ranks = {rank: ranks for ranks in self.rank_lists("tp") for rank in ranks}
        lists = self.rank_lists("dp-cp")
        blocks = [ranks[i : i + size] for ranks in lists for i in range(0, len(ranks) - size + 1, size)]
        shared = {tuple(sorted(member for rank in block for member in tp_ranks[rank])) for block in blocks}
        return blocks, sorted(map(list, shared))

    def embedding_rank_lists(self) -> list[list[int]]:
        """Return, for each pipeline, the group of its first and last rank, then one group of one rank per middle rank.
        A pipeline of one rank gives that rank only."""
        lists = []
        for ranks in self.rank_lists("pp"):
            lists.append([ranks[0], ranks[-1]] if len(ranks) > 1 else ranks)
            lists.extend([rank] for rank in ranks[1:-1])
        return lists

    def all_rank_lists(self) -> dict[str, list[list[int]]]:
        """Return the rank lists of all groups by field of ``ProcessGroups``; those of a field partition the world."""
        lists = {"world": [list(range(self.world_size))]}
        lists |= {name: self.rank_lists(axes) for name, axes in _AXES.items()}
        lists |= {name: self.expert_rank_lists(axes) for name, axes in _EXPERT_AXES.items()}
        for name in ("dp_cp", "edp"):
            size = len(lists[name][0]) // self.optimizer_instances
            lists |= {f"{name}_shard": _runs(lists[name], size), f"{name}_replica": _strided(lists[name], size)}
        lists |= dict.fromkeys(_LANES, self.rank_lists("pp"))
        inner, step = (self.cp_levels[0],) * 2 if self.cp_levels else (1, self.cp)  # without levels: groups of one rank
        lists |= {"cp_a2a": _runs(lists["cp"], inner), "cp_p2p": _strided(lists["cp"], step)}
        return lists | {"embedding": self.embedding_rank_lists()}


def build_process_groups(
    grid: RankGrid, rank: int, new_group: Callable[[str, list[list[int]]], Handles]
) -> ProcessGroups:
    """Build the groups of process ``rank``. Collective if ``new_group`` is. ``new_group(name, rank_lists)`` must return
    (handle, host handle). It is called in the same order on all ranks, once per distinct partition of the world, with
    its groups of at least two ranks. Axes with equal partitions share handles, except ``pp_up`` and ``pp_down``."""
    handles: dict[tuple[str, tuple[tuple[int, ...], ...]], Handles] = {}
    built: dict[str, Group] = {}
    rank_lists = grid.all_rank_lists()
    for axis_field in fields(ProcessGroups):
        name = axis_field.name
        lists = rank_lists[name]
        ranks = next(group for group in lists if rank in group)
        partition = (name if name in _LANES else "", tuple(map(tuple, lists)))
        if any(len(group) > 1 for group in lists) and partition not in handles:
            handles[partition] = new_group(name, [group for group in lists if len(group) > 1])
        handle, host_handle = handles[partition] if len(ranks) > 1 else (None, None)
        built[name] = Group(name, tuple(ranks), ranks.index(rank), handle, host_handle)
    return ProcessGroups(**built)


def build_step_groups(
    grid: RankGrid, groups: ProcessGroups, rank: int, new_group: Callable[[str, list[list[int]]], Handles]
) -> dict[int, StepGroups]:
    """Build the groups of every power of two of consecutive ``dp_cp`` ranks, by size; without sizes whose blocks do not
    contain ``rank``. The size of ``groups.cp`` has its groups: attention caches its form by the ranks. Collective if
    ``new_group`` is, which is called as in :func:`build_process_groups`."""
    only = Group("cp", (rank,))
    groups_by_size, size = {1: StepGroups(only, replace(groups.tp, name="tp_cp"))}, 2
    while size <= groups.dp_cp.size:
        built: list[Group] = []
        for name, lists in zip(("cp", "tp_cp"), grid.step_rank_lists(size)):
            if name == "tp_cp" and groups.tp.size == 1:
                built += built
                continue
            if size == groups.cp.size:
                built.append(getattr(groups, name))
                continue
            handle, _ = new_group(name, lists)
            ranks = next((candidate for candidate in lists if rank in candidate), None)
            if ranks is not None:
                built.append(Group(name, tuple(ranks), ranks.index(rank), handle))
        if built:
            groups_by_size[size] = StepGroups(*built)
        size *= 2
    return groups_by_size
