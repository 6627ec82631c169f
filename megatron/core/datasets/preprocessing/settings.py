"""The flags of tools/preprocess_data.py, except for the tokenizer's."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal

from megatron.core.config.cli import flag


@dataclass(kw_only=True)
class PreprocessConfig:
    """Input, output and run time"""

    input: list[str] = flag("--input", default_factory=list, nargs="+")
    """JSON lines (plain, .gz, .zst), parquet or plain text (.txt): files, globs or folders, read in sorted order."""

    text_documents: Literal["file", "paragraph", "line"] = "file"
    """One document of plain text (.txt): the file, the lines between two blank lines, or a line."""

    json_keys: list[str] = field(default_factory=lambda: ["text"])
    """Keys (or parquet columns) to tokenize; each gets its own pair of files."""

    split_sentences: bool = False
    """Store sentences as sequences (for BERT); the files are named ..._sentence instead of ..._document."""

    keep_newlines: bool = False
    """With --split-sentences: keep the line breaks between sentences."""

    sentence_special_tokens: bool = False
    """With --split-sentences: put the tokenizer's special tokens around every sentence ([CLS] ... [SEP] of BERT), as
    Megatron-LM does since its tokenizers were unified; samples then hold them inside, too."""

    append_eod: bool = False
    """End every document with the tokenizer's end-of-document id."""

    lang: str = "english"
    """Language of the sentence splitter."""

    output_prefix: str | None = None
    """Output files are <prefix>_<key>_document.bin and .idx."""

    dataset_impl: Literal["lazy", "cached", "mmap"] = "mmap"
    """Accepted for old scripts; files are always of the mmap kind."""

    overwrite: bool = False
    """Replace existing output, and discard the parts of an interrupted run with other settings."""

    workers: int | None = None
    """Worker processes; default: the number of processors."""

    partitions: int = 1
    """Accepted for old scripts; the work is always divided automatically."""

    keep_sequential_samples: bool = False
    """Accepted for old scripts; documents always keep the order of the input."""

    log_interval: int = 1000
    """Documents between progress lines (one per second at most)."""

    find_optimal_num_workers: bool = False
    """Only measure the speed with each number of --workers-to-check, on --max-documents documents."""

    workers_to_check: list[int] = field(default_factory=lambda: [16, 32, 64])
    """Numbers of workers that --find-optimal-num-workers tries."""

    max_documents: int = 100000
    """Documents that --find-optimal-num-workers uses."""

    max_bad_lines: int | None = None
    """Fail when more input lines than this are unusable; default: skip, count and list unusable lines."""

    strict: bool = False
    """Fail at the first unusable line: --max-bad-lines 0."""

    max_line_bytes: int = 64 << 20
    """A longer input line counts as unusable; bounds the memory."""

    def problems(self) -> list[str]:
        """Return every problem of the flags, as "--flag …" texts. Does not open the input."""
        messages = []
        if not self.input:
            messages.append("--input is missing: give files, globs or folders")
        if not self.output_prefix and not self.find_optimal_num_workers:
            messages.append("--output-prefix is missing")
        if self.output_prefix and not os.path.isdir(os.path.dirname(os.path.abspath(self.output_prefix))):
            messages.append(f"--output-prefix {self.output_prefix}: its folder does not exist; create it first")
        least = {
            "workers": self.workers,
            "partitions": self.partitions,
            "log_interval": self.log_interval,
            "max_documents": self.max_documents,
            "max_line_bytes": self.max_line_bytes,
        }
        for name, value in least.items():
            if value is not None and value < 1:
                messages.append(f"--{name.replace('_', '-')} {value}: must be at least 1")
        if min(self.workers_to_check, default=0) < 1:
            messages.append(f"--workers-to-check {self.workers_to_check}: needs numbers of at least 1")
        if self.max_bad_lines is not None and self.max_bad_lines < 0:
            messages.append(f"--max-bad-lines {self.max_bad_lines}: must be at least 0")
        if self.sentence_special_tokens and not self.split_sentences:
            messages.append("--sentence-special-tokens has no effect without --split-sentences; add that flag")
        if len(set(self.json_keys)) != len(self.json_keys):
            messages.append(f"--json-keys {' '.join(self.json_keys)}: names a key twice")
        messages += [
            f"--json-keys {key!r}: cannot be part of a file name" for key in self.json_keys if os.sep in key or not key
        ]
        return messages

    @property
    def level(self) -> str:
        """The last part of the output names."""
        return "sentence" if self.split_sentences else "document"
