"""Learning rate and weight decay as pure functions of (configuration, consumed samples).

Schedules are functions of the consumed samples, so that they do not depend on restarts. :class:`SchedulePlan` holds the
lengths in samples; lengths in iterations are multiplied by the (final) global batch size. An iteration uses
``learning_rate(plan, schedule_position(config, consumed samples))``: for schedules in iterations the position is the
number of iterations times that same size, so that iteration k has the rate that the flags give it while the batch size
changes. :class:`OptimizerParamScheduler` writes the values into the parameter groups of an optimizer.

Closed forms, with ``n`` the position, ``w`` warm-up and ``d`` decay samples, ``L`` the peak, ``m`` the minimum and
``i`` the initial learning rate::

    n <= w                  i + (L - i) n / w                                (only when w > 0)
    constant                L
    n > d                   m
    inverse-square-root     max(m, L sqrt(max(w, 1)) / sqrt(max(n, 1)))
    linear                  m + (L - m) (1 - r)                              r = (n - w) / (d - w)
    cosine                  m + (L - m) (cos(pi r) + 1) / 2
    WSD                     L while n <= d - a, then m + (L - m) f(q)        q = (n - d + a) / a, a annealing samples
        linear              f(q) = 1 - q
        cosine              f(q) = (cos(pi q) + 1) / 2
        exponential         f(q) = 2 * 0.5^q - 1
        minus_sqrt          f(q) = 1 - sqrt(q)

    weight decay            s + (e - s) g(min(n / t, 1))                     t = training samples
        linear              g(x) = x
        cosine              g(x) = (cos(pi (1 - x)) + 1) / 2"""

import logging
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, Protocol, get_args

from megatron.core.config.errors import UserError
from megatron.core.schedules.batch_size import BatchConfig, iters_from_samples, samples_from_iters

logger = logging.getLogger(__name__)

DecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
WsdDecayStyle = Literal["exponential", "linear", "cosine", "minus_sqrt"]
WeightDecayStyle = Literal["constant", "linear", "cosine"]
LR_DECAY_STYLES, WSD_DECAY_STYLES, WEIGHT_DECAY_STYLES = map(get_args, (DecayStyle, WsdDecayStyle, WeightDecayStyle))


class ScheduleConfig(BatchConfig, Protocol):
    """Configuration fields of the schedule; ``PretrainConfig`` has all of them."""

    lr: float
    min_lr: float
    lr_decay_style: DecayStyle
    lr_decay_iters: int | None
    lr_decay_samples: int | None
    lr_warmup_iters: int
    lr_warmup_samples: int
    lr_warmup_fraction: float | None
    lr_warmup_init: float
    lr_wsd_decay_style: WsdDecayStyle
    lr_wsd_decay_iters: int | None
    lr_wsd_decay_samples: int | None
    train_iters: int
    train_samples: int | None
    data_parallel_size: int
    weight_decay: float
    start_weight_decay: float | None
    end_weight_decay: float | None
    weight_decay_incr_style: WeightDecayStyle


@dataclass(frozen=True)
class SchedulePlan:
    """Learning rate and weight decay schedule in samples. Names and order of the fields match the arguments of
    Megatron-LM's ``OptimizerParamScheduler``. The constructor raises UserError for values that are out of range or
    contradict each other."""

    init_lr: float
    max_lr: float
    min_lr: float
    lr_warmup_steps: float
    lr_decay_steps: int
    lr_decay_style: str
    start_wd: float
    end_wd: float
    wd_incr_steps: int
    wd_incr_style: str
    wsd_decay_steps: int | None = None
    lr_wsd_decay_style: str | None = None

    def __post_init__(self) -> None:
        def refuse(flag: str, value: object, reason: str) -> None:
            raise UserError(f"{flag} {value}: {reason}")

        if self.lr_decay_style not in LR_DECAY_STYLES:
            refuse("--lr-decay-style", self.lr_decay_style, f"choose one of {', '.join(LR_DECAY_STYLES)}")
        if self.wd_incr_style not in WEIGHT_DECAY_STYLES:
            refuse("--weight-decay-incr-style", self.wd_incr_style, f"choose one of {', '.join(WEIGHT_DECAY_STYLES)}")
        if self.min_lr < 0 or self.max_lr < self.min_lr:
            refuse("--min-lr", self.min_lr, f"must lie between 0 and --lr {self.max_lr}")
        if self.init_lr > self.max_lr:
            refuse("--lr-warmup-init", self.init_lr, f"must not exceed --lr {self.max_lr}")
        if self.lr_decay_steps <= 0:
            refuse("--lr-decay-iters/--lr-decay-samples", self.lr_decay_steps, "the schedule needs at least one sample")
        if not 0 <= self.lr_warmup_steps < self.lr_decay_steps:
            refuse(
                "--lr-warmup-iters/samples/fraction",
                self.lr_warmup_steps,
                f"warm-up (in samples) must end before the decay does at sample {self.lr_decay_steps}",
            )
        if not 0.0 <= self.start_wd <= self.end_wd:
            refuse("--start-weight-decay", self.start_wd, f"must lie between 0 and --end-weight-decay {self.end_wd}")
        if self.wd_incr_style == "constant" and self.start_wd != self.end_wd:
            refuse("--weight-decay-incr-style", "constant", f"start {self.start_wd} and end {self.end_wd} differ")
        if self.lr_decay_style == "WSD":
            if not 0 < (self.wsd_decay_steps or 0) <= self.lr_decay_steps:
                refuse(
                    "--lr-wsd-decay-iters/samples",
                    self.wsd_decay_steps,
                    f"--lr-decay-style WSD needs an annealing length between 1 and {self.lr_decay_steps} samples",
                )
            if self.lr_wsd_decay_style not in WSD_DECAY_STYLES:
                refuse("--lr-wsd-decay-style", self.lr_wsd_decay_style, f"choose one of {', '.join(WSD_DECAY_STYLES)}")


