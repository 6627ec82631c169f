"""Self-checks of a run: after the build, the ranks together hold the full model exactly once; during training, replicas
are equal. Also logs the layout."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core import parallel_state
from megatron.core.config.errors import EXIT_FAILED, UserError, counted, listed
from megatron.core.description.model import ModelDescription
from megatron.core.dist_checkpointing.exchange import all_gather_json
from megatron.core.distributed import check_replicas, unwrapped
from megatron.core.extensions.cudnn import require_one_cudnn
from megatron.core.groups.process_groups import ProcessGroups, RankGrid
from megatron.core.sharding.named_slices import stored_parameters
from megatron.core.sharding.placement import data_parallel_groups
from megatron.core.sharding.rectangles import Rectangle, coverage_problem
from megatron.core.sharding.sharded_tensor import stored_tensors
from megatron.training.components import Components
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.exits.conditions import every
from megatron.training.hooks.base import Hook
from megatron.training.observe.kinds.save import SAVING
from megatron.training.observe.metrics import StepMetrics
from megatron.training.observe.records import Record, RecordKind, RunInfo
from megatron.training.train_state import TrainState

logger = logging.getLogger(__name__)

FIRST_STEPS = 3
"""Number of first steps with a replica check (unless --check-replicas 0); most bugs show up there."""
_LAYER = re.compile(r"^(?:(.+?)\.|)layers\.(\d+)\.")
"""Groups: stack name and layer index."""


class BuildError(UserError):
    """The ranks do not hold the model exactly once."""


class ReplicasDiffer(UserError, ArithmeticError):
    """Replicas of a weight or an optimizer state differ."""

    exit_code = EXIT_FAILED


class Holding(NamedTuple):
    """Rectangle of a parameter that one rank holds."""

    name: str
    shape: tuple[int, ...]
    rectangle: Rectangle
    stage: int
    """Virtual stage: chunk x pipeline size + pipeline rank."""
    tied: bool


def check_build(parts: Components, cfg: PretrainConfig) -> None:
    """Log the layout, then check that the ranks hold the model exactly once and as the task's description,
    ``num_parameters()`` and --num-layers say (a description with another total is ignored). Collective over the world.
    Raises :class:`BuildError` on every rank that lists all problems; then UserError on a rank that loaded two cuDNN
    installations."""
    groups = parts.groups
    chunks = [unwrapped(chunk) for chunk in parts.model]
    everyone = all_gather_json(_local_rectangles(chunks, groups), groups.world)
    pieces = [
        Holding(name, tuple(shape), Rectangle(tuple(offsets), tuple(lengths)), stage, tied)
        for entries in everyone
        for name, shape, offsets, lengths, stage, tied in entries
    ]
    task, model = parts.task, parts.task.description()
    num_parameters = task.num_parameters()
    if model is not None and (model.unknown or model.num_parameters != num_parameters):
        model = None  # the task builds a model that the flags do not describe
    for line in describe_layout(parallel_state.get_rank_grid(), pieces, model):
        logger.info("%s", line)
    problems = list(find_problems(pieces, cfg.model.num_layers, num_parameters, model, type(task).__name__))
    if problems:
        raise BuildError("the model is not complete: " + "; ".join(problems))
    require_one_cudnn()


def _local_rectangles(chunks: Sequence[nn.Module], groups: ProcessGroups) -> list[list[object]]:
    """Return this rank's rectangles as JSON lists [name, global shape, offsets, lengths, virtual stage, tied], without
    replicas that an earlier data-parallel rank reports. DTensor shards are always included."""
    specs = [(name, getattr(p, "spec", None)) for chunk in chunks for name, p in stored_parameters(chunk)]
    tied = {s.tied_to or name for name, s in specs if s is not None and (s.tied_to or "embedding" in s.grad)}
    found = []
    for index, chunk in enumerate(chunks):
        stage = index * groups.pp.size + groups.pp.rank
        for name, parameter in stored_parameters(chunk):
            copies = data_parallel_groups(getattr(parameter, "spec", None), groups).reduce
            if copies.is_first or isinstance(parameter, DTensor):
                for each in stored_tensors(name, parameter, groups=groups).values():
                    place = [each.name, list(each.global_shape), *map(list, each.rectangle)]
                    found.append([*place, stage, each.name in tied])
    return found


def _layers_by_stack(model: ModelDescription | None, num_layers: int) -> Mapping[str, int]:
    """Return the number of layers by stack name (such as encoder), counted from the parameter names of the description.
    Returns {"": num_layers} without a description, which matches any stack."""
    found: dict[str, int] = {}
    for branches in () if model is None else model.layers:
        names = {match[1] or "" for branch in branches for each in branch.params if (match := _LAYER.search(each.name))}
        for name in names:
            found[name] = found.get(name, 0) + 1
    return found or {"": num_layers}


def find_problems(
    pieces: Iterable[Holding],
    num_layers: int,
    num_parameters: int | None,
    model: ModelDescription | None = None,
    task: str = "the task",
) -> Iterable[str]:
    """Yield messages for missing or surplus layers, differences from the description, untied parameters on several
    stages, different global shapes, rectangles that do not cover a parameter exactly once, and a wrong total count.
    ``num_parameters`` and ``model`` describe the full model (None: unknown); ``task``: for messages."""
    by_name: dict[str, list[Holding]] = {}
    for piece in pieces:
        by_name.setdefault(piece.name, []).append(piece)
    if held := _by_layer(by_name):
        yield from _wrong_layers(held.keys(), _layers_by_stack(model, num_layers))
    if model is not None:
        yield from _differences(model, {name: own[0].shape for name, own in by_name.items()})
    doubled: dict[tuple[int, ...], list[str]] = {}
    total = 0
    for name, own in by_name.items():
        holders = tuple(sorted({piece.stage for piece in own}))
        if len(holders) > 1 and not any(piece.tied for piece in own):
            doubled.setdefault(holders, []).append(name)
        shapes = {piece.shape for piece in own}
        if len(shapes) > 1:
            yield f"{name} has the shape {' and '.join(map(str, sorted(shapes)))} on different ranks"
            continue
        rectangles = {piece.rectangle for piece in own}
        total += sum(each.numel for each in rectangles)
        if problem := coverage_problem(own[0].shape, rectangles):
            yield f"{name}: the ranks {problem}"
    for stages, names in doubled.items():
        yield f"{listed(names, most=3)} on stages {' and '.join(map(str, stages))}, without being tied"
    if num_parameters is not None and total != num_parameters:
        yield (
            f"the ranks hold {total:,} parameters, {task}.num_parameters() makes {num_parameters:,} of the settings; "
            "for a model of your own let it return that model's number, or None"
        )


def _wrong_layers(held: Iterable[tuple[str, int]], stacks: Mapping[str, int]) -> Iterable[str]:
    """Yield one message per stack for layers that no rank holds, and one for layers beyond the expected number.
    ``held``: (stack, 0-based index); messages count from 1. The stack name "" matches all stacks."""
    for stack, num_layers in stacks.items():
        layers = {index for name, index in held if stack in ("", name)}
        of, flag = (f" of the {stack}", "") if len(stacks) > 1 else ("", "--num-layers ")
        if missing := sorted(set(range(num_layers)) - layers):
            yield f"{_layers(missing, of)} on no rank"
        if surplus := sorted(layers - set(range(num_layers))):
            yield f"{_layers(surplus, of)} beyond {flag}{num_layers}"


def _differences(model: ModelDescription, built: Mapping[str, tuple[int, ...]]) -> Iterable[str]:
    """Yield differences between built and described parameters: a branch or parameter on no rank, another number of
    elements, or built names without a description. Layers that are missing completely are left to `_wrong_layers`."""
    described = {each.name: each.shape for each in model.params() if each.tied_to is None}
    for index, branches in enumerate(model.layers):
        absent = [branch for branch in branches if not any(each.name in built for each in branch.params)]
        if len(absent) < len(branches):  # else the full layer is missing and already reported
            yield from (f"the {branch.name} branch of layer {index + 1} is on no rank" for branch in absent)
        for param in (param for branch in absent for param in branch.params):
            described.pop(param.name, None)
    for name, shape in described.items():
        if name not in built:
            yield f"{name} is on no rank"
        elif math.prod(built[name]) != math.prod(shape):
            yield f"{name} has the shape {built[name]}, the settings make {shape}"
    if surplus := sorted(built.keys() - {each.name for each in model.params()}):
        yield f"the settings make no {listed(surplus, most=3)}"


def _layers(indices: Sequence[int], of: str = "") -> str:
    numbers = listed((index + 1 for index in indices), most=8)
    return f"layer {numbers}{of} is" if len(indices) == 1 else f"layers {numbers}{of} are"


# ---- text of the layout


def describe_layout(grid: RankGrid, pieces: Sequence[Holding], model: ModelDescription | None = None) -> Iterable[str]:
    """Yield lines for the log: the rank grid, the rank groups of each axis with more than one rank (at most 8 lists of
    8 ranks), and per virtual stage its ranks, contents and parameter count. Logs nothing itself."""
    sizes = " x ".join(f"{name} {getattr(grid, axis)}" for axis, name in _AXES.items())
    yield f"layout: {counted(grid.world_size, 'rank')} = {sizes}; order {grid.order}, fastest first"
    for axis, name in _AXES.items():
        if getattr(grid, axis) > 1:
            yield f"  {name + ' ranks':<15} {_shown(grid.rank_lists(axis))}"
    layers = () if model is None else model.layers
    branches = {each.name: branch.name for layer in layers for branch in layer for each in branch.params}
    everywhere = {piece.name for piece in pieces}
    for stage in sorted({piece.stage for piece in pieces}):
        own = {piece for piece in pieces if piece.stage == stage}
        ranks = sorted(ranks[stage % grid.pp] for ranks in grid.rank_lists("pp"))
        held = sum(piece.rectangle.numel for piece in own)
        contents = _contents(own, stage, everywhere, branches)
        yield f"  stage {stage} (ranks {_span(ranks)}): {contents}; {held:,} parameters"


_AXES = {"tp": "tensor", "cp": "context", "dp": "data", "pp": "pipeline"}


def _shown(lists: Sequence[Sequence[int]]) -> str:
    text = " ".join(f"[{' '.join(map(str, ranks[:8]))}{' …' if len(ranks) > 8 else ''}]" for ranks in lists[:8])
    return text + (f" … {len(lists)} groups" if len(lists) > 8 else "")


def _span(numbers: Sequence[int]) -> str:
    """Return sorted numbers as text, with runs of consecutive numbers as ranges: ``1-4, 7``. Two consecutive numbers
    also form a range. Empty text for no numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _contents(pieces: Iterable[Holding], stage: int, everywhere: set[str], branches: Mapping[str, str]) -> str:
    """Return the contents of one stage as text: embedding (on a later ``stage``: tied output layer), layer ranges from
    1 per stack, final norm, output layer. ``pieces``: of this stage only. ``everywhere``: the union of the names of all
    stages; a layer that lacks some of its names is given by its ``branches`` (name -> branch)."""
    names, whole = {piece.name for piece in pieces}, _by_layer(everywhere)
    embedding = any(name.startswith("embedding.") for name in names)
    parts = ["embedding"] if embedding and stage == 0 else []
    several = len({stack for stack, _ in whole} - {"mtp"}) > 1
    runs: dict[tuple[str, str], list[int]] = {}  # (stack, held branches) -> layers
    for (stack, layer), own in sorted(_by_layer(names).items(), key=lambda each: (each[0][0] != "encoder", each[0])):
        held = dict.fromkeys(branches.get(name, "a part") for name in sorted(own))
        what = "" if own == whole[stack, layer] else f"{' and '.join(held)} of "
        runs.setdefault((stack if several or stack == "mtp" else "", what), []).append(layer + 1)
    for (stack, what), numbers in sorted(runs.items(), key=lambda run: (run[0][0] != "encoder", run[1])):
        parts.append(f"{what}{stack}{' ' * bool(stack)}layer{'s' if len(numbers) > 1 else ''} {_span(numbers)}")
    parts += ["final norm"] if any("final_layernorm" in name for name in names) else []
    parts += ["output layer"] if any("output_layer." in name for name in names) else []
    parts += ["output layer (tied)"] if embedding and stage > 0 else []
    return " + ".join(parts) or ", ".join(sorted(names)[:4]) or "nothing"


