"""Parameter declarations: global shape, placement on the mesh axes, and initialization.

``parameter(...)`` creates this rank's shard and attaches a ``ParameterSpec``. Initial values, gradient reduction,
gradient norm, checkpoint shards and parameter counts are all derived from the spec.

``mesh`` names axes of one of the two rank grids (``core/groups/process_groups.py``): a dense parameter can be sharded
over ``tp``, an expert parameter over ``ep`` and ``etp``. The remaining ranks of the grid hold replicas: they sum the
gradient and may shard the optimizer state (``data_parallel_groups``).

A stacked weight declares the *logical* shape in which every shard is a rectangle, e.g. gate and up as ``(2, ffn,
hidden)`` with ``mesh={"tp": Shard(1)}``. The ``nn.Parameter`` folds the leading logical dims into one, as layers and
checkpoints expect. For a padded dim the global shape has the true size and ``stored`` the padded one. Padding holds
zeros and is not checkpointed; layers must not let it affect their results.

If a rank's elements of a global tensor do not form a rectangle, the tensor consists of several parameters, each
declared as a ``SubTensor``. Example: K/V with fewer heads than tensor-parallel ranks, where several ranks hold one
head (``Nested``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from megatron.core.config.errors import UserError, listed
from megatron.core.fusions.storage import Storage
from megatron.core.groups.process_groups import SINGLE_PROCESS, DataParallelGroups, Group, ProcessGroups
from megatron.core.random import philox
from megatron.core.sharding.named_slices import stored_parameters
from megatron.core.sharding.rectangles import Rectangle

__all__ = [
    "AsBuilt", "Drawn", "Init", "Nested", "Normal", "Ones", "OwnsState", "ParameterSpec", "Partial", "Replicate",
    "RowParts", "Shard", "SubTensor", "Uniform", "XavierUniform", "Zeros", "adopt_declarations", "counts_on_this_rank",
    "data_parallel_groups", "declare", "declare_row_parts", "global_name", "initialize_parameters", "local_rectangle",
    "parameter", "require_declarations", "spec_or_replicated",
]  # fmt: skip

DENSE_AXES = ("tp",)
EXPERT_AXES = ("ep", "etp")
"""Mesh axes that can shard parameters, for the dense and the expert grid. A parameter belongs to one grid only."""


@dataclass(frozen=True)
class Zeros:
    """Initialize with zeros."""


@dataclass(frozen=True)
class Ones:
    """Initialize with ones."""


@dataclass(frozen=True)
class Normal:
    """Initialize from a normal distribution with mean 0 and standard deviation ``std``."""

    std: float


@dataclass(frozen=True)
class XavierUniform:
    """Initialize from a uniform distribution on +-sqrt(6 / (fan_in + fan_out)). fan_in and fan_out refer to the full
    global matrix, with leading logical dims folded into fan_out."""

    stacked: int = 0
    """Number of leading logical dims that index separate matrices (experts); they are not part of the fans."""


@dataclass(frozen=True)
class Uniform:
    """Initialize from a uniform distribution on +-``bound``."""

    bound: float


@dataclass(frozen=True)
class Drawn:
    """Initialize with ``function`` of values from a uniform distribution on [low, high)."""

    low: float
    high: float
    function: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class AsBuilt:
    """Keep the values that the module's constructor set; they do not depend on seed and global name."""


Init = Zeros | Ones | Normal | XavierUniform | Uniform | Drawn | AsBuilt


@dataclass(frozen=True)
class Nested:
    """Placement on an axis viewed as a 2-d grid: rank = outer rank * inner_size + inner rank."""

    outer: Placement
    inner: Placement
    inner_size: int


class SubTensor(NamedTuple):
    """Part of a global tensor that one of several sibling parameters holds (over all ranks together)."""

    shape: tuple[int, ...]
    """Logical shape of the full global tensor."""
    leaf: str
    """Last component of the global name; all siblings have the same."""
    rectangle: Rectangle
    """Index range of this part in the global tensor."""


class RowParts(NamedTuple):
    """Matrices that one weight stacks along its output dim, in blocks of equal rows (queries, key and value of a
    group). Lengths are rows of one block; both lists have the same sum."""

    matrices: tuple[int, ...]
    """Rows of each matrix in a block; the rows of all blocks together form the matrix."""
    heads: tuple[int, ...]
    """Rows of each head in a block."""
    adapters: tuple[int, ...] = ()
    """Rows of each low-rank adapter in a block; (): one adapter per matrix."""


