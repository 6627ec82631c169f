"""Recorded steps give the bits of eager ones, for every batch, order of arrival and kind of draw.

On a CPU the recorded operations are replayed on the tensors that they had (``tests/test_utils/tape.py``), with
attention in torch operations.
"""

import random

import numpy as np
import pytest
import torch
from torch.nn.functional import pad

from megatron.core.attention import cached_layout
from megatron.core.inference import graphs
from megatron.core.inference.engine import Engine
from megatron.core.inference.graphs import StepGraphs, graph_problem
from megatron.core.inference.requests import Request
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.scheduler import Limits
from megatron.core.inference.step import decode_size
from tests.test_utils.kernels import DEVICE
from tests.test_utils.tape import record_tape, run_as_on_a_device
from tests.unit_tests.core.inference.test_engine import LATENT_WINDOW, MODELS, build, prompts

SETTINGS = [
    {"temperature": 0}, {}, {"temperature": 0.7, "top_k": 3}, {"top_p": 0.8}, {"top_k": 9, "top_p": 0.5},
]  # fmt: skip


def gathered_attention(query, keys, values, rows, *, scale, left=None, soft_cap=None, sink=None):
    """Paged attention in operations whose shapes do not depend on lengths."""
    keys = torch.cat((values, keys), -1) if query.shape[2] > keys.shape[3] else keys
    tables = pad(rows.tables, (0, 4 - rows.tables.shape[1]))[rows.sequences]  # 16 tokens: equal orders of sums
    k, v = (x[tables].flatten(1, 2).repeat_interleave(query.shape[1] // x.shape[2], 2) for x in (keys, values))
    scores = torch.einsum("nad,ntad->nat", query, k) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    place = torch.arange(k.shape[1], device=query.device)
    hidden = place > rows.positions[:, None]
    if left is not None:
        hidden = hidden | (place < rows.positions[:, None] - left)
    scores = scores.masked_fill(hidden[:, None], float("-inf"))
    if sink is not None:
        scores = torch.cat([scores, sink.to(scores)[None, :, None].expand(len(query), -1, 1)], 2)
    return torch.einsum("nat,ntae->nae", scores.softmax(-1)[..., : k.shape[1]], v)


def write_entries(keys, values, slots, key, value):
    for pool, x in ((keys, key), (values, value)):
        pool.flatten(0, 1).index_copy_(0, slots, x)


@pytest.fixture
def as_on_a_device(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(cached_layout, "_kernel_serves", lambda query: True)
        monkeypatch.setattr(cached_layout, "paged_attention", gathered_attention)
        monkeypatch.setattr(cached_layout, "write_pages", write_entries)
        run_as_on_a_device(monkeypatch)


def run(model, seed, make_graphs, **options):
    """Run the prompts in random order with all kinds of draws; return (completions, shapes, preemptions)."""
    rng = random.Random(seed)
    limits = Limits(max_length=16, max_tokens=rng.choice((9, 40)), max_sequences=rng.choice((2, 5, 9)))
    engine = Engine(model, limits, num_pages=rng.choice((8, 40)), page_size=4, cuda_graphs=False, **options)
    engine.runner.graphs, engine.runner.pads_prompts = make_graphs and make_graphs(engine.runner.device), True
    pending, numbers, finished = list(enumerate(prompts() * 2)), {}, {}
    rng.shuffle(pending)
    kinds = SETTINGS if seed % 2 else SETTINGS[:1]
    while pending or engine.has_work:
        if pending and (not engine.has_work or rng.random() < 0.3):
            index, prompt = pending.pop()
            sampling = Sampling(**kinds[index % len(kinds)], seed=index)
            routed = model.config.num_moe_experts is not None and index % 2 == 0
            request = Request(
                prompt=prompt, max_new_tokens=5 + index % 4, sampling=sampling, top_logprobs=seed % 3,
                logprobs_at_temperature=index % 3 == 0, return_routes=routed,
            )  # fmt: skip
            numbers[engine.add(request)] = index
        for output in engine.step() if engine.has_work else ():
            if output.completion.finish_reason:
                finished[numbers[output.request]] = output.completion
    shapes = set() if engine.runner.graphs is None else set(engine.runner.graphs._steps)
    result = {
        index: (x.tokens, x.scores, {layer: y.tolist() for layer, y in x.routes.items()})
        for index, x in finished.items()
    }
    return result, shapes, engine.scheduler.num_preemptions


def recorded(device):
    return StepGraphs(device, record_tape if DEVICE == "cpu" else None)


@pytest.mark.parametrize("name", ["learned", "grouped", "window", "sink", "latent", LATENT_WINDOW])
def test_recorded_steps_equal_eager_ones_bit_for_bit(name, as_on_a_device):
    model, results = build(name, torch.float32).to(DEVICE), []
    for seed in range(3):
        expected, _, _ = run(model, seed, None)
        results.append(run(model, seed, recorded))
        assert results[-1][0] == expected
    shapes = {shape for _, item, _ in results for shape in item}
    assert {(rows, outputs) for rows, outputs, *_ in shapes} >= {(1, 1), (2, 2), (4, 4), (64, 8)}
    assert {form.draws.is_random for *_, form in shapes} == {False, True}
    assert sum(preemptions for *_, preemptions in results)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["grouped", "window", "sink", "soft cap", "experts", "latent", LATENT_WINDOW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_graphs_equal_eager_steps_bit_for_bit(name, dtype):
    model = build(name, dtype).cuda()
    if graph_problem(model) is not None:
        assert name == "experts"
        return
    for seed in range(2):
        expected, _, _ = run(model, seed, None)
        actual, shapes, _ = run(model, seed, lambda device: StepGraphs(device))
        assert actual == expected and shapes


def test_the_least_recently_used_graph_is_deleted(monkeypatch):
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    recordings = []

    def record(run, stream):
        recordings.append(run)
        return run

    steps = StepGraphs(torch.device("cpu"), record)
    for shape, count in ((1, 1), (2, 2), (1, 2), (3, 3), (1, 3), (2, 4)):
        values = np.full(shape, shape)
        (result,) = steps.run(shape, values, lambda x: (2 * x,))
        assert torch.equal(result, torch.from_numpy(2 * values))
        assert len(recordings) == count and steps.num_graphs <= 2


@pytest.mark.gpu
def test_steps_that_nobody_waits_for_read_their_own_inputs():
    """As the chunks of a long prompt, which have no results before the last one."""
    steps, total = StepGraphs(torch.device("cuda")), torch.zeros(3, dtype=torch.int64, device="cuda")
    steps.run("shape", np.array([1, 1, 1]), lambda x: (total.add_(x),))
    torch.cuda._sleep(2 * 10**8)  # longer than the host needs for all steps
    for number in range(1, 5):
        steps.run("shape", np.full(3, 10**number), lambda x: (total.add_(x),))
    assert total.tolist() == [11111] * 3


@pytest.mark.parametrize("name", ["grouped", "latent"])
def test_recorded_common_steps_are_those_that_requests_run(name, as_on_a_device):
    model = build(name, torch.float32).to(DEVICE)
    limits = Limits(max_length=70, max_sequences=9)
    for samplings in ([Sampling(temperature=0)], [Sampling(seed=3), Sampling(temperature=0)]):
        engine = Engine(model, limits, num_pages=90, page_size=16, cuda_graphs=False)
        engine.runner.graphs, engine.runner.pads_prompts = recorded(engine.runner.device), True
        count = engine.record_graphs()
        assert count == engine.runner.graphs.num_graphs == 2 * len({1, 2, 4, 8, 16, "prompt of 64"})
        requests = [Request(prompt=x, max_new_tokens=3 + n, sampling=samplings[n % len(samplings)])
                    for n, x in enumerate(prompts())]  # fmt: skip
        results = engine.generate(requests)
        assert engine.runner.graphs.num_graphs == count
        eager = Engine(model, limits, num_pages=90, page_size=16, cuda_graphs=False).generate(requests)
        assert [x.tokens for x in results] == [x.tokens for x in eager]


@pytest.mark.parametrize("name", MODELS)
def test_models_on_a_cpu_run_eagerly(name, caplog):
    with caplog.at_level("INFO"):
        engine = Engine(build(name), Limits(max_length=16), num_pages=8, page_size=4)
    if DEVICE == "cpu":
        assert engine.runner.graphs is None and "runs without CUDA graphs: the model is on cpu" in caplog.text


def test_decode_sizes_are_few_and_close():
    sizes = [decode_size(count) for count in range(1, 1025)]
    assert all(count <= size for count, size in enumerate(sizes, 1)) and len(set(sizes)) <= 60
    assert all(size <= 1.15 * count or size - count < 8 for count, size in enumerate(sizes, 1))
    assert sizes[:9] == [1, 2, 4, 4, 8, 8, 8, 8, 16]
