"""Tokenize a JSON lines file of conversations once; the result is stored next to it and shared by all processes.

The key of the stored arrays has the file, the tokenizer and its chat templates. Sequence length, packing and layout are
no part of it. Every line has an effect or an error, or is counted in the report."""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from megatron.core.config.errors import UserError, counted
from megatron.core.datasets.conversations.formats import Conversation, Item, Line, check_conversation, recognize
from megatron.core.datasets.conversations.masks import (
    Tokens,
    answer_spans,
    changed_message,
    tokenize_answers,
    tokenize_text,
)
from megatron.core.datasets.preprocessing.worker import end_with_parent
from megatron.core.safe_files import open_regular, parse_json
from megatron.core.tokenizers.base import Tokenizer
from megatron.data.index_cache import Arrays, IndexCache, Layout, file_stamp

logger = logging.getLogger(__name__)

Entry = TypeVar("Entry")
Content = TypeVar("Content")
NumberedLine: TypeAlias = tuple[int, bytes]
VERSION = 2
MAX_LINE_BYTES = 8 << 20
LINES_PER_TASK = 256
PARALLEL_BYTES = 4 << 20
"""A smaller file is tokenized in this process."""
MAX_WORKERS = 16
PROGRESS_SECONDS = 10.0


@dataclass
class Report:
    """Counts of a file's lines and conversations."""

    lines: int = 0
    conversations: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """By reason; ``key NAME``: lines with a key that their format does not have."""
    first: dict[str, int] = field(default_factory=dict)
    """First line of each count."""
    formats: dict[str, int] = field(default_factory=dict)
    """First line of each format."""

    def count(self, name: str, line: int) -> None:
        """Count ``line`` (from 1) under ``name``."""
        self.counts[name] += 1
        self.first[name] = min(line, self.first.get(name, line))

    def add(self, other: Report) -> None:
        """Add the report of later lines."""
        self.lines += other.lines
        self.conversations += other.conversations
        self.counts += other.counts
        self.first = {**other.first, **self.first}
        self.formats = {**other.formats, **self.formats}

    def text(self) -> Iterator[str]:
        """Yield sentences for the log."""
        kinds = ", ".join(self.formats) or "nothing"
        yield f"{counted(self.lines, 'line')} ({kinds}), {counted(self.conversations, 'conversation')}"
        sentences = {
            "blank": "blank lines or empty conversations",
            "without_answer": "conversations without an answer to train on, left out",
            "rendered_separately": "conversations of which the chat template renders earlier answers in another way "
            "once messages follow; these answers are sequences of their own",
            "changed": "conversations of which the chat template leaves out or changes a message",
            "equal": "preference pairs of equal completions, left out",
            "unreadable_image": "conversations with an image that cannot be read, left out",
            "unpaired": "preference pairs of which a completion has no token with a loss, left out",
        }
        for name, number in self.counts.items():
            sentence = sentences.get(name, f"lines with the {name}, which is not read")
            yield f"{number} {sentence} (first: line {self.first[name]})"


DTYPES = {"tokens": "int32", "lengths": "int64", "firsts": "int64", "lines": "int64", "items": "int64"}


class Part(NamedTuple):
    """Tokenized lines."""

    tokens: np.ndarray
    """int32 [tokens]: the id, or -1 - id without a loss."""
    lengths: np.ndarray
    """int64 [sequences], as the next three."""
    firsts: np.ndarray
    """Index of the first label with a loss, at least 1."""
    lines: np.ndarray
    """Line of each sequence, from 1."""
    items: np.ndarray
    """Place of its conversation in the line, from 0."""
    report: Report


class Reader(NamedTuple, Generic[Content]):
    """Kind of file: what its lines contain."""

    name: str
    read: Callable[[Line, Report, int], Iterator[Content]]
    """Yield what a JSON object contains. The report counts what is not read, with the number of the line."""
    sequences: Callable[[Tokenizer, Content, Report, int], list[Tokens]]


