"""The tools that generate and score give the text and scores of one rank on several."""

import contextlib
import io
import json
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from megatron.console import run_tool
from megatron.core import parallel_state
from megatron.core.inference.engine import Engine
from megatron.core.inference.requests import Request
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.scheduler import Limits
from megatron.core.inference.server import service
from megatron.tools.engine_flags import on_first_rank
from tests.test_utils.gpt_runs import train
from tests.unit_tests.core.models.test_gpt_model import LLAMA, make_config, make_model
from tests.unit_tests.tools.test_evaluate import folder

__all__ = ["folder"]  # a fixture

ROOT = Path(__file__).resolve().parents[3]
MODELS = {
    "tp": ("", "--tensor-model-parallel-size 2"),
    "pp": ("", "--pipeline-model-parallel-size 2"),
    "ep": ("--num-experts 4 --moe-ffn-hidden-size 16", "--expert-model-parallel-size 2"),
    "tp of experts": ("--num-experts 4 --moe-ffn-hidden-size 16", ""),
}


def run(rank, world_size, argv):
    """Return exit code, standard output and standard error of a tool on this rank."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run_tool(argv[0], argv[1:])
    return code, out.getvalue(), err.getvalue()


@pytest.mark.parametrize("name", MODELS)
def test_ranks_generate_the_text_of_one_rank(gloo_pool, tmp_path, name):
    flags, layout = MODELS[name]
    training = [*flags.split(), "--mock-data", "--train-iters", "3", "--save", str(tmp_path)]
    assert gloo_pool.run(train, 1, training) == [0]
    argv = ["generate", "--load", str(tmp_path), "--prompt", "1 2", "--prompt", "7 8 9", "--max-new-tokens", "6"]
    ((code, single, _),) = gloo_pool.run(run, 1, argv)
    assert code == 0 and single.startswith("1 2")
    first, second = gloo_pool.run(run, 2, [*argv, *layout.split()])
    assert first[:2] == (0, single), first
    assert second[:2] == (0, ""), second
    wrong = gloo_pool.run(run, 2, [*argv, "--tensor-model-parallel-size", "3"])
    assert all(code == 2 and "there are 2 ranks; use torchrun --nproc-per-node 3" in err for code, _, err in wrong)
    long = gloo_pool.run(run, 2, [*argv, "--prompt", "5 " * 60, *layout.split()])
    assert all(code == 2 and "a prompt has 60 tokens, the model takes 32; several" in err for code, _, err in long)


def test_torchrun_generates_on_two_ranks(gloo_pool, warm_python, tmp_path):
    assert gloo_pool.run(train, 1, ["--mock-data", "--train-iters", "3", "--save", str(tmp_path)]) == [0]
    argv = ["generate", "--load", str(tmp_path), "--prompt", "1 2", "--max-new-tokens", "4", "--temperature", "0"]
    ((_, single, _),) = gloo_pool.run(run, 1, argv)
    command = [warm_python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "megatron"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        [*command, *argv], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert (finished.returncode, finished.stdout) == (0, single), finished.stderr


def score(rank, world_size, argv, home):
    os.environ.update(HF_DATASETS_OFFLINE="1", HF_HOME=home)
    return run(rank, world_size, argv)


@pytest.mark.slow
def test_ranks_score_tasks_as_one_rank(gloo_pool, folder, tmp_path):
    argv = ["evaluate", "--load", folder, "--tasks", "tiny_choice,tiny_text", "--include-path", folder / "tasks"]
    results = []
    for ranks in (1, 2):
        output, home = tmp_path / f"{ranks}.json", str(folder / "cache")
        (code, _, errors), *rest = gloo_pool.run(score, ranks, [*map(str, argv), "--output", str(output)], home)
        assert code == 0, errors
        assert all(other[:2] == (0, "") for other in rest)
        results.append(json.loads(output.read_text())["results"])
    assert set(results[0]) == {"tiny_choice", "tiny_text"}
    for name, numbers in results[0].items():
        numbers = {key: value for key, value in numbers.items() if isinstance(value, float)}
        assert numbers and {key: results[1][name][key] for key in numbers} == pytest.approx(numbers, rel=1e-5)


LIMIT_SECONDS = 4
"""A step of two ranks takes 0.2 s on a machine with 20 runnable processes."""


def serve(rank, world_size):
    """Return the tokens of two requests with an idle time between them that is longer than the limit of a step."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    config = make_config(**LLAMA, tensor_model_parallel_size=world_size)
    engine = Engine(make_model(config), Limits(max_length=16), num_pages=9, page_size=4)
    return on_first_rank(engine, lambda: answers(service.EngineService(engine, 4, limit=LIMIT_SECONDS)))


def answers(server):
    results, ended = [], threading.Semaphore(0)

    def listen(event):
        results.append(event.token)
        if event.finish_reason is not None:
            ended.release()

    server.start()
    for prompt in ([1, 2, 3], [4]):
        server.submit([Request(prompt=prompt, max_new_tokens=3, sampling=Sampling(temperature=0))], [listen])
        assert ended.acquire(timeout=60)
        if prompt == [1, 2, 3]:
            time.sleep(1.1 * LIMIT_SECONDS)
    server.stop()
    return results


def test_ranks_serve_the_same_text_as_one_rank(gloo_pool):
    (single,) = gloo_pool.run(serve, 1)
    assert len(single) == 6 and gloo_pool.run(serve, 2) == [single, None]
