"""Models of the matrix in fp8: scales and bytes do not depend on the layout, so that results equal one rank to the same
tolerance as without fp8. Casts round to 3 bits, so that a scale of another rank changes results by percents.

Models name the micro-batch size: a scale is the largest magnitude of a micro-batch. Two-batch overlap casts halves of
micro-batches separately; its rows have micro-batches of twice the model's size.

With tensorwise scales, experts have one scale for the rows of all expert-parallel ranks: no row has these in several
data-parallel groups.

Key and value heads that several ranks hold have no row: their gradients are cast as partial sums.

With block scales every rank holds multiples of 128 tokens and features, and of positions in each zig-zag part.
"""

HYBRID, E4M3 = "--fp8-format hybrid --fp8-recipe", "--fp8-format e4m3 --fp8-recipe"
ONE = "--micro-batch-size 1"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --hidden-dropout 0"
    " --attention-dropout 0 --untie-embeddings-and-output-weights"
)
TWO_GROUPS = "--group-query-attention --num-query-groups 2"
WIDE = (
    "--hidden-size 128 --ffn-hidden-size 256 --kv-channels 64 --seq-length 512 --max-position-embeddings 512"
    " --global-batch-size 2"
)
LATENT = (
    "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 16"
    " --v-head-dim 8 --position-embedding-type rope --qk-layernorm"
)
EXPERTS = (
    "--num-experts 4 --moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 32"
    " --moe-token-dispatcher-type alltoall --moe-layer-freq 2"
)
DELAYED = f"{HYBRID} delayed --fp8-amax-history-len 3 --fp8-amax-compute-algo max --fp8-margin 1"

FP8_MODELS = {
    "fp8-delayed": f"{ONE} {LLAMA} {TWO_GROUPS} --ffn-hidden-size 64 {DELAYED}",
    "fp8-tensorwise": f"{ONE} {DROPOUT} {HYBRID} tensorwise",
    "fp8-blockwise": f"{ONE} {LLAMA} {TWO_GROUPS} {WIDE} {E4M3} blockwise",
    "fp8-ends": f"{ONE} {DROPOUT} {E4M3} tensorwise --first-last-layers-bf16 --no-fp8-wgrad --num-layers 4",
    "fp8-heads": f"{ONE} {DROPOUT} {E4M3} delayed --kv-channels 16",
    "fp8-latent": f"{ONE} {LLAMA} {LATENT} --ffn-hidden-size 64 {HYBRID} tensorwise",
    "fp8-experts": f"{ONE} {DROPOUT} {EXPERTS} {DELAYED} --mtp-num-layers 1",
    "fp8-wide-experts": f"{ONE} {DROPOUT} {EXPERTS} --moe-ffn-hidden-size 96 {HYBRID} tensorwise",
    "fp8-wide-experts-delayed": f"{ONE} {LLAMA} {EXPERTS} --moe-ffn-hidden-size 96 --ffn-hidden-size 64 {DELAYED}",
    "bert-fp8": f"{ONE} {DROPOUT} {DELAYED}",
    "t5-fp8": f"{ONE} {DROPOUT} {DELAYED} --decoder-num-layers 2 --decoder-seq-length 32",
}
