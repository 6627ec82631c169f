"""tools/evaluate.py and the scores behind it: equal to transformers, and to one forward pass per pair."""

import itertools
import json
import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.console import run_tool
from megatron.core.config.errors import UserError
from megatron.core.evaluation import harness
from megatron.core.evaluation.scoring import Likelihood, score
from megatron.core.evaluation.tasks import find_tasks
from megatron.core.inference.engine import Engine
from megatron.core.inference.scheduler import Limits
from megatron.tools.evaluate import check_output, check_scores
from tests.test_utils.hf_folders import tiny_llama
from tests.test_utils.tiny_tokenizers import byte_level_bpe
from tests.unit_tests.core.inference.test_engine import build
from tests.unit_tests.core.models.test_gpt_model import VOCAB

LENGTH = 16


def reference(logits_of, context, continuation, length):
    """Sum of log-probabilities, and whether all tokens are the most likely, by one forward pass."""
    ids = [*context, *continuation][-length - 1 :]
    with torch.no_grad():
        rows = logits_of(torch.tensor([ids[:-1]]))[0].log_softmax(-1)[len(ids) - 1 - len(continuation) :]
    targets = torch.tensor(continuation, dtype=torch.int64)[:, None]
    return float(rows.gather(1, targets).sum()), bool((rows.argmax(-1)[:, None] == targets).all())


def random_pairs(rng):
    contexts = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))] for _ in range(8)]
    return [(rng.choice(contexts), [rng.randrange(VOCAB) for _ in range(rng.choice((1, 1, 2, 5, 16)))])
            for _ in range(40)]  # fmt: skip


@pytest.mark.parametrize("name", ["grouped", "window", "latent", "experts"])
def test_scores_equal_one_forward_pass_per_pair(name):
    model, rng = build(name), random.Random(1)

    def logits_of(ids):
        return model(ids, torch.arange(ids.shape[1])[None])[:, :, :VOCAB]

    for max_tokens, pages in ((3, 7), (16, 5), (100, 60)):
        pairs = random_pairs(rng)
        model.train()  # the engine selects evaluation mode
        engine = Engine(model, Limits(LENGTH, max_tokens), num_pages=pages, page_size=4)
        result = score(engine, pairs)
        assert engine.pool.num_free == engine.pool.num_usable
        for (context, continuation), item in zip(pairs, result, strict=True):
            logprob, is_greedy = reference(logits_of, context, continuation, LENGTH)
            assert abs(item.logprob - logprob) < 1e-10 and item.is_greedy == is_greedy
    best = int(logits_of(torch.tensor([[3, 4]]))[0, -1].argmax())
    answers = score(engine, [([3, 4], [best]), ([3, 4], [(best + 1) % VOCAB])])
    assert [answer.is_greedy for answer in answers] == [True, False]


def test_continuations_of_one_context_share_a_forward_pass():
    engine = Engine(build("grouped"), Limits(LENGTH, 64), num_pages=20, page_size=4)
    steps, run = [], engine.runner.run
    engine.runner.run = lambda plan: steps.append(plan) or run(plan)
    score(engine, [([5, 6, 7], [token]) for token in range(10)])
    assert [len(plan.tokens) for plan in steps] == [3] and len(steps[0].outputs) == 10


def test_pairs_that_cannot_be_scored_are_named():
    engine = Engine(build("grouped"), Limits(LENGTH, 64), num_pages=3, page_size=4)
    pairs = {"context is empty": ([], [1]), "continuation is empty": ([32], []), "17 tokens": ([1], [1] * 17),
             "needs 3 pages": ([1] * 12, [1])}  # fmt: skip
    for word, pair in pairs.items():
        with pytest.raises(UserError, match=word):
            score(engine, [pair])
    assert engine.pool.num_free == engine.pool.num_usable


