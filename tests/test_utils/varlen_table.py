"""Models of the matrix with samples of different lengths."""

VARLEN_DROPPED = "--use-varlen-dataset --micro-batch-size 1 --attention-dropout 0.2 --hidden-dropout 0.1"
VARLEN = "--use-varlen-dataset --micro-batch-size 1 --attention-dropout 0 --hidden-dropout 0.1"
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --ffn-hidden-size 64"
    " --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2"
)
LATENT = (
    "--multi-latent-attention --kv-lora-rank 20 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 10"
    " --position-embedding-type rope"
)
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 24 --moe-router-topk 2 --moe-router-load-balancing-type none"
VARLEN_MODELS = {
    "varlen": VARLEN,
    "varlen-of-12": f"{VARLEN} --global-batch-size 12",
    "varlen-llama": f"{VARLEN} {LLAMA} --window-size 8,0 --window-attn-skip-freq 2",
    "varlen-clip": f"{VARLEN} {LLAMA} --qk-clip --qk-clip-threshold 0.005 --log-max-attention-logit",
    "varlen-mla": f"{VARLEN} {LATENT}",
    "varlen-dropout": VARLEN_DROPPED,
    "varlen-aux": (
        f"{VARLEN} {EXPERTS.replace('type none', 'type seq_aux_loss global_aux_loss')} --moe-aux-loss-coeff 0.3 0.2"
        " --moe-z-loss-coeff 0.1"
    ),
    "varlen-mtp": f"{VARLEN} --mtp-num-layers 2 --mtp-loss-scaling-factor 0.5",
    "varlen-sink": f"{VARLEN} --softmax-type learnable --no-rope-freq 2 --position-embedding-type rope",
    "varlen-experts": f"{VARLEN} {EXPERTS}",
    "varlen-expert-bias": (
        f"{VARLEN} {EXPERTS} --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
        " --moe-router-bias-update-rate 0.1"
    ),
}
