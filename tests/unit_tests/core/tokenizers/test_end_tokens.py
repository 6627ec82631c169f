"""End tokens of a model: every id of the tokenizer, generation_config.json and config.json ends its texts."""

import json
import re

import pytest

from megatron.console import run_tool
from megatron.core.config.errors import UserError
from megatron.core.evaluation.harness import build_adapter
from megatron.core.inference.engine import Engine
from megatron.core.inference.scheduler import Limits
from megatron.core.tokenizers.huggingface import build_huggingface
from megatron.training.trained_model import load_trained_model
from tests.functional_tests.test_conversion import run
from tests.test_utils.scripted_model import LENGTH, scripted_folder

TEXT = "Abc<|im_end|>xy<|im_start|>z</s>q"
PLACES = {
    "generation_list": ({"eos_token_id": [257, 258]}, {}, "bc"),
    "generation_id": ({"eos_token_id": 259}, {}, "bc<|im_end|>xy"),
    "config_list": (None, {"eos_token_id": [257, 258]}, "bc"),
    "config_id": ({"temperature": 0.5}, {"eos_token_id": 258}, "bc"),
    "both": ({"eos_token_id": 257}, {"eos_token_id": [259]}, "bc<|im_end|>xy"),
    "neither": ({"eos_token_id": None}, {}, "bc<|im_end|>xy<|im_start|>z"),
}
CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}"


def generated(folder, capsys, prompt="A"):
    flags = ["--load", folder, "--prompt", prompt, "--temperature", "0", "--max-new-tokens", "12"]
    assert run_tool("generate", flags) == 0
    return capsys.readouterr().out.rstrip("\n").removeprefix(prompt)


@pytest.mark.parametrize("place", PLACES)
def test_every_end_token_ends_the_text_of_every_tool(tmp_path, capsys, place):
    pytest.importorskip("starlette")
    from tests.test_utils.model_server import running_server

    httpx = pytest.importorskip("httpx")
    generation, settings, expected = PLACES[place]
    folder = scripted_folder(tmp_path / "f", TEXT, generation, settings, template=CHAT)
    assert generated(folder, capsys) == expected
    trained = load_trained_model(folder, None, "tools/generate.py")
    engine = Engine(trained.model, Limits(LENGTH), num_pages=20, page_size=8)
    pytest.importorskip("lm_eval")
    adapter = build_adapter(engine, build_huggingface(folder))
    request = type("Request", (), {"args": ("A", {"max_gen_toks": 12})})
    # the harness drops special tokens inside of a text
    assert adapter.generate_until([request]) == [re.sub(r"<\|.*?\|>", "", expected)]
    common = {"temperature": 0, "max_tokens": 12}
    with running_server(trained.tokenizer, model=trained.model) as (url, _):
        for path, body in {
            "completions": {"prompt": "A"},
            "chat/completions": {"messages": [{"role": "user", "content": "A"}]},
        }.items():
            choice = httpx.post(f"{url}/v1/{path}", json={**common, **body}, timeout=30).json()["choices"][0]
            text = choice["message"]["content"] if "message" in choice else choice["text"]
            assert (text, choice["finish_reason"]) == (expected, "stop")
        answer = httpx.post(f"{url}/v1/completions", json={**common, "prompt": "A", "ignore_eos": True}).json()
        assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 12)


TRAIN = (
    "--micro-batch-size 1 --global-batch-size 1 --lr 1e-9 --weight-decay 0 --train-iters 1 --eval-iters 0"
    " --num-workers 0 --mock-data --seq-length 32 --sample-tokens 9 --sample-temperature 0 --sample-prompts A"
    " --save-interval 1 --save-hf-interval 1"
)


def test_runs_from_a_folder_keep_its_end_tokens(gloo_pool, tmp_path, capsys):
    folder = scripted_folder(tmp_path / "f", TEXT, settings={"eos_token_id": [257, 259]})
    save = tmp_path / "run"
    assert gloo_pool.run(run, 1, [*TRAIN.split(), "--load-hf", folder, "--save", str(save)]) == [(0, "")]
    records = map(json.loads, (save / "metrics.jsonl").read_text().splitlines())
    assert {record["text"] for record in records if record["kind"] == "sample"} == {"bc<|im_end|>xy"}
    (tmp_path / "f" / "config.json").unlink()  # the run knows them without the folder
    assert generated(str(save), capsys) == "bc<|im_end|>xy"
    exported = save / "hf" / "iter_0000001"  # named as a checkpoint
    assert generated(str(exported), capsys) == "bc<|im_end|>xy"
    assert json.loads((exported / "config.json").read_text())["eos_token_id"] == [257, 259]
    assert json.loads((exported / "generation_config.json").read_text())["eos_token_id"] == [257, 259]


def test_a_damaged_list_is_named(tmp_path):
    folder = scripted_folder(tmp_path / "f", TEXT, {"eos_token_id": [257, "x"]})
    with pytest.raises(UserError, match=r"generation_config.json: eos_token_id is \[257, 'x'\]; it must be an id"):
        build_huggingface(folder)
