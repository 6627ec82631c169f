"""Models of the matrix with mixtures of experts. The balancing losses of most models do not depend on the micro-batch
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
