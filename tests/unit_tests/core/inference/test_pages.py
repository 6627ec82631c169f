"""Pages and scheduling: prefixes are shared and evicted, no page is lost, the oldest sequence always advances."""

import random

import pytest

from megatron.core.attention.sequence_states import SlotPool
from megatron.core.config.errors import UserError
from megatron.core.inference.pages import FIRST, PagePool, page_key
from megatron.core.inference.requests import Request
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.scheduler import Limits, Scheduler, Sequence


def publish(pool, tokens):
    """Allocate and publish the full pages of ``tokens``; return all its pages."""
    pages, key = [], FIRST
    for start in range(0, len(tokens), pool.page_size):
        pages.append(pool.allocate())
        if len(ids := tokens[start : start + pool.page_size]) == pool.page_size:
            key = pool.publish(pages[-1], key, ids)
    return pages


def test_an_equal_prefix_shares_its_full_pages_and_leaves_a_token():
    pool = PagePool(9, 2)
    pages = publish(pool, [1, 2, 3, 4, 5])
    assert pool.match([1, 2, 3, 4, 9]) == pages[:2]
    assert pool.match([1, 2, 3, 4]) == pages[:1]  # the last token is computed
    assert pool.match([9, 2, 3, 4, 5]) == [] and pool.match([1, 2, 4, 3, 5]) == pages[:1]


def test_released_pages_serve_until_they_are_reused_ends_first():
    pool = PagePool(4, 2)
    pages = publish(pool, [1, 2, 3, 4, 5])
    pool.release(pages)
    assert pool.num_free == 3
    assert [pool.allocate() for _ in range(2)] == [pages[2], pages[1]]  # the unfinished page, then the end
    assert pool.match([1, 2, 3, 4, 5]) == pages[:1]
    assert pool.allocate() is None


def test_pages_without_content_are_reused_first():
    pool = PagePool(4, 2)
    published, unpublished = publish(pool, [1, 2, 3, 4]), pool.allocate()
    pool.release(published)
    pool.release([unpublished])
    assert [pool.allocate() for _ in range(3)] == [unpublished, *published[::-1]]


def test_tokens_are_compared_besides_their_hash(monkeypatch):
    pool = PagePool(9, 2)
    monkeypatch.setattr("megatron.core.inference.pages.page_key", lambda previous, tokens: b"equal")
    publish(pool, [1, 2])
    assert pool.match([3, 4, 5]) == [] and len(pool.match([1, 2, 5])) == 1


def test_keys_depend_on_all_earlier_tokens():
    first, second = page_key(FIRST, [1, 2]), page_key(FIRST, [2, 1])
    assert len({first, second, page_key(first, [1, 2]), page_key(second, [1, 2])}) == 4


def build(pages=12, size=4, **limits):
    return Scheduler(PagePool(pages, size), Limits(**{"max_length": 32, "max_tokens": 9, "max_sequences": 5, **limits}))


def test_a_thousand_random_requests_leak_no_page():
    scheduler, rng = build(), random.Random(0)
    usable = scheduler.pool.num_usable
    for number in range(1000):
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, 31))]
        most, scored = rng.randint(0, 20), number % 5 == 0
        request = Request(prompt=prompt, max_new_tokens=most, stop_tokens=[0], prompt_logprobs=scored)
        scheduler.add(Sequence(number, request, list(prompt), Sampling(seed=0)))
        for _ in range(rng.choice((0, 0, 5))):
            step(scheduler, rng)
        stored = {page for item in scheduler.running for page in item.pages}
        assert scheduler.pool.num_free + len(stored) == usable
        if scheduler.running and rng.random() < 0.05:
            scheduler.finish(rng.choice(scheduler.running), "cancelled")
    while scheduler.running or scheduler.waiting:
        step(scheduler, rng)
    assert scheduler.pool.num_free == usable and scheduler.num_preemptions > 10


def step(scheduler, rng):
    chunks = scheduler.plan()
    assert sum(count for _, count in chunks) <= scheduler.limits.max_tokens
    assert not scheduler.running or chunks, "no progress"
    assert all(len(item.pages) * 4 >= item.num_cached + count for item, count in chunks)
    for sequence, count in chunks:
        scheduler.computed(sequence, count)
        if sequence.num_cached == len(sequence.ids):
            scheduler.append(sequence, rng.randrange(9) if sequence.request.max_new_tokens else None)


def test_the_newest_sequence_is_preempted_and_waits_first():
    scheduler = build(pages=5, max_tokens=40)
    for number in range(3):
        request = Request(prompt=[number] * 4, max_new_tokens=8)
        scheduler.add(Sequence(number, request, [number] * 4, Sampling(seed=0)))
    for _ in range(6):
        for sequence, count in scheduler.plan():
            scheduler.computed(sequence, count)
            scheduler.append(sequence, 9)
    assert [item.number for item in scheduler.running] == [0]
    assert [item.number for item in scheduler.waiting] == [1, 2]


@pytest.mark.parametrize(("request_", "message"), [
    (Request(prompt=[]), "prompt is empty"), (Request(prompt=[1] * 33), "33 tokens, the model takes 32"),
    (Request(prompt=[1] * 8, max_new_tokens=9), "17 tokens, the cache has room for 16"),
])  # fmt: skip
def test_a_request_that_can_never_run_is_rejected(request_, message):
    with pytest.raises(UserError, match=message):
        build(pages=5).add(Sequence(0, request_, list(request_.prompt), Sampling(seed=0)))


def test_pages_and_states_of_a_failed_sequence_are_not_reused():
    pool, slots = PagePool(9, 2), SlotPool(2, 4)
    scheduler = Scheduler(pool, Limits(16), slots)
    scheduler.add(Sequence(0, Request(prompt=[1, 2, 3]), [1, 2, 3], Sampling(seed=0)))
    [(sequence, count)] = scheduler.plan()
    scheduler.states(sequence, count)
    scheduler.computed(sequence, count)
    [key] = sequence.keys
    assert slots.find(key) is not None
    scheduler.fail(sequence)
    assert slots.find(key) is None and pool.match([1, 2, 9]) == []
