"""Rows of the matrix with an encoder and a decoder: T5, of other depths and lengths on either side."""

from tests.test_utils.masked_layouts import (
    CP2,
    DROPOUT,
    FULL,
    MBS,
    NO_DROPOUT,
    PP2,
    SELECTED,
    SGD,
    SP,
    TP2,
    UNTIED,
    ZERO,
)

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
PP4 = f"{MBS} --pipeline-model-parallel-size 4"
VPP = "--num-virtual-stages-per-pipeline-rank 2"
CP4, TWO_LEVELS = f"{MBS} --context-parallel-size 4", "--hierarchical-context-parallel-sizes 2 2"
TP, CP = "--tensor-model-parallel-size 2", "--context-parallel-size 2"
T5_ROWS = {
    "t5-accumulation": ("t5", "--micro-batch-size 1", 1),
    "t5-dp2": ("t5", MBS, 2),
    "t5-dp4-sgd": ("t5-sgd", "--micro-batch-size 1", 4),
    "t5-dp2-bf16": ("t5-bf16", MBS, 2, "bf16"),
    "t5-zero2": ("t5", f"{MBS} {ZERO}", 2),
    "t5-zero2-tp2-sp": ("t5-untied", f"{TP2} {SP} {ZERO}", 4),
    "t5-fsdp2": ("t5", f"{MBS} --use-torch-fsdp2", 2),
    "t5-fsdp2-tp2-sp": ("t5-relative", f"{TP2} {SP} --use-torch-fsdp2", 4),
    "t5-tp2": ("t5", TP2, 2),
    "t5-tp2-sp": ("t5", f"{TP2} {SP}", 2),
    "t5-tp4-sp-untied": ("t5-untied", f"{MBS} --tensor-model-parallel-size 4 {SP}", 4),
    "t5-tp2-sp-rope": ("t5-rope", f"{TP2} {SP}", 2),
    "t5-tp2-relative": ("t5-relative", TP2, 2),
    "t5-tp4-sp-relative": ("t5-relative-sgd", f"{MBS} --tensor-model-parallel-size 4 {SP}", 4),
    "t5-tp2-sp-post-norm": ("t5-post-norm", f"{TP2} {SP}", 2),
    "t5-tp2-sp-sinks": ("t5-sinks", f"{TP2} {SP}", 2),
    "t5-tp2-sp-halves": ("t5", f"{TP2} {SP} --tp-comm-overlap", 2),
    "t5-tp2-sp-chunks": ("t5-sgd", f"{TP2} {SP} --cross-entropy-chunk-tokens 16", 2),
    "t5-pp2": ("t5", PP2, 2),
    "t5-pp2-dp2": ("t5-sgd", PP2, 4),
    "t5-pp2-zero": ("t5-untied", f"{PP2} {ZERO}", 4),
    "t5-pp2-relative": ("t5-relative", PP2, 2),
    "t5-pp4-relative": ("t5-relative-sgd", PP4, 4),
    "t5-pp4": ("t5-deep", PP4, 4),
    "t5-pp2-vpp": ("t5", f"{PP2} {VPP}", 2),
    "t5-pp2-vpp-relative": ("t5-relative", f"{PP2} {VPP}", 2),
    "t5-pp2-zero-bubble": ("t5-rope", f"{PP2} --pipeline-schedule zero-bubble", 2),
    "t5-pp2-zero-bubble-chunks": ("t5-deep", f"{PP2} {VPP} --pipeline-schedule zero-bubble", 2),
    "t5-pp2-cut": ("t5", f"{PP2} --pipeline-model-parallel-layout Ettaa|fttL", 2),
    "t5-pp4-lopsided": ("t5-post-norm", f"{PP4} --pipeline-model-parallel-layout Et|ta|aft|tL", 4),
    "t5-pp2-tp2-sp": ("t5", f"{PP2} {TP} {SP}", 4),
    "t5-pp2-tp2-sp-relative": ("t5-relative", f"{PP2} {TP} {SP}", 4),
    "t5-recompute": ("t5-relative", f"{TP2} {SP} {FULL}", 2),
    "t5-recompute-parts": ("t5", f"{TP2} {SP} {SELECTED} core_attn layernorm mlp", 2),
    "t5-recompute-pp2-zero-bubble": ("t5-rope", f"{PP2} --pipeline-schedule zero-bubble {SELECTED} mlp_act", 2),
    "t5-cp2": ("t5", CP2, 2),
    "t5-cp2-allgather": ("t5", f"{CP2} --cp-comm-type allgather", 2),
    "t5-cp2-a2a": ("t5", f"{CP2} --cp-comm-type a2a", 2),
    "t5-cp4-rope": ("t5-rope", CP4, 4),
    "t5-cp2-tp2-sp": ("t5-sinks", f"{CP2} {TP} {SP}", 4),
    "t5-cp2-zero": ("t5-untied", f"{CP2} {ZERO}", 4),
    "t5-cp2-pp2": ("t5", f"{PP2} {CP}", 4),
    "t5-cp2-relative": ("t5-relative", CP2, 2),
    "t5-cp2-relative-allgather": ("t5-relative", f"{CP2} --cp-comm-type allgather", 2),
    "t5-cp4-relative-a2a": ("t5-relative-sgd", f"{CP4} --cp-comm-type a2a", 4),
    "t5-cp4-relative-two-levels": ("t5-relative", f"{CP4} --cp-comm-type a2a+p2p {TWO_LEVELS}", 4),
    "t5-cp2-pp2-relative": ("t5-relative", f"{PP2} {CP}", 4),
    "t5-cp2-tp2-sp-relative": ("t5-relative-sgd", f"{CP2} {TP} {SP}", 4),
}  # fmt: skip