def test_texts_with_nan_are_named_and_leave_no_pages():
    model = build("grouped")
    model.embedding.word_embeddings.weight.data[9] = torch.nan
    engine = Engine(model, Limits(LENGTH, 64), num_pages=20, page_size=4)
    with pytest.raises(UserError, match="text 2 of 3 has no score: the model's logits are NaN or infinite"):
        score(engine, [([3], [4]), ([3, 4], [9]), ([9, 3], [4, 5])])
    assert engine.pool.num_free == engine.pool.num_usable
    assert score(engine, [([3], [4])])[0].logprob < 0, "pages with NaN are used again"


# ---- the harness

QUESTIONS = [{"q": "def read", "choices": [" file", "_path(x)", " naïve"], "answer": 1},
             {"q": "The quick brown", "choices": [" fox", " dog", " café"], "answer": 0},
             {"q": "with open(", "choices": ["path", "p", ")"], "answer": 2},
             {"q": "Isn't it", "choices": ["?", "!", "."], "answer": 0}]  # fmt: skip
COMMON = "dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
TASKS = {
    "choice": "output_type: multiple_choice\ndoc_to_text: q\ndoc_to_choice: choices\ndoc_to_target: answer\n"
              "metric_list: [{metric: acc}, {metric: acc_norm}]\n",
    "perplexity": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{q * 9}}'\n"
                  "metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]\n",
    "text": "output_type: generate_until\ndoc_to_text: q\ndoc_to_target: 'x'\nmetric_list: [{metric: exact_match}]\n"
            "generation_kwargs: {until: ['e'], max_gen_toks: 12}\n",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Hugging Face folder with a tokenizer, and in ``tasks`` the harness's tasks."""
    pytest.importorskip("lm_eval")
    pytest.importorskip("transformers")
    built = tmp_path_factory.mktemp("model")
    tiny_llama(built, vocab_size=400)
    byte_level_bpe(built / "tokenizer.json", 400)
    (built / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    (built / "tasks").mkdir()
    (built / "tasks" / "data.jsonl").write_text("".join(json.dumps(item) + "\n" for item in QUESTIONS))
    for name, text in TASKS.items():
        common = COMMON.format(data=built / "tasks" / "data.jsonl")
        (built / "tasks" / f"{name}.yaml").write_text(f"task: tiny_{name}\n{common}{text}metadata: {{version: 1}}\n")
    return built


def transformers_adapter(folder):
    """The harness's model over ``transformers``, one forward pass per request."""
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|endoftext|>")
    length = model.config.max_position_embeddings

    class Reference(TemplateLM):
        eot_token_id = property(lambda self: tokenizer.eos_token_id)

        def tok_encode(self, string, add_special_tokens=None, **_):
            return tokenizer.encode(string)

        def _loglikelihood_tokens(self, requests, **_):
            return [reference(lambda ids: model(ids).logits, x, y, length) for _, x, y in requests]

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            results = []
            for (text,) in (request.args for request in requests):
                windows = utils.get_rolling_token_windows(self.tok_encode(text), self.eot_token_id, length, 1)
                pairs = [(None, *utils.make_disjoint_window(window)) for window in windows]
                results.append(sum(logprob for logprob, _ in self._loglikelihood_tokens(pairs)))
            return results

        def generate_until(self, requests, disable_tqdm=False):
            results = []
            for context, settings in (request.args for request in requests):
                ids = self.tok_encode(context)
                count = len(ids)
                while len(ids) < count + settings["max_gen_toks"] and ids[-1] != self.eot_token_id:
                    ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
                text = tokenizer.decode([item for item in ids[count:] if item != self.eot_token_id])
                results.append(text.split(settings["until"][0])[0])
            return results

    return Reference()


def samples(results):
    return {name: [(x["doc_id"], x["resps"]) for x in result] for name, result in results["samples"].items()}


def test_task_scores_equal_those_of_transformers(folder, monkeypatch, capsys):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(folder / "cache"))
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    names = [f"tiny_{name}" for name in TASKS]
    manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    expected = simple_evaluate(model=transformers_adapter(folder), tasks=names, task_manager=manager)
    arguments = ["--load", folder, "--tasks", ",".join(names), "--include-path", folder / "tasks"]
    assert run_tool("evaluate", list(map(str, [*arguments, "--output", folder / "out"]))) == 0, capsys.readouterr().err
    actual = json.loads((folder / "out").read_text())["results"]
    assert "tiny_choice" in capsys.readouterr().out
    for name in names:
        numbers = {key: value for key, value in expected["results"][name].items() if isinstance(value, float)}
        # fp32 sums over up to 100 tokens; word_perplexity is e to the power of such a sum
        assert numbers and {key: actual[name][key] for key in numbers} == pytest.approx(numbers, rel=1e-5)

    from megatron.tools.evaluate import evaluate
    from megatron.training.trained_model import load_trained_model

    trained = load_trained_model(str(folder), None, "tools/generate.py")
    engine = Engine(trained.model, Limits(trained.cfg.data.seq_length, 50), num_pages=40, page_size=8)
    args = SimpleNamespace(tasks=",".join(names), include_path=folder / "tasks", num_fewshot=None, limit=None,
                           apply_chat_template=False)  # fmt: skip
    local, foreign = samples(evaluate(engine, trained.tokenizer, args, manager)), samples(expected)
    assert local["tiny_text"] == foreign["tiny_text"]
    for name in ("tiny_choice", "tiny_perplexity"):
        for (_, mine), (_, other) in zip(local[name], foreign[name], strict=True):
            assert numbers_in(mine) == pytest.approx(numbers_in(other), rel=1e-5)


