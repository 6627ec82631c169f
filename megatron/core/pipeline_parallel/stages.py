"""Contents of the pipeline stages, a pure function of the configuration. Torch-free.

Models, rules, self-checks and ``--dry-run`` all use it. A pipeline of P ranks with V model chunks per rank has P x V
*stages*, which a micro-batch visits in order; stage ``s`` is chunk ``s // P`` of rank ``s % P``. Every stage holds
consecutive residual branches, the first stage also the embedding, and the last stage also the output layer and the
loss. Layers can be split between branches, because the residual stream is the only tensor between branches.

Without a user-defined layout the split minimizes the cost of the slowest stage (``balance.py``)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from megatron.core.pipeline_parallel.balance import LayoutError, ModelCosts, balanced_counts, shared_out, slowest

PipelineShape = Any
"""Any resolved configuration with the fields of ``PipelineConfig``, the pipeline size and the network sizes."""

DECODER_LAYER = ("attention", "feed-forward")
"""Default branch names of a layer."""

BranchNames = Sequence[Sequence[str]]
"""Names of the branches of each layer, for messages."""


class LayerPart(NamedTuple):
    """Branches of one layer that a stage holds."""

    layer: int
    """Global layer index, from 0."""
    branches: range
    """Branch indices within the layer."""
    names: Sequence[str]
    """Names of all branches of the layer, including those on other stages."""

    @property
    def is_whole(self) -> bool:
        return len(self.branches) == len(self.names)


def layer_parts(branches: range, names: BranchNames) -> Iterator[LayerPart]:
    """Yield a ``LayerPart`` for each layer with branches in the range ``branches`` (indices from 0 over the full
    model), in order. The first and last may be parts of layers; their branch indices count within the layer."""
    first = 0
    for layer, branches_of_layer in enumerate(names):
        local = range(max(branches.start - first, 0), min(branches.stop - first, len(branches_of_layer)))
        if local:
            yield LayerPart(layer, local, branches_of_layer)
        first += len(branches_of_layer)


def layer_branch_costs(layers: range, names: BranchNames) -> range:
    """Return the branch range (indices from 0 over the full model) of a range of layers."""
    before = [0, *accumulate(map(len, names))]
    return range(before[layers.start], before[layers.stop])


@dataclass(frozen=True)
class StageContents:
    """Contents of one stage. ``str()`` describes it as text, with layers numbered from 1."""

    stage: int
    """Stage index, from 0."""
    branches: range
    """Branches of the stage, indices from 0 over the full model."""
    names: BranchNames = field(repr=False)
    """Branch names of every layer of the full model."""
    embedding: bool = False
    """Whether the stage holds the embedding."""
    loss: bool = False
    """Whether the stage holds the output layer and the loss."""
    num_mtp: int = 0
    """Number of multi-token prediction layers."""

    @cached_property
    def parts(self) -> list[LayerPart]:
        """Branches of the stage, grouped by layer."""
        return list(layer_parts(self.branches, self.names))

    @property
    def num_layers(self) -> float:
        """Number of layers; a split layer counts as a fraction, its branches on this stage / all its branches."""
        return sum(len(part.branches) / len(part.names) for part in self.parts)

    @property
    def cuts_layers(self) -> bool:
        """Whether the stage begins or ends inside a layer."""
        return not all(part.is_whole for part in self.parts)

    def __str__(self) -> str:
        """Return text such as ``embedding + attention of layer 1 + layers 2-3 + loss + multi-token prediction``, with
        layers from 1 and ranges of full layers joined; "nothing" for an empty stage."""
        labels = ["embedding"] if self.embedding else []
        full: list[int] = []
        for part in [*self.parts, None]:
            if part is not None and part.is_whole:
                full.append(part.layer + 1)
                continue
            if full:
                labels.append(f"layer {full[0]}" if len(full) == 1 else f"layers {full[0]}-{full[-1]}")
                full = []
            if part is not None:
                labels_of_part = " and ".join(part.names[branch] for branch in part.branches)
                labels.append(f"{labels_of_part} of layer {part.layer + 1}")
        ends = (["loss"] if self.loss else []) + (["multi-token prediction"] if self.num_mtp else [])
        return " + ".join(labels + ends) or "nothing"


# ---- layout strings


_MAX_ENTRIES = 10_000
_MAX_DEPTH = 50


class _LayoutParser:
    """Recursive-descent parser of ``item*``, item = (char | "(" items ")") ["*" number]. Ignores commas and blanks."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.depth = text, 0, 0

    def fail(self, reason: str, at: int | None = None) -> LayoutError:
        return LayoutError(f"{reason} at position {(self.at if at is None else at) + 1} of {self.text!r}")

    def peek(self) -> str:
        while self.at < len(self.text) and self.text[self.at] in ", \t\n":
            self.at += 1
        return self.text[self.at] if self.at < len(self.text) else ""

    def items(self, closing: str) -> list[tuple[str, int]]:
        """Return (symbol, position) pairs up to and including ``closing`` (")", or "" for the end), with repetitions
        expanded. LayoutError for a syntax error, more than 10,000 entries or 50 nested parentheses."""
        result: list[tuple[str, int]] = []
        while (symbol := self.peek()) != closing:
            begin = self.at
            if symbol == "(":
                self.at += 1
                self.depth += 1
                if self.depth > _MAX_DEPTH:
                    raise self.fail(f"more than {_MAX_DEPTH} parentheses in one another", begin)
                item = self.items(")")
                self.depth -= 1
            elif symbol and symbol in "EtafmL|":
                self.at += 1
                item = [(symbol, begin)]
            elif not symbol:
                raise self.fail("a parenthesis is not closed")
            else:
                raise self.fail(f"{symbol!r} means nothing; E, t, a, f, m, L, | and parentheses do")
            repetitions = self.repetitions()
            if len(result) + len(item) * repetitions > _MAX_ENTRIES:
                raise self.fail(f"more than {_MAX_ENTRIES} entries", begin)
            result += item * repetitions
        self.at += 1
        return result

    def repetitions(self) -> int:
        """Return the number of an optional ``*`` and number, which may be 0; 1 without. LayoutError if no digit
        follows, or more than nine."""
        if self.peek() != "*":
            return 1
        self.at += 1
        self.peek()
        begin = self.at
        while self.at < len(self.text) and self.text[self.at] in "0123456789":
            self.at += 1
        if begin == self.at:
            raise self.fail("a number must follow *")
        if self.at - begin > 9:
            raise self.fail("too large a number follows *", begin)
        return int(self.text[begin : self.at])


