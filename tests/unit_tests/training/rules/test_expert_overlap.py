"""Options that exclude overlapped expert communication turn it off with a notice."""

import pytest

from megatron.training.arguments import parse_args
from megatron.training.config.resolve import resolve
from megatron.training.notices import notices
from megatron.training.rules.run_all import check
from tests.unit_tests.training.rules.test_run_all import TINY, problems

MOE = "--num-experts 4 --moe-ffn-hidden-size 32"
HALVES = "--overlap-moe-expert-parallel-comm"
SELECTIVE = "--recompute-granularity selective --recompute-modules"


@pytest.mark.parametrize(
    "text",
    [
        f"{MOE} {HALVES} --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1",
        f"{MOE} {HALVES} {SELECTIVE} moe_act",
    ],
)
def test_consistent_settings_pass(text):
    assert problems(text) == []


def test_experts_are_needed():
    (actual,) = problems(HALVES)
    assert "needs experts" in actual


@pytest.mark.parametrize(
    "text, reason",
    [
        (f"{MOE} {HALVES} --moe-aux-loss-coeff 0.1", "look at the whole micro-batch"),
        (f"{MOE} {HALVES} --moe-expert-capacity-factor 1.0", "look at the whole micro-batch"),
        (f"{MOE} {HALVES} --moe-router-load-balancing-type sinkhorn", "look at the whole micro-batch"),
        (f"{MOE} {HALVES} {SELECTIVE} moe", "--recompute-modules moe recomputes a layer in one piece"),
        (f"{MOE} {HALVES} --use-torch-fsdp2", "gathers a layer's weights as a whole"),
    ],
)  # fmt: skip
def test_features_of_full_micro_batches_disable_the_overlap(text, reason):
    inputs = parse_args(f"{TINY} {text}".split())
    resolved = resolve(inputs, 1)
    assert not resolved.model.overlap_moe_expert_parallel_comm and not check(resolved)
    assert [item for item in notices(inputs, resolved) if item.startswith(f"{HALVES}: off, as ") and reason in item]
