"""One declaration per parameter: global shape, placement on each mesh axis, and initial values.

``parameter(...)`` creates this rank's shard and attaches a ``ParameterSpec``. Everything else is derived from it:
initial values here, and elsewhere gradient synchronisation, gradient norm, checkpoint chunks and parameter counts.

``mesh`` names axes of one of the two rank grids (``core/groups/process_groups.py``): a dense parameter may be split
over ``tp``, an expert parameter over ``ep`` and ``etp``. The other ranks of that grid hold copies of it: they sum its
gradient and may share out its optimizer state (``data_parallel_groups``).

A stacked weight declares the *logical* shape in which every shard is a rectangle, e.g. gate and up as ``(2, ffn,
hidden)`` with ``mesh={"tp": Shard(1)}``; the ``nn.Parameter`` itself folds the leading logical dims into one, as layers
and checkpoints expect. A padded dim declares its stored size: the global shape is the true one, and the padding, which
no layer may let take part in its result, holds zeros and belongs to no checkpoint.

Where a rank's share of a global tensor is no rectangle, it is several parameters, each a ``Part`` of that tensor. Keys
and values with fewer heads than tensor-parallel ranks are such a part: several ranks hold the same head (``Nested``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from megatron.core.config.errors import UserError, listed
from megatron.core.groups.process_groups import SINGLE_PROCESS, DataParallelGroups, Group, ProcessGroups
from megatron.core.random import philox
from megatron.core.sharding.rectangles import Rectangle

__all__ = [
    "AsBuilt", "Init", "Nested", "Normal", "Ones", "ParameterSpec", "Part", "Partial", "Replicate", "Shard",
    "XavierUniform", "Zeros", "adopt_declarations", "data_parallel_groups", "global_name", "initialize_parameters",
    "is_counted_here", "local_rectangle", "parameter", "require_declarations", "spec_or_replicated",
]  # fmt: skip

DENSE_AXES = ("tp",)
EXPERT_AXES = ("ep", "etp")
"""Axes that may stand in a mesh: those that split parameters, of either grid. A parameter is on one of the grids."""


@dataclass(frozen=True)
class Zeros:
    """All zeros."""


@dataclass(frozen=True)
class Ones:
    """All ones."""


@dataclass(frozen=True)
class Normal:
    """Normal with mean zero."""

    std: float


@dataclass(frozen=True)
class XavierUniform:
    """Uniform on +-sqrt(6 / (fan_in + fan_out)) of the whole global matrix (leading logical dims folded)."""

    stacked: int = 0
    """First logical dims that count matrices instead, as experts do."""


@dataclass(frozen=True)
class AsBuilt:
    """The values that the module's own constructor set: not a function of the seed and the name."""


Init = Zeros | Ones | Normal | XavierUniform | AsBuilt


@dataclass(frozen=True)
class Nested:
    """An axis seen as a grid, rank = outer rank * inner_size + inner rank, with a placement for each of the two."""

    outer: Placement
    inner: Placement
    inner_size: int


