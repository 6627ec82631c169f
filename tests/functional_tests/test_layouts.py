"""The matrix: every layout gives the one-rank answer.

A row is a model (flags that change the numbers) and a layout (flags that must not). Steps of a tiny model on random
tokens with random loss masks, fully masked rows among them; then losses, statistics of modules (the load of experts),
the gathered gradient of every parameter, the gradient norm and all weights after every step equal one rank with the
full batch in one micro-batch, to 1e-10 in float64 and 1e-5 in float32; initial weights and copies of a weight
agree to the bit.

The suite runs a subset that covers all pairs of axes (``layout_suite.py``); ``tests/torture/layouts.py`` runs all rows.

The matrix is worth its time: every planted bug turns it red, and the first parameter that differs is named.
"""

import dataclasses
import itertools

import pytest

from megatron.core.distributed.replicas import tensor_hash
from tests.test_utils.declared_table import DECLARED_ROWS, missing_axes
from tests.test_utils.gloo_pool import WorkerError
from tests.test_utils.layout_suite import (
    IN_THE_SUITE,
    IN_THE_SUITE_THROUGH_COPY_ENGINES,
    engine_pairs,
    missing_pairs,
)
from tests.test_utils.layout_table import MODELS, TABLE, THROUGH_COPY_ENGINES, layout_flags, row
from tests.test_utils.layouts import (
    FEW_STEPS,
    MORE_STEPS,
    VOCAB_SIZE,
    Layout,
    compare_with_reference,
    configure,
    running,
)

EMBEDDING = "embedding.word_embeddings.weight"
NORM = "decoder.layers.0.input_layernorm.weight"
EXPERTS, ROUTER = "decoder.layers.0.mlp.experts.", "decoder.layers.0.mlp.router.weight"

# planted bug, row, what is found first: its kind, and how its name begins
BUGS = [
    ("norm_gradients_not_summed", "tp2-sp", "gradient", NORM),
    ("norm_gradients_not_summed", "tp4-sp-mqa", "gradient", "decoder.layers.0."),
    ("gradients_summed_twice", "tp2-sp-sgd", "gradient", NORM),
    ("gradients_summed_twice", "pp2", "gradient", EMBEDDING),
    ("only_last_microbatch", "accumulation", "gradient", EMBEDDING),
    ("only_last_microbatch", "pp2", "gradient", EMBEDDING),
    ("dropped_layer", "pp2-untied", "weight", "decoder.layers.3."),
    ("loss_is_a_mean_of_means", "accumulation", "loss", "lm loss"),
    ("loss_is_a_mean_of_means", "dp4-fp32", "loss", "lm loss"),
    ("untied_embeddings", "pp2", "gradient", EMBEDDING),
    ("untied_embeddings", "zero2-pp2-gather", "gradient", EMBEDDING),
    ("padding_in_the_softmax", "tp2", "loss", "lm loss"),
    ("dropout_by_local_position", "tp2-sp", "loss", "lm loss"),
    ("dropout_by_local_position", "cp2", "loss", "lm loss"),
    ("replicated_counted_on_every_rank", "tp2", "norm", "gradient norm"),
    ("stale_weights", "zero2-gather", "weight", EMBEDDING),
    ("bucket_sent_before_it_is_full", "dp2-overlap", "gradient", ""),
    ("data_order_depends_on_ranks", "dp2", "loss", "lm loss"),
    ("reduced_in_bf16", "dp2", "gradient", EMBEDDING),
    ("reduced_in_bf16", "dp4-fp32", "gradient", EMBEDDING),
    ("same_seed_on_every_rank", "tp2", "weight", EMBEDDING),
    ("loss_mask_wears_off", "accumulation", "loss", "lm loss"),
    ("context_parallel_rank_forgets_the_others", "cp2", "gradient", EMBEDDING),
    ("untied_embeddings", "zero2-pp4-gather", "gradient", EMBEDDING),
    ("attention_gradients_of_blocks_are_off", "cp2", "gradient", ""),
    ("every_rank_pools_its_first_local_position", "bert-pp2-tp2-sp", "loss", "sop loss"),
    ("pairs_weigh_as_on_one_rank", "bert-fsdp2", "gradient", ""),
    ("samples_of_a_row_drop_other_elements", "bert-packed-cp2-tp2-sp", "loss", "lm loss"),
    ("router_gradients_not_summed", "tp2-sp-ep2-etp2", "gradient", ROUTER),
    ("experts_summed_over_dense_ranks", "ep2-etp2-dp8", "gradient", EXPERTS),
    ("gradients_of_experts_averaged", "ep2-alltoall", "gradient", EXPERTS),
    ("experts_counted_by_every_copy", "ep2-zero-instances", "norm", "gradient norm"),
    ("norm_without_the_experts_of_others", "ep8-alltoall", "norm", "gradient norm"),
    ("expert_bias_from_local_tokens", "ep2-zero-instances", "weight", "decoder.layers.1.mlp.router.expert_bias"),
    ("side_losses_averaged_over_ranks", "ep2-alltoall", "gradient", EMBEDDING),
    ("balance_of_local_positions", "cp2-tp2-sp-ep2", "loss", "seq_load_balancing_loss"),
    ("fp8_scales_of_the_local_part", "fp8-tensorwise-tp2-sp", "loss", "lm loss"),
    ("fp8_scales_of_the_local_part", "fp8-tensorwise-cp2", "loss", "lm loss"),
    ("fp8_expert_scales_of_the_local_rows", "fp8-wide-experts-tp2-sp-ep2", "loss", "lm loss"),
    ("fp8_expert_scales_of_the_local_rows", "fp8-wide-experts-tp2-sp-etp2", "loss", "lm loss"),
    ("fp8_history_of_the_local_rank", "fp8-delayed-dp2", "loss", "lm loss"),
    ("samples_planned_twice", "dynamic-4", "loss", "lm loss"),
    ("positions_of_the_row", "varlen-dp4-zero", "loss", "lm loss"),
    ("tokens_of_the_next_rank", "dynamic-4", "loss", "lm loss"),
]


