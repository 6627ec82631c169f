"""Rows of the matrix with mixtures of experts. The balancing losses of most models do not depend on the micro-batch
size, which the layouts change. A model that depends on it (capacity, ``aux_loss``, Sinkhorn) names the size, and its
layouts cut micro-batches as one rank does; capacity counts the tokens of a rank, so that its layouts split no sequence
either, but for capacities that have room for every token."""

DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
EXPERTS = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --ffn-hidden-size 64"
    " --untie-embeddings-and-output-weights --num-experts 4 --moe-ffn-hidden-size 24"
)
BALANCED = "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.05 --moe-z-loss-coeff 0.01"
SHARED = "--moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate"
DEEPSEEK = (
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01"
    " --moe-router-topk-scaling-factor 2.5 --moe-router-num-groups 2 --moe-router-group-topk 1"
)
BALANCE = "--moe-router-load-balancing-type"
HALF = "--bf16 --moe-router-dtype fp32 --adam-eps 1e-2 --moe-router-force-load-balancing"  # rounding turns choices over
SGD = "--optimizer sgd --lr 0.3 --clip-grad 0"
EXPERT_MODELS = {
    "moe": f"{EXPERTS} {NO_DROPOUT} {BALANCED}",
    "moe-sgd": f"{EXPERTS} {NO_DROPOUT} {BALANCED} {SGD}",
    "moe-shared": f"{EXPERTS} {SHARED} {DROPOUT} {BALANCED} --moe-input-jitter-eps 0.1",
    "moe-deepseek": f"{EXPERTS} {NO_DROPOUT} {DEEPSEEK} --moe-router-group-score-topk 1 --moe-layer-freq ([0]+[1]*1)",
    "moe-biases": f"--num-experts 4 --moe-router-topk 3 --moe-router-pre-softmax {NO_DROPOUT} {BALANCED}",
    "moe-global": f"{EXPERTS} {NO_DROPOUT} {BALANCE} global_aux_loss --moe-aux-loss-coeff 0.05",
    "moe8": f"{EXPERTS} --num-experts 8 --moe-router-topk 3 {SHARED} {DROPOUT} {BALANCED} {SGD}",
    "moe-deep": f"{EXPERTS} --num-layers 4 --moe-layer-freq 2 {SHARED} {DROPOUT} {BALANCED}",
    "moe-deep-deepseek": f"{EXPERTS} --num-layers 4 --moe-layer-freq [0]+[1]*3 {DEEPSEEK} {DROPOUT} {SGD}",
    "moe-two-losses": (
        f"{EXPERTS} {DROPOUT} {SGD} {BALANCE} seq_aux_loss global_aux_loss --moe-aux-loss-coeff 0.05 0.02"
        " --moe-router-score-function sqrtsoftplus --moe-router-enable-expert-bias"
    ),
    "moe-switch": f"{EXPERTS} --moe-router-topk 1 --moe-router-pre-softmax {DROPOUT} {BALANCED} {SGD}",
    "moe-packed": f"{EXPERTS} {NO_DROPOUT} {BALANCED} --reset-position-ids --reset-attention-mask",
    "moe-forced": f"{EXPERTS} {NO_DROPOUT} {BALANCED} --moe-router-force-load-balancing",
    "moe-plain": f"{EXPERTS} {NO_DROPOUT} {BALANCED} --optimizer sgd --lr 0.3",
    "moe-bf16": f"{EXPERTS} {SHARED} {NO_DROPOUT} {BALANCED} {HALF}",
    "moe-batch": f"{EXPERTS} {NO_DROPOUT} --moe-aux-loss-coeff 0.05 --micro-batch-size 8",
    "moe-batch-4": f"{EXPERTS} {NO_DROPOUT} --moe-aux-loss-coeff 0.05 {SGD} --micro-batch-size 4",
    "moe-sinkhorn": f"{EXPERTS} {NO_DROPOUT} {BALANCE} sinkhorn {SGD} --micro-batch-size 4",
    "moe-sinkhorn-1": f"{EXPERTS} {DROPOUT} {BALANCE} sinkhorn --moe-router-topk 1 --micro-batch-size 2",
    "moe-quantiles": f"{EXPERTS} {NO_DROPOUT} {BALANCE} quantile_balancing --micro-batch-size 4"
                     " --moe-router-quantile-balancing-ema 0.25",
    "moe-capacity": f"{EXPERTS} {DROPOUT} {BALANCED} --moe-expert-capacity-factor 0.8 --micro-batch-size 2 {SGD}",
    "moe-capacity-last": (
        f"{EXPERTS} {NO_DROPOUT} {BALANCED} --moe-expert-capacity-factor 0.6 --moe-token-drop-policy position"
        " --micro-batch-size 1"
    ),
    "moe-padded": (
        f"{EXPERTS} {NO_DROPOUT} {BALANCED} --moe-expert-capacity-factor 0.7 --moe-pad-expert-input-to-capacity"
        " --micro-batch-size 2"
    ),
    "moe-roomy": (
        f"{EXPERTS} {NO_DROPOUT} {BALANCED} --moe-expert-capacity-factor 4 --moe-pad-expert-input-to-capacity {SGD}"
    ),
}
EP2, EP4, ALL = (
    "--expert-model-parallel-size 2", "--expert-model-parallel-size 4", "--moe-token-dispatcher-type alltoall",
)  # fmt: skip
STATIC = "--moe-static-rows"
ETP1, ETP2 = "--expert-tensor-parallel-size 1", "--expert-tensor-parallel-size 2"
SP = "--sequence-parallel"
TP2 = f"--micro-batch-size 4 --tensor-model-parallel-size 2 {SP}"
CP2 = "--micro-batch-size 4 --context-parallel-size 2"
PP2 = "--micro-batch-size 2 --pipeline-model-parallel-size 2"
VPP = "--num-virtual-stages-per-pipeline-rank 2"
ZB = "--pipeline-schedule zero-bubble"
ZERO = "--use-distributed-optimizer"
GATHER = f"{ZERO} --overlap-grad-reduce --ddp-bucket-size 3000 --overlap-param-gather"
INSTANCES = "--num-distributed-optimizer-instances 2"
FSDP = "--use-torch-fsdp2"
FULL = "--recompute-granularity full --recompute-num-layers 1 --recompute-method uniform"
SELECTED = "--recompute-granularity selective --recompute-modules"
BESIDE, HALVES = "--moe-shared-expert-overlap", "--overlap-moe-expert-parallel-comm"
MBS2 = "--micro-batch-size 2"

