"""The rows of the matrix that the test suite runs; ``tests/torture/layouts.py`` runs all.

:data:`IN_THE_SUITE` is a pairwise covering subset of the table. The argument: a fault of a layout appears where the
code of one axis runs (a wrong group, a missing sum), or where two axes meet (a buffer of one in the order of the
other), on a parameter or loss that they concern. Of everything that any row of the table has, the rows therefore have

- every pair of layout axes: flags of the layout with their values, data parallelism, several micro-batches;
- every pair of a kind of model (:data:`KINDS`, family, precision) and a main axis (:data:`MAIN_AXES`);
- every flag of a model; their pairs are the subject of ``tests/reference``, not of layouts;
- every declared parameter and loss on every axis that it needs (:func:`declared_table.missing_axes`).

``test_layouts.py`` checks all four, and that rows of the subset detect each planted bug. Three axes at once, and the
same pair with another model, are left to the complete table.
"""

import re
from collections.abc import Iterable
from itertools import combinations, product

from tests.test_utils.declared_table import axes_of, resolve
from tests.test_utils.layouts import Layout

KINDS = (
    "--num-experts", "--multi-latent", "--mtp-num", "--fp8-format", "muon", "--optimizer sgd", "lion", "varlen",
    "--qk-clip", "--reset-position-ids", "--group-query", "--untie", "--window-size", "--softmax-type",
    "--norm-placement", "--use-parallel-residual", "--moe-expert-capacity", "sinkhorn", "--moe-shared", "dropout 0.1",
)  # fmt: skip
"""Parts of a model's flags that change which collectives, buffers or random numbers it needs."""
MAIN_AXES = (
    "--tensor-model-parallel", "--sequence-parallel", "--context-parallel-size", "--pipeline-model-parallel-size",
    "--num-virtual-stages", "--pipeline-schedule", "--use-distributed-optimizer", "--use-torch-fsdp2",
    "--expert-model-parallel", "--recompute-granularity", "--hybrid-context-parallel",
)  # fmt: skip
SIZES = re.compile(r"--(micro-batch-size|ddp-bucket-size|max-seqlen-per-dp-cp-rank)\b")
LISTS = re.compile(r"(--(?:pipeline-model-parallel-layout|recompute-modules|offload-modules|\S*num-layers)) .*")


def layout_axes(row: Layout) -> set[str]:
    """Return the flags of the row's layout with their values (but without sizes and lists), and its batch axes."""
    flags = [flag.strip() for flag in re.findall(r"--\S+(?: (?!--)\S+)*", row.layout) if not SIZES.match(flag)]
    return {LISTS.sub(r"\1", flag) for flag in flags} | axes_of(resolve(row), row.world_size) & {"dp", "micro-batches"}


def model_flags(row: Layout) -> set[str]:
    """Return the flags of the row's model, with their values except numbers."""
    return set(re.findall(r"--\S+(?: (?!--|[\d.e-]+(?: |$))\S+)*", row.model))


def pairs_of(row: Layout) -> set[tuple[str, ...]]:
    """Return the pairs of axes, pairs of a model kind and a main axis, and flags of the model that ``row`` tests."""
    axes = layout_axes(row)
    kinds = {kind for kind in KINDS if kind in row.model} | {row.family, row.precision}
    main = [axis for axis in MAIN_AXES if axis in row.layout]
    pairs = {(axis,) for axis in axes | model_flags(row)}
    return pairs | set(combinations(sorted(axes), 2)) | set(product(kinds, main))


ENGINES = ("--tp-comm-overlap", "--moe-token-dispatcher-type", "--overlap-moe")


def engine_pairs(row: Layout) -> set[tuple[str, ...]]:
    """Return the main axes of ``row`` and the flags that choose what copy engines carry, and their pairs."""
    axes = [axis for axis in (*MAIN_AXES, *ENGINES) if axis in row.layout]
    return {(axis,) for axis in axes} | set(combinations(axes, 2))


def missing_pairs(table: Iterable[Layout], rows: Iterable[Layout]) -> list[tuple[str, ...]]:
    """Return the pairs of ``table`` that no row of ``rows`` tests, sorted."""
    return sorted(set().union(*map(pairs_of, table)) - set().union(*map(pairs_of, rows)))


