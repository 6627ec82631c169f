"""Log-probabilities and entropies of token sequences by forward passes of the training model, in any layout.

Sequences are packed into rows of documents, rows are the micro-batches of a forward-only pipeline schedule, and
data-parallel ranks share the rows. With ``batch_invariant_mode`` the results are the generator's
(``core/inference``) bit for bit.

Legend: s tokens of this rank's part of a row, v vocabulary without padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core import parallel_state
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.config.errors import UserError
from megatron.core.groups.process_groups import Group
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.pipeline_parallel.stage_model import unwrapped
from megatron.core.tensor_parallel.batch_invariant import log_softmax
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_losses
from megatron.core.tensor_parallel.operators import all_gather_along_first_dim, gather_from_region, reduce_from_region
from megatron.core.transformer.moe.replay import SequenceRoutes, pack_routes, replay_routes

Batch = dict[str, Any]
IGNORED = -1
"""Label of a token without a successor."""
PIECE = 1024
"""Tokens whose logits are in fp32 at a time."""


class TokenStatistics(NamedTuple):
    """Numbers of the tokens of a sequence from the second on, each [tokens - 1], fp32 (fp64 for fp64)."""

    log_probabilities: Tensor
    entropies: Tensor
    """Entropy in nats of the distribution that predicted the token."""


@dataclass
class Row:
    """Packed sequences, then padding as one more document."""

    length: int
    places: list[tuple[int, int]]
    """(index of the sequence, first token in the row)."""
    tokens: list[int]

    def batch(self, sequences: Sequence[Sequence[int]], device: torch.device) -> Batch:
        """Return tokens, labels, position_ids, sample_index [1, length] and the document bounds, on ``device``."""
        lengths = [len(sequences[index]) for index, _ in self.places]
        missing = self.length - sum(lengths)
        lengths += [missing] if missing else []
        labels = [IGNORED] * self.length
        for index, first in self.places:
            labels[first : first + len(sequences[index]) - 1] = sequences[index][1:]
        lists = {
            "tokens": self.tokens + [0] * missing,
            "labels": labels,
            "position_ids": [place for length in lengths for place in range(length)],
            "sample_index": [number for number, length in enumerate(lengths) for _ in range(length)],
        }
        bounds = tuple(accumulate(lengths, initial=0))
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
        max_length = max(lengths)
        documents = PackedSeqParams(
            cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen_q=max_length, max_seqlen_kv=max_length
        )
        documents.bounds = bounds
        return {name: torch.tensor([x], device=device) for name, x in lists.items()} | {"documents": documents}


def pack(sequences: Sequence[Sequence[int]], length: int) -> list[Row]:
    """Return rows of ``length`` tokens that hold all ``sequences``: longest first, each in the first row with room.
    Raises UserError for an empty sequence, or one of more than ``length`` tokens."""
    rows: list[Row] = []
    for index in sorted(range(len(sequences)), key=lambda index: -len(sequences[index])):
        tokens = list(sequences[index])
        if not 0 < len(tokens) <= length:
            raise UserError(f"sequence {index} has {len(tokens)} tokens: must be 1 to {length}, the length of a row")
        row = next((row for row in rows if len(row.tokens) + len(tokens) <= length), None)
        if row is None:
            rows.append(row := Row(length, [], []))
        row.places.append((index, len(row.tokens)))
        row.tokens += tokens
    return rows


@torch.no_grad()
def token_log_probabilities(
    model: Sequence[nn.Module],
    sequences: Sequence[Sequence[int]],
    *,
    row_length: int,
    temperature: float = 1.0,
    routes: Sequence[SequenceRoutes] | None = None,
) -> list[Tensor]:
    """Return for each of ``sequences`` the log-probabilities of its tokens from the second on, fp32 [tokens - 1] (fp64
    for fp64), on the model's device and equal on all ranks. Collective over all ranks, which pass the same sequences.
    The model, chunks of a ``GPTModel``, runs in evaluation mode. ``row_length``: tokens of a micro-batch; with context
    or sequence parallelism a multiple of 2 CP x TP. ``temperature`` divides the logits, as
    ``Request.logprobs_at_temperature``. ``routes``: experts of each token, replayed in all layers
    (``Completion.routes``)."""
    if temperature != 1:
        options = {"row_length": row_length, "temperature": temperature, "routes": routes}
        statistics = token_statistics(model, sequences, **options)  # type: ignore[arg-type]
        return [sequence.log_probabilities for sequence in statistics]

    def labelled(chunk: nn.Module, batch: Batch) -> Tensor:
        return _forward(chunk, batch, labels=batch["labels"])

    results = _rows(model, sequences, row_length, labelled, lambda chunk, losses: -losses[0], routes=routes)
    return [values[:-1] for values in results]


@torch.no_grad()
def token_statistics(
    model: Sequence[nn.Module],
    sequences: Sequence[Sequence[int]],
    *,
    row_length: int,
    temperature: float = 1.0,
    routes: Sequence[SequenceRoutes] | None = None,
) -> list[TokenStatistics]:
    """Return the log-probabilities and entropies of the tokens of each of ``sequences``, from the logits divided by
    ``temperature``. Arguments as in :func:`token_log_probabilities`."""
    if not temperature > 0:
        raise UserError(f"temperature {temperature}: must be above 0")

    def compute(chunk: nn.Module, batch: Batch) -> Tensor:
        output, inner = _forward(chunk, batch), unwrapped(chunk)
        return _statistics(inner, output[0], batch["labels"][0], temperature) if inner.post_process else output

    results = _rows(model, sequences, row_length, compute, lambda chunk, statistics: statistics, (2,), routes)
    return [TokenStatistics(*values[:-1].unbind(-1)) for values in results]


def _statistics(model: Any, logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Return log-probabilities and entropies [s, 2] of ``logits`` [s, .] of the last stage."""
    group, head, results = model.groups.tp, model.output_layer, []
    if not model.parallel_output:
        logits = logits.chunk(group.size, -1)[group.rank]
    # a device tensor, as in the engine: GPUs multiply by the reciprocal of a number
    divisor = torch.tensor(temperature, dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
    for piece, label in zip(logits.split(PIECE), labels.split(PIECE)):
        scaled = piece.to(divisor.dtype) / divisor
        losses = vocab_parallel_losses(
            scaled,
            label,
            group=group,
            vocab_size=head.vocab_size,
            divisible_by=head.divisible_by,
            batch_invariant=head.batch_invariant,
        )
        results.append(torch.stack((-losses, vocab_parallel_entropies(scaled, group)), -1))
    return torch.cat(results)


def vocab_parallel_entropies(logits: Tensor, group: Group) -> Tensor:
    """Return the entropy in nats, [...], of the softmax over the vocabulary of all ranks of ``group``:

        log sum exp(x - m) - sum (x - m) exp(x - m) / sum exp(x - m),    m = max x

    ``logits`` [..., v] is this rank's slice; -inf marks padding. Differentiable; two all-reduces in forward, in the
    dtype of the logits."""
    maximum = logits.detach().amax(-1, keepdim=True)
    if group.size > 1:
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group.handle)
    shifted = logits - maximum
    weights = shifted.exp()
    products = weights * shifted.masked_fill(shifted == -torch.inf, 0.0)
    total, product = reduce_from_region(torch.stack((weights.sum(-1), products.sum(-1))), group)
    return total.log() - product / total


