"""Execution of one step of generation: token ids in, sampled tokens and log-probabilities out.

Every rank of the program runs the same step. A pipeline stage receives hidden states from the previous stage and sends
its output to the next one; the last stage samples and broadcasts the results over the pipeline. Tensor- and
expert-parallel ranks communicate inside the layers, as in training.

Legend: n rows (new tokens), r rows with logits, v vocabulary without padding, h hidden."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.attention.cached_layout import CachedLayout, Chunk, PagedCache
from megatron.core.attention.sequence_states import NUM_RESERVED, StateCache
from megatron.core.config.errors import UserError
from megatron.core.fusions.batch_invariant_product import ROWS
from megatron.core.inference.graphs import StepGraphs, graph_problem
from megatron.core.inference.sampling import draw
from megatron.core.inference.step import (
    OutputRow,
    StepForm,
    StepPlan,
    StepTensors,
    pack,
    power_of_two,
    step_arrays,
    unpack,
)
from megatron.core.tensor_parallel.batch_invariant import log_softmax
from megatron.core.tensor_parallel.operators import gather_from_region
from megatron.core.transformer.context_parallel_support import cache_problem
from megatron.core.transformer.moe.replay import Routes, record_routes

logger = logging.getLogger(__name__)

FAILED = -1
"""Token of a row whose logits are not finite."""


def model_problem(model: Any) -> str | None:
    """Return why ``model`` cannot generate with a cache; None if it can."""
    if problem := cache_problem(model):
        return f"generation with a cache {problem}"
    if (size := model.groups.cp.size) > 1:
        return f"context_parallel_size {size}: is not supported in generation; load the checkpoint with 1"
    if (factor := model.config.moe_expert_capacity_factor) is not None:
        return f"moe_expert_capacity_factor {factor}: drops tokens that depend on other requests; generate without it"
    return None


def keeps_states(model: torch.nn.Module) -> bool:
    """Return whether a mixer of ``model`` keeps a state per sequence (:class:`CacheSpec`)."""
    specs = (getattr(module, "cache_spec", None) for module in model.modules())
    return any(spec is not None and bool(spec.per_sequence) for spec in specs)


class Runner:
    """A model stage (``GPTModel``, left in evaluation mode) and the cache of its layers."""

    def __init__(self, model: Any, *, max_length: int, cuda_graphs: bool = True) -> None:
        if problem := model_problem(model):
            raise UserError(problem)
        self.model, self.max_length = model.eval(), max_length
        self.batch_invariant = model.config.batch_invariant_mode
        self.groups, self._layout = model.groups, model.layout
        self.device = next(model.parameters()).device
        self.cache, self.states = PagedCache(1, 1), StateCache(NUM_RESERVED)
        config = model.config
        self._stream_dtype = torch.float32 if config.fp32_residual_connection else config.params_dtype
        self.pads_prompts = self.device.type == "cuda"
        """Whether steps with short prompts are padded to one of few sizes."""
        self.graphs: StepGraphs | None = None
        """Recorded steps; None: all steps run eagerly."""
        if cuda_graphs and (reason := graph_problem(model)):
            logger.info("generation runs without CUDA graphs: %s", reason)
        elif cuda_graphs:
            self.graphs = StepGraphs(self.device)

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
    def run(self, plan: StepPlan) -> tuple[Tensor, Tensor]:
        """Run a step; return two tensors on the CPU, equal on all ranks.

        - fp64 [r, 2 + 2 * num_top]: token (or :data:`FAILED`), its log-probability, the most likely tokens, and their
          log-probabilities.
        - With ``has_routes`` int32 [layers, n, k], the experts of each row; -1 in layers without experts.

        Decode steps and, on GPUs, short prompts are padded to one of few sizes, and replayed if there are CUDA
        graphs."""
        num_rows, num_outputs, is_decode = len(plan.tokens), len(plan.outputs), plan.is_decode
        short = is_decode or (self.pads_prompts and plan.is_short)
        plan = plan.padded(math.lcm(ROWS if self.batch_invariant else 1, self._layout.stream.size), short=short)
        size, rows = self.cache.page_size, len(plan.tokens)
        replays = self.graphs is not None and short and plan.only_samples and plan.images is None
        tables = {"num_pages": -(-self.max_length // size), "num_sequences": rows} if replays else {}
        arrays, form = step_arrays(plan, size, direct=short, **tables)
        if replays:
            splits, unit = arrays["splits"], (16 if is_decode else 4) * rows
            capacity = unit * power_of_two(-(-len(splits) // unit))
            arrays["splits"] = np.pad(splits, (0, capacity - len(splits)))
        inputs = {} if plan.images is None else self.model.step_inputs(plan.images, rows)
        compute = partial(self._compute, plan.chunks, arrays, form, inputs)
        if self.graphs is not None and replays:
            shape = rows, len(plan.outputs), capacity, form
            results, routes = self.graphs.run(shape, pack(arrays), compute)
        else:
            results, routes = compute(torch.from_numpy(pack(arrays)).to(self.device, non_blocking=True))
        return results[:num_outputs].cpu(), routes[:, :num_rows].cpu()

    def _compute(
        self,
        chunks: Sequence[Chunk],
        arrays: Mapping[str, np.ndarray],
        form: StepForm,
        inputs: Mapping[str, Any],
        values: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the results of :meth:`run` on the device from packed ``arrays`` and the model's ``inputs``."""
        step = unpack(values, arrays)
        layout = CachedLayout.of_indices(
            self._layout,
            self.cache,
            chunks,
            step.indices,
            max_length=self.max_length,
            batch_invariant=self.batch_invariant,
            state_cache=self.states,
        )
        no_routes: AbstractContextManager[Routes] = nullcontext({})
        with record_routes([self.model]) if form.has_routes else no_routes as routes:
            output = self._stage(step.ids, layout, inputs)
        count = len(step.targets)
        results = torch.empty(count, 2 + 2 * form.num_top, dtype=torch.float64, device=self.device)
        if self.groups.pp.is_last and count:
            results = self._results(self.logits(output, layout), step, form)
        if self.groups.pp.size > 1:
            dist.broadcast(results, self.groups.pp.ranks[-1], group=self.groups.pp.handle)
        return results, self._all_routes(routes, layout.num_rows, form)

    def _all_routes(self, routes: Routes, num_rows: int, form: StepForm) -> Tensor:
        """Return the routes of the layers of all stages, int32 [layers, n, k]."""
        config = self.model.config
        size = config.num_layers * form.has_routes, num_rows, config.moe_router_topk
        experts_lnk = torch.full(size, -1, dtype=torch.int32, device=self.device)
        for layer, (experts,) in routes.items():
            experts_lnk[layer - 1] = experts[:, 0]
        if form.has_routes and self.groups.pp.size > 1:
            dist.all_reduce(experts_lnk, op=dist.ReduceOp.MAX, group=self.groups.pp.handle)
        return experts_lnk

    def _stage(self, ids: Tensor, layout: CachedLayout, inputs: Mapping[str, Any]) -> Tensor:
        """Run this stage's layers; return logits [1, ., v] on the last stage, else the hidden states that were sent."""
        up, rank = self.groups.pp_up, self.groups.pp.rank
        if rank > 0:
            shape = layout.num_rows // layout.stream.size, 1, self.model.config.hidden_size
            received = torch.empty(shape, dtype=self._stream_dtype, device=self.device)
            dist.recv(received, up.ranks[rank - 1], group=up.handle)
            self.model.set_input_tensor(received)
        positions = layout.positions(layout.num_rows, self.device)[None]
        output = self.model(ids, positions, packed_seq_params=layout, **inputs)
        if not self.groups.pp.is_last:
            dist.send(output.contiguous(), up.ranks[rank + 1], group=up.handle)
        return output

    def logits(self, output: Tensor, layout: CachedLayout) -> Tensor:
        """Return the logits [r, stored vocabulary] of the requested rows from the model's output."""
        logits = layout.requested_logits(output)
        if self.model.parallel_output:
            logits = gather_from_region(logits, self.groups.tp)
        return logits

    def _results(self, stored: Tensor, step: StepTensors, form: StepForm) -> Tensor:
        """Return the results of :meth:`run` on the last stage, from logits [r, stored vocabulary]."""
        tokens, logits = step.targets, stored[:, : self.model.vocab_size]
        if form.num_sampled == len(tokens):
            tokens = draw(logits, step.draws, form.draws)
        elif form.num_sampled:
            drawn = draw(logits.index_select(0, step.sampled), step.draws, form.draws)
            tokens = tokens.index_copy(0, step.sampled, drawn)
        if form.has_divisors:
            stored = stored.to(torch.promote_types(stored.dtype, torch.float32))
            stored = stored / step.divisors.to(stored.dtype)[:, None]
        logprobs = self.logprobs(stored)
        chosen = logprobs.gather(1, tokens[:, None])
        # a row with NaN, +inf or only -inf has NaN; no error here: other ranks would wait for this one
        tokens = tokens.masked_fill((step.targets < 0) & chosen[:, 0].isnan(), FAILED)
        parts = [tokens[:, None], chosen]
        if form.num_top:
            if form.num_top == 1:  # topk may return any of equally likely tokens, greedy sampling takes the first
                values, indices = logprobs.max(-1, keepdim=True)
            else:
                values, indices = logprobs.topk(form.num_top)
            parts += [indices, values]
        return torch.cat([part.double() for part in parts], dim=1)

    def logprobs(self, logits: Tensor) -> Tensor:
        """Return log-probabilities [r, v] of logits [r, stored vocabulary]: log-softmax in fp32 (fp64 for fp64)."""
        if self.batch_invariant:
            return log_softmax(logits, self.model.vocab_size)
        logits = logits[:, : self.model.vocab_size]
        return logits.log_softmax(-1, dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)
