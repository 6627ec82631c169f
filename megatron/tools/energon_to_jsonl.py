"""Convert a data set of megatron-energon to JSON lines and image files, which training reads.

    python tools/energon_to_jsonl.py --input vqa/ --output vqa_jsonl/

Samples become conversations, in the order of the shards; image files keep their bytes. A blend becomes several folders.
"""

import dataclasses
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from megatron.core.config.commands import tool_parser
from megatron.core.config.errors import UserError, counted
from megatron.core.datasets.conversations.formats import Line
from megatron.core.datasets.conversations.images import MARK
from megatron.core.safe_files import create_file

ANSWERS = ("answers", "caption", "text")
FIRST_BYTES = {b"\xff\xd8": "jpg", b"\x89PNG": "png", b"GIF8": "gif", b"RIFF": "webp"}


class Decoder:
    """A decoder of energon: JSON and texts as values, images and other files as bytes."""

    def __call__(self, sample: Mapping[str, Any]) -> Line:
        loads: dict[str, Callable[[bytes], Any]] = {"json": json.loads, "txt": bytes.decode, "text": bytes.decode}
        ending = {name: name.split(".")[-1].lower() for name in sample}
        return {name: loads[ending[name]](data) if ending[name] in loads else data for name, data in sample.items()}

    def config(self) -> Line:
        return {}


def converted(sample: Any, prompt: str) -> tuple[Line, list[bytes]] | None:
    """Return the line of a sample (a data class of energon, or a dict of files) without the paths of its images, and
    the files of the images; None without an answer. Raises UserError for a sample of no known kind."""
    names = [] if isinstance(sample, dict) else [field.name for field in dataclasses.fields(sample)]
    fields = {name: getattr(sample, name) for name in names} or _crude(sample)
    if any(_listed(fields.get(name)) for name in ("video", "videos", "audio")):
        raise UserError("has video or sound, which is not supported")
    images = _listed(next((fields[name] for name in ("image", "images", "imgs") if fields.get(name) is not None), None))
    chat = next((fields[name] for name in ("messages", "conversations", "conversation") if fields.get(name)), None)
    if (sequence := fields.get("sequence")) is not None:
        turns, images = _interleaved(sequence)
        if not images:
            return {"text": turns[0]["value"]}, []
    elif chat is not None:
        turns = [_turn(turn) for turn in (json.loads(chat) if isinstance(chat, str) else chat)]
    elif not images and isinstance(fields.get("text"), str):
        return {"text": fields["text"]}, []
    elif (answer := _answer(fields)) is None:
        return None
    else:
        turns = [{"from": "user", "value": fields.get("context", prompt)}, {"from": "assistant", "value": answer}]
    if wrong := {type(image).__name__ for image in images} - {"bytes"}:
        raise UserError(f"images must be bytes of files, not {', '.join(wrong)}")
    line = {name: fields[name] for name in ("system", "tools") if fields.get(name)}
    return {**line, "conversations": _marked(turns, len(images))}, images


def _crude(sample: Line) -> Line:
    """Return the fields of a dict of files: its JSON object, its text as the caption, its images in their order."""
    fields, images = dict[str, Any](), list[Any]()
    for name, value in sample.items():
        extension = name.split(".")[-1].lower()
        if extension == "json":
            fields |= value if isinstance(value, dict) else {"conversations": value}
        elif extension in ("txt", "text"):
            fields["caption"] = value
        elif extension in ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff"):
            images.append(value)
        elif extension in ("mp4", "avi", "mov", "webm", "mkv", "mp3", "wav", "flac"):
            fields["video"] = name
    return {**fields, "image": images} if images else fields


def _listed(value: Any) -> list[Any]:
    return [] if value is None else [*value] if isinstance(value, list | tuple) else [value]


def _interleaved(sequence: Iterable[Any]) -> tuple[list[Line], list[Any]]:
    """Return turns and images: images, with a text before the first, from the user; texts after them are answers."""
    turns, images = [{"from": "user", "value": ""}], list[Any]()
    for piece in sequence:
        if isinstance(piece, str) and MARK in piece:
            raise UserError(f"a text has {MARK}, the mark of an image; remove it")
        role = "assistant" if isinstance(piece, str) and images else "user"
        if role != turns[-1]["from"]:
            turns.append({"from": role, "value": ""})
        if not isinstance(piece, str):
            images.append(piece)
        turns[-1]["value"] += piece if isinstance(piece, str) else f"{MARK}\n"
    return turns, images


def _answer(fields: Mapping[str, Any]) -> str | None:
    """Return the answer of a sample: of several answers the first with the largest weight."""
    if fields.get("choices") is not None:
        return str(fields["choices"][int(fields.get("correct_choice_idx") or 0)])
    if not {"context", *ANSWERS} & fields.keys():
        raise UserError(f"has no known fields; it has {', '.join(fields) or 'no JSON, text or image'}")
    answers = _listed(next((fields[name] for name in ANSWERS if fields.get(name)), None))
    weights = fields.get("answer_weights")
    pairs = zip([1.0] * len(answers) if weights is None else weights, answers)
    return str(max(pairs, key=lambda pair: float(pair[0]))[1]) if answers else None