SPLIT_EXPERTS = {
    "experts": ("moe", MBS2, 1),
    "experts-one-by-one": ("moe-shared", f"{MBS2} --no-moe-fusion", 1),
    "experts-dp2": ("moe-shared", MBS2, 2),
    "ep2": ("moe", f"{MBS2} {EP2}", 2),
    "ep2-alltoall": ("moe-sgd", f"{MBS2} {EP2} {ALL}", 2),
    "ep2-one-by-one": ("moe-biases", f"{MBS2} {EP2} {ALL} --no-moe-fusion", 2),
    "ep4": ("moe-two-losses", f"{MBS2} {EP4}", 4),
    "ep2-static-dp4": ("moe-deepseek", f"{MBS2} {EP2} {STATIC}", 4),
    "ep4-static-overlapped-shared": ("moe-shared", f"{MBS2} {EP4} {STATIC} {BESIDE}", 4),
    "ep4-alltoall": ("moe-shared", f"{MBS2} {EP4} {ALL}", 4),
    "ep8": ("moe8", "--micro-batch-size 1 --expert-model-parallel-size 8", 8),
    "ep8-alltoall": ("moe8", f"--micro-batch-size 1 --expert-model-parallel-size 8 {ALL}", 8),
    "ep4-dp8": ("moe8", f"--micro-batch-size 1 {EP4} {ALL}", 8),
    "ep2-dp4": ("moe-deepseek", f"{MBS2} {EP2} {ALL}", 4),
    "ep2-overlapped-shared": ("moe-shared", f"{MBS2} {EP2} {ALL} {BESIDE}", 2),
    "ep2-allgather-overlapped-shared": ("moe-shared", f"{MBS2} {EP2} {BESIDE}", 2),
    "ep2-halves": ("moe-deepseek", f"{MBS2} {EP2} {ALL} {HALVES}", 2),
    "ep2-halves-recompute": ("moe-shared", f"{MBS2} {EP2} {BESIDE} {HALVES} {FULL}", 2),
    "tp2-sp-ep2-halves": ("moe-shared", f"{TP2} {EP2} {ETP1} {HALVES} --tp-comm-overlap", 2),
    "etp2": ("moe-sgd", f"{MBS2} {ETP2}", 2),
    "etp2-alltoall": ("moe-shared", f"{MBS2} {ETP2} {ALL}", 2),
    "ep2-etp2": ("moe-sgd", f"{MBS2} {EP2} {ETP2}", 4),
    "ep2-etp2-alltoall": ("moe-biases", f"{MBS2} {EP2} {ETP2} {ALL}", 4),
    "ep2-etp2-dp8": ("moe-two-losses", f"--micro-batch-size 1 {EP2} {ETP2} {ALL}", 8),
    "ep2-switch": ("moe-switch", f"{MBS2} {EP2} {ALL}", 2),
    "ep2-forced": ("moe-forced", f"{MBS2} {EP2} {ALL}", 2),
    "ep2-global": ("moe-global", f"{MBS2} {EP2}", 2),
    "ep2-fp32": ("moe-plain", f"{MBS2} {EP2} {ALL}", 2, "fp32"),
    "ep2-bf16": ("moe-bf16", f"{MBS2} {EP2} {ALL}", 2, "bf16"),
}
TENSOR_AND_CONTEXT = {
    "tp2-sp-etp2": ("moe-shared", TP2, 2),
    "tp2-sp-etp1-ep2": ("moe-biases", f"{TP2} {EP2} {ETP1} {ALL}", 2),
    "tp2-sp-etp1-ep2-allgather": ("moe-deepseek", f"{TP2} {EP2} {ETP1}", 2),
    "tp2-sp-ep2-etp2-static": ("moe-biases", f"{TP2} {EP2} {STATIC}", 4),
    "tp2-sp-ep2-etp2": ("moe-biases", f"{TP2} {EP2} {ALL}", 4),
    "tp2-sp-ep2-etp2-allgather": ("moe-shared", f"{TP2} {EP2}", 4),
    "tp2-sp-etp1-ep4": ("moe-two-losses", f"{TP2} {EP4} {ETP1} {ALL}", 4),
    "tp2-sp-etp1-dp2": ("moe-sgd", f"{TP2} {ETP1}", 4),
    "tp2-sp-etp1-ep2-dp8": ("moe8", f"{TP2} --micro-batch-size 2 {EP2} {ETP1} {ALL}", 8),
    "tp4-sp-ep2-etp2": ("moe-sgd", f"--micro-batch-size 8 --tensor-model-parallel-size 4 {SP} {EP2} {ETP2} {ALL}", 4),
    "tp2-sp-overlapped-shared": ("moe-shared", f"{TP2} {EP2} {ETP1} {ALL} {BESIDE}", 2),
    "tp2-sp-global": ("moe-global", f"{TP2} {EP2} {ETP1}", 2),
    "tp2-sp-forced": ("moe-forced", f"{TP2} {EP2} {ETP1} {ALL}", 2),
    "tp2-sp-fp32": ("moe-plain", f"{TP2} {EP2} {ETP1}", 2, "fp32"),
    "tp2-sp-bf16": ("moe-bf16", TP2, 2, "bf16"),
    "cp2-ep2": ("moe-deepseek", f"{CP2} {EP2}", 2),
    "cp2-ep2-alltoall": ("moe-shared", f"{CP2} {EP2} {ALL}", 2),
    "cp2-ep2-batch-invariant": ("moe-shared", f"{CP2} {EP2} {ALL} --batch-invariant-mode", 2),
    "cp2-a2a-ep2": ("moe-sgd", f"{CP2} --cp-comm-type a2a {EP2} {ALL}", 2),
    "cp2-ep2-packed": ("moe-packed", f"{CP2} {EP2} {ALL}", 2),
    "cp2-ep4": ("moe-two-losses", f"{CP2} {EP4} {ALL}", 4),
    "cp2-tp2-sp-ep2": ("moe-shared", f"{CP2} --tensor-model-parallel-size 2 {SP} {EP2} {ALL}", 4),
    "cp2-forced": ("moe-forced", CP2, 2),
}
PIPELINE = {
    "pp2-ep2": ("moe-shared", f"{PP2} {EP2} {ALL}", 4),
    "pp2-experts": ("moe-deep", PP2, 2),
    "pp2-vpp-ep2": ("moe-deep-deepseek", f"{PP2} {VPP} {EP2} {ALL}", 4),
    "pp2-zero-bubble-ep2": ("moe-deep", f"{PP2} {ZB} {EP2}", 4),
    "pp2-tp2-sp-ep2": ("moe-deep", f"{PP2} --tensor-model-parallel-size 2 {SP} {EP2} {ETP1} {ALL}", 4),
    "pp2-global": ("moe-global", f"{PP2} {EP2} {ALL}", 4),
    "pp4-ep2": ("moe-deep-deepseek", f"--micro-batch-size 2 --pipeline-model-parallel-size 4 {EP2} {ALL}", 8),
    "pp2-cut-ep2": ("moe-deep", f"{PP2} {EP2} --pipeline-model-parallel-layout Eta|fttL", 4),
}
OPTIMIZER = {
    "ep2-zero": ("moe-sgd", f"{MBS2} {EP2} {GATHER}", 4),
    "ep2-zero-alltoall": ("moe-shared", f"{MBS2} {EP2} {ALL} {GATHER}", 4),
    "ep2-zero-instances": ("moe-deepseek", f"--micro-batch-size 1 {EP2} {ALL} {GATHER} {INSTANCES}", 8),
    "ep2-zero-same-instances": ("moe", f"{MBS2} {EP2} {ZERO} {INSTANCES}", 4),
    "ep4-zero": ("moe", f"{MBS2} {EP4} {ZERO}", 4),
    "etp2-zero": ("moe-biases", f"{MBS2} {ETP2} {GATHER}", 4),
    "tp2-sp-ep2-zero": ("moe-shared", f"{TP2} {EP2} {ETP1} {ALL} {GATHER}", 4),
    "cp2-ep2-zero": ("moe-two-losses", f"{CP2} {EP2} {GATHER}", 4),
    "pp2-ep2-zero": ("moe-deep", f"{PP2} {EP2} {ALL} {GATHER}", 4),
    "ep2-overlap": ("moe", f"{MBS2} {EP2} --overlap-grad-reduce --ddp-bucket-size 3000", 4),
    "ep2-fsdp": ("moe", f"{MBS2} {EP2} {FSDP}", 4),
    "fsdp-experts": ("moe-sgd", f"{MBS2} {FSDP}", 2),
    "tp2-sp-ep2-fsdp": ("moe-shared", f"{TP2} {EP2} {ETP1} {ALL} {FSDP}", 4),
}
RECOMPUTE = {
    "ep2-recompute": ("moe-shared", f"{MBS2} {EP2} {ALL} {FULL}", 2),
    "ep2-recompute-moe": ("moe-shared", f"{MBS2} {EP2} {ALL} {SELECTED} moe shared_experts", 2),
    "ep2-recompute-act": ("moe-sgd", f"{MBS2} {EP2} {SELECTED} moe_act layernorm", 2),
    "ep2-recompute-mlp": ("moe-deepseek", f"{MBS2} {EP2} {ALL} {SELECTED} core_attn mlp", 2),
    "ep2-recompute-overlapped-shared": (
        "moe-shared", f"{MBS2} {EP2} {ALL} {BESIDE} {SELECTED} moe shared_experts moe_act", 2,
    ),
    "tp2-sp-recompute-moe": ("moe-two-losses", f"{TP2} {EP2} {ETP1} {ALL} {SELECTED} moe", 2),
    "pp2-vpp-recompute": ("moe-deep", f"{PP2} {VPP} {EP2} {ALL} {FULL}", 4),
    "pp2-zero-bubble-recompute-moe": ("moe-deep", f"{PP2} {ZB} {EP2} {ALL} {SELECTED} moe_act shared_experts", 4),
    "sinkhorn-recompute": ("moe-sinkhorn", f"{EP2} {FULL}", 2),
    "capacity-recompute": ("moe-capacity", f"{EP2} {ALL} {SELECTED} moe", 2),
}  # fmt: skip
PER_MICRO_BATCH = {
    "tp2-sp-batch": ("moe-batch", f"--tensor-model-parallel-size 2 {SP}", 2),
    "cp2-batch": ("moe-batch-4", f"--context-parallel-size 2 {EP2} {ALL}", 2),
    "ep2-batch": ("moe-batch-4", f"{EP2} {ALL}", 2),
    "ep2-sinkhorn": ("moe-sinkhorn", f"{EP2} {ALL}", 2),
    "tp2-sp-sinkhorn": ("moe-sinkhorn", f"--tensor-model-parallel-size 2 {SP} {EP2} {ETP1}", 2),
    "tp2-sp-quantiles": ("moe-quantiles", f"--tensor-model-parallel-size 2 {SP} {EP2} {ETP1}", 2),
    "cp2-quantiles-recompute": ("moe-quantiles", f"--context-parallel-size 2 {EP2} {ALL} {FULL}", 4),
    "cp2-sinkhorn-1": ("moe-sinkhorn-1", f"--context-parallel-size 2 {EP2}", 4),
    "ep2-capacity": ("moe-capacity", f"{EP2} {ALL}", 2),
    "ep4-capacity": ("moe-capacity", EP4, 4),
    "pp2-ep2-capacity": ("moe-capacity-last", f"--pipeline-model-parallel-size 2 {EP2} {ALL}", 4),
    "ep2-zero-capacity-last": ("moe-capacity-last", f"{EP2} {GATHER}", 4),
    "ep2-padded": ("moe-padded", f"{EP2} {ALL}", 2),
    "ep2-padded-allgather": ("moe-padded", EP2, 2),
    "ep2-etp2-padded": ("moe-padded", f"{EP2} {ETP2} {ALL}", 4),
    "padded": ("moe-padded", "", 2),
    "tp2-sp-roomy": ("moe-roomy", f"{TP2} {EP2} {ETP1} {ALL}", 2),
    "cp2-roomy": ("moe-roomy", f"{CP2} {EP2}", 2),
}
EXPERT_ROWS = {
    **SPLIT_EXPERTS, **TENSOR_AND_CONTEXT, **PIPELINE, **OPTIMIZER, **RECOMPUTE, **PER_MICRO_BATCH,
}  # fmt: skip
