"""The rows of the matrix: models (flags that change the numbers) and layouts (flags that must not)."""

from tests.test_utils.declared_table import DECLARED_MODELS, DECLARED_ROWS
from tests.test_utils.expert_table import EXPERT_MODELS, EXPERT_ROWS
from tests.test_utils.fp8_table import FP8_MODELS, FP8_ROWS
from tests.test_utils.layouts import Layout
from tests.test_utils.masked_layouts import BERT_MODELS, BERT_ROWS
from tests.test_utils.muon_table import MUON_MODELS, MUON_ROWS
from tests.test_utils.offload_table import OFFLOAD_ROWS
from tests.test_utils.t5_layouts import T5_MODELS, T5_ROWS
from tests.test_utils.varlen_table import VARLEN_MODELS, VARLEN_ROWS

DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
UNTIED = "--untie-embeddings-and-output-weights"
GROUPS = "--group-query-attention --num-query-groups"
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --ffn-hidden-size 64"
    f" {NO_DROPOUT} {UNTIED}"
)
YARN = (
    "--position-embedding-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 16"
    " --yarn-beta-fast 2 --yarn-beta-slow 0.2 --mscale 0.7"
)
LATENT = (
    "--multi-latent-attention --kv-lora-rank 20 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 10"
    " --position-embedding-type rope"
)
LATENT_YARN = (
    "--q-lora-rank 12 --qk-layernorm --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 16"
    " --yarn-beta-fast 2 --yarn-beta-slow 0.2 --mscale 0.7 --mscale-all-dim 0.5"
)
MODELS = {
    **EXPERT_MODELS,
    **BERT_MODELS,
    **T5_MODELS,
    **DECLARED_MODELS,
    **FP8_MODELS,
    **MUON_MODELS,
    **VARLEN_MODELS,
    "gpt2": DROPOUT,  # tied embeddings, learned positions, biases, Adam, clipped to 1
    "untied": f"{DROPOUT} {UNTIED} --clip-grad 0.1",
    "sgd": f"{DROPOUT} --optimizer sgd --lr 0.3 --clip-grad 0",
    "plain": f"{NO_DROPOUT} --optimizer sgd --lr 0.3",
    "llama": f"{LLAMA} {GROUPS} 2",
    "mqa": f"{LLAMA} {GROUPS} 1 --qk-layernorm",
    "llama-sgd": f"{LLAMA} {GROUPS} 2 --optimizer sgd --lr 0.3",
    "packed": f"{DROPOUT} --reset-position-ids --reset-attention-mask --apply-layernorm-1p",
    "window": f"{NO_DROPOUT} --position-embedding-type rope --squared-relu --window-size 8,0 --window-attn-skip-freq 2"
              " --no-rope-freq 2",
    "gpt-oss": (  # its dense parts, windows in every second layer
        f"{NO_DROPOUT} {UNTIED} {GROUPS} 2 {YARN} --no-yarn-correction-range-round-to-int --normalization RMSNorm"
        " --quick-geglu --activation-func-clamp-value 0.02 --glu-linear-offset 1 --window-size 8,0"
        " --window-attn-skip-freq 2 --softmax-type learnable"
    ),
    "off-by-one": f"{DROPOUT} --softmax-type off-by-one --reset-position-ids --reset-attention-mask",
    "mtp": f"{DROPOUT} --mtp-num-layers 2 --mtp-loss-scaling-factor 0.5",
    "mtp-untied": f"{LLAMA} {GROUPS} 2 --mtp-num-layers 1 --mtp-loss-scaling-factor 0.5 --optimizer sgd --lr 0.3",
    "mtp-packed": (
        f"{DROPOUT} {UNTIED} --mtp-num-layers 2 --mtp-loss-scaling-factor 0.5 --reset-position-ids"
        " --reset-attention-mask"
    ),
    "mtp-repeated": f"{DROPOUT} --mtp-num-layers 3 --mtp-use-repeated-layer --mtp-loss-scaling-factor 0.9",
    "layers4": f"{DROPOUT} --num-layers 4",
    "deep": f"{DROPOUT} --num-layers 7",
    "deep-untied": f"{DROPOUT} {UNTIED} --num-layers 6",
    "post-norm": f"{DROPOUT} --apply-residual-connection-post-layernorm",
    "yarn": f"{DROPOUT} {UNTIED} {YARN} --kv-channels 16 --qk-layernorm {GROUPS} 2 --decoupled-lr 3e-3",
    "partly-rotated": (
        f"{LLAMA} --kv-channels 12 --rotary-percent 0.5 --rotary-interleaved --qk-l2-norm {GROUPS} 2"
        " --apply-wd-to-qk-layernorm --rotary-base 500"
    ),
    "llama-3-scaling": (
        f"{LLAMA} --kv-channels 16 --use-rope-scaling --rope-scaling-factor 4 --rotary-base 300000 --qk-layernorm"
        f" {GROUPS} 2 --apply-wd-to-qk-layernorm --norm-epsilon 1e-2 --decoupled-lr 2e-3 --decoupled-min-lr 1e-3"
    ),
    "mla": f"{LLAMA} {LATENT} {LATENT_YARN}",
    "mla-dropout": f"{DROPOUT} {LATENT} --rope-type rope",  # queries without a rank, no norms of latents
    "mla-fused": f"{LLAMA} {LATENT} {LATENT_YARN} --mla-down-proj-fusion --optimizer sgd --lr 0.3",
    "mla-sinks": f"{LLAMA} {LATENT} {LATENT_YARN} --softmax-type learnable",
    "mla-experts": f"{LLAMA} {LATENT} {LATENT_YARN} --num-experts 4 --moe-ffn-hidden-size 24",
    "mla-packed": f"{LLAMA} {LATENT} {LATENT_YARN} --reset-position-ids --reset-attention-mask",
    "gemma-2": (
        f"{DROPOUT} --position-embedding-type rope --geglu --apply-layernorm-1p --norm-placement sandwich {GROUPS} 2"
        " --attn-logit-softcapping 0.05 --final-logit-softcapping 0.1 --softmax-scale 0.4 --apply-embedding-scaling"
        " --embedding-multiplier 0.7 --residual-multiplier 0.8 --logits-scaling 0.5"
        " --window-size 8,0 --window-attn-skip-freq 2"
    ),
    "gemma-3": (
        f"{NO_DROPOUT} --position-embedding-type rope --normalization RMSNorm --disable-bias-linear --qk-layernorm"
        f" --norm-placement sandwich --rotary-base 1000 --rotary-base-local 20 --window-size 8,0 {GROUPS} 2"
        " --window-attn-skip-freq 2 --rotary-seq-len-interpolation-factor 4"
    ),
    "olmo-2": f"{LLAMA} {GROUPS} 2 --norm-placement post --qk-layernorm --qk-layernorm-across-heads",
    "gpt-neox": f"{DROPOUT} {UNTIED} --position-embedding-type rope --rotary-percent 0.5 --use-parallel-residual",
    "bf16": f"{DROPOUT} --bf16 --position-embedding-type rope --adam-eps 1e-2",
    "fp16": f"{NO_DROPOUT} --fp16 --loss-scale 256 --swiglu {UNTIED} --decoupled-lr 1e-3 --adam-eps 1e-2",
}