def schedule_plan(config: ScheduleConfig) -> SchedulePlan:
    """Convert the schedule of ``config`` to samples. Lengths in iterations are multiplied by ``global_batch_size``, as
    :func:`schedule_position` is; a warm-up fraction refers to the decay length and overrides the other warm-up. Raises
    UserError without ``lr``, without start and end of a weight decay that changes, or if the lengths are missing or
    contradict each other."""
    if config.lr is None:
        raise UserError("--lr is not set: give the peak learning rate")
    style = config.weight_decay_incr_style
    start, end = config.start_weight_decay, config.end_weight_decay
    if style == "constant":
        start = end = config.weight_decay
    elif start is None or end is None:
        raise UserError(f"--weight-decay-incr-style {style}: needs --start-weight-decay and --end-weight-decay")
    total, decay, warmup, anneal = _lengths_in_samples(config)
    if config.lr_warmup_fraction is not None:
        warmup = config.lr_warmup_fraction * decay
    return SchedulePlan(
        init_lr=config.lr_warmup_init,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=config.lr_decay_style,
        start_wd=float(start or 0.0),
        end_wd=float(end or 0.0),
        wd_incr_steps=total,
        wd_incr_style=style,
        wsd_decay_steps=anneal,
        lr_wsd_decay_style=config.lr_wsd_decay_style,
    )


def _lengths_in_samples(config: ScheduleConfig) -> tuple[int, int, float, int | None]:
    """Return (training, decay, warm-up, WSD annealing). --train-samples uses the ``_samples`` flags."""
    if config.train_iters and not config.train_samples:  # with --train-samples, train_iters may be derived from it
        size = config.global_batch_size
        if not size:
            raise UserError("--global-batch-size is not set: a schedule in iterations needs it")
        decay = (config.train_iters if config.lr_decay_iters is None else config.lr_decay_iters) * size
        anneal = None if config.lr_wsd_decay_iters is None else config.lr_wsd_decay_iters * size
        return config.train_iters * size, decay, config.lr_warmup_iters * size, anneal
    if config.train_samples:
        decay = config.train_samples if config.lr_decay_samples is None else config.lr_decay_samples
        return config.train_samples, decay, config.lr_warmup_samples, config.lr_wsd_decay_samples
    raise UserError("neither --train-iters nor --train-samples is set: the schedule has no length")


def schedule_position(config: ScheduleConfig, consumed_samples: int) -> float:
    """Return the position in the plan of ``config`` after ``consumed_samples``: that number for a schedule in samples
    or a constant batch size, else the number of iterations times ``global_batch_size``."""
    if config.train_samples or not config.train_iters:
        return consumed_samples
    iterations = iters_from_samples(config, consumed_samples, config.data_parallel_size)
    return float(iterations * config.global_batch_size)


def samples_at(config: ScheduleConfig, position: float) -> int:
    """Return the samples consumed at ``position``, rounded down: the inverse of :func:`schedule_position`."""
    if config.train_samples or not config.train_iters:
        return int(position)
    iterations, rest = divmod(position, config.global_batch_size)
    first, end = (samples_from_iters(config, int(iterations) + number, config.data_parallel_size) for number in (0, 1))
    return first + int((end - first) * rest / config.global_batch_size)