@torch.no_grad()
def full_log_probabilities(
    model: Sequence[nn.Module], sequences: Sequence[Sequence[int]], *, row_length: int
) -> list[Tensor]:
    """Return all log-probabilities [tokens, v] of each of ``sequences``, as :func:`token_log_probabilities`."""

    def finish(chunk: Any, logits: Tensor) -> Tensor:
        stored = gather_from_region(logits[0], chunk.groups.tp) if chunk.parallel_output else logits[0]
        if chunk.config.batch_invariant_mode:
            return log_softmax(stored, chunk.vocab_size)
        dtype = torch.promote_types(stored.dtype, torch.float32)
        return stored[:, : chunk.vocab_size].log_softmax(-1, dtype=dtype)

    last: Any = unwrapped(model[-1])
    return _rows(model, sequences, row_length, _forward, finish, (last.vocab_size,))


def _forward(chunk: nn.Module, batch: Batch, **labels: Tensor) -> Tensor:
    return chunk(
        batch["tokens"],
        batch["position_ids"],
        packed_seq_params=batch["documents"],
        sample_index=batch["sample_index"],
        **labels,
    )


def _rows(
    model: Sequence[nn.Module],
    sequences: Sequence[Sequence[int]],
    row_length: int,
    forward: Callable[[nn.Module, Batch], Tensor],
    finish: Callable[[Any, Tensor], Tensor],
    width: tuple[int, ...] = (),
    routes: Sequence[SequenceRoutes] | None = None,
) -> list[Tensor]:
    """Run ``forward`` on all rows; return ``finish`` of its output, [s, *width], per sequence [tokens, *width]."""
    if routes is not None and (problem := _routes_problem(routes, sequences)):
        raise UserError(f"routes: {problem}")
    groups = parallel_state.get_process_groups()
    inner: Any = unwrapped(model[-1])
    device = next(p.device for chunk in model for p in chunk.parameters())
    layout = inner.layout
    multiple = groups.stream(inner.config.sequence_parallel).size * (2 * groups.cp.size if groups.cp.size > 1 else 1)
    if row_length % multiple:
        raise UserError(f"row_length {row_length}: must be a multiple of {multiple}, the parts of a row")
    rows = pack(sequences, row_length)
    # equally many micro-batches on all ranks: expert-parallel ranks communicate in every one
    count = -(-len(rows) // groups.dp.size)
    rows += [Row(row_length, [], [])] * (count * groups.dp.size - len(rows))
    local = rows[groups.dp.rank * count : (groups.dp.rank + 1) * count]
    results: list[Tensor] = []

    def batches() -> Iterator[Batch]:
        for row in local:
            batch = row.batch(sequences, device)
            yield {name: layout.local(x, 1) if name in ("tokens", "labels") else x for name, x in batch.items()} | {
                "position_ids": layout.local(batch["position_ids"], 1),
                "sample_index": layout.local(batch["sample_index"], 1),
            }

    def forward_step(iterator: Iterator[Batch], chunk: nn.Module) -> tuple[Tensor, None]:
        output = forward(chunk, next(iterator))
        if unwrapped(chunk).post_process:  # type: ignore[union-attr]
            results.append(layout.full(finish(unwrapped(chunk), output), 0))
        return output, None

    replay: AbstractContextManager[None] = nullcontext()
    if routes is not None:
        replay = replay_routes(model, pack_routes(routes, [row.places for row in local], row_length))
    was_training = [chunk.training for chunk in model]
    for chunk in model:
        chunk.eval()
    try:
        with replay:
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[batches() for _ in model],
                model=list(model),
                num_microbatches=count,
                seq_length=row_length,
                micro_batch_size=1,
                forward_only=True,
            )
    finally:
        for chunk, mode in zip(model, was_training):
            chunk.train(mode)
    dtype = torch.promote_types(inner.config.params_dtype, torch.float32)
    empty = torch.empty((count, row_length, *width), dtype=dtype, device=device)
    gathered = _on_all_stages(results, empty, groups)
    if groups.dp.size > 1:
        gathered = all_gather_along_first_dim(gathered, groups.dp)
    by_sequence: dict[int, Tensor] = {}
    for row, values in zip(rows, gathered):
        for index, first in row.places:
            by_sequence[index] = values[first : first + len(sequences[index])]
    return [by_sequence[index] for index in range(len(sequences))]


def _routes_problem(routes: Sequence[SequenceRoutes], sequences: Sequence[Sequence[int]]) -> str | None:
    if len(routes) != len(sequences):
        return f"{len(routes)} sequences have routes, {len(sequences)} have tokens"
    for index, (layers, tokens) in enumerate(zip(routes, sequences)):
        if layers.keys() != routes[0].keys():
            return f"sequence {index} has layers {sorted(layers)}, sequence 0 {sorted(routes[0])}"
        if (num_routed := max(map(len, layers.values()), default=0)) > len(tokens):
            return f"sequence {index} has {len(tokens)} tokens, and routes of {num_routed}"
    return None


def _on_all_stages(results: list[Tensor], like: Tensor, groups: Any) -> Tensor:
    output = torch.stack(results) if results else like
    if groups.pp.size > 1:
        dist.broadcast(output, groups.pp.ranks[-1], group=groups.pp.handle)
    return output
