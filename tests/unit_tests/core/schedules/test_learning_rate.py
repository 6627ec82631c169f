"""Learning rates and weight decays against a table worked by hand, and the reconciliation with a stored schedule."""

import math
from types import SimpleNamespace

import pytest

from megatron.core.schedules.learning_rate import (
    OptimizerParamScheduler,
    SchedulePlan,
    decay_weight,
    get_optimizer_param_scheduler,
    learning_rate,
    schedule_plan,
)


def config(**changes):
    """100 iterations of 10 samples, 10 warm-up iterations, 1.0 down to 0.1."""
    values = {
        "lr": 1.0, "min_lr": 0.1, "lr_decay_style": "linear",
        "lr_decay_iters": None, "lr_decay_samples": None, "lr_warmup_iters": 10,
        "lr_warmup_samples": 0, "lr_warmup_fraction": None, "lr_warmup_init": 0.0, "lr_wsd_decay_style": "exponential",
        "lr_wsd_decay_iters": None, "lr_wsd_decay_samples": None,
        "train_iters": 100, "train_samples": None, "global_batch_size": 10,
        "weight_decay": 0.01, "start_weight_decay": None,
        "end_weight_decay": None, "weight_decay_incr_style": "constant",
        "use_checkpoint_opt_param_scheduler": False, "override_opt_param_scheduler": False,
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


def lr(config, samples):
    return learning_rate(schedule_plan(config), samples)


def weight_decay(config, samples):
    return decay_weight(schedule_plan(config), samples)


WSD = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 20}
TABLE = [
    # what, samples, expected, changes
    ("warm-up starts at its initial rate", 0, 0.2, {"lr_warmup_init": 0.2}),
    ("warm-up is linear", 50, 0.5, {}),
    ("warm-up from an initial rate", 25, 0.2 + 0.8 * 0.25, {"lr_warmup_init": 0.2}),
    ("warm-up ends at the peak", 100, 1.0, {}),
    ("warm-up as a share of the decay", 50, 0.25, {"lr_warmup_fraction": 0.2}),
    ("no warm-up", 0, 1.0, {"lr_warmup_iters": 0}),
    ("constant", 990, 1.0, {"lr_decay_style": "constant"}),
    ("constant has no end", 5000, 1.0, {"lr_decay_style": "constant"}),
    ("linear half way", 550, 0.55, {}),
    ("linear end", 1000, 0.1, {}),
    ("after the end", 1001, 0.1, {}),
    ("a shorter decay", 300, 0.1 + 0.9 * 0.5, {"lr_decay_iters": 50}),
    ("cosine quarter", 325, 0.1 + 0.9 * (0.5 + math.sqrt(0.5) / 2), {"lr_decay_style": "cosine"}),
    ("cosine half way", 550, 0.55, {"lr_decay_style": "cosine"}),
    ("inverse square root", 400, 0.5, {"lr_decay_style": "inverse-square-root"}),
    ("inverse square root at the end", 1000, math.sqrt(0.1), {"lr_decay_style": "inverse-square-root"}),
    ("inverse square root after the end", 1001, 0.1, {"lr_decay_style": "inverse-square-root"}),
    ("inverse square root, floor", 900, 0.5, {"lr_decay_style": "inverse-square-root", "min_lr": 0.5}),
    ("inverse square root without warm-up", 4, 0.5, {"lr_decay_style": "inverse-square-root", "lr_warmup_iters": 0}),
    ("WSD plateau", 800, 1.0, WSD),
    ("WSD exponential", 900, 0.1 + 0.9 * (2 * 0.5**0.5 - 1), WSD),
    ("WSD linear", 850, 0.1 + 0.9 * 0.75, {**WSD, "lr_wsd_decay_style": "linear"}),
    ("WSD cosine", 900, 0.55, {**WSD, "lr_wsd_decay_style": "cosine"}),
    ("WSD minus sqrt", 850, 0.1 + 0.9 * 0.5, {**WSD, "lr_wsd_decay_style": "minus_sqrt"}),
    ("WSD end", 1000, 0.1, WSD),
    ("samples", 60, 0.6, {"train_iters": None, "train_samples": 1000, "lr_warmup_samples": 100}),
    ("samples decay", 550, 0.55, {"train_iters": None, "train_samples": 1000, "lr_warmup_samples": 100}),
]


