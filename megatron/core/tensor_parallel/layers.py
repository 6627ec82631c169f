"""Linear layers and embeddings with weights split over the tensor-parallel group.

  column: Y_i = X A_i + b_i   weight (out, in) split along out; the input gradient is summed over the group
  row:    Y = sum_i X_i A_i + b   weight (out, in) split along in; the output is summed over the group

Under sequence parallelism the activations outside these two hold s / tp positions per rank: a column layer all-gathers
them, a row layer reduce-scatters them. On a group of one rank both are plain linear layers. The GEMMs, their overlap
and the target of weight gradients are in ``linear.py``.

Every layer with a GEMM is a ``gemms.GemmLayer``: a pipeline runtime sets its ``weight_gradient_store`` to defer weight
gradients, and a recipe may replace its GEMMs.

Legend: s sequence, b batch, h hidden."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.config.errors import UserError
from megatron.core.config.notices import notice
from megatron.core.extensions.apex import ApexWeightGradient
from megatron.core.fusions.batch_invariant_product import in_full_vectors
from megatron.core.fusions.column_sum import choose_column_sum
from megatron.core.fusions.embedding_gradient import choose_add_rows
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.sharding.placement import Init, Nested, Replicate, Shard, SubTensor, Zeros, declare, parameter
from megatron.core.sharding.rectangles import Rectangle
from megatron.core.tensor_parallel import operators
from megatron.core.tensor_parallel.arguments import takes_megatron_arguments
from megatron.core.tensor_parallel.autograd_handle import AutogradHandle, start_all_gather, start_reduce_scatter
from megatron.core.tensor_parallel.batch_invariant import BatchInvariantGemms, sum_over_ranks
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_losses
from megatron.core.tensor_parallel.embedding import look_up
from megatron.core.tensor_parallel.gemms import GemmLayer, Gemms, accumulate_product
from megatron.core.tensor_parallel.linear import LinearTraits, parallel_linear
from megatron.core.tensor_parallel.linear_cross_entropy import LogitSteps, linear_cross_entropy
from megatron.core.tensor_parallel.vocabulary import check_ids, num_true_entries, stored_vocab_size

if TYPE_CHECKING:
    from megatron.core.config.model_parallel_config import ModelParallelConfig

logger = logging.getLogger(__name__)


class StackedSize(NamedTuple):
    """Output dim that consists of several logical dims, with one split: gate and up are ``((2, ffn), 1)``. For
    ``(blocks, rows)`` split along blocks, several ranks may replicate the last ``shared`` rows of each block: with
    fewer blocks than ranks, the ranks of a block split its other rows and each hold all of its shared ones (query heads
    and their key and value head)."""

    shape: tuple[int, ...]
    split_dim: int
    shared: int = 0

    def is_shared_over(self, num_ranks: int) -> bool:
        """Return whether there are fewer blocks than ranks, so that ranks share rows."""
        return self.shared > 0 and self.shape[0] < num_ranks


def _traits(config: ModelParallelConfig, groups: ProcessGroups, **chosen: bool) -> LinearTraits:
    """Apex computes weight gradients with "wgrad" in ``config.apex_parts``. Without flags: no collective."""
    fuses = config.gradient_accumulation_fusion
    column_sum = choose_column_sum(config.params_dtype, fuses)
    gemms = Gemms(ApexWeightGradient() if "wgrad" in config.apex_parts else accumulate_product)
    if config.batch_invariant_mode:
        gemms = BatchInvariantGemms(gemms, groups.tp)
    return LinearTraits(groups.tp, fuse_weight_gradient=fuses, column_sum=column_sum, gemms=gemms, **chosen)


class ColumnParallelLinear(GemmLayer):
    """``Y = X A^T + b``, A split along its output dim. Returns (Y, None), or (Y without b, b) with ``skip_bias_add``.
    ``output_size`` is the full size. Input [..., input_size] is replicated (split along the sequence under sequence
    parallelism); output is [..., output_size / tp], or full with ``gather_output``. For a stacked size with fewer
    blocks than ranks, the rows that several ranks hold are separate parameters: ``shared_weight`` and ``shared_bias``,
    slices of the global ``weight`` and ``bias``. They come last in a rank's output; ``gather_output`` and
    ``skip_bias_add`` then raise ValueError."""

    product = shared_product = staticmethod(parallel_linear)

    @takes_megatron_arguments
    def __init__(
        self,
        input_size: int,
        output_size: int | StackedSize,
        *,
        config: ModelParallelConfig,
        init_method: Init,
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        groups: ProcessGroups,
    ) -> None:
        super().__init__()
        size = output_size if isinstance(output_size, StackedSize) else StackedSize((output_size,), 0)
        common = {"groups": groups, "dtype": config.params_dtype}
        make = _shared_rows if size.is_shared_over(groups.tp.size) else _split_rows
        self.weight, self.shared_weight = make(size, (input_size,), "weight", init=init_method, **common)
        self.bias: nn.Parameter | None = None
        self.shared_bias: nn.Parameter | None = None
        if bias:
            self.bias, self.shared_bias = make(size, (), "bias", init=Zeros(), **common)
        self.group, self.skip_bias_add = groups.tp, skip_bias_add
        if self.shared_weight is not None and (gather_output or skip_bias_add):
            raise ValueError("rows that several ranks hold exclude gather_output and skip_bias_add")
        gathers = groups.stream(config.sequence_parallel).size > 1
        self.traits = _traits(config, groups, gather_input=gathers, reduce_input_gradient=not gathers)
        self._bare_traits = _traits(config, groups)
        self._enter: Callable = operators.copy_to_region
        if gathers:
            self._enter = operators.gather_from_sequence
        self._leave: Callable = operators.identity
        if gather_output:
            self._leave = operators.gather_from_region

    def forward(
        self, x: Tensor | AutogradHandle, weight: Tensor | None = None, *, is_gathered: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return (output [..., out / tp], or all of it with ``gather_output``; the bias with ``skip_bias_add``, else
        None). Under sequence parallelism all-gathers ``x`` [s / tp, b, i]; backward reduces the gradient of ``x``.
        ``x`` may be an all-gather in flight (:meth:`gather`). With that or ``is_gathered`` (``x`` has the positions of
        all ranks) the gradient of ``x`` is a partial sum over the group, which the handle of :meth:`gather`
        reduce-scatters. ``weight`` replaces the layer's weight by another module's; its gradient is not deferred, and
        that module must announce it (``LinearTraits.weight_has_other_uses``)."""
        traits, store = self.traits, self.weight_gradient_store
        if isinstance(x, AutogradHandle):
            x, is_gathered = x.wait(), True
        if is_gathered:
            traits = self._bare_traits
        bias = None if self.skip_bias_add else self.bias
        if weight is not None:
            traits = self._bare_traits._replace(weight_has_other_uses=True)
            output = parallel_linear(self._enter(x, self.group), weight, bias, traits)
        elif self.shared_weight is None:
            output = self.product(x, self.weight, bias, traits, store)
        else:
            # gather the input and reduce its gradient once for both weights, without overlap
            entered = x if is_gathered else self._enter(x, self.group)
            exclusive = self.product(entered, self.weight, bias, self._bare_traits, store)
            shared = self.shared_product(entered, self.shared_weight, self.shared_bias, self._bare_traits, store)
            output = torch.cat((exclusive, shared), dim=-1)  # shared rows come last
        return self._leave(output, self.group), self.bias if self.skip_bias_add else None

    def use_gemms(self, gemms: object) -> None:
        super().use_gemms(gemms)
        self._bare_traits = self._bare_traits._replace(gemms=self.traits.gemms)

    def gather(self, x: Tensor) -> AutogradHandle:
        """Start the all-gather of ``x`` along the sequence for :meth:`forward` (only sequence parallelism)."""
        return start_all_gather(x, self.group)


