"""``megatron card``: conversions run in this process; training, layouts and text are scripted."""

import contextlib
import dataclasses
import io
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron import console
from megatron.core.config.errors import UserError
from megatron.core.models.registry import get_family
from megatron.tools import card
from tests.test_utils.hf_folders import tiny_llama
from tests.test_utils.scripted_model import scripted_folder

CONVERSIONS = ("convert", "verify")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("hf") / "tiny")


def run_with(results, commands, change=None):
    """Return a function that runs conversions, and returns ``results`` (code, output) of other commands by their name
    or flag; ``change`` gets the exported tensors."""

    def run(words):
        commands.append(list(words))
        if words[0] not in CONVERSIONS:
            return next(result for key, result in results.items() if key in words)
        with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(output):
            code = console.main([*words, "--no-checking"] if words[0] == "convert" else list(words))
        if change and words[0] == "convert" and words[words.index("--saver") + 1] == "hf":
            path = f"{words[words.index('--save-dir') + 1]}/model.safetensors"
            tensors = load_file(path)
            change(tensors)
            save_file(tensors, path, metadata={"format": "pt"})
        return code, output.getvalue()

    return run


def passing():
    rejected = (2, "error: --expert-model-parallel-size 2: needs experts; --num-experts N")
    return {
        "--expert-model-parallel-size": rejected,
        "verify-layout": (0, "a table\nequal: losses match one rank (3 s)"),
        "generate": (2, "error: --load tiny: contains no tokenizer"),
        "pretrain": (0, "iteration 4 | lm loss: 4.1"),
        "inspect": (0, "all tensors are equal"),
    }


def written(output):
    return json.loads((output / "card.json").read_text())


def test_card_records_verdicts_figures_and_commands(folder, tmp_path, capsys):
    commands = []
    words = ["--load-hf", str(folder), "--output", str(tmp_path / "card"), "--name", "Tiny"]
    assert card.main(words, run_with(passing(), commands)) == 0
    result = written(tmp_path / "card")
    verdicts = {name: check["verdict"] for name, check in result["checks"].items()}
    passed = ["import, logits", "checksums, names, shapes", "export", "exported bytes", "4 training steps", "resume"]
    passed += ["resumed bytes", "layout tp2", "layout pp2", "layout cp2"]
    assert verdicts == dict.fromkeys(passed, "passed") | {
        "layout ep2": "not applicable",
        "greedy text": "not applicable",
    }
    assert result["parameters"] == 22_688 and result["environment"]["torch"] == torch.__version__
    assert result["checks"]["exported bytes"]["details"] == "21 of 21 exported tensors have the bytes of the folder"
    assert "needs experts" in result["checks"]["layout ep2"]["details"]
    again = next(words for words in commands if "--ckpt-step" in words)
    assert again[again.index("--ckpt-step") + 1] == "2" and "NullTokenizer" in again
    full, resumed = (words[words.index("--save") + 1] for words in commands if words[0] == "pretrain")
    assert full != resumed and again[again.index("--load") + 1] == full
    assert ["inspect", full, resumed] in commands
    assert str(tmp_path) not in (tmp_path / "card" / "card.md").read_text()
    assert "passed          layout tp2" in capsys.readouterr().out
    for output, message in (
        ("card", "exists already; choose another name"), ("card/card.md/x", "card.md is no folder"),
        ("n" * 300, "name too long"),
    ):  # fmt: skip
        words[words.index("--output") + 1] = str(tmp_path / output)
        with pytest.raises(UserError, match=message):
            card.main(words)


def test_card_fails_for_one_changed_bit_and_a_failed_command(folder, tmp_path):
    def change(tensors):
        tensors["model.norm.weight"].view(torch.int32)[3] ^= 1

    words = ["--load-hf", str(folder), "--output", str(tmp_path / "bit")]
    assert card.main(words, run_with(passing(), [], change)) == 1
    assert written(tmp_path / "bit")["checks"]["exported bytes"]["details"].startswith("20 of 21 exported")
    results = passing() | {"inspect": (1, "all settings are equal\nmodel.x: largest difference 1e-3")}
    assert card.main([*words[:-1], str(tmp_path / "resumed")], run_with(results, [])) == 1
    check = written(tmp_path / "resumed")["checks"]["resumed bytes"]
    assert check["verdict"] == "failed" and "largest difference 1e-3" in check["details"]


def test_training_that_fails_after_some_steps_records_the_error(folder, tmp_path):
    results = passing() | {"pretrain": (1, "iteration 1 | lm loss: 4.1\nerror: out of memory")}
    assert card.main(["--load-hf", str(folder), "--output", str(tmp_path / "card")], run_with(results, [])) == 1
    check = written(tmp_path / "card")["checks"]["4 training steps"]
    assert check["verdict"] == "failed" and check["details"].endswith("error: out of memory")


def test_families_without_causal_models_have_no_text(folder, tmp_path, monkeypatch):
    family = dataclasses.replace(get_family("gpt"), auto_model="AutoModelForMaskedLM")
    monkeypatch.setattr(card, "families", lambda: {"gpt": family})
    card.main(["--load-hf", str(folder), "--output", str(tmp_path / "card")], run_with(passing(), []))
    assert "greedy text" not in written(tmp_path / "card")["checks"]


