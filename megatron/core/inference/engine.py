"""Generation with continuous batching: requests join and leave the batch between steps.

    engine = Engine(model, Limits(max_length=4096))
    completions = engine.generate([Request(prompt=ids, max_new_tokens=64)])

    number = engine.add(request)          # or one step at a time
    while engine.has_work:
        for output in engine.step(): ...

Results of a request do not depend on the other requests, except for rounding: draws are functions of the request's
seed and the token's position. With several ranks each builds the engine; rank 0 schedules and broadcasts the plan of
each step, the other ranks call ``follow`` (``generate`` does)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.attention.cached_layout import Chunk, PagedCache
from megatron.core.attention.sequence_states import SlotPool, StateCache
from megatron.core.config.errors import UserError
from megatron.core.inference.images import PlacedImages, step_images
from megatron.core.inference.pages import PagePool
from megatron.core.inference.requests import Completion, Output, Request, TokenScore
from megatron.core.inference.runner import Runner, keeps_states
from megatron.core.inference.scheduler import Limits, Scheduler
from megatron.core.inference.scheduler import Sequence as Running
from megatron.core.inference.step import OutputRow, StepPlan, common_plans

PAGE_SIZE = 256
"""Tokens of a page of the cache."""
MEMORY_SHARE = 0.9
"""Share of a GPU's memory for weights, activations and cache."""
CPU_CACHE_BYTES = 2**30
"""Memory of the cache on a CPU; more if one sequence of the largest length needs more."""