class Part(NamedTuple):
    """What one of several sibling parameters holds, on all ranks together, of a tensor."""

    shape: tuple[int, ...]
    """Logical shape of the whole tensor."""
    leaf: str
    """Last component of its global name: that of the sibling which gives the tensor its name."""
    rectangle: Rectangle


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter as declared, independent of the rank that holds a part of it."""

    shape: tuple[int, ...]
    """Logical global shape, without padding."""
    init: Init
    mesh: Mapping[str, Placement | Nested] = field(default_factory=dict)
    """Axis of ``ProcessGroups`` -> Shard(logical dim) or Replicate(); axes of the grid that are not named replicate."""
    grad: Mapping[str, Placement] = field(default_factory=dict)
    """Axis -> Partial() where each rank's gradient is a partial sum: the ranks of the axis that hold the same elements
    add theirs up."""
    ndim: int = 2
    """Dims of the nn.Parameter: leading logical dims are folded into its first."""
    stored: tuple[int, ...] = ()
    """Logical shape with padding; equal to ``shape`` without any. Of a part: its lengths."""
    part: Part | None = None
    """Which part of the global tensor it is, where siblings hold the rest."""
    tied_to: str | None = None
    """Global name of the parameter of which this one is a copy on another pipeline stage."""

    @property
    def numel(self) -> int:
        """True elements, over all ranks."""
        return math.prod(self.shape if self.part is None else self.part.rectangle.lengths)

    @property
    def is_expert(self) -> bool:
        """Whether it lies on the expert grid, which is so as soon as its mesh names an axis of that."""
        return any(axis in EXPERT_AXES for axis in self.mesh)


def parameter(
    shape: tuple[int, ...] | Part,
    *,
    init: Init,
    groups: ProcessGroups | None = None,
    mesh: Mapping[str, Placement | Nested] | None = None,
    partial: tuple[str, ...] = (),
    ndim: int | None = None,
    stored: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float32,
) -> nn.Parameter:
    """This rank's shard of a parameter, zero until ``initialize_parameters`` (constants are set at once).

    ``shape`` is the logical global shape (or a ``Part`` of one), ``mesh`` its placement over rank axes (``{"tp":
    Shard(0)}``, ``{"ep": Shard(0), "etp": Shard(2)}``), ``partial`` the axes over which gradients are partial sums,
    ``ndim`` the dims of the result, ``stored`` the shape with padding. It stands on torch's default device, which
    ``with torch.device(...)`` sets.
    """
    part, whole = (shape, shape.shape) if isinstance(shape, Part) else (None, shape)
    if stored is None:
        stored = whole if part is None else part.rectangle.lengths
    placed = dict(mesh or {})
    unknown = placed.keys() - set(DENSE_AXES) - set(EXPERT_AXES)
    if unknown or (placed.keys() & set(DENSE_AXES) and placed.keys() & set(EXPERT_AXES)):
        raise ValueError(f"a mesh names axes of {DENSE_AXES} or of {EXPERT_AXES}, not {sorted(placed)}")
    if placed and groups is None:
        raise ValueError("a parameter that is split over ranks is created with their groups")
    grid = EXPERT_AXES if placed.keys() & set(EXPERT_AXES) else DENSE_AXES
    if not set(partial) <= set(grid):  # other ranks may hold other elements, which must not be added to these
        raise ValueError(f"gradients of a parameter of this grid are partial sums over axes of {grid}, not {partial}")
    grad = dict.fromkeys(partial, Partial())
    spec = ParameterSpec(whole, init, placed, grad, len(whole) if ndim is None else ndim, stored, part)
    lengths = stored_rectangle(spec, groups or SINGLE_PROCESS).lengths
    folded = len(lengths) - spec.ndim + 1
    local = torch.zeros((math.prod(lengths[:folded]), *lengths[folded:]), dtype=dtype)
    if isinstance(init, Ones):
        local.fill_(1.0)
    result = nn.Parameter(local)
    result.spec = spec  # type: ignore[attr-defined]
    return result


def data_parallel_groups(spec: ParameterSpec | None, groups: ProcessGroups) -> DataParallelGroups:
    """The ranks that hold the same parameter, share out its state and together hold one copy of it; None stands for a
    parameter without a spec, a replicated dense one."""
    return groups.expert if spec is not None and spec.is_expert else groups.dense


def _terms(placement: Placement | Nested | None, group: Group) -> Iterator[tuple[Placement, int, int]]:
    """(placement, ranks, this rank's place) over an axis, or over each dim of the grid that it is seen as."""
    if isinstance(placement, Nested):
        outer_rank, inner_rank = divmod(group.rank, placement.inner_size)
        yield placement.outer, group.size // placement.inner_size, outer_rank
        yield placement.inner, placement.inner_size, inner_rank
    else:
        yield placement or Replicate(), group.size, group.rank


def stored_rectangle(spec: ParameterSpec, groups: ProcessGroups) -> Rectangle:
    """This rank's shard, padding included, of the logical stored tensor."""
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
    """(which shard this rank holds, how many different ones there are) over the ranks of an axis."""
    index, count = 0, 1
    for term, pieces, piece in _terms(spec.mesh.get(axis), group):
        if isinstance(term, Shard):
            index, count = index * pieces + piece, count * pieces
    return index, count


def is_counted_here(spec: ParameterSpec | None, groups: ProcessGroups) -> bool:
    """Whether this rank contributes its shard to a sum over ``DataParallelGroups.model`` that is to see every element
    once.

    Of ranks that hold the same elements the first one does. None stands for a parameter without a spec, a replicated
    one; copies of tied parameters never count.
    """
    if spec is None:
        return all(getattr(groups, axis).rank == 0 for axis in DENSE_AXES)
    axes = EXPERT_AXES if spec.is_expert else DENSE_AXES
    terms = (term for axis in axes for term in _terms(spec.mesh.get(axis), getattr(groups, axis)))
    return spec.tied_to is None and all(isinstance(placement, Shard) or rank == 0 for placement, _, rank in terms)


def global_name(name: str, spec: ParameterSpec | None) -> str:
    """The global tensor that the parameter called ``name`` is, or is a part or a tied copy of."""
    if spec is None:
        return name
    if spec.part is not None:
        name = ".".join((*name.split(".")[:-1], spec.part.leaf))
    return spec.tied_to or name


def local_rectangle(spec: ParameterSpec, groups: ProcessGroups) -> Rectangle:
    """What this rank holds of the true global tensor (the leading part of its shard along padded dims)."""
    return stored_rectangle(spec, groups).within(spec.shape)


def local_view(param: Tensor, spec: ParameterSpec, groups: ProcessGroups) -> Tensor:
    """The part of a local tensor (parameter, gradient or moment) that ``local_rectangle`` describes, in its logical
    shape."""
    stored = stored_rectangle(spec, groups)
    return Rectangle.whole(stored.within(spec.shape).lengths).of(param.detach().view(stored.lengths))


def spec_or_replicated(param: Tensor) -> ParameterSpec:
    """The spec attached by ``parameter()``; a user's own parameter without one is whole on every rank."""
    spec = getattr(param, "spec", None)
    shape = tuple(param.shape)
    return ParameterSpec(shape, Zeros(), ndim=len(shape), stored=shape) if spec is None else spec


# ---- declarations in Megatron-LM's words, of modules of users' own


def adopt_declarations(model: nn.Module, groups: ProcessGroups) -> None:
    """Give parameters without a spec the one that Megatron-LM's attributes describe.

    ``sequence_parallel = True``: the gradient is a partial sum over this tensor-parallel rank's positions;
    ``sequence_parallel = False``: every rank computes the whole gradient; ``tensor_model_parallel = True`` with
    ``partition_dim``: each rank holds an equal stretch of that dim. Nothing else is guessed.

    Raises:
        UserError: for a ``partition_dim`` that the parameter does not have, a ``partition_stride`` other than 1, or an
            expert's ``allreduce = False``.
    """
    for name, param in model.named_parameters():
        if not hasattr(param, "spec"):
            spec = _declared_by_attributes(name, param, groups)
            if spec is not None:
                param.spec = spec  # type: ignore[attr-defined]


def _declared_by_attributes(name: str, param: nn.Parameter, groups: ProcessGroups) -> ParameterSpec | None:
    declared = vars(param)
    if declared.get("allreduce") is False:  # Megatron-LM's mark of experts, which says nothing about the global tensor
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
    shape = tuple(size * groups.tp.size if each == dim else size for each, size in enumerate(param.shape))
    return ParameterSpec(shape, AsBuilt(), {"tp": Shard(dim)}, partial, param.ndim, shape)


def require_declarations(model: nn.Module) -> None:
    """UserError with every parameter of ``model`` that says nothing about its gradient: under sequence parallelism each
    tensor-parallel rank sees its own positions, and whether the ranks' gradients must be added up cannot be guessed."""
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
    """Set every parameter to its slice of the global initial tensor, a function of (seed, global name, element index).

    Parameters without a spec (modules of users' own) keep the values that their constructors gave them.
    """
    for name, param in model.named_parameters():
        spec: ParameterSpec | None = getattr(param, "spec", None)
        if spec is not None:
            fill_parameter(param, spec, global_name(name, spec), seed, groups)


def fill_parameter(param: Tensor, spec: ParameterSpec, name: str, seed: int, groups: ProcessGroups) -> None:
    """Write initial values into the local shard; padding stays zero."""
    held = local_rectangle(spec, groups)
    if not held.numel or isinstance(spec.init, AsBuilt):
        return
    target = local_view(param, spec, groups)
    if isinstance(spec.init, Zeros | Ones):
        target.fill_(float(isinstance(spec.init, Ones)))
        return
    starts, length = _contiguous_runs(spec.shape, held)
    values = torch.empty((len(starts), length), dtype=_draw_dtype(param), device=param.device)
    distribution = "normal" if isinstance(spec.init, Normal) else "uniform"
    philox.fill_runs_(values, philox.key(seed, "init", name), starts.to(param.device), distribution)
    if isinstance(spec.init, Normal):
        values.mul_(spec.init.std)
    else:
        bound = math.sqrt(6.0 / (math.prod(spec.shape[spec.init.stacked : -1]) + spec.shape[-1]))
        values.mul_(2 * bound).sub_(bound)
    target.copy_(values.view(held.lengths))


def _draw_dtype(param: Tensor) -> torch.dtype:
    """float64 stays; 16-bit types are rounded once, from float32."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def _contiguous_runs(shape: tuple[int, ...], held: Rectangle) -> tuple[Tensor, int]:
    """Start indices (int64) and common length of the stretches of a rectangle that are contiguous in the global
    tensor."""
    inner = len(shape) - 1
    while inner > 0 and held.lengths[inner] == shape[inner]:
        inner -= 1
    length = math.prod(held.lengths[inner:])
    starts = torch.zeros(1, dtype=torch.int64)
    for dim in range(inner):
        along = torch.arange(held.offsets[dim], held.offsets[dim] + held.lengths[dim])
        starts = (starts[:, None] + along * math.prod(shape[dim + 1 :])).flatten()
    return starts + held.offsets[inner] * math.prod(shape[inner + 1 :]), length