SP = "--sequence-parallel"
TP2 = "--micro-batch-size 4 --tensor-model-parallel-size 2"
TP4 = "--micro-batch-size 8 --tensor-model-parallel-size 4"
CP2 = "--micro-batch-size 4 --context-parallel-size 2"
CP4 = "--micro-batch-size 8 --context-parallel-size 4"
PP2 = "--micro-batch-size 2 --pipeline-model-parallel-size 2"
PP4 = "--micro-batch-size 2 --pipeline-model-parallel-size 4"
VPP = "--num-virtual-stages-per-pipeline-rank 2"
ZB = "--pipeline-schedule zero-bubble"
ZERO = "--use-distributed-optimizer"
BUCKETS = "--ddp-bucket-size 3000"
OVERLAP = f"--overlap-grad-reduce {BUCKETS}"
GATHER = f"{ZERO} {OVERLAP} --overlap-param-gather"
AND_TP2 = "--tensor-model-parallel-size 2"
SP2 = f"{AND_TP2} {SP}"
PP2_OF_1 = "--micro-batch-size 1 --pipeline-model-parallel-size 2"
INVARIANT = "--batch-invariant-mode"
MODULES = "--recompute-granularity selective --recompute-modules"

# name: (model, layout, ranks[, precision])
DATA_PARALLEL = {
    "accumulation": ("gpt2", "--micro-batch-size 1", 1),
    "dp2": ("gpt2", "--micro-batch-size 2", 2),
    "dp2-overlap": ("gpt2", f"--micro-batch-size 2 {OVERLAP}", 2),
    "dp4-sgd": ("sgd", "--micro-batch-size 1", 4),
    "dp4-fp32": ("plain", "--micro-batch-size 2", 4, "fp32"),
    "dp2-llama": ("llama", "--micro-batch-size 4", 2),
    "dp2-packed": ("packed", "--micro-batch-size 2", 2),
    "dp8": ("gpt2", "--micro-batch-size 1", 8),
}
ZERO_ROWS = {
    "zero2": ("gpt2", f"--micro-batch-size 2 {ZERO}", 2),
    "zero2-overlap": ("gpt2", f"--micro-batch-size 2 {ZERO} {OVERLAP}", 2),
    "zero2-gather": ("untied", f"--micro-batch-size 2 {GATHER}", 2),
    "zero4-gather": ("gpt2", f"--micro-batch-size 1 {GATHER}", 4),
    "zero4-sgd": ("sgd", f"--micro-batch-size 2 {ZERO}", 4),
    "zero4-instances": ("gpt2", f"--micro-batch-size 2 {GATHER} --num-distributed-optimizer-instances 2", 4),
    "zero2-fp32": ("plain", f"--micro-batch-size 2 {GATHER}", 2, "fp32"),
    "zero2-buckets": ("llama", f"--micro-batch-size 2 {ZERO} --overlap-grad-reduce --ddp-num-buckets 3", 2),
    "zero2-tp2": ("gpt2", f"{TP2} {GATHER}", 4),
    "zero2-tp2-sp": ("llama", f"{TP2} {SP} {GATHER}", 4),
    "zero2-cp2": ("llama", f"{CP2} {GATHER}", 4),
    "zero1-cp2": ("gpt2", f"{CP2} {ZERO}", 2),
    "zero2-pp2": ("gpt2", f"{PP2} {ZERO}", 4),
    "zero2-pp2-gather": ("gpt2", f"{PP2} {GATHER}", 4),
    "zero2-pp2-vpp-gather": ("untied", f"{PP2} {VPP} {GATHER}", 4),
    "zero2-pp4-gather": ("gpt2", f"{PP4} {GATHER}", 8),
}
TENSOR_PARALLEL = {
    "tp2": ("gpt2", TP2, 2),
    "tp2-sp": ("gpt2", f"{TP2} {SP}", 2),
    "tp4": ("untied", TP4, 4),
    "tp4-sp": ("untied", f"{TP4} {SP}", 4),
    "tp2-sgd": ("sgd", TP2, 2),
    "tp2-sp-halves": ("gpt2", f"{TP2} {SP} --micro-batch-size 2 --tp-comm-overlap", 2),
    "tp2-sp-halves-gather": ("llama", f"{TP2} {SP} {GATHER} --micro-batch-size 2 --tp-comm-overlap", 4),
    "tp2-sp-pp2-halves": (
        "untied", f"{TP2} {SP} {PP2} --micro-batch-size 2 --tp-comm-overlap --pipeline-schedule zero-bubble", 4,
    ),
    "tp2-sp-sgd": ("sgd", f"{TP2} {SP}", 2),
    "tp2-llama": ("llama", TP2, 2),
    "batch-invariant-tp2-llama": ("llama", f"{TP2} {INVARIANT}", 2),
    "batch-invariant-pp2-zero-bubble-tp2-sp-llama": ("llama", f"{PP2} {ZB} {TP2} {SP} {INVARIANT}", 4),
    "tp2-sp-llama": ("llama", f"{TP2} {SP}", 2),
    "tp4-groups-below-ranks": ("llama", TP4, 4),
    "tp4-sp-groups-below-ranks": ("llama-sgd", f"{TP4} {SP}", 4),
    "tp2-mqa": ("mqa", TP2, 2),
    "tp4-sp-mqa": ("mqa", f"{TP4} {SP}", 4),
    "tp2-sp-packed": ("packed", f"{TP2} {SP}", 2),
    "tp2-window": ("window", TP2, 2),
    "tp2-fp32": ("plain", f"{TP2} {SP}", 2, "fp32"),
    "tp2-dp2": ("gpt2", f"{TP2} {OVERLAP}", 4),
    "tp2-sp-dp2": ("gpt2", f"{TP2} {SP} {OVERLAP}", 4),
    "tp2-sp-dp4": ("sgd", f"--micro-batch-size 1 {SP2}", 8),
}
CONTEXT_PARALLEL = {
    "cp2": ("gpt2", CP2, 2),
    "cp2-allgather": ("gpt2", f"{CP2} --cp-comm-type allgather", 2),
    "cp2-a2a": ("gpt2", f"{CP2} --cp-comm-type a2a", 2),
    "cp4": ("llama", CP4, 4),
    "cp4-allgather": ("sgd", f"{CP4} --cp-comm-type allgather", 4),
    "cp4-a2a": ("gpt2", f"{CP4} --cp-comm-type a2a", 4),
    "cp4-two-levels": ("gpt2", f"{CP4} --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2", 4),
    "cp4-per-layer": ("layers4", f"{CP4} --cp-comm-type p2p allgather a2a p2p", 4),
    "cp2-packed": ("packed", CP2, 2),
    "cp2-a2a-packed": ("packed", f"{CP2} --cp-comm-type a2a", 2),
    "cp2-mqa": ("mqa", CP2, 2),
    "cp2-window": ("window", f"{CP2} --cp-comm-type allgather", 2),
    "cp2-fp32": ("plain", CP2, 2, "fp32"),
    "cp2-dp2": ("gpt2", f"{CP2} {OVERLAP}", 4),
    "cp2-tp2": ("gpt2", f"{CP2} {AND_TP2}", 4),
    "cp2-tp2-sp": ("untied", f"{CP2} {SP2}", 4),
    "cp2-tp2-sp-llama": ("llama", f"{CP2} {SP2}", 4),
    "cp2-a2a-tp2-sp": ("gpt2", f"{CP2} {SP2} --cp-comm-type a2a", 4),
}  # fmt: skip
PIPELINE = {
    "pp2": ("gpt2", PP2, 2),
    "pp2-untied": ("untied", PP2, 2),
    "pp4": ("gpt2", PP4, 4),
    "pp4-untied": ("untied", PP4, 4),
    "pp4-sgd": ("sgd", PP4, 4),
    "pp2-llama": ("llama", PP2, 2),
    "pp2-packed": ("packed", PP2, 2),
    "pp2-vpp": ("gpt2", f"{PP2} {VPP}", 2),
    "pp2-vpp-packed": ("packed", f"{PP2} {VPP}", 2),
    "pp2-vpp-untied": ("untied", f"{PP2} {VPP}", 2),
    "pp2-vpp-serial": ("sgd", f"{PP2} {VPP} --no-overlap-p2p-communication", 2),
    "pp2-vpp-group": ("gpt2", f"{PP2_OF_1} {VPP} --microbatch-group-size-per-virtual-pipeline-stage 4", 2),
    "pp2-layers-per-stage": ("gpt2", f"{PP2} --num-layers-per-virtual-pipeline-stage 1", 2),
    "pp2-zero-bubble": ("gpt2", f"{PP2} {ZB}", 2),
    "pp4-zero-bubble": ("untied", f"{PP4} {ZB}", 4),
    "pp2-zero-bubble-h2": ("gpt2", f"{PP2_OF_1} {ZB}-h2", 2),
    "pp4-zero-bubble-h2": ("untied", f"--micro-batch-size 1 --pipeline-model-parallel-size 4 {ZB}-h2", 4),
    "pp2-delayed-weights": ("llama", f"{PP2} --delay-wgrad-compute", 2),
    "pp2-uneven": ("deep", PP2, 2),
    "pp4-uneven": ("deep", PP4, 4),
    "pp4-first-last": (
        "deep-untied", f"{PP4} --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1", 4,
    ),
    "pp2-account": (
        "deep-untied",
        f"{PP2} --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split", 2,
    ),
    "pp4-layout": ("deep", f"{PP4} --pipeline-model-parallel-layout Et|ttt|ttt|L", 4),
    "pp2-vpp-layout": ("deep", f"{PP2} --pipeline-model-parallel-layout Et|tt|ttt|tL", 2),
    "pp2-fp32": ("plain", PP2, 2, "fp32"),
    "pp2-dp2": ("gpt2", f"{PP2} {OVERLAP}", 4),
    "pp2-tp2": ("gpt2", f"{PP2} {AND_TP2}", 4),
    "pp2-tp2-sp": ("untied", f"{PP2} {SP2}", 4),
    "pp2-vpp-tp2-sp": ("gpt2", f"{PP2} {VPP} {SP2}", 4),
    "pp2-cp2": ("gpt2", f"{PP2} --context-parallel-size 2", 4),
    "pp2-tp2-sp-zero-bubble": ("gpt2", f"{PP2} {ZB} {SP2}", 4),
    "pp2-tp2-sp-cp2": ("llama", f"{PP2} {SP2} --context-parallel-size 2", 8),
    "pp2-tp2-sp-dp2": ("gpt2", f"{PP2} {VPP} {SP2} {GATHER}", 8),
}  # fmt: skip