class Engine:
    """Generates with ``model``, a ``GPTModel`` or one of its pipeline stages.

    Args:
        num_pages: pages of ``page_size`` tokens in the cache; one page is reserved. None: as many as fit into the
            memory (a CPU: 1 GiB), at most what ``limits`` can use.
        cuda_graphs: record steps as CUDA graphs where possible (``graphs.py``). Results are the same.
        on_step: called on every rank before and after each step that it computes, and at each sign of life.

    With ``batch_invariant_mode`` in the model's configuration, a token's log-probabilities have the bits of the
    trainer's forward pass in every batch, and for every split of its prompt into steps."""

    def __init__(
        self,
        model: Any,
        limits: Limits,
        *,
        num_pages: int | None = None,
        page_size: int = PAGE_SIZE,
        cuda_graphs: bool = True,
        on_step: Callable[[], None] | None = None,
    ) -> None:
        self._on_step = on_step or (lambda: None)
        self.runner = Runner(model, max_length=limits.max_length, cuda_graphs=cuda_graphs)
        self._world = model.groups.world
        self.slots = SlotPool(limits.max_sequences, 2 * limits.max_sequences) if self._keeps_states() else None
        if num_pages is None:
            num_pages = self._fitting_pages(limits, page_size)
        if num_pages < 2:
            raise UserError(f"num_pages {num_pages}: must be at least 2; free memory, or lower page_size {page_size}")
        self.runner.cache = PagedCache(num_pages, page_size)
        self.pool = PagePool(num_pages, page_size)
        self.scheduler = Scheduler(self.pool, limits, self.slots)
        if self.slots is not None:
            self.runner.states = StateCache(self.slots.num_slots)
        self._next = 0
        self._vision = getattr(model, "vision_settings", None)

    def _keeps_states(self) -> bool:
        """Return whether layers on any rank keep states of sequences. Collective."""
        has_states = torch.tensor(float(keeps_states(self.runner.model)), device=self.runner.device)
        if self._world.size > 1:
            dist.all_reduce(has_states, op=dist.ReduceOp.MAX, group=self._world.handle)
        return bool(has_states)

    def _fitting_pages(self, limits: Limits, page_size: int) -> int:
        """Return the number of pages that fit into the memory of every rank, at most what ``limits`` can use."""
        device, pages_per_sequence = self.runner.device, -(-limits.max_length // page_size)
        if device.type != "cuda":
            needed = self.runner.measure(1, page_size) * page_size
            available = max(CPU_CACHE_BYTES, needed * pages_per_sequence)
        else:
            torch.cuda.reset_peak_memory_stats(device)
            needed = self.runner.measure(min(limits.max_tokens, limits.max_length), page_size) * page_size
            free, total = torch.cuda.mem_get_info(device)
            cached = torch.cuda.memory_reserved(device)
            available = int(total * MEMORY_SHARE) - (total - free - cached) - torch.cuda.max_memory_allocated(device)
            available -= 0 if self.slots is None else self.slots.num_slots * self.runner.states.bytes_per_slot
        fitting = torch.tensor(max(available, 0) // max(needed, 1), device=device)
        if self._world.size > 1:
            dist.all_reduce(fitting, op=dist.ReduceOp.MIN, group=self._world.handle)
        return 1 + min(int(fitting), limits.max_sequences * pages_per_sequence)

    # ---- requests

    def add(self, request: Request) -> int:
        """Queue ``request`` and return its number. Call it on rank 0. UserError if it can never run."""
        vocabulary = self.runner.model.vocab_size
        if wrong := [token for token in request.prompt if not 0 <= token < vocabulary]:
            raise UserError(f"prompt: token {wrong[0]} is outside of the vocabulary of {vocabulary}")
        if not 0 <= request.top_logprobs <= vocabulary:
            raise UserError(f"top_logprobs {request.top_logprobs}: must be between 0 and {vocabulary}")
        if request.return_routes and self.runner.model.config.num_moe_experts is None:
            raise UserError("return_routes: the model has no experts; remove it")
        running = Running(self._next, request, list(request.prompt), sampling=request.sampling.seeded())
        running.images = self._placed(request)
        self.scheduler.add(running)
        self._next += 1
        if request.prompt_logprobs:
            running.completion.prompt_scores.append(None)
        return running.number

    def _placed(self, request: Request) -> PlacedImages | None:
        """Return the images of ``request`` at their tokens."""
        if request.images is None or not len(request.images.sizes):
            return None
        model = self.runner.model
        if self._vision is None:
            raise UserError("images: the model reads text only; remove them")
        if model.config.batch_invariant_mode:
            raise UserError("images: are not supported with batch_invariant_mode; remove it")
        return PlacedImages(request.prompt, request.images, self._vision.image_token_id)

    def cancel(self, number: int) -> None:
        """End request ``number`` and free its pages; nothing if it has ended."""
        scheduler = self.scheduler
        for running in (*scheduler.running, *scheduler.waiting):
            if running.number == number:
                scheduler.finish(running, "cancelled")

    def discard_cache(self, *, free_memory: bool = False) -> None:
        """Discard all cached keys, because the weights have changed; running requests compute theirs again. Call it on
        every rank between steps.

        ``free_memory``: also free the cache and CUDA graphs, for training. The next steps allocate and record them
        again, as is necessary if parameters have other memory (``rl/host_copy.py``)."""
        self.scheduler.discard_pages()
        if free_memory:
            self.runner.cache = PagedCache(self.pool.num_pages, self.pool.page_size)
            self.runner.states = StateCache(self.runner.states.num_slots)
            if self.runner.graphs is not None:
                self.runner.graphs.clear()

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """Return the completions of ``requests`` in order (empty on ranks other than 0). Collective."""
        return list(self.stream(requests))

    def stream(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Yield the results of :meth:`generate`, each as soon as it and all before it are complete. Collective."""
        if not self.is_first_rank:
            self.follow()
            return
        try:
            yield from self.completions(requests)
        finally:
            self.stop()

    def completions(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Yield the completions of ``requests`` in their order, each as soon as it and all before it are complete. Call
        it on rank 0. Raises UserError if the logits of a request are not finite. Cancels the rest after an error, or if
        the caller stops."""
        numbers: list[int] = []
        completed: dict[int, Completion] = {}
        try:
            numbers += map(self.add, requests)
            for number in numbers:
                while number not in completed:
                    completed |= {x.request: x.completion for x in self.step() if x.completion.finish_reason}
                completion = completed.pop(number)
                completion.check()
                yield completion
        finally:
            for number in numbers:
                self.cancel(number)

    # ---- steps

    def record_graphs(self) -> int:
        """Record CUDA graphs of the common steps, which otherwise happens in the first step of each size (about 0.1 s);
        return the number of graphs. Call it on rank 0."""
        graphs, limits = self.runner.graphs, self.scheduler.limits
        if graphs is None:
            return 0
        max_tokens = min(limits.max_tokens, limits.max_length)
        for plan in common_plans(limits.max_sequences, max_tokens, self.pool.page_size):
            self.run_plan(plan)
        return graphs.num_graphs

    def step(self) -> list[Output]:
        """Run one step on all ranks; return the progress of the requests that got a token or ended. A request whose
        logits are not finite fails, the others continue. Call it on rank 0 while :attr:`has_work`."""
        batch = self.scheduler.plan()
        assert batch, "step() without work"
        planned = [
            (running, Chunk(running.num_cached, count, tuple(running.pages), self.scheduler.states(running, count)))
            for running, count in batch
        ]
        planned.sort(key=lambda item: not item[1].is_direct)  # these read pages, if they are at the front
        plan, owners = self._plan(planned)
        results, routes = self.run_plan(plan)
        for running, chunk in planned:
            self.scheduler.computed(running, chunk.num_new)
        if plan.has_routes:
            parts = routes.split([chunk.num_new for chunk in plan.chunks], dim=1)
            for (running, _), part in zip(planned, parts):
                if running.request.return_routes:
                    running.completion.route_parts.append(part)
        outputs = []
        for (running, samples), values in zip(owners, results):
            if running.completion.finish_reason is not None:  # a row before has failed
                continue
            if any(map(math.isnan, values)):
                self.scheduler.fail(running)
                outputs.append(Output(running.number, None, running.completion))
                continue
            score = _score(values, running.request.top_logprobs)
            if not samples:
                running.completion.prompt_scores.append(score)
                continue
            running.completion.scores.append(score)
            before = len(running.ids)
            self.scheduler.append(running, score.token)
            outputs.append(
                Output(running.number, score.token if len(running.ids) > before else None, running.completion)
            )
        for running, _ in batch:
            is_complete = running.completion.finish_reason is not None
            if not is_complete and not running.request.max_new_tokens and running.num_cached == len(running.ids):
                self.scheduler.append(running, None)
                outputs.append(Output(running.number, None, running.completion))
        return outputs

    def run_plan(self, plan: StepPlan) -> tuple[list[list[float]], Tensor]:
        """Run ``plan`` on all ranks and return the results of :meth:`Runner.run`. Call it on rank 0."""
        if self._world.size > 1:
            self._broadcast(plan.encode())
        results, routes = self._run(plan)
        return results.tolist(), routes

    def _run(self, plan: StepPlan) -> tuple[Tensor, Tensor]:
        self._on_step()
        results = self.runner.run(plan)
        self._on_step()
        return results

    def _plan(self, planned: Sequence[tuple[Running, Chunk]]) -> tuple[StepPlan, list[tuple[Running, bool]]]:
        """Return the inputs of a step, and for each output row its sequence and whether it samples."""
        tokens: list[int] = []
        rows, owners = [], []
        for running, chunk in planned:
            first, ids, request = len(tokens), running.ids, running.request
            start, stop = chunk.start, chunk.stop
            divisor = request.sampling.temperature or 1.0 if request.logprobs_at_temperature else 1.0
            tokens += ids[start:stop]
            if request.prompt_logprobs:
                scored = running.completion.prompt_scores  # a preempted sequence has some already
                for place in range(max(start, len(scored) - 1), min(stop, running.num_prompt - 1)):
                    rows.append(OutputRow(first + place - start, ids[place + 1], divisor=divisor))
                    owners.append((running, False))
            if stop == len(ids) and request.max_new_tokens:
                rows.append(OutputRow(len(tokens) - 1, None, running.sampling, stop, divisor))
                owners.append((running, True))
        num_top = max((running.request.top_logprobs for running, _ in owners), default=0)
        has_routes = any(running.request.return_routes for running, _ in planned)
        images = step_images([(running.images, chunk.start, chunk.stop) for running, chunk in planned])
        return StepPlan(tokens, [chunk for _, chunk in planned], rows, num_top, has_routes, images), owners

    # ---- ranks

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank schedules."""
        return self._world.is_first

    @property
    def num_ranks(self) -> int:
        """Number of ranks that run each step."""
        return self._world.size

    def follow(self) -> None:
        """Run the steps of rank 0 until it calls :meth:`stop`."""
        while (values := self._broadcast(None)) is not None:
            if values:
                self._run(StepPlan.decode(values))
            else:
                self._count_ranks()

    def keep_alive(self) -> None:
        """Exchange a sign of life with ranks that wait for requests: collectives time out. Waits for every rank."""
        self._broadcast({})
        self._count_ranks()

    def _count_ranks(self) -> None:
        self._on_step()
        if self._world.size > 1:
            ones = torch.ones(1, device=self.runner.device)
            dist.all_reduce(ones, group=self._world.handle)
            assert int(ones) == self._world.size

    def stop(self) -> None:
        """End :meth:`follow` on the other ranks."""
        self._broadcast(None)

    def _broadcast(self, values: dict[str, Any] | None) -> dict[str, Any] | None:
        """Broadcast a plan (None: stop) from rank 0 as JSON and return it."""
        if self._world.size == 1:
            return values
        source, device = self._world.ranks[0], self.runner.device
        data = torch.frombuffer(bytearray(json.dumps(values).encode()), dtype=torch.uint8).to(device)
        length = torch.tensor([len(data)], device=device)
        dist.broadcast(length, source, group=self._world.handle)
        if not self._world.is_first:
            data = torch.empty(int(length), dtype=torch.uint8, device=device)
        dist.broadcast(data, source, group=self._world.handle)
        return json.loads(data.cpu().numpy().tobytes())


def _score(values: Sequence[float], num_top: int) -> TokenScore:
    """Return the score in a row of :meth:`Runner.run`'s results, with ``num_top`` of its most likely tokens."""
    if not num_top:
        return TokenScore(int(values[0]), values[1])
    half = (len(values) - 2) // 2
    top = tuple((int(token), logprob) for token, logprob in zip(values[2:], values[2 + half :]))[:num_top]
    return TokenScore(int(values[0]), values[1], top)