def _turn(turn: Any) -> Line:
    """Return a message, its parts as one text with a mark for each image."""
    content = turn.get("value", turn.get("content"))
    if isinstance(content, list):
        parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
        content = "".join(MARK if part["type"].startswith("image") else part["text"] for part in parts)
    elif MARK not in str(content):
        return turn
    return {"from": turn.get("from", turn.get("role")), "value": content}


def _marked(turns: list[Line], number: int) -> list[Line]:
    """Return the turns with a mark for each image: before the first question unless texts have marks."""
    marks = sum(str(turn.get("value")).count(MARK) for turn in turns)
    first = next((turn for turn in turns if turn.get("from", turn.get("role")) in ("human", "user")), None)
    if number and not marks and first is not None:
        value = f"{MARK}\n" * number + str(first.get("value", first.get("content")))
        return [{"from": "user", "value": value} if turn is first else turn for turn in turns]
    if marks == number:
        return turns
    raise UserError(f"has {counted(marks, 'mark')} {MARK} for {counted(number, 'image')}")


def write(samples: Iterable[Any], folder: str, prompt: str) -> tuple[int, int]:
    """Write ``conversations.jsonl`` and ``images/`` into a new folder; return the number of lines and the number of
    samples without an answer. Raises UserError with the key of a sample that cannot be converted."""
    counts = [0, 0]
    os.makedirs(folder)
    with create_file(f"{folder}/part") as lines:  # only a complete file is named conversations.jsonl
        for sample in samples:
            try:
                line, images = converted(sample, prompt) or ({}, [])
            except (UserError, AttributeError, LookupError, TypeError, ValueError) as error:
                key = sample["__key__"] if isinstance(sample, dict) else sample.__key__
                raise UserError(f"sample {key}: {error if isinstance(error, UserError) else repr(error)}") from error
            paths = []
            for index, image in enumerate(images):
                ending = next((name for start, name in FIRST_BYTES.items() if image.startswith(start)), "img")
                paths.append(f"images/{counts[1] // 1000:05}/{counts[1] + 1:08}_{index}.{ending}")
                os.makedirs(os.path.dirname(f"{folder}/{paths[-1]}"), exist_ok=True)
                with create_file(f"{folder}/{paths[-1]}") as file:
                    file.write(image)
            counts[bool(line)] += 1
            if line:
                lines.write(json.dumps({**line, **({"images": paths} if paths else {})}).encode() + b"\n")
    os.rename(f"{folder}/part", f"{folder}/conversations.jsonl")
    return counts[1], counts[0]


def _datasets(path: str, split: str) -> Iterator[tuple[float | None, Iterable[Any]]]:
    """Yield the weight in the blend and the samples, in order, of each data set below ``path``."""
    try:
        energon, errors = import_module("megatron.energon"), import_module("megatron.energon.errors")
    except ImportError as error:
        raise UserError(f"--input {path}: needs megatron-energon ({error}): pip install megatron-energon") from None
    one = energon.WorkerConfig(rank=0, world_size=1, num_workers=0, global_error_handler=errors.reraise_exception)
    options = {"training": False, "split_part": split, "worker_config": one, "decoder": Decoder()}
    for part in energon.load_dataset(os.path.abspath(path)).get_datasets(**options).datasets:
        weight = part.repetitions * len(part.dataset) if part.repetitions else part.weight
        yield weight, energon.get_loader(part.dataset.build(), watchdog_timeout_seconds=None)


def main(argv: Sequence[str]) -> int:
    """Raises UserError or OSError."""
    parser = tool_parser(__doc__)
    parser.add_argument("--input", required=True, help="prepared folder, or a blend (YAML); their loaders are run")
    parser.add_argument("--output", required=True, help="new folder for the JSON lines and image files")
    parser.add_argument("--split", default="train", help="part of the data set")
    parser.add_argument("--prompt", default="Describe the image.", help="question of captions and texts in images")
    args = parser.parse_args(argv)
    if os.path.lexists(args.output):
        raise UserError(f"--output {args.output}: exists and is not overwritten; give a new folder")
    warnings.filterwarnings("ignore", message="'pin_memory' argument")
    paths = []
    try:
        for index, (weight, samples) in enumerate(_datasets(args.input, args.split)):
            folder = args.output if weight is None else f"{args.output}/{index}"
            written, without = write(samples, folder, args.prompt)
            print(f"{folder}/conversations.jsonl: {counted(written, 'line')}; without an answer, left out: {without}")
            paths += [*([] if weight is None else [f"{weight:.6g}"]), f"{folder}/conversations.jsonl"]
    except (UserError, OSError):
        raise
    except Exception as error:  # energon raises many classes
        reason = f"--input {args.input}: cannot be read ({str(error) or repr(error)})"
        raise UserError(f"{reason}; give a folder that energon prepare has finished, or a blend of them") from error
    print("--data-path", *paths)
    return 0