FULL = "--recompute-granularity full --recompute-num-layers"
UNIFORM = f"{FULL} 1 --recompute-method uniform"
RECOMPUTE = {
    "recompute-uniform": ("gpt2", f"--micro-batch-size 2 {UNIFORM}", 1),
    "recompute-uniform-2-tp2-sp": ("gpt2", f"{TP2} {SP} {FULL} 2 --recompute-method uniform", 2),
    "recompute-block-tp2": ("untied", f"{TP2} {FULL} 2 --recompute-method block", 2),
    "recompute-distributed-tp2": ("gpt2", f"{TP2} {UNIFORM} --distribute-saved-activations", 2),
    "recompute-selective-tp2-sp": ("gpt2", f"{TP2} {SP} --recompute-granularity selective", 2),
    "recompute-modules": ("llama", f"{TP2} {SP} {MODULES} core_attn mlp layernorm", 2),
    "recompute-cp2": ("gpt2", f"{CP2} {UNIFORM}", 2),
    "recompute-pp2-vpp": ("gpt2", f"{PP2} {VPP} {UNIFORM}", 2),
    "recompute-pp2": ("untied", f"{PP2} {FULL} 1 --recompute-method block", 2),
    "recompute-pp2-zero-bubble": ("untied", f"{PP2} {ZB} {FULL} 1 --recompute-method block", 2),
    "recompute-mlp-zero-bubble-tp2": ("gpt2", f"{PP2} {ZB} {SP2} {MODULES} core_attn mlp layernorm", 4),
    "recompute-zero2-gather": ("gpt2", f"--micro-batch-size 2 {GATHER} --recompute-activations", 2),
}  # fmt: skip
FSDP = "--use-torch-fsdp2"
FULLY_SHARDED = {
    "fsdp2": ("gpt2", f"--micro-batch-size 2 {FSDP}", 2),
    "fsdp4-sgd": ("sgd", f"--micro-batch-size 1 {FSDP}", 4),
    "fsdp2-untied": ("untied", f"--micro-batch-size 4 {FSDP} --torch-fsdp2-no-reshard-after-forward", 2),
    "fsdp2-llama": ("llama", f"--micro-batch-size 2 {FSDP}", 2),
    "fsdp4-instances": ("gpt2", f"--micro-batch-size 2 {FSDP} --num-distributed-optimizer-instances 2", 4),
    "fsdp2-tp2": ("gpt2", f"{TP2} {FSDP}", 4),
    "fsdp2-tp2-sp": ("gpt2", f"{TP2} {SP} {FSDP}", 4),
    "fsdp2-cp2": ("gpt2", f"{CP2} {FSDP}", 2),
    "fsdp2-recompute": ("gpt2", f"--micro-batch-size 2 {FSDP} {UNIFORM}", 2),
    "fsdp2-fp32": ("plain", f"--micro-batch-size 2 {FSDP}", 2, "fp32"),
}

