"""Rows of the matrix with optimizer state in host memory: every rule and sharding."""

OFFLOAD = "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d"
HALF = "--optimizer-cpu-offload --optimizer-offload-fraction 0.5"
SP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
GATHER = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 3000"
MBS2, MBS4 = "--micro-batch-size 2", "--micro-batch-size 4"
OFFLOAD_ROWS = {
    "offload-dp2": ("gpt2", f"{MBS2} {OFFLOAD}", 2),
    "offload-zero2-gather": ("untied", f"{MBS2} {GATHER} {OFFLOAD}", 2),
    "offload-sgd-half-zero2": ("sgd", f"{MBS2} --use-distributed-optimizer {HALF}", 2),
    "offload-zero2-pp2-tp2-sp": ("llama", f"{MBS2} {PP2} {SP2} {GATHER} {OFFLOAD}", 8),
    "offload-fsdp2": ("gpt2", f"{MBS2} --use-torch-fsdp2 {OFFLOAD}", 2),
    "offload-muon-tp2-sp-zero2": ("muon", f"{MBS4} {SP2} {GATHER} {HALF}", 4),
    "offload-muon-pp2": ("muon", f"{MBS2} {PP2} {OFFLOAD}", 2),
    "offload-bf16-zero2": ("bf16", f"{MBS2} {GATHER} {OFFLOAD}", 2, "bf16"),
}