def numbers_in(nested):
    """All numbers and booleans in nested lists and tuples."""
    return [x for item in nested for x in numbers_in(item)] if isinstance(nested, list | tuple) else [float(nested)]


def test_the_harness_scores_a_server_as_the_model(folder, tmp_path, monkeypatch):
    """Its client ``local-completions``, with the server's tokenizer."""
    for package in ("aiohttp", "tenacity", "requests", "starlette", "uvicorn"):
        pytest.importorskip(package)
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(folder / "cache"))
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from megatron.tools.evaluate import evaluate
    from tests.test_utils.model_server import LENGTH, running_server, tiny_model, tiny_tokenizer

    names, tokenizer = ["tiny_choice", "tiny_text"], tiny_tokenizer(tmp_path)
    args = SimpleNamespace(tasks=",".join(names), include_path=folder / "tasks", num_fewshot=1, limit=3,
                           apply_chat_template=False)  # fmt: skip
    engine = Engine(tiny_model(tokenizer.vocab_size), Limits(LENGTH, 200), num_pages=40, page_size=8)
    manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    expected = samples(evaluate(engine, tokenizer, args, manager))
    with running_server(tokenizer) as (url, _):
        actual = samples(simple_evaluate(
            model="local-completions", tasks=names, num_fewshot=1, limit=3,
            model_args={"base_url": f"{url}/v1/completions", "model": "tiny", "max_length": LENGTH},
            task_manager=manager,
        ))  # fmt: skip
    assert actual["tiny_text"] == expected["tiny_text"]
    for (_, mine), (_, other) in zip(actual["tiny_choice"], expected["tiny_choice"], strict=True):
        assert numbers_in(mine) == pytest.approx(numbers_in(other), rel=1e-5)


@pytest.mark.parametrize("names, full", [
    (["tiny_choice", "tiny_text"], False), (["tiny_choice", "lambada"], True), (["local_group"], True),
    (["local"], True),
])  # fmt: skip
def test_the_packages_tasks_are_listed_only_where_a_name_may_need_them(tmp_path, monkeypatch, names, full):
    """Groups and tags of the folder may contain tasks of the package."""
    tasks = pytest.importorskip("lm_eval.tasks")
    listed = []

    def manager(include_path, include_defaults=True):
        listed.append(include_defaults)
        paths = [str(tmp_path / "package"), include_path] if include_defaults else include_path
        return correct(include_path=paths, include_defaults=False)

    correct = tasks.TaskManager
    monkeypatch.setattr(tasks, "TaskManager", manager)
    files = {"folder/choice": "task: tiny_choice\ntag: local\n", "folder/text": "task: tiny_text\n",
             "folder/group": "group: local_group\ntask: [tiny_text, lambada]\n", "package/lambada": "task: lambada\n",
             "package/tagged": "task: tagged\ntag: local\n"}  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(text)
    result = find_tasks("--tasks", names, tmp_path / "folder")
    assert listed == [False, True][: 1 + full] and set(names) <= set(result.all_tasks)
    assert ("lambada" in result.all_tasks) == full


