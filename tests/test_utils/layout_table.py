"""The matrix of layouts: models (flags that change the numbers) and layouts (flags that must not).

The rows are the lines of ``layout_rows.tsv``; its layouts are words of :data:`AXES`, :data:`SIZES` and
:data:`LISTS`. Models of one feature have a module each.
"""

import re
from pathlib import Path

from tests.test_utils.declared_table import DECLARED_MODELS, DECLARED_ROWS
from tests.test_utils.expert_table import EXPERT_MODELS
from tests.test_utils.fp8_table import FP8_MODELS
from tests.test_utils.layouts import Layout
from tests.test_utils.masked_layouts import BERT_MODELS
from tests.test_utils.muon_table import MUON_MODELS
from tests.test_utils.t5_layouts import T5_MODELS
from tests.test_utils.varlen_table import VARLEN_MODELS

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
CP2 = "--micro-batch-size 4 --context-parallel-size 2"
CP4 = "--micro-batch-size 8 --context-parallel-size 4"
PP2 = "--micro-batch-size 2 --pipeline-model-parallel-size 2"
PP4 = "--micro-batch-size 2 --pipeline-model-parallel-size 4"
VPP = "--num-virtual-stages-per-pipeline-rank 2"
ZB = "--pipeline-schedule zero-bubble"
ZERO = "--use-distributed-optimizer"
GATHER = f"{ZERO} --overlap-grad-reduce --ddp-bucket-size 3000 --overlap-param-gather"

FSDP = "--use-torch-fsdp2"
CUT = "--pipeline-model-parallel-layout"

AXES = {
    "gather": "--use-distributed-optimizer --overlap-grad-reduce --ddp-bucket-size 3000 --overlap-param-gather",
    "overlap": "--overlap-grad-reduce --ddp-bucket-size 3000",
    "zero": "--use-distributed-optimizer",
    "fsdp": "--use-torch-fsdp2",
    "sp": "--sequence-parallel",
    "alltoall": "--moe-token-dispatcher-type alltoall",
    "dynamic": "--hybrid-context-parallel",
    "zb-h2": "--pipeline-schedule zero-bubble-h2",
    "zb": "--pipeline-schedule zero-bubble",
    "recompute-all": "--recompute-granularity full --recompute-num-layers 1 --recompute-method uniform",
    "recompute-full": "--recompute-granularity full",
    "recompute": "--recompute-granularity selective",
    "packed": "--use-packed-sequence",
    "halves": "--tp-comm-overlap",
    "invariant": "--batch-invariant-mode",
    "offload": "--optimizer-cpu-offload",
    "offload-overlap": "--overlap-cpu-optimizer-d2h-h2d",
    "offload-activations": "--fine-grained-activation-offloading --min-offloaded-tensor-size 1",
    "instances2": "--num-distributed-optimizer-instances 2",
}
"""Word of a layout -> its flags."""
SIZES = {
    "mb": "--micro-batch-size",
    "tp": "--tensor-model-parallel-size",
    "cp": "--context-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "vpp": "--num-virtual-stages-per-pipeline-rank",
    "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
    "limit": "--max-seqlen-per-dp-cp-rank",
    "chunks": "--cross-entropy-chunk-tokens",
}
"""Word before a number -> its flag."""
LISTS = {
    "comm": "--cp-comm-type",
    "stages": "--pipeline-model-parallel-layout",
    "modules": "--recompute-modules",
    "offloaded": "--offload-modules",
}
"""Word before a colon and values with commas -> its flag; other words are flags without dashes."""


def layout_flags(axes: str) -> str:
    """Return the flags of the words of a layout, such as ``mb4 tp2 sp comm:a2a``."""

    def flags(word):
        name, _, values = word.partition(":")
        size = re.fullmatch(rf"({'|'.join(SIZES)})(\d+)", word)
        if word in AXES or size:
            return AXES[word] if word in AXES else f"{SIZES[size[1]]} {size[2]}"
        return f"{LISTS.get(name, f'--{name}')} {values.replace(',', ' ')}".strip()

    return " ".join(map(flags, axes.split()))


def read_rows():
    """Return name -> (model, flags of the layout, ranks, precision) of the lines of ``layout_rows.tsv``."""
    path = Path(__file__).with_name("layout_rows.tsv")
    lines = (line.split("\t") for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    return {name: (model, layout_flags(axes), int(ranks), precision) for name, model, ranks, precision, axes in lines}


TABLE = {**read_rows(), **DECLARED_ROWS}
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