def learning_rate(
    plan: SchedulePlan, samples: float, *, max_lr: float | None = None, min_lr: float | None = None
) -> float:
    """Return the learning rate at position ``samples`` (closed forms in the module docstring). ``max_lr`` and
    ``min_lr`` of a parameter group override the plan's peak and minimum, also in warm-up."""
    peak = plan.max_lr if max_lr is None else max_lr
    low = plan.min_lr if min_lr is None else min_lr
    warmup, end = plan.lr_warmup_steps, plan.lr_decay_steps
    if warmup > 0 and samples <= warmup:
        return plan.init_lr + (peak - plan.init_lr) * samples / warmup
    if plan.lr_decay_style == "constant":
        return peak
    if samples > end:
        return low
    if plan.lr_decay_style == "inverse-square-root":
        return max(low, peak * max(warmup, 1) ** 0.5 / max(samples, 1) ** 0.5)
    if plan.lr_decay_style == "WSD":
        length = plan.wsd_decay_steps or 1
        share = (samples - (end - length)) / length
        shape = _annealing(plan.lr_wsd_decay_style, share) if share > 0 else 1.0
    else:
        shape = _annealing(plan.lr_decay_style, (samples - warmup) / (end - warmup))
    return low + shape * (peak - low)


def _annealing(style: str | None, share: float) -> float:
    """Return f(share) of the module docstring, from 1 at 0 to 0 at 1. Any other style is minus_sqrt."""
    if style == "linear":
        return 1.0 - share
    if style == "cosine":
        return 0.5 * (math.cos(math.pi * share) + 1.0)
    if style == "exponential":
        return 2.0 * math.pow(0.5, share) - 1.0
    return 1.0 - math.sqrt(share)


def decay_weight(
    plan: SchedulePlan, samples: float, *, start_wd: float | None = None, end_wd: float | None = None
) -> float:
    """Return the weight decay coefficient at position ``samples``. ``start_wd`` and ``end_wd`` of a parameter group
    override the plan's values."""
    start = plan.start_wd if start_wd is None else start_wd
    end = plan.end_wd if end_wd is None else end_wd
    if samples > plan.wd_incr_steps or plan.wd_incr_style == "constant":
        return end
    share = samples / plan.wd_incr_steps
    if plan.wd_incr_style == "cosine":
        share = 0.5 * (math.cos(math.pi * (1 - share)) + 1.0)
    return start + share * (end - start)


class HasParamGroups(Protocol):
    """Optimizer of torch or of the library."""

    param_groups: list[dict[str, Any]]


