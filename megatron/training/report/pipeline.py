"""Pipeline report: contents of the stages, bubble fraction, activations in flight and timeline. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate

from megatron.core.description.model import ModelDescription, Piece
from megatron.core.pipeline_parallel import choose
from megatron.core.pipeline_parallel.actions import Action, Schedule
from megatron.core.pipeline_parallel.simulate import CostFunction, Timeline, peak_activations, simulate
from megatron.core.pipeline_parallel.stages import StageContents, pipeline_stages, virtual_pipeline_size
from megatron.training.config.pretrain_config import PretrainConfig


def run_stages(
    cfg: PretrainConfig, vocab_size: int | None, model: ModelDescription | None = None
) -> list[StageContents]:
    """Return the stages of a run. With unknown ``vocab_size`` all layers have equal cost and are not split. ``model``:
    the description of ``cfg``, if the caller has it."""
    costs = (cfg.describe(vocab_size or 0) if model is None else model).costs
    return pipeline_stages(cfg.model, costs._replace(layers=None) if vocab_size is None else costs)


def layers_held(model: ModelDescription, stage: StageContents) -> list[list[Piece]]:
    """Return the residual branches of a stage, grouped by layer."""
    return [[model.layers[part.layer][branch] for branch in part.branches] for part in stage.parts]


def stage_pieces(model: ModelDescription, stage: StageContents) -> list[Piece]:
    """Return the contents of a stage in order: embedding, residual branches, head, prediction layers. A stage with
    multi-token prediction but without the embedding begins with a tied copy of it."""
    branches = [branch for layer in layers_held(model, stage) for branch in layer]
    first = [model.embedding] * stage.embedding
    if stage.num_mtp and not stage.embedding:
        copies = tuple(replace(param, tied_to=param.name) for param in model.embedding.params)
        first = [Piece("copy of the embedding", copies)]
    return first + branches + [model.head] * stage.loss + [*model.predictions] * bool(stage.num_mtp)


def run_schedule(cfg: PretrainConfig, num_microbatches: int) -> Schedule:
    """Return the pipeline schedule of ``num_microbatches`` micro-batches."""
    return choose.build_schedule(
        cfg.model, cfg.model.pipeline_model_parallel_size, virtual_pipeline_size(cfg.model), num_microbatches
    )


def action_costs(cfg: PretrainConfig, schedule: Schedule, vocab_size: int | None) -> CostFunction:
    """Return the cost function of actions, in forward passes of one layer: F costs the stage's layers and output layer;
    B and W cost the same each, or B twice as much if the schedule does not split the backward pass."""
    costs = cfg.describe(vocab_size or 0).costs
    before = [0.0, *accumulate(costs.branches)]
    stages = run_stages(cfg, vocab_size)
    forward = [before[stage.branches.stop] - before[stage.branches.start] for stage in stages]
    forward[-1] += costs.head
    backward = 1 if schedule.splits_backward else 2  # evaluated once: the property scans all actions

    def cost(stage: int, action: Action) -> float:
        return forward[stage] * (backward if action.kind == "B" else 1)

    return cost


def simulated_timeline(cfg: PretrainConfig, num_microbatches: int, vocab_size: int | None) -> Timeline:
    """Return a simulated iteration with free communication. DeadlockError if the schedule does not terminate."""
    schedule = run_schedule(cfg, num_microbatches)
    return simulate(schedule, action_costs(cfg, schedule, vocab_size))


def count_microbatches(cfg: PretrainConfig) -> int:
    """Return the number of micro-batches per pipeline in a full global batch."""
    return cfg.training.global_batch_size // (cfg.training.micro_batch_size * cfg.data_parallel_size)


def steady_round(cfg: PretrainConfig) -> int:
    """Return the number of micro-batches after which the steady state of a schedule repeats."""
    return cfg.model.microbatch_group_size_per_virtual_pipeline_stage or cfg.model.pipeline_model_parallel_size


def enough_microbatches(cfg: PretrainConfig) -> int:
    """Return at most the global batch's number of micro-batches, with the same peaks. A longer schedule only repeats
    its steady state, and simulating millions of micro-batches would take minutes."""
    number, ranks = count_microbatches(cfg), cfg.model.pipeline_model_parallel_size
    if ranks == 1:
        return 1
    rounds = -(-3 * max(steady_round(cfg), ranks) // steady_round(cfg)) * steady_round(cfg)
    return number if number < 2 * rounds else rounds + number % steady_round(cfg)


def batch_seconds(cfg: PretrainConfig, timeline: Callable[[int], Timeline]) -> tuple[float, float]:
    """Return the seconds of a global batch and the idle share, by ``timeline(number)`` of micro-batches. Long schedules
    are simulated in part and extrapolated by one steady round, which takes at least the busiest rank's time: a rank
    that is slower than the others by little is only waited for when many micro-batches have passed."""
    number, few, steady = count_microbatches(cfg), enough_microbatches(cfg), steady_round(cfg)
    simulated = timeline(few)
    seconds, busy = simulated.duration, [simulated.busy(rank) / few for rank in range(simulated.schedule.num_ranks)]
    if few < number:
        a_round = max(seconds - timeline(few - steady).duration, steady * max(busy))
        seconds += a_round * (number - few) / steady
    return seconds, 1 - sum(busy) * number / (seconds * len(busy))


def bubble_fraction(cfg: PretrainConfig, vocab_size: int | None) -> float:
    """Return the bubble fraction, the share of time (0 to 1) that ranks wait, by FLOPs without communication."""
    return batch_seconds(cfg, lambda number: simulated_timeline(cfg, number, vocab_size))[1]


def peak_layers(cfg: PretrainConfig, schedule: Schedule, vocab_size: int | None) -> list[float]:
    """Return the maximum number of (layer, micro-batch) activations in flight, per rank."""
    stages = run_stages(cfg, vocab_size)
    return peak_activations(schedule, weight=lambda stage: stages[stage].num_layers)


def pipeline_rows(cfg: PretrainConfig, vocab_size: int | None) -> Iterator[tuple[str, str]]:
    """Yield rows of the report per pipeline rank; nothing with one pipeline rank."""
    ranks = cfg.model.pipeline_model_parallel_size
    if ranks == 1:
        return
    stages = run_stages(cfg, vocab_size)
    for rank in range(ranks):
        yield f"pipeline rank {rank}", "; ".join(str(stage) for stage in stages[rank::ranks])
    schedule = run_schedule(cfg, enough_microbatches(cfg))
    yield "schedule", f"{schedule.name}, {schedule.num_chunks} per rank, {count_microbatches(cfg)} micro-batches"
    yield "bubble", f"{bubble_fraction(cfg, vocab_size):.1%} of the time, by FLOPs, without communication"
    peaks = ", ".join(f"{peak:g}" for peak in peak_layers(cfg, schedule, vocab_size))
    yield "layers x micro-batches alive", f"at most {peaks} by rank"
