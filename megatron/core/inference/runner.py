"""Execution of one step of generation: token ids in, sampled tokens and log-probabilities out.

Every rank of the program runs the same step. A pipeline stage receives hidden states from the previous stage and sends
its output to the next one; the last stage samples and broadcasts the results over the pipeline. Tensor- and
expert-parallel ranks communicate inside the layers, as in training.

Legend: n rows (new tokens), r rows with logits, v vocabulary without padding, h hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.attention.cached_layout import CachedLayout, Chunk, PagedCache
from megatron.core.config.errors import UserError
from megatron.core.fusions.batch_invariant_product import ROWS
from megatron.core.inference.sampling import Sampling, draw, nonfinite_rows
from megatron.core.tensor_parallel.batch_invariant import log_softmax
from megatron.core.tensor_parallel.operators import gather_from_region
from megatron.core.transformer.context_parallel_support import cache_problem

FAILED = -1
"""Token of a row whose logits are not finite."""


@dataclass(frozen=True)
class OutputRow:
    """Row whose logits are needed: to sample the next token, or to score a known one."""

    row: int
    target: int | None = None
    """Token to score; None: sample."""
    sampling: Sampling | None = None
    """Set, with a seed, if ``target`` is None."""
    position: int = 0
    """Position of the token to sample."""


@dataclass(frozen=True)
class StepPlan:
    """Inputs of a step."""

    tokens: list[int]
    chunks: list[Chunk]
    outputs: list[OutputRow]
    num_top: int = 0
    """Number of most likely tokens to report for each output row."""

    def encode(self) -> dict[str, Any]:
        """Return the plan as JSON values, for a broadcast."""
        outputs = [
            [x.row, x.target, None if x.sampling is None else vars(x.sampling), x.position] for x in self.outputs
        ]
        return {"tokens": self.tokens, "chunks": self.chunks, "outputs": outputs, "num_top": self.num_top}

    @classmethod
    def decode(cls, values: dict[str, Any]) -> StepPlan:
        """Return the plan of :meth:`encode`'s values."""
        outputs = [
            OutputRow(row, target, None if sampling is None else Sampling(**sampling), position)
            for row, target, sampling, position in values["outputs"]
        ]
        chunks = [Chunk(start, num_new, tuple(pages)) for start, num_new, pages in values["chunks"]]
        return cls(values["tokens"], chunks, outputs, values["num_top"])


def model_problem(model: Any) -> str | None:
    """Return why ``model`` cannot generate with a cache; None if it can."""
    if problem := cache_problem(model):
        return f"generation with a cache {problem}"
    if (size := model.groups.cp.size) > 1:
        return f"context_parallel_size {size}: is not supported in generation; load the checkpoint with 1"
    if (factor := model.config.moe_expert_capacity_factor) is not None:
        return f"moe_expert_capacity_factor {factor}: drops tokens that depend on other requests; generate without it"
    return None


