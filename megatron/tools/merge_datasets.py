"""Merge all data sets of a folder, in name order, into one.

    python tools/merge_datasets.py --input parts/ --output-prefix corpus_text_document

The result is byte-identical to preprocessing the concatenated text. Existing files are not overwritten. Data sets with
different tokenizers or token types are rejected before any data is written. Needs no torch."""

import os
import sys
import time
from collections.abc import Sequence

import numpy as np

from megatron.core.config.commands import tool_parser
from megatron.core.config.errors import UserError
from megatron.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder, get_bin_path, get_idx_path
from megatron.data.sidecar import SidecarInfo, read_sidecar, same_tokenizer, sidecar_path, write_sidecar


def find_prefixes(folder: str) -> list[str]:
    """Return the sorted path prefixes of all .bin/.idx pairs in ``folder``. UserError for incomplete or no pairs."""
    if not os.path.isdir(folder):
        raise UserError(f"--input {folder} is no folder: give the folder that holds the .bin and .idx files")
    names = {os.path.splitext(name) for name in os.listdir(folder)}
    halves = sorted((stem, suffix) for stem, suffix in names if suffix in (".bin", ".idx"))
    prefixes = sorted({stem for stem, _ in halves})
    missing = [f"{stem}{suffix}" for stem in prefixes for suffix in (".bin", ".idx") if (stem, suffix) not in halves]
    if missing:
        raise UserError(f"--input {folder}: {', '.join(missing)} missing; the other file of the pair exists")
    if not prefixes:
        raise UserError(f"--input {folder} holds no .bin and .idx files")
    return [os.path.join(folder, stem) for stem in prefixes]


def common_dtype(prefixes: list[str], multimodal: bool) -> type:
    """Open and check every data set; return their common token dtype. UserError if one is damaged or they differ."""
    dtypes = {prefix: IndexedDataset(prefix, multimodal=multimodal).index.dtype for prefix in prefixes}
    if len(set(dtypes.values())) > 1:
        listing = ", ".join(f"{prefix} {np.dtype(dtype).name}" for prefix, dtype in dtypes.items())
        raise UserError(f"the data sets hold different token types, so different vocabularies made them: {listing}")
    return dtypes[prefixes[0]]


def common_sidecar(prefixes: list[str]) -> SidecarInfo | None:
    """Return the sidecar that all data sets share; None if no data set has one, or, with a warning on stderr, only
    some. Raises UserError: tokenizers or --append-eod differ, or a sidecar is damaged."""
    sidecars = {prefix: read_sidecar(prefix) for prefix in prefixes}
    present = {prefix: info for prefix, info in sidecars.items() if info is not None}
    # the longest fingerprint: older sidecars record the files only
    first = max(present.values(), key=lambda info: len(info.fingerprint), default=None)
    if first is not None and not all(
        same_tokenizer(info.fingerprint, first.fingerprint) and info.append_eod == first.append_eod
        for info in present.values()
    ):
        listing = ", ".join(
            f"{prefix} ({info.tokenizer_type}, sha256 {info.fingerprint[:12]}, append-eod {info.append_eod})"
            for prefix, info in present.items()
        )
        raise UserError(f"different tokenizers made these data sets, so they cannot be one: {listing}")
    if present and len(present) < len(sidecars):
        without = ", ".join(prefix for prefix, info in sidecars.items() if info is None)
        print(
            f"warning: no tokenizer is recorded for {without}; the result will have no record either", file=sys.stderr
        )
        return None
    return first


def merge(folder: str, output: str, multimodal: bool) -> None:
    """Write the merged data set and its sidecar, with progress on stdout.

    Raises:
        UserError: invalid input, or the output exists.
        OSError: the output cannot be written; partial files are removed."""
    existing = [
        path for path in (get_bin_path(output), get_idx_path(output), sidecar_path(output)) if os.path.exists(path)
    ]
    if existing:
        raise UserError(
            f"--output-prefix {output}: {', '.join(existing)} exists and is not overwritten; remove it first"
        )
    if not os.path.isdir(os.path.dirname(os.path.abspath(output))):
        raise UserError(
            f"--output-prefix {output}: the folder {os.path.dirname(os.path.abspath(output))} does not exist"
        )
    prefixes = find_prefixes(folder)
    dtype, sidecar = common_dtype(prefixes, multimodal), common_sidecar(prefixes)
    total = sum(os.path.getsize(get_bin_path(prefix)) for prefix in prefixes)
    copied, started = 0, time.monotonic()
    with IndexedDatasetBuilder(get_bin_path(output), dtype=dtype, multimodal=multimodal) as builder:
        for number, prefix in enumerate(prefixes, 1):
            builder.add_index(prefix)
            copied += os.path.getsize(get_bin_path(prefix))
            rate = max(copied, 1) / max(time.monotonic() - started, 1e-9)
            print(f"{number}/{len(prefixes)} {prefix}: {rate / 1e6:.0f} MB/s, {(total - copied) / rate:.0f} s left")
        if sidecar is not None:
            write_sidecar(output, sidecar)
        try:
            builder.finalize(get_idx_path(output))
        except BaseException:
            if sidecar is not None:
                os.unlink(sidecar_path(output))
            raise
    print(f"wrote {get_bin_path(output)} and .idx: {len(IndexedDataset(output, multimodal=multimodal)):,} sequences")


def main(argv: Sequence[str]) -> int:
    """Raises UserError or OSError. --multimodal reads and writes modes."""
    parser = tool_parser(__doc__)
    parser.add_argument("--input", required=True, help="folder with the .bin and .idx files to join")
    parser.add_argument("--output-prefix", "--output_prefix", required=True, help="path of the result without .bin")
    parser.add_argument("--multimodal", action="store_true", help="the data sets hold a mode per sequence")
    args = parser.parse_args(argv)
    merge(args.input, args.output_prefix, args.multimodal)
    return 0
