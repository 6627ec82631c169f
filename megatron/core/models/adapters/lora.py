"""Low-rank adapters of linear layers (LoRA, Hu et al. 2021; rsLoRA, Kalajdzievski 2023; DoRA, Liu et al. 2024).

  Y = X W^T + c (X A^T) B^T                               c = alpha / r, or alpha / sqrt(r)
  Y = (m / |W + c B A|) (X W^T + c (X A^T) B^T)           DoRA: norms of rows, constants in backward

W [o, i] is frozen, A [r, i] and B [o, r] are trained. A weight that stacks n matrices (query, key and value; gate and
up) has one adapter per matrix: A is [n r, i], and a row of B [o, r] belongs to the adapter of its matrix. One GEMM
computes all of them with B as a block matrix [o, n r].

B is split like the rows of W, A like its columns. A column-parallel layer communicates X A^T, of width n r, in place of
X. A row-parallel layer adds its partial sums of the adapter before the layer's reduction."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron.core.groups.process_groups import SINGLE_PROCESS, Group, ProcessGroups
from megatron.core.models.adapters.dropout import CurrentTokens, InputDropout
from megatron.core.models.adapters.experts import ExpertAdapter
from megatron.core.sharding import placement
from megatron.core.sharding.placement import ParameterSpec, Shard, SubTensor, declare, global_name, parameter
from megatron.core.sharding.rectangles import Rectangle
from megatron.core.tensor_parallel import operators
from megatron.core.tensor_parallel.gemms import GemmLayer, Gemms, Product
from megatron.core.tensor_parallel.grouped_linear import GroupedLinear
from megatron.core.tensor_parallel.linear import LinearTraits, parallel_linear
from megatron.core.tensor_parallel.low_rank import AddProjectedUp, LowRankLinear

NAMES = {"weight": ("adapter", "product"), "shared_weight": ("shared_adapter", "shared_product")}
"""Weight of a layer -> (submodule of its adapter, product that the adapter wraps)."""


class LoraSettings(NamedTuple):
    """Settings of all adapters of a model."""

    rank: int
    scale: float
    """Factor of X A^T B^T."""
    trains_norms: bool
    seed: int
    dropout: float = 0.0
    """Rate of the dropout of the adapters' inputs."""


