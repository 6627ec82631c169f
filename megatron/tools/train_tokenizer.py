"""Train a byte-level BPE tokenizer on JSON lines, deterministically, for --tokenizer-type HuggingFaceTokenizer.

    python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 8192 --output tokenizer

writes tokenizer/tokenizer.json and tokenizer_config.json: id 0 is <|endoftext|>, then the 256 bytes, then the merges.
With --kind wordpiece it writes tokenizer/vocab.txt for --tokenizer-type BertWordPieceLowerCase (BertWordPieceCase with
--cased).
"""

import argparse
import os
import time
from collections.abc import Iterator, Sequence

from megatron.core.config.commands import as_typed
from megatron.core.datasets.preprocessing.inputs import find_inputs, part_bytes, split_file
from megatron.core.datasets.preprocessing.lines import read_rows
from megatron.core.tokenizers.training import train_byte_level_bpe, train_wordpiece

MAX_LINE_BYTES = 64 << 20


def read_texts(inputs: list[str], keys: list[str], max_bytes: int | None, separator: str) -> Iterator[str]:
    """Yield the usable texts of ``keys`` in input order, up to and including the text that reaches ``max_bytes`` of
    UTF-8 (None: all); skip unusable lines. ``separator`` is the --text-documents of plain text."""
    files, seen = find_inputs(inputs, keys, separator), 0
    for index, file in enumerate(files):
        for part in split_file(index, file, part_bytes(files), MAX_LINE_BYTES):
            for row, _ in read_rows(part, keys, MAX_LINE_BYTES):
                for text in row if isinstance(row, list) else ():
                    yield text
                    seen += len(text.encode())
                    if max_bytes is not None and seen >= max_bytes:
                        return


def main(argv: Sequence[str]) -> int:
    """Train the tokenizer of the command line ``argv`` and write its files to the folder --output, created if missing;
    print the size, with a note if the text gives fewer tokens. Return 0. Raises UserError."""
    parser = argparse.ArgumentParser(
        description=as_typed(__doc__ or ""), allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", nargs="+", required=True, help="JSON lines, parquet or .txt: files, globs, folders")
    parser.add_argument(
        "--text-documents",
        "--text_documents",
        choices=["blank-line", "line"],
        default="blank-line",
        help="separator of documents in .txt files [blank-line]",
    )
    parser.add_argument("--json-keys", "--json_keys", nargs="+", default=["text"], help="keys to train on [text]")
    parser.add_argument("--vocab-size", "--vocab_size", type=int, required=True, help="ids, at least 257 (bpe) or 64")
    parser.add_argument("--output", required=True, help="output folder, created if missing")
    parser.add_argument("--kind", choices=["bpe", "wordpiece"], default="bpe", help="bpe for GPT, wordpiece for BERT")
    parser.add_argument("--cased", action="store_true", help="with --kind wordpiece: keep upper case and accents")
    parser.add_argument("--max-bytes", "--max_bytes", type=int, help="train on about the first MAX_BYTES bytes")
    args = parser.parse_args(argv)
    start = time.monotonic()
    os.makedirs(args.output, exist_ok=True)
    path = os.path.join(args.output, "tokenizer.json" if args.kind == "bpe" else "vocab.txt")
    name = "tools/train_tokenizer.py"
    texts = read_texts(args.input, args.json_keys, args.max_bytes, args.text_documents)
    if args.kind == "bpe":
        size = train_byte_level_bpe(texts, args.vocab_size, path, asked_by=name)
    else:
        size = train_wordpiece(texts, args.vocab_size, path, lower_case=not args.cased, asked_by=name)
    if size < args.vocab_size:
        print(f"the text yields {size} tokens only, fewer than --vocab-size {args.vocab_size}")
    print(f"wrote {path}: {size} tokens in {time.monotonic() - start:.1f} s")
    return 0
