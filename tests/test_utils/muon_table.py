"""Rows of the matrix with Muon, whose updates are of full matrices: every kind of fused weight and every layout."""

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

SP, CP2 = "--sequence-parallel", "--context-parallel-size 2"
TP2, TP4 = "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 4"
PP2 = "--pipeline-model-parallel-size 2"
GATHER = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 3000"
FSDP = "--use-torch-fsdp2"
EP2, EP4 = "--expert-model-parallel-size 2", "--expert-model-parallel-size 4"
ETP1, ETP2 = "--expert-tensor-parallel-size 1", "--expert-tensor-parallel-size 2"
MBS1, MBS2, MBS4 = (f"--micro-batch-size {size}" for size in (1, 2, 4))
MUON_ROWS = {
    "muon-dp2": ("muon", MBS4, 2),
    "muon-zero2-gather": ("muon", f"{MBS2} {GATHER}", 2),
    "muon-zero4-instances": (
        "muon-one-matrix", f"{MBS2} --use-distributed-optimizer --num-distributed-optimizer-instances 2", 4,
    ),
    "muon-zero4-more-ranks-than-rows": ("muon-heads", f"{MBS1} {GATHER}", 4),
    "muon-tp2": ("muon", f"{MBS4} {TP2}", 2),
    "muon-tp2-one-matrix": ("muon-one-matrix", f"{MBS4} {TP2}", 2),
    "muon-tp2-sp-zero2": ("muon", f"{MBS4} {TP2} {SP} {GATHER}", 4),
    "muon-tp4-sp-groups-below-ranks": ("muon", f"{MBS4} {TP4} {SP}", 4),
    "muon-tp4-groups-below-ranks-heads": ("muon-heads", f"{MBS4} {TP4}", 4),
    "muon-cp2-zero2": ("muon-heads", f"{MBS4} {CP2} {GATHER}", 4),
    "muon-pp2-vpp-zero2": ("muon", f"{MBS2} {PP2} --num-virtual-stages-per-pipeline-rank 2 {GATHER}", 4),
    "muon-fsdp2": ("muon", f"{MBS2} {FSDP}", 2),
    "muon-fsdp2-tp2-sp": ("muon-one-matrix", f"{MBS4} {TP2} {SP} {FSDP}", 4),
    "muon-latent-tp2-sp-zero2": ("muon-latent", f"{MBS4} {TP2} {SP} {GATHER}", 4),
    "muon-latent-fsdp2": ("muon-latent", f"{MBS2} {FSDP}", 2),
    "muon-ep2-zero2": ("muon-experts", f"{MBS2} {EP2} {ETP1} {GATHER}", 4),
    "muon-ep4": ("muon-split-experts", f"{MBS2} {EP4}", 4),
    "muon-tp2-sp-ep2-etp2": ("muon-experts", f"{MBS4} {TP2} {SP} {EP2} {ETP2}", 4),
    "muon-tp2-sp-etp2-zero2": ("muon-split-experts", f"{MBS2} {TP2} {SP} {ETP2} {GATHER}", 4),
    "muon-ep2-fsdp2": ("muon-experts", f"{MBS2} {EP2} {FSDP}", 4),
    "adamuon-dp2": ("adamuon", MBS4, 2),
    "adamuon-tp2-sp-zero2": ("adamuon", f"{MBS4} {TP2} {SP} {GATHER}", 4),
    "adamuon-fsdp2": ("adamuon", f"{MBS2} {FSDP}", 2),
    "normuon-tp2-sp-zero2": ("normuon", f"{MBS4} {TP2} {SP} {GATHER}", 4),
    "normuon-fsdp2-tp2-sp": ("normuon", f"{MBS4} {TP2} {SP} {FSDP}", 4),
    "normuon-zero2-offload": ("normuon", f"{MBS2} {GATHER} --optimizer-cpu-offload", 2),
    "normuon-tp2-sp-ep2-etp2": ("normuon-experts", f"{MBS4} {TP2} {SP} {EP2} {ETP2}", 4),
    "lion-tp2-sp-zero2": ("lion", f"{MBS4} {TP2} {SP} {GATHER}", 4),
    "lion-fsdp2": ("lion", f"{MBS2} {FSDP}", 2),
    "muon-lion-tp2-sp-zero2": ("muon-lion", f"{MBS4} {TP2} {SP} {GATHER}", 4),
    "muon-clip-tp2-sp-zero2": ("muon-clip", f"{MBS2} {TP2} {SP} {GATHER}", 4),
    "muon-clip-pp2-zero2": ("muon-clip", f"{MBS2} {PP2} {GATHER}", 4),
    "muon-clip-fsdp2": ("muon-clip", f"{MBS2} {FSDP}", 2),
    "muon-clip-dp2": ("muon-clip", MBS2, 2),
    "muon-clip-cp2-zero2": ("muon-clip", f"{MBS4} {CP2} {GATHER}", 4),
    "muon-clip-cp2-allgather": ("muon-clip", f"{MBS4} {CP2} --cp-comm-type allgather", 2),
    "muon-clip-cp2-a2a": ("muon-clip", f"{MBS4} {CP2} --cp-comm-type a2a", 2),
    "muon-clip-latent-cp2-tp2": ("muon-clip-latent", f"{MBS4} {CP2} {TP2}", 4),
    "muon-clip-latent-tp2-zero2": ("muon-clip-latent", f"{MBS2} {TP2} {GATHER}", 4),
    "muon-mtp-pp2-zero2": ("muon-mtp", f"{MBS2} {PP2} {GATHER}", 4),
    "t5-muon-tp2-sp-zero2": ("t5-muon", f"{MBS2} {TP2} {SP} {GATHER}", 4),
    "bert-muon-tp2-zero2": ("bert-muon", f"{MBS2} {TP2} {GATHER}", 4),
}  # fmt: skip
