"""Rows of the matrix with optimizer state or activations in host memory: every rule, sharding and schedule."""

OFFLOAD = "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d"
HALF = "--optimizer-cpu-offload --optimizer-offload-fraction 0.5"
SP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
GATHER = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 3000"
MBS2, MBS4 = "--micro-batch-size 2", "--micro-batch-size 4"
MODULES = "--fine-grained-activation-offloading --min-offloaded-tensor-size 1 --offload-modules"
ACTIVATIONS = f"{MODULES} attn_norm qkv_linear core_attn attn_proj mlp_norm"
RECOMPUTED = "--recompute-granularity selective --recompute-modules"
OFFLOAD_ROWS = {
    "offload-dp2": ("gpt2", f"{MBS2} {OFFLOAD}", 2),
    "offload-zero2-gather": ("untied", f"{MBS2} {GATHER} {OFFLOAD}", 2),
    "offload-sgd-half-zero2": ("sgd", f"{MBS2} --use-distributed-optimizer {HALF}", 2),
    "offload-zero2-pp2-tp2-sp": ("llama", f"{MBS2} {PP2} {SP2} {GATHER} {OFFLOAD}", 8),
    "offload-fsdp2": ("gpt2", f"{MBS2} --use-torch-fsdp2 {OFFLOAD}", 2),
    "offload-muon-tp2-sp-zero2": ("muon", f"{MBS4} {SP2} {GATHER} {HALF}", 4),
    "offload-muon-clip-zero2": ("muon-clip", f"{MBS2} {GATHER} {OFFLOAD}", 2),
    "offload-lion-zero2": ("lion", f"{MBS2} {GATHER} {HALF}", 2),
    "offload-muon-pp2": ("muon", f"{MBS2} {PP2} {OFFLOAD}", 2),
    "offload-bf16-zero2": ("bf16", f"{MBS2} {GATHER} {OFFLOAD}", 2, "bf16"),
    "offload-muon-fsdp8-more-ranks-than-rows": ("muon-heads", f"--micro-batch-size 1 --use-torch-fsdp2 {OFFLOAD}", 8),
    "activations-tp2-sp": ("llama", f"{MBS4} {SP2} {ACTIVATIONS}", 2),
    "activations-tp2-sp-halves": ("gpt2", f"{MBS2} {SP2} --tp-comm-overlap {ACTIVATIONS}", 2),
    "activations-cp2": ("packed", f"{MBS4} --context-parallel-size 2 {ACTIVATIONS}", 2),
    "activations-pp2-vpp": ("untied", f"{MBS2} {PP2} --num-virtual-stages-per-pipeline-rank 2 {ACTIVATIONS}", 2),
    "activations-pp2-zero-bubble": ("gpt2", f"{MBS2} {PP2} --pipeline-schedule zero-bubble {ACTIVATIONS}", 2),
    "activations-recompute-zero2": (
        "gpt2", f"{MBS2} {GATHER} {MODULES} attn_norm attn_proj {RECOMPUTED} core_attn mlp", 2,
    ),
    "activations-fsdp2": ("gpt2", f"{MBS2} --use-torch-fsdp2 {ACTIVATIONS} {OFFLOAD}", 2),
    "activations-mla-tp2-sp": ("mla", f"{MBS4} {SP2} {ACTIVATIONS}", 2),
    "activations-mla-experts-ep2": (
        "mla-experts", f"{MBS2} --expert-model-parallel-size 2 {ACTIVATIONS} expert_fc1 moe_act", 2,
    ),
    "activations-t5-tp2-pp2": ("t5", f"{MBS2} {PP2} --tensor-model-parallel-size 2 {ACTIVATIONS} {OFFLOAD}", 4),
    "activations-bert-post-norm": ("bert-post-norm", f"{MBS2} {ACTIVATIONS}", 2),
    "activations-fp8-tp2-sp": ("fp8-delayed", f"{SP2} {ACTIVATIONS}", 2),
    "activations-fp8-experts-ep2": (
        "fp8-wide-experts-delayed", f"--expert-model-parallel-size 2 {ACTIVATIONS} expert_fc1 moe_act", 2,
    ),
    "activations-mtp-pp2": ("mtp", f"{MBS2} {PP2} {ACTIVATIONS}", 2),
}  # fmt: skip
