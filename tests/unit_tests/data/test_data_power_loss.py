"""A power loss while a data set is written leaves the old or the new one, or none; after the write, the new one."""

import json
import os

import numpy as np
import pytest

from megatron.core.config.tokenizer import TokenizerConfig
from megatron.core.datasets.preprocessing.pipeline import preprocess
from megatron.core.datasets.preprocessing.settings import PreprocessConfig
from megatron.core.tokenizers import build_tokenizer
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.indexed_writer import IndexedDatasetBuilder
from megatron.data.sidecar import read_sidecar
from tests.test_utils.power_loss import PowerLoss

OLD, NEW = [[1, 2, 3], [4]], [[9, 8], [7, 6, 5], [4]]


def write(prefix, documents):
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32) as builder:
        for tokens in documents:
            builder.add_document(tokens, [len(tokens)])
        builder.finalize(f"{prefix}.idx")


def documents(prefix):
    """Return all documents of a data set; None if it has no index."""
    if not os.path.exists(f"{prefix}.idx"):
        return None
    dataset = IndexedDataset(str(prefix))
    return [dataset[index].tolist() for index in range(len(dataset))]


@pytest.mark.parametrize("replaced", [False, True], ids=["new", "replaced"])
def test_visible_data_set_is_complete_and_the_written_one_durable(tmp_path, tmp_path_factory, replaced):
    if replaced:
        write(tmp_path / "data", OLD)

    def check(folder, promise):
        result = documents(folder / "data")
        assert result in ([NEW] if promise else [None, OLD, NEW] if replaced else [None, NEW]), result

    with PowerLoss(tmp_path, tmp_path_factory.mktemp("states"), check).recording() as power:
        write(tmp_path / "data", NEW)
        power.promise = "written"
    assert power.num_states > 8


def run(folder, texts, tokenizer_type):
    source = folder.with_name(f"{folder.name}-{tokenizer_type}.jsonl")
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    cfg = PreprocessConfig(input=[str(source)], output_prefix=str(folder / "out"), workers=1, overwrite=True)
    tokens = TokenizerConfig(tokenizer_type=tokenizer_type, vocab_size=300)
    preprocess(cfg, tokens, build_tokenizer)


def test_tokens_and_sidecar_always_have_the_same_tokenizer(tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    run(root, ["1 2 3", "4"], "NullTokenizer")
    name = "out_text_document"
    old = documents(root / name), read_sidecar(str(root / name)).tokenizer_type
    assert old == ([[1, 2, 3], [4]], "NullTokenizer")

    def check(folder, promise):
        result = documents(folder / name)
        if promise or result is not None:
            sidecar = read_sidecar(str(folder / name))
            new = [list(b"ab"), list(b"cde")], "ByteLevelTokenizer"
            assert (result, sidecar.tokenizer_type) in ([new] if promise else [old, new])

    with PowerLoss(root, tmp_path_factory.mktemp("states"), check).recording() as power:
        run(root, ["ab", "cde"], "ByteLevelTokenizer")
        power.promise = "published"
    assert power.num_states > 20
