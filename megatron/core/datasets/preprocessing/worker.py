"""A worker: one part of the input becomes one shard, a small ``.bin``/``.idx`` pair per key and a record.

Shards live in ``<prefix>.partial/``. The record ``<part>.json`` is written last, by a rename: a part is done exactly
when it exists. A shard's bytes depend only on its part: whichever process makes it, and however often, the result is
the same."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from megatron.core.config.errors import UserError
from megatron.core.config.tokenizer import TokenizerConfig
from megatron.core.datasets.preprocessing.inputs import InputSlice
from megatron.core.datasets.preprocessing.lines import BadLine, read_rows
from megatron.core.datasets.preprocessing.sentences import make_splitter
from megatron.core.datasets.preprocessing.settings import PreprocessConfig
from megatron.core.safe_files import create_file, parse_json, read_file
from megatron.core.tokenizers.base import Tokenizer
from megatron.data.index_format import DType
from megatron.data.indexed_writer import IndexedDatasetBuilder

BATCH_CHARACTERS = 1 << 20
BATCH_DOCUMENTS = 1024
MAX_RECORD_BYTES = 1 << 28


@dataclass
class PartRecord:
    """The result of a part."""

    name: str
    file: str
    unit: str = "line"  # of input: InputFile.unit
    lines: int = 0
    documents: int = 0  # of the first key
    empty_documents: int = 0  # of any key
    sentences: int = 0
    tokens: int = 0
    text_bytes: int = 0  # bytes of input lines
    weight: int = 0
    bad_lines: list[tuple[int, int, str]] = field(default_factory=list)  # first line within the part, how many, why
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)  # by key, of .bin and .idx

    def add_bad_line(self, line: int, reason: str) -> None:
        """Record bad line number ``line`` (from 0, within the part; in ascending order). Consecutive lines with the
        same reason become one entry (first, count, reason). ``lines`` is not counted here."""
        if self.bad_lines:
            first, count, last_reason = self.bad_lines[-1]
            if first + count == line and last_reason == reason:
                self.bad_lines[-1] = (first, count + 1, reason)
                return
        self.bad_lines.append((line, 1, reason))


def shard_prefix(folder: str, part: str, key: str) -> str:
    """Return the path prefix of the shard of one part and key."""
    return os.path.join(folder, f"{part}.{key}")


def read_record(folder: str, part: str) -> PartRecord | None:
    """Return the record of a finished part; None if it is missing or malformed, or a shard file is missing or has
    another size. The contents of the shards are not checked."""
    try:
        values = parse_json(read_file(os.path.join(folder, part + ".json"), MAX_RECORD_BYTES))
        record = PartRecord(**{**values, "bad_lines": [tuple(entry) for entry in values["bad_lines"]]})
        for key, sizes in record.sizes.items():
            prefix = shard_prefix(folder, part, key)
            if [os.path.getsize(prefix + ".bin"), os.path.getsize(prefix + ".idx")] != list(sizes):
                return None
        return record
    except (OSError, ValueError, KeyError, TypeError):
        return None


class Worker:
    """Turns parts into shards in ``folder``."""

    def __init__(self, tokenizer: Tokenizer, cfg: PreprocessConfig, folder: str):
        """Raises UserError for --append-eod and a tokenizer without end-of-document token."""
        self.tokenizer, self.cfg, self.folder = tokenizer, cfg, folder
        self.dtype = np.dtype(DType.optimal_dtype(tokenizer.vocab_size))
        self.eod = np.asarray([tokenizer.eod] if cfg.append_eod else [], dtype=self.dtype)
        self.split: Callable[[str], list[str]] | None = None
        if cfg.split_sentences:
            self.split, _ = make_splitter(cfg.lang, cfg.keep_newlines)

    def run(self, part: InputSlice) -> PartRecord:
        """Write the shards of ``part`` (one pair per key), then its record by a rename, and return the record. On an
        error removes unfinished shards. Raises UserError, with file and line, for text that the tokenizer rejects or a
        file that changed."""
        unit = part.file.unit
        record = PartRecord(part.name, part.file.path, unit, weight=part.weight)
        prefixes = {key: shard_prefix(self.folder, part.name, key) for key in self.cfg.json_keys}
        builders = {key: IndexedDatasetBuilder(prefix + ".bin", dtype=self.dtype) for key, prefix in prefixes.items()}
        try:
            try:
                self._fill(part, builders, record)
            except ValueError as error:  # a text that this tokenizer cannot take, a damaged file
                where = f"{part.file.path}, at or before {unit} {record.lines} of the part that starts at {part.start}"
                raise error if part.file.path in str(error) else UserError(f"{where}: {error}") from error
            if part.data is None:
                part.file.check_unchanged()
            for key, prefix in prefixes.items():
                builders[key].finalize(prefix + ".idx")
                record.sizes[key] = (os.path.getsize(prefix + ".bin"), os.path.getsize(prefix + ".idx"))
        except BaseException:
            for builder in builders.values():
                builder.abort()
            raise
        path = os.path.join(self.folder, part.name + ".json")
        with create_file(path + ".partial") as file:
            file.write(json.dumps(asdict(record)).encode())
        os.replace(path + ".partial", path)
        return record

    def _fill(self, part: InputSlice, builders: dict[str, IndexedDatasetBuilder], record: PartRecord) -> None:
        """Counts bytes, lines and bad lines in ``record``, in place."""
        keys = self.cfg.json_keys
        waiting: dict[str, list[str]] = {key: [] for key in keys}
        characters = 0
        for row, size in read_rows(part, keys, self.cfg.max_line_bytes):
            record.text_bytes += size
            if isinstance(row, BadLine):
                record.add_bad_line(record.lines, row.reason)
            else:
                for key, text in zip(keys, row):
                    waiting[key].append(text)
                    characters += len(text)
            record.lines += 1
            if characters >= BATCH_CHARACTERS or len(waiting[keys[0]]) >= BATCH_DOCUMENTS:
                self._flush(waiting, builders, record)
                characters = 0
        self._flush(waiting, builders, record)

    def _flush(
        self, waiting: dict[str, list[str]], builders: dict[str, IndexedDatasetBuilder], record: PartRecord
    ) -> None:
        """Append the ``waiting`` texts and empty the lists. Counts documents of the first key, empty ones of all."""
        for key, texts in waiting.items():
            if self.split is None:
                count = self._add_documents(texts, builders[key], record)
            else:
                count = self._add_sentences(texts, self.split, builders[key], record)
            record.empty_documents += len(texts) - count
            if key == self.cfg.json_keys[0]:
                record.documents += count
            texts.clear()

    def _add_documents(self, texts: Sequence[str], builder: IndexedDatasetBuilder, record: PartRecord) -> int:
        arrays = [array for array in self.tokenizer.tokenize_batch(texts) if array.size]
        if not arrays:
            return 0
        ends = [self._end(array) for array in arrays]
        lengths = np.asarray([len(array) + len(end) for array, end in zip(arrays, ends)], dtype=np.int64)
        tokens = np.concatenate([piece for document in zip(arrays, ends) for piece in document])
        builder.add_documents(tokens, lengths)
        record.sentences += len(lengths)
        record.tokens += tokens.size
        return len(lengths)

    def _end(self, ids: np.ndarray) -> np.ndarray:
        """Return the ids that --append-eod adds to a document: none after an end, as a second is an empty document."""
        is_ended = self.eod.size and ids[-1] == self.eod[0]
        return self.eod[:0] if is_ended else self.eod

    def _add_sentences(
        self,
        texts: Sequence[str],
        split: Callable[[str], list[str]],
        builder: IndexedDatasetBuilder,
        record: PartRecord,
    ) -> int:
        """End-of-document is added to the last; those without tokens are omitted. Return the documents added."""
        sentences = [split(text) for text in texts]
        everything = [sentence for document in sentences for sentence in document]
        arrays = iter(self.tokenizer.tokenize_sentences(everything, self.cfg.sentence_special_tokens))
        added = 0
        for document in sentences:
            nonempty = [array for array in (next(arrays) for _ in document) if array.size]
            if not nonempty:
                continue
            nonempty[-1] = np.concatenate([nonempty[-1], self._end(nonempty[-1])])
            lengths = [int(array.size) for array in nonempty]
            builder.add_document(np.concatenate(nonempty), lengths)
            record.sentences += len(lengths)
            record.tokens += sum(lengths)
            added += 1
        return added


_PROCESS: dict[str, Worker] = {}  # the worker of this process, set once by ``start_process``


def start_process(
    worker: Worker | None, build: Callable[[TokenizerConfig], Tokenizer], tokenizer_cfg: TokenizerConfig, *rest: Any
) -> None:
    """Initializer of a pool process: takes the parent's worker or builds one (``rest``: its other arguments)."""
    end_with_parent()
    _PROCESS["worker"] = worker or Worker(build(tokenizer_cfg), *rest)


def end_with_parent() -> None:
    """Let this pool process use one core, and end it when the parent process has ended."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)


def run_part(part: InputSlice) -> PartRecord:
    """``Worker.run`` in a pool process."""
    return _PROCESS["worker"].run(part)