def _split_rows(
    size: StackedSize, rest: tuple[int, ...], name: str, **common: Any
) -> tuple[nn.Parameter, nn.Parameter | None]:
    return parameter((*size.shape, *rest), mesh={"tp": Shard(size.split_dim)}, ndim=1 + len(rest), **common), None


def _shared_rows(
    size: StackedSize, rest: tuple[int, ...], name: str, *, groups: ProcessGroups, **further_settings: Any
) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Declare the weight or bias of a stacked size with fewer blocks than ranks as two parameters, parts of the global
    tensor ``name``: this rank's rows of its block, and the rows that all ranks of the block hold, whose gradients are
    partial sums. UserError if ``tp`` is not a multiple of the blocks."""
    blocks, rows = size.shape
    if groups.tp.size % blocks:
        raise UserError(
            f"{blocks} key and value heads (num_query_groups) can be shared by a tensor_model_parallel_size that is a "
            f"multiple of them, not by {groups.tp.size}"
        )
    ranks_per_block, exclusive = groups.tp.size // blocks, rows - size.shared
    shape, none = (*size.shape, *rest), (0,) * len(rest)
    split, copied = Nested(Shard(0), Shard(1), ranks_per_block), Nested(Shard(0), Replicate(), ranks_per_block)
    exclusive_part = SubTensor(shape, name, Rectangle((0, 0, *none), (blocks, exclusive, *rest)))
    shared_part = SubTensor(shape, name, Rectangle((0, exclusive, *none), (blocks, size.shared, *rest)))
    common = {"ndim": 1 + len(rest), "groups": groups, **further_settings}
    return (
        parameter(exclusive_part, mesh={"tp": split}, **common),
        parameter(shared_part, mesh={"tp": copied}, partial=("tp",), **common),
    )


class RowParallel(nn.Module):
    """Parameters and collectives of a row-parallel linear layer; subclasses implement the GEMM."""

    @takes_megatron_arguments
    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        init_method: Init,
        bias: bool = True,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        groups: ProcessGroups,
    ) -> None:
        super().__init__()
        sequence_parallel = groups.stream(config.sequence_parallel).size > 1
        common = {"groups": groups, "dtype": config.params_dtype}
        self.weight = parameter((output_size, input_size), init=init_method, mesh={"tp": Shard(1)}, **common)
        # partial sums: under sequence parallelism each rank adds the bias to its own positions only
        axes = ("tp",) if sequence_parallel else ()
        self.bias = parameter((output_size,), init=Zeros(), partial=axes, **common) if bias else None
        self.group, self.skip_bias_add = groups.tp, skip_bias_add
        invariant = config.batch_invariant_mode
        self._bias_is_fused = bias and not skip_bias_add and groups.tp.size == 1 and not invariant
        self._enter: Callable = operators.scatter_to_region
        if input_is_parallel:
            self._enter = operators.identity
        self.traits = _traits(config, groups)
        self.scatters = sequence_parallel
        self._leave: Callable = operators.reduce_from_region
        if sequence_parallel:
            self._leave = operators.reduce_scatter_to_sequence
        if invariant:
            gemms = BatchInvariantGemms(self.traits.gemms, groups.tp, partial_sums=True)
            self.traits = self.traits._replace(gemms=gemms)
            self._leave = partial(sum_over_ranks, scatters=sequence_parallel, dtype=config.params_dtype)

    def _with_bias(self, output: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.skip_bias_add or self.bias is None:
            return output, self.bias
        return output + self.bias, None


class RowParallelLinear(RowParallel, GemmLayer):
    """``Y = sum_i X_i A_i^T + b``, A split along its input dim. Returns (Y, None), or (Y, b) with ``skip_bias_add``.
    Input is this rank's slice [..., input_size / tp] (``input_is_parallel``) or the full [..., input_size]. Output
    [..., output_size] is all-reduced, or reduce-scattered along the sequence under sequence parallelism."""

    product = staticmethod(parallel_linear)

    def forward(self, x: Tensor, *, in_flight: bool = False) -> tuple[Any, Tensor | None]:
        """Return (output, bias for the caller to add or None): the product, all-reduced or reduce-scattered along the
        sequence, plus the bias. ``in_flight`` (sequence parallelism): return (the reduce-scatter in flight, bias);
        :meth:`finish` adds the bias."""
        if self._bias_is_fused:
            return self.product(x, self.weight, self.bias, self.traits, self.weight_gradient_store), None
        entered = self._enter(x, self.group)
        output = self.product(entered, self.weight, None, self.traits, self.weight_gradient_store)
        if in_flight:
            return start_reduce_scatter(output, self.group), self.bias
        return self._with_bias(self._leave(output, self.group))

    def use_gemms(self, gemms: object) -> None:
        super().use_gemms(gemms)
        if self.scatters:
            gather = self.traits.gemms.gather_gradient
            self._leave = operators.conjugate(operators.reduce_scatter_along_first_dim, gather)

    def finish(self, summing: AutogradHandle) -> tuple[Tensor, Tensor | None]:
        """Wait for the reduce-scatter that :meth:`forward` with ``in_flight`` returned, add the bias unless
        ``skip_bias_add``, and return (output [s / tp, b, out], bias for the caller to add or None)."""
        return self._with_bias(summing.wait())


class ReplicatedLinear(GemmLayer):
    """``Y = X A^T + b`` with A replicated, on the tokens of this rank. Returns (Y, None). Under sequence parallelism
    each rank has different tokens, so gradients are partial sums over the group. Set ``whole_input`` if every rank has
    the full input instead."""

    product = staticmethod(parallel_linear)

    def __init__(
        self, input_size: int, output_size: int, *, config: ModelParallelConfig, init_method: Init, bias: bool = True,
        whole_input: bool = False, groups: ProcessGroups,
    ) -> None:  # fmt: skip
        super().__init__()
        axes = ("tp",) if groups.stream(config.sequence_parallel).size > 1 and not whole_input else ()
        common = {"partial": axes, "groups": groups, "dtype": config.params_dtype}
        self.weight = parameter((output_size, input_size), init=init_method, **common)
        self.bias = parameter((output_size,), init=Zeros(), **common) if bias else None
        self.traits = _traits(config, groups)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.product(x, self.weight, self.bias, self.traits, self.weight_gradient_store), None


class VocabParallelEmbedding(nn.Module):
    """Embedding table split along the vocabulary: token ids [...] -> vectors [..., h], all-reduced over the group.
    ``num_embeddings`` is the unpadded size. Unused rows pad it to a common multiple of ``divisible_by`` and the group
    size; the constructor logs a notice then. Ids outside of [0, num_embeddings), also negative ones, raise IndexError
    (on GPUs a device assertion)."""

    @takes_megatron_arguments
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: Init,
        config: ModelParallelConfig,
        divisible_by: int = 128,
        groups: ProcessGroups,
    ) -> None:
        super().__init__()
        stored = stored_vocab_size(num_embeddings, divisible_by, groups.tp)
        if stored > num_embeddings:
            message = " > padded vocab (size: %d) with %d dummy tokens (new size: %d)"
            notice(logger, message, num_embeddings, stored - num_embeddings, stored)
        self.num_embeddings, self.embedding_dim, self.group = num_embeddings, embedding_dim, groups.tp
        self.weight = parameter(
            (num_embeddings, embedding_dim), init=init_method, mesh={"tp": Shard(0)}, stored=(stored, embedding_dim),
            groups=groups, dtype=config.params_dtype,
        )  # fmt: skip
        self.num_local = num_true_entries(num_embeddings, stored // self.group.size, self.group)
        self.traits, self._add_rows = _traits(config, groups), choose_add_rows(config.params_dtype)
        self._look_up = self._look_up_unsharded if self.group.size == 1 else self._look_up_split

    def _look_up_unsharded(self, ids: Tensor) -> Tensor:
        return look_up(self.weight, ids, None, self.traits, self._add_rows)

    def _look_up_split(self, ids: Tensor) -> Tensor:
        return operators.reduce_from_region(self._local_vectors(ids), self.group)

    def _local_vectors(self, ids: Tensor) -> Tensor:
        """Zeros for ids of other ranks; not reduced."""
        local = ids - self.group.rank * self.weight.shape[0]
        absent = (local < 0) | (local >= self.num_local)
        return look_up(self.weight, local, absent, self.traits, self._add_rows)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the vectors [..., h] of ids [...], all-reduced; no collective in backward. Raises IndexError."""
        check_ids(ids, self.num_embeddings, "token ids")
        return self._look_up(ids)

    def scattered(self, ids: Tensor) -> Tensor:
        """Return the vectors [s / tp, b, h] of this rank's positions in ids [s, b] by a reduce-scatter."""
        check_ids(ids, self.num_embeddings, "token ids")
        return operators.reduce_scatter_to_sequence(self._local_vectors(ids), self.group)