@pytest.mark.parametrize("what, samples, expected, changes", TABLE, ids=[row[0] for row in TABLE])
def test_learning_rate_equals_the_table(what, samples, expected, changes):
    assert lr(config(**changes), samples) == pytest.approx(expected, rel=1e-12)


LENGTHS = {
    "train_iters": 50, "lr_decay_iters": 40, "lr_warmup_iters": 3, "lr_wsd_decay_iters": 5, "train_samples": None,
    "lr_decay_samples": 230, "lr_warmup_samples": 11, "lr_wsd_decay_samples": 31, "global_batch_size": 7,
    "lr_decay_style": "WSD",
}  # fmt: skip
"""Every length is another number, and so is its product with the batch size."""


@pytest.mark.parametrize("changes, samples", [
    ({}, (350, 280, 21, 35)),
    ({"lr_decay_iters": None}, (350, 350, 21, 35)),
    ({"lr_warmup_fraction": 0.25}, (350, 280, 70, 35)),
    ({"train_iters": None, "train_samples": 290}, (290, 230, 11, 31)),
    ({"train_iters": None, "train_samples": 290, "lr_decay_samples": None}, (290, 290, 11, 31)),
    ({"train_samples": 290}, (290, 230, 11, 31)),
    ({"train_samples": 290, "lr_warmup_fraction": 0.5}, (290, 230, 115, 31)),
    ({"train_iters": None, "train_samples": 290, "global_batch_size": None}, (290, 230, 11, 31)),
], ids=["iterations", "default decay", "fraction of the decay", "samples", "default decay in samples",
        "samples with iterations filled in", "fraction of the decay in samples", "samples of any batch"])  # fmt: skip
def test_every_length_of_a_plan_is_in_samples(changes, samples):
    plan = schedule_plan(config(**{**LENGTHS, **changes}))
    assert (plan.wd_incr_steps, plan.lr_decay_steps, plan.lr_warmup_steps, plan.wsd_decay_steps) == samples


def test_weight_decay_grows_over_the_training_not_over_the_decay():
    ramp = config(lr_decay_iters=50, start_weight_decay=0.1, end_weight_decay=0.3, weight_decay_incr_style="linear")
    assert weight_decay(ramp, 500) == pytest.approx(0.2) and weight_decay(ramp, 750) == pytest.approx(0.25)


@pytest.mark.parametrize("style, samples, expected", [
    ("linear", 0, 0.1), ("linear", 500, 0.2), ("linear", 1000, 0.3), ("linear", 2000, 0.3),
    ("cosine", 0, 0.1), ("cosine", 500, 0.2), ("cosine", 250, 0.1 + 0.2 * (1 - math.sqrt(0.5)) / 2),
])  # fmt: skip
def test_weight_decay_ramps_from_start_to_end(style, samples, expected):
    ramp = config(start_weight_decay=0.1, end_weight_decay=0.3, weight_decay_incr_style=style)
    assert weight_decay(ramp, samples) == pytest.approx(expected, rel=1e-12)


def test_constant_weight_decay_is_constant():
    assert {weight_decay(config(), samples) for samples in (0, 500, 5000)} == {0.01}


@pytest.mark.parametrize("changes, flag", [
    ({"lr": None}, "--lr"), ({"train_iters": None}, "--train-iters"), ({"lr_warmup_iters": 100}, "--lr-warmup"),
    ({"lr_decay_style": "WSD"}, "--lr-wsd-decay"),
    ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": -3}, "--lr-wsd-decay"),
    ({"weight_decay_incr_style": "linear"}, "--start-weight-decay"),
    ({"min_lr": 2.0}, "--min-lr"), ({"lr_warmup_init": 2.0}, "--lr-warmup-init"),
    ({"weight_decay_incr_style": "linear", "start_weight_decay": 0.3, "end_weight_decay": 0.1}, "--start-weight-decay"),
])  # fmt: skip
def test_contradictions_name_the_flag(changes, flag):
    with pytest.raises(ValueError, match=flag):
        schedule_plan(config(**changes))


def optimizer_with(*groups):
    return SimpleNamespace(param_groups=[dict(group) for group in groups])