class LowRankAdapter(nn.Module):
    """Adapters of the matrices in one ``weight`` of ``linear``, with parameters ``lora_a``, ``lora_b`` and, for DoRA,
    ``lora_magnitude``, declared from the weight's own declaration."""

    blocks: Tensor
    """[o, n]: 1 at the matrix of each row."""
    is_active = True
    """False: only the product with the weight."""

    def __init__(self, linear: GemmLayer, weight: nn.Parameter, settings: LoraSettings, groups: ProcessGroups) -> None:
        super().__init__()
        self.scale, spec = settings.scale, weight.spec  # type: ignore[attr-defined]
        lead, width = spec.shape[:-1], spec.shape[-1]
        splits_input = spec.mesh.get("tp") == Shard(len(lead))
        self.row_group = groups.tp if splits_input else SINGLE_PROCESS.tp
        # without a reduction of dX over the group, which A shares, dA is a sum over this rank's rows or positions
        is_partial = linear.traits.gather_input or spec.part is not None or "tp" in spec.grad
        numbers = matrix_numbers(spec.matrices, math.prod(lead)).view(lead)
        in_part = numbers if spec.part is None else _rows(spec.part.rectangle).of(numbers)
        first, count = int(in_part.min()), int(in_part.max() - in_part.min()) + 1
        shape, part = (int(numbers.max()) + 1, settings.rank, width), (count, settings.rank, width)
        a_shape = shape if spec.part is None else SubTensor(shape, "lora_a", Rectangle((first, 0, 0), part))
        common: dict[str, Any] = {"groups": groups, "dtype": weight.dtype}
        with torch.device(weight.device):
            self.lora_a = parameter(
                a_shape, init=placement.Uniform(width**-0.5), mesh={"tp": Shard(2)} if splits_input else {},
                partial=("tp",) if is_partial and not splits_input else (), ndim=2, **common,
            )  # fmt: skip
            common |= {"mesh": {} if splits_input else spec.mesh, "partial": ("tp",) if splits_input else (*spec.grad,)}
            self.lora_b = parameter(_row_shape(spec, "lora_b", settings.rank), init=placement.Zeros(), ndim=2, **common)
            self.lora_magnitude: nn.Parameter | None = None
            if settings.trains_norms:
                rows = _row_shape(spec, "lora_magnitude")
                self.lora_magnitude = parameter(rows, init=placement.AsBuilt(), ndim=1, **common)
        local = _rows(placement.stored_rectangle(spec, groups)).of(numbers).flatten().to(weight.device) - first
        self.dropout: InputDropout | None = None
        self.first_feature = placement.stored_rectangle(self.lora_a.spec, groups).offsets[-1]  # type: ignore[attr-defined]
        self.register_buffer("blocks", F.one_hot(local, count).to(weight.dtype), persistent=False)

    def forward(
        self, product: Product, x: Tensor, weight: Tensor, bias: Tensor | None, traits: LinearTraits, store: object
    ) -> Tensor:
        """Return the ``product`` plus the adapters' output [..., o]. Communicates X A^T as ``traits`` say of X: by an
        all-gather along the sequence, or an all-reduce of its gradient."""
        if not self.is_active:
            return product(x, weight, bias, traits, store)
        b = block_matrix(self.lora_b, self.blocks)
        if self.computes_at_once(product, traits):
            return LowRankLinear.apply(x, weight, bias, self.lora_a, b, self.scale)
        low = F.linear(x if self.dropout is None else self.dropout.dropped(x), self.lora_a)
        low = low * self.scale  # here, because the output is wider
        if traits.gather_input:
            low = operators.gather_from_sequence(low, traits.group)
        elif traits.reduce_input_gradient:
            low = operators.copy_to_region(low, traits.group)
        if self.lora_magnitude is None:
            return AddProjectedUp.apply(product(x, weight, bias, traits, store), low, b)
        ratio = self.lora_magnitude / self.row_norms(weight).to(low.dtype)
        output = AddProjectedUp.apply(product(x, weight, None, traits, store), low, b) * ratio
        return output if bias is None else output + bias

    def computes_at_once(self, product: Product, traits: LinearTraits) -> bool:
        """Return whether nothing but torch's GEMMs is between the input and the sum with the adapter."""
        communicates = traits.group.size > 1 and (traits.gather_input or traits.reduce_input_gradient)
        is_plain = product is parallel_linear and type(traits.gemms) is Gemms and not communicates
        return is_plain and self.dropout is None and self.lora_magnitude is None

    @property
    def factors(self) -> Factors:
        return Factors(self.lora_a, self.lora_b, self.blocks, self.scale)

    @torch.no_grad()
    def row_norms(self, weight: Tensor) -> Tensor:
        """Return the norms of the full rows of ``W + c B A`` [o] in at least fp32. Collective if ranks split rows."""
        return _norms(self.factors.added_to(weight), self.row_group)

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """Return the weight with the adapters [o, i]. Collective for DoRA if ranks split rows."""
        return merged_weight(weight, self.factors, self.lora_magnitude, self.row_group)


def block_matrix(b: Tensor, blocks: Tensor) -> Tensor:
    """Return B [o, r] as a block matrix [o, n r]; ``blocks`` [o, n] is 1 at the matrix of each row, else 0."""
    return b if blocks.shape[1] == 1 else (blocks.unsqueeze(-1) * b.unsqueeze(1)).flatten(1)


class Factors(NamedTuple):
    """Factors of a low-rank matrix ``c B A`` [o, i]."""

    a: Tensor
    """[n r, i]."""
    b: Tensor
    """[o, r]."""
    blocks: Tensor
    """[o, n]: 1 at the matrix of each row, else 0."""
    scale: float

    def added_to(self, weight: Tensor) -> Tensor:
        """Return ``W + c B A`` in a new tensor of at least fp32."""
        dtype = torch.promote_types(weight.dtype, torch.float32)
        base, b, a = (tensor.to(dtype) for tensor in (weight, block_matrix(self.b, self.blocks), self.a))
        return torch.addmm(base, b, a, alpha=self.scale)


def merged_weight(weight: Tensor, factors: Factors, magnitude: Tensor | None, group: Group) -> Tensor:
    """Return the weight [o, i] with its adapters, computed in at least fp32 and rounded once. ``magnitude`` [o]: DoRA;
    the ranks of ``group`` split the rows."""
    total = factors.added_to(weight)
    if magnitude is not None:
        total *= (magnitude.to(total.dtype) / _norms(total, group)).unsqueeze(-1)
    return total.to(weight.dtype)


def _norms(rows: Tensor, group: Group) -> Tensor:
    squares = rows.square().sum(-1)
    if group.size > 1:
        dist.all_reduce(squares, group=group.handle)
    return squares.sqrt_()


