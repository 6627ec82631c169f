"""Model description as data: the parameters of its pieces, their operations and saved activations. Torch-free.

A pure function ``describe(config, place) -> Piece`` describes a mixer (``describe_attention``, ``describe_mlp`` …). The
mixer's class has it as an attribute, so that a layer spec determines its description; ``parts`` describes norm, dropout
and residual sum. Parameter counts, FLOPs, memory, stage balance, roofline, dry run and self-checks are computed from
descriptions without knowledge of layer types. A test checks that descriptions equal the built models.

Quantities are per tensor-parallel rank and per token of its sequences, unless a field states otherwise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megatron.core.pipeline_parallel.balance import ATTENTION_RATE, ModelCosts

Config = Any
"""A TransformerConfig, or any configuration with its field names and sizes resolved."""

Kind = Literal["gemm", "attention", "norm", "rotary", "activation", "cross entropy", "embedding", "recurrence", "other"]


@dataclass(frozen=True)
class LayerPlace:
    """Position of a layer in the model and sizes of its input."""

    layer_number: int
    """Counts from 1 over the full model."""
    seq_length: int
    rotary: bool = False
    """Whether rotary positions apply to queries and keys."""
    causal: bool = True
    """Whether attention is causal."""
    source_length: int = 0
    """Number of encoder tokens that cross-attention uses as keys."""


@dataclass(frozen=True)
class Param:
    """Global description of one parameter, independent of the rank."""

    name: str
    """Global name; relative to its piece until :meth:`Piece.under` adds a prefix."""
    shape: tuple[int, ...]
    """Logical global shape, without padding."""
    mesh: Mapping[str, int] = field(default_factory=dict)
    """Rank axis -> logical dim that it splits; other axes replicate."""
    stored: tuple[int, ...] | None = None
    """Logical shape with padding; None without padding."""
    shared: int = 0
    """For ``(blocks, rows, …)`` split along blocks: with fewer blocks than ranks, the ranks of a block split its rows,
    except the last ``shared`` rows, which are replicated."""
    tied_to: str | None = None
    """Global name of the parameter that it copies."""
    ndim: int = 2
    """Number of stored dims: leading logical dims are flattened into the first."""
    active: float = 1.0
    """Fraction of elements active per token (experts: top-k / num_experts)."""
    frozen: bool = False
    """Whether it is not trained: no gradient, no optimizer state."""
    row_parts: tuple[int, ...] = ()
    """Rows of each matrix with an adapter in a block of rows (queries, key and value of a group); (): leading logical
    dims index matrices, if there are any."""

    @property
    def matrices(self) -> tuple[int, ...]:
        """Rows of each matrix with an adapter, in one block of rows; blocks repeat (``ParameterSpec``)."""
        return self.row_parts or (self.shape[-2],) * math.prod(self.shape[:-2])

    @property
    def is_expert(self) -> bool:
        """Whether the parameter is sharded on the expert mesh, whose ranks reduce its gradient."""
        return "ep" in self.mesh or "etp" in self.mesh

    @property
    def numel(self) -> int:
        """Unpadded elements over all ranks; 0 for a tied copy."""
        return 0 if self.tied_to else math.prod(self.shape)

    @property
    def padding(self) -> int:
        """Number of padding elements; 0 for a tied copy."""
        return 0 if self.tied_to or self.stored is None else math.prod(self.stored) - math.prod(self.shape)

    def local_shapes(self, sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
        """Return the shapes that one rank stores, padding included; ``sizes`` maps axes to numbers of ranks (missing:
        1). There are two shapes, split and shared rows, if there are fewer blocks than ranks (``shared``). Leading dims
        are flattened to ``ndim`` dims. Does not check that sizes divide."""
        shape = list(self.stored or self.shape)
        for axis, dim in self.mesh.items():
            ranks = sizes.get(axis, 1)
            if self.shared and shape[dim] < ranks:
                own, rest = shape[dim + 1] - self.shared, shape[dim + 2 :]
                return [self._folded([own * shape[dim] // ranks, *rest]), self._folded([self.shared, *rest])]
            shape[dim] //= ranks
        return [self._folded(shape)]

    def _folded(self, shape: list[int]) -> tuple[int, ...]:
        lead = len(shape) - self.ndim + 1
        return (math.prod(shape[:lead]), *shape[lead:])


@dataclass(frozen=True)
class Saved:
    """Tensor that an operation saves for backward."""

    name: str
    bytes: float
    modules: tuple[str, ...] = ()
    """Names in --recompute-modules; each of them recomputes the tensor instead."""
    offload: tuple[str, ...] = ()
    """Names in --offload-modules; each of them offloads the tensor."""


@dataclass(frozen=True)
class Op:
    """One operation and its costs."""

    kind: Kind
    name: str
    flops: float = 0.0
    """Forward FLOPs of one full sequence over all ranks."""
    backward: float = 2.0
    """FLOPs of the backward pass per forward FLOP: 1 for GEMMs of frozen weights, 0 without a backward pass."""
    keys: float = 0.0
    """Keys per query of attention over other sequences than the model's; 0: by ``flops``."""
    gemm: tuple[int, int] | None = None
    """(output, input) sizes of this rank's weight shard."""
    traffic: float = 0.0
    """Minimum bytes moved by forward and backward; 0 for GEMMs."""
    gradients: float = 0.0
    """Bytes of the gradient of its output."""
    saved: tuple[Saved, ...] = ()