class OptimizerParamScheduler:
    """Scheduler that writes ``lr`` and ``weight_decay`` into the optimizer's parameter groups. A group may have
    ``max_lr`` and ``min_lr`` (decoupled learning rates), ``start_wd`` and ``end_wd``, and the factors ``lr_mult`` and
    ``wd_mult``. The constructor writes the values for 0 samples. Raises UserError if both options are set or the
    schedule is invalid.

    Args:
        optimizer: object with ``param_groups``, a list of dicts.
        plan: a :class:`SchedulePlan`, or its fields as positional and keyword arguments.
        position: maps consumed samples to the position in the plan (None: the same number).
        use_checkpoint_opt_param_scheduler: whether loading a checkpoint adopts its schedule.
        override_opt_param_scheduler: whether loading a checkpoint keeps this program's schedule."""

    def __init__(
        self,
        optimizer: HasParamGroups,
        *plan: Any,
        position: Callable[[int], float] | None = None,
        use_checkpoint_opt_param_scheduler: bool = False,
        override_opt_param_scheduler: bool = False,
        **fields: Any,
    ) -> None:
        """Raises UserError for both options together, before anything else."""
        if use_checkpoint_opt_param_scheduler and override_opt_param_scheduler:
            raise UserError("--use-checkpoint- and --override-opt_param-scheduler exclude each other")
        self.optimizer = optimizer
        ready = len(plan) == 1 and not fields and isinstance(plan[0], SchedulePlan)
        self.plan: SchedulePlan = plan[0] if ready else SchedulePlan(*plan, **fields)
        self.use_checkpoint_opt_param_scheduler = use_checkpoint_opt_param_scheduler
        self.override_opt_param_scheduler = override_opt_param_scheduler
        self.num_steps = 0
        self._position = position
        self.step(0)

    def position(self, consumed_samples: int) -> float:
        """Return the position in the plan after ``consumed_samples``."""
        return consumed_samples if self._position is None else self._position(consumed_samples)

    def get_lr(self, param_group: dict) -> float:
        """Return the current learning rate of a group, without its ``lr_mult``."""
        position = self.position(self.num_steps)
        return learning_rate(self.plan, position, max_lr=param_group.get("max_lr"), min_lr=param_group.get("min_lr"))

    def get_wd(self, param_group: dict | None = None) -> float:
        """Return the current weight decay of a group (default: of the plan), without its ``wd_mult``."""
        group = param_group or {}
        position = self.position(self.num_steps)
        return decay_weight(self.plan, position, start_wd=group.get("start_wd"), end_wd=group.get("end_wd"))

    def set_samples(self, consumed_samples: int) -> None:
        """Write ``lr`` and ``weight_decay``, each times the group's multiplier, into all parameter groups."""
        self.num_steps = consumed_samples
        for group in self.optimizer.param_groups:
            group["lr"] = self.get_lr(group) * group.get("lr_mult", 1.0)
            group["weight_decay"] = self.get_wd(group) * group.get("wd_mult", 1.0)

    def step(self, increment: int) -> None:
        """Advance by ``increment`` samples and update all parameter groups."""
        self.set_samples(self.num_steps + increment)

    def state_dict(self) -> dict[str, object]:
        """Return the schedule and the position (``num_steps``, in samples) as plain numbers and strings."""
        return {**asdict(self.plan), "num_steps": self.num_steps}

    def load_state_dict(self, state_dict: dict[str, Any], consumed: int | None = None) -> None:
        """Restore the position and update all parameter groups. If the stored schedule differs, the constructor's
        options decide which one is used, and a warning lists the differences; ``wd_incr_steps`` is not compared if
        weight decay is constant. Raises UserError, with nothing changed, for other fields, or if they differ without an
        option; for another decay length with both options' rates at ``consumed`` samples (None: stored position)."""
        fields = dict(state_dict)
        num_steps = int(fields.pop("num_steps"))
        unknown = set(fields) ^ set(SchedulePlan.__dataclass_fields__)
        if unknown:
            raise UserError(f"the stored schedule has wrong fields: {', '.join(sorted(unknown))}")
        stored = SchedulePlan(**fields)
        ignored = {"wd_incr_steps"} if stored.wd_incr_style == self.plan.wd_incr_style == "constant" else set()
        differences = [
            f"{name}: checkpoint {saved!r}, now {current!r}"
            for name, saved in asdict(stored).items()
            if saved != (current := getattr(self.plan, name)) and name not in ignored
        ]
        if differences and self.use_checkpoint_opt_param_scheduler:
            logger.warning("taking the schedule of the checkpoint: %s", "; ".join(differences))
            self.plan = stored
        elif differences and self.override_opt_param_scheduler:
            logger.warning("overriding the schedule of the checkpoint: %s", "; ".join(differences))
        elif {name.partition(":")[0] for name in differences} - {"wd_incr_steps"} == {"lr_decay_steps"}:
            raise UserError(
                _other_length(stored, self.plan, num_steps if consumed is None else consumed, self.position)
            )
        elif differences:
            raise UserError(
                f"the learning rate schedule differs from the checkpoint's ({'; '.join(differences)}): give "
                "--override-opt_param-scheduler to use the flags, or --use-checkpoint-opt_param-scheduler to keep it"
            )
        self.set_samples(num_steps)


def _other_length(stored: SchedulePlan, now: SchedulePlan, num_steps: int, position: Callable[[int], float]) -> str:
    """Return the error message for a changed decay length, with the learning rates that each of the two flags gives."""
    at = position(num_steps)
    old, new = learning_rate(stored, at), learning_rate(now, at)
    final_rate = learning_rate(stored, max(now.lr_decay_steps, at))
    return (
        f"--train-iters, --train-samples or --lr-decay-iters: the learning rate now decays over {now.lr_decay_steps}"
        f" samples, in the checkpoint over {stored.lr_decay_steps}; to continue, add one of two flags."
        f" --override-opt_param-scheduler decays over the new length: at sample {num_steps} the rate is {new:.3g}"
        f" instead of {old:.3g}, in the end {now.min_lr:.3g}. --use-checkpoint-opt_param-scheduler keeps the stored"
        f" schedule: the rate ends at {final_rate:.3g}"
    )


def get_optimizer_param_scheduler(config: Any, optimizer: HasParamGroups) -> OptimizerParamScheduler:
    """Build the scheduler from the flags in ``config``. Raises UserError for an invalid schedule."""
    return OptimizerParamScheduler(
        optimizer,
        schedule_plan(config),
        position=partial(schedule_position, config),
        use_checkpoint_opt_param_scheduler=config.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=config.override_opt_param_scheduler,
    )
