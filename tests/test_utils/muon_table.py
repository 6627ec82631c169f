"""Models of the matrix with Muon, whose updates are of full matrices: every kind of fused weight."""

NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
MUON = f"--optimizer muon --muon-extra-scale-factor 0.2 {NO_DROPOUT}"
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --ffn-hidden-size 64"
    " --untie-embeddings-and-output-weights"
)
GROUPS = "--group-query-attention --num-query-groups 2"
LATENT = (
    "--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 20 --qk-head-dim 8 --qk-pos-emb-head-dim 4"
    " --v-head-dim 10 --qk-layernorm"
)
EXPERTS = (
    f"{LLAMA} --num-experts 4 --moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 16"
    " --moe-shared-expert-gate --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.05"
)
MUON_MODELS = {
    "muon": f"{MUON} {LLAMA} {GROUPS} --clip-grad 0.5",
    "muon-one-matrix": (
        f"{MUON} --muon-no-split-qkv --muon-nesterov --muon-scale-mode shape_scaling --decoupled-lr 3e-3"
    ),
    "muon-heads": f"{MUON} {LLAMA} {GROUPS} --muon-split-qkv-per-head --muon-split-gate-up",
    "muon-latent": f"{MUON} {LLAMA} {LATENT} --muon-split-qkv-per-head --muon-coefficient-type cubic5",
    "muon-experts": f"{MUON} {EXPERTS} --muon-scale-mode unit_rms_norm",
    "muon-split-experts": f"{MUON} {EXPERTS} --muon-split-gate-up --muon-coefficient-type polar_express",
    "adamuon": f"{MUON.replace('muon ', 'adaptive_muon ', 1)} {LLAMA} {GROUPS} --muon-scale-mode unit_rms_norm",
    "normuon": f"--optimizer adaptive_muon --adaptive-muon-moment2-method normuon {NO_DROPOUT} {LLAMA} {GROUPS}",
    "normuon-experts": (
        f"--optimizer adaptive_muon --adaptive-muon-moment2-method normuon {NO_DROPOUT} {EXPERTS} --muon-nesterov"
    ),
    "muon-lion": f"{MUON} {LLAMA} {GROUPS} --muon-scalar-optimizer lion --lion-beta1 0.8",
    "lion": f"--optimizer lion {NO_DROPOUT} {LLAMA} {GROUPS} --clip-grad 0.5",
    "muon-clip": f"{MUON} {LLAMA} {GROUPS} --qk-clip --qk-clip-threshold 0.005 --log-max-attention-logit",
    "muon-clip-latent": f"{MUON} {LLAMA} {LATENT} --qk-clip --qk-clip-threshold 0.005 --qk-clip-alpha 0.3",
    "muon-mtp": f"{MUON} {LLAMA} {GROUPS} --mtp-num-layers 1",
    "t5-muon": f"{MUON} --decoder-num-layers 2 --decoder-seq-length 16 --position-embedding-type relative",
    "bert-muon": f"{MUON} --untie-embeddings-and-output-weights",
}