def test_wrong_tasks_and_paths_are_named_before_the_model_is_loaded(folder, tmp_path, monkeypatch, capsys):
    tasks = pytest.importorskip("lm_eval.tasks")
    few = partial(tasks.TaskManager, include_path=str(folder / "tasks"), include_defaults=False)
    monkeypatch.setattr(tasks, "TaskManager", lambda **arguments: few())  # the package's take 6 s to list
    monkeypatch.setattr("megatron.tools.evaluate.load_gpt", lambda args: pytest.fail("the model is loaded"))
    load, local = ["--load", str(folder)], ["--tasks", "tiny_choice", "--include-path", str(folder / "tasks")]
    for flags, word in (
        ([*load, "--tasks", "nope", "--output", str(tmp_path / "out")], "--tasks nope"),
        ([*load, "--tasks", "a", "--limit", "0"], "--limit 0"),
        ([*load, "--tasks", "a", "--include-path", "missing"], "--include-path missing"),
        (["--load", "missing", *local], "error: --load missing: there is no such folder; check the path\n"),
        ([*load, *local, "--output", str(tmp_path)], f"--output {tmp_path}: cannot be written (Is a directory)"),
        ([*load, *local, "--output", "missing/out"], "--output missing/out: cannot be written (No such file"),
    ):  # fmt: skip
        assert run_tool("evaluate", flags) == 2
        error = capsys.readouterr().err
        assert word in error and len(error.splitlines()) == 1, error
    assert not list(tmp_path.iterdir())


def masked_scores(values):
    """Stand-in for ``score``: log-probabilities are ``values`` in turn."""
    turn = itertools.cycle(values)
    return lambda engine, pairs: [Likelihood(next(turn), True) for _ in pairs]


@pytest.mark.parametrize(("task", "values", "message"), [
    ("perplexity", [-torch.inf], "--tasks tiny_perplexity: word_perplexity is inf, so no results are written"),
    ("perplexity", [-1e6], "a score of tiny_perplexity is larger than any float"), ("choice", [-torch.inf, -2.0], None),
])  # fmt: skip
def test_scores_that_are_not_finite_are_one_error_and_no_file(
    folder, tmp_path, monkeypatch, capsys, task, values, message
):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(folder / "cache"))
    monkeypatch.setattr(harness, "score", masked_scores(values))
    flags = [
        "--load",
        folder,
        "--tasks",
        f"tiny_{task}",
        "--include-path",
        folder / "tasks",
        "--output",
        tmp_path / "o",
    ]
    code, error = run_tool("evaluate", list(map(str, flags))), capsys.readouterr().err
    if message is None:
        assert code == 0 and 0 <= strict_json(tmp_path / "o")["results"]["tiny_choice"]["acc,none"] <= 1
        return
    assert code != 0 and message in error and "Traceback" not in error and not list(tmp_path.iterdir())


def strict_json(path):
    return json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_standard_errors_that_are_nan_are_absent():
    scores = {"a": {"acc,none": 0.5, "acc_stderr,none": math.nan, "alias": "a"}}
    check_scores(scores)
    assert scores == {"a": {"acc,none": 0.5, "acc_stderr,none": "N/A", "alias": "a"}}
    with pytest.raises(UserError, match="--tasks a: acc is nan"):
        check_scores({"a": {"acc,none": math.nan}})


def test_ranks_check_one_output_file_at_the_same_time(tmp_path, monkeypatch):
    barrier, output = threading.Barrier(2, timeout=20), tmp_path / "scores.json"
    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as ranks:
        for name in ("exists", "open"):
            method = getattr(Path, name)
            patch.setattr(Path, name, lambda *args, method=method: (method(*args), barrier.wait())[0])
        list(ranks.map(check_output, [output, output]))
    assert not any(tmp_path.iterdir())
