"""Train a byte-level BPE tokenizer on JSON lines, deterministically, for --tokenizer-type HuggingFaceTokenizer.

    python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 8192 --output tokenizer

writes tokenizer/tokenizer.json and tokenizer_config.json: id 0 is <|endoftext|>, then the 256 bytes, then the merges.
With --kind wordpiece it writes tokenizer/vocab.txt for --tokenizer-type BertWordPieceLowerCase (BertWordPieceCase with
--cased)."""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.core.config.commands import tool_parser
from megatron.core.config.errors import UserError
from megatron.core.datasets.preprocessing.inputs import TEXT, InputFile, find_inputs, part_bytes, split_file
from megatron.core.datasets.preprocessing.lines import BadLine, read_rows
from megatron.core.tokenizers.training import train_byte_level_bpe, train_wordpiece

MAX_LINE_BYTES = 64 << 20


@dataclass
class FileCounts:
    """Contents of one input file, as far as it was read."""

    texts: int = 0
    text_bytes: int = 0
    bad_lines: int = 0
    first_reason: str = ""


def read_texts(
    files: list[InputFile], keys: list[str], max_bytes: int | None, counts: dict[str, FileCounts]
) -> Iterator[str]:
    """Yield the usable texts of ``keys`` in input order, up to and including the text that reaches ``max_bytes`` of
    UTF-8 (None: all); skip unusable lines. Adds the counts of each file that is read to ``counts``, by path. Raises
    UserError for a file without text."""
    total_bytes = 0
    for index, file in enumerate(files):
        count = counts[file.path] = FileCounts()
        lines = 0
        for part in split_file(index, file, part_bytes(files), MAX_LINE_BYTES):
            for row, _ in read_rows(part, keys, MAX_LINE_BYTES):
                lines += 1
                if isinstance(row, BadLine):
                    count.bad_lines += 1
                    count.first_reason = count.first_reason or f"{file.unit} {lines}: {row.reason}"
                    continue
                for text in row:
                    yield text
                    size = len(text.encode())
                    count.texts += 1
                    count.text_bytes += size
                    total_bytes += size
                    if max_bytes is not None and total_bytes >= max_bytes:
                        return
        if not count.text_bytes:
            reason = f"{count.first_reason}; is --json-keys right?" if count.first_reason else "remove it from --input"
            raise UserError(f"--input {file.path}: no text for --json-keys {' '.join(keys)} in {lines} lines; {reason}")


def main(argv: Sequence[str]) -> int:
    """Train the tokenizer of the command line ``argv`` and write its files to the folder --output, created if missing;
    print the size, with a note if the text gives fewer tokens. Return 0. Raises UserError."""
    parser = tool_parser(__doc__)
    parser.add_argument("--input", nargs="+", required=True, help="JSON lines, parquet or .txt: files, globs, folders")
    parser.add_argument(
        "--text-documents", "--text_documents", choices=TEXT, default=TEXT[0], help="one document of a .txt file"
    )
    parser.add_argument("--json-keys", "--json_keys", nargs="+", default=["text"], help="keys to train on")
    parser.add_argument("--vocab-size", "--vocab_size", type=int, required=True, help="ids, at least 257 (bpe) or 64")
    parser.add_argument("--output", required=True, help="output folder, created if missing")
    parser.add_argument("--kind", choices=["bpe", "wordpiece"], default="bpe", help="bpe for GPT, wordpiece for BERT")
    parser.add_argument("--cased", action="store_true", help="with --kind wordpiece: keep upper case and accents")
    parser.add_argument("--max-bytes", "--max_bytes", type=int, help="train on about the first MAX_BYTES bytes")
    args = parser.parse_args(argv)
    if args.max_bytes is not None and args.max_bytes < 1:
        raise UserError(f"--max-bytes {args.max_bytes}: must be at least 1")
    start = time.monotonic()
    files = find_inputs(args.input, args.json_keys, args.text_documents)
    created = not os.path.isdir(args.output)
    os.makedirs(args.output, exist_ok=True)
    path = os.path.join(args.output, "tokenizer.json" if args.kind == "bpe" else "vocab.txt")
    name = "tools/train_tokenizer.py"
    counts: dict[str, FileCounts] = {}
    texts = read_texts(files, args.json_keys, args.max_bytes, counts)
    try:
        if args.kind == "bpe":
            size = train_byte_level_bpe(texts, args.vocab_size, path, asked_by=name)
        else:
            size = train_wordpiece(texts, args.vocab_size, path, lower_case=not args.cased, asked_by=name)
    except BaseException:
        if created:
            os.rmdir(args.output)
        raise
    for source, count in counts.items():
        unusable = f", {count.bad_lines} unusable lines, the first: {count.first_reason}" if count.bad_lines else ""
        print(f"{source}: {count.texts} texts, {count.text_bytes:,} bytes{unusable}")
    if len(counts) < len(files):
        print(f"{len(files) - len(counts)} of {len(files)} files were not read: --max-bytes was reached")
    if size < args.vocab_size:
        print(f"the text yields {size} tokens only, fewer than --vocab-size {args.vocab_size}")
    print(f"wrote {path}: {size} tokens in {time.monotonic() - start:.1f} s")
    return 0
