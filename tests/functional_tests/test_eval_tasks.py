"""--eval-tasks: scores during training on two ranks are those of tools/evaluate.py on the checkpoint, and do not change
the training."""

import json
from functools import partial
from unittest import mock

import pytest

from megatron.console import run_tool
from megatron.training.generation.task_scores import metrics
from megatron.training.observe.metrics import read_metrics
from tests.functional_tests.test_conversion import run
from tests.test_utils.tiny_tokenizers import byte_level_bpe
from tests.unit_tests.tools.test_evaluate import COMMON, QUESTIONS, TASKS

RUN = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 32 --seq-length 32"
    " --micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --train-iters 4 --eval-iters 0 --num-workers 0"
    " --log-interval 1 --mock-data --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0"
)
NAMES = ["tiny_choice", "tiny_perplexity"]


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "data.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    for name in NAMES:
        common = COMMON.format(data=tmp_path / "tasks" / "data.jsonl")
        text = f"task: {name}\n{common}{TASKS[name.removeprefix('tiny_')]}metadata: {{version: 1}}\n"
        (tmp_path / "tasks" / f"{name}.yaml").write_text(text)
    byte_level_bpe(tmp_path / "tokenizer.json", 400)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    return tmp_path


def offline(rank, world_size, argv, cache):
    """Train without the tasks of the package, which take 6 s to list."""
    import os

    os.environ |= {"HF_DATASETS_OFFLINE": "1", "HF_HOME": cache}
    from lm_eval import tasks

    with mock.patch.object(tasks, "TaskManager", partial(tasks.TaskManager, include_defaults=False)):
        return run(rank, world_size, argv, fp64=False)


@pytest.mark.parametrize("layout", ["--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", ""])
def test_scores_are_logged_and_equal_those_of_the_checkpoint(gloo_pool, tasks, layout, capsys):
    argv = [*RUN.split(), *layout.split(), "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tasks),
            "--save-interval", "4"]  # fmt: skip
    scores = ["--eval-tasks", *NAMES, "--eval-tasks-interval", "2", "--eval-tasks-path", str(tasks / "tasks")]
    board = ["--tensorboard-dir", str(tasks / "board")]
    actual = gloo_pool.run(offline, 2, [*argv, *scores, *board, "--save", str(tasks / "run")], str(tasks / "cache"))
    assert [code for code, _ in actual] == [0, 0], actual
    assert [code for code, _ in gloo_pool.run(run, 2, [*argv, "--save", str(tasks / "plain")], False)] == [0, 0]
    records, plain = (list(read_metrics(tasks / name / "metrics.jsonl")) for name in ("run", "plain"))
    assert [x for x in records if x["kind"] == "train"] == [x for x in plain if x["kind"] == "train"]
    scored = [x for x in records if x["kind"] == "task"]
    assert [(x["iteration"], x["dataset"]) for x in scored] == [(n, name) for n in (2, 4) for name in NAMES]

    arguments = ["--load", tasks / "run", "--tasks", ",".join(NAMES), "--include-path", tasks / "tasks"]
    assert run_tool("evaluate", list(map(str, [*arguments, "--output", tasks / "out"]))) == 0, capsys.readouterr().err
    expected = json.loads((tasks / "out").read_text())["results"]
    for record in scored[2:]:
        names = [name for name in record if name not in ("kind", "iteration", "consumed_samples", "dataset")]
        assert names and "acc_stderr" not in names
        values = {name: expected[record["dataset"]][f"{name},none"] for name in names}
        assert {name: record[name] for name in names} == pytest.approx(values, rel=1e-5)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tasks / "board"))
    events.Reload()
    assert [x.step for x in events.Scalars("tiny_choice acc")] == [2, 4]


def test_unknown_tasks_and_layouts_end_the_start(gloo_pool, tasks):
    argv = [*RUN.split(), "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tasks)]
    flags = ["--eval-tasks", "no_such_task", "--eval-tasks-interval", "2"]
    path = ["--eval-tasks-path", str(tasks / "tasks")]
    ((code, errors),) = gloo_pool.run(offline, 1, [*argv, *flags, *path], str(tasks / "cache"))
    assert code == 2 and "--eval-tasks no_such_task: lm-evaluation-harness" in errors
    context = [*flags, "--context-parallel-size", "2"]
    wrong = [(flags[2:], "requires --eval-tasks"), (flags[:2], "--eval-tasks-interval"), (context, "not supported")]
    for more, word in wrong:
        for code, errors in gloo_pool.run(run, 2, [*argv, *more]):
            assert code == 2 and (word in errors or not errors)


def test_scores_of_several_filters_have_separate_names():
    scores = {"acc,none": 1, "exact_match,strict-match": 0.25, "exact_match,flexible-extract": 0.5}
    errors = {name.replace(",", "_stderr,"): 0.1 for name in scores}
    expected = {"acc": 1.0, "exact_match,strict-match": 0.25, "exact_match,flexible-extract": 0.5}
    assert metrics({"alias": "gsm8k", **scores, **errors}) == expected
