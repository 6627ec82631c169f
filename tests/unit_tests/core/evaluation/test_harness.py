"""The harness's model interface equals the harness's own for transformers (``HFLM``) on the same folders."""

import importlib.util
import inspect
import json
import logging
import random
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron.core.config.errors import UserError
from megatron.core.evaluation import tasks
from megatron.core.evaluation.harness import build_adapter
from megatron.core.inference.engine import Engine
from megatron.core.inference.scheduler import Limits
from megatron.core.tokenizers.huggingface import build_huggingface
from megatron.training.trained_model import load_trained_model
from tests.test_utils.hf_folders import tiny_llama
from tests.test_utils.tiny_tokenizers import byte_fallback_bpe, byte_level_bpe
from tests.unit_tests.core.inference.test_engine import build

pytest.importorskip("lm_eval")
transformers = pytest.importorskip("transformers")
BPE_SPECIALS = ("<|endoftext|>", "<s>", "<|x|>")


def reference_adapter(folder):
    """``HFLM`` over a folder. It imports accelerate, which it uses only for models that it loads itself."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    absent = importlib.util.find_spec("accelerate") is None
    if absent and "lm_eval.models.huggingface" not in sys.modules:
        package, utils = ModuleType("accelerate"), ModuleType("accelerate.utils")
        package.Accelerator = package.InitProcessGroupKwargs = package.find_executable_batch_size = None
        utils.get_max_memory = None
        sys.modules |= {"accelerate": package, "accelerate.utils": utils}
        try:
            from lm_eval.models.huggingface import HFLM
        finally:
            del sys.modules["accelerate"], sys.modules["accelerate.utils"]
    from lm_eval.models.huggingface import HFLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(folder), batch_size=1)


def make_pair(folder):
    """(The adapter, HFLM, the tokenizer) of a folder."""
    trained = load_trained_model(str(folder), None, "tools/generate.py")
    engine = Engine(trained.model, Limits(trained.cfg.data.seq_length, 50), num_pages=60, page_size=8)
    return build_adapter(engine, trained.tokenizer), reference_adapter(folder), trained.tokenizer


def write_tokenizer(kind, folder):
    """Write a tokenizer into ``folder``; return its vocabulary size."""
    if kind == "byte fallback":
        byte_fallback_bpe(folder)
    else:
        byte_level_bpe(folder / "tokenizer.json", 400, special=BPE_SPECIALS)
        config = '{"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}'
        (folder / "tokenizer_config.json").write_text(config.replace("}", ', "bos_token": "<s>"}'))
    return transformers.AutoTokenizer.from_pretrained(folder).vocab_size


@pytest.fixture(scope="module", params=["byte level", "byte fallback"])
def random_pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("random")
    vocab_size = write_tokenizer(request.param, tmp_path_factory.mktemp("tokenizer"))
    tiny_llama(folder, vocab_size)  # into an empty folder
    write_tokenizer(request.param, folder)
    return make_pair(folder)


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """A folder whose model writes ``b😀cSTOP<|x|>d</s>``… after ``A``; all other tokens are equally likely."""
    folder = tmp_path_factory.mktemp("chain")
    size = write_tokenizer("byte level", folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = [x for part in ("A", "b", "😀", "c", "S", "T", "O", "P", "<|x|>", "d", "<|endoftext|>", "e", "f")
           for x in tokenizer.encode(part, add_special_tokens=False)]  # fmt: skip
    config = transformers.LlamaConfig(
        vocab_size=size, hidden_size=-(-size // 8) * 8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=64, bos_token_id=1, eos_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight[:, :size].fill_diagonal_(1.0)
        for before, after in zip(ids, ids[1:]):
            model.lm_head.weight[after, before] = 2.0
    model.save_pretrained(folder)
    return make_pair(folder)


def instances(*arguments):
    return [SimpleNamespace(args=argument, task_name="tiny") for argument in arguments]


def random_text(rng, max_length):
    parts = ["the", " cat", " c", "at", " ", "  ", "\n", "é", "中😀", "x", ".", "<s>", "on"]
    return "".join(rng.choice(parts) for _ in range(rng.randrange(max_length)))


def test_likelihoods_equal_those_of_the_harness(random_pair):
    adapter, reference, _ = random_pair
    rng, pairs = random.Random(1), []
    while len(pairs) < 60:
        context, continuation = random_text(rng, rng.choice((3, 12, 60))), random_text(rng, 6)
        if not continuation or (context and not context.strip()):
            continue  # HFLM raises IndexError or AssertionError
        encoded = reference._encode_pair(context, continuation) if context else ([1], [1, 1])
        if encoded[1] and len(encoded[1]) < 60 and (context or continuation != "<s>"):
            pairs.append((context, continuation))
    expected = reference.loglikelihood(instances(*pairs), disable_tqdm=True)
    actual = adapter.loglikelihood(instances(*pairs), disable_tqdm=True)
    assert [x for x, _ in actual] == pytest.approx([x for x, _ in expected], rel=1e-5)
    assert [x for _, x in actual] == [x for _, x in expected]
    assert len({round(x, 3) for x, _ in actual}) > 40


def test_steps_score_no_more_tokens_than_the_limit(random_pair, monkeypatch):
    adapter, _, _ = random_pair
    counts, run_plan = [], Engine.run_plan
    monkeypatch.setattr(Engine, "run_plan", lambda self, plan: counts.append(len(plan.tokens)) or run_plan(self, plan))
    rng = random.Random(5)
    adapter.loglikelihood_rolling(instances(*((random_text(rng, 30) + "x",) for _ in range(12))), disable_tqdm=True)
    assert max(counts) == 50 and sum(counts) > 150  # Limits(..., 50) of make_pair


def test_caches_get_the_results_as_in_the_harness(random_pair):
    adapter, reference, _ = random_pair

    def cached(model, method, *arguments):
        calls = []
        model.cache_hook = SimpleNamespace(add_partial=lambda *values: calls.append(values))
        getattr(model, method)(instances(arguments), disable_tqdm=True)
        return calls

    text = ("generate_until", "the", {"max_gen_toks": 3, "until": []})
    assert cached(adapter, *text) == cached(reference, *text)
    for scored in (("loglikelihood", "the", " cat"), ("loglikelihood_rolling", "the cat")):
        [(name, key, actual)], [(expected_name, expected_key, expected)] = (
            cached(model, *scored) for model in (adapter, reference)
        )
        assert (name, key) == (expected_name, expected_key) and actual == pytest.approx(expected, rel=1e-5)


def test_defaults_are_those_of_the_harness(random_pair):
    adapter, reference, _ = random_pair
    assert adapter.max_gen_toks == reference.max_gen_toks
    for method in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
        parameter, expected = (
            inspect.signature(getattr(model, method)).parameters["disable_tqdm"] for model in (adapter, reference)
        )
        assert parameter.default == expected.default


def test_a_missing_package_is_one_message(monkeypatch):
    monkeypatch.setattr(tasks, "is_installed", lambda name: False)
    with pytest.raises(UserError, match="evaluation: needs the package lm_eval, which is not installed"):
        build_adapter(None, None)


def test_documents_equal_those_of_the_harness(random_pair):
    adapter, reference, _ = random_pair
    rng = random.Random(2)
    texts = [(random_text(rng, max_length),) for max_length in (1, 2, 10, 60, 100, 300)]
    expected = reference.loglikelihood_rolling(instances(*texts), disable_tqdm=True)
    actual = adapter.loglikelihood_rolling(instances(*texts), disable_tqdm=True)
    assert actual == pytest.approx(expected, rel=1e-5) and actual[-1] < -100


LIMITS = [{"max_gen_toks": 6}, {"max_new_tokens": 5}, {"max_tokens": 7}, {"max_completion_tokens": 4}, {},
          {"max_gen_toks": 3, "max_new_tokens": 9}, {"max_gen_toks": "8"}, {"max_length": 40, "max_gen_toks": 24},
          {"max_tokens": 5, "max_completion_tokens": 2}]  # fmt: skip
RANDOMNESS = [{}, {"do_sample": False}, {"do_sample": False, "temperature": 1}, {"temperature": 0},
              {"do_sample": False, "temperature": 0.0}, {"temperature": 0.0, "top_p": 0.9}]  # fmt: skip


def random_settings(rng, stops):
    settings = {**rng.choice(LIMITS), **rng.choice(RANDOMNESS)}
    until = rng.choice([[], None, *stops, stops, [stops[0]]])
    settings |= {} if until is None else {"until": until}
    if "max_gen_toks" not in settings and not settings.keys() & {"max_new_tokens", "max_tokens"}:
        settings["max_completion_tokens"] = 9  # the default of 256 is beyond the model's length
    return settings


def test_greedy_texts_equal_those_of_the_harness(random_pair):
    adapter, reference, _ = random_pair
    rng, jobs = random.Random(3), []
    for _ in range(40):
        context = random_text(rng, rng.choice((3, 10, 40)))
        if context.startswith("<s>") or not reference.tok_encode(context):
            continue  # HFLM cannot generate after no token; texts with BOS are in another test
        if "max_length" in (settings := random_settings(rng, ["e", "at", " c", "\n", "a"])):
            context = context[:12]
        jobs.append((context, settings))
    expected = reference.generate_until(instances(*jobs), disable_tqdm=True)
    actual = adapter.generate_until(instances(*jobs), disable_tqdm=True)
    assert [x for x in zip(jobs, actual, expected) if x[1] != x[2]] == [] and len(set(actual)) > 8


def test_a_context_with_bos_gets_no_second_one(random_pair):
    adapter, reference, tokenizer = random_pair
    for text in ("<s>the cat", "the cat", "<s>"):
        assert adapter.tok_encode(text) == reference.tok_encode(text)
        assert adapter.tok_encode(text, add_special_tokens=False) == reference.tok_encode(text, False)
    jobs = instances(("<s>the cat", {"max_gen_toks": 9, "until": []}))
    assert adapter.generate_until(jobs) == reference.generate_until(jobs, disable_tqdm=True)
    assert adapter.prefix_token_id == reference.prefix_token_id == tokenizer.bos
    assert adapter.eot_token_id == reference.eot_token_id


@pytest.mark.parametrize("special", [("</s>", "<s>"), ("</s>",), ("<|endoftext|>", "<s>", "[CLS]", "<bos>")])
@pytest.mark.parametrize("config", [
    {}, {"bos_token": None}, {"bos_token": "<s>"}, {"bos_token": "</s>"}, {"bos_token": "<new>"},
    {"bos_token": {"__type": "AddedToken", "content": "<s>"}},
], ids=str)  # fmt: skip
def test_the_prefix_token_is_named_by_the_files_as_in_the_harness(tmp_path, special, config):
    """A token with a usual name, such as ``<s>``, is not bos by its name."""
    byte_level_bpe(tmp_path / "tokenizer.json", 300, special=special)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": special[0], **config}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    foreign, local = transformers.AutoTokenizer.from_pretrained(tmp_path), build_huggingface(str(tmp_path))
    prefix = foreign.eos_token_id if foreign.bos_token_id is None else foreign.bos_token_id  # HFLM.prefix_token_id
    engine = Engine(build("grouped", vocab_size=local.vocab_size), Limits(16, 50), num_pages=20, page_size=8)
    assert build_adapter(engine, local).prefix_token_id == local.prefix_id == prefix


def test_answers_end_with_the_end_token_and_stop_strings_and_lack_special_tokens(chain):
    adapter, reference, _ = chain
    rng = random.Random(4)
    jobs = [("A", {"max_gen_toks": 14, "until": until, **extra})
            for until in ([], ["zz"], ["P"], ["STO"], ["c", "😀"], ["<|x|>"], "d", ["OP<|x|>"], ["😀c"], ["cS", "b"],
                          ["TO", "STO"], ["STO", "TO"])
            for extra in ({}, {"do_sample": False, "temperature": 1})]  # fmt: skip
    jobs += [("A" if rng.random() < 0.5 else "A" * 70, random_settings(rng, ["S", "TO", "c"])) for _ in range(20)]
    jobs = [(context, x) for context, x in jobs if context == "A" or "max_length" not in x]
    jobs.append(("Ab", {"max_gen_toks": 14, "until": ["b", "b😀"]}))  # the context ends with them
    expected = reference.generate_until(instances(*jobs), disable_tqdm=True)
    actual = adapter.generate_until(instances(*jobs), disable_tqdm=True)
    assert [x for x in zip(jobs, actual, expected) if x[1] != x[2]] == []
    assert actual[:4] == ["b😀cSTOPd"] * 4 and actual[10] == "b😀cSTOP"
    assert (actual[20], actual[22], actual[-1]) == ("b😀cS", "b😀c", "😀cSTOPd")


def test_answers_end_with_every_end_token_that_the_model_names(chain, monkeypatch):
    """Such as a second one in generation_config.json: only the tokenizer's own is a stop string of the harness."""
    adapter, reference, tokenizer = chain
    ends = [tokenizer.eod, tokenizer.tokenize("<|x|>")[0]]
    monkeypatch.setattr(tokenizer, "model_end_ids", ends)
    monkeypatch.setattr(reference.model.generation_config, "eos_token_id", ends)
    jobs = instances(("A", {"max_gen_toks": 14, "until": []}), ("A", {"max_gen_toks": 4, "until": []}))
    expected = reference.generate_until(jobs, disable_tqdm=True)
    assert adapter.generate_until(jobs) == expected == ["b😀cSTOP", "b😀"]