def template_hash(tokenizer: Tokenizer) -> str:
    """Return a hash of the tokenizer's chat templates and their special tokens, "" without one."""
    chat = tokenizer.chat
    content = [] if chat is None else [dict(chat.templates), dict(chat.special_tokens)]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest() if content else ""


def prepared(
    path: str, tokenizer: Tokenizer, folder: str | None, reader: Reader | None = None
) -> tuple[Arrays, Report, str]:
    """Return the arrays of :class:`Part` for the file ``path``, its report, and the key of the stored arrays. One
    process tokenizes the file, others wait for it. ``reader`` defaults to :data:`CONVERSATIONS`. Raises UserError, with
    file and line, for an unreadable line."""
    reader = reader or CONVERSATIONS
    try:
        stamp = file_stamp(path)
    except OSError as error:
        raise _unreadable(path, error) from None
    identity = {
        "version": VERSION,
        "path": os.path.abspath(path),
        "size_and_mtime": stamp,
        "tokenizer": tokenizer.fingerprint,
        "chat_template": template_hash(tokenizer),
    }
    layout: Layout = {name: ((None,), dtype) for name, dtype in {**DTYPES, "report": "uint8"}.items()}
    if reader is not CONVERSATIONS:
        identity["reader"] = reader.name
    cache = IndexCache(folder or f"{path}.cache", reader.name, identity, layout)
    arrays = dict(cache.get(partial(_build, path, tokenizer, reader)))
    stored = json.loads(bytes(arrays.pop("report")))
    return arrays, Report(**{**stored, "counts": Counter(stored["counts"])}), cache.key


def _build(path: str, tokenizer: Tokenizer, reader: Reader) -> Arrays:
    parts, report = [], Report()
    for part in _tokenize_file(path, partial(tokenize_lines, path, tokenizer, reader=reader)):
        parts.append(part)
        report.add(part.report)
        if len(report.formats) > 1:
            (first, start), (second, line), *_ = sorted(report.formats.items(), key=lambda entry: entry[1])
            reason = f"has the format {second}, line {start} has {first}"
            raise UserError(f"{path}, line {line}: {reason}; put each format in a separate file")
    arrays = {
        name: np.concatenate([np.empty(0, dtype), *(getattr(part, name) for part in parts)])
        for name, dtype in DTYPES.items()
    }
    return {**arrays, "report": np.frombuffer(json.dumps(vars(report)).encode(), dtype=np.uint8)}


def _unreadable(path: str, error: OSError) -> UserError:
    if os.path.isdir(os.path.join(path, ".nv-meta")):
        return UserError(f"{path}: is a data set of megatron-energon; convert it with tools/energon_to_jsonl.py")
    return UserError(f"{path}: cannot be read ({error.strerror}); give a JSON lines file of conversations")


def read_lines(path: str) -> Iterator[NumberedLine]:
    """Yield (number from 1, content) of each line of a text file. Raises UserError, also beyond ``MAX_LINE_BYTES``."""
    try:
        with open_regular(path) as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise UserError(
                        f"{path}, line {number}: is longer than {MAX_LINE_BYTES >> 20} MiB; is this a JSON lines file, "
                        "with one conversation per line? Shorten or split it"
                    )
                yield number, line
    except OSError as error:
        raise _unreadable(path, error) from None


def _tokenize_file(path: str, tokenize: Callable[[Sequence[NumberedLine]], Part]) -> Iterator[Part]:
    tasks = _batches(read_lines(path), LINES_PER_TASK)
    if os.path.getsize(path) < PARALLEL_BYTES:
        yield from map(tokenize, tasks)
        return
    workers = min(MAX_WORKERS, len(os.sched_getaffinity(0)))
    context = multiprocessing.get_context("fork")
    start = last = time.monotonic()
    with ProcessPoolExecutor(workers, context, _start_worker, (tokenize,)) as pool:
        try:
            for group in _batches(tasks, 4 * workers):  # bounds the lines that wait
                yield from pool.map(_run_task, group)
                if time.monotonic() - last >= PROGRESS_SECONDS:
                    last = time.monotonic()
                    logger.info("%s: tokenized %d lines in %.0f s", path, group[-1][-1][0], last - start)
        except BrokenProcessPool as error:
            raise UserError(f"{path}: a process that tokenizes it died (out of memory, or killed)") from error


