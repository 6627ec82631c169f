"""What excludes experts' communication beside other computation is named."""

import pytest

from tests.unit_tests.training.rules.test_run_all import problems

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


@pytest.mark.parametrize(
    "text, reason",
    [
        (HALVES, "needs experts"),
        (f"{MOE} {HALVES} --moe-aux-loss-coeff 0.1", "seq_aux_loss"),
        (f"{MOE} {HALVES} --moe-expert-capacity-factor 1.0", "look at the whole micro-batch"),
        (f"{MOE} {HALVES} --moe-router-load-balancing-type sinkhorn", "look at the whole micro-batch"),
        (f"{MOE} {HALVES} {SELECTIVE} moe", "the other half of a micro-batch runs in between"),
    ],
)  # fmt: skip
def test_contradictions_are_named(text, reason):
    (found,) = problems(text)
    assert reason in found