class OwnsState(Protocol):
    """Class of an update rule (``optimizer/update_rules.py``), as far as sharding depends on it."""

    owns: Literal["elements", "matrices"]
    """Whether shards may cut a parameter at any element, or the rule needs full matrices."""


@dataclass(frozen=True)
class ParameterSpec:
    """Declaration of a parameter; equal on all ranks that hold a shard of it."""

    shape: tuple[int, ...]
    """Logical global shape, without padding."""
    init: Init
    mesh: Mapping[str, Placement | Nested] = field(default_factory=dict)
    """Axis of ``ProcessGroups`` -> Shard(logical dim) or Replicate(); unnamed axes of the grid replicate."""
    grad: Mapping[str, Placement] = field(default_factory=dict)
    """Axis -> Partial() if the local gradient is a partial sum; it is then all-reduced over the ranks of the axis that
    hold the same elements."""
    ndim: int = 2
    """Number of dims of the nn.Parameter; excess leading logical dims are folded into its first dim."""
    stored: tuple[int, ...] = ()
    """Logical shape with padding; equal to ``shape`` if unpadded. For a part: the lengths of its rectangle."""
    part: SubTensor | None = None
    """Part of the global tensor that this parameter holds; None: all of it."""
    tied_to: str | None = None
    """Global name of the original parameter, if this is a tied copy on another pipeline stage."""
    registered_as: tuple[str, str] | None = None
    """(suffix of the registered name, suffix of the global name) if the two differ."""
    storage: type[Storage] | None = None
    """Kind of storage; None: the optimizer chooses it by dtype and configuration."""
    update_rule: OwnsState | None = None
    """Class of the update rule; None: the rule of the parameter group."""
    row_parts: RowParts | None = None
    """Matrices that the weight stacks in blocks of rows; None: leading logical dims, if any, index matrices."""

    @property
    def matrices(self) -> tuple[int, ...]:
        """Rows of each matrix with a low-rank adapter, in one block of rows; blocks repeat."""
        if self.row_parts is not None:
            return self.row_parts.adapters or self.row_parts.matrices
        return (self.shape[-2],) * math.prod(self.shape[:-2])

    @property
    def owns_matrices(self) -> bool:
        """Whether its update rule needs full matrices, so that optimizer shards must not cut the parameter."""
        return self.update_rule is not None and self.update_rule.owns == "matrices"

    @property
    def numel(self) -> int:
        """Number of elements over all ranks, without padding."""
        return math.prod(self.shape if self.part is None else self.part.rectangle.lengths)

    @property
    def is_expert(self) -> bool:
        """Whether the parameter belongs to the expert grid, i.e. its mesh names an expert axis."""
        return any(axis in EXPERT_AXES for axis in self.mesh)


def parameter(
    shape: tuple[int, ...] | SubTensor,
    *,
    init: Init,
    groups: ProcessGroups | None = None,
    mesh: Mapping[str, Placement | Nested] | None = None,
    partial: tuple[str, ...] = (),
    ndim: int | None = None,
    stored: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float32,
) -> nn.Parameter:
    """Create this rank's shard of a parameter on torch's default device, with its ``ParameterSpec`` as ``.spec``. The
    values are zeros (ones for ``Ones``) until ``initialize_parameters``. Raises ValueError for a mesh with unknown axes
    or axes of both grids, a mesh without ``groups``, or ``partial`` axes of the other grid. Raises UserError if a dim
    is not divisible by the number of its shards.

    Args:
        shape: logical global shape, or a ``SubTensor`` of a tensor.
        groups: this rank's process groups; required with a ``mesh``.
        mesh: placement by axis, e.g. ``{"tp": Shard(0)}`` or ``{"ep": Shard(0), "etp": Shard(2)}``.
        partial: axes over which the local gradient is a partial sum.
        ndim: dims of the result; default: as many as ``shape``.
        stored: logical shape with padding."""
    part, full = (shape, shape.shape) if isinstance(shape, SubTensor) else (None, shape)
    if stored is None:
        stored = full if part is None else part.rectangle.lengths
    placements = dict(mesh or {})
    unknown = placements.keys() - set(DENSE_AXES) - set(EXPERT_AXES)
    if unknown or (placements.keys() & set(DENSE_AXES) and placements.keys() & set(EXPERT_AXES)):
        raise ValueError(f"a mesh names axes of {DENSE_AXES} or {EXPERT_AXES}, not {sorted(placements)}")
    if placements and groups is None:
        raise ValueError("a parameter that is split over ranks is created with their groups")
    grid = EXPERT_AXES if placements.keys() & set(EXPERT_AXES) else DENSE_AXES
    if not set(partial) <= set(grid):  # ranks of other axes may hold different elements; summing them would be wrong
        raise ValueError(f"gradients of a parameter of this grid are partial sums over axes of {grid}, not {partial}")
    grad = dict.fromkeys(partial, Partial())
    spec = ParameterSpec(full, init, placements, grad, len(full) if ndim is None else ndim, stored, part)
    lengths = stored_rectangle(spec, groups or SINGLE_PROCESS).lengths
    folded = len(lengths) - spec.ndim + 1
    local = torch.zeros((math.prod(lengths[:folded]), *lengths[folded:]), dtype=dtype)
    if isinstance(init, Ones):
        local.fill_(1.0)
    result = nn.Parameter(local)
    result.spec = spec  # type: ignore[attr-defined]
    return result