IN_THE_SUITE = {
    "accumulation", "dp2", "dp2-overlap", "dp4-fp32", "zero2-gather", "zero2-fp32", "zero2-buckets",
    "zero2-pp2-gather", "zero2-pp4-gather", "tp2", "tp2-sp", "tp2-sp-halves-gather", "tp2-sp-pp2-halves", "tp2-sp-sgd",
    "batch-invariant-pp2-zero-bubble-tp2-sp-llama", "tp4-sp-mqa", "tp2-sp-packed", "tp2-fp32", "cp2", "cp4-a2a",
    "cp4-per-layer", "cp2-window", "cp2-fp32", "cp2-a2a-tp2-sp", "pp2", "pp2-untied", "pp2-vpp-packed",
    "pp2-vpp-serial", "pp2-vpp-group", "pp2-layers-per-stage", "pp2-zero-bubble-h2", "pp2-delayed-weights",
    "pp4-first-last", "pp2-account", "pp2-fp32", "recompute-block-tp2", "recompute-distributed-tp2", "recompute-cp2",
    "recompute-zero2-gather", "fsdp2-untied", "fsdp4-instances", "fsdp2-cp2", "fsdp2-recompute", "fsdp2-fp32",
    "chunks-tp2-sp", "chunks-cp2", "chunks-pp2-zero-bubble", "chunks-fsdp2", "cut-pp4-zero-bubble",
    "cut-pp2-tp2-sp-halves", "cut-pp2-cp2", "cut-pp2-zero2-gather", "cut-pp2-recompute-uniform",
    "cut-pp2-recompute-block", "pp2-whole", "sinks-pp2-vpp-recompute", "mtp-pp2-packed-zero-bubble",
    "mtp-pp2-vpp-zero2-gather", "mtp-repeated-pp2-zero-bubble-dp2", "mtp-repeated-recompute-zero2-tp2-sp",
    "partly-rotated-tp2-sp-cp2", "llama-3-scaling-cp2-zero1", "bf16-tp2-sp", "bf16-cp2-zero2", "fp16-tp2-sp",
    "fp16-pp2", "ep2-alltoall", "ep2-one-by-one", "ep4-static-overlapped-shared", "ep8-alltoall", "ep2-halves",
    "ep2-halves-recompute", "tp2-sp-ep2-halves", "ep2-etp2-dp8", "ep2-global", "ep2-fp32", "ep2-bf16",
    "tp2-sp-ep2-etp2-static", "tp2-sp-ep2-etp2", "tp2-sp-overlapped-shared", "cp2-ep2-batch-invariant", "cp2-a2a-ep2",
    "cp2-ep2-packed", "cp2-tp2-sp-ep2", "pp2-tp2-sp-ep2", "pp4-ep2", "pp2-cut-ep2", "ep2-zero-instances", "ep4-zero",
    "tp2-sp-ep2-fsdp", "ep2-recompute-overlapped-shared", "tp2-sp-recompute-moe", "pp2-vpp-recompute",
    "pp2-zero-bubble-recompute-moe", "sinkhorn-recompute", "capacity-recompute", "tp2-sp-sinkhorn", "tp2-sp-quantiles",
    "cp2-sinkhorn-1", "pp2-ep2-capacity", "ep2-zero-capacity-last", "tp2-sp-roomy", "cp2-roomy", "mla-tp2-sp-dropout",
    "mla-recompute-up-pp2-zero-bubble", "gemma-2-pp2-cut-recompute", "gemma-2-pp2-tp2-sp-zero-bubble",
    "gemma-3-tp2-sp-halves", "gpt-neox-tp2-sp-pp2-halves", "gpt-neox-cp2-recompute", "bert-fsdp2",
    "bert-tp2-sp-post-norm", "bert-tp2-sp-chunks", "bert-pp2-tp2-sp", "bert-packed-fsdp2", "bert-packed-tp2-sp",
    "bert-packed-cp2-tp2-sp", "bert-packed-cp2-allgather", "bert-packed-cp2-a2a", "bert-packed-cp4-modern",
    "bert-packed-pp2-vpp-zero", "bert-packed-pp2-cp2-zero-bubble", "bert-packed-pp4-h2", "t5-pp2-zero-bubble-chunks",
    "t5-recompute", "t5-cp4-relative-two-levels", "full-tp4", "full-tp4-sp", "full-tp2-fsdp", "full-tp2-sp-cp2-zero",
    "full-rms-tp4", "full-rms-tp4-sp", "full-rms-tp2-fsdp", "full-rms-tp2-sp-cp2-zero", "full-latent-tp4",
    "full-latent-tp4-sp", "full-latent-plain-tp4", "full-latent-plain-tp4-sp", "full-latent-plain-tp2-fsdp",
    "full-latent-plain-tp2-sp-cp2-zero", "full-latent-fused-tp4", "full-latent-fused-tp4-sp",
    "full-latent-fused-tp2-fsdp", "full-latent-fused-tp2-sp-cp2-zero", "full-experts-etp2-fsdp",
    "full-experts-tp2-sp-cp2-etp1-ep4", "full-experts-tp2-sp-ep2-zero", "full-experts-tp4-sp-etp1-ep2",
    "full-gated-experts-tp2-sp-etp4", "full-gated-experts-tp4-sp-etp2-ep2", "full-batch-loss-tp2-sp-ep2",
    "full-batch-loss-cp2-etp2", "full-parallel-tp4", "full-parallel-tp4-sp", "full-parallel-tp2-fsdp",
    "full-parallel-tp2-sp-cp2-zero", "bert-full-tp4", "bert-full-tp4-sp", "bert-full-tp2-fsdp",
    "bert-full-tp2-sp-cp2-zero", "t5-full-tp4", "t5-full-tp4-sp", "t5-full-tp2-fsdp", "t5-full-tp2-sp-cp2-zero",
    "t5-full-relative-tp4", "t5-full-relative-tp4-sp", "t5-full-relative-tp2-fsdp", "t5-full-relative-tp2-sp-cp2-zero",
    "fp8-delayed-tp2-sp", "fp8-delayed-dp2", "fp8-delayed-zero2", "fp8-delayed-pp2-zero-bubble",
    "fp8-tensorwise-tp2-sp", "fp8-tensorwise-cp2", "fp8-blockwise-pp2", "fp8-heads-tp4-sp-dp2", "fp8-ends-pp2-tp2-sp",
    "fp8-ends-fsdp2", "fp8-latent-recompute-cp2", "fp8-wide-experts-tp2-sp-ep2", "fp8-wide-experts-tp2-sp-etp2",
    "muon-tp2-one-matrix", "muon-pp2-vpp-zero2", "muon-latent-fsdp2", "muon-ep2-zero2", "muon-tp2-sp-etp2-zero2",
    "normuon-zero2-offload", "lion-fsdp2", "muon-lion-tp2-sp-zero2", "muon-clip-tp2-sp-zero2", "muon-clip-fsdp2",
    "muon-clip-cp2-a2a", "muon-clip-latent-tp2-zero2", "varlen-dp4-zero", "dynamic-4", "dynamic-cp2",
    "dynamic-cp4-allgather", "dynamic-a2a", "dynamic-tp2-sp", "dynamic-pp2-4", "dynamic-pp2-vpp", "dynamic-zero",
    "dynamic-fsdp2", "dynamic-recompute", "dynamic-mla", "dynamic-mtp-pp2", "dynamic-sink", "dynamic-ep2",
    "dynamic-aux-ep2-tp2-sp",
    "dynamic-dropout-allgather-tp2", "dynamic-at-least-2", "dynamic-clip-pp2", "dynamic-fp32",
    "offload-zero2-pp2-tp2-sp", "offload-muon-tp2-sp-zero2", "offload-lion-zero2", "activations-tp2-sp-halves",
    "activations-cp2", "activations-pp2-vpp", "activations-pp2-zero-bubble", "activations-recompute-zero2",
    "activations-fsdp2", "activations-mla-tp2-sp", "activations-mla-experts-ep2",
}  # fmt: skip
IN_THE_SUITE_THROUGH_COPY_ENGINES = {
    "tp2-sp-halves-gather", "tp2-sp-pp2-halves", "cp2-tp2-sp", "pp2-vpp-tp2-sp", "recompute-modules",
    "tp2-sp-ep2-halves", "tp2-sp-etp1-ep2", "pp2-vpp-recompute", "pp2-zero-bubble-recompute-moe",
    "bert-packed-pp2-cp2-zero-bubble", "t5-pp2-zero-bubble-chunks", "muon-pp2-vpp-zero2", "dynamic-pp2-4",
    "dynamic-pp2-vpp",
}  # fmt: skip
"""Rows through copy engines: all :func:`engine_pairs` of the complete list."""