def test_an_export_without_tensors_fails(folder, tmp_path):
    words = ["--load-hf", str(folder), "--output", str(tmp_path / "card")]
    assert card.main(words, run_with(passing(), [], dict.clear)) == 1
    check = written(tmp_path / "card")["checks"]["exported bytes"]
    assert check["verdict"] == "failed" and check["details"].startswith("0 of 0 exported")


def test_steps_and_layouts_are_those_of_the_flags(folder, tmp_path):
    words = ["--load-hf", str(folder), "--output", str(tmp_path / "card"), "--steps"]
    for steps in "1", "3":
        with pytest.raises(UserError, match=f"^--steps {steps}: must be even"):
            card.main([*words, steps], run_with(passing(), []))
    commands = []
    assert card.main([*words, "6", "--layouts", "cp2"], run_with(passing(), commands)) == 0
    assert [words[-1] for words in commands if words[0] == "verify-layout"] == ["2"]
    for name, value in ("--train-iters", "6"), ("--save-interval", "3"):
        assert [words[words.index(name) + 1] for words in commands if words[0] == "pretrain"] == [value] * 2


@pytest.mark.parametrize("text, expected, verdict", [
    ("a prompt:\nthe text\na note on stderr", "the  text", "passed"),
    ("text", "the text", "failed"),
    ("a prompt: so the text", "the text", "failed"),
    ("a prompt: and more", " ", "not applicable"),
])  # fmt: skip
def test_text_passes_if_it_is_that_of_transformers(folder, tmp_path, monkeypatch, text, expected, verdict):
    commands = []
    monkeypatch.setattr(card, "transformers_text", lambda *arguments: expected)
    words = ["--load-hf", str(folder), "--output", str(tmp_path / "card"), "--prompt", "a prompt: "]
    card.main(words, run_with(passing() | {"generate": (0, text)}, commands))
    assert written(tmp_path / "card")["checks"]["greedy text"]["verdict"] == verdict
    command = next(words for words in commands if words[0] == "generate")
    assert command[command.index("--temperature") + 1] == "0"


def test_card_records_why_transformers_gives_no_text(folder, tmp_path, monkeypatch):
    def fail(*arguments):
        raise ImportError("compressed-tensors is required")

    monkeypatch.setattr(card, "transformers_text", fail)
    results = passing() | {"generate": (0, "a text")}
    words = ["--load-hf", str(folder), "--output", str(tmp_path / "card")]
    assert card.main(words, run_with(results, [])) == 1
    check = written(tmp_path / "card")["checks"]["greedy text"]
    reason = "no text: ImportError: compressed-tensors is required"
    assert (check["verdict"], check["details"]) == ("failed", f"a text\ntransformers: {reason}")


def compare(tmp_path, before, after):
    for name, tensors in (("folder", before), ("exported", after)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        save_file(tensors, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
    return card.compare_tensors(str(tmp_path / "folder"), str(tmp_path / "exported"))


def test_equal_bytes_of_another_dtype_or_shape_differ(tmp_path):
    before = {name: torch.ones(2) for name in "abc"}
    after = {"a": torch.ones(2), "b": torch.ones(2).view(torch.int32), "c": torch.ones(1, 2)}
    assert compare(tmp_path, before, after) == (1, 3, [], [])


def test_bytes_of_a_folder_without_heads_are_compared_without_prefix(tmp_path):
    encoder = {"a.weight": torch.ones(2), "b.weight": torch.zeros(2), "position_ids": torch.arange(2)}
    exported = {"bert.a.weight": torch.ones(2), "bert.b.weight": torch.ones(2), "cls.bias": torch.zeros(1)}
    assert compare(tmp_path, encoder, exported) == (1, 2, ["position_ids"], [])


def test_exported_tensors_that_the_folder_lacks_pass_only_if_the_import_created_them(folder, tmp_path):
    """The published AntiBERTy has no pooler: the import begins one at random values, and the export contains it."""

    def change(tensors):
        tensors["pooler.weight"] = torch.ones(2)

    for note, code in (("the folder has no pooler.weight: random values begin there", 0), ("", 1)):
        run = run_with(passing(), [], change)

        def noted(words, run=run, note=note):
            result, output = run(words)
            return result, f"note: {note}\n{output}" if words[0] == "convert" else output

        output = tmp_path / f"card{code}"
        assert card.main(["--load-hf", str(folder), "--output", str(output)], noted) == code
        check = written(output)["checks"]["exported bytes"]
        assert check["details"].endswith("21 of 21 exported tensors have the bytes of the folder; not in the folder: "
                                         "pooler.weight")  # fmt: skip


@pytest.mark.parametrize("count, text", [(2, "cd"), (16, "cdef")])
def test_text_of_transformers_ends_before_the_end_token(tmp_path, count, text):
    folder = scripted_folder(tmp_path, "abcdef</s>", {"eos_token_id": [255, 257]})
    assert card.transformers_text(folder, "ab", count) == text
