"""Learning rates and weight decays against a table worked by hand, and the reconciliation with a stored schedule."""

import math
import random
from types import SimpleNamespace

import pytest

from megatron.core.schedules.batch_size import global_batch_size, running_global_batch_size
from megatron.core.schedules.learning_rate import (
    LR_DECAY_STYLES,
    OptimizerParamScheduler,
    SchedulePlan,
    decay_weight,
    get_optimizer_param_scheduler,
    learning_rate,
    samples_at,
    schedule_plan,
    schedule_position,
)


def config(**changes):
    """100 iterations of 10 samples, 10 warm-up iterations, 1.0 down to 0.1."""
    values = {
        "lr": 1.0, "min_lr": 0.1, "lr_decay_style": "linear",
        "lr_decay_iters": None, "lr_decay_samples": None, "lr_warmup_iters": 10,
        "lr_warmup_samples": 0, "lr_warmup_fraction": None, "lr_warmup_init": 0.0, "lr_wsd_decay_style": "exponential",
        "lr_wsd_decay_iters": None, "lr_wsd_decay_samples": None,
        "train_iters": 100, "train_samples": None, "global_batch_size": 10, "rampup_batch_size": None,
        "step_batch_size_schedule": None, "decrease_batch_size_if_needed": False, "micro_batch_size": 1,
        "seq_length": 1, "data_parallel_size": 1,
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


@pytest.mark.parametrize("style, samples, expected", [
    ("linear", 250, 0.425), ("cosine", 500, 0.45), ("linear", 2000, 0.5), ("constant", 250, 0.5),
])  # fmt: skip
def test_weight_decay_of_a_group_replaces_start_and_end(style, samples, expected):
    ends = {} if style == "constant" else {"start_weight_decay": 0.1, "end_weight_decay": 0.3}
    plan = schedule_plan(config(**ends, weight_decay_incr_style=style))
    assert decay_weight(plan, samples, start_wd=0.4, end_wd=0.5) == pytest.approx(expected, rel=1e-12)


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


def test_scheduler_writes_values_of_the_pure_functions():
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


def test_a_changed_schedule_is_rejected_unless_a_flag_decides():
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
    saved = get_optimizer_param_scheduler(changed, optimizer_with({}))
    saved.load_state_dict(stored.state_dict())
    assert saved.optimizer.param_groups[0]["lr"] == lr(config(), 550)
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


def test_a_shorter_run_names_the_rate_of_the_stored_schedule_at_its_sample():
    """A tenth of the stored schedule is left, nothing of the new one."""
    longer = config(lr_decay_style="linear")
    stored = get_optimizer_param_scheduler(longer, optimizer_with({}))
    length = stored.plan.lr_decay_steps
    stored.step(length * 9 // 10)
    shorter = config(lr_decay_style="linear", lr_decay_iters=config().train_iters // 2)
    with pytest.raises(ValueError, match=f"schedule: the rate ends at {lr(longer, length * 9 // 10):.3g}$"):
        get_optimizer_param_scheduler(shorter, optimizer_with({})).load_state_dict(stored.state_dict())


def test_a_plan_can_be_given_complete():
    plan = schedule_plan(config())
    assert OptimizerParamScheduler(optimizer_with({}), plan).plan == SchedulePlan(**vars(plan))


# ---- schedules in iterations while the batch size changes


def consumed_before(config):
    """Samples consumed before each iteration, counted batch by batch."""
    consumed = [0]
    for _ in range(config.train_iters):
        consumed.append(consumed[-1] + running_global_batch_size(config, consumed[-1], config.data_parallel_size))
    return consumed


def rates(config, consumed):
    """Learning rates and weight decays of iterations that begin after ``consumed`` samples."""
    optimizer = optimizer_with({})
    scheduler, values = get_optimizer_param_scheduler(config, optimizer), []
    for samples in consumed:
        scheduler.set_samples(samples)
        values.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]))
    return values


RAMP = {"rampup_batch_size": [2, 2, 20], "global_batch_size": 4, "train_iters": 20}


def test_warmup_and_wsd_decay_take_their_iterations_in_a_batch_size_ramp():
    """Ten iterations of 2 samples, then ten of 4."""
    ramp = config(**RAMP, lr=1e-3, min_lr=0.0, lr_warmup_iters=4, lr_decay_style="WSD", lr_wsd_decay_iters=6,
                  lr_wsd_decay_style="linear")  # fmt: skip
    assert consumed_before(ramp)[9:12] == [18, 20, 24]
    expected = [0.0, 2.5e-4, 5e-4, 7.5e-4, *[1e-3] * 11, 5e-3 / 6, 4e-3 / 6, 3e-3 / 6, 2e-3 / 6, 1e-3 / 6]
    assert [rate for rate, _ in rates(ramp, consumed_before(ramp)[:20])] == pytest.approx(expected, abs=1e-15)


def test_a_cosine_with_a_warmup_fraction_ends_near_the_minimum_in_a_batch_size_ramp():
    ramp = config(**RAMP, lr=1e-3, min_lr=0.0, lr_decay_style="cosine", lr_warmup_fraction=0.1)
    values = [rate for rate, _ in rates(ramp, consumed_before(ramp)[:20])]
    assert values[:3] == pytest.approx([0.0, 5e-4, 1e-3])
    assert values[19] == pytest.approx(1e-3 * (1 + math.cos(math.pi * 17 / 18)) / 2) and values[19] < 7.7e-6