class _Order:
    """State while reading a layout string: the layers and branches so far, and the constraints on the next symbol."""

    def __init__(self, parser: _LayoutParser, names: BranchNames | None) -> None:
        self.parser, self.names = parser, names
        self.used: set[str] = set()
        self.layers: list[Sequence[str]] = []
        self.branches = 0
        self.left = 0
        """Number of branches that are missing to complete the last layer."""

    def take(self, symbol: str, at: int) -> None:
        """LayoutError for anything after L, a second or late E, a layer after m, or another symbol than the next a or f
        inside an incomplete layer."""
        fail, used = self.parser.fail, self.used
        if "L" in used:
            raise fail("there is a second L" if symbol == "L" else f"{symbol!r} comes after L, the last entry,", at)
        if symbol == "E" and used:
            raise fail("there is a second E" if "E" in used else "E must be the first entry:", at)
        if symbol in _LAYERS and "m" in used:
            raise fail(f"{symbol!r} comes after m", at)
        if self.left and (symbol not in "af" or (symbol == "a" and self.left == 1)):
            raise fail(f"{symbol!r} comes between the branches of a layer, a and f,", at)
        used.add(symbol)
        if symbol in _LAYERS:
            self._take_layer(symbol, at)

    def _take_layer(self, symbol: str, at: int) -> None:
        """t completes a layer, a and f take one branch. LayoutError if f is not the last branch of a layer that an a
        began, or a would cut a layer with a single branch. Layers beyond ``names`` are decoder layers."""
        if symbol == "f" and self.left != 1:
            reason = f"is not the last branch of layer {len(self.layers)}" if self.left else "does not follow an a"
            raise self.parser.fail(f"'f' (the last branch of a layer) {reason}", at)
        if not self.left:
            index = len(self.layers)
            branches = self.names[index] if self.names is not None and index < len(self.names) else DECODER_LAYER
            if symbol == "a" and len(branches) == 1:
                raise self.parser.fail(f"'a' cuts layer {index + 1}, which is built as one piece,", at)
            self.layers.append(branches)
            self.left = len(branches)
        num_branches = self.left if symbol == "t" else 1
        self.branches, self.left = self.branches + num_branches, self.left - num_branches


