"""Rows of the matrix with samples of different lengths, and a context-parallel size per micro-batch."""

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

LIMIT = "--max-seqlen-per-dp-cp-rank"
DYNAMIC = f"--hybrid-context-parallel {LIMIT}"
TP2, SP = "--tensor-model-parallel-size 2", "--sequence-parallel"
PP2, VPP = "--pipeline-model-parallel-size 2", "--num-virtual-stages-per-pipeline-rank 2"
CP2, CP4 = "--context-parallel-size 2", "--context-parallel-size 4"
GATHER = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 3000"
EP2 = "--expert-model-parallel-size 2"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
VARLEN_ROWS = {
    "varlen-one": ("varlen", f"{LIMIT} 48", 1),
    "varlen-dp2": ("varlen", f"{LIMIT} 64", 2),
    "varlen-dp4-zero": ("varlen-llama", f"{LIMIT} 32 {GATHER}", 4),
    "varlen-cp2": ("varlen", CP2, 2),
    "varlen-cp2-dp2": ("varlen-llama", f"{CP2} {LIMIT} 32", 4),
    "varlen-cp4": ("varlen", f"{CP4} --cp-comm-type allgather", 4),
    "varlen-cp2-pp2": ("varlen", f"{CP2} {PP2}", 4),
    "dynamic-2": ("varlen", f"{DYNAMIC} 16", 2),
    "dynamic-4": ("varlen", f"{DYNAMIC} 8", 4),
    "dynamic-6": ("varlen-of-12", f"{DYNAMIC} 8", 6),
    "dynamic-8": ("varlen", f"{DYNAMIC} 4", 8),
    "dynamic-cp2": ("varlen", f"{DYNAMIC} 8 {CP2}", 4),
    "dynamic-cp4-allgather": ("varlen-llama", f"{DYNAMIC} 8 {CP4} --cp-comm-type allgather", 4),
    "dynamic-a2a": ("varlen", f"{DYNAMIC} 8 --cp-comm-type a2a", 4),
    "dynamic-llama": ("varlen-llama", f"{DYNAMIC} 8", 4),
    "dynamic-tp2-sp": ("varlen", f"{DYNAMIC} 16 {TP2} {SP}", 4),
    "dynamic-tp2": ("varlen-llama", f"{DYNAMIC} 8 {TP2}", 8),
    "dynamic-pp2": ("varlen", f"{DYNAMIC} 16 {PP2}", 4),
    "dynamic-pp2-4": ("varlen-llama", f"{DYNAMIC} 8 {PP2} --pipeline-schedule zero-bubble", 8),
    "dynamic-pp2-vpp": ("varlen", f"{DYNAMIC} 16 {PP2} {VPP}", 4),
    "dynamic-pp2-tp2-sp": ("varlen", f"{DYNAMIC} 16 {PP2} {TP2} {SP}", 8),
    "dynamic-zero": ("varlen", f"{DYNAMIC} 8 {GATHER}", 4),
    "dynamic-fsdp2": ("varlen", f"{DYNAMIC} 8 --use-torch-fsdp2", 4),
    "dynamic-recompute": ("varlen", f"{DYNAMIC} 8 {FULL}", 4),
    "dynamic-mla": ("varlen-mla", f"{DYNAMIC} 8", 4),
    "dynamic-mtp": ("varlen-mtp", f"{DYNAMIC} 8", 4),
    "dynamic-mtp-pp2": ("varlen-mtp", f"{DYNAMIC} 16 {PP2}", 4),
    "dynamic-sink": ("varlen-sink", f"{DYNAMIC} 8", 4),
    "dynamic-ep2": ("varlen-experts", f"{DYNAMIC} 8 {EP2} --moe-token-dispatcher-type alltoall", 4),
    "dynamic-ep2-tp2-sp": ("varlen-experts", f"{DYNAMIC} 16 {EP2} {TP2} {SP} --moe-token-dispatcher-type alltoall", 4),
    "dynamic-expert-bias": ("varlen-expert-bias", f"{DYNAMIC} 8", 4),
    "varlen-dropout-dp2": ("varlen-dropout", f"{LIMIT} 64", 2),
    "dynamic-dropout": ("varlen-dropout", f"{DYNAMIC} 8", 4),
    "dynamic-dropout-a2a": ("varlen-dropout", f"{DYNAMIC} 8 --cp-comm-type a2a", 4),
    "dynamic-dropout-allgather-tp2": ("varlen-dropout", f"{DYNAMIC} 16 --cp-comm-type allgather {TP2}", 4),
    "varlen-aux-dp2": ("varlen-aux", f"{LIMIT} 64", 2),
    "dynamic-aux": ("varlen-aux", f"{DYNAMIC} 8", 4),
    "dynamic-aux-ep2-tp2-sp": ("varlen-aux", f"{DYNAMIC} 16 {EP2} {TP2} {SP} --moe-token-dispatcher-type alltoall", 4),
    "dynamic-aux-pp2": ("varlen-aux", f"{DYNAMIC} 16 {PP2}", 4),
    "dynamic-aux-recompute": ("varlen-aux", f"{DYNAMIC} 8 {FULL}", 4),
    "dynamic-at-least-2": ("varlen", f"{DYNAMIC} 8 --min-dynamic-context-parallel-size 2", 4),
    "varlen-clip-dp2": ("varlen-clip", f"{LIMIT} 64", 2),
    "dynamic-clip": ("varlen-clip", f"{DYNAMIC} 8", 4),
    "dynamic-clip-pp2": ("varlen-clip", f"{DYNAMIC} 16 {PP2}", 4),
    "dynamic-fp32": ("varlen-llama", f"{DYNAMIC} 8", 4, "fp32"),
}
