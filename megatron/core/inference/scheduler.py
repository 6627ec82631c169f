"""Scheduling of requests: which tokens run in the next step, and which pages hold their keys.

A step has at most ``max_tokens`` tokens: one per decoding sequence, and chunks of prompts. Sequences run in the order
of their arrival. If no page is free, the newest running sequence is preempted: it loses its pages, returns to the front
of the queue and is recomputed. The oldest always advances, because a request that needs more pages than there are
is rejected."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from megatron.core.attention.sequence_states import UNUSED, ZERO, SlotPool, StateSlots
from megatron.core.config.errors import UserError
from megatron.core.inference.images import PlacedImages
from megatron.core.inference.pages import FIRST, PagePool, page_key
from megatron.core.inference.requests import Completion, FinishReason, Request
from megatron.core.inference.sampling import Sampling


@dataclass(eq=False)
class Sequence:
    """A request in progress."""

    number: int
    request: Request
    ids: list[int]
    """Prompt and generated tokens."""
    sampling: Sampling
    """The request's, with a seed."""
    num_cached: int = 0
    """Leading tokens whose keys are in ``pages``."""
    pages: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    """Keys of its full cached pages."""
    slot: int = UNUSED
    """Slot of its state; models without states use none."""
    state: int = ZERO
    """Slot of the state after its cached tokens: its slot, or a snapshot before its first step."""
    newest: bytes | None = None
    """Key of its newest snapshot of generated tokens, which the next one replaces."""
    completion: Completion = field(default_factory=Completion)
    images: PlacedImages | None = None

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def key_ids(self) -> list[int]:
        """``ids`` for keys of pages: equal tokens of different images differ."""
        return self.ids if self.images is None else [*self.images.key_ids, *self.ids[self.num_prompt :]]


@dataclass(frozen=True)
class Limits:
    """Maximum sizes of steps and sequences."""

    max_length: int
    """Maximum length of a sequence, prompt included."""
    max_tokens: int = 8192
    """Maximum number of tokens of a step."""
    max_sequences: int = 256
    """Maximum number of running sequences."""