_LAYERS = "taf"


def parse_layout(text: str, names: BranchNames | None = None) -> list[StageContents]:
    """Parse a layout string such as ``Et*3|(tt|)*29,m|L`` into stages. Symbols: E embedding, t full layer, a a branch
    of a layer except the last, f the last branch of a layer, m multi-token prediction layer, L output layer and loss;
    ``|`` separates stages. Raises LayoutError for a syntax error, if there is not exactly one E first and one L last,
    if E is not on the first or L not on the last stage, or if an incomplete layer is followed by anything but its next
    a or f. Does not compare the numbers of layers and stages with the model and the ranks.

    Args:
        text: the layout.
        names: branch names of the model's layers; default: attention and feed-forward for every layer."""
    parser = _LayoutParser(text)
    order = _Order(parser, names)
    ends, symbols = [0], [""]
    for symbol, at in parser.items(""):
        if symbol == "|":
            ends.append(order.branches)
            symbols.append("")
        else:
            order.take(symbol, at)
            symbols[-1] += symbol
    for symbol, what in (("E", "embedding"), ("L", "loss")):
        if symbol not in order.used:
            raise LayoutError(f"{text!r} has no {symbol} ({what})")
    if "E" not in symbols[0] or "L" not in symbols[-1]:
        raise LayoutError(f"{text!r}: E belongs to the first stage and L to the last")
    return [
        StageContents(
            stage,
            range(*bounds),
            tuple(order.layers),
            "E" in stage_symbols,
            "L" in stage_symbols,
            stage_symbols.count("m"),
        )
        for stage, (stage_symbols, bounds) in enumerate(zip(symbols, pairwise([*ends, order.branches])))
    ]


# ---- stages


