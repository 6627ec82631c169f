"""A model as data: parameters of its pieces, operations, what they keep for backward. Torch-free.

A mixer is described by a pure function ``describe(config, place) -> Piece`` (``describe_attention``, ``describe_mlp``
…), which its class carries along, so that a layer spec tells what it builds; norm, dropout and residual sum around it
are described in ``parts``. Parameter counts, FLOPs, memory, stage balance, roofline, dry run and self-checks fold over
descriptions; none of them knows what a layer looks like. A test says that a description equals the model that is built.

Quantities are of one tensor-parallel rank and per token of its sequences, unless a field says otherwise.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megatron.core.pipeline_parallel.balance import ATTENTION_RATE, ModelCosts

Config = Any
"""A TransformerConfig, or any configuration with its field names and sizes resolved."""

Kind = Literal["gemm", "attention", "norm", "rotary", "activation", "cross entropy", "embedding", "other"]


@dataclass(frozen=True)
class LayerPlace:
    """Where a layer stands, and what goes through it."""

    layer_number: int
    """From 1 over the whole model."""
    seq_length: int
    rotary: bool = False
    """Whether queries and keys are rotated."""
    causal: bool = True
    """Whether a query sees no key behind it."""
    source_length: int = 0
    """Tokens of the other sequence that keys are of, in cross-attention."""


@dataclass(frozen=True)
class Param:
    """One parameter, independent of the rank that holds a part of it."""

    name: str
    """Global name; relative to its piece until :meth:`Piece.under` puts it somewhere."""
    shape: tuple[int, ...]
    """Logical global shape, without padding."""
    mesh: Mapping[str, int] = field(default_factory=dict)
    """Rank axis -> logical dim that it splits; axes not named replicate."""
    stored: tuple[int, ...] | None = None
    """Logical shape with padding, where there is any."""
    shared: int = 0
    """For ``(blocks, rows, …)`` split along blocks: with fewer blocks than ranks, the ranks of a block split its rows
    except the last ``shared``, which each of them holds."""
    tied_to: str | None = None
    """Global name of the parameter that it is a copy of."""
    ndim: int = 2
    """Dims of what is stored: leading logical dims are folded into its first."""
    active: float = 1.0
    """The part of it that a token meets: of experts' those that it goes to."""

    @property
    def is_expert(self) -> bool:
        """Whether it lies on the expert grid, whose ranks sum its gradient."""
        return "ep" in self.mesh or "etp" in self.mesh

    @property
    def numel(self) -> int:
        """True elements over all ranks; a copy of another parameter counts nothing."""
        return 0 if self.tied_to else math.prod(self.shape)

    @property
    def padding(self) -> int:
        """Elements that are stored beside the true ones."""
        return 0 if self.tied_to or self.stored is None else math.prod(self.stored) - math.prod(self.shape)

    def local_shapes(self, sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
        """Shapes that one rank stores, padding included, given the ranks of each axis."""
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
    """A tensor that an operation keeps for its backward pass."""

    name: str
    bytes: float
    modules: tuple[str, ...] = ()
    """Names in --recompute-modules, each of which computes it again instead."""


@dataclass(frozen=True)
class Op:
    """One operation."""

    kind: Kind
    name: str
    flops: float = 0.0
    """Forward pass of one whole sequence, all ranks together; backward counts twice as much."""
    gemm: tuple[int, int] | None = None
    """(output, input) sizes of this rank's weight."""
    traffic: float = 0.0
    """Bytes that forward and backward pass must move at the least; those of GEMMs are not counted."""
    gradients: float = 0.0
    """Bytes of the gradients of its output."""
    saved: tuple[Saved, ...] = ()


@dataclass(frozen=True)
class Piece:
    """The smallest part of a pipeline stage: the embedding, one residual branch, the output layer."""

    name: str
    """In words: ``attention``, ``feed-forward``, ``embedding`` …"""
    params: tuple[Param, ...] = ()
    ops: tuple[Op, ...] = ()
    is_branch: bool = False
    """Whether it is added to the residual stream."""
    is_known: bool = True
    """False: its module says nothing of itself."""
    settings: tuple[str, ...] = ()
    """Names of the settings without which its weights mean something else: a checkpoint of other ones is refused."""

    def under(self, prefix: str) -> Piece:
        """The same with ``prefix`` before the names of its parameters."""
        return replace(self, params=tuple(replace(each, name=f"{prefix}{each.name}") for each in self.params))

    def per_token_of(self, share: float) -> Piece:
        """The same with bytes per token of a sequence of which it sees ``share`` times as many tokens."""
        def scaled(op: Op) -> Op:
            saved = tuple(replace(each, bytes=each.bytes * share) for each in op.saved)
            return replace(op, traffic=op.traffic * share, gradients=op.gradients * share, saved=saved)

        return replace(self, ops=tuple(map(scaled, self.ops)))

    @property
    def num_parameters(self) -> int:
        """Padding and tied copies not counted."""
        return sum(each.numel for each in self.params)

    @property
    def flops(self) -> float:
        """Model FLOPs of one sequence, forward."""
        return sum(op.flops for op in self.ops)

    @property
    def time(self) -> float:
        """The same, with attention's divided by its speed relative to GEMMs."""
        return sum(op.flops / (ATTENTION_RATE if op.kind == "attention" else 1.0) for op in self.ops)


@dataclass(frozen=True)
class ModelDescription:
    """A decoder: embedding, layers of residual branches, and what follows the last one."""

    embedding: Piece
    layers: tuple[tuple[Piece, ...], ...]
    head: Piece
    """Final norm, output layer and loss."""
    predictions: tuple[Piece, ...] = ()
    """Multi-token prediction: what follows behind the output layer, on its stage, together with a copy of the
    embedding."""
    needless_flops: float = 0.0
    """Forward FLOPs of one sequence that a layout computes and the loss does not need."""

    @property
    def pieces(self) -> Iterator[Piece]:
        """All, in the order in which a token meets them."""
        yield self.embedding
        for branches in self.layers:
            yield from branches
        yield self.head
        yield from self.predictions

    def params(self) -> Iterator[Param]:
        """Every parameter of the whole model."""
        for piece in self.pieces:
            yield from piece.params

    @property
    def unknown(self) -> list[str]:
        """Pieces whose modules say nothing of themselves: counts and FLOPs are then without them."""
        return sorted({piece.name for piece in self.pieces if not piece.is_known})

    @property
    def settings(self) -> tuple[str, ...]:
        """Names of all settings without which the weights mean something else."""
        return tuple(dict.fromkeys(name for piece in self.pieces for name in piece.settings))

    @property
    def num_parameters(self) -> int:
        """Padding and tied copies not counted."""
        return sum(each.numel for each in self.params())

    @property
    def num_active_parameters(self) -> int:
        """Those that a token meets."""
        return round(sum(each.numel * each.active for each in self.params()))

    @property
    def padding(self) -> int:
        """Elements that are stored beside the parameters."""
        return sum(each.padding for each in self.params())

    @property
    def stored_vocabulary(self) -> int:
        """Rows of the word embeddings over all tensor-parallel ranks, padding included."""
        weight = self.embedding.params[0]
        return (weight.stored or weight.shape)[0]

    @property
    def flops_per_sample(self) -> float:
        """Model FLOPs of one sequence, forward and backward, without recomputation.

        * A GEMM (m, k) x (k, n) counts 2 m k n; backward counts twice the forward.
        * Causal attention counts half of the full s x s scores, a sliding window only its band: the GEMMs that are
          needed, not those that a kernel may do on top.
        * The output layer counts the true vocabulary; look-ups, norms, activations and softmax count nothing.
        """
        return 3.0 * (sum(piece.flops for piece in self.pieces) - self.needless_flops)

    @property
    def costs(self) -> ModelCosts:
        """For the balance of pipeline stages."""
        names = tuple(tuple(branch.name for branch in branches) for branches in self.layers)
        layers = [[branch.time for branch in branches] for branches in self.layers]
        unit = statistics.median(sum(branches) for branches in layers)  # exactly 1 each where all are alike
        if self.unknown or not unit:  # a description without operations says nothing of time
            return ModelCosts(names, None)
        last = self.head.time + sum(piece.time for piece in self.predictions)
        return ModelCosts(names, tuple(tuple(time / unit for time in each) for each in layers), last / unit)


def kept_bytes(pieces: Iterable[Piece], recomputed: frozenset[str] = frozenset()) -> float:
    """Bytes per token that pieces keep for backward, without those of modules that are computed again."""
    saved = [each for piece in pieces for op in piece.ops for each in op.saved]
    return sum(each.bytes for each in saved if not recomputed.intersection(each.modules))
