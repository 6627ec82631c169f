"""The rows of the speed table, as data: what is trained on how many GPUs, and named changes to any row. Torch-free.

A row is measured as ``row`` or ``row+variant`` or ``row+variant+variant``; each is one fresh job of an entry script.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

LLAMA_8B = (
    "--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 "
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --rotary-base 500000 "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --bf16 --vocab-size 128256"
)
GPT_345M = (
    "--hidden-size 1024 --num-attention-heads 16 --attention-dropout 0 --hidden-dropout 0 --bf16 --vocab-size 50304"
)
BERT_BASE = (
    "--hidden-size 768 --num-attention-heads 12 --attention-dropout 0 --hidden-dropout 0 --bf16 --vocab-size 30522"
)
BERT_LARGE = (
    "--hidden-size 1024 --num-attention-heads 16 --attention-dropout 0 --hidden-dropout 0 --bf16 --vocab-size 30522"
)
T5_3B = (
    "--hidden-size 1024 --ffn-hidden-size 16384 --num-attention-heads 32 --kv-channels 128 --normalization RMSNorm "
    "--disable-bias-linear --relu --position-embedding-type relative --attention-dropout 0 --hidden-dropout 0 --bf16 "
    "--vocab-size 32128 --decoder-seq-length 128"
)
_EXPERTS = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --rotary-base 1000000 "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    "--moe-aux-loss-coeff 1e-2 --moe-token-dispatcher-type alltoall"
)
MIXTRAL_8X7B = (
    f"{_EXPERTS} --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --num-experts 8 --moe-router-topk 2 --bf16 --vocab-size 32000"
)
QWEN3_30B_A3B = (
    f"{_EXPERTS} --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --kv-channels 128 "
    "--group-query-attention --num-query-groups 4 --qk-layernorm --num-experts 128 --moe-router-topk 8 "
    "--moe-ffn-hidden-size 768 --bf16 --vocab-size 151936"
)
_LATENT_EXPERTS = (
    "--swiglu --normalization RMSNorm --norm-epsilon 1e-5 --disable-bias-linear --position-embedding-type rope "
    "--rotary-base 50000 --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    "--multi-latent-attention --qk-layernorm --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-topk-scaling-factor 2.446 --moe-router-dtype fp32 --moe-router-load-balancing-type seq_aux_loss "
    "--moe-aux-loss-coeff 1e-3 --moe-token-dispatcher-type alltoall"
)


def moonlight(layers: int) -> str:
    """Moonlight-16B-A3B in ``layers`` layers (published: 27), the first one dense."""
    return (
        f"{_LATENT_EXPERTS} --hidden-size 2048 --ffn-hidden-size 11264 --num-attention-heads 16 --kv-lora-rank 512 "
        "--qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --num-experts 64 --moe-router-topk 6 "
        "--moe-ffn-hidden-size 1408 --moe-shared-expert-intermediate-size 2816 "
        f"--moe-layer-freq [0]+[1]*{layers - 1} --bf16 --vocab-size 163840"
    )


_DELTA_NETS = "--experimental-attention-variant gated_delta_net --linear-attention-freq 4"
GATED_DELTA_NETS = (
    f"{LLAMA_8B} {_DELTA_NETS} --linear-num-key-heads 16 --linear-num-value-heads 32 --linear-key-head-dim 128 "
    "--linear-value-head-dim 128"
)
# a tower of 0.45 billion parameters; ten images of 256 tokens are 31 % of a row of 8192
IMAGES = "--vision-model-type qwen --images-per-row 10 --img-h 512 --img-w 512 --mrope-section 24 20 20"
TINY_IMAGES = (
    "--vision-model-type qwen --images-per-row 5 --img-h 16 --img-w 24 --mrope-section 2 1 1 --patch-dim 4 "
    "--vision-num-layers 2 --vision-hidden-size 48 --vision-num-attention-heads 4 --vision-ffn-hidden-size 80 "
    "--vision-num-positions 16 --init-method-std 0.1"
)
SMOKE_LAYERS, SMOKE_LENGTH, SMOKE_BATCH = 8, 96, 8  # unlike any width, so that their GEMMs differ
TINY_EXPERTS = (
    f"{_EXPERTS} --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 8 --num-experts 8 --vocab-size 500"
)
TINY_MOONLIGHT = (
    f"{_LATENT_EXPERTS} --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 8 --kv-lora-rank 16 "
    "--qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 --num-experts 8 --moe-ffn-hidden-size 32 "
    f"--moe-shared-expert-intermediate-size 64 --moe-layer-freq [0]+[1]*{SMOKE_LAYERS - 1} --vocab-size 500"
)
TINY_LLAMA = (
    "--hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 8 --group-query-attention --num-query-groups 4 "
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --vocab-size 500"
)
TINY_DELTA_NETS = (
    f"{TINY_LLAMA} {_DELTA_NETS} --linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 16 "
    "--linear-value-head-dim 16"
)
TINY_GPT = "--hidden-size 64 --num-attention-heads 4 --attention-dropout 0 --hidden-dropout 0 --vocab-size 500"
TINY_T5 = (
    "--hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --normalization RMSNorm --disable-bias-linear "
    "--relu --position-embedding-type relative --attention-dropout 0 --hidden-dropout 0 --vocab-size 500 "
    "--decoder-seq-length 48"
)
COMMON = (
    "--mock-data --tokenizer-type NullTokenizer --lr 1e-4 --lr-warmup-iters 2 --eval-iters 0 --log-interval 1 "
    "--log-throughput --num-workers 1 --manual-gc"
)
ZERO = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
PRECISION_AWARE = (
    "--use-distributed-optimizer --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 "
    "--adam-beta2 0.95"
)
TP4 = "--tensor-model-parallel-size 4 --sequence-parallel"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
RECOMPUTED_MLP = "--recompute-granularity selective --recompute-modules layernorm mlp"
PP4 = "--pipeline-model-parallel-size 4"
FSDP = "--use-torch-fsdp2"


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    gpus: int
    layers: int
    length: int
    """Tokens per sequence."""
    batch: int
    """Sequences per step."""
    flags: str = ""
    micro_batch: int = 1
    iters: int = 9
    """Warm-up, measured and, at the end, profiled iterations."""
    shape: str = LLAMA_8B
    tiny: str = TINY_LLAMA
    """In place of ``shape`` in a smoke run."""
    family: str = "gpt"
    """Model family of the entry script ``pretrain_FAMILY.py``."""
    seconds: int = 90
    """Expected seconds of one job on H200s, with start and trace."""


ROWS: dict[str, Row] = {
    "one": Row(1, 16, 8192, 8, seconds=75),
    "one-s4096": Row(1, 16, 4096, 16, micro_batch=2, seconds=75),
    # all of LLaMA-3-8B: 12 bytes per parameter
    "one-8b": Row(1, 32, 8192, 8, PRECISION_AWARE, iters=8, seconds=100),
    # of its short steps not every one is logged
    "gpt-345m": Row(
        1, 24, 1024, 32, "--log-interval 4", micro_batch=8, iters=26, shape=GPT_345M, tiny=TINY_GPT, seconds=45
    ),
    "dp4": Row(4, 32, 8192, 32, ZERO, iters=8, seconds=130),
    "dp4-no-overlap": Row(4, 32, 8192, 32, "--use-distributed-optimizer", iters=8, seconds=130),
    "tp4-sp": Row(4, 32, 8192, 32, TP4, iters=8, seconds=130),
    "tp4-sp-overlap": Row(4, 32, 8192, 32, f"{TP4} --tp-comm-overlap", micro_batch=2, iters=8, seconds=130),
    "pp4": Row(4, 32, 8192, 32, PP4, iters=8, seconds=130),
    "pp4-vpp": Row(4, 32, 8192, 32, f"{PP4} --num-layers-per-virtual-pipeline-stage 2", iters=8, seconds=130),
    "pp4-zero-bubble": Row(4, 32, 8192, 32, f"{PP4} --pipeline-schedule zero-bubble", iters=8, seconds=130),
    "pp4-zero-bubble-h2": Row(4, 32, 8192, 32, f"{PP4} --pipeline-schedule zero-bubble-h2", iters=8, seconds=130),
    "cp4-s32768": Row(4, 32, 32768, 8, f"--context-parallel-size 4 {ZERO}", iters=7, seconds=150),
    # the activations of 32 layers of 32768 tokens per GPU do not fit: everything except attention is recomputed
    "cp4-s131072": Row(
        4, 32, 131072, 1, f"--context-parallel-size 4 --cp-comm-type a2a {RECOMPUTED_MLP} {ZERO}", iters=7, seconds=180
    ),
    "dp2": Row(2, 16, 8192, 16, ZERO, iters=8, seconds=75),
    "tp2-sp-overlap": Row(
        2, 16, 8192, 16, "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap", micro_batch=2,
        iters=8, seconds=75,
    ),
    "pp2-zero-bubble": Row(
        2, 16, 8192, 16, "--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble", iters=8, seconds=75
    ),
    "cp2-s32768": Row(2, 16, 32768, 4, f"--context-parallel-size 2 {ZERO}", iters=8, seconds=90),
    "tp2-pp2": Row(
        4, 32, 8192, 32, "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2",
        iters=8, seconds=130,
    ),
    "dp2-tp2": Row(
        4, 32, 8192, 32, f"--tensor-model-parallel-size 2 --sequence-parallel {ZERO}", iters=8, seconds=130
    ),
    "mixtral": Row(1, 3, 8192, 8, shape=MIXTRAL_8X7B, tiny=TINY_EXPERTS, seconds=75),
    "qwen3-moe": Row(1, 6, 4096, 16, micro_batch=2, shape=QWEN3_30B_A3B, tiny=TINY_EXPERTS, seconds=75),
    "mixtral-ep2": Row(
        2, 3, 8192, 16, f"{ZERO} --expert-model-parallel-size 2", shape=MIXTRAL_8X7B, tiny=TINY_EXPERTS, seconds=90
    ),
    "qwen3-moe-ep2": Row(
        2, 6, 4096, 32, f"{ZERO} --expert-model-parallel-size 2", micro_batch=2, shape=QWEN3_30B_A3B,
        tiny=TINY_EXPERTS, seconds=90,
    ),
    # for CUDA graphs, which contain no reductions of gradients; every fourth of short steps is logged
    "mixtral-ep2-no-overlap": Row(
        2, 3, 8192, 16, "--use-distributed-optimizer --expert-model-parallel-size 2", shape=MIXTRAL_8X7B,
        tiny=TINY_EXPERTS, seconds=90,
    ),
    "qwen3-moe-ep2-no-overlap": Row(
        2, 6, 4096, 32, "--use-distributed-optimizer --expert-model-parallel-size 2 --log-interval 4", micro_batch=2,
        iters=18, shape=QWEN3_30B_A3B, tiny=TINY_EXPERTS, seconds=90,
    ),
    "mixtral-ep4": Row(
        4, 8, 8192, 32, f"{ZERO} --expert-model-parallel-size 4", iters=8, shape=MIXTRAL_8X7B, tiny=TINY_EXPERTS,
        seconds=90,
    ),
    "qwen3-moe-ep4-no-overlap": Row(
        4, 16, 4096, 64, "--use-distributed-optimizer --expert-model-parallel-size 4", micro_batch=2, iters=8,
        shape=QWEN3_30B_A3B, tiny=TINY_EXPERTS, seconds=90,
    ),
    "qwen3-moe-ep4": Row(
        4, 16, 4096, 64, f"{ZERO} --expert-model-parallel-size 4", micro_batch=2, iters=8, shape=QWEN3_30B_A3B,
        tiny=TINY_EXPERTS, seconds=90,
    ),
    # half of the layers: all 32 need 172 GB
    "mixtral-ep8": Row(
        8, 16, 8192, 64, f"{ZERO} --expert-model-parallel-size 8", iters=8, shape=MIXTRAL_8X7B, tiny=TINY_EXPERTS,
        seconds=120,
    ),
    # the full model
    "qwen3-moe-ep8": Row(
        8, 48, 4096, 128, f"{ZERO} --expert-model-parallel-size 8", iters=8, shape=QWEN3_30B_A3B, tiny=TINY_EXPERTS,
        seconds=150,
    ),
    "moonlight": Row(1, 7, 4096, 16, micro_batch=2, shape=moonlight(7), tiny=TINY_MOONLIGHT, seconds=75),
    "moonlight-ep2": Row(
        2, 7, 4096, 32, f"{ZERO} --expert-model-parallel-size 2", micro_batch=2, shape=moonlight(7),
        tiny=TINY_MOONLIGHT, seconds=90,
    ),
    "moonlight-ep2-no-overlap": Row(
        2, 7, 4096, 32, "--use-distributed-optimizer --expert-model-parallel-size 2 --log-interval 4", micro_batch=2,
        iters=18, shape=moonlight(7), tiny=TINY_MOONLIGHT, seconds=90,
    ),
    # the full model
    "moonlight-ep4": Row(
        4, 27, 4096, 64, f"{ZERO} --expert-model-parallel-size 4", micro_batch=2, iters=8, shape=moonlight(27),
        tiny=TINY_MOONLIGHT, seconds=120,
    ),
    "moonlight-ep8": Row(
        8, 27, 4096, 128, f"{ZERO} --expert-model-parallel-size 8", micro_batch=2, iters=8, shape=moonlight(27),
        tiny=TINY_MOONLIGHT, seconds=120,
    ),
    # a tenth of the samples is short, as in the data sets; FLOPs count all places of a row
    "bert-large": Row(
        1, 24, 512, 256, "--log-interval 4 --num-workers 4", micro_batch=64, iters=26, shape=BERT_LARGE, tiny=TINY_GPT,
        family="bert", seconds=50,
    ),
    # as BERT's first phase trains: the host launches more slowly than a GPU computes such micro-batches
    "bert-base": Row(
        1, 12, 128, 256, "--log-interval 4 --num-workers 4", micro_batch=16, iters=26, shape=BERT_BASE, tiny=TINY_GPT,
        family="bert", seconds=45,
    ),
    "t5-3b": Row(
        1, 24, 512, 128, micro_batch=32, iters=10, shape=T5_3B, tiny=TINY_T5, family="t5", seconds=75
    ),
    # three of four layers are gated delta nets, next to the same depths of attention: "one" and the dense rows
    "gdn": Row(1, 16, 8192, 8, shape=GATED_DELTA_NETS, tiny=TINY_DELTA_NETS, seconds=90),
    "gdn-s32768": Row(1, 8, 32768, 2, shape=GATED_DELTA_NETS, tiny=TINY_DELTA_NETS, seconds=90),
    "gdn-s131072": Row(1, 4, 131072, 1, RECOMPUTED, shape=GATED_DELTA_NETS, tiny=TINY_DELTA_NETS, seconds=90),
    # one sequence on two ranks, next to one on each
    "gdn-cp2-s131072": Row(
        2, 4, 131072, 1, f"{RECOMPUTED} {ZERO} --context-parallel-size 2", shape=GATED_DELTA_NETS, tiny=TINY_DELTA_NETS,
        seconds=90,
    ),
    "gdn-dp2-s131072": Row(
        2, 4, 131072, 2, f"{RECOMPUTED} {ZERO}", shape=GATED_DELTA_NETS, tiny=TINY_DELTA_NETS, seconds=90
    ),
    "dense-s32768": Row(1, 8, 32768, 2, seconds=90),
    "dense-s131072": Row(1, 4, 131072, 1, RECOMPUTED, seconds=90),
    # the language model and the tokens of "one"
    "one-images": Row(
        1, 16, 8192, 8, "--num-workers 2", shape=f"{LLAMA_8B} {IMAGES}", tiny=f"{TINY_LLAMA} {TINY_IMAGES}",
        family="vlm", seconds=90,
    ),
    "dp8": Row(8, 32, 8192, 64, ZERO, iters=8, seconds=130),
    "fsdp2-dp2": Row(2, 16, 8192, 16, FSDP, iters=8, seconds=75),
    "fsdp2-dp4": Row(4, 32, 8192, 32, FSDP, iters=8, seconds=130),
    "fsdp2-dp8": Row(8, 32, 8192, 64, FSDP, iters=8, seconds=130),
    "dp2-pp2": Row(4, 32, 8192, 32, f"--pipeline-model-parallel-size 2 {ZERO}", iters=8, seconds=130),
}  # fmt: skip

VARIANTS: dict[str, str] = {
    "no-fusions": (
        "--no-bias-swiglu-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion "
        "--no-masked-softmax-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm"
    ),
    "no-wgrad-fusion": "--no-gradient-accumulation-fusion",
    "ce-chunks": "--cross-entropy-chunk-tokens 0",
    "recompute-norms": "--recompute-granularity selective --recompute-modules layernorm",
    "recompute-act": "--recompute-granularity selective --recompute-modules layernorm mlp_act",
    "recompute-attention": "--recompute-granularity selective --recompute-modules core_attn",
    "recompute-mlp": RECOMPUTED_MLP,
    "recompute-full": RECOMPUTED,
    "precision-aware": PRECISION_AWARE,
    "optimizer-offload": "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d",
    "offload-45": "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --optimizer-offload-fraction 0.45",
    "activation-offload": (
        "--fine-grained-activation-offloading --offload-modules attn_norm qkv_linear core_attn attn_proj mlp_norm"
    ),
    "muon": "--optimizer muon --muon-extra-scale-factor 0.2",
    "te": "--transformer-impl transformer_engine",
    "fp8-tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise",
    "fp8-param-gather": "--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather --use-distributed-optimizer",
    "fp8-delayed": ("--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 16 --fp8-amax-compute-algo max"),
    "fp8-delayed-param-gather": (
        "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 16 --fp8-amax-compute-algo max "
        "--fp8-param-gather --use-distributed-optimizer"
    ),
    "fp8-blockwise": "--fp8-format e4m3 --fp8-recipe blockwise",
    "flash": "--attention-backend flash",
    "cudnn": "--attention-backend fused",
    "a2a": "--cp-comm-type a2a",
    "allgather": "--cp-comm-type allgather",
    "nccl": "--no-copy-engines",
    "gather-tokens": "--moe-token-dispatcher-type allgather",
    "halves": "--overlap-moe-expert-parallel-comm --moe-router-load-balancing-type seq_aux_loss",
    "static-rows": "--moe-token-dispatcher-type allgather --moe-static-rows",
    "forced-balance": "--moe-router-force-load-balancing",
    "packed": "--use-packed-sequence",
    "learned": "--position-embedding-type learned_absolute",
    "cuda-graph": "--cuda-graph-impl local --cuda-graph-warmup-steps 1",
    "dropout": "--attention-dropout 0.1 --hidden-dropout 0.1",
    "deterministic": "--deterministic-mode",
    "batch-invariant": "--batch-invariant-mode",
    "two-sequences": "--micro-batch-size 2",
    "four-sequences": "--micro-batch-size 4",
    "timers": "--timing-log-level 2",
}


def base_row(stored: str) -> str:
    """Return the row of a stored result, without additions to its name."""
    return re.split(r"[+ ]", stored)[0]


def split_name(name: str) -> tuple[Row, list[str]]:
    """``dp4+te`` -> (the row, its variants); ``ValueError`` names what does not exist and what does."""
    row, *variants = name.split("+")
    if row not in ROWS:
        raise ValueError(f"no row {row!r}; there are {', '.join(ROWS)}")
    for variant in variants:
        if variant not in VARIANTS:
            raise ValueError(f"no variant {variant!r}; there are {', '.join(VARIANTS)}")
    return ROWS[row], variants


def row_flags(name: str, *, extra: Sequence[str] = (), smoke: bool = False) -> list[str]:
    """The flags of the entry script for a row and its variants; ``extra`` ones come last and so win."""
    row, variants = split_name(name)
    shape, depth, length, batch = row.shape, row.layers, row.length, row.batch
    if smoke:
        shape, depth, length, batch = row.tiny, SMOKE_LAYERS, SMOKE_LENGTH, SMOKE_BATCH
    micro_batch = min(row.micro_batch, batch // row.gpus) if smoke else row.micro_batch
    words = [*shape.split(), *COMMON.split(), *row.flags.split()]
    words += ["--num-layers", str(depth), "--seq-length", str(length), "--max-position-embeddings", str(length)]
    words += ["--micro-batch-size", str(micro_batch), "--global-batch-size", str(batch)]
    for variant in variants:
        words += shlex.split(VARIANTS[variant])
    return [*words, *extra]
