"""Process groups as plain data: which ranks form the groups of every axis, and the handles that layers receive.

``RankGrid`` is a pure function of sizes. The dense grid orders its axes fastest to slowest, by default
``tp-cp-ep-dp-pp`` with world = tp * cp * dp * pp: expert parallelism takes no ranks of its own. Expert layers see the
same world through a second grid with ``etp`` in the place of tp, no cp, ``ep``, and the data parallelism that remains,
``edp``.

A group of one rank has no handle, and every collective over it is the identity: layers need no special case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from megatron.core.config.errors import UserError

DEFAULT_ORDER = "tp-cp-ep-dp-pp"


@dataclass(frozen=True)
class Group:
    """The group of one axis that this process belongs to. ``rank`` counts within the group."""

    name: str
    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    handle: Any = field(default=None, compare=False)
    """torch.distributed.ProcessGroup; None exactly when the group has one rank."""
    host_handle: Any = field(default=None, compare=False)
    """A gloo twin for CPU tensors where ``handle`` is NCCL (only on the axes that need one)."""
    engines: Any = field(default=None, compare=False)
    """``copy_engines.CopyEngines`` between the ranks; None where everything goes through ``handle``."""

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1


class DataParallelGroups(NamedTuple):
    """The ranks that matter to one kind of parameters, dense or expert: for gradients, optimizer state and norms."""

    reduce: Group
    """Ranks that hold the same parameters: their gradients are summed over it."""
    shard: Group
    """Ranks of ``reduce`` that share out one copy of the optimizer state: all of them with one instance."""
    replica: Group
    """Ranks of ``reduce`` that hold the same part of that state, one of each instance."""
    model: Group
    """Ranks that together hold one copy of the parameters."""


@dataclass(frozen=True)
class ProcessGroups:
    """One group per axis, or per combination of axes, as seen by this process. The defaults describe a single
    process."""

    world: Group = Group("world")
    tp: Group = Group("tp")
    cp: Group = Group("cp")
    cp_a2a: Group = Group("cp_a2a")
    """Inner level of two-level context parallelism: neighbours in ``cp`` that exchange heads; alone without levels."""
    cp_p2p: Group = Group("cp_p2p")
    """Outer level: ranks at the same place of the inner groups, which form a ring."""
    pp: Group = Group("pp")
    dp: Group = Group("dp")
    dp_cp: Group = Group("dp_cp")
    """Ranks that hold the same dense parameters: their gradients are summed over it."""
    dp_cp_shard: Group = Group("dp_cp_shard")
    """Ranks of ``dp_cp`` that share out one copy of the optimizer state: all of them with one instance."""
    dp_cp_replica: Group = Group("dp_cp_replica")
    """Ranks of ``dp_cp`` that hold the same part of the optimizer state, one of each instance."""
    tp_cp: Group = Group("tp_cp")
    tp_pp: Group = Group("tp_pp")
    """Ranks that together hold one copy of the model (Megatron-LM's model-parallel group)."""
    ep: Group = Group("ep")
    etp: Group = Group("etp")
    edp: Group = Group("edp")
    """Ranks that hold the same expert parameters: what is ``dp_cp`` to dense ones."""
    edp_shard: Group = Group("edp_shard")
    edp_replica: Group = Group("edp_replica")
    etp_ep: Group = Group("etp_ep")
    etp_ep_pp: Group = Group("etp_ep_pp")
    """Ranks that together hold one copy of the expert parameters."""
    pp_up: Group = Group("pp_up")
    """The ranks of ``pp`` again, with a communicator of their own for messages to higher ranks."""
    pp_down: Group = Group("pp_down")
    """The same for messages to lower ranks."""
    embedding: Group = Group("embedding")
    """First and last pipeline stage, which share tied embeddings; one rank where this rank is on neither."""

    def stream(self, sequence_parallel: bool) -> Group:
        """Ranks that split the positions of the residual stream; this rank alone without sequence parallelism."""
        return self.tp if sequence_parallel else SINGLE_PROCESS.tp

    @property
    def dense(self) -> DataParallelGroups:
        """Those of parameters of the dense grid."""
        return DataParallelGroups(self.dp_cp, self.dp_cp_shard, self.dp_cp_replica, self.tp_pp)

    @property
    def expert(self) -> DataParallelGroups:
        """Those of parameters of the expert grid: the dense ones where they are the same ranks (no expert parallelism),
        so that both kinds share buffers and collectives."""
        own = DataParallelGroups(self.edp, self.edp_shard, self.edp_replica, self.etp_ep_pp)
        alike = all(mine.ranks == dense.ranks for mine, dense in zip(own, self.dense))
        return self.dense if alike else own

    @property
    def data_parallel(self) -> tuple[DataParallelGroups, ...]:
        """All different ones. Every rank has as many, whatever it holds, and may sum over each in turn."""
        return tuple(dict.fromkeys((self.dense, self.expert)))


SINGLE_PROCESS = ProcessGroups()

_AXES = {
    "tp": "tp", "cp": "cp", "pp": "pp", "dp": "dp", "dp_cp": "dp-cp", "tp_cp": "tp-cp", "tp_pp": "tp-pp",
}  # fmt: skip
_LANES = ("pp_up", "pp_down")
"""Groups that share their communicator with no other, although others have the same ranks."""
_EXPERT_AXES = {"ep": "ep", "etp": "tp", "edp": "dp", "etp_ep": "tp-ep", "etp_ep_pp": "tp-ep-pp"}


def orthogonal_rank_lists(sizes: dict[str, int], wanted: frozenset[str] | set[str]) -> list[list[int]]:
    """Groups that vary the ``wanted`` axes and fix the others, for a grid with axes ordered fastest to slowest.

    Within a group ranks ascend, and groups are ordered by their first rank.
    """
    world_size = math.prod(sizes.values())
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(world_size):
        rest, fixed = rank, []
        for axis, size in sizes.items():
            rest, coordinate = divmod(rest, size)
            if axis not in wanted:
                fixed.append(coordinate)
        groups.setdefault(tuple(fixed), []).append(rank)
    return sorted(groups.values())


def _stretches(lists: list[list[int]], size: int) -> list[list[int]]:
    """The groups cut into neighbours, ``size`` at a time."""
    return [ranks[i : i + size] for ranks in lists for i in range(0, len(ranks), size)]


def _places(lists: list[list[int]], size: int) -> list[list[int]]:
    """Ranks at the same place of those stretches."""
    return [ranks[i::size] for ranks in lists for i in range(size)]


@dataclass(frozen=True, kw_only=True)
class RankGrid:
    """Sizes of all axes and the rank lists that follow from them."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    order: str = DEFAULT_ORDER
    optimizer_instances: int = 1
    """Copies of sharded optimizer state: ``dp_cp`` groups are cut into as many stretches."""

    cp_levels: Sequence[int] | None = None
    """Inner and outer size of two-level context parallelism."""

    def __post_init__(self) -> None:
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
        if sorted(self.order.split("-")) != sorted(DEFAULT_ORDER.split("-")):
            raise UserError(f"order {self.order!r} must be a permutation of {DEFAULT_ORDER!r}")
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
        """The grid whose data-parallel size is what remains of ``world_size``."""
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
        """Dense axes, fastest first."""
        return {axis: getattr(self, axis) for axis in self.order.split("-") if axis != "ep"}

    @property
    def expert_sizes(self) -> dict[str, int]:
        """Expert axes, fastest first: tp stands for expert tensor parallelism and dp for ``edp``."""
        by_axis = {"tp": self.expert_tp, "ep": self.ep, "dp": self.edp, "pp": self.pp}
        return {axis: by_axis[axis] for axis in self.order.split("-") if axis != "cp"}

    @staticmethod
    def _rank_lists(sizes: dict[str, int], axes: str) -> list[list[int]]:
        return orthogonal_rank_lists(sizes, set(axes.split("-")))

    def rank_lists(self, axes: str) -> list[list[int]]:
        """All groups of dense axes such as ``"tp"`` or ``"dp-cp"``."""
        return self._rank_lists(self.sizes, axes)

    def expert_rank_lists(self, axes: str) -> list[list[int]]:
        """All groups of expert axes: ``"ep"``, ``"tp"``, ``"dp"``, ``"tp-ep"``, ``"pp"``."""
        return self._rank_lists(self.expert_sizes, axes)

    def embedding_rank_lists(self) -> list[list[int]]:
        """Per pipeline: its first and last rank, then its middle ranks one by one."""
        lists = []
        for ranks in self.rank_lists("pp"):
            lists.append([ranks[0], ranks[-1]] if len(ranks) > 1 else ranks)
            lists.extend([rank] for rank in ranks[1:-1])
        return lists

    def all_rank_lists(self) -> dict[str, list[list[int]]]:
        """Rank lists by field name of ``ProcessGroups``; each field partitions the world."""
        lists = {"world": [list(range(self.world_size))]}
        lists |= {name: self.rank_lists(axes) for name, axes in _AXES.items()}
        lists |= {name: self.expert_rank_lists(axes) for name, axes in _EXPERT_AXES.items()}
        for name in ("dp_cp", "edp"):
            size = len(lists[name][0]) // self.optimizer_instances
            lists |= {f"{name}_shard": _stretches(lists[name], size), f"{name}_replica": _places(lists[name], size)}
        lists |= dict.fromkeys(_LANES, self.rank_lists("pp"))
        inner, step = (self.cp_levels[0],) * 2 if self.cp_levels else (1, self.cp)  # without levels, every rank alone
        lists |= {"cp_a2a": _stretches(lists["cp"], inner), "cp_p2p": _places(lists["cp"], step)}
        return lists | {"embedding": self.embedding_rank_lists()}


def build_process_groups(
    grid: RankGrid, rank: int, new_group: Callable[[str, list[list[int]]], tuple[Any, Any]]
) -> ProcessGroups:
    """The groups of process ``rank``.

    ``new_group(name, rank_lists)`` is called once per distinct partition with groups of two ranks or more, in the same
    order on all ranks, and returns (handle, host handle) of this rank's group. Axes with equal partitions share
    handles, pipeline lanes excepted.
    """
    handles: dict[tuple[str, tuple[tuple[int, ...], ...]], tuple[Any, Any]] = {}
    built: dict[str, Group] = {}
    for axis_field in fields(ProcessGroups):
        name = axis_field.name
        lists = grid.all_rank_lists()[name]
        ranks = next(group for group in lists if rank in group)
        partition = (name if name in _LANES else "", tuple(map(tuple, lists)))
        if any(len(group) > 1 for group in lists) and partition not in handles:
            handles[partition] = new_group(name, [group for group in lists if len(group) > 1])
        handle, host_handle = handles[partition] if len(ranks) > 1 else (None, None)
        built[name] = Group(name, tuple(ranks), ranks.index(rank), handle, host_handle)
    return ProcessGroups(**built)
