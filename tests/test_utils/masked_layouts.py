"""Rows of the matrix with encoders: BERT, whose two losses have separate counts. A model's name begins with the
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
SP = "--sequence-parallel"
MBS = "--micro-batch-size 2"
TP2, CP2, PP2 = (f"{MBS} --{kind}-parallel-size 2" for kind in ("tensor-model", "context", "pipeline-model"))
ZERO = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 3000"
PACKED = "--use-packed-sequence"
"""Among the flags of a layout: rows without padding are compared with padded ones."""
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTED = "--recompute-granularity selective --recompute-modules"
BERT_ROWS = {
    "bert-accumulation": ("bert", "--micro-batch-size 1", 1),
    "bert-dp2": ("bert", MBS, 2),
    "bert-dp4-sgd": ("bert-sgd", "--micro-batch-size 1", 4),
    "bert-dp2-bf16": ("bert-bf16", MBS, 2, "bf16"),
    "bert-zero2": ("bert", f"{MBS} {ZERO}", 2),
    "bert-zero2-tp2-sp": ("bert", f"{TP2} {SP} {ZERO}", 4),
    "bert-fsdp2": ("bert", f"{MBS} --use-torch-fsdp2", 2),
    "bert-fsdp2-tp2-sp": ("bert-post-norm", f"{TP2} {SP} --use-torch-fsdp2", 4),
    "bert-tp2": ("bert", TP2, 2),
    "bert-tp2-sp": ("bert", f"{TP2} {SP}", 2),
    "bert-tp4-sp-one-loss": ("bert-one-loss", f"{MBS} --tensor-model-parallel-size 4 {SP}", 4),
    "bert-tp2-sp-post-norm": ("bert-post-norm", f"{TP2} {SP}", 2),
    "bert-tp2-sp-modern": ("bert-modern", f"{TP2} {SP}", 2),
    "bert-tp2-sp-rms": ("bert-rms", f"{TP2} {SP}", 2),
    "bert-tp2-sp-halves": ("bert", f"{TP2} {SP} --tp-comm-overlap", 2),
    "bert-tp2-sp-chunks": ("bert-sgd", f"{TP2} {SP} --cross-entropy-chunk-tokens 16", 2),
    "bert-cp2": ("bert", CP2, 2),
    "bert-cp2-allgather": ("bert", f"{CP2} --cp-comm-type allgather", 2),
    "bert-cp2-a2a": ("bert", f"{CP2} --cp-comm-type a2a", 2),
    "bert-cp4-modern": ("bert-modern", f"{MBS} --context-parallel-size 4", 4),
    "bert-cp2-tp2-sp": ("bert-rms", f"{CP2} --tensor-model-parallel-size 2 {SP}", 4),
    "bert-cp2-zero": ("bert-one-loss", f"{CP2} {ZERO}", 4),
    "bert-pp2": ("bert", PP2, 2),
    "bert-pp2-dp2": ("bert-sgd", PP2, 4),
    "bert-pp4": ("bert-one-loss", f"{MBS} --pipeline-model-parallel-size 4", 4),
    "bert-pp2-vpp": ("bert", f"{PP2} --num-virtual-stages-per-pipeline-rank 2", 2),
    "bert-pp2-zero-bubble": ("bert", f"{PP2} --pipeline-schedule zero-bubble", 2),
    "bert-pp2-cut": ("bert-five", f"{PP2} --pipeline-model-parallel-layout Etta|fttL", 2),
    "bert-pp2-tp2-sp": ("bert", f"{PP2} --tensor-model-parallel-size 2 {SP}", 4),
    "bert-pp2-cp2": ("bert-modern", f"{PP2} --context-parallel-size 2", 4),
    "bert-recompute": ("bert", f"{TP2} {SP} {FULL}", 2),
    "bert-recompute-parts": ("bert", f"{TP2} {SP} {SELECTED} core_attn layernorm mlp", 2),
    "bert-recompute-pp2-zero-bubble": ("bert-rms", f"{PP2} --pipeline-schedule zero-bubble {SELECTED} mlp_act", 2),
    "bert-packed": ("bert-packed", f"--micro-batch-size 4 {PACKED}", 1),
    "bert-packed-sgd": ("bert-sgd", f"--micro-batch-size 8 {PACKED}", 1),
    "bert-packed-dp2-zero": ("bert-packed", f"{MBS} {ZERO} {PACKED}", 2),
    "bert-packed-fsdp2": ("bert-packed", f"{MBS} --use-torch-fsdp2 {PACKED}", 2),
    "bert-packed-tp2-sp": ("bert-packed", f"{TP2} {SP} {PACKED} {FULL}", 2),
    "bert-packed-tp2": ("bert-modern", f"{TP2} {PACKED}", 2),
    "bert-packed-cp2-tp2-sp": ("bert-packed", f"{CP2} --tensor-model-parallel-size 2 {SP} {PACKED}", 4),
    "bert-packed-cp2-allgather": ("bert-sgd", f"{CP2} --cp-comm-type allgather {PACKED}", 2),
    "bert-packed-cp2-a2a": ("bert-modern", f"{CP2} --cp-comm-type a2a {PACKED}", 2),
    "bert-packed-cp4-modern": ("bert-modern", f"{MBS} --context-parallel-size 4 {PACKED}", 4),
    "bert-packed-pp2-vpp-zero": (
        "bert-packed", f"{PP2} --num-virtual-stages-per-pipeline-rank 2 {ZERO} {PACKED}", 4,
    ),
    "bert-packed-pp2-tp2-sp": ("bert-packed", f"{PP2} --tensor-model-parallel-size 2 {SP} {PACKED}", 4),
    "bert-packed-pp2-cp2-zero-bubble": (
        "bert-modern", f"{PP2} --context-parallel-size 2 --pipeline-schedule zero-bubble {PACKED}", 4,
    ),
    "bert-packed-pp4-h2": (
        "bert-packed",
        f"--micro-batch-size 1 --pipeline-model-parallel-size 4 --pipeline-schedule zero-bubble-h2 {PACKED}", 4,
    ),
    "bert-packed-pp2": ("bert-sgd", f"{PP2} {PACKED} {FULL}", 2),
}  # fmt: skip
