"""The matrix: every layout gives the one-rank answer.

A row is a model (flags that change the numbers) and a layout (flags that must not). Ten steps of a tiny GPT on random
tokens with random loss masks, fully masked rows among them; then losses, the gathered gradient of every parameter, the
gradient norm and all weights after every step are those of one rank with the whole batch in one micro-batch, to 1e-10
in float64 and 1e-5 in float32; initial weights and copies of a weight agree to the bit.
"""

import pytest

from tests.test_utils.layouts import Layout, Matrix

DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
MODELS = {
    "gpt2": DROPOUT,
    "sgd": f"{DROPOUT} --optimizer sgd --lr 0.3",
    "llama": "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"
    " --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 --hidden-dropout 0"
    " --attention-dropout 0 --ffn-hidden-size 64",
}

# name: (model, layout, ranks[, precision])
DATA_PARALLEL = {
    "accumulation": ("gpt2", "--micro-batch-size 1", 1),
    "dp2": ("gpt2", "--micro-batch-size 2", 2),
    "dp2-overlap": ("gpt2", "--micro-batch-size 2 --overlap-grad-reduce --ddp-bucket-size 5000", 2),
    "dp4": ("sgd", "--micro-batch-size 1", 4),
    "dp4-fp32": ("sgd", "--micro-batch-size 2", 4, "fp32"),
    "dp2-untied": ("llama", "--micro-batch-size 4", 2),
}

TABLE = {**DATA_PARALLEL}


@pytest.fixture(scope="module")
def matrix(gloo_pool):
    matrix = Matrix(gloo_pool)
    yield matrix
    matrix.close()


def row(name):
    model, *rest = TABLE[name]
    return Layout(MODELS[model], *rest)


@pytest.mark.parametrize("name", TABLE)
def test_layout_equals_one_rank(matrix, name):
    verdict = matrix.verdict(row(name))
    assert verdict.equal, "\n".join(map(str, verdict.differences[:5]))
