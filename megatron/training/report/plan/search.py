"""Search for layouts: enumerate, prune by divisibility, bounds, rules and memory, rank by time. Torch-free."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron.core.config.errors import UserError
from megatron.training.config.flat import FlatConfig
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.resolve import resolve
from megatron.training.report.advice import LIBRARIES_GIB
from megatron.training.report.memory import estimate_memory
from megatron.training.report.plan.bounds import Bounds
from megatron.training.report.plan.cluster import Cluster
from megatron.training.report.plan.step_time import StepTime, predict_step
from megatron.training.rules.run_all import check

HEADROOM = 0.94
"""Share of GPU memory that a plan fills; the allocator's fragments need the rest."""
MOST_LAYOUTS = 20_000
REFINED = 48
"""Layouts whose pipelines are simulated; all others are ranked with a closed form."""
TIE, TIE_OF_EXPERTS = 0.03, 0.10
"""Relative differences that the model cannot resolve: its errors on measured rows (docs/guides/planning.md)."""
RECOMPUTATION: tuple[dict[str, object], ...] = (
    {"recompute_granularity": None},
    {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mlp_act"]},
    {"recompute_granularity": "selective", "recompute_modules": ["mlp_act"]},  # with fp8
    {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "moe_act"]},
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
)
"""From the fastest to the one that saves the most memory."""

Values = dict[str, object]


def recomputation(cfg: PretrainConfig) -> list[Values]:
    """Return :data:`RECOMPUTATION`, with the recurrences of the model at each selective level, and at one of their own:
    their chunks are the most that layers save."""
    ops = (op for piece in cfg.describe(0).pieces for op in piece.ops if op.kind == "recurrence")
    # the first module is the site of the operation, another the branch around it
    if not (sites := sorted({saved.modules[0] for op in ops for saved in op.saved})):
        return [*RECOMPUTATION]
    alone: Values = {"recompute_granularity": "selective", "recompute_modules": sites}
    modules = [level.get("recompute_modules") for level in RECOMPUTATION]
    levels = [
        {**level, "recompute_modules": [*names, *sites]} if isinstance(names, list) else level
        for level, names in zip(RECOMPUTATION, modules)
    ]
    return [levels[0], alone, *levels[1:]]


@dataclass(frozen=True)
class Layout:
    """A layout that fits, with its prediction."""

    values: Mapping[str, object]
    """Changed settings by field."""
    cfg: PretrainConfig
    memory: int
    """Bytes on the fullest rank."""
    time: StepTime

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second and GPU."""
        return self.cfg.training.global_batch_size * self.cfg.data.seq_length / self.time.seconds / self.cfg.world_size

    @property
    def flags(self) -> str:
        """Command-line flags of the layout."""
        words = []
        for name, value in self.values.items():
            flag = f"--{name.replace('_', '-')}"
            if (
                name == "eval_micro_batch_size"
                or value == getattr(FlatConfig, name, None)
                and name != "micro_batch_size"
            ):
                continue
            if isinstance(value, list):
                words.append(" ".join([flag, *map(str, value)]))
            else:
                words.append(flag if value is True else f"{flag} {value}")
        return " ".join(words)


@dataclass
class Search:
    """Result of a search: layouts, fastest first, and the number of candidates that each step removed."""

    layouts: list[Layout]
    tried: int = 0
    rejected: int = 0
    too_large: int = 0
    slower: int = 0
    """Candidates that are slower than the layouts that are kept."""
    smallest: float = float("inf")
    """Bytes of the candidate that needs the least memory."""
    reason: str = ""
    """Last message of a rule."""

    def ties(self) -> list[Layout]:
        """Return the layouts whose difference to the fastest is below the model's error."""
        if not self.layouts:
            return []
        experts = self.layouts[0].cfg.model.num_moe_experts is not None
        limit = self.layouts[0].time.seconds * (1 + (TIE_OF_EXPERTS if experts else TIE))
        return [layout for layout in self.layouts if layout.time.seconds <= limit]


def divisors(number: int, most: int) -> list[int]:
    """Return the divisors of ``number`` up to ``most``, ascending."""
    return [divisor for divisor in range(1, min(number, most) + 1) if number % divisor == 0]


def _free(cfg: PretrainConfig, field: str, values: list[int]) -> list[int]:
    return [getattr(cfg.flat, field)] if field in cfg.explicit else values


def _powers(most: int) -> list[int]:
    return [2**exponent for exponent in range(most.bit_length()) if 2**exponent <= most]


