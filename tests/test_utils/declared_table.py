"""Rows of the matrix that take every declared parameter through every rank axis, in few and small models.

Each model combines the maximum number of parameter kinds in one layer. Its rows cover tensor parallelism with and
without sequence parallelism, context and data parallelism, several micro-batches, ZeRO-1 and FSDP2; loss masks are
random, so that ranks and micro-batches count different numbers of tokens. Mixtures of experts run with every pair of
dense and expert tensor-parallel size of 1, 2 and 4. :func:`missing_axes` lists the axes that a set of rows does not
cover for a parameter of the models: a new parameter must be in a row of every axis.
"""

import functools
import re
from collections.abc import Iterable

from tests.test_utils.layouts import Layout, configure

DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
UNTIED = "--untie-embeddings-and-output-weights"
RMS = f"--normalization RMSNorm --swiglu --disable-bias-linear {UNTIED} --ffn-hidden-size 64"
LATENT = (
    "--multi-latent-attention --kv-lora-rank 20 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 10"
    " --position-embedding-type rope --qk-layernorm"
)
SINKS, MTP = "--softmax-type learnable", "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.5"
TWO_GROUPS = "--group-query-attention --num-query-groups 2"
EXPERTS = (
    "--num-experts 4 --moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate"
    " --moe-router-load-balancing-type seq_aux_loss global_aux_loss --moe-aux-loss-coeff 0.05 0.02"
    " --moe-z-loss-coeff 0.01 --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
)
ONE, T5_SIZES = "--num-layers 1", "--num-layers 1 --decoder-num-layers 1 --decoder-seq-length 16"
DECLARED_MODELS = {
    "full": f"{ONE} {DROPOUT} {TWO_GROUPS} --norm-placement sandwich --qk-layernorm {SINKS} {MTP}",
    "full-rms": f"{ONE} {RMS} {DROPOUT} --norm-placement post --qk-layernorm --qk-layernorm-across-heads",
    "full-latent": f"{ONE} {RMS} {DROPOUT} {LATENT} --q-lora-rank 12 {SINKS}",
    "full-latent-plain": f"{ONE} {RMS} {DROPOUT} {LATENT}",
    "full-latent-fused": f"{ONE} {RMS} {DROPOUT} {LATENT} --q-lora-rank 12 --mla-down-proj-fusion",
    "full-experts": f"{ONE} --hidden-dropout 0 --attention-dropout 0 {EXPERTS} --mtp-num-layers 1",
    "full-gated-experts": f"{ONE} {RMS} --hidden-dropout 0 --attention-dropout 0 {EXPERTS}",
    "full-batch-loss": (
        f"{ONE} {RMS} --hidden-dropout 0 --attention-dropout 0 --num-experts 4 --moe-ffn-hidden-size 24"
        " --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.05 --micro-batch-size 2"
    ),
    "full-parallel": (
        f"{ONE} {DROPOUT} {TWO_GROUPS} {UNTIED} --use-parallel-residual --share-parallel-norm --output-layer-bias"
        " --learned-position-offset 2"
    ),
    "bert-full": f"{ONE} {DROPOUT} {UNTIED} --qk-layernorm --norm-placement sandwich {SINKS}",
    "t5-full": f"{T5_SIZES} {DROPOUT} {UNTIED} --qk-layernorm --norm-placement sandwich --softmax-type off-by-one",
    "t5-full-relative": f"{T5_SIZES} {DROPOUT} --position-embedding-type relative",
}

SP, CP2 = "--sequence-parallel", "--context-parallel-size 2"
TP2, TP4 = "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 4"
ZERO = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 3000"
FSDP = "--use-torch-fsdp2"
_DENSE = {
    "tp4": f"--micro-batch-size 4 {TP4}",
    "tp4-sp": f"--micro-batch-size 4 {TP4} {SP}",
    "tp2-fsdp": f"--micro-batch-size 2 {TP2} {FSDP}",
    "tp2-sp-cp2-zero": f"--micro-batch-size 4 {TP2} {SP} {CP2} {ZERO}",
}
EP2, EP4 = "--expert-model-parallel-size 2", "--expert-model-parallel-size 4"
ETP1, ETP2, ETP4 = (f"--expert-tensor-parallel-size {size}" for size in (1, 2, 4))
ALL = "--moe-token-dispatcher-type alltoall"
_EXPERTS = {
    "cp2-ep2-zero": f"--micro-batch-size 2 {CP2} {EP2} {ALL} {ZERO}",
    "etp2-fsdp": f"--micro-batch-size 1 {ETP2} {FSDP}",
    "etp4": f"--micro-batch-size 1 {ETP4} {ALL}",
    "tp2-sp-cp2-etp1-ep4": f"--micro-batch-size 4 {TP2} {SP} {CP2} {ETP1} {EP4} {ALL}",
    "tp2-sp-ep2-zero": f"--micro-batch-size 2 {TP2} {SP} {EP2} {ZERO}",
    "tp2-sp-etp4": f"--micro-batch-size 2 {TP2} {SP} {ETP4} {ALL}",
    "tp4-sp-etp1-ep2": f"--micro-batch-size 4 {TP4} {SP} {ETP1} {EP2} {ALL}",
    "tp4-sp-etp2-ep2": f"--micro-batch-size 4 {TP4} {SP} {ETP2} {EP2}",
    "tp4-sp-etp4": f"--micro-batch-size 4 {TP4} {SP} {ALL}",
}
_BATCH_LOSS = {"tp2-sp-ep2": f"{TP2} {SP} {EP2} {ETP1} {ALL}", "cp2-etp2": f"{CP2} {ETP2}"}
_GATED_EXPERTS = ("etp2-fsdp", "tp2-sp-cp2-etp1-ep4", "tp2-sp-ep2-zero", "tp2-sp-etp4", "tp4-sp-etp2-ep2")
_LAYOUTS = {
    "full-experts": _EXPERTS, "full-batch-loss": _BATCH_LOSS,
    "full-gated-experts": {name: _EXPERTS[name] for name in _GATED_EXPERTS},
}  # fmt: skip
DECLARED_ROWS = {
    f"{model}-{name}": (model, layout, 4)
    for model in DECLARED_MODELS
    for name, layout in _LAYOUTS.get(model, _DENSE).items()
}