STATEFUL = ("expert-bias", "global_aux_loss", "--bf16", "--fp16", "--fp8-format")
"""Parts of models with state besides weights and moments: biases, counts, loss scales, histories of fp8."""
ALTERNATING = ("--overlap-param-gather", "offload", "--use-torch-fsdp2")
"""Flags of layouts whose buffers alternate between steps or layers."""


def in_the_suite(name):
    """A row with two steps: the first updates all weights, and the second computes with the new ones. Three steps where
    state accumulates or buffers alternate. ``tests/torture/layouts.py`` takes ten of every row."""
    one = row(name)
    is_short = name in DECLARED_ROWS or not (
        any(part in one.model for part in STATEFUL) or any(flag in one.layout for flag in ALTERNATING)
    )
    return dataclasses.replace(one, steps=FEW_STEPS if is_short else MORE_STEPS)


@pytest.mark.parametrize("name", [name for name in TABLE if name in IN_THE_SUITE])
def test_layout_equals_one_rank(matrix, name):
    verdict = matrix.verdict(in_the_suite(name))
    assert verdict.equal, "\n".join(map(str, verdict.differences[:5]))


@pytest.mark.parametrize("name", sorted(IN_THE_SUITE_THROUGH_COPY_ENGINES))
def test_layout_equals_one_rank_through_copy_engines(matrix, name):
    verdict = matrix.verdict(in_the_suite(name), "through_copy_engines")
    assert verdict.equal, "\n".join(map(str, verdict.differences[:5]))


def test_the_table_is_large_enough():
    assert len({(name, *rest) for name, *rest in TABLE.values()}) == len(TABLE) >= 240
    assert set(TABLE) > IN_THE_SUITE and len(IN_THE_SUITE) >= 200
    assert set(THROUGH_COPY_ENGINES) > IN_THE_SUITE_THROUGH_COPY_ENGINES


def test_words_of_a_layout_are_flags():
    assert layout_flags("mb4 tp2 sp comm:a2a+p2p modules:mlp,moe stages:Et|tL offload ddp-num-buckets:3").split() == [
        "--micro-batch-size", "4", "--tensor-model-parallel-size", "2", "--sequence-parallel", "--cp-comm-type",
        "a2a+p2p", "--recompute-modules", "mlp", "moe", "--pipeline-model-parallel-layout", "Et|tL",
        "--optimizer-cpu-offload", "--ddp-num-buckets", "3",
    ]  # fmt: skip


def test_rows_of_the_suite_cover_every_pair_of_axes():
    assert missing_pairs(map(row, TABLE), map(row, IN_THE_SUITE)) == []


def test_rows_of_the_suite_cover_the_axes_of_copy_engines():
    every, selected = (set().union(*(engine_pairs(row(name)) for name in names))
                       for names in (THROUGH_COPY_ENGINES, IN_THE_SUITE_THROUGH_COPY_ENGINES))  # fmt: skip
    assert every == selected


def test_a_pair_of_axes_without_a_row_is_reported():
    rows = [row(name) for name in IN_THE_SUITE if "--hybrid-context-parallel" not in row(name).layout]
    missing = missing_pairs([row("dynamic-mla")], rows)
    assert ("--multi-latent", "--hybrid-context-parallel") in missing and ("--hybrid-context-parallel", "dp") in missing
    assert not {("--multi-latent-attention",), ("dp", "micro-batches")} & set(missing)