@dataclass(frozen=True)
class Piece:
    """Smallest unit of a pipeline stage: the embedding, one residual branch, or the output layer."""

    name: str
    """Display name: ``attention``, ``feed-forward``, ``embedding`` …"""
    params: tuple[Param, ...] = ()
    ops: tuple[Op, ...] = ()
    is_branch: bool = False
    """Whether its output is added to the residual stream."""
    is_known: bool = True
    """Whether its module has a description."""
    settings: tuple[str, ...] = ()
    """Names of the settings that its weights depend on; a checkpoint with other values is rejected."""

    def under(self, prefix: str) -> Piece:
        """Return a copy with ``prefix`` added to the names of its parameters."""
        return replace(self, params=tuple(replace(each, name=f"{prefix}{each.name}") for each in self.params))

    def inside(self, site: str) -> Piece:
        """Return a copy that ``site`` recomputes: its operations save nothing if that is in --recompute-modules."""

        def named(op: Op) -> Op:
            return replace(op, saved=tuple(replace(each, modules=(*each.modules, site)) for each in op.saved))

        return replace(self, ops=tuple(map(named, self.ops)))

    def scaled_to_tokens(self, share: float) -> Piece:
        """Return a copy with the bytes of its operations (traffic, gradients, saved) scaled by ``share``, its tokens
        per token of the reference sequence. FLOPs and parameters do not change."""

        def scaled(op: Op) -> Op:
            saved = tuple(replace(each, bytes=each.bytes * share) for each in op.saved)
            return replace(op, traffic=op.traffic * share, gradients=op.gradients * share, saved=saved)

        return replace(self, ops=tuple(map(scaled, self.ops)))

    @property
    def num_parameters(self) -> int:
        """Number of parameters, without padding and tied copies."""
        return sum(each.numel for each in self.params)

    @property
    def flops(self) -> float:
        """Forward model FLOPs of one sequence."""
        return sum(op.flops for op in self.ops)

    @property
    def time(self) -> float:
        """Forward model FLOPs of one sequence, with attention divided by its speed relative to GEMMs."""
        return sum(op.flops / (ATTENTION_RATE if op.kind == "attention" else 1.0) for op in self.ops)