def test_equally_likely_tokens_are_greedy_only_if_generation_takes_them(chain):
    adapter, reference, _ = chain
    pairs = [("A", "b😀cSTOP"), ("A", "bc"), ("zz", "!"), ("zz", "a"), ("zz", "<|endoftext|>"), ("A", "b<|x|>")]
    expected = reference.loglikelihood(instances(*pairs), disable_tqdm=True)
    actual = adapter.loglikelihood(instances(*pairs), disable_tqdm=True)
    assert [greedy for _, greedy in actual] == [greedy for _, greedy in expected]
    assert [x for x, _ in actual] == pytest.approx([x for x, _ in expected], rel=1e-5)
    assert {greedy for _, greedy in actual[2:5]} == {True, False}


def test_a_continuation_that_merges_into_the_context_is_scored_by_its_text(random_pair):
    adapter, _, tokenizer = random_pair
    words = [word[:end] for word in ("the cat", "The quick", "def read", "file") for end in range(2, len(word) + 1)]
    context, continuation = next(
        (word[:-1], word[-1])
        for word in words
        if len(tokenizer.tokenize(word)) <= len(tokenizer.tokenize(word[:-1])) and word[-2] != " "
    )
    context_ids, ids = adapter._encode_pair(context, continuation)
    continuation_ids = tokenizer.tokenize_sentences([continuation], False)[0].tolist()
    assert context_ids == tokenizer.tokenize(context) and ids == continuation_ids
    [(logprob, _)] = adapter.loglikelihood(instances((context, continuation)), disable_tqdm=True)
    assert logprob == adapter._loglikelihood_tokens([(None, context_ids, continuation_ids)])[0][0] < -1


