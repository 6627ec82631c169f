"""Rows of the matrix with mixtures of experts. The balancing losses of the models do not depend on the micro-batch
size, which the layouts change; ``aux_loss``, which does, is in rows whose micro-batch is the whole batch."""

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
EXPERT_MODELS = {
    "moe": f"{EXPERTS} {NO_DROPOUT} {BALANCED}",
    "moe-sgd": f"{EXPERTS} {NO_DROPOUT} {BALANCED} --optimizer sgd --lr 0.3 --clip-grad 0",
    "moe-shared": f"{EXPERTS} {SHARED} {DROPOUT} {BALANCED} --moe-input-jitter-eps 0.1",
    "moe-deepseek": f"{EXPERTS} {NO_DROPOUT} {DEEPSEEK} --moe-layer-freq ([0]+[1]*1)",
    "moe-biases": f"--num-experts 4 --moe-router-topk 3 --moe-router-pre-softmax {NO_DROPOUT} {BALANCED}",
    "moe-batch": f"{EXPERTS} {NO_DROPOUT} --moe-aux-loss-coeff 0.05",
    "moe-global": f"{EXPERTS} {NO_DROPOUT} --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.05",
}
EP2, ALL = "--expert-model-parallel-size 2", "--moe-token-dispatcher-type alltoall"
SP = "--sequence-parallel"
TP2 = f"--micro-batch-size 4 --tensor-model-parallel-size 2 {SP}"
CP2 = "--micro-batch-size 4 --context-parallel-size 2"
PP2 = "--micro-batch-size 2 --pipeline-model-parallel-size 2"
GATHER = "--use-distributed-optimizer --overlap-grad-reduce --ddp-bucket-size 3000 --overlap-param-gather"

EXPERT_ROWS = {
    "experts": ("moe", "--micro-batch-size 2", 1),
    "experts-dp2": ("moe-shared", "--micro-batch-size 2", 2),
    "ep2": ("moe", f"--micro-batch-size 2 {EP2}", 2),
    "ep2-alltoall": ("moe-sgd", f"--micro-batch-size 2 {EP2} {ALL}", 2),
    "ep4-alltoall": ("moe-shared", f"--micro-batch-size 2 --expert-model-parallel-size 4 {ALL}", 4),
    "ep2-dp4": ("moe-deepseek", f"--micro-batch-size 2 {EP2} {ALL}", 4),
    "ep2-zero": ("moe-sgd", f"--micro-batch-size 2 {EP2} {GATHER}", 4),
    "tp2-sp-etp2": ("moe-shared", TP2, 2),
    "tp2-sp-etp1-ep2": ("moe-biases", f"{TP2} {EP2} --expert-tensor-parallel-size 1 {ALL}", 2),
    "tp2-sp-ep2-etp2": ("moe-biases", f"{TP2} {EP2} {ALL}", 4),
    "cp2-ep2": ("moe-deepseek", f"{CP2} {EP2}", 2),
    "pp2-ep2": ("moe-shared", f"{PP2} {EP2} {ALL}", 4),
    "ep2-fsdp": ("moe", f"--micro-batch-size 2 {EP2} --use-torch-fsdp2", 4),
    "tp2-sp-batch": ("moe-batch", "--micro-batch-size 8 --tensor-model-parallel-size 2 --sequence-parallel", 2),
    "ep2-global": ("moe-global", f"--micro-batch-size 2 {EP2}", 2),
}  # fmt: skip
