"""The engine equals a full forward pass for every batch, split into chunks, order of arrival and number of pages."""

import gc
import random

import pytest
import torch

from megatron.core.attention import cached_layout
from megatron.core.config.errors import UserError
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.inference.engine import Engine
from megatron.core.inference.requests import Request
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.scheduler import Limits
from megatron.core.models.adapters.lora import LoraSettings, adapted_layers, add_adapters, merge_adapters
from megatron.core.transformer.moe.replay import record_routes
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from tests.unit_tests.core.models.test_gpt_model import LLAMA, VOCAB, make_model, randomize

ROPE = {"position_embedding_type": "rope"}
LATENT = {
    "multi_latent_attention": True, "kv_lora_rank": 10, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 6,
    "qk_layernorm": True, "rope_type": "rope", "add_bias_linear": False,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rotary_scaling_factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.8, "v_head_dim": 12,
}  # fmt: skip
MODELS = {
    "learned": {},
    "grouped": {**LLAMA, **ROPE, "qk_layernorm": True, "ffn_hidden_size": 22},
    "window": {**ROPE, "window_size": (5, 0), "window_attn_skip_freq": 2},
    "sink": {**ROPE, "window_size": (5, 0), "softmax_type": "learnable", "num_query_groups": 2},
    "soft cap": {**ROPE, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "experts": {**LLAMA, **ROPE, "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 20},
    "latent": {**ROPE, **LATENT, "q_lora_rank": 12},
    "latent without query latent": {**ROPE, **LATENT},
    "latent with window, sink and yarn": {**ROPE, **LATENT, **YARN, "window_size": (5, 0), "softmax_type": "learnable"},
    "tied": {**ROPE, "share_embeddings_and_output_weights": True},
}
LATENT_WINDOW = "latent with window, sink and yarn"
ALL = {"top_logprobs": VOCAB}


def build(name, dtype=torch.float64, **overrides):
    model = make_model(**{**MODELS[name], **overrides}, params_dtype=dtype).eval()
    if dtype == torch.float64:
        randomize(model)
    return model


def engine(model, pages=40, size=4, **limits):
    limits = Limits(**{"max_length": 16, "max_tokens": 5, "max_sequences": 3, **limits})
    return Engine(model, limits, num_pages=pages, page_size=size)


def prompts(lengths=(1, 3, 9, 12, 5, 5)):
    rng = random.Random(7)
    results = [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]
    return [*results, results[2][:8] + [3]]  # the last shares a prefix


@pytest.mark.parametrize(("name", "dtype", "tolerance"), [
    *((name, torch.float64, 1e-10) for name in MODELS),
    *((name, torch.float32, 2e-5) for name in ("latent", LATENT_WINDOW)),
    *((name, torch.bfloat16, 0.1) for name in ("latent", LATENT_WINDOW)),
])  # fmt: skip
def test_every_position_equals_a_full_forward_pass(name, dtype, tolerance):
    model = build(name, dtype)
    sampling = Sampling(temperature=0.9, seed=3)
    requests = [Request(prompt=x, max_new_tokens=4, prompt_logprobs=n % 2 == 0, sampling=sampling, **ALL)
                for n, x in enumerate(prompts())]  # fmt: skip
    for request, finished in zip(requests, engine(model, pages=8).generate(requests), strict=True):
        ids = torch.tensor([[*request.prompt, *finished.tokens]])
        with torch.no_grad():
            logits = model(ids, torch.arange(ids.shape[1])[None])[0, :, :VOCAB]
        expected = logits.double().log_softmax(-1)
        assert len(finished.tokens) == min(4, 17 - len(request.prompt)) and finished.finish_reason == "length"
        assert finished.prompt_scores[:1] == ([None] if request.prompt_logprobs else [])
        scores = [*finished.prompt_scores[1:], *finished.scores]
        first = ids.shape[1] - len(scores)
        for row, score in enumerate(scores, first - 1):
            assert score.token == ids[0, row + 1] and dict(score.top)[score.token] == score.logprob
            actual = torch.empty(VOCAB, dtype=torch.float64)
            actual[[token for token, _ in score.top]] = torch.tensor([x for _, x in score.top], dtype=torch.float64)
            torch.testing.assert_close(actual, expected[row], atol=tolerance, rtol=0)


@pytest.mark.parametrize("merged", [False, True])
def test_adapters_of_latent_up_projections_count_in_generation(merged):
    """The cache holds latents: products with the up projection's weight only would leave the adapter out."""
    model = build("latent")
    settings = LoraSettings(rank=2, scale=1.5, trains_norms=False, seed=1)
    add_adapters(model, lambda name: name.endswith("linear_kv_up_proj"), settings, SINGLE_PROCESS)
    for layer, _, adapter in adapted_layers(model):
        torch.nn.init.normal_(adapter.lora_b)
        assert layer.is_wrapped
    ids = torch.tensor([prompts()[3]])
    with torch.no_grad():
        expected = model(ids, torch.arange(ids.shape[1])[None])[0, :, :VOCAB].log_softmax(-1)
    if merged:
        merge_adapters(model)
    latent = [module for module in model.modules() if isinstance(module, MLASelfAttention)]
    assert [module.absorbs for module in latent] == [merged] * len(latent)
    for count in (12, 9):  # the second prompt decodes after pages of the first
        [finished] = engine(model).generate([Request(prompt=ids[0, :count].tolist(), max_new_tokens=1, **ALL)])
        actual = [dict(finished.scores[0].top)[token] for token in range(VOCAB)]
        torch.testing.assert_close(torch.tensor(actual, dtype=torch.float64), expected[count - 1], atol=1e-10, rtol=0)


def test_log_probabilities_can_be_those_of_the_temperature():
    model, limits = build("grouped"), {"max_tokens": 40}
    common = {"max_new_tokens": 4, "prompt_logprobs": True, **ALL}
    hot, greedy = Sampling(temperature=0.6, seed=1), Sampling(temperature=0)
    kinds = [(hot, True), (hot, False), (greedy, True)]
    requests = [Request(prompt=x, sampling=sampling, logprobs_at_temperature=scaled, **common)
                for x in prompts() for sampling, scaled in kinds]  # fmt: skip
    for request, finished in zip(requests, engine(model, **limits).generate(requests), strict=True):
        ids = torch.tensor([[*request.prompt, *finished.tokens]])
        divisor = 0.6 if request.logprobs_at_temperature and request.sampling.temperature else 1.0
        with torch.no_grad():
            logits = model(ids, torch.arange(ids.shape[1])[None])[0, :, :VOCAB]
        expected = (logits / divisor).log_softmax(-1)
        for row, score in enumerate([*finished.prompt_scores[1:], *finished.scores]):
            assert score.logprob == pytest.approx(float(expected[row, score.token]), abs=1e-10)
            assert score.top[0][1] == pytest.approx(float(expected[row].max()), abs=1e-10)


def test_bf16_logits_are_divided_in_fp32():
    """From the same bf16 logits, once without and once with the temperature; a bf16 quotient is off by 1e-3."""
    model, sampling, scores = build("grouped", torch.bfloat16), Sampling(temperature=0.6, seed=1), []
    for scaled in (False, True):
        request = Request(prompt=[3, 4, 5], max_new_tokens=4, sampling=sampling, logprobs_at_temperature=scaled, **ALL)
        [finished] = engine(model).generate([request])
        rows = [[dict(score.top)[token] for token in range(VOCAB)] for score in finished.scores]
        scores.append(torch.tensor(rows, dtype=torch.float64))
    plain, scaled = scores
    torch.testing.assert_close(scaled, (plain / 0.6).log_softmax(-1), atol=1e-5, rtol=0)


def run(model, seed, extras=False):
    """Run the prompts in random order, steps and pages; return ({prompt: (tokens, scores, routes)}, preemptions).
    ``extras``: scores of every second prompt, and routes of every third."""
    rng, is_moe = random.Random(seed), model.config.num_moe_experts is not None
    limits = {"max_tokens": rng.choice((2, 5, 9, 40)), "max_sequences": rng.choice((1, 2, 5, 9))}
    item = engine(model, rng.choice((6, 9, 40)), **limits)
    pending, numbers, finished = list(enumerate(prompts())), {}, {}
    rng.shuffle(pending)
    while pending or item.has_work:
        for _ in range(rng.choice((0, 1, 3)) if pending else 0):
            if pending:
                index, prompt = pending.pop()
                sampling = Sampling(seed=index)
                request = Request(
                    prompt=prompt, max_new_tokens=4 + index % 3, sampling=sampling, **ALL,
                    prompt_logprobs=extras and index % 2 == 0, return_routes=extras and is_moe and index % 3 == 0,
                )  # fmt: skip
                numbers[item.add(request)] = index
        for output in item.step() if item.has_work else ():
            if output.completion.finish_reason:
                finished[numbers[output.request]] = output.completion
    assert item.pool.num_free == item.pool.num_usable
    scores = {index: (x.tokens, [*x.prompt_scores[1:], *x.scores], x.routes) for index, x in finished.items()}
    return scores, item.scheduler.num_preemptions


@pytest.mark.parametrize("name", ["grouped", "experts"])
def test_tokens_do_not_depend_on_arrival_chunks_and_preemption(name):
    model = build(name)
    results = [run(model, seed, extras=True) for seed in range(9)]
    for finished, _ in results:
        for index, prompt in enumerate(prompts()):
            tokens, scores, routes = finished[index]
            # by one forward pass over prompt and text
            ids = torch.tensor([[*prompt, *tokens]])
            with torch.no_grad(), record_routes([model]) as recorded:
                rows = model(ids, torch.arange(ids.shape[1])[None])[0, :, :VOCAB].log_softmax(-1)
            first = ids.shape[1] - len(scores)
            assert first == (1 if index % 2 == 0 else len(prompt))
            for position, score in enumerate(scores, first):
                assert score.token == ids[0, position]
                assert score.logprob == pytest.approx(float(rows[position - 1, score.token]), abs=1e-10)
            assert bool(routes) == (name == "experts" and index % 3 == 0)
            for layer, experts in routes.items():
                expected = recorded[layer][0][:, 0]
                assert len(expected) - len(experts) in (0, 1)
                assert experts.sort(-1).values.equal(expected[: len(experts)].sort(-1).values)
            assert tokens == results[0][0][index][0]
    assert sum(preemptions for _, preemptions in results[1:])


@pytest.mark.parametrize("name", ["grouped", "sink", "experts", "latent"])
def test_batch_invariant_log_probabilities_are_equal_bit_for_bit(name):
    """Scores hold the full row of each token, so that every bit of a row is compared."""
    model, other = (build(name, torch.float32, ffn_hidden_size=24, batch_invariant_mode=x) for x in (True, False))
    first, *remaining = 9, 5, 2  # chunks of 40, 9 and 2 tokens of at most 5, 5 and 1 sequences
    expected, _ = run(model, first)
    assert all(run(model, seed)[0] == expected for seed in remaining)
    changing, _ = run(other, first)
    assert any(run(other, seed)[0] != changing for seed in remaining), "another order of sums would be found"


@pytest.mark.parametrize("name", ["grouped", "sink", "soft cap", "latent", LATENT_WINDOW])
def test_the_paged_kernel_gives_the_tokens_of_gathered_keys(name, monkeypatch):
    model, calls = build(name, torch.float32), []
    expected, _ = run(model, 0)
    kernel = cached_layout.paged_attention

    def counted(query, *args, **kwargs):
        calls.append(len(query))
        return kernel(query, *args, **kwargs)

    monkeypatch.setattr(cached_layout, "_kernel_serves", lambda query: True)
    monkeypatch.setattr(cached_layout, "paged_attention", counted)
    for index, (tokens, scores, _) in run(model, 0)[0].items():
        assert tokens == expected[index][0]
        assert [x.logprob for x in scores] == pytest.approx([x.logprob for x in expected[index][1]], abs=1e-4)
    assert max(calls) > 1


@pytest.mark.parametrize(("batch_invariant", "dtype"), [(False, torch.float64), (True, torch.float32)])
def test_few_tokens_attend_to_latents_without_expanding_the_history(batch_invariant, dtype):
    model = build("latent", dtype, ffn_hidden_size=24, batch_invariant_mode=batch_invariant)
    item = engine(model, pages=160, max_length=260, max_tokens=200, max_sequences=2)
    expanded, outputs = [], {}
    hook = model.decoder.layers[0].self_attention.linear_kv_up_proj.register_forward_pre_hook(
        lambda _, inputs: expanded.append(len(inputs[0]))
    )
    document = [7 * place % VOCAB for place in range(165)]
    item.generate([Request(prompt=document[:161], max_new_tokens=3)])
    assert expanded[0] >= 161 and bool(expanded[1:]) == batch_invariant
    expanded.clear()
    # five more tokens after a cached prefix of 160, next to a new prompt
    requests = [Request(prompt=x, max_new_tokens=2, **ALL) for x in ([1] * 9, document)]
    numbers = [item.add(request) for request in requests]
    while item.has_work:
        outputs |= {x.request: x.completion for x in item.step()}
    assert batch_invariant or expanded == [9]
    hook.remove()
    for number, request in zip(numbers, requests):
        ids = torch.tensor([[*request.prompt, *outputs[number].tokens]])
        with torch.no_grad():
            expected = model(ids, torch.arange(ids.shape[1])[None])[0, :, :VOCAB].log_softmax(-1)
        for row, score in enumerate(outputs[number].scores, len(request.prompt) - 1):
            error = abs(score.logprob - float(expected[row, score.token]))
            assert error < (1e-10 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("name", ["grouped", "window", "latent"])
def test_few_tokens_after_a_cached_prefix_read_pages_by_the_kernel(name, monkeypatch):
    model, rows, kernel = build(name, torch.float32), [], cached_layout.paged_attention

    def counted(query, *args, **kwargs):
        rows.append(len(query))
        return kernel(query, *args, **kwargs)

    monkeypatch.setattr(cached_layout, "_kernel_serves", lambda query: True)
    monkeypatch.setattr(cached_layout, "paged_attention", counted)
    item = engine(model, pages=80, max_length=180, max_tokens=200, max_sequences=2)
    document = [7 * place % VOCAB for place in range(165)]
    item.generate([Request(prompt=document[:161], max_new_tokens=1)])
    assert rows == []
    new, finished = item.generate([Request(prompt=x, max_new_tokens=1, **ALL) for x in ([1] * 9, document)])
    assert set(rows) == {5}
    for prompt, completion in (([1] * 9, new), (document, finished)):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            expected = model(ids, torch.arange(len(prompt))[None])[0, -1, :VOCAB].log_softmax(-1)
        assert completion.scores[0].logprob == pytest.approx(float(expected[completion.scores[0].token]), abs=1e-4)


def test_a_stop_token_ends_the_text_without_being_part_of_it():
    model = build("grouped")
    greedy = Sampling(temperature=0)
    (free,) = engine(model).generate([Request(prompt=[1, 2], max_new_tokens=8, sampling=greedy)])
    stop = free.tokens[3]
    (finished,) = engine(model).generate(
        [Request(prompt=[1, 2], max_new_tokens=8, sampling=greedy, stop_tokens=[stop])]
    )
    end = free.tokens.index(stop)
    assert finished.tokens == free.tokens[:end] and finished.finish_reason == "stop"
    assert [score.token for score in finished.scores] == free.tokens[: end + 1]


def test_a_text_ends_at_the_maximum_length():
    (finished,) = engine(build("learned")).generate([Request(prompt=[1] * 10, max_new_tokens=50)])
    assert len(finished.tokens) == 6 and finished.finish_reason == "length"


def test_a_prompt_can_be_scored_without_generating():
    request = Request(prompt=[1] * 7, max_new_tokens=0, prompt_logprobs=True, top_logprobs=2)
    (finished,) = engine(build("learned")).generate([request])
    assert [len(score.top) for score in finished.prompt_scores[1:]] == [2] * 6
    assert finished.tokens == [] and len(finished.prompt_scores) == 7 and finished.finish_reason == "length"


def test_a_cancelled_request_frees_its_pages():
    item = engine(build("learned"))
    numbers = [item.add(Request(prompt=[1] * 9)) for _ in range(5)]
    item.step()
    for number in (*numbers, 99):
        item.cancel(number)
    assert not item.has_work and item.pool.num_free == item.pool.num_usable


@pytest.mark.parametrize("end", ["failed", "rejected", "left"])
def test_an_early_end_leaves_no_requests_in_the_engine(end):
    """Otherwise the next call computes them, too. Logits are not finite, a request is rejected, or the caller stops."""
    model = build("learned", torch.float32)
    model.embedding.word_embeddings.weight.data[9] = torch.nan
    prompts = {"failed": [[9], [1, 2]], "rejected": [[1, 2], [1] * 99], "left": [[1], [1, 2]]}[end]
    item = engine(model)
    with pytest.raises(RuntimeError if end == "left" else UserError):
        for _ in item.completions([Request(prompt=prompt, max_new_tokens=9 - len(prompt)) for prompt in prompts]):
            raise RuntimeError
    gc.collect()
    assert not item.has_work and item.pool.num_free == item.pool.num_usable


@pytest.mark.parametrize("free_memory", [False, True])
def test_a_discarded_cache_has_no_keys_of_former_weights(free_memory):
    model, other = build("grouped"), build("grouped", seed=8)
    requests = [Request(prompt=[*[1] * 11, n], max_new_tokens=3, sampling=Sampling(seed=n)) for n in range(3)]
    expected = [x.scores for x in engine(other).generate(requests)]
    item = engine(model, max_tokens=2)
    item.generate(requests)
    numbers, finished = [item.add(request) for request in requests], {}
    assert item.step() == [] and item.scheduler.running[0].num_cached == 10  # 8 by its prefix
    model.load_state_dict(other.state_dict())
    item.discard_cache(free_memory=free_memory)
    assert item.pool.num_free == item.pool.num_usable and bool(item.runner.cache._tensors) != free_memory
    while item.has_work:
        finished |= {x.request: x.completion for x in item.step()}
    assert [x.logprob for number in numbers for x in finished[number].scores] == pytest.approx(
        [x.logprob for scores in expected for x in scores], abs=1e-10
    )


def test_an_equal_prompt_is_computed_once():
    item = engine(build("learned"), max_tokens=16)
    counts = []
    for _ in range(2):
        item.add(Request(prompt=[1] * 11, max_new_tokens=1))
        counts.append(item.scheduler.plan()[0][1])
        item.scheduler.computed(item.scheduler.running[0], counts[-1])
        item.scheduler.append(item.scheduler.running[0], 1)
    assert counts == [11, 3]


def test_number_of_pages_is_bounded_by_the_limits():
    item = Engine(build("latent"), Limits(max_length=16, max_sequences=3), page_size=4)
    assert item.pool.num_usable == 3 * 4
    assert item.runner.measure(5, 4) == 2 * (10 + 4) * 8  # the latent and the rope key of two layers


@pytest.mark.parametrize(("fields", "message"), [
    ({"prompt": [VOCAB]}, f"token {VOCAB} is outside of the vocabulary of {VOCAB}"), ({"prompt": [-1]}, "token -1"),
    ({"prompt": [1], "top_logprobs": VOCAB + 1}, "top_logprobs 51: must be between 0 and 50"),
])  # fmt: skip
def test_a_request_that_the_model_cannot_serve_is_rejected(fields, message):
    with pytest.raises(UserError, match=message):
        engine(build("learned")).add(Request(**fields))


def test_layers_that_cannot_cache_are_named():
    model = build("learned")
    layer = model.decoder.layers[0]

    class Mixer(type(layer.self_attention)):
        def forward(self, hidden_states, ctx):
            return super().forward(hidden_states, ctx)

    layer.self_attention.__class__ = Mixer
    with pytest.raises(UserError, match=r"generation with a cache is not supported by .*Mixer"):
        engine(model)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("name", "batch_invariant"), [
    *((name, False) for name in MODELS if name != "tied"), ("learned", True), ("latent", True),
])  # fmt: skip
def test_a_request_with_logits_that_are_not_finite_does_not_end_the_others(name, batch_invariant, device):
    """Two tokens have NaN embeddings, mostly 0, which also fills padding rows. Prompts share a first page with failing
    ones, fail in their scores, fail in the second chunk, or reuse freed pages with NaN keys."""
    fields = {"batch_invariant_mode": True, "ffn_hidden_size": 24} if batch_invariant else {}
    model = build(name, torch.float32, **fields).to(device)
    greedy, shared = Sampling(temperature=0), [3, 4, 5, 6]
    healthy = [[*shared, 9], [*shared, 7, 8, 9], [2, 1], [5, 4, 3, 2, 1, 6]]
    expected = engine(model).generate([Request(prompt=x, max_new_tokens=4, sampling=greedy) for x in healthy])
    used = {token for prompt, finished in zip(healthy, expected) for token in (*prompt, *finished.tokens)}
    low, bad = sorted(set(range(VOCAB)) - used)[:2]
    model.embedding.word_embeddings.weight.data[[low, bad]] = torch.nan
    poisoned = [[low], [*shared, bad], [*shared, 7, 8, bad], [bad, *shared, 1, 2], [bad, 3]]
    requests = [Request(prompt=x, max_new_tokens=4, prompt_logprobs=n % 2 == 1, sampling=greedy, top_logprobs=1)
                for n, x in enumerate([*poisoned, *healthy])]  # fmt: skip
    rng = random.Random(name)
    for pages in (7,) if batch_invariant else (7, 40):
        service, finished = engine(model, pages, max_tokens=rng.choice((2, 6, 40))), {}
        numbers = {service.add(requests[index]): index for index in rng.sample(range(len(requests)), len(requests))}
        while service.has_work:
            for output in service.step():
                if output.completion.finish_reason:
                    assert numbers[output.request] not in finished
                    finished[numbers[output.request]] = output.completion
        assert len(finished) == len(requests) and service.pool.num_free == service.pool.num_usable
        for index, completion in finished.items():
            if index < len(poisoned):
                assert (completion.finish_reason, completion.tokens) == ("failed", []), requests[index].prompt
            else:
                assert completion.tokens == expected[index - len(poisoned)].tokens, requests[index].prompt
        assert service.pool.match([bad, *shared, 1, 2]) == []
    with pytest.raises(UserError, match="logits are NaN or infinite"):
        service.generate(requests)
