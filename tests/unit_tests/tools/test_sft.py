"""``megatron sft``: defaults, the printed samples, and the run that it starts."""

import json

import pytest
import transformers
from PIL import Image
from transformers import AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from megatron import console
from megatron.core.config.errors import UserError
from megatron.tools import sft
from tests.test_utils.chats import CHATML, SPECIAL, assistant, sums, tokenizer_folder, user, write_lines
from tests.test_utils.hf_folders import tiny_llama
from tests.unit_tests.core.datasets.test_image_dataset import TEMPLATE, VISION


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    tiny_llama(folder, 1024)
    return tokenizer_folder(folder, CHATML)


@pytest.fixture
def started(monkeypatch):
    """Command lines of the pretraining programs that a tool starts."""
    commands = []
    monkeypatch.setattr(console, "pretrain", lambda arguments: commands.append(arguments) or 0)
    return commands


def value_of(command, flag):
    return command[len(command) - 1 - command[::-1].index(flag) + 1]


def test_defaults_are_replaced_by_flags(tmp_path, model, started):
    path = write_lines(tmp_path / "chats.jsonl", sums(1))
    flags = ["--num-epochs", "3", "--lr", "1e-3", "--nproc", "2", "--save", "run", "--valid-data", path]
    assert sft.main(["--data", path, "--load-hf", model, *flags]) == 0
    (command,) = started
    assert command[:4] == ["gpt", "--nproc", "2", "--sft"]
    values = {"--num-epochs": "3", "--lr": "1e-3", "--load": "run", "--seq-length": "64", "--train-data-path": path}
    values |= {"--valid-data-path": path, "--load-hf": model, "--global-batch-size": "16"}
    assert {flag: value_of(command, flag) for flag in values} == values
    assert command.count("--lr") == 1 and "--eval-iters" not in command


def test_iterations_replace_the_epoch(tmp_path, model, started):
    sft.main(["--data", "chats.jsonl", "--load-hf", model, "--train-iters=7", "--save=run"])
    (command,) = started
    assert "--num-epochs" not in command and value_of(command, "--load") == "run"
    assert value_of(command, "--eval-iters") == "0"


def test_inspection_prints_rows_with_their_masks(tmp_path, model, started, capsys):
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": [user("Hi"), assistant("Hello!")]}])
    assert sft.main(["--data", path, "--load-hf", model, "--inspect", "5"]) == 0
    text = capsys.readouterr().out
    assert "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Hello!<|im_end|>⟧\n" in text
    assert "row 0:" in text and "row 1:" not in text and not started


def test_chat_template_of_a_file_is_used(tmp_path, model, capsys):
    (tmp_path / "t.jinja").write_text(CHATML.replace("im_start|>", "im_start|>the "))
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": [user("Hi"), assistant("Hello!")]}])
    flags = ["--chat-template", str(tmp_path / "t.jinja"), "--inspect", "1"]
    sft.main(["--data", path, "--load-hf", model, *flags])
    assert "<|im_start|>the assistant\n⟦Hello!<|im_end|>⟧" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--inspect", "0"], "--inspect 0: must be at least 1"),
        (["--nproc", "x"], "--nproc x: must be a positive integer"),
        (["--data", "missing.jsonl", "--inspect", "1"], "missing.jsonl: cannot be read"),
        (["--valid-data", "missing.jsonl", "--inspect", "1"], "missing.jsonl: cannot be read"),
        (["--chat-template", "missing.jinja", "--inspect", "1"], "--chat-template missing.jinja: cannot be read"),
    ],
)
def test_wrong_flags_are_named(tmp_path, model, started, flags, message):
    path = write_lines(tmp_path / "chats.jsonl", sums(1))
    with pytest.raises(UserError, match=message):
        sft.main(["--data", path, "--load-hf", model, *flags])
    assert not started


def test_wrong_settings_are_errors_of_the_program(tmp_path, model, capsys):
    path = write_lines(tmp_path / "chats.jsonl", sums(1))
    assert console.main(["sft", "--data", path, "--load-hf", model, "--num-layers", "7"]) == 2
    assert "--num-layers is 7, there it is 2" in capsys.readouterr().err


def test_unreadable_configuration_is_an_error(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps([]))
    path = write_lines(tmp_path / "chats.jsonl", sums(1))
    assert console.main(["sft", "--data", path, "--load-hf", str(tmp_path)]) == 2
    assert "error: " in capsys.readouterr().err


@pytest.fixture(scope="module")
def image_model(tmp_path_factory):
    """Folder of Qwen3-VL without weights, and conversations with and without an image."""
    folder = tmp_path_factory.mktemp("images")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder(folder, TEMPLATE, [*SPECIAL, *VISION]))
    transformers.Qwen3VLConfig(
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        vision_config={"patch_size": 4, "out_hidden_size": 64},
        text_config={"vocab_size": len(tokenizer), "max_position_embeddings": 96, "hidden_size": 64},
    ).save_pretrained(folder)  # fmt: skip
    Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, size={"shortest_edge": 64, "longest_edge": 4096}
    ).save_pretrained(folder)
    Image.new("RGB", (16, 24)).save(folder / "a.png")
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": 'What "image" is it?'}]
    lines = {"images": user(parts), "llava": None, "text": user('"image"')}
    for name, question in lines.items():
        line = {"messages": [question, assistant("A dog.")]}
        if question is None:
            values = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A dog."}]
            line = {"image": "a.png", "conversations": values}
        write_lines(folder / f"{name}.jsonl", [line])
    return folder


@pytest.mark.parametrize("name, program", [("images", "vlm"), ("llava", "vlm"), ("text", "gpt")])
def test_conversations_with_images_start_the_program_of_images(image_model, started, capsys, name, program):
    flags = ["--data", str(image_model / f"{name}.jsonl"), "--load-hf", str(image_model)]
    assert sft.main(flags) == 0
    (command,) = started
    assert command[0] == program and value_of(command, "--seq-length") == "96"
    assert f"python pretrain_{program}.py --sft --load-hf" in capsys.readouterr().out


def test_other_models_do_not_start_the_program_of_images(image_model, model, started):
    sft.main(["--data", str(image_model / "images.jsonl"), "--load-hf", model])
    assert started[0][0] == "gpt"


def test_inspection_counts_the_tokens_of_images(image_model, capsys):
    """24 x 16 pixels: 6 x 4 patches, six image tokens."""
    flags = ["--load-hf", str(image_model), "--inspect", "1"]
    assert sft.main(["--data", str(image_model / "images.jsonl"), *flags]) == 0
    text = capsys.readouterr().out
    assert '<|vision_start|><|image_pad|> x 6<|vision_end|>What "image" is it?' in text
    assert "⟦A dog.<|im_end|>⟧" in text