def test_the_scheduler_writes_what_the_pure_functions_say():
    optimizer = optimizer_with({}, {"lr_mult": 0.5, "wd_mult": 0.0})
    scheduler = get_optimizer_param_scheduler(config(), optimizer)
    for _ in range(30):
        scheduler.step(10)
    assert optimizer.param_groups[0] == {"lr": lr(config(), 300), "weight_decay": 0.01}
    assert optimizer.param_groups[1]["lr"] == lr(config(), 300) * 0.5
    assert optimizer.param_groups[1]["weight_decay"] == 0.0


def test_decoupled_rates_replace_peak_and_minimum_of_a_group():
    optimizer = optimizer_with({"max_lr": 3.0, "min_lr": 1.0})
    scheduler = get_optimizer_param_scheduler(config(), optimizer)
    scheduler.set_samples(550)
    assert optimizer.param_groups[0]["lr"] == 2.0
    scheduler.set_samples(2000)
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_the_classic_constructor_works():
    optimizer = optimizer_with({})
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=1.0, min_lr=0.1, lr_warmup_steps=10, lr_decay_steps=100, lr_decay_style="cosine",
        start_wd=0.0, end_wd=0.0, wd_incr_steps=100, wd_incr_style="constant", override_opt_param_scheduler=True,
    )  # fmt: skip
    scheduler.step(increment=5)
    assert scheduler.get_lr({}) == optimizer.param_groups[0]["lr"] == 0.5
    assert scheduler.get_wd() == 0.0


def test_a_restored_scheduler_goes_on_where_it_was():
    first = get_optimizer_param_scheduler(config(), optimizer_with({}))
    first.step(330)
    second = get_optimizer_param_scheduler(config(), optimizer_with({}))
    second.load_state_dict(first.state_dict())
    assert second.optimizer.param_groups == first.optimizer.param_groups
    assert second.state_dict() == first.state_dict()


def test_a_changed_schedule_is_refused_unless_a_flag_decides():
    stored = get_optimizer_param_scheduler(config(), optimizer_with({}))
    stored.step(550)
    changed = config(lr=2.0, train_iters=200)
    with pytest.raises(ValueError, match="max_lr: checkpoint 1.0, now 2.0.*lr_decay_steps.*--override-opt_param"):
        get_optimizer_param_scheduler(changed, optimizer_with({})).load_state_dict(stored.state_dict())
    changed.override_opt_param_scheduler = True
    fresh = get_optimizer_param_scheduler(changed, optimizer_with({}))
    fresh.load_state_dict(stored.state_dict())
    assert fresh.optimizer.param_groups[0]["lr"] == lr(changed, 550)
    changed.override_opt_param_scheduler, changed.use_checkpoint_opt_param_scheduler = False, True
    kept = get_optimizer_param_scheduler(changed, optimizer_with({}))
    kept.load_state_dict(stored.state_dict())
    assert kept.optimizer.param_groups[0]["lr"] == lr(config(), 550)
    changed.override_opt_param_scheduler = True
    with pytest.raises(ValueError, match="exclude each other"):
        get_optimizer_param_scheduler(changed, optimizer_with({}))


def test_a_longer_run_of_the_same_schedule_goes_on():
    """The number of weight-decay steps is compared only if weight decay changes."""
    stored = get_optimizer_param_scheduler(config(lr_decay_iters=100), optimizer_with({}))
    longer = {"lr_decay_iters": 100, "train_iters": 200}
    get_optimizer_param_scheduler(config(**longer), optimizer_with({})).load_state_dict(stored.state_dict())
    growing = {"weight_decay_incr_style": "linear", "start_weight_decay": 0.0, "end_weight_decay": 0.1}
    stored = get_optimizer_param_scheduler(config(lr_decay_iters=100, **growing), optimizer_with({}))
    with pytest.raises(ValueError, match="wd_incr_steps"):
        fresh = get_optimizer_param_scheduler(config(**longer, **growing), optimizer_with({}))
        fresh.load_state_dict(stored.state_dict())


def test_a_plan_can_be_given_whole():
    plan = schedule_plan(config())
    assert OptimizerParamScheduler(optimizer_with({}), plan).plan == SchedulePlan(**vars(plan))
