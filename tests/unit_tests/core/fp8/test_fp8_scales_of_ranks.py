"""Tensorwise scales on several ranks: all ranks that hold parts of one matrix, or exchange its rows, have the scale of
the largest magnitude among them. The sets of ranks are written out by hand for each layout."""

from contextlib import ExitStack
from unittest import mock

import pytest

from tests.test_utils.layouts import VOCAB_SIZE, configure, narrow_fp8_experts
from tests.unit_tests.training.test_live_weights import BASE

EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 96 --moe-token-dispatcher-type alltoall"
    " --untie-embeddings-and-output-weights --fp8-format hybrid --fp8-recipe tensorwise"
)
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
LARGEST = {"torch.float8_e4m3fn": 448.0, "torch.float8_e5m2": 57344.0}
EACH = ({0}, {1}, {2}, {3})
PAIRS = ({0, 1}, {2, 3})
LAYOUTS = {
    "ep2 over dp4": ("--expert-model-parallel-size 2", PAIRS, EACH, EACH),
    "ep4 over dp4": ("--expert-model-parallel-size 4", ({0, 1, 2, 3},), EACH, EACH),
    "ep2 over tp2": (f"{TP2} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1", PAIRS, EACH, PAIRS),
    "ep4 over tp2 dp2": (f"{TP2} --expert-model-parallel-size 4 --expert-tensor-parallel-size 1", ({0, 1, 2, 3},),
                         EACH, PAIRS),
    "etp2 ep2 over dp2": (f"{TP2} --expert-model-parallel-size 2", ({0, 1, 2, 3},), PAIRS, PAIRS),
    "etp2": (TP2, PAIRS, PAIRS, PAIRS),
    "tp2 with full experts": (f"{TP2} --expert-tensor-parallel-size 1", PAIRS, EACH, PAIRS),
    "cp2 ep2": ("--context-parallel-size 2 --expert-model-parallel-size 2", PAIRS, EACH, EACH),
}  # fmt: skip
"""Flags; ranks that exchange rows of experts, that share an expert, that share a weight of dense layers."""


def casts_of_a_step(rank, world_size, flags):
    """Return (kind, format, largest local magnitude, scale) of every cast of one training step, in order."""
    from megatron.core.fp8 import experts, gemms
    from megatron.training.exits.conditions import ExitConditions
    from megatron.training.initialize import initialize_megatron
    from megatron.training.run import build_components
    from megatron.training.tasks.language_model import task_class
    from megatron.training.trainer import Trainer
    from megatron.training.verify.layout_trace import with_synthetic_data

    casts = []

    def recording(kind, cast):
        def record(x, dtype, scale, *ranges, **options):
            copies = cast(x, dtype, scale, *ranges, **options)
            rows = x[: ranges[0][-1].stop] if ranges else x
            largest = float(rows.abs().max()) if rows.numel() else 0.0
            copy = copies.rows or copies.columns
            casts.append((kind, str(dtype), largest, float(copy.scale.flatten()[0])))
            return copies

        return record

    argv = [*BASE.split(), *EXPERTS.split(), *flags.split()]
    with ExitStack() as stack:
        stack.enter_context(narrow_fp8_experts())
        cfg = configure(argv, world_size, "bf16")
        parts = build_components(cfg, with_synthetic_data(task_class("gpt"), VOCAB_SIZE)(cfg), initialize_megatron(cfg))
        for module, name, kind in (
            (experts, "cast_groups", "rows of experts"),
            (experts, "cast_tensor", "expert"),
            (gemms, "cast_tensor", "dense"),
        ):
            stack.enter_context(mock.patch.object(module, name, recording(kind, getattr(module, name))))
        with ExitConditions(cfg) as exits:
            Trainer(cfg, parts, exits).step.run()
    return casts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scales_follow_from_the_largest_magnitude_of_the_ranks_that_share_a_matrix(gloo_pool, layout):
    flags, row_ranks, expert_ranks, dense_ranks = LAYOUTS[layout]
    casts = gloo_pool.run(casts_of_a_step, 4, flags)
    dense = PAIRS if "context" in flags else dense_ranks  # weights of context-parallel ranks are copies
    num_different = 0
    for kind, sets in (("rows of experts", row_ranks), ("expert", expert_ranks), ("dense", dense)):
        by_rank = [[cast for cast in one if cast[0] == kind] for one in casts]
        assert len(by_rank[0]) >= 4 and len({len(calls) for calls in by_rank}) == 1, kind
        for calls in zip(*by_rank):
            for ranks in sets:
                magnitudes = [calls[rank][2] for rank in ranks]
                largest = max(magnitudes)
                num_different += len(set(magnitudes)) > 1
                for rank in ranks:
                    assert largest == 0 or calls[rank][3] == pytest.approx(largest / LARGEST[calls[rank][1]], rel=1e-6)
    assert num_different >= 8, "ranks had the same magnitudes"