CHUNKS = "--cross-entropy-chunk-tokens 7"
LOSS_IN_CHUNKS = {
    "chunks-tp2-sp": ("llama", f"{TP2} {SP} {CHUNKS}", 2),
    "chunks-cp2": ("gpt2", f"{CP2} {CHUNKS}", 2),
    "chunks-pp2-zero-bubble": ("untied", f"{PP2} {ZB} {CHUNKS}", 2),
    "chunks-fsdp2": ("untied", f"--micro-batch-size 2 {FSDP} {CHUNKS}", 2),
}

CUT = "--pipeline-model-parallel-layout"
CUT_LAYERS = {
    "cut-pp2": ("gpt2", f"{PP2} {CUT} Eta|fttL", 2),
    "cut-pp2-untied": ("untied", f"{PP2} {CUT} Ettta|fL", 2),
    "cut-pp2-llama": ("llama", f"{PP2} {CUT} Ea|ftttL", 2),
    "cut-pp2-post-norm": ("post-norm", f"{PP2} {CUT} Etta|ftL", 2),
    "cut-pp4": ("gpt2", f"{PP4} {CUT} Eta|f|ta|fL", 4),
    "cut-pp4-zero-bubble": ("untied", f"{PP4} {ZB} {CUT} Ea|fta|fa|fL", 4),
    "cut-pp4-three-stages-of-one-layer": ("sgd", f"{PP4} {CUT} Ett|a|f|tL", 4),
    "cut-pp2-vpp": ("gpt2", f"{PP2} {CUT} Ea|fta|fa|fL", 2),
    "cut-pp2-vpp-zero-bubble": ("untied", f"{PP2} {ZB} {CUT} Ea|fa|fa|ftL", 2),
    "cut-pp2-tp2-sp": ("untied", f"{PP2} {SP2} {CUT} Eta|fttL", 4),
    "cut-pp2-tp2-sp-halves": ("gpt2", f"{PP2} {SP2} --tp-comm-overlap {CUT} Eta|fttL", 4),
    "cut-pp2-cp2": ("packed", f"{PP2} --context-parallel-size 2 {CUT} Eta|fttL", 4),
    "cut-pp2-zero2-gather": ("gpt2", f"{PP2} {GATHER} {CUT} Eta|fttL", 4),
    "cut-pp2-recompute-modules": ("gpt2", f"{PP2} {CUT} Eta|fttL {MODULES} core_attn mlp layernorm", 2),
    "cut-pp2-recompute-uniform": ("untied", f"{PP2} {CUT} Eta|fttL {FULL} 2 --recompute-method uniform", 2),
    "cut-pp2-recompute-block": ("gpt2", f"{PP2} {ZB} {CUT} Eta|fttL {FULL} 2 --recompute-method block", 2),
    "pp2-whole": ("deep", f"{PP2} --whole-layers-in-pipeline-split", 2),
}  # fmt: skip