class VocabParallelOutput(GemmLayer):
    """Output layer: hidden states [..., h] -> logits [..., v / tp], weight (v, h) and bias (:meth:`add_bias`) split
    along the vocabulary. With labels, global ids int64 [...], it returns the tokens' losses [...] instead
    (``cross_entropy.py``). No other code sees these logits, so their gradient overwrites them. With
    ``config.cross_entropy_chunk_tokens`` only one chunk exists at a time (``linear_cross_entropy.py``). With
    ``weight_is_shared`` the module has no weight and is called with the embedding's. ``tied_to`` marks the weight of a
    later pipeline stage as a copy of the parameter of that name. Logits of padded entries are zero; the loss ignores
    them."""

    soft_cap: float | None = None
    """Cap of the logits: soft_cap * tanh(x / soft_cap); None: no cap."""
    borrowed: tuple[nn.Parameter, ...] = ()
    """Parameters of other modules that ``forward`` is called with."""
    tensor_model_parallel, partition_dim = True, 0
    """Megatron-LM's names for the split of the weight; converters of other programs read them."""

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        config: ModelParallelConfig,
        init_method: Init,
        divisible_by: int = 128,
        weight_is_shared: bool = False,
        tied_to: str | None = None,
        groups: ProcessGroups,
    ) -> None:
        super().__init__()
        stored = stored_vocab_size(vocab_size, divisible_by, groups.tp)
        self.vocab_size, self.group = vocab_size, groups.tp
        self.num_local = num_true_entries(vocab_size, stored // self.group.size, self.group)
        self.weight = None
        if not weight_is_shared:
            self.weight = parameter(
                (vocab_size, hidden_size), init=init_method, mesh={"tp": Shard(0)}, stored=(stored, hidden_size),
                groups=groups, dtype=config.params_dtype,
            )  # fmt: skip
            declare(self.weight, tied_to=tied_to)
        self.register_parameter("bias", None)
        gathers = groups.stream(config.sequence_parallel).size > 1
        self.traits = _traits(
            config, groups, gather_input=gathers, reduce_input_gradient=not gathers,
            weight_has_other_uses=weight_is_shared,
        )  # fmt: skip
        self.divisible_by, self.chunk_tokens = divisible_by, config.cross_entropy_chunk_tokens
        self.batch_invariant = config.batch_invariant_mode
        self._losses = self._logit_losses if self.chunk_tokens is None else self._chunked_losses

    def add_bias(self, config: ModelParallelConfig, groups: ProcessGroups) -> None:
        """Set ``self.bias`` to zeros, split and padded like the weight, which logits and losses then add."""
        stored = stored_vocab_size(self.vocab_size, self.divisible_by, groups.tp)
        self.bias = parameter(
            (self.vocab_size,), init=Zeros(), mesh={"tp": Shard(0)}, stored=(stored,), ndim=1, groups=groups,
            dtype=config.params_dtype,
        )  # fmt: skip

    def forward(self, x: Tensor, weight: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Return logits [s, b, v / tp] in the dtype of ``x``, or with ``labels`` losses [s, b] in fp32, equal on all
        ranks. Under sequence parallelism all-gathers ``x`` [s / tp, b, h], again in backward; losses need one more
        all-gather. Backward reduces the gradient of ``x``. ``weight``: the embedding's, if the weight is shared."""
        weight = self.weight if weight is None else weight
        assert weight is not None, "a shared output layer is called with the embedding's weight"
        return self._logits(x, weight) if labels is None else self._losses(x, weight, labels)

    def _logits(self, x: Tensor, weight: Tensor) -> Tensor:
        logits = parallel_linear(x, weight, self.bias, self.traits, self.weight_gradient_store)
        return logits if self.soft_cap is None else in_full_vectors(torch.tanh, logits / self.soft_cap) * self.soft_cap

    def _logit_losses(self, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return vocab_parallel_losses(
            self._logits(x, weight), labels, vocab_size=self.vocab_size, divisible_by=self.divisible_by,
            group=self.group, reuse_logits=True, batch_invariant=self.batch_invariant,
        )  # fmt: skip

    def _chunked_losses(self, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """With the logits of one chunk of tokens in memory at a time."""
        return linear_cross_entropy(
            x, weight, labels, vocab_size=self.vocab_size, traits=self.traits, chunk_tokens=self.chunk_tokens or 0,
            store=self.weight_gradient_store, logits=LogitSteps(self.bias, self.soft_cap),
        )  # fmt: skip