def matrix_numbers(matrices: Sequence[int], rows: int) -> Tensor:
    """Return the index of the matrix of each of ``rows`` rows, int64 [rows]; ``matrices``: rows of each in a block."""
    ends = torch.tensor(matrices).cumsum(0)
    return torch.bucketize(torch.arange(rows) % ends[-1], ends, right=True)


def _row_shape(spec: ParameterSpec, leaf: str, *columns: int) -> tuple[int, ...] | SubTensor:
    """Return the shape of a tensor with the rows of a weight and other ``columns``: a part if the weight is one."""
    shape = (*spec.shape[:-1], *columns)
    if spec.part is None:
        return shape
    offsets, lengths = _rows(spec.part.rectangle)
    return SubTensor(shape, leaf, Rectangle((*offsets, *(0 for _ in columns)), (*lengths, *columns)))


def _rows(rectangle: Rectangle) -> Rectangle:
    return Rectangle(rectangle.offsets[:-1], rectangle.lengths[:-1])


def add_adapters(
    model: nn.Module, matches: Callable[[str], bool], settings: LoraSettings, groups: ProcessGroups
) -> None:
    """Freeze ``model`` and add adapters to every linear layer whose name ``matches``. Initial values are functions of
    the seed and global names: A uniform on +-1 / sqrt(i), as in PEFT, and B zeros."""
    model.requires_grad_(False)
    tokens = CurrentTokens(model) if settings.dropout else None
    for name, linear in list(model.named_modules()):
        if not (isinstance(linear, GemmLayer) and hasattr(linear, "product") and matches(name)):
            continue
        for leaf, (submodule, product) in NAMES.items():
            if (weight := getattr(linear, leaf, None)) is None:
                continue
            adapter = (
                ExpertAdapter(linear, settings.rank, settings.scale, groups)
                if isinstance(linear, GroupedLinear)
                else LowRankAdapter(linear, weight, settings, groups)
            )
            if tokens is not None and isinstance(adapter, LowRankAdapter):
                place = name, adapter.first_feature, tokens, groups.tp
                adapter.dropout = InputDropout(settings.dropout, *place)
            linear.wrap(submodule, adapter, product)
            for key, value in adapter.named_parameters():
                if submodule != NAMES["weight"][0]:
                    declare(value, registered_as=(f"{submodule}.{key}", f"{NAMES['weight'][0]}.{key}"))
                full_name = global_name(f"{name}.{submodule}.{key}", value.spec)  # type: ignore[attr-defined]
                placement.fill_parameter(value, value.spec, full_name, settings.seed, groups)  # type: ignore[attr-defined]


def adapted_layers(model: nn.Module) -> Iterator[tuple[GemmLayer, str, LowRankAdapter | ExpertAdapter]]:
    """Yield (layer, name of its weight, adapter of that weight)."""
    for linear in list(model.modules()):
        for leaf, (submodule, _) in NAMES.items():
            adapter = getattr(linear, submodule, None)
            if isinstance(linear, GemmLayer) and isinstance(adapter, LowRankAdapter | ExpertAdapter):
                yield linear, leaf, adapter


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Context in which the layers of ``model`` compute with their weights only."""
    adapters = [adapter for _, _, adapter in adapted_layers(model)]
    for adapter in adapters:
        adapter.is_active = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.is_active = True


@torch.no_grad()
def set_magnitudes(model: nn.Module) -> None:
    """Set the trained norms of DoRA to the norms of the base weights, because B is zero. Collective over ``tp``."""
    for linear, leaf, adapter in adapted_layers(model):
        if isinstance(adapter, LowRankAdapter) and adapter.lora_magnitude is not None:
            # FSDP cuts both tensors at the same rows
            tensors = getattr(linear, leaf), adapter.lora_magnitude
            weight, norms = (x.to_local() if isinstance(x, DTensor) else x for x in tensors)
            if adapter.row_group.size > 1:  # full rows: sums of partial sums round differently
                weight = operators.all_gather_along_last_dim(weight, adapter.row_group)
            norms.copy_(_norms(weight.to(torch.promote_types(weight.dtype, torch.float32)), SINGLE_PROCESS.tp))


@torch.no_grad()
def merge_adapters(model: nn.Module) -> None:
    """Add the adapters to the weights and remove them: generation then computes with plain layers. Collective."""
    for linear, leaf, adapter in adapted_layers(model):
        weight, (submodule, product) = getattr(linear, leaf), NAMES[leaf]
        weight.copy_(adapter.merged(weight))
        delattr(linear, submodule)
        delattr(linear, product)
        linear.is_wrapped = False