def declare(param: Tensor, **fields: Any) -> None:
    """Replace ``fields`` of the spec, for example ``storage``, before the model is wrapped for data parallelism."""
    param.spec = replace(spec_or_replicated(param), **fields)  # type: ignore[attr-defined]


def declare_row_parts(linear: nn.Module, *parts: tuple[int, ...]) -> None:
    """Set :class:`RowParts` of the weights of a linear layer, of any class; parameters without a spec are skipped."""
    for param in linear.parameters():
        if hasattr(param, "spec") and param.ndim == 2:
            declare(param, row_parts=RowParts(*parts))


def data_parallel_groups(spec: ParameterSpec | None, groups: ProcessGroups) -> DataParallelGroups:
    """Return the data-parallel groups of a parameter; None is a replicated dense parameter."""
    return groups.expert if spec is not None and spec.is_expert else groups.dense


def _terms(placement: Placement | Nested | None, group: Group) -> Iterator[tuple[Placement, int, int]]:
    """Yield (placement, number of ranks, index of this rank); for ``Nested`` outer, then inner. None is Replicate."""
    if isinstance(placement, Nested):
        outer_rank, inner_rank = divmod(group.rank, placement.inner_size)
        yield placement.outer, group.size // placement.inner_size, outer_rank
        yield placement.inner, placement.inner_size, inner_rank
    else:
        yield placement or Replicate(), group.size, group.rank


def stored_rectangle(spec: ParameterSpec, groups: ProcessGroups) -> Rectangle:
    """Return this rank's rectangle of the logical global tensor, including padding; for a part, with the part's offset.
    Raises UserError if a dim is not divisible by the number of its shards."""
    lengths = list(spec.stored)
    offsets = [0] * len(lengths) if spec.part is None else list(spec.part.rectangle.offsets)
    for axis, placement in spec.mesh.items():
        for term, pieces, index in _terms(placement, getattr(groups, axis)):
            if not isinstance(term, Shard):
                continue
            if lengths[dim := term.dim] % pieces:
                raise UserError(
                    f"dim {dim} of size {lengths[dim]} of a parameter with global shape {spec.shape} is not divisible "
                    f"by the {axis} size {pieces}"
                )
            lengths[dim] //= pieces
            offsets[dim] += index * lengths[dim]
    return Rectangle(tuple(offsets), tuple(lengths))


def distinct_shard(spec: ParameterSpec, axis: str, group: Group) -> tuple[int, int]:
    """Return (index of this rank's shard, number of different shards) along an axis; replicas share an index."""
    index, count = 0, 1
    for term, pieces, piece in _terms(spec.mesh.get(axis), group):
        if isinstance(term, Shard):
            index, count = index * pieces + piece, count * pieces
    return index, count


