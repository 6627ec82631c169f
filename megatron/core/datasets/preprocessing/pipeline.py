"""The whole run: plan, shards by workers, then one atomic ``.bin``/``.idx`` pair per key.

``<prefix>.partial/`` holds the plan (``plan.json``: inputs, settings, tokenizer) and the finished shards. A run that
was killed continues from them; its output equals an uninterrupted run's, for any number of workers. The pairs are
put together at the end, so that nothing complete-looking exists before everything is; it needs twice the disk space
meanwhile."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import json
import logging
import multiprocessing
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext
from typing import Any

from megatron.core.config.errors import UserError, listed
from megatron.core.config.tokenizer import TokenizerConfig
from megatron.core.datasets.preprocessing.inputs import (
    InputFile,
    InputSlice,
    describe_inputs,
    find_inputs,
    part_bytes,
    split_file,
)
from megatron.core.datasets.preprocessing.progress import PreprocessingProgress
from megatron.core.datasets.preprocessing.sentences import make_splitter
from megatron.core.datasets.preprocessing.settings import PreprocessConfig
from megatron.core.datasets.preprocessing.worker import (
    PartRecord,
    Worker,
    read_record,
    run_part,
    shard_prefix,
    start_process,
)
from megatron.core.safe_files import create_file, make_folder, open_to_append, parse_json, read_file
from megatron.core.tokenizers.base import Tokenizer
from megatron.data.index_format import DType
from megatron.data.indexed_writer import IndexedDatasetBuilder, remove_index
from megatron.data.sidecar import same_tokenizer, sidecar_info, write_sidecar

logger = logging.getLogger(__name__)

PLAN_VERSION = 1
RUN_FILE = re.compile(r"plan\.json|publishing|\d{6}\.count|\d{6}-\d{8}\..*|.*\.partial.*")  # in <prefix>.partial/
MAX_PLAN_BYTES = 1 << 28
PARTS_IN_FLIGHT = 2  # per worker: bounds the memory of decompressed parts that wait

TokenizerBuilder = Callable[[TokenizerConfig], Tokenizer]


@dataclass
class Totals:
    """Totals of a run."""

    documents: int = 0
    sentences: int = 0
    tokens: int = 0
    text_bytes: int = 0
    empty_documents: int = 0
    bad_lines: int = 0
    reused_parts: int = 0
    seconds: float = 0.0
    outputs: list[str] = field(default_factory=list)

    def add(self, record: PartRecord) -> None:
        """Count one part."""
        for name in ("documents", "sentences", "tokens", "text_bytes", "empty_documents"):
            setattr(self, name, getattr(self, name) + getattr(record, name))
        self.bad_lines += sum(count for _, count, _ in record.bad_lines)


class TooManyBadLines(UserError):
    """More unusable lines than --max-bad-lines (or --strict) allows."""


class NoDocuments(UserError):
    """No document of a key has tokens."""


def output_prefixes(cfg: PreprocessConfig) -> dict[str, str]:
    """By key, the path of the pair without its suffix."""
    return {key: f"{cfg.output_prefix}_{key}_{cfg.level}" for key in cfg.json_keys}


def preprocess(cfg: PreprocessConfig, tokenizer_cfg: TokenizerConfig, build: TokenizerBuilder) -> Totals:
    """Tokenize ``cfg.input`` into the pairs of ``output_prefixes``; return the totals. Continues from the finished
    parts of an interrupted run with equal settings; the folder of parts is removed after success only.

    Args:
        tokenizer_cfg: what ``build`` makes a tokenizer from, here and in every worker; picklable.

    Raises:
        UserError: wrong settings or input; existing output; too many bad lines; another run at work; a dead worker.
        NoDocuments: nothing to write; the folder of parts is removed, existing output stays.
        OSError: reading or writing failed, a full disk for instance."""
    if problems := cfg.problems():
        raise UserError("\n".join(problems))
    files = find_inputs(cfg.input, cfg.json_keys, cfg.text_documents)
    logger.info("input: %s", describe_inputs(files))
    tokenizer = build(tokenizer_cfg)
    if cfg.append_eod:
        tokenizer.eod  # noqa: B018 (raises here, once, where it is missing)
    if cfg.sentence_special_tokens:
        tokenizer.tokenize_sentences(["a"], True)  # likewise
    splitter = make_splitter(cfg.lang, cfg.keep_newlines)[1] if cfg.split_sentences else ""
    if splitter:
        logger.info("sentences are split by %s", splitter)
    folder = f"{cfg.output_prefix}.partial"
    with _locked_folder(folder):
        plan = _plan(cfg, files, tokenizer, splitter)
        _prepare(cfg, folder, plan)
        try:
            run = _Run(cfg, files, folder, plan["part_bytes"])
            totals = run.make_shards(tokenizer, tokenizer_cfg, build)
            _publish(cfg, tokenizer, folder, run.order)
        except NoDocuments:
            shutil.rmtree(folder)  # its parts are useless: the input will change
            raise
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise OSError(
                error.errno,
                f"the disk is full ({error.strerror}): free some space and run the same command again; "
                f"finished parts are kept in {folder}",
            ) from error
        totals.outputs = list(output_prefixes(cfg).values())
        shutil.rmtree(folder)
    return totals


@contextlib.contextmanager
def _locked_folder(folder: str) -> Iterator[None]:
    """Hold the lock file of ``folder`` until the end of the process. An error before any work removes a new folder."""
    existed = os.path.isdir(folder)
    os.makedirs(os.path.dirname(os.path.abspath(folder)), exist_ok=True)
    try:
        make_folder(folder, private=True)  # its files are removed later: those below a planted link must not be
        opened = open_to_append(os.path.join(folder, "lock"))
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}; remove it, or choose another --output-prefix") from error
    with opened as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not inherited by workers, gone with this process
        except OSError as error:
            raise UserError(
                f"another run is writing {folder}; wait for it, or choose another --output-prefix"
            ) from error
        try:
            yield
        except BaseException:
            if not existed and not os.path.exists(os.path.join(folder, "plan.json")):
                shutil.rmtree(folder, ignore_errors=True)  # raises before any work
            raise


def _plan(cfg: PreprocessConfig, files: list[InputFile], tokenizer: Tokenizer, splitter: str) -> dict[str, Any]:
    """All settings that the bytes of the output depend on. The number of workers is not one of them."""
    return {
        "version": PLAN_VERSION,
        "inputs": [[file.path, file.size, file.modified_ns] for file in files],
        "part_bytes": part_bytes(files),
        "tokenizer": tokenizer.fingerprint,
        "json_keys": cfg.json_keys,
        "append_eod": cfg.append_eod,
        "sentences": [splitter, cfg.lang, cfg.keep_newlines, cfg.sentence_special_tokens] if splitter else None,
        "max_line_bytes": cfg.max_line_bytes,
        "kinds": [file.kind for file in files],
    }


def _prepare(cfg: PreprocessConfig, folder: str, plan: dict[str, object]) -> None:
    """Keep finished parts of an equal plan, else remove another run's with --overwrite only. Raises UserError if the
    folder holds other files, or if the output exists, without --overwrite."""
    path, publishing = os.path.join(folder, "plan.json"), os.path.join(folder, "publishing")
    old: dict[str, object] | None = None
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        old = parse_json(read_file(path, MAX_PLAN_BYTES))
        if same_tokenizer(str(old["tokenizer"]), str(plan["tokenizer"])):
            old["tokenizer"] = plan["tokenizer"]
    if old == plan:
        for garbage in glob.glob(glob.escape(folder) + "/*.partial*"):
            os.unlink(garbage)
    else:
        existing = [name for name in sorted(os.listdir(folder)) if name != "lock"]
        foreign = [name for name in existing if not RUN_FILE.fullmatch(name)]
        if foreign:
            raise UserError(f"{folder} is needed for parts but holds {foreign[0]}; choose another --output-prefix")
        if old is not None and not cfg.overwrite:
            differing = ", ".join(key for key in plan if old.get(key) != plan[key])
            raise UserError(
                f"{folder} holds parts of an interrupted run that differs in: {differing}. Run its command again to "
                "finish it, remove the folder, or add --overwrite to start anew"
            )
        for name in existing:
            os.unlink(os.path.join(folder, name))
    if not (old == plan and os.path.exists(publishing)) and not cfg.overwrite:
        for prefix in output_prefixes(cfg).values():
            existing_outputs = [prefix + suffix for suffix in (".bin", ".idx") if os.path.exists(prefix + suffix)]
            if existing_outputs:
                raise UserError(
                    f"{existing_outputs[0]} exists; choose another --output-prefix, or add --overwrite to replace it"
                )
    for prefix in output_prefixes(cfg).values():
        for garbage in glob.glob(glob.escape(prefix) + ".bin.partial-*"):  # of a run killed while it published
            os.unlink(garbage)
    with create_file(path + ".partial") as file:
        file.write(json.dumps(plan).encode())
    os.replace(path + ".partial", path)


class _Run:
    """The shards of one run, and the account of its bad lines in the order of the input."""

    def __init__(self, cfg: PreprocessConfig, files: list[InputFile], folder: str, size: int):
        self.cfg, self.files, self.folder, self.size = cfg, files, folder, size
        self.order: list[str] = []  # names of all parts, in the order of the output
        self.records: dict[str, PartRecord] = {}  # finished, not yet accounted for
        self.accounted = 0
        self.totals = Totals()
        self.line_of_file: dict[str, int] = {}
        self.documents_of_file = dict.fromkeys((file.path for file in files), 0)
        self.bytes_of_key = dict.fromkeys(cfg.json_keys, 0)  # tokens that are written
        self.bad_entries: list[dict[str, object]] = []

    def make_shards(self, tokenizer: Tokenizer, tokenizer_cfg: TokenizerConfig, build: TokenizerBuilder) -> Totals:
        """Process all parts that have no shard yet. Writes the list of bad lines, also before an error. Raises
        NoDocuments, and writes no list, if a key has no tokens."""
        cfg = self.cfg
        workers = cfg.workers or os.cpu_count() or 1
        progress = PreprocessingProgress(sum(file.size for file in self.files), cfg.log_interval)
        try:
            if workers == 1:
                worker = Worker(tokenizer, cfg, self.folder)
                for part in self._todo(progress):
                    self._finish(worker.run(part), progress)
            else:
                forks = "fork" in multiprocessing.get_all_start_methods()
                inherited = Worker(tokenizer, cfg, self.folder) if forks else None
                context = multiprocessing.get_context("fork" if forks else "spawn")
                self._with_pool(workers, context, (inherited, build, tokenizer_cfg, cfg, self.folder), progress)
        except BaseException:
            self._write_bad_lines()
            raise
        self.totals.seconds = progress.seconds
        if without := [key for key, size in self.bytes_of_key.items() if not size]:
            raise NoDocuments(self._why_no_documents(without))
        self._write_bad_lines()
        if without := [path for path, documents in self.documents_of_file.items() if not documents]:
            logger.warning(
                "%d of %d files have no document: %s", len(without), len(self.files), listed(without, most=5)
            )
        progress.finish(self.totals)
        return self.totals

    def _why_no_documents(self, keys: list[str]) -> str:
        totals = self.totals
        text = (
            f"--input {listed(self.cfg.input, ' ', most=5)}: no usable document for --json-keys {' '.join(keys)} in "
            f"{sum(self.line_of_file.values())} lines of {len(self.files)} file(s): {totals.empty_documents} without "
            f"tokens, {totals.bad_lines} unusable"
        )
        if self.bad_entries:
            text += f", the first: {self._describe(self.bad_entries[0])}; is --json-keys right?"
        return f"{text}; nothing is written"

    def _with_pool(self, workers: int, context: BaseContext, initargs: tuple, progress: PreprocessingProgress) -> None:
        """A bounded number of parts is in flight. On any exit cancels queued parts and waits for running ones."""
        pool = ProcessPoolExecutor(workers, mp_context=context, initializer=start_process, initargs=initargs)
        running: set[Future[PartRecord]] = set()
        try:
            for part in self._todo(progress):
                running.add(pool.submit(run_part, part))
                if len(running) >= PARTS_IN_FLIGHT * workers:
                    running = self._collect(running, progress)
            while running:
                running = self._collect(running, progress)
        except BrokenProcessPool as error:
            raise UserError(
                f"a worker process died (out of memory, or killed); finished parts are kept in {self.folder}: run the "
                "same command again, with fewer --workers if memory was exhausted"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _collect(self, running: set[Future[PartRecord]], progress: PreprocessingProgress) -> set[Future[PartRecord]]:
        finished, pending = wait(running, return_when=FIRST_COMPLETED)
        for future in finished:
            self._finish(future.result(), progress)
        return pending

    def _todo(self, progress: PreprocessingProgress) -> Iterator[InputSlice]:
        """Count finished parts as reused. Also records the number of parts of compressed files, so that a later run
        need not decompress them. Raises UserError if a file changed meanwhile."""
        for index, file in enumerate(self.files):
            is_finished = self._finished_file(index, file, progress)
            if is_finished:
                continue
            count = 0
            for part in split_file(index, file, self.size, self.cfg.max_line_bytes):
                self.order.append(part.name)
                count += 1
                record = read_record(self.folder, part.name)
                if record is None:
                    yield part
                else:
                    self._reuse(record, progress)
            file.check_unchanged()
            if file.kind in ("gzip", "zstd"):
                with create_file(os.path.join(self.folder, f"{index:06d}.count")) as note:
                    note.write(b"%d" % count)

    def _finished_file(self, index: int, file: InputFile, progress: PreprocessingProgress) -> bool:
        """Whether a compressed file need not be decompressed again; then counts its parts as reused, in order."""
        try:
            count = int(read_file(os.path.join(self.folder, f"{index:06d}.count"), 100))
        except (FileNotFoundError, ValueError):
            return False
        records = [read_record(self.folder, InputSlice(index, number, file).name) for number in range(count)]
        if not all(records):
            return False
        for record in records:
            assert record is not None
            self.order.append(record.name)
            self._reuse(record, progress)
        return True

    def _reuse(self, record: PartRecord, progress: PreprocessingProgress) -> None:
        self.totals.reused_parts += 1
        progress.skip(record.weight)
        self._account(record)

    def _finish(self, record: PartRecord, progress: PreprocessingProgress) -> None:
        progress.add(record)
        self._account(record)

    def _account(self, record: PartRecord) -> None:
        """Add a part to the totals, in the order of the input: parts that finish early wait."""
        self.records[record.name] = record
        while self.accounted < len(self.order) and self.order[self.accounted] in self.records:
            part = self.records.pop(self.order[self.accounted])
            self.accounted += 1
            before = self.line_of_file.get(part.file, 0)
            self.line_of_file[part.file] = before + part.lines
            self.documents_of_file[part.file] += part.documents
            for key, (tokens_size, _) in part.sizes.items():
                self.bytes_of_key[key] += tokens_size
            for first, count, reason in part.bad_lines:
                entry = {"file": part.file, part.unit: before + first + 1, "count": count, "reason": reason}
                self.bad_entries.append(entry)
            self.totals.add(part)
            limit = 0 if self.cfg.strict else self.cfg.max_bad_lines  # None: any number
            if part.bad_lines and limit is not None and self.totals.bad_lines > limit:
                raise TooManyBadLines(
                    f"{self._describe(self.bad_entries[0])}; "
                    + (
                        "--strict stops at the first such line"
                        if limit == 0
                        else f"in all {self.totals.bad_lines} unusable lines so far, more than --max-bad-lines {limit}"
                    )
                    + f"; they are listed in {self.cfg.output_prefix}.bad_lines.jsonl"
                )

    @staticmethod
    def _describe(entry: Mapping[str, object]) -> str:
        unit = next(unit for unit in ("line", "row", "document") if unit in entry)
        return f"{entry['file']}, {unit} {entry[unit]}: {entry['reason']}"

    def _write_bad_lines(self) -> None:
        """Per run of equal bad lines: file, first line (parquet: row; plain text: document), count and reason."""
        path = f"{self.cfg.output_prefix}.bad_lines.jsonl"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        if self.bad_entries:
            with create_file(path) as file:
                file.writelines(json.dumps(entry, ensure_ascii=False).encode() + b"\n" for entry in self.bad_entries)


def _publish(cfg: PreprocessConfig, tokenizer: Tokenizer, folder: str, order: list[str]) -> None:
    """Marks the start of publishing in ``folder``, so that a killed run may be repeated over its own output."""
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    create_file(os.path.join(folder, "publishing")).close()
    for key, prefix in output_prefixes(cfg).items():
        with IndexedDatasetBuilder(prefix + ".bin", dtype=dtype) as builder:
            for name in order:
                builder.add_index(shard_prefix(folder, name, key))
            remove_index(prefix + ".idx")  # older tokens must never exist together with the new sidecar
            write_sidecar(prefix, sidecar_info(tokenizer, cfg.append_eod))
            builder.finalize(prefix + ".idx")
