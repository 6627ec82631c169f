"""Whatever lies in the place of a file that a program reads, or is changed in it: the value, or one message in time."""

import argparse
import json
import os
import random
import shutil
import time

import pytest
import torch

from megatron.core.config.errors import UserError
from megatron.export.hf.conversion import placements
from megatron.export.hf.family import complete
from megatron.export.hf.registry import load_settings
from tests.test_utils import crafted_files, published_configs
from tests.test_utils.crafted_files import KINDS, ODD_VALUES, PLANTS, Kind, change, files_of, outcome, time_limit

CHANGES = 14
"""Of each kind; tests/torture/crafted.py makes as many as you like."""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Kind -> a folder with valid files, made once."""
    built = {}

    def write(name):
        if name not in built:
            built[name] = tmp_path_factory.mktemp("valid")
            KINDS[name].write(built[name])
        return built[name]

    return write


def copied(source, target):
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    return target


@pytest.mark.parametrize("name", KINDS)
def test_pipes_devices_and_folders_in_the_place_of_files_are_named(name, written, tmp_path):
    valid = written(name)
    state, value = outcome(KINDS[name], copied(valid, tmp_path / "a"))
    assert state == "value", "the valid files are read"
    for file in (path.relative_to(valid) for path in files_of(valid)):
        for plant, put in PLANTS.items():
            folder = copied(valid, tmp_path / "a")
            (folder / file).unlink()
            put(folder / file)
            state, result = outcome(KINDS[name], folder)
            rebuilt = name == "index cache" and result == value
            empty = plant == "empty file" and file.name in KINDS[name].may_be_empty
            assert state == "error" or rebuilt or empty or file.name in KINDS[name].optional, (str(file), plant, result)


@pytest.mark.parametrize("name", KINDS)
def test_changed_files_give_their_value_or_one_message(name, written, tmp_path):
    valid, kind = written(name), KINDS[name]
    _, value = outcome(kind, copied(valid, tmp_path / "a"))
    files = [path.relative_to(valid) for path in files_of(valid)]
    for number in range(CHANGES):
        generator = random.Random(f"{name}/{number}")
        folder = copied(valid, tmp_path / "a")
        change(folder / generator.choice(files), generator)
        state, result = outcome(kind, folder)
        assert state == "error" or not kind.checksums or result == value, f"a silent difference in change {number}"


CONFIGS = {name: each for name, each in vars(published_configs).items() if name.isupper()}


@pytest.mark.parametrize("name", CONFIGS)
def test_odd_values_in_config_json_are_named(name, tmp_path):
    config, generator = CONFIGS[name], random.Random(name)
    for _ in range(30):
        key, value = generator.choice([*config]), generator.choice(ODD_VALUES)
        (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2, key: value}))
        with time_limit():
            try:
                family, settings, _ = load_settings(tmp_path)
                placements(family, complete(settings))
            except UserError as error:
                assert str(error)


@pytest.mark.parametrize(("key", "value"), [
    ("architectures", 5), ("architectures", "LlamaForCausalLM"), ("architectures", {"a": 1}), ("vocab_size", 2**62),
    ("vocab_size", 2**70), ("num_attention_heads", "x"), ("num_attention_heads", 0), ("num_hidden_layers", 10**9),
    ("num_hidden_layers", 1e400), ("hidden_size", 2**62), ("hidden_size", 1.5), ("head_dim", []), ("rms_norm_eps", "x"),
    ("rope_scaling", 5), ("rope_scaling", {"rope_type": 5}), ("max_position_embeddings", -1), ("model_type", {}),
    ("hidden_act", ["silu"]), ("tie_word_embeddings", 2),
])  # fmt: skip
def test_a_value_of_another_type_or_size_in_config_json_is_one_message(key, value, written, tmp_path):
    folder = copied(written("hf"), tmp_path / "b")
    path = folder / "a" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    state, message = outcome(KINDS["hf"], folder)
    assert state == "error" and "\n" not in message


@pytest.mark.parametrize("text", [
    "[" * 10**5, '{"a":' * 10**5, '{"iteration": 1, "statistics": 5}', '{"iteration": 1, "statistics": [1]}',
    '{"iteration": ' + "9" * 5000 + "}", '"\\ud800"', "\x00", '{"iteration": "1"}', '{"iteration": NaN}',
])  # fmt: skip
def test_foreign_lines_of_metrics_are_cut_at_resume(text, written, tmp_path):
    folder = copied(written("metrics"), tmp_path / "b")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join([*lines[:2], text + "\n", *lines[2:]]))
    assert outcome(KINDS["metrics"], folder) == ("value", 3), "iterations 4 and 5, and the foreign line"
    assert (folder / "metrics.jsonl").read_text() == "".join(lines[:3])


def edited(folder, **changes):
    path = folder / "tokenizer.json"
    value = json.loads(path.read_text())
    for key, new in changes.items():
        value[key] = new(value[key])
    path.write_text(json.dumps(value))


WORDS = {"<|endoftext|>": 0, "The": 1}
UNKNOWN = {
    "WordPiece": {"model": {"type": "WordPiece", "unk_token": "[NONE]", "continuing_subword_prefix": "##",
                            "max_input_chars_per_word": 100, "vocab": WORDS}},
    "WordLevel": {"model": {"type": "WordLevel", "unk_token": "[NONE]", "vocab": WORDS}},
    "Unigram": {"model": {"type": "Unigram", "unk_id": None, "vocab": [[word, -1.0] for word in WORDS]}},
    "BPE": {"model": {"type": "BPE", "unk_token": "[NONE]", "vocab": WORDS, "merges": []}, "pre_tokenizer": None},
    "merges": {"model": {"type": "BPE", "vocab": WORDS, "merges": [["x", "y"]]}},
    "added token": {"added_tokens": [{"id": 5, "content": "unknown", "single_word": False, "lstrip": False,
                                      "rstrip": False, "normalized": False, "special": True}]},
    "added number": {"added_tokens": [5]}, "added without content": {"added_tokens": [{"id": 0}]},
    "added table": {"added_tokens": {"a": 1}},
    "template": {"post_processor": {"type": "TemplateProcessing", "pair": [], "special_tokens": {},
                                    "single": [{"SpecialToken": {"id": "?", "type_id": 0}}]}},
    "far": {"model": {"type": "BPE", "vocab": {**WORDS, "far": 2**31}, "merges": []}},
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_tokenizer_with_unknown_tokens_is_one_message(name, written, tmp_path):
    folder = copied(written("hf tokenizer"), tmp_path / "b")
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **UNKNOWN[name]}))
    state, message = outcome(KINDS["hf tokenizer"], folder)
    assert state == "error" and "\n" not in message or name == "BPE", "characters outside of a BPE are left out"


def test_a_reader_that_hangs_or_raises_anything_else_is_found(tmp_path, monkeypatch):
    def raises(folder):
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        outcome(Kind(None, raises), tmp_path)
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(crafted_files, "LIMIT", 0.2)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="no end after"):
        outcome(Kind(None, lambda folder: (folder / "pipe").read_bytes()), tmp_path)
    assert time.monotonic() - started < 30

    def escapes(folder):
        raise OSError("\x1b[2J")

    with pytest.raises(AssertionError, match="control characters"):
        outcome(Kind(None, escapes), tmp_path)


def _places(holder):
    """(holder, key) of every value in nested dictionaries, lists and namespaces."""
    holder = vars(holder) if isinstance(holder, argparse.Namespace) else holder
    keys = list(holder) if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
    for key in keys:
        yield holder, key
        yield from _places(holder[key])


TENSORS = [torch.zeros(0), torch.zeros(3), torch.ones(2, 3, dtype=torch.int32), torch.tensor(float("nan")),
           torch.zeros(1).expand(10**9), torch.empty(16, device="meta"), (1, 2)]  # fmt: skip


@pytest.mark.parametrize("name, file", [
    ("megatron torch", "model_optim_rng.pt"), ("megatron torch ranks", "model_optim_rng.pt"),
    ("megatron torch buffers", "distrib_optim.pt"),
])  # fmt: skip
def test_odd_values_in_files_of_ranks_give_a_value_or_one_message(name, file, written, tmp_path):
    """Every place of the dictionary of one rank; the zip archive itself is valid."""
    valid, kind, draw = written(name), KINDS[name], random.Random(name)
    path = max(valid.rglob(file)).relative_to(valid)
    folder = copied(valid, tmp_path / "a")
    for number in range(len([*_places(torch.load(valid / path, weights_only=False))])):
        state = torch.load(valid / path, weights_only=False)
        holder, key = [*_places(state)][number]
        odd = draw.choice([*ODD_VALUES, *TENSORS])
        if draw.random() < 0.2:
            del holder[key]
        else:
            holder[key] = odd
        (folder / path).unlink(missing_ok=True)  # 3 ms less than to truncate it
        torch.save(state, folder / path)
        try:
            outcome(kind, folder)
        except Exception as error:
            raise AssertionError(f"{key} = {odd!r:.60}: {type(error).__name__}: {error}") from error
