"""Models of the matrix with encoders: BERT, whose two losses have separate counts. A model's name begins with the
family whose program parses its flags."""

DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
UNTIED = "--untie-embeddings-and-output-weights"
SGD = "--optimizer sgd --lr 0.3 --clip-grad 0"
BERT_MODELS = {
    "bert": DROPOUT,
    "bert-sgd": f"{NO_DROPOUT} {SGD}",
    "bert-one-loss": f"{DROPOUT} {UNTIED} --bert-no-binary-head --clip-grad 0.1",
    "bert-post-norm": f"{DROPOUT} --apply-residual-connection-post-layernorm --no-bias-gelu-fusion",
    "bert-modern": (
        f"{NO_DROPOUT} --bert-no-binary-head --position-embedding-type rope --rotary-base 1000 --rotary-base-local 50"
        " --window-size 4,4 --window-attn-skip-freq 2 --disable-bias-linear --geglu --embed-layernorm"
    ),
    "bert-rms": (
        f"{DROPOUT} {UNTIED} --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
        " --group-query-attention --num-query-groups 2 --qk-layernorm"
    ),
    "bert-five": f"{DROPOUT} --num-layers 5 --apply-residual-connection-post-layernorm",
    "bert-packed": "--hidden-dropout 0.1 --attention-dropout 0",
    "bert-bf16": f"{DROPOUT} --bf16 --adam-eps 1e-2",
}