@dataclass(frozen=True)
class ModelDescription:
    """Description of a model: embedding, layers of residual branches, head and multi-token prediction."""

    embedding: Piece
    layers: tuple[tuple[Piece, ...], ...]
    head: Piece
    """Final norm, output layer and loss."""
    predictions: tuple[Piece, ...] = ()
    """Pieces of multi-token prediction. They follow the output layer, on its stage, with a copy of the embedding."""
    needless_flops: float = 0.0
    """Forward FLOPs of one sequence that are computed but not needed for the loss."""
    companions: tuple[ModelDescription, ...] = ()
    """Frozen models that compute a forward pass of each batch next to this one."""

    @property
    def pieces(self) -> Iterator[Piece]:
        """All pieces in forward order."""
        yield self.embedding
        for branches in self.layers:
            yield from branches
        yield self.head
        yield from self.predictions

    def with_pieces(self, change: Callable[[Piece], Piece]) -> ModelDescription:
        """Return a copy with every piece changed by ``change``."""
        return replace(
            self,
            embedding=change(self.embedding),
            layers=tuple(tuple(map(change, branches)) for branches in self.layers),
            head=change(self.head),
            predictions=tuple(map(change, self.predictions)),
        )

    def params(self) -> Iterator[Param]:
        """Yield every parameter of the full model."""
        for piece in self.pieces:
            yield from piece.params

    @property
    def unknown(self) -> list[str]:
        """Names of pieces without a description; counts and FLOPs exclude them."""
        return sorted({piece.name for piece in self.pieces if not piece.is_known})

    def saved(self) -> Iterator[Saved]:
        """Yield every saved tensor of the full model."""
        for piece in self.pieces:
            for op in piece.ops:
                yield from op.saved

    @property
    def settings(self) -> tuple[str, ...]:
        """Names of all settings that the weights depend on."""
        return tuple(dict.fromkeys(name for piece in self.pieces for name in piece.settings))

    @property
    def num_parameters(self) -> int:
        """Number of parameters, without padding and tied copies."""
        return sum(each.numel for each in self.params())

    @property
    def num_active_parameters(self) -> int:
        """Number of parameters active per token."""
        return round(sum(each.numel * each.active for each in self.params()))

    @property
    def padding(self) -> int:
        """Number of padding elements of all parameters."""
        return sum(each.padding for each in self.params())

    @property
    def stored_vocabulary(self) -> int:
        """Rows of the word embeddings over all tensor-parallel ranks, padding included."""
        weight = self.embedding.params[0]
        return (weight.stored or weight.shape)[0]

    @property
    def flops_per_sample(self) -> float:
        """Model FLOPs of one sequence, forward and backward, without recomputation, and of companions forward.

        * A GEMM (m, k) x (k, n) counts 2 m k n; backward counts twice the forward, once for a frozen weight.
        * Causal attention counts half of the full s x s scores, a sliding window only its band: the GEMMs that are
          needed, not those that a kernel may do on top.
        * The output layer counts the true vocabulary; look-ups, norms, activations and softmax count nothing."""
        backward = sum(op.flops * op.backward for piece in self.pieces for op in piece.ops)
        frozen = sum(model.forward_flops for model in self.companions)
        return self.forward_flops + backward - 2.0 * self.needless_flops + frozen

    @property
    def forward_flops(self) -> float:
        """Model FLOPs of one sequence in the forward pass, without companions."""
        return sum(piece.flops for piece in self.pieces) - self.needless_flops

    @property
    def costs(self) -> ModelCosts:
        """Relative times of branches and head, in units of a median layer, for balancing pipeline stages; head includes
        multi-token prediction. Times are None if a piece is unknown or the median layer has no FLOPs."""
        names = tuple(tuple(branch.name for branch in branches) for branches in self.layers)
        layers = [[branch.time for branch in branches] for branches in self.layers]
        unit = statistics.median(sum(branches) for branches in layers)  # exactly 1 per layer if all are equal
        if self.unknown or not unit:  # no times without a description of every operation
            return ModelCosts(names, None)
        last = self.head.time + sum(piece.time for piece in self.predictions)
        return ModelCosts(names, tuple(tuple(time / unit for time in each) for each in layers), last / unit)


def forward_only(op: Op) -> Op:
    """Return a copy without a backward pass."""
    return replace(op, backward=0.0, gradients=0.0, saved=())


def frozen(piece: Piece) -> Piece:
    """Return a copy whose parameters are frozen."""
    return replace(piece, params=tuple(replace(param, frozen=True) for param in piece.params))


def kept_bytes(pieces: Iterable[Piece], recomputed: frozenset[str] = frozenset()) -> float:
    """Return the bytes per token that ``pieces`` save for backward, without the modules in ``recomputed``."""
    saved = [tensor for piece in pieces for op in piece.ops for tensor in op.saved]
    return sum(tensor.bytes for tensor in saved if not recomputed.intersection(tensor.modules))


def weight_shapes(model: ModelDescription, *, expert_bias: bool) -> dict[str, tuple[int, ...]]:
    """Map the names of a model's stored tensors to their global, unpadded shapes. Tied parameters are omitted.
    ``expert_bias`` adds ``router.expert_bias`` [experts] for every parameter named ``router.weight``."""
    shapes: dict[str, tuple[int, ...]] = {}
    for param in model.params():
        if not param.tied_to:
            shapes[param.name] = tuple(param.shape)
        if expert_bias and param.name.endswith("router.weight"):
            shapes[param.name.replace("router.weight", "router.expert_bias")] = (param.shape[0],)
    return shapes
