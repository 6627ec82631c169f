"""Rows of the dry run about samples of different lengths."""

import json

import pytest

from megatron.training.arguments import parse_args, validate_args
from megatron.training.report.variable_lengths import variable_length_rows

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 48 --max-position-embeddings 48 --lr 1e-3"
    " --micro-batch-size 1 --global-batch-size 24 --train-iters 1 --mock-data --tokenizer-type NullTokenizer"
    " --vocab-size 64 --eval-iters 0 --attention-dropout 0 --use-varlen-dataset"
)


@pytest.mark.parametrize("length, num_rows", [(97, 6), (121, 5)])
def test_documents_of_equal_length_are_split_into_full_samples_and_a_rest(length, num_rows):
    """The last token has no successor: 97 tokens are two samples of 48, 121 tokens have a third one of 24. Four ranks
    with rows of 48 tokens share 24 samples: six rows each, or, as two of eight rests fit a row, five."""
    lengths = {"p50": length, "p95": length, "min_seq_len": length, "max_seq_len": length}
    argv = [*FLAGS.split(), "--varlen-mock-dataset-config-json", json.dumps(lengths)]
    cfg = validate_args(parse_args(argv), 4)
    rows = dict(variable_length_rows(cfg, cfg.describe(64)))
    assert rows["micro-batches per rank"] == f"{num_rows} to {num_rows}"
    assert rows["imbalance"].startswith("0.0%") and rows["micro-batch"].endswith("at most 48 tokens on each")