def test_continuations_without_tokens_are_rejected(random_pair):
    adapter, _, _ = random_pair
    for pair in (("the", ""), ("", "")):
        with pytest.raises(UserError, match="continuation"):
            adapter.loglikelihood(instances(pair), disable_tqdm=True)


@pytest.mark.parametrize(("settings", "message"), [
    ({"num_beams": 4}, "num_beams 4"), ({"repetition_penalty": 1.2}, "repetition_penalty 1.2"), ({"foo": 1}, "foo 1"),
    ({"max_gen_toks": 64}, "max_gen_toks 64"), ({"max_gen_toks": 0}, "max_gen_toks 0"),
    ({"max_length": 2, "max_gen_toks": 9}, "max_length 2"), ({"temperature": -1, "do_sample": True}, "temperature -1"),
    ({}, "max_gen_toks 256"),
])  # fmt: skip
def test_settings_that_the_engine_does_not_have_are_named(chain, settings, message):
    adapter, _, _ = chain
    settings = {"max_gen_toks": 9, **settings} if settings else {}
    with pytest.raises(UserError, match=message):
        adapter.generate_until(instances(("AAA", settings)))


def test_settings_without_effect_are_accepted_and_random_texts_are_drawn(chain):
    adapter, _, _ = chain
    neutral = {"num_beams": 1, "repetition_penalty": 1.0, "use_cache": True, "min_p": 0.0, "early_stopping": True}
    assert adapter.generate_until(instances(("A", {"max_gen_toks": 3, **neutral}))) == ["b😀"[:1] + "\ufffd"]
    drawn = {"max_gen_toks": 8, "until": [], "do_sample": True, "temperature": 9.0}
    texts = adapter.generate_until(instances(*[("A", drawn)] * 5))
    assert len(set(texts)) == 5 and texts == adapter.generate_until(instances(*[("A", drawn)] * 5))
    greedy = adapter.generate_until(instances(("A", {**drawn, "top_k": 1, "max_gen_toks": 6})))
    assert greedy == ["b😀cS"]


def test_a_system_message_that_the_template_rejects_is_left_out(tmp_path):
    template = ("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
                "{% for m in messages %}<{{ m.content }}>{% endfor %}")  # fmt: skip
    tokenizer = build_huggingface(byte_fallback_bpe(tmp_path, chat_template=template))
    model = build("grouped", vocab_size=tokenizer.vocab_size)
    adapter = build_adapter(Engine(model, Limits(16, 50), num_pages=20, page_size=8), tokenizer)
    user, system = {"role": "user", "content": "hi"}, {"role": "system", "content": "Be brief."}
    assert adapter.apply_chat_template([system, user]) == adapter.apply_chat_template([user]) == "<hi>"
    assert adapter.apply_chat_template([user], add_generation_prompt=False) == "<hi", "the last message is continued"