def counts_on_this_rank(spec: ParameterSpec | None, groups: ProcessGroups) -> bool:
    """Whether this rank contributes its shard to a sum over ``DataParallelGroups.model`` that counts each element once.
    Among ranks that hold the same elements only the first contributes; tied copies never do. None is a parameter
    without a spec, i.e. a replicated dense parameter."""
    if spec is None:
        return all(getattr(groups, axis).rank == 0 for axis in DENSE_AXES)
    axes = EXPERT_AXES if spec.is_expert else DENSE_AXES
    terms = (term for axis in axes for term in _terms(spec.mesh.get(axis), getattr(groups, axis)))
    return spec.tied_to is None and all(isinstance(placement, Shard) or rank == 0 for placement, _, rank in terms)


def global_name(name: str, spec: ParameterSpec | None) -> str:
    """Return the global name of parameter ``name``: for a part the name of the full tensor, for a moved parameter its
    original name, for a tied copy the name of the original, else ``name``."""
    if spec is None:
        return name
    if spec.part is not None:
        name = ".".join((*name.split(".")[:-1], spec.part.leaf))
    if spec.registered_as is not None and name.endswith(spec.registered_as[0]):
        name = name.removesuffix(spec.registered_as[0]) + spec.registered_as[1]
    return spec.tied_to or name


def local_rectangle(spec: ParameterSpec, groups: ProcessGroups) -> Rectangle:
    """Return this rank's rectangle of the global tensor without padding; it may be empty."""
    return stored_rectangle(spec, groups).within(spec.shape)


def local_view(param: Tensor, spec: ParameterSpec, groups: ProcessGroups) -> Tensor:
    """Return the unpadded elements of a contiguous local tensor, a detached view in the logical shape."""
    stored = stored_rectangle(spec, groups)
    return Rectangle.whole(stored.within(spec.shape).lengths).of(param.detach().view(stored.lengths))


def spec_or_replicated(param: Tensor) -> ParameterSpec:
    """Return the parameter's spec; for parameters of custom modules without one, a new replicated dense spec, which is
    not attached and whose ``init`` has no meaning."""
    spec = getattr(param, "spec", None)
    shape = tuple(param.shape)
    return ParameterSpec(shape, Zeros(), ndim=len(shape), stored=shape) if spec is None else spec


# ---- declarations by Megatron-LM's parameter attributes, for custom modules


def adopt_declarations(model: nn.Module, groups: ProcessGroups) -> None:
    """Attach a spec to parameters without one, from Megatron-LM's attributes. ``sequence_parallel``: True: the local
    gradient is a partial sum over this rank's positions, False: each rank computes all of it. ``tensor_model_parallel``
    with ``partition_dim``: that dim is sharded evenly. Others stay without a spec. UserError for an invalid
    ``partition_dim``, a ``partition_stride`` other than 1, or ``allreduce = False`` (mark of expert parameters)."""
    for name, param in stored_parameters(model):
        if not hasattr(param, "spec"):
            spec = _declared_by_attributes(name, param, groups)
            if spec is not None:
                param.spec = spec  # type: ignore[attr-defined]


def _declared_by_attributes(name: str, param: nn.Parameter, groups: ProcessGroups) -> ParameterSpec | None:
    """Return the spec that Megatron-LM's attributes declare (see :func:`adopt_declarations`), or None. Raises UserError
    for attributes that are not supported."""
    declared = vars(param)
    if declared.get("allreduce") is False:  # Megatron-LM's mark of experts; it does not define the global tensor
        raise UserError(
            f"parameter {name}: allreduce is False, as of an expert, whose ranks it does not name; create it with "
            'megatron.core.sharding.placement.parameter(..., mesh={"ep": Shard(0)})'
        )
    partial = {"tp": Partial()} if declared.get("sequence_parallel") else {}
    if not declared.get("tensor_model_parallel"):
        if "sequence_parallel" not in declared:
            return None
        return ParameterSpec(tuple(param.shape), AsBuilt(), {}, partial, param.ndim, tuple(param.shape))
    dim, stride = declared.get("partition_dim", -1), declared.get("partition_stride", 1)
    if not 0 <= dim < param.ndim or stride != 1:
        raise UserError(
            f"parameter {name}: tensor_model_parallel with partition_dim {dim} and partition_stride {stride} does not "
            f"say which part of a tensor each rank holds; give a dim from 0 to {param.ndim - 1} and the stride 1, or "
            'create it with megatron.core.sharding.placement.parameter(..., mesh={"tp": Shard(dim)})'
        )
    shape = tuple(size * groups.tp.size if number == dim else size for number, size in enumerate(param.shape))
    return ParameterSpec(shape, AsBuilt(), {"tp": Shard(dim)}, partial, param.ndim, shape)