SINKS = {
    "sinks-tp2-sp": ("gpt-oss", f"{TP2} {SP}", 2),
    "sinks-cp2": ("gpt-oss", f"{CP2} --cp-comm-type allgather", 2),
    "sinks-cp2-a2a": ("gpt-oss", f"{CP2} --cp-comm-type a2a", 2),
    "sinks-pp2-vpp-recompute": ("gpt-oss", f"{PP2} {VPP} {MODULES} core_attn", 2),
    "sinks-zero2-cp2": ("gpt-oss", f"{CP2} {GATHER}", 4),
    "off-by-one-cp2-packed": ("off-by-one", CP2, 2),
}  # fmt: skip
MTP = {
    "mtp-dp2-zero2": ("mtp", f"--micro-batch-size 2 {GATHER}", 2),
    "mtp-tp2": ("mtp", TP2, 2),
    "mtp-tp2-sp": ("mtp-untied", f"{TP2} {SP}", 2),
    "mtp-cp2": ("mtp", CP2, 2),
    "mtp-cp2-packed": ("mtp-packed", f"{CP2} --cp-comm-type allgather", 2),
    "mtp-pp2": ("mtp", PP2, 2),
    "mtp-pp2-untied": ("mtp-untied", PP2, 2),
    "mtp-pp2-packed-zero-bubble": ("mtp-packed", f"{PP2} {ZB}", 2),
    "mtp-pp2-zero-bubble-dp2": ("mtp", f"{PP2} {ZB} {OVERLAP}", 4),
    "mtp-pp2-vpp-zero2-gather": ("mtp", f"{PP2} {VPP} {GATHER}", 4),
    "mtp-pp4-layout": ("mtp", f"{PP4} {CUT} Et|tt|t|mmL", 4),
    "mtp-pp2-tp2-sp-cp2": ("mtp", f"{PP2} {SP2} --context-parallel-size 2", 8),
    "mtp-recompute-tp2-sp": ("mtp", f"{TP2} {SP} {UNIFORM}", 2),
    "mtp-fsdp2": ("mtp", f"--micro-batch-size 2 {FSDP}", 2),
    "mtp-chunks-pp2": ("mtp", f"{PP2} {CHUNKS}", 2),
    "mtp-repeated-pp2-zero-bubble-dp2": ("mtp-repeated", f"{PP2} {ZB} {OVERLAP}", 4),
    "mtp-repeated-recompute-zero2-tp2-sp": ("mtp-repeated", f"{TP2} {SP} {GATHER} {UNIFORM}", 4),
    "mtp-repeated-fsdp2": ("mtp-repeated", f"--micro-batch-size 2 {FSDP}", 2),
}
MORE_MODELS = {
    "yarn-tp2-sp": ("yarn", f"{TP2} {SP}", 2),
    "yarn-cp2": ("yarn", CP2, 2),
    "yarn-pp2": ("yarn", PP2, 2),
    "partly-rotated-tp2-sp-cp2": ("partly-rotated", f"{CP2} {SP2}", 4),
    "llama-3-scaling-tp2-sp-pp2": ("llama-3-scaling", f"{PP2} {SP2}", 4),
    "llama-3-scaling-cp2-zero1": ("llama-3-scaling", f"{CP2} {ZERO} --cp-comm-type a2a", 2),
    "bf16-tp2-sp": ("bf16", f"{TP2} {SP}", 2, "bf16"),
    "bf16-cp2-zero2": ("bf16", f"{CP2} {GATHER}", 4, "bf16"),
    "fp16-tp2-sp": ("fp16", f"{TP2} {SP}", 2, "fp16"),
    "fp16-pp2": ("fp16", PP2, 2, "fp16"),
}  # fmt: skip