class Scheduler:
    """Waiting and running sequences, and their pages. ``slots``: of states, for models that keep them."""

    def __init__(self, pool: PagePool, limits: Limits, slots: SlotPool | None = None) -> None:
        self.pool, self.limits, self.slots = pool, limits, slots
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Append to the queue. Raises UserError for a request that can never run."""
        request, limits = sequence.request, self.limits
        if not sequence.ids:
            raise UserError("the prompt is empty: give at least one token (for example the end-of-document token)")
        if len(sequence.ids) > limits.max_length:
            raise UserError(
                f"the prompt has {len(sequence.ids)} tokens, the model takes {limits.max_length}: give a shorter one"
            )
        max_length = min(len(sequence.ids) + request.max_new_tokens, limits.max_length)
        if self.pool.pages_for(max_length) > self.pool.num_usable:
            available = self.pool.num_usable * self.pool.page_size
            raise UserError(
                f"max_new_tokens {request.max_new_tokens}: prompt and text may have {max_length} tokens, the cache has "
                f"room for {available}; lower it, or give the cache more pages"
            )
        self.waiting.append(sequence)

    def plan(self) -> list[tuple[Sequence, int]]:
        """Return the sequences of the next step with their numbers of new tokens, in the order of arrival; allocates
        the pages. Empty if nothing is left to do."""
        if self.slots is not None:
            self.slots.begin_step()
        budget, chunks = self.limits.max_tokens, []
        preemptions = self.num_preemptions
        index = 0
        while index < len(self.running):  # preemption takes sequences from the end
            sequence = self.running[index]
            index += 1
            count = self._count(sequence, budget)
            if not count:
                continue
            while not self._grow(sequence, count):
                newest = self.running[-1]
                self._preempt(newest)
                if newest is sequence:
                    break
            else:
                chunks.append((sequence, count))
                budget -= count
        if preemptions == self.num_preemptions:  # else a waiting sequence would take the pages that were just freed
            chunks += self._admit(budget)
        return chunks

    def _admit(self, budget: int) -> list[tuple[Sequence, int]]:
        chunks = []
        while self.waiting and budget and len(self.running) < self.limits.max_sequences:
            sequence = self.waiting[0]
            request = sequence.request
            if not (request.prompt_logprobs or request.return_routes):  # those need every token's forward pass
                sequence.pages = self._with_snapshot(sequence, self.pool.match(sequence.key_ids))
                sequence.keys = list(map(self.pool.stored_key, sequence.pages))
                sequence.num_cached = len(sequence.pages) * self.pool.page_size
            count = self._count(sequence, budget)
            if not self._grow(sequence, count):
                self._free(sequence)
                break
            if self.slots is not None:
                sequence.slot = self.slots.allocate()
            self.running.append(self.waiting.popleft())
            chunks.append((sequence, count))
            budget -= count
        return chunks

    def _count(self, sequence: Sequence, budget: int) -> int:
        """Return the tokens of ``sequence`` in a step: all, or with states up to its last full page (a snapshot)."""
        start, size = sequence.num_cached, self.pool.page_size
        count = min(budget, len(sequence.ids) - start)
        last = len(sequence.ids) // size * size
        return last - start if self.slots is not None and start < last < start + count else count

    def _with_snapshot(self, sequence: Sequence, pages: list[int]) -> list[int]:
        """Return the longest prefix of ``pages`` with a snapshot, from which ``sequence`` starts; release the others.
        All pages for models without states."""
        if self.slots is None:
            return pages
        for count in range(len(pages), 0, -1):
            if (slot := self.slots.find(self.pool.stored_key(pages[count - 1]))) is not None:
                sequence.state = slot
                break
        else:
            count = 0
        self.pool.release(pages[count:])
        return pages[:count]

    def states(self, sequence: Sequence, count: int) -> StateSlots:
        """Return the slots of the next ``count`` tokens of ``sequence``. Ends of full pages become snapshots."""
        if self.slots is None:
            return StateSlots()
        size, stop = self.pool.page_size, sequence.num_cached + count
        snapshot = UNUSED
        if stop % size == 0:
            key = sequence.keys[-1] if sequence.keys else FIRST
            ids = sequence.key_ids
            for number in range(len(sequence.keys), stop // size):
                key = page_key(key, ids[number * size : (number + 1) * size])
            if stop > sequence.num_prompt:
                if sequence.newest is not None:
                    self.slots.replace(sequence.newest)
                sequence.newest = key
            snapshot = self.slots.snapshot(key)
        return StateSlots(sequence.state, sequence.slot, snapshot)

    def _grow(self, sequence: Sequence, count: int) -> bool:
        """Allocate pages for ``count`` more tokens; return whether there were enough."""
        total = sequence.num_cached + count
        if total <= len(sequence.pages) * self.pool.page_size:
            return True
        missing = self.pool.pages_for(total) - len(sequence.pages)
        if missing > self.pool.num_free:
            return False
        for _ in range(missing):
            page = self.pool.allocate()
            assert page is not None
            sequence.pages.append(page)
        return True

    def _free(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        sequence.pages, sequence.keys, sequence.num_cached = [], [], 0
        if self.slots is not None and sequence.slot != UNUSED:
            self.slots.release(sequence.slot)
        sequence.slot, sequence.state = UNUSED, ZERO

    def discard_pages(self) -> None:
        """Preempt all running sequences, and forget the contents of all pages."""
        while self.running:
            self._preempt(self.running[-1])
        self.pool.unpublish()
        if self.slots is not None:
            self.slots.withdraw()

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free(sequence)
        sequence.completion.route_parts.clear()
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def computed(self, sequence: Sequence, count: int) -> None:
        """Record that the keys of ``count`` more tokens are in the pages; publish those that became full."""
        size, ids = self.pool.page_size, sequence.key_ids
        sequence.num_cached += count
        sequence.state = sequence.slot
        for number in range(len(sequence.keys), sequence.num_cached // size):
            tokens = ids[number * size : (number + 1) * size]
            previous = sequence.keys[-1] if sequence.keys else FIRST
            sequence.keys.append(self.pool.publish(sequence.pages[number], previous, tokens))

    def append(self, sequence: Sequence, token: int | None) -> None:
        """Append a sampled token (None: there is nothing to sample); finish the sequence if it ends here."""
        request, completion = sequence.request, sequence.completion
        if token is not None and token in request.stop_tokens:
            self.finish(sequence, "stop")
            return
        if token is not None:
            sequence.ids.append(token)
            completion.tokens.append(token)
        if len(completion.tokens) >= request.max_new_tokens or len(sequence.ids) >= self.limits.max_length:
            self.finish(sequence, "length")

    def fail(self, sequence: Sequence) -> None:
        """End a running sequence whose logits are not finite. No other sequence reuses its cached pages."""
        self.pool.withdraw(sequence.keys)
        if self.slots is not None:
            self.slots.withdraw(sequence.keys)
        self.finish(sequence, "failed")

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a running or waiting sequence and release its pages."""
        sequence.completion.finish_reason = reason
        self._free(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