def require_declarations(model: nn.Module) -> None:
    """Check that every parameter has a spec, for sequence parallelism: without one it is unknown whether the gradient
    must be all-reduced over positions. UserError lists up to eight parameters with their modules."""
    undeclared = [
        f"{prefix + '.' if prefix else ''}{name} ({type(module).__name__})"
        for prefix, module in model.named_modules()
        for name, param in module.named_parameters(recurse=False)
        if not hasattr(param, "spec")
    ]
    if undeclared:
        raise UserError(
            f"--sequence-parallel: nothing says how tensor-parallel ranks share {listed(undeclared, most=8)}. Create "
            "such a parameter with megatron.core.sharding.placement.parameter(shape, init=..., partial=('tp',)) where "
            "it works on this rank's positions alone (a norm), without partial where every rank computes its whole "
            "gradient; or set its attribute sequence_parallel to True or False, as Megatron-LM's modules do"
        )


@torch.no_grad()
def initialize_parameters(model: nn.Module, seed: int, groups: ProcessGroups) -> None:
    """Fill every parameter in place with its shard of the global initial tensor. Each element is a function of (seed,
    global name, global element index), so that the values do not depend on the parallel layout. Parameters without a
    spec (custom modules) keep the values from their constructors. No collective. Call it before FSDP shards the
    parameters: it writes full local shards."""
    for name, param in stored_parameters(model):
        spec: ParameterSpec | None = getattr(param, "spec", None)
        if spec is not None:
            fill_parameter(param, spec, global_name(name, spec), seed, groups)


def fill_parameter(param: Tensor, spec: ParameterSpec, name: str, seed: int, groups: ProcessGroups) -> None:
    """Write this rank's part of the initial values into the local shard in place, as a function of ``seed``, the global
    ``name`` and the global element index. Keeps the values for ``AsBuilt``, and does not write the padding. Random
    values are drawn in fp32 (fp64 for fp64) and rounded once; drawing waits for the device."""
    rectangle = local_rectangle(spec, groups)
    if not rectangle.numel or isinstance(spec.init, AsBuilt):
        return
    target = local_view(param, spec, groups)
    if isinstance(spec.init, Zeros | Ones):
        target.fill_(float(isinstance(spec.init, Ones)))
        return
    starts, length = _contiguous_runs(spec.shape, rectangle)
    values = torch.empty(
        (len(starts), length), dtype=torch.promote_types(param.dtype, torch.float32), device=param.device
    )
    distribution = "normal" if isinstance(spec.init, Normal) else "uniform"
    philox.fill_runs_(values, philox.key(seed, "init", name), starts.to(param.device), distribution)
    if isinstance(spec.init, Normal):
        values.mul_(spec.init.std)
    elif isinstance(spec.init, Drawn):
        values = spec.init.function(values.mul_(spec.init.high - spec.init.low).add_(spec.init.low))
    else:
        bound = _bound(spec, spec.init)
        values.mul_(2 * bound).sub_(bound)
    target.copy_(values.view(rectangle.lengths))


def _bound(spec: ParameterSpec, init: XavierUniform | Uniform) -> float:
    if isinstance(init, Uniform):
        return init.bound
    return math.sqrt(6.0 / (math.prod(spec.shape[init.stacked : -1]) + spec.shape[-1]))


def _contiguous_runs(shape: tuple[int, ...], rectangle: Rectangle) -> tuple[Tensor, int]:
    """Split ``rectangle`` of a tensor into runs that are contiguous in the global tensor, in memory order; return
    (int64 [n] global start indices on the CPU, length of each run)."""
    inner = len(shape) - 1
    while inner > 0 and rectangle.lengths[inner] == shape[inner]:
        inner -= 1
    length = math.prod(rectangle.lengths[inner:])
    starts = torch.zeros(1, dtype=torch.int64)
    for dim in range(inner):
        along = torch.arange(rectangle.offsets[dim], rectangle.offsets[dim] + rectangle.lengths[dim])
        starts = (starts[:, None] + along * math.prod(shape[dim + 1 :])).flatten()
    return starts + rectangle.offsets[inner] * math.prod(shape[inner + 1 :]), length
