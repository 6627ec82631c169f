"""Check data sets and print a summary of their contents.

    python tools/check_dataset.py corpus_text_document --vocab-size 32000

Reads every byte: the index for consistency, the tokens for the smallest and largest id. The exit code is 1 if a data
set is damaged, empty or contains an id outside the vocabulary, 2 if it is missing or cannot be read. Needs no torch."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.core.config.commands import tool_parser
from megatron.core.config.errors import EXIT_BAD_INPUT, UserError
from megatron.core.safe_files import open_regular
from megatron.data.indexed_dataset import IndexedDataset, get_bin_path, resolve_prefix
from megatron.data.sentence_map import LONG_SENTENCE, long_documents
from megatron.data.sidecar import read_sidecar

CHUNK_TOKENS = 1 << 24
PROGRESS_SECONDS = 5.0


def id_range(data: IndexedDataset, prefix: str) -> tuple[int, int, int, int]:
    """Return (smallest id, largest id, index of the first of each); (0, -1, 0, 0) without tokens. Prints progress."""
    tokens = data.index.dtype
    low, high, low_at, high_at = 0, -1, 0, 0
    started = reported = time.monotonic()
    total = Path(get_bin_path(prefix)).stat().st_size // data.index.dtype_size
    with open_regular(get_bin_path(prefix)) as stream:
        for start in range(0, total, CHUNK_TOKENS):
            chunk = np.fromfile(stream, dtype=tokens, count=CHUNK_TOKENS)
            first, last = int(chunk.min()), int(chunk.max())
            if start == 0 or first < low:
                low, low_at = first, start + int(chunk.argmin())
            if start == 0 or last > high:
                high, high_at = last, start + int(chunk.argmax())
            now = time.monotonic()
            if now - reported > PROGRESS_SECONDS:
                num_read = start + len(chunk)
                rate = num_read * data.index.dtype_size / (now - started)
                left = (total - num_read) * data.index.dtype_size / rate
                print(
                    f"  {100 * num_read / total:.0f} % read, {rate / 1e6:.0f} MB/s, {left:.0f} s left", file=sys.stderr
                )
                reported = now
    return low, high, low_at, high_at


def locate(data: IndexedDataset, token: int) -> str:
    """Return "document D at token T" for the token with global index ``token``, both from 0."""
    starts = data.index.sequence_pointers
    size = data.index.dtype_size
    sequence = int(np.searchsorted(starts, token * size, side="right")) - 1
    document = int(np.searchsorted(data.document_indices, sequence, side="right")) - 1
    first = int(starts[int(data.document_indices[document])]) // size
    return f"document {document} at token {token - first}"


def document_lengths(data: IndexedDataset, num_tokens: int) -> np.ndarray:
    """Return the number of tokens of each document, int64[documents]."""
    bounds = np.asarray(data.document_indices)
    inside = bounds < len(data)
    starts = np.full(len(bounds), num_tokens, dtype=np.int64)
    starts[inside] = data.index.sequence_pointers[bounds[inside]] // data.index.dtype_size
    return np.diff(starts)


def print_histogram(lengths: np.ndarray) -> None:
    """Print a histogram of document lengths, one line per non-empty bin: 0, then powers of two (1, 2-3, 4-7 …)."""
    exponents = np.zeros(len(lengths), dtype=np.int64)
    exponents[lengths > 0] = np.floor(np.log2(lengths[lengths > 0])).astype(np.int64) + 1
    counts = np.bincount(exponents)
    print("  tokens per document")
    for exponent, count in enumerate(counts.tolist()):
        if count:
            name = "0" if exponent == 0 else f"{1 << (exponent - 1)}-{(1 << exponent) - 1}"
            print(f"    {name:>23} {count:>14,}  {'#' * max(1, round(40 * count / counts.max()))}")


def print_sentences(data: IndexedDataset) -> None:
    """Print sentence statistics, the number of documents usable for BERT pairs, and documents without text."""
    bounds = np.asarray(data.document_indices)
    counts, long = np.diff(bounds), long_documents(bounds, data.sequence_lengths)
    starts = np.concatenate([[0], np.cumsum(data.sequence_lengths, dtype=np.int64)])
    textless = np.flatnonzero((counts > 0) & (starts[bounds[1:]] == starts[bounds[:-1]]))
    print(f"  sentences  {counts.mean():.1f} per document, {data.sequence_lengths.mean():.1f} tokens each")
    print(
        f"  pairs      from {int(((counts >= 2) & ~long).sum()):,} documents: {int((counts == 1).sum()):,} have one "
        f"sentence, {int((long & (counts >= 2)).sum()):,} one of more than {LONG_SENTENCE} tokens"
    )
    if len(textless):
        print(
            f"  no text    in {len(textless):,} documents of empty sentences, the first is document {textless[0]}: "
            "T5 rejects them, BERT trains on nothing there"
        )


def check(path: str, vocab_size: int | None) -> None:
    """Read all of the data set ``path`` and print a summary; then check ids, which must not be negative and be below
    ``vocab_size`` (None: the sidecar's; unlimited without a sidecar).

    Raises:
        UserError: the data set or its sidecar is damaged, it has no tokens, or it contains other ids.
        OSError: it is missing or cannot be read."""
    prefix = resolve_prefix(path)
    data = IndexedDataset(prefix)
    sidecar = read_sidecar(prefix)
    num_tokens = Path(get_bin_path(prefix)).stat().st_size // data.index.dtype_size
    lengths = document_lengths(data, num_tokens)
    print(prefix)
    print(f"  documents  {len(lengths):,} ({int((lengths == 0).sum()):,} empty), in {len(data):,} sequences")
    print(f"  tokens     {num_tokens:,} of type {np.dtype(data.index.dtype).name}")
    if len(data) > len(lengths) or (len(data) and prefix.endswith("_sentence")):
        print_sentences(data)
    if sidecar is not None:
        print(f"  tokenizer  {sidecar.tokenizer_type}, {sidecar.vocab_size:,} ids, sha256 {sidecar.fingerprint[:12]}")
    low, high, low_at, high_at = id_range(data, prefix)
    print(f"  token ids  {low:,} to {high:,}" if num_tokens else "  token ids  none")
    print_histogram(lengths)
    if not num_tokens:
        raise UserError(f"{prefix}: holds no tokens to train on: preprocess text that is not empty")
    limit = vocab_size if vocab_size is not None else sidecar.vocab_size if sidecar is not None else None
    if low < 0:
        raise UserError(f"{prefix}: token id {low} in {locate(data, low_at)} is negative: preprocess the text again")
    if limit is not None and high >= limit:
        raise UserError(
            f"{prefix}: token id {high} in {locate(data, high_at)} is not below the vocabulary size {limit}: "
            "the data was made with another tokenizer"
        )


def main(argv: Sequence[str]) -> int:
    """Return the highest code: 1 if a data set is unusable, 2 if one is missing or unreadable, else 0."""
    parser = tool_parser(__doc__)
    parser.add_argument("prefix", nargs="+", help="path of a data set without .bin and .idx")
    parser.add_argument(
        "--vocab-size",
        "--vocab_size",
        type=int,
        help="upper limit of the ids; default: the vocabulary size in the data set's sidecar",
    )
    args = parser.parse_args(argv)
    status = 0
    for path in args.prefix:
        try:
            check(path, args.vocab_size)
            print("  ok")
        except (UserError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            status = max(status, EXIT_BAD_INPUT if isinstance(error, OSError) else 1)
    return status
