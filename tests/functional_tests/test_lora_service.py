"""Checkpoints of fine-tuning in use: killed runs continue with the same bits; serve and evaluate adapters, which
compute with the merged model."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from megatron.console import run_tool
from megatron.core.dist_checkpointing.reader import CheckpointReader
from tests.functional_tests.test_conversion import run
from tests.functional_tests.test_eval_tasks import NAMES, tasks  # noqa: F401
from tests.functional_tests.test_lora_layouts import LLAMA, VOCABULARY
from tests.functional_tests.test_preference_training import DROPOUT, data, model  # noqa: F401
from tests.test_utils.gpt_runs import MODEL_FLAGS, train
from tests.test_utils.hf_folders import tiny_llama

ROOT = Path(__file__).resolve().parents[2]
SIZES = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
RUN = f"{SIZES} {LLAMA} --micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --eval-iters 0 --num-workers 0".split()
ADAPTERS = ["--lora-rank", "4", "--lora-dropout", "0.1", "--lora-use-dora"]
STEPS, INTERVAL = 24, 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adapters", "preferences"])
def test_killed_runs_continue_with_the_same_bits(gloo_pool, warm_python, request, tmp_path, kind):
    """SIGKILL as soon as the first checkpoint exists, and again when files of the third appear."""
    complete, killed = (tmp_path / name for name in ("complete", "killed"))
    if kind == "adapters":
        base, argv = tmp_path / "base", [*RUN, "--mock-data", *VOCABULARY]
        assert gloo_pool.run(train, 1, [*argv, "--train-iters", "4", "--save", str(base)]) == [0]
        argv += [*ADAPTERS, "--pretrained-checkpoint", str(base)]
    else:
        argv = [*request.getfixturevalue("data"), *DROPOUT, "--global-batch-size", "4"]
    argv += ["--train-iters", str(STEPS), "--save-interval", str(INTERVAL)]
    assert gloo_pool.run(train, 1, [*argv, "--save", str(complete)]) == [0]
    command = [warm_python, ROOT / "pretrain_gpt.py", *MODEL_FLAGS, *argv, "--save", killed, "--load", killed]
    with open(tmp_path / "log", "w", encoding="utf-8") as log:
        for pattern in (f"iter_{INTERVAL:07}", f"*{3 * INTERVAL:07}*"):
            program = subprocess.Popen(command, stdout=log, stderr=log)
            while program.poll() is None and not list(killed.glob(pattern)):
                time.sleep(0.002)
            os.kill(json.loads((killed / ".lock").read_text())["pid"], signal.SIGKILL)
            assert program.wait(60) == -signal.SIGKILL, (tmp_path / "log").read_text()
        assert subprocess.run(command, stdout=log, stderr=log, check=False).returncode == 0
    expected, resumed = (CheckpointReader(folder / f"iter_{STEPS:07}") for folder in (complete, killed))
    assert expected.names == resumed.names
    assert kind != "adapters" or all("adapter.lora_" in name for name in expected.names if name.startswith("model."))
    for name in expected.names:
        assert torch.equal(*(reader.read(name).view(torch.uint8) for reader in (expected, resumed))), name


@pytest.fixture
def folders(gloo_pool, tasks):  # noqa: F811
    """Folders with a tokenizer: the base, a checkpoint with trained adapters, the merged model."""
    base, adapted, merged = (tasks / name for name in ("base", "run", "merged"))
    base.mkdir()
    tiny_llama(base, vocab_size=400)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tasks / file, base / file)
    argv = "--micro-batch-size 2 --global-batch-size 4 --seq-length 64 --lr 3e-2 --train-iters 8 --eval-iters 0"
    argv += f" --num-workers 0 --mock-data --lora-rank 4 --load-hf {base} --save {adapted}"
    argv += f" --tokenizer-type HuggingFaceTokenizer --tokenizer-model {base}"
    ((code, errors),) = gloo_pool.run(run, 1, argv.split(), False)
    assert code == 0, errors
    assert run_tool("lora", ["merge", "--load", str(adapted), "--save", str(merged)]) == 0
    return base, adapted, merged


def test_scores_of_adapters_are_those_of_the_merged_model(folders, tasks, capsys):  # noqa: F811
    results = []
    for folder in folders:
        words = ["--load", folder, "--tasks", ",".join(NAMES), "--include-path", tasks / "tasks"]
        code = run_tool("evaluate", [str(word) for word in (*words, "--output", tasks / f"{folder.name}.json")])
        assert code == 0, capsys.readouterr().err
        scores = json.loads((tasks / f"{folder.name}.json").read_text())["results"]["tiny_perplexity"]
        results.append({name: value for name, value in scores.items() if isinstance(value, float)})
    base, adapters, merged = results
    assert adapters and adapters == merged  # the same weights, bit for bit
    assert adapters != pytest.approx(base, rel=1e-2)


@pytest.mark.slow
def test_served_adapters_answer_as_the_merged_model_in_transformers(warm_python, folders):
    httpx, transformers = (pytest.importorskip(name) for name in ("httpx", "transformers"))
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    _, adapted, merged = folders
    tokenizer = transformers.AutoTokenizer.from_pretrained(merged)
    merged_model = transformers.AutoModelForCausalLM.from_pretrained(merged).eval()
    ids = tokenizer("def", return_tensors="pt", add_special_tokens=False).input_ids
    with torch.no_grad():
        output = merged_model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    expected = tokenizer.decode(output[0, ids.shape[1] :])
    command = [warm_python, ROOT / "tools" / "serve.py", "--load", adapted, "--model-name", "adapted", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        line = program.stdout.readline()
        assert line.startswith("serving adapted on http://"), program.stderr.read()
        form = {"prompt": "def", "max_tokens": 8, "temperature": 0, "model": "adapted", "ignore_eos": True}
        answer = httpx.post(f"{line.split()[3]}/v1/completions", json=form, timeout=60)
        program.send_signal(signal.SIGINT)
        assert program.wait(60) == 0
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == expected