FAMILIES = {
    "gemma-2-tp2-sp": ("gemma-2", f"{TP2} {SP}", 2),
    "gemma-2-cp2-chunks": ("gemma-2", f"{CP2} {CHUNKS}", 2),
    "gemma-2-pp2-cut-recompute": ("gemma-2", f"{PP2} {CUT} Eta|fttL {MODULES} core_attn mlp layernorm", 2),
    "gemma-2-pp2-tp2-sp-zero-bubble": ("gemma-2", f"{PP2} {ZB} {SP2}", 4),
    "gemma-3-tp2-sp-halves": ("gemma-3", f"{TP2} {SP} --micro-batch-size 2 --tp-comm-overlap", 2),
    "gemma-3-cp2-pp2": ("gemma-3", f"{PP2} --context-parallel-size 2", 4),
    "olmo-2-tp2-sp": ("olmo-2", f"{TP2} {SP}", 2),
    "olmo-2-cp2-tp2-zero": ("olmo-2", f"{CP2} {AND_TP2} {GATHER}", 4),
    "olmo-2-fsdp2-recompute": ("olmo-2", f"--micro-batch-size 2 {FSDP} {UNIFORM}", 2),
    "gpt-neox-tp2-sp-pp2-halves": ("gpt-neox", f"{TP2} {SP} {PP2} --micro-batch-size 2 --tp-comm-overlap", 4),
    "gpt-neox-cp2-recompute": ("gpt-neox", f"{CP2} {FULL} 1 --recompute-method block", 2),
}  # fmt: skip