def _by_layer(names: Iterable[str]) -> dict[tuple[str, int], set[str]]:
    """Return {(stack, layer index from 0): parameter names}. Skips names outside of layers."""
    found: dict[tuple[str, int], set[str]] = {}
    for name in names:
        if match := _LAYER.search(name):
            found.setdefault((match[1] or "", int(match[2])), set()).add(name)
    return found


# ---- replicas


class ReplicaCheck(Hook):
    """Hook that compares all replicated state bit by bit in the first steps, before saves and every ``interval``."""

    kinds = (SAVING,)

    def __init__(self, interval: int | None, parts: Components) -> None:
        self.interval, self.parts = interval, parts
        self.first = parts.state.iteration

    def on_start(self, run: RunInfo) -> None:
        self.first = run.state.iteration

    def on_step(self, state: TrainState, metrics: StepMetrics) -> None:
        if state.iteration - self.first <= FIRST_STEPS or every(self.interval, state.iteration):
            self.check(state.iteration)

    def on_record(self, kind: RecordKind, record: Record) -> None:
        self.check(record["iteration"])

    def check(self, iteration: int) -> None:
        """Compare all replicated weights and optimizer state of all ranks bit by bit. Raise :class:`ReplicasDiffer` on
        every rank if any differ; it names parameters and ranks. Collective over the world; waits for the device."""
        parts = self.parts
        found = check_replicas(parts.model, parts.groups, parts.optimizer.replicas())
        everywhere = all_gather_json([list(each) for each in found], parts.groups.world)
        apart = sorted({(name, rank, axis) for entries in everywhere for name, rank, axis in entries})
        if apart:
            shown = listed((f"{name} on rank {rank}" for name, rank, _ in apart), "; ", most=8)
            raise ReplicasDiffer(
                f"iteration {iteration}: copies differ from those of the first rank that holds them: {shown}"
            )


def replica_checks(cfg: PretrainConfig, parts: Components) -> list[Hook]:
    """Return the hook; empty with --check-replicas 0 or a single rank."""
    if cfg.checks.check_replicas == 0 or parts.groups.world.size == 1:
        return []
    return [ReplicaCheck(cfg.checks.check_replicas, parts)]