def test_every_declared_parameter_and_loss_meets_every_axis():
    """A parameter of any model is in a row with TP 2 and 4, with and without sequence parallelism, context and data
    parallelism, several micro-batches, ZeRO-1 and FSDP2; of experts also EP and ETP above and below TP."""
    assert missing_axes(map(row, TABLE), map(row, IN_THE_SUITE), VOCAB_SIZE) == {}


def test_a_parameter_without_a_row_is_reported():
    rows = map(row, IN_THE_SUITE - {"full-tp4"})
    missing = missing_axes([row("mtp-cp2")], rows, VOCAB_SIZE)
    assert missing["gpt: mtp.layers.*.eh_proj.weight (split over nothing)"] == ["tp4"]
    assert "gpt: decoder.final_layernorm.weight (split over nothing)" not in missing


def short(name):
    """Two steps are enough for a bug."""
    return dataclasses.replace(row(name), steps=FEW_STEPS)


@pytest.mark.parametrize(("bug", "name", "kind", "first"), BUGS, ids=[f"{bug}-{name}" for bug, name, *_ in BUGS])
def test_a_planted_bug_is_found(matrix, bug, name, kind, first):
    verdict = matrix.verdict(short(name), bug)
    assert not verdict.equal
    assert verdict.first.kind == kind and verdict.first.name.startswith(first), str(verdict.first)


@pytest.mark.parametrize("bug, name, step", [
    ("fp8_history_of_the_local_rank", "fp8-delayed-tp2-sp", 3),
    ("fp8_copies_of_the_first_weights", "fp8-delayed-zero2", 2),
])  # fmt: skip
def test_a_planted_bug_is_found_in_a_later_step(matrix, bug, name, step):
    """The first step is cast with the scales of its values."""
    verdict = matrix.verdict(in_the_suite(name), bug)
    assert (verdict.first.kind, verdict.first.name, verdict.first.step) == ("loss", "lm loss", step)


def test_a_wrong_group_is_found_by_the_counts(matrix):
    with pytest.raises(WorkerError, match="sums 'lm loss' over"):
        matrix.verdict(short("dynamic-4"), "groups_of_half_the_ranks")


def test_the_rows_of_planted_bugs_are_green_without_them(matrix):
    for name in {name for _, name, *_ in BUGS}:
        assert matrix.verdict(in_the_suite(name)).equal


def digests(matrix, one, bug=None):
    """The bits of every gradient and weight after every step, on every rank."""
    reports = matrix.pool.run(compare_with_reference, one.world_size, one, matrix.reference_of(one), bug)
    return [[(cell.kind, cell.name, cell.digest) for step in report for cell in step.cells] for report in reports]


@pytest.mark.parametrize("name", ["dp4-fp32", "tp2-fp32", "pp2-fp32"])
def test_a_layout_repeats_bit_for_bit(matrix, name):
    assert digests(matrix, short(name)) == digests(matrix, short(name))


def test_a_run_that_does_not_repeat_is_found(matrix):
    one = short("dp2")
    assert digests(matrix, one, "masks_from_the_clock") != digests(matrix, one, "masks_from_the_clock")


def first_step(rank, world_size, one):
    """A task of the pool: (losses, {(name, rectangle): hash of the gradient}) of the first step on this rank."""
    with running(one, world_size) as traces:
        _, step = itertools.islice(traces, 2)
        return step.losses, {(item.name, item.rectangle): int(tensor_hash(item.local)) for item in step.gradients}


@pytest.mark.parametrize("model, tp", [("full", 4), ("full-latent", 2)])
def test_sequence_parallelism_changes_no_bit_of_split_parameters(matrix, model, tp):
    """In float32 on the same ranks; parameters that every rank holds sum their positions in another order."""
    one = Layout(MODELS[model], f"--micro-batch-size 8 --tensor-model-parallel-size {tp}", tp, "fp32", 1)
    split = dataclasses.replace(one, layout=f"{one.layout} --sequence-parallel")
    cfg = configure(one.argv, tp, "fp32")
    params = cfg.describe(VOCAB_SIZE).params()
    tensor_parallel = {param.name for param in params if "tp" in param.mesh and param.tied_to is None}
    plain, sequence = (matrix.pool.run(first_step, tp, item) for item in (one, split))
    for (losses, gradients), (other_losses, other_gradients) in zip(plain, sequence):
        assert losses == other_losses and gradients.keys() == other_gradients.keys()
        assert {name for name, _ in gradients} > tensor_parallel
        differing = {name for name, at in gradients if gradients[name, at] != other_gradients[name, at]}
        assert not differing & tensor_parallel


def test_overlap_changes_no_bit(matrix):
    one = short("zero2-fp32")
    plain = [flag for flag in one.layout.split() if flag not in ("--overlap-grad-reduce", "--overlap-param-gather")]
    assert configure(one.argv, 2, "fp32").flat.overlap_param_gather
    assert digests(matrix, one) == digests(matrix, dataclasses.replace(one, layout=" ".join(plain)))