class Runner:
    """A model stage (``GPTModel``, left in evaluation mode) and the cache of its layers."""

    def __init__(self, model: Any, *, max_length: int) -> None:
        if problem := model_problem(model):
            raise UserError(problem)
        self.model, self.max_length = model.eval(), max_length
        self.batch_invariant = model.config.batch_invariant_mode
        self.groups, self._layout = model.groups, model.layout
        self.device = next(model.parameters()).device
        self.cache = PagedCache(1, 1)
        config = model.config
        self._stream_dtype = torch.float32 if config.fp32_residual_connection else config.params_dtype

    @contextmanager
    def _step_layout(self, layout: CachedLayout) -> Iterator[None]:
        """Context in which the model's micro-batches have ``layout``."""
        self.model.layout = layout
        try:
            yield
        finally:
            self.model.layout = self._layout

    def measure(self, num_tokens: int, page_size: int) -> int:
        """Run ``num_tokens`` tokens of one sequence with a temporary cache; return the bytes per cached token of this
        stage. The peak of the device's memory statistics then includes such a step."""
        pages = -(-num_tokens // page_size)
        self.cache = PagedCache(pages + 1, page_size)
        chunk = Chunk(0, num_tokens, tuple(range(1, pages + 1)))
        self.run(StepPlan([0] * num_tokens, [chunk], [OutputRow(num_tokens - 1, target=0)]))
        needed, self.cache = self.cache.bytes_per_token, PagedCache(1, 1)
        return needed

    @torch.no_grad()
    def run(self, plan: StepPlan) -> Tensor:
        """Run a step; return fp64 [r, 2 + 2 * num_top] on the CPU, equal on all ranks: token (or :data:`FAILED`), its
        log-probability, the most likely tokens, and their log-probabilities."""
        layout = CachedLayout.of_chunks(
            self._layout,
            self.cache,
            plan.chunks,
            [each.row for each in plan.outputs],
            device=self.device,
            max_length=self.max_length,
            row_multiple=ROWS if self.batch_invariant else 1,
            batch_invariant=self.batch_invariant,
        )
        padding = [0] * (layout.num_rows - len(plan.tokens))
        ids = torch.tensor([plan.tokens + padding]).to(self.device, non_blocking=True)
        with self._step_layout(layout):
            output = self._stage(ids, layout)
        results = torch.empty(len(plan.outputs), 2 + 2 * plan.num_top, dtype=torch.float64, device=self.device)
        if self.groups.pp.is_last and plan.outputs:
            results = self._results(self.logits(output, layout), plan)
        if self.groups.pp.size > 1:
            dist.broadcast(results, self.groups.pp.ranks[-1], group=self.groups.pp.handle)
        return results.cpu()

    def _stage(self, ids: Tensor, layout: CachedLayout) -> Tensor:
        """Run this stage's layers; return logits [1, ., v] on the last stage, else the hidden states that were sent."""
        up, rank = self.groups.pp_up, self.groups.pp.rank
        if rank > 0:
            shape = layout.num_rows // layout.stream.size, 1, self.model.config.hidden_size
            received = torch.empty(shape, dtype=self._stream_dtype, device=self.device)
            dist.recv(received, up.ranks[rank - 1], group=up.handle)
            self.model.set_input_tensor(received)
        output = self.model(ids, layout.positions(layout.num_rows, self.device)[None])
        if not self.groups.pp.is_last:
            dist.send(output.contiguous(), up.ranks[rank + 1], group=up.handle)
        return output

    def logits(self, output: Tensor, layout: CachedLayout) -> Tensor:
        """Return the logits [r, stored vocabulary] of the requested rows from the model's output."""
        found = layout.requested_logits(output)
        if self.model.parallel_output:
            found = gather_from_region(found, self.groups.tp)
        return found

    def _results(self, stored: Tensor, plan: StepPlan) -> Tensor:
        """Return the results of :meth:`run` on the last stage."""
        logits = stored[:, : self.model.vocab_size]
        tokens = torch.tensor([-1 if x.target is None else x.target for x in plan.outputs], device=self.device)
        sampled = [number for number, x in enumerate(plan.outputs) if x.sampling is not None]
        if sampled:
            samplings = [plan.outputs[number].sampling for number in sampled]
            positions = [plan.outputs[number].position for number in sampled]
            rows = logits[sampled]
            drawn = draw(rows, [x for x in samplings if x is not None], positions)
            # no error here: other ranks would wait for this one
            tokens[sampled] = drawn.masked_fill(nonfinite_rows(rows), FAILED)
        logprobs = self.logprobs(stored)
        parts = [tokens[:, None], logprobs.gather(1, tokens[:, None].clamp(min=0))]
        if plan.num_top:
            top = logprobs.topk(plan.num_top)
            parts += [top.indices, top.values]
        return torch.cat([each.double() for each in parts], dim=1)

    def logprobs(self, logits: Tensor) -> Tensor:
        """Return raw log-probabilities [r, v] of logits [r, stored vocabulary]: log-softmax in fp32 (fp64 for fp64)."""
        if self.batch_invariant:
            return log_softmax(logits, self.model.vocab_size)
        logits = logits[:, : self.model.vocab_size]
        return logits.log_softmax(-1, dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)