def virtual_pipeline_size(config: PipelineShape) -> int:
    """Return the number of model chunks per pipeline rank (V). The first of these that is set determines it: the layout
    (its stages / ranks, rounded down, at least 1), the stages per rank, or the layers per stage (rounded up, with
    embedding and loss if these count as layers); else 1. Raises LayoutError for a layout with a syntax error."""
    ranks = config.pipeline_model_parallel_size
    if config.pipeline_model_parallel_layout is not None:
        symbols = _LayoutParser(config.pipeline_model_parallel_layout).items("")
        return max(1, (1 + sum(symbol == "|" for symbol, _ in symbols)) // ranks)
    if config.num_virtual_stages_per_pipeline_rank is not None:
        return config.num_virtual_stages_per_pipeline_rank
    if config.num_layers_per_virtual_pipeline_stage is not None:
        accounted = config.account_for_embedding_in_pipeline_split + config.account_for_loss_in_pipeline_split
        return math.ceil((config.num_layers + accounted) / (ranks * config.num_layers_per_virtual_pipeline_stage))
    return 1


def pipeline_stages(config: PipelineShape, costs: ModelCosts | None = None) -> list[StageContents]:
    """Return the contents of every stage, in the order in which a micro-batch visits them: from the layout, else from
    the given layers of the first and last rank, else balanced by ``costs`` of the model description. Without costs all
    layers are equal decoder layers that are not split, and the output layer costs nothing. All callers within a run
    must pass the same costs. Raises LayoutError if the settings are invalid or impossible."""
    costs = ModelCosts((DECODER_LAYER,) * config.num_layers, None) if costs is None else costs
    ranks, chunks = config.pipeline_model_parallel_size, virtual_pipeline_size(config)
    if config.pipeline_model_parallel_layout is not None:
        stages = parse_layout(config.pipeline_model_parallel_layout, costs.names)
        if len(stages) % ranks:
            raise LayoutError(f"the layout has {len(stages)} stages, not a multiple of {ranks} pipeline ranks")
        if (num := len(stages[0].names)) != len(costs.names):
            raise LayoutError(f"the layout has {num} layers, the model {len(costs.names)}")
        return stages
    if config.decoder_first_pipeline_num_layers is not None or config.decoder_last_pipeline_num_layers is not None:
        counts = _layers_to_branches(_given_ends(config, len(costs.names), ranks, chunks), costs.names)
    else:
        counts = _balanced(config, ranks * chunks, costs)
    ends, last, predictions = [0, *accumulate(counts)], len(counts) - 1, config.mtp_num_layers or 0
    return [
        StageContents(stage, range(*bounds), costs.names, stage == 0, stage == last, predictions * (stage == last))
        for stage, bounds in enumerate(pairwise(ends))
    ]


def _layers_to_branches(counts: Sequence[int], names: BranchNames) -> list[int]:
    ends = [0, *accumulate(counts)]
    return [len(layer_branch_costs(range(*bounds), names)) for bounds in pairwise(ends)]


def _given_ends(config: PipelineShape, num_layers: int, ranks: int, chunks: int) -> list[int]:
    """The other layers are split evenly over the other ranks and their chunks. LayoutError if too few layers remain."""
    first, last = config.decoder_first_pipeline_num_layers, config.decoder_last_pipeline_num_layers
    rest = num_layers - (first or 0) - (last or 0)
    free_ranks = ranks - (first is not None) - (last is not None)
    if free_ranks < 0 or rest < free_ranks * chunks or (free_ranks == 0 and rest):
        raise LayoutError(f"{rest} layers remain for {free_ranks} pipeline ranks without a given number of layers")
    per_rank = shared_out(rest, free_ranks) if free_ranks else []
    per_rank = ([] if first is None else [first]) + per_rank + ([] if last is None else [last])
    per_chunk = [shared_out(count, chunks) for count in per_rank]
    return [per_chunk[rank][chunk] for chunk in range(chunks) for rank in range(ranks)]


WORTH_A_CUT = 0.01
"""Minimum relative improvement of the slowest stage for which layers are split between stages."""


def _balanced(config: PipelineShape, num_stages: int, costs: ModelCosts) -> list[int]:
    """Layers are split only if this improves the slowest stage by more than ``WORTH_A_CUT``, and never with
    --whole-layers-in-pipeline-split. --account-for-embedding/loss-in-pipeline-split select Megatron-LM's rule: equal
    unsplit layers; embedding and loss count as one layer each. LayoutError if there are too few layers."""
    if num_stages > len(costs.names) + 2:  # check first: a huge number of stages must not allocate huge lists
        raise LayoutError(f"{len(costs.names)} layers cannot fill {num_stages} pipeline stages")
    front = float(config.account_for_embedding_in_pipeline_split)
    back = float(config.account_for_loss_in_pipeline_split)
    smallest = [1] * num_stages
    smallest[0] -= config.account_for_embedding_in_pipeline_split
    smallest[-1] -= config.account_for_loss_in_pipeline_split
    if front or back or costs.layers is None or num_stages == 1:
        equal = balanced_counts([1.0] * len(costs.names), smallest, front, back)
        return _layers_to_branches(equal, costs.names)
    layers, back = [sum(branches) for branches in costs.layers], costs.head
    uncut = balanced_counts(layers, smallest, front, back)
    if not config.whole_layers_in_pipeline_split:
        cut = balanced_counts(costs.branches, smallest, front, back)
        if slowest(costs.branches, cut, front, back) < (1 - WORTH_A_CUT) * slowest(layers, uncut, front, back):
            return cut
    return _layers_to_branches(uncut, costs.names)