def _batches(items: Iterator[Entry], size: int) -> Iterator[list[Entry]]:
    while batch := list(islice(items, size)):
        yield batch


_PROCESS: dict[str, Callable[[Sequence[NumberedLine]], Part]] = {}  # the function of this process


def _start_worker(tokenize: Callable[[Sequence[NumberedLine]], Part]) -> None:
    end_with_parent()
    _PROCESS["tokenize"] = tokenize


def _run_task(lines: Sequence[NumberedLine]) -> Part:
    return _PROCESS["tokenize"](lines)


def tokenize_lines(
    path: str, tokenizer: Tokenizer, lines: Iterable[NumberedLine], reader: Reader | None = None
) -> Part:
    """Return the sequences of numbered ``lines``. Raises UserError with ``path`` and line."""
    reader = reader or CONVERSATIONS
    report = Report()
    sequences: list[Tokens] = []
    places: list[int] = []
    items: list[int] = []
    for number, line in lines:
        report.lines += 1
        if not line.strip():
            report.count("blank", number)
            continue
        try:
            for item, content in enumerate(reader.read(json_object(line), report, number)):
                report.conversations += 1
                tokens = reader.sequences(tokenizer, content, report, number)
                sequences += tokens
                places += [number] * len(tokens)
                items += [item] * len(tokens)
        except UserError as error:
            raise UserError(f"{path}, line {number}: {error}") from None
    ids = [np.where(trained, ids, -1 - ids).astype(np.int32) for ids, trained in sequences]
    firsts = [1 + int(trained[1:].argmax()) for _, trained in sequences]
    integers = partial(np.array, dtype=np.int64)
    columns = integers(list(map(len, ids))), integers(firsts), integers(places), integers(items)
    return Part(np.concatenate([np.empty(0, np.int32), *ids]), *columns, report)


def json_object(line: bytes) -> Line:
    """Return the object of a line. Raises UserError for another text."""
    try:
        value = parse_json(line)
    except ValueError as error:
        raise UserError(f"is no JSON: {error}; give one JSON object per line") from None
    if not isinstance(value, dict):
        raise UserError(f"is no JSON object but a {type(value).__name__}; give one object per line")
    return value


def _read(value: Line, report: Report, number: int) -> Iterator[Item]:
    form = recognize(value)
    report.formats.setdefault(form.name, number)
    for key in sorted(value.keys() - {*form.required, *form.optional}):
        report.count(f"key {key}", number)
    return form.read(value)


def item_sequences(tokenizer: Tokenizer, item: Item, report: Report, number: int) -> list[Tokens]:
    """Return the sequences of one conversation or text; count in ``report`` the reason for none or several."""
    if not isinstance(item, Conversation):
        tokens = tokenize_text(tokenizer, item)
        if not item.completion.strip() or not tokens.trained[1:].any():  # an end token only
            report.count("blank", number)
            return []
        return [tokens]
    if not any(message.get("content") or message.get("tool_calls") for message in item.messages):
        report.count("blank", number)
        return []
    check_conversation(item)
    if tokenizer.chat is None:
        raise UserError(f"the {tokenizer.tokenizer_type} has no chat template; give one by --chat-template FILE")
    rendered = list(answer_spans(tokenizer, item))
    tokenized = (tokenize_answers(tokenizer, text, spans) for text, spans in rendered)
    sequences = [tokens for tokens in tokenized if tokens.trained[1:].any()]
    if not sequences:
        report.count("without_answer", number)
        return []
    if len(sequences) > 1:
        report.count("rendered_separately", number)
    if changed_message(rendered[-1][0], item) is not None:
        report.count("changed", number)
    return sequences


CONVERSATIONS = Reader("conversations", _read, item_sequences)