def layout_sizes(cfg: PretrainConfig, resolved: PretrainConfig, cluster: Cluster) -> Iterator[Values]:
    """Yield sizes of parallel axes that divide the model and the cluster; TP stays inside a node."""
    model, world = resolved.model, cluster.world_size
    experts, layers = model.num_moe_experts, model.num_layers
    tps = [size for size in divisors(model.num_attention_heads, cluster.gpus_per_node) if world % size == 0]
    cps = _powers(min(world, resolved.data.seq_length // 4096 or 1))
    pps = [size for size in divisors(layers, world) if world % size == 0]
    pps += [size for size in (2, 4, 8, 16) if size not in pps and size * 2 <= layers and world % size == 0]
    for tp, cp, pp in itertools.product(
        _free(cfg, "tensor_model_parallel_size", tps),
        _free(cfg, "context_parallel_size", cps),
        _free(cfg, "pipeline_model_parallel_size", pps),
    ):
        if world % (tp * cp * pp) or resolved.data.seq_length % (2 * cp * tp if cp > 1 else tp):
            continue
        dp = world // (tp * cp * pp)
        if resolved.training.global_batch_size % dp:
            continue
        eps = (
            [1] if experts is None else [size for size in divisors(experts, tp * cp * dp) if (tp * cp * dp) % size == 0]
        )
        for ep in _free(cfg, "expert_model_parallel_size", eps):
            yield {
                "tensor_model_parallel_size": tp,
                "context_parallel_size": cp,
                "pipeline_model_parallel_size": pp,
                "expert_model_parallel_size": ep,
                **({"expert_tensor_parallel_size": 1} if experts and tp > 1 else {}),
            }


def layout_variants(cfg: PretrainConfig, resolved: PretrainConfig, sizes: Values, dp: int) -> Iterator[Values]:
    """Yield the other settings of a layout: micro-batch, virtual stages or zero-bubble schedule, sharding, overlap."""
    tp, cp, pp = (int(str(sizes[f"{axis}_parallel_size"])) for axis in ("tensor_model", "context", "pipeline_model"))
    microbatches = _free(cfg, "micro_batch_size", _powers(min(8, resolved.training.global_batch_size // dp)))
    fixed = {"pipeline_schedule", "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"}
    schedules: list[Values] = [{}]
    if pp > 1 and not fixed & cfg.explicit:
        chunks = [size for size in divisors(-(-resolved.model.num_layers // pp), 8) if size > 1]
        schedules += [{"num_virtual_stages_per_pipeline_rank": size} for size in chunks]
        schedules += [{"pipeline_schedule": "zero-bubble"}, {"pipeline_schedule": "zero-bubble-h2"}]
    shared = dp * cp > 1
    shardings: list[Values] = [{}]
    if shared and "use_torch_fsdp2" not in cfg.explicit:
        zero: Values = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
        shardings = [zero] + [{"use_torch_fsdp2": True}] * (pp == 1 and tp == 1)
    links: Values = {"sequence_parallel": True, "tp_comm_overlap": True} if tp > 1 else {}
    comm: list[Values] = [{}, {"cp_comm_type": ["a2a"]}] if cp > 1 and "cp_comm_type" not in cfg.explicit else [{}]
    for schedule, sharding, kind, size in itertools.product(schedules, shardings, comm, microbatches):
        used = {**sizes, **links, **schedule, **sharding, **kind}
        yield {**used, "micro_batch_size": size, "eval_micro_batch_size": size}


def apply(cfg: PretrainConfig, values: Mapping[str, object], world_size: int) -> PretrainConfig | str:
    """Return a resolved copy of ``cfg`` with ``values``, or the message of a rule that rejects it."""
    changed = cfg.with_settings(**{"dry_run": True, **values, "explicit": cfg.explicit | values.keys()})
    try:
        candidate = resolve(changed, world_size, gpus=True)
        problems = check(candidate)
    except UserError as error:
        return str(error)
    return str(problems[0]) if problems else candidate


class _Best:
    """The :data:`REFINED` fastest layouts so far, by (closed-form seconds, index of the candidate)."""

    def __init__(self) -> None:
        self.items: list[tuple[float, int, Layout]] = []

    @property
    def limit(self) -> float:
        """Seconds above which a layout is not among them."""
        return self.items[-1][0] if len(self.items) == REFINED else float("inf")

    def add(self, index: int, layout: Layout) -> None:
        bisect.insort(self.items, (layout.time.seconds, index, layout), key=lambda item: item[:2])
        del self.items[REFINED:]


def search(
    cfg: PretrainConfig, cluster: Cluster, vocab_size: int, notify: Callable[[str], None] = lambda text: None
) -> Search:
    """Return the fastest layouts of the model in ``cfg`` that fit the cluster. Candidates are predicted in the order of
    a lower bound on their time, until the bound exceeds the time of the slowest layout that is kept; the result is the
    one of predicting all candidates. Raises UserError if the model's own settings are wrong."""
    base = resolve(cfg, cluster.world_size, gpus=True)
    levels = [{}] if "recompute_granularity" in cfg.explicit else recomputation(base)
    bounds = Bounds(base, cluster, vocab_size, lambda values: apply(cfg, {**values, **levels[0]}, cluster.world_size))
    result, best = Search([]), _Best()
    candidates = list(itertools.islice(_candidates(cfg, base, cluster), MOST_LAYOUTS + 1))
    if len(candidates) > MOST_LAYOUTS:
        notify(f"only the first {MOST_LAYOUTS:,} candidates are searched: fix some sizes on the command line")
        del candidates[MOST_LAYOUTS:]
    result.tried = len(candidates)
    room = _room(cluster)
    pruned = [index for index, values in enumerate(candidates) if bounds.bytes(values) > room]
    order = sorted((bounds.seconds(candidates[index]), index) for index in {*range(result.tried)} - {*pruned})
    smallest_too_large: dict[object, int] = {}
    for number, (seconds, index) in enumerate(order):
        if seconds > best.limit:
            result.slower += len(order) - number
            break
        values = candidates[index]
        # a micro-batch that does not fit excludes larger ones of the same layout
        kind = tuple((name, str(value)) for name, value in values.items() if "micro_batch_size" not in name)
        size = int(str(values["micro_batch_size"]))
        if size > smallest_too_large.get(kind, size):
            result.too_large += 1
        elif not _add_fitting(result, best, index, _Trial(cfg, values, levels, bounds)):
            smallest_too_large[kind] = size
    result.too_large += len(pruned)
    if not best.items:
        _find_smallest(result, [_Trial(cfg, candidates[index], levels, bounds) for index in pruned])
    result.layouts = [layout for _, _, layout in best.items]
    return _ranked(result, cluster, vocab_size)


def _room(cluster: Cluster) -> float:
    return HEADROOM * (cluster.gpu.memory_gib - LIBRARIES_GIB) * 2**30


def _candidates(cfg: PretrainConfig, base: PretrainConfig, cluster: Cluster) -> Iterator[Values]:
    for sizes in layout_sizes(cfg, base, cluster):
        dp = cluster.world_size
        for axis in ("tensor_model", "context", "pipeline_model"):
            dp //= int(str(sizes[f"{axis}_parallel_size"]))
        yield from layout_variants(cfg, base, sizes, dp)


@dataclass
class _Trial:
    """A candidate, with its settings at each level of recomputation."""

    cfg: PretrainConfig
    values: Values
    levels: Sequence[Values]
    bounds: Bounds

    def at(self, index: int) -> PretrainConfig | str:
        """Return the settings at a level, or the message of a rule that rejects them."""
        return apply(self.cfg, {**self.values, **self.levels[index]}, self.bounds.cluster.world_size)

    def layout(self, cfg: PretrainConfig, index: int, memory: int) -> Layout:
        values, bounds = {**self.values, **self.levels[index]}, self.bounds
        model = bounds.describe(cfg, values)
        time = predict_step(cfg, bounds.cluster, bounds.vocab_size, rough=True, model=model)
        return Layout(values, cfg, memory, time)

    def memory(self, cfg: PretrainConfig, index: int) -> int:
        model = self.bounds.describe(cfg, {**self.values, **self.levels[index]})
        return max(rank.total for rank in estimate_memory(cfg, self.bounds.vocab_size, model))


def _add_fitting(result: Search, best: _Best, index: int, trial: _Trial) -> bool:
    """Add the candidate with the least recomputation that fits, unless that is too slow; False if it is too large at
    every level. The last level, which needs the least memory, is tried second."""
    room, last = _room(trial.bounds.cluster), len(trial.levels) - 1
    fitting: dict[int, tuple[PretrainConfig, int]] = {}
    rejected = timed = False
    for level in dict.fromkeys([0, last, *range(last)]):
        cfg = trial.at(level)
        if isinstance(cfg, str):
            result.reason, rejected = cfg, True
            continue
        if not timed and level < last and trial.layout(cfg, level, 0).time.seconds > best.limit:
            result.slower += 1
            return True
        timed = timed or level < last
        memory = trial.memory(cfg, level)
        result.smallest = min(result.smallest, memory)
        if memory <= room:
            fitting[level] = cfg, memory
            if level != last or last == 0:
                break
        elif level == last:
            result.too_large += 1
            return False
        else:
            rejected = False
    if not fitting:
        result.rejected += rejected
        result.too_large += not rejected
        return rejected
    level = min(fitting)
    layout = trial.layout(fitting[level][0], level, fitting[level][1])
    if layout.time.seconds <= best.limit:
        best.add(index, layout)
    else:
        result.slower += 1
    return True


def _find_smallest(result: Search, trials: Sequence[_Trial]) -> None:
    """Set the memory of the smallest candidate, for the message if none fits."""
    for bound, trial in sorted(
        ((trial.bounds.bytes(trial.values), trial) for trial in trials), key=lambda trial: trial[0]
    ):
        if bound >= result.smallest:
            return
        level = len(trial.levels) - 1
        cfg = trial.at(level)
        if not isinstance(cfg, str):
            result.smallest = min(result.smallest, trial.memory(cfg, level))


def _ranked(result: Search, cluster: Cluster, vocab_size: int) -> Search:
    """Sort by time after a simulation of the pipelines; of equal times the simplest first."""
    best = [replace(layout, time=predict_step(layout.cfg, cluster, vocab_size)) for layout in result.layouts]
    result.layouts = sorted(best, key=lambda layout: (layout.time.seconds, len(layout.values)))
    return result