def expected_values(config, iteration):
    """Learning rate and weight decay after ``iteration`` iterations, computed from the flags in iterations."""
    peak, low, end = config.lr, config.min_lr, config.lr_decay_iters or config.train_iters
    warmup = config.lr_warmup_iters if config.lr_warmup_fraction is None else config.lr_warmup_fraction * end
    shapes = {
        "linear": lambda x: 1 - x, "cosine": lambda x: math.cos(math.pi * x / 2) ** 2,
        "exponential": lambda x: 2 ** (1 - x) - 1, "minus_sqrt": lambda x: 1 - x**0.5,
    }  # fmt: skip
    weight = 0.1 + 0.2 * (1 - shapes[config.weight_decay_incr_style](min(iteration / config.train_iters, 1)))
    if iteration <= warmup and warmup:
        return config.lr_warmup_init + (peak - config.lr_warmup_init) * iteration / warmup, weight
    if config.lr_decay_style == "constant":
        return peak, weight
    if iteration > end:
        return low, weight
    if config.lr_decay_style == "inverse-square-root":  # lengths in samples, at least one
        lengths = [max(length * config.global_batch_size, 1) for length in (warmup, iteration)]
        return max(low, peak * (lengths[0] / lengths[1]) ** 0.5), weight
    if config.lr_decay_style == "WSD":
        into = iteration - (end - config.lr_wsd_decay_iters)
        height = shapes[config.lr_wsd_decay_style](max(into, 0) / config.lr_wsd_decay_iters)
    else:
        height = shapes[config.lr_decay_style]((iteration - warmup) / (end - warmup))
    return low + (peak - low) * height, weight


def random_run(draw):
    """Settings in iterations, with a batch size that changes."""
    iterations, ranks, micro = draw.randint(12, 60), draw.choice([1, 2]), draw.choice([1, 2])
    start, increment, steps = draw.randint(1, 4) * 4, draw.choice([4, 8]), draw.randint(1, 4)
    final = start + increment * steps
    sizes = {"global_batch_size": final, "rampup_batch_size": [start, increment, draw.randint(0, 40 * final)]}
    if draw.random() < 0.4:
        tokens = sorted(draw.sample(range(1, 800), 2))
        text = f"0:{draw.choice([4, 12, 40])} {tokens[0]}:{draw.choice([8, 20])} {tokens[1]}:{final}"
        sizes |= {"rampup_batch_size": None, "step_batch_size_schedule": text, "seq_length": draw.choice([1, 3])}
    elif draw.random() < 0.3:  # sizes that ranks and micro-batches do not divide are rounded down
        sizes |= {"decrease_batch_size_if_needed": True, "rampup_batch_size": [5, 3, 100], "global_batch_size": 17}
        ranks, micro = 2, 2
    return config(
        train_iters=iterations, lr_warmup_iters=draw.randint(0, 5), lr_warmup_init=draw.choice([0.0, 0.05]),
        lr_warmup_fraction=draw.choice([None, 0.2]), lr_decay_iters=draw.choice([None, iterations, iterations - 3]),
        lr_decay_style=draw.choice(LR_DECAY_STYLES), lr_wsd_decay_iters=draw.randint(1, 7),
        lr_wsd_decay_style=draw.choice(["linear", "cosine", "exponential", "minus_sqrt"]),
        weight_decay_incr_style=draw.choice(["linear", "cosine"]), start_weight_decay=0.1, end_weight_decay=0.3,
        data_parallel_size=ranks, micro_batch_size=micro, **sizes,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(80))
def test_iteration_k_has_the_rate_that_the_flags_in_iterations_give_it(seed):
    """Also in a scheduler that resumes at any iteration."""
    draw = random.Random(seed)
    run = random_run(draw)
    consumed = consumed_before(run)[: run.train_iters]
    expected = [expected_values(run, iteration) for iteration in range(run.train_iters)]
    assert rates(run, consumed) == [pytest.approx(pair, rel=1e-9, abs=1e-12) for pair in expected]
    stop = draw.randrange(run.train_iters)
    first, second = (get_optimizer_param_scheduler(run, optimizer_with({})) for _ in range(2))
    first.set_samples(consumed[stop])
    second.load_state_dict(first.state_dict())
    assert second.optimizer.param_groups[0]["lr"] == pytest.approx(expected[stop][0], rel=1e-9, abs=1e-12)
    assert samples_at(run, schedule_position(run, consumed[stop])) == consumed[stop]


def test_a_schedule_in_samples_is_independent_of_batch_sizes():
    lengths = {"train_samples": 60, "lr_wsd_decay_samples": 24, "lr_warmup_samples": 8, "lr_decay_style": "WSD"}
    ramp = config(**{**RAMP, "train_iters": 20}, **lengths)
    constant = config(**{**RAMP, "train_iters": 15, "rampup_batch_size": None}, **lengths)
    assert rates(ramp, range(0, 61)) == rates(constant, range(0, 61))
    assert [schedule_position(ramp, samples) for samples in (0, 7, 60)] == [0, 7, 60]


def test_positions_within_an_iteration_of_a_ramp_are_fractions_of_its_batch():
    """Batches of 2, 4, 6 and 8 samples: half an iteration is half of its batch."""
    ramp = config(global_batch_size=8, rampup_batch_size=[2, 2, 12], train_iters=20)
    first = 0
    for number in range(12):
        size = global_batch_size(ramp, first)
        for share in (0, 0.5, 1):
            assert samples_at(ramp, (number + share) * 8) == first + share * size
            assert schedule_position(ramp, first + int(share * size)) == (number + share) * 8
        first += size
    assert size == 8 and first > 12