LATENTS = {
    "mla-tp2": ("mla", TP2, 2),
    "mla-tp2-sp": ("mla", f"{TP2} {SP}", 2),
    "mla-tp4-sp-fused": ("mla-fused", f"{TP4} {SP}", 4),
    "mla-tp2-sp-dropout": ("mla-dropout", f"{TP2} {SP}", 2),
    "mla-tp2-sp-halves": ("mla", f"{TP2} {SP} --micro-batch-size 2 --tp-comm-overlap", 2),
    "mla-cp2": ("mla", CP2, 2),
    "mla-cp2-dropout": ("mla-dropout", CP2, 2),
    "mla-cp2-allgather": ("mla", f"{CP2} --cp-comm-type allgather", 2),
    "mla-cp2-a2a-packed": ("mla-packed", f"{CP2} --cp-comm-type a2a", 2),
    "mla-cp2-sinks": ("mla-sinks", CP2, 2),
    "mla-cp2-tp2-sp": ("mla-fused", f"{CP2} {SP2}", 4),
    "mla-ep2-halves": (
        "mla-experts", "--micro-batch-size 2 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
        " --overlap-moe-expert-parallel-comm", 2,
    ),
    "mla-pp2": ("mla", PP2, 2),
    "mla-pp2-tp2-sp-zero-bubble": ("mla", f"{PP2} {ZB} {SP2}", 4),
    "mla-zero2-gather": ("mla", f"--micro-batch-size 2 {GATHER}", 2),
    "mla-zero2-tp2": ("mla-dropout", f"{TP2} {GATHER}", 4),
    "mla-fsdp2": ("mla", f"--micro-batch-size 2 {FSDP}", 2),
    "mla-recompute-tp2-sp": ("mla", f"{TP2} {SP} {MODULES} core_attn mla_up_proj layernorm mlp_act", 2),
    "mla-batch-invariant-cp2-tp2-sp": ("mla", f"{CP2} {SP2} {INVARIANT}", 4),
    "mla-recompute-up-pp2-zero-bubble": ("mla-fused", f"{PP2} {ZB} {MODULES} mla_up_proj", 2),
}  # fmt: skip

