"""tools/energon_to_jsonl.py: samples of energon, and data sets that it prepared, as conversations.

The second part runs if megatron-energon is installed: ``pip install --target FOLDER megatron-energon``, and the folder
on PYTHONPATH.
"""

import io
import json
import sys
import tarfile
from dataclasses import dataclass, make_dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.console import run_tool
from megatron.core.config.errors import UserError
from megatron.core.datasets.conversations.images import ImageReader, item_paths
from megatron.core.datasets.conversations.prepare import Report
from megatron.tools.energon_to_jsonl import Decoder, converted, write

PNG, JPEG = b"\x89PNG 1", b"\xff\xd8 2"


def turns(*pairs):
    return [{"from": role, "value": value} for role, value in pairs]


def sample(**fields):
    return make_dataclass("Sample", fields)(**fields)


QUESTION = [("user", "<image>\nWhat?"), ("assistant", "A dog.")]
CHAT = [
    {"role": "user", "content": [{"type": "text", "text": "Which of "}, {"type": "image"}, {"type": "image"}, "?"]},
    {"role": "assistant", "content": "The first."},
]
CASES = {  # sample, conversation or text, images
    "caption": (sample(image=PNG, caption="A dog."), [("user", "<image>\nLook:"), ("assistant", "A dog.")], [PNG]),
    "question": (sample(image=PNG, context="What?", answers="A dog.", answer_weights=None), QUESTION, [PNG]),
    "question with a mark": (
        sample(image=PNG, context="What?<image>", answers=["A dog."]),
        [("user", "What?<image>"), ("assistant", "A dog.")], [PNG],
    ),
    "weighted answers": (
        sample(image=PNG, context="What?", answers=["A cat.", "A dog.", "A cow."], answer_weights=[0.1, 0.5, 0.4]),
        QUESTION, [PNG],
    ),
    "choices": (
        sample(image=PNG, context="What?", choices=["A cat.", "A dog."], correct_choice_idx=1), QUESTION, [PNG],
    ),
    "text in an image": (sample(image=PNG, text="STOP"), [("user", "<image>\nLook:"), ("assistant", "STOP")], [PNG]),
    "text": (sample(text="Once"), "Once", []),
    "interleaved": (
        sample(sequence=["Two pets: ", PNG, JPEG, "a cat", " and a dog.", PNG, "The cat."]),
        [("user", "Two pets: <image>\n<image>\n"), ("assistant", "a cat and a dog."), ("user", "<image>\n"),
         ("assistant", "The cat.")],
        [PNG, JPEG, PNG],
    ),
    "interleaved text": (sample(sequence=["Once ", "more"]), "Once more", []),
    "chat": (
        sample(imgs=[PNG, JPEG], videos=[], conversation=json.dumps(CHAT)),
        [("user", "Which of <image><image>?"), CHAT[1]], [PNG, JPEG],
    ),
    "files of a caption": (
        {"__key__": "1", "jpg": PNG, "txt": "A dog."}, [("user", "<image>\nLook:"), ("assistant", "A dog.")], [PNG],
    ),
    "files of a chat": (
        {"__key__": "1", "1.PNG": PNG, "2.jpg": JPEG, "json": {"conversations": CHAT, "images": ["a.png", "b.jpg"]}},
        [("user", "Which of <image><image>?"), CHAT[1]], [PNG, JPEG],
    ),
    "list of turns": (
        {"__key__": "1", "jpg": PNG, "json": turns(("user", "What?"), ("assistant", "A dog."))}, QUESTION, [PNG],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_samples_become_conversations(case):
    value, expected, images = CASES[case]
    line, files = converted(value, "Look:")
    if isinstance(expected, str):
        assert line == {"text": expected}
    else:
        assert line == {"conversations": [turn if isinstance(turn, dict) else turns(turn)[0] for turn in expected]}
    assert files == images


def test_tools_and_system_messages_stay():
    line, _ = converted(sample(messages=CHAT[1:], system="Be brief.", tools=[{"name": "f"}], image=None), "")
    assert line == {"conversations": CHAT[1:], "system": "Be brief.", "tools": [{"name": "f"}]}


@pytest.mark.parametrize("value, message", [
    (sample(image=object(), caption="A dog."), "images must be bytes of files, not object"),
    (sample(image=PNG, context="<image><image>", answers="A"), "has 2 marks <image> for 1 image"),
    (sample(sequence=[PNG, "a <image>"]), "a text has <image>"),
    (sample(image=PNG, video=[1], caption="A"), "has video or sound"),
    ({"__key__": "1", "mp4": b"", "txt": "A"}, "has video or sound"),
    ({"__key__": "1", "jpg": PNG, "cls": b"3"}, "has no known fields; it has image"),
])  # fmt: skip
def test_other_samples_are_errors(value, message):
    with pytest.raises(UserError, match=message):
        converted(value, "Look:")


@dataclass
class Keyed:
    __key__: str
    image: object
    caption: object


def test_written_lines_are_read_by_training(tmp_path):
    samples = [Keyed("a", PNG, "A dog."), Keyed("b", JPEG, None), Keyed("c", [JPEG, b"?"], ["Two."])]
    assert write(samples, str(tmp_path / "out"), "Look:") == (2, 1)
    lines = [json.loads(line) for line in (tmp_path / "out" / "conversations.jsonl").read_text().splitlines()]
    reader = ImageReader(None, 1, str(tmp_path / "out"), False)
    items = [item for number, line in enumerate(lines, 1) for item in reader.read(line, Report(), number)]
    files = [[reader.place(path) for path in item_paths(item)] for item in items]
    assert [[Path(path).read_bytes() for path in paths] for paths in files] == [[PNG], [JPEG, b"?"]]
    assert [path.rsplit(".")[-1] for paths in files for path in paths] == ["png", "jpg", "img"]
    assert items[1].messages[0]["content"][2] == {"type": "text", "text": "Look:"}
    with pytest.raises(UserError, match="sample d: images must be bytes"):
        write([Keyed("d", 3, "A dog.")], str(tmp_path / "other"), "Look:")
    assert not (tmp_path / "other" / "conversations.jsonl").exists()


def test_decoder_loads_json_and_text_only():
    files = {"__key__": "1.json", "jpg": PNG, "a.JSON": b"[1]", "txt": b"A", "pyd": b"cos\nsystem\n(S'exit'\ntR."}
    del files["__key__"]
    assert Decoder()(files) == {**files, "a.JSON": [1], "txt": "A"}


def run(capfd, *words):
    code = run_tool("energon-to-jsonl", [str(word) for word in words])
    return code, capfd.readouterr()


def test_package_that_is_not_installed_is_one_message(tmp_path, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.energon", None)
    code, text = run(capfd, "--input", tmp_path, "--output", tmp_path / "out")
    assert code and "pip install megatron-energon" in text.err and text.err.count("\n") == 1


@pytest.mark.parametrize("words", [["--input", "a"], ["--output", "b"], ["--inp", "a", "--output", "b"]])
def test_input_and_output_are_required(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        run_tool("energon-to-jsonl", words)
    assert "are required" in capsys.readouterr().err


def test_repeated_data_sets_weigh_their_samples_times_repetitions(tmp_path, capfd, monkeypatch):
    """The other parts keep the weight of the blend. With stand-ins for energon's loaders."""

    class Samples(list):
        build = list.copy

    def part(number, **blend):
        samples = Samples(Keyed(str(index), None, "A dog.") for index in range(number))
        return SimpleNamespace(dataset=samples, **{"weight": None, "repetitions": None, **blend})

    parts = SimpleNamespace(datasets=[part(3, repetitions=2), part(4, repetitions=0.5), part(5, weight=0.25)])
    energon = SimpleNamespace(
        WorkerConfig=dict, load_dataset=lambda path: SimpleNamespace(get_datasets=lambda **options: parts),
        get_loader=lambda samples, **options: samples,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "megatron.energon", energon)
    monkeypatch.setitem(sys.modules, "megatron.energon.errors", SimpleNamespace(reraise_exception=None))
    code, text = run(capfd, "--input", tmp_path, "--output", tmp_path / "out", "--prompt", "Look:")
    paths = [f"{tmp_path}/out/{number}/conversations.jsonl" for number in range(3)]
    assert code == 0 and text.out.endswith(f"--data-path 6 {paths[0]} 2 {paths[1]} 0.25 {paths[2]}\n"), text
    assert [Path(path).read_text().count("\n") for path in paths] == [3, 4, 5]


# -- with energon ------------------------------------------------------------------------------------------------------

has_energon = pytest.mark.skipif(find_spec("megatron.energon") is None, reason="megatron-energon is not installed")
ANSWERS = {"image": "jpg", "context": "json[0][value]", "answers": "json[1][value]"}


def prepare(folder, kind, fields, suffix="jpg", shards=2):
    """Two shards with three samples each, prepared by energon's program."""
    from megatron.energon.cli.main import main

    folder.mkdir()
    for shard in range(shards):
        with tarfile.open(folder / f"shard_{shard}.tar", "w") as tar:
            for number in range(shard * 3, shard * 3 + 3):
                text = json.dumps(turns(("user", f"Q{number}?"), ("assistant", f"A{number}")))
                for ending, data in ((suffix, JPEG + bytes([number])), ("json", text.encode())):
                    info = tarfile.TarInfo(f"{number:04}.{ending}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    words = ["prepare", str(folder), "--non-interactive", "--split-ratio", "1,0,0", "--num-workers", "1"]
    fields = [] if fields is None else ["--field-map", json.dumps(fields)]
    main([*words, "--sample-type", kind, *fields], standalone_mode=False)
    return folder


@has_energon
@pytest.mark.parametrize("kind, fields, suffix", [("VQASample", ANSWERS, "jpg"), ("CrudeWebdataset", None, "1.jpg")])
def test_data_sets_of_energon_become_lines_in_order_of_the_shards(tmp_path, capfd, kind, fields, suffix):
    folder, out = prepare(tmp_path / "set", kind, fields, suffix), tmp_path / "out"
    code, text = run(capfd, "--input", folder, "--output", out)
    assert code == 0 and f"--data-path {out}/conversations.jsonl\n" in text.out, text
    lines = [json.loads(line) for line in (out / "conversations.jsonl").read_text().splitlines()]
    expected = [turns(("user", f"<image>\nQ{number}?"), ("assistant", f"A{number}")) for number in range(6)]
    assert [line["conversations"] for line in lines] == expected
    assert [(out / line["images"][0]).read_bytes() for line in lines] == [JPEG + bytes([n]) for n in range(6)]
    assert run(capfd, "--input", folder, "--output", out)[1].err.count("exists and is not overwritten") == 1


@has_energon
def test_blend_of_energon_becomes_folders_with_weights(tmp_path, capfd):
    for name in "ab":
        prepare(tmp_path / name, "VQASample", ANSWERS, shards=1 + (name == "b"))
    parts = "\n".join(f"    - weight: {weight}\n      path: {path}" for path, weight in (("a", 3), ("b", 1)))
    blend = f"__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n{parts}\n"
    blend = blend.replace("    - ", "      - ").replace("      path", "        path")
    (tmp_path / "blend.yaml").write_text(blend)
    code, text = run(capfd, "--input", tmp_path / "blend.yaml", "--output", tmp_path / "out")
    paths = [f"{tmp_path}/out/{number}/conversations.jsonl" for number in range(2)]
    assert code == 0 and f"--data-path 0.75 {paths[0]} 0.25 {paths[1]}\n" in text.out, text
    assert [Path(path).read_text().count("\n") for path in paths] == [3, 6]


@has_energon
def test_damaged_data_sets_of_energon_are_one_message(tmp_path, capfd):
    folder = prepare(tmp_path / "set", "VQASample", {**ANSWERS, "answers": "json[7][value]"})
    for number, (words, message) in enumerate([
        ([], "cannot be read ("),
        (["--split", "no"], "Invalid split part"),
        (["--input", tmp_path], "energon prepare"),
    ]):  # fmt: skip
        code, text = run(capfd, "--input", folder, "--output", tmp_path / f"out{number}", *words)
        assert code and message in text.err and "Traceback" not in text.err, text.err
