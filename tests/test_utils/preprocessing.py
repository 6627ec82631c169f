"""Small runs of tools/preprocess_data.py's pipeline inside a test: their input, and what they wrote."""

import gzip
import json

import numpy as np
import pytest

from megatron.core.datasets.preprocessing.pipeline import preprocess
from megatron.core.datasets.preprocessing.settings import PreprocessConfig
from megatron.core.tokenizers import build_tokenizer
from megatron.data.indexed_dataset import IndexedDataset
from tests.test_utils.tiny_tokenizers import flags

BYTES = flags("ByteLevelTokenizer")
DOCUMENTS = [f"Document {number}. " + "x" * (number * 37 % 400) + "\nIt ends here." for number in range(300)]


def jsonl(documents=DOCUMENTS, **more):
    """The bytes of an input file: one object a line, with ``more`` keys in each."""
    return "".join(json.dumps({"text": text, **more}) + "\n" for text in documents).encode()


def compressed(folder, kind, members):
    """A file of concatenated members, one for each of ``members``; ``kind`` is gz or zst."""
    path = folder / f"input.jsonl.{kind}"
    if kind == "gz":
        path.write_bytes(b"".join(map(gzip.compress, members)))
    else:
        zstandard = pytest.importorskip("zstandard")
        path.write_bytes(b"".join(zstandard.ZstdCompressor().compress(member) for member in members))
    return path


def run(folder, source, name="out", tokenizer=BYTES, **values):
    """Preprocess ``source`` (bytes, or --input values) and return the totals and the prefix."""
    if isinstance(source, bytes):
        path = folder / "input.jsonl"
        path.write_bytes(source)
        source = [str(path)]
    values.setdefault("workers", 1)
    prefix = str(folder / name)
    totals = preprocess(PreprocessConfig(input=source, output_prefix=prefix, **values), tokenizer, build_tokenizer)
    return totals, prefix


def pair(prefix, key="text", level="document"):
    """The bytes of a data set's two files."""
    return [open(f"{prefix}_{key}_{level}.{suffix}", "rb").read() for suffix in ("bin", "idx")]


def texts(prefix, key="text", level="document"):
    """A data set's sequences, decoded."""
    dataset = IndexedDataset(f"{prefix}_{key}_{level}")
    return [bytes(dataset[index].astype(np.uint8)).decode() for index in range(len(dataset))]
