"""Models of the matrix with an encoder and a decoder: T5, of other depths and lengths on either side."""

from tests.test_utils.masked_layouts import DROPOUT, NO_DROPOUT, SGD, UNTIED

SIZES = "--num-layers 2 --decoder-num-layers 3 --decoder-seq-length 16"
T5_MODELS = {
    "t5": f"{SIZES} {DROPOUT}",
    "t5-sgd": f"{SIZES} {NO_DROPOUT} {SGD}",
    "t5-untied": f"{SIZES} {DROPOUT} {UNTIED} --clip-grad 0.1",
    "t5-deep": f"{SIZES} {DROPOUT} --num-layers 4 --decoder-num-layers 5",
    "t5-rope": (
        f"{SIZES} {DROPOUT} --position-embedding-type rope --normalization RMSNorm --geglu --disable-bias-linear"
        " --group-query-attention --num-query-groups 2 --qk-layernorm"
    ),
    "t5-relative": (
        f"{SIZES} {DROPOUT} --position-embedding-type relative --relative-attention-num-buckets 8"
        " --relative-attention-max-distance 20 --normalization RMSNorm --relu --disable-bias-linear"
    ),
    "t5-relative-sgd": (
        f"{SIZES} {NO_DROPOUT} {UNTIED} {SGD} --position-embedding-type relative --relative-attention-num-buckets 8"
        " --relative-attention-max-distance 20"
    ),
    "t5-post-norm": f"{SIZES} {DROPOUT} --apply-residual-connection-post-layernorm --no-bias-gelu-fusion",
    "t5-sinks": f"{SIZES} {DROPOUT} --softmax-type off-by-one --norm-placement sandwich",
    "t5-bf16": f"{SIZES} {DROPOUT} --bf16 --adam-eps 1e-2",
}