TABLE = {
    **DATA_PARALLEL, **ZERO_ROWS, **TENSOR_PARALLEL, **CONTEXT_PARALLEL, **PIPELINE, **RECOMPUTE, **FULLY_SHARDED,
    **LOSS_IN_CHUNKS, **CUT_LAYERS, **SINKS, **MTP, **MORE_MODELS, **EXPERT_ROWS, **LATENTS,
    **FAMILIES, **BERT_ROWS, **T5_ROWS, **DECLARED_ROWS, **FP8_ROWS,
    **MUON_ROWS, **VARLEN_ROWS, **OFFLOAD_ROWS,
}  # fmt: skip


ENCODER_FAMILIES = ("bert", "t5")


def row(name):
    """A row by name. Two layers say as much about every layout as more do, but for pipelines."""
    model, layout, *rest = TABLE[name]
    flags, family = MODELS[model], model.partition("-")[0]
    if "--num-layers" not in flags:
        flags += f" --num-layers {4 if '--pipeline-model-parallel-size' in layout else 2}"
    return Layout(flags, layout, *rest, family=family if family in ENCODER_FAMILIES else "gpt")


THROUGH_COPY_ENGINES = [
    name for name in TABLE
    if any(part in row(name).layout for part in ("--tp-comm-overlap", "zero-bubble", "virtual-stages"))
    or name in ("tp2-sp", "tp4-sp", "tp2-sp-packed", "tp2-sp-dp2", "cp2-tp2-sp", "pp4-untied", "recompute-modules",
                "tp2-sp-etp1-ep2", "ep4-static-overlapped-shared", "ep2-padded")
]  # fmt: skip
"""Rows whose copy engines carry sequence-parallel collectives, MoE token dispatch or messages between stages."""
