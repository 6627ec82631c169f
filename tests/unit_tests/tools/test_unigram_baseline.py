"""tools/unigram_baseline.py: what predictions without a model cost."""

import math

import numpy as np
import pytest

from megatron.console import run_tool
from megatron.core.datasets.masked_dataset import MaskedWordPieceDataset
from megatron.tools import unigram_baseline as tool


class Samples(MaskedWordPieceDataset):
    """Masked samples from lists of (labels, order)."""

    def __init__(self, rows):
        self.sample_index = rows

    def __getitem__(self, index):
        labels, order = self.sample_index[index]
        labels = np.array(labels)
        return {"labels": labels, "loss_mask": (labels >= 0).astype(np.int64), "is_random": order}


def test_masked_tokens_are_counted_where_they_are_predicted():
    train = Samples([([1, -1, 2], 0), ([1, -1, -1], 1), ([-1, -1, -1], 0), ([1, 1, 1], 0)])
    counts = tool.token_counts(train, 4)
    assert counts.tolist() == [1, 6, 2, 1]
    loss = tool.unigram_loss(counts, Samples([([-1, 1, -1], 0), ([0, -1, 2], 1), ([3, 3, 3], 0)]), 2)
    assert loss == pytest.approx(-(math.log(0.6) + math.log(0.1) + math.log(0.2)) / 3)
    assert tool.order_loss(train, Samples([([1], 1), ([1], 0), ([1], 0), ([1], 1)]), 3) == pytest.approx(
        -(math.log(0.25) + 2 * math.log(0.75)) / 3
    )


@pytest.mark.parametrize(("program", "kind"), [("bert", "BertWordPieceLowerCase"), ("gpt", "GPT2BPETokenizer")])
def test_the_tokenizer_is_that_of_the_program_unless_another_is_named(program, kind, capsys):
    assert run_tool("unigram-baseline", ["--program", f"pretrain_{program}.py"]) == 2
    assert f"--vocab-file: is required by --tokenizer-type {kind}" in capsys.readouterr().err
