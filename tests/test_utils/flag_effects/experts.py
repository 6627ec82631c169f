"""Mixtures of experts: MoE layers, routing, token dispatch, placement of experts on ranks."""

from tests.test_utils.flag_effects.layouts import SP, TP, calls, group, sends
from tests.test_utils.flag_effects.rows import (
    LAYERS,
    changes,
    finished,
    gives,
    keeps,
    keeps_to_rounding,
    modules,
    row,
    shape,
)

MLP = LAYERS + "1.mlp."
FC1, SHARED = MLP + "experts.linear_fc1.weight", MLP + "shared_experts."
MOE = "--num-experts 4 --moe-ffn-hidden-size 24"
QUANTILES = "--moe-router-load-balancing-type quantile_balancing"
BIASED = f"{MOE} --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
GROUPS = f"{MOE} --moe-router-num-groups 1 --moe-router-group-topk 1"
BESIDE = f"{MOE} --moe-shared-expert-intermediate-size 16"
FULL = f"{MOE} --moe-expert-capacity-factor 0.5"
EP = "--expert-model-parallel-size 2"
MOE_AT = "megatron.core.transformer.moe."
CHOICES = 4 * 16 * 2
"""Choices that a global batch makes in each layer, two per token."""


def all_experts_equal(base, run):
    """Every expert takes the same number of tokens."""
    finished(run)
    for kind in ("min", "max"):
        assert run.statistic(f"layer 1/tokens_per_expert {kind}") == [CHOICES / 4] * 2


def every_expert_takes_all(base, run):
    finished(run)
    assert run.statistic("layer 1/tokens_per_expert min") == [CHOICES / 2] * 2


def logs(name):
    """The loss ``name`` is logged as a positive value, in total and for every layer."""

    def logs_it(base, run):
        finished(run)
        values = [*run.column(name), *run.statistic(f"layer 1/{name}"), *run.statistic(f"layer 2/{name}")]
        assert all(value is not None and value > 0 for value in values), values

    return logs_it


def drops_half(base, run):
    """Half of an equal share is room for at most half of the choices."""
    finished(run)
    assert all(CHOICES / 2 <= count < CHOICES for count in run.statistic("layer 1/dropped"))


def saves(name):
    return gives(lambda run: any(name in saved for saved in run.saved[2]), True)


NETWORK = [
    row("--num-experts 4", gives(modules("MoELayer"), 2), gives(shape(FC1), (4, 128, 32)),
        gives(shape(MLP + "router.weight"), (4, 32))),
    row("--moe-layer-freq [0,1]", gives(modules("MoELayer"), 1), gives(modules("MLP"), 1), base=MOE),
    row("--moe-ffn-hidden-size 24", gives(shape(FC1), (4, 24, 32)), base="--num-experts 4"),
    row("--moe-shared-expert-intermediate-size 16", gives(shape(SHARED + "linear_fc1.weight"), (16, 32)), base=MOE),
    row("--moe-shared-expert-gate", gives(shape(SHARED + "gate_weight"), (1, 32)), base=BESIDE),
    row("--overlap-moe-expert-parallel-comm", changes("order"), keeps_to_rounding("weights"), base=f"{MOE} {EP}",
        ranks=2),
    row("--moe-shared-expert-overlap", changes("order"), keeps_to_rounding("weights"), base=f"{BESIDE} {EP}", ranks=2),
    row("--no-moe-fusion", gives(modules("SequentialExperts"), 2), keeps_to_rounding("weights"), base=MOE),
]  # fmt: skip
ROUTER = [
    row("--moe-router-topk 4", every_expert_takes_all, base=MOE),
    row("--moe-router-score-function sigmoid", changes("losses"), keeps("initial"), base=MOE),
    row("--moe-router-pre-softmax", changes("losses"), keeps("initial"), base=MOE),
    row("--moe-router-num-groups 2", changes("losses"), keeps("initial"), base=GROUPS),
    row("--moe-router-group-topk 2", changes("losses"), keeps("initial"),
        base=f"{MOE} --moe-router-num-groups 2 --moe-router-group-topk 1"),
    row("--moe-router-group-score-topk 2", changes("losses"), keeps("initial"),
        base=f"{MOE} --moe-router-topk 1 --moe-router-pre-softmax --moe-router-num-groups 2 --moe-router-group-topk 1"),
    row("--moe-router-topk-scaling-factor 2.5", changes("losses"), keeps("initial"), base=MOE),
    row("--moe-router-dtype fp32", calls("apply"), changes("losses"), base=f"{MOE} --bf16",
        count=(MOE_AT + "router:_WideLinear.apply",)),
    row("--moe-router-enable-expert-bias", saves("expert_bias"), changes("losses"),
        base=f"{MOE} --moe-router-score-function sigmoid --save {{out}} --moe-router-bias-update-rate 0.5"),
    row("--moe-router-bias-update-rate 0.5", changes("losses"), keeps("initial"), base=BIASED),
    row("--moe-router-load-balancing-type seq_aux_loss", logs("seq_load_balancing_loss"), changes("gradients"),
        base=f"{MOE} --moe-aux-loss-coeff 0.1"),
    row(QUANTILES, saves("expert_bias"), changes("losses"), base=f"{MOE} --save {{out}}"),
    row("--moe-router-quantile-balancing-ema 0.5", changes("losses"), keeps("initial"), base=f"{MOE} {QUANTILES}"),
    row("--moe-aux-loss-coeff 0.1", logs("load_balancing_loss"), changes("gradients"), keeps("initial"), base=MOE),
    row("--moe-z-loss-coeff 0.1", logs("z_loss"), changes("gradients"), keeps("initial"), base=MOE),
    row("--moe-input-jitter-eps 0.5", changes("losses"), keeps("initial"), base=MOE),
    row("--moe-router-force-load-balancing", all_experts_equal, keeps("initial"), base=MOE),
]  # fmt: skip
CAPACITY = [
    row("--moe-expert-capacity-factor 0.5", drops_half, keeps("initial"), base=MOE),
    row("--moe-pad-expert-input-to-capacity", calls("pad_to"), keeps_to_rounding("losses"), base=FULL,
        count=("megatron.core.fusions.permute:pad_to",)),
    row("--moe-token-drop-policy position", drops_half, changes("losses"), keeps("initial"), base=FULL),
]  # fmt: skip
RANKS = [
    row("--moe-token-dispatcher-type alltoall", sends("all_to_all_single"), keeps_to_rounding("weights"),
        base=f"{MOE} {EP}", ranks=2),
    row("--moe-static-rows", calls("start_reading", False), keeps_to_rounding("weights"), base=f"{MOE} {EP}", ranks=2,
        count=(MOE_AT + "dispatch:start_reading",)),
    row("--expert-model-parallel-size 2", group("ep", 0, 1), gives(shape(FC1), (2, 24, 32)), base=MOE, ranks=2),
    row("--expert-tensor-parallel-size 1", group("etp", 0), gives(shape(FC1), (4, 24, 32)),
        base=f"{MOE} {TP} {SP}", ranks=2),
]  # fmt: skip
ROWS = [*NETWORK, *ROUTER, *CAPACITY, *RANKS]