# ---- which axes a parameter or a loss has met

DENSE_AXES = frozenset({"tp2", "tp4", "tp2 sp", "tp4 sp", "cp", "dp", "micro-batches", "zero", "fsdp"})
EXPERT_AXES = frozenset({"tp2 sp", "tp4 sp", "cp", "dp", "micro-batches", "zero", "fsdp", "ep", "etp > tp", "etp < tp"})
"""Experts run with tensor parallelism only together with sequence parallelism."""
LOSS_AXES = frozenset({"tp2 sp", "cp", "dp", "micro-batches"})


@functools.cache
def resolve(row: Layout):
    """Return the resolved settings of a row."""
    return configure(row.argv, row.world_size, row.precision, row.family)


def axes_of(cfg, world_size: int) -> set[str]:
    """The axes that split a model of resolved settings, its sequences or its batch."""
    model = cfg.model
    tp, cp, ep = model.tensor_model_parallel_size, model.context_parallel_size, model.expert_model_parallel_size
    dp = world_size // (tp * cp * cfg.model.pipeline_model_parallel_size)
    etp = cfg.model.expert_tensor_parallel_size or tp
    result = {
        f"tp{tp}{' sp' if cfg.model.sequence_parallel else ''}": tp > 1, "cp": cp > 1, "dp": dp > 1,
        "micro-batches": cfg.training.global_batch_size > cfg.training.micro_batch_size * dp,
        "zero": cfg.distributed.use_distributed_optimizer,
        "fsdp": cfg.distributed.use_torch_fsdp2, "ep": ep > 1, "etp > tp": etp > tp, "etp < tp": etp < tp,
    }  # fmt: skip
    return {name for name, present in result.items() if present}


def parts_of(row: Layout, cfg, vocab_size: int) -> set[str]:
    """The parameters of a row's model, as ``family: name (how it is split)`` without layer numbers, and its losses."""

    result = set()
    for param in cfg.describe(vocab_size).params():
        name = re.sub(r"\.\d+\.", ".*.", param.name)
        result.add(f"{row.family}: {name} (split over {', '.join(param.mesh) or 'nothing'})")
    if cfg.model.mtp_num_layers:
        result.add("loss: multi-token prediction")
    if cfg.model.num_moe_experts:
        kinds = zip(cfg.model.moe_router_load_balancing_type, cfg.model.moe_aux_loss_coeff)
        result |= {f"loss: {kind}" for kind, value in kinds if value}
        result |= {"loss: router z-loss"} if cfg.model.moe_z_loss_coeff else set()
    return result


def missing_axes(models: Iterable[Layout], rows: Iterable[Layout], vocab_size: int) -> dict[str, list[str]]:
    """Parameters and losses of ``models`` -> the axes that no row of ``rows`` with them has; complete ones left out."""
    met: dict[str, set[str]] = {}
    needed: dict[str, frozenset[str]] = {}
    for row in models:
        cfg = resolve(row)
        for part in parts_of(row, cfg, vocab_size):
            if part.startswith("loss"):
                needed[part] = LOSS_AXES
            # parameters that dense models have too must also meet tensor parallelism without sequence parallelism
            elif needed.get(part) != DENSE_AXES:
                needed[part] = EXPERT_AXES if cfg.model.num_moe_experts else DENSE_AXES
    for row in rows:
        cfg = resolve(row)
        for part in parts_of(row, cfg, vocab_size):
            met.setdefault(part, set()).update(axes_of(cfg, row.world_size))
    return {
        part: sorted(axes - met.get(part, set())) for part, axes in sorted(needed.items())
        if axes - met.get(part, set())
    }  # fmt: skip
