"""Which stage of a pipeline holds what: a pure function of the configuration, read by models, rules, self-checks and
``--dry-run`` alike. Torch-free.

A pipeline of P ranks with V model chunks on each has P x V *stages*. A micro-batch visits them in order; stage ``s`` is
chunk ``s // P`` of rank ``s % P``. Every stage holds a run of consecutive half layers, the first one also the
embedding and the last one the output layer and the loss. A layer's halves are its two residual branches, attention and
feed-forward network: x + branch is all that travels between stages, wherever the cut is.

Unless the user lays the stages out, the slowest stage is made as fast as possible (``balance.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron.core.pipeline_parallel.balance import LayoutError, ModelCosts, balanced_counts, shared_out, slowest

PipelineShape = Any
"""Any configuration with the fields above, ``pipeline_model_parallel_size`` and the sizes of the network, resolved."""


Half = Literal["attention", "mlp"]
"""Half of a layer: norm, attention, residual; or norm, feed-forward network, residual."""


def layers_of(half_layers: range) -> Iterator[tuple[int, Half | None]]:
    """(global index of a layer, from 0; which half of it, None: both) of the layers that a range of half layers meets.

    Half layer 2 k is the attention half of layer k, 2 k + 1 its feed-forward half.
    """
    if not half_layers:
        return
    for layer in range(half_layers.start // 2, (half_layers.stop + 1) // 2):
        if 2 * layer not in half_layers:
            yield layer, "mlp"
        else:
            yield layer, None if 2 * layer + 1 in half_layers else "attention"


def half_layers_of(layers: range) -> range:
    """The half layers of whole ones."""
    return range(2 * layers.start, 2 * layers.stop)


@dataclass(frozen=True)
class StageContents:
    """What one stage holds."""

    stage: int
    half_layers: range
    """Global indices, from 0, as of :func:`layers_of`."""
    embedding: bool = False
    loss: bool = False
    num_mtp: int = 0
    """Multi-token prediction layers."""

    @property
    def num_layers(self) -> float:
        """A half counts as one half."""
        return len(self.half_layers) / 2

    @property
    def num_attention(self) -> int:
        """Attention halves."""
        return sum(half != "mlp" for _, half in layers_of(self.half_layers))

    @property
    def num_mlp(self) -> int:
        """Feed-forward halves."""
        return sum(half != "attention" for _, half in layers_of(self.half_layers))

    @property
    def cuts_layers(self) -> bool:
        """Whether it begins or ends inside a layer."""
        return any(half is not None for _, half in layers_of(self.half_layers))

    def __str__(self) -> str:
        names = ["embedding"] if self.embedding else []
        layers = list(layers_of(self.half_layers))
        whole = [layer + 1 for layer, half in layers if half is None]
        if layers and layers[0][1] == "mlp":
            names.append(f"feed-forward of layer {layers[0][0] + 1}")
        if whole:
            names.append(f"layer {whole[0]}" if len(whole) == 1 else f"layers {whole[0]}-{whole[-1]}")
        if layers and layers[-1][1] == "attention":
            names.append(f"attention of layer {layers[-1][0] + 1}")
        return " + ".join(names + (["loss"] if self.loss else [])) or "nothing"


# ---- layout strings


_MAX_ENTRIES = 10_000
_MAX_DEPTH = 50


class _LayoutParser:
    """Recursive descent over ``item*``, item = (char | "(" items ")") ["*" number]; commas and blanks mean nothing."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.depth = text, 0, 0

    def fail(self, reason: str, at: int | None = None) -> LayoutError:
        return LayoutError(f"{reason} at position {(self.at if at is None else at) + 1} of {self.text!r}")

    def peek(self) -> str:
        while self.at < len(self.text) and self.text[self.at] in ", \t\n":
            self.at += 1
        return self.text[self.at] if self.at < len(self.text) else ""

    def items(self, closing: str) -> list[tuple[str, int]]:
        """(symbol, its position) up to ``closing``, repetitions written out."""
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


_HALVES = {"t": 2, "a": 1, "f": 1}


def parse_layout(text: str) -> list[StageContents]:
    """The stages of a layout string such as ``Et*3|(tt|)*29,m|L``.

    Raises:
        LayoutError: on anything but exactly one E, before every layer, and exactly one L, after every layer; on halves
            of layers other than an a and, next among the layers, its f.
    """
    parser = _LayoutParser(text)
    entries = parser.items("")
    stages: list[StageContents] = []
    pending: list[tuple[str, int]] = []
    seen: dict[str, int] = {}
    first = begun = 0
    for symbol, at in [*entries, ("|", len(text))]:
        if symbol != "|":
            _check_order(parser, seen, symbol, at)
            seen[symbol] = seen.get(symbol, 0) + 1
            begun += _HALVES.get(symbol, 0)
            pending.append((symbol, at))
            continue
        count = [each for each, _ in pending].count
        stages.append(StageContents(len(stages), range(first, begun), count("E") > 0, count("L") > 0, count("m")))
        pending, first = [], begun
    for symbol, what in (("E", "embedding"), ("L", "loss")):
        if symbol not in seen:
            raise LayoutError(f"{text!r} has no {symbol} ({what})")
    if not stages[0].embedding or not stages[-1].loss:
        raise LayoutError(f"{text!r}: E belongs to the first stage and L to the last")
    return stages


def _check_order(parser: _LayoutParser, seen: dict[str, int], symbol: str, at: int) -> None:
    if "L" in seen:
        raise parser.fail("there is a second L" if symbol == "L" else f"{symbol!r} comes after L, the last entry,", at)
    if symbol == "E" and seen:
        raise parser.fail("there is a second E" if "E" in seen else "E must be the first entry:", at)
    if symbol in _HALVES and "m" in seen:
        raise parser.fail(f"{symbol!r} comes after m", at)
    is_cut = seen.get("a", 0) > seen.get("f", 0)
    if symbol == "f" and not is_cut:
        raise parser.fail("'f' (feed-forward half) does not follow an a (attention half)", at)
    if symbol != "f" and is_cut:
        raise parser.fail(f"{symbol!r} comes between the halves of a layer, a and f,", at)


# ---- stages


def virtual_pipeline_size(config: PipelineShape) -> int:
    """Model chunks per pipeline rank; 1 without an interleaved schedule."""
    ranks = config.pipeline_model_parallel_size
    if config.pipeline_model_parallel_layout is not None:
        return max(1, len(parse_layout(config.pipeline_model_parallel_layout)) // ranks)
    if config.num_virtual_stages_per_pipeline_rank is not None:
        return config.num_virtual_stages_per_pipeline_rank
    if config.num_layers_per_virtual_pipeline_stage is not None:
        accounted = config.account_for_embedding_in_pipeline_split + config.account_for_loss_in_pipeline_split
        return math.ceil((config.num_layers + accounted) / (ranks * config.num_layers_per_virtual_pipeline_stage))
    return 1


def pipeline_stages(
    config: PipelineShape, costs: ModelCosts | None = None, *, cuttable: bool = True
) -> list[StageContents]:
    """The contents of every stage, in the order in which a micro-batch visits them.

    ``costs`` are those of the model's description; without them layers are alike and stay whole, and the output layer
    counts nothing. ``cuttable``: whether the model's layers can be built as halves. All callers of one run must pass
    the same.

    Raises:
        LayoutError: where the settings cannot be met; the rules refuse those before anything starts.
    """
    ranks, chunks = config.pipeline_model_parallel_size, virtual_pipeline_size(config)
    if config.pipeline_model_parallel_layout is not None:
        stages = parse_layout(config.pipeline_model_parallel_layout)
        if len(stages) % ranks:
            raise LayoutError(f"the layout has {len(stages)} stages, not a multiple of {ranks} pipeline ranks")
        if (num := sum(stage.num_layers for stage in stages)) != config.num_layers:
            raise LayoutError(f"the layout has {num:g} layers, the model {config.num_layers}")
        if not cuttable and (cut := next((stage for stage in stages if stage.cuts_layers), None)):
            raise LayoutError(f"the layout has {cut} on stage {cut.stage}, but this model's layers cannot be cut")
        return stages
    if config.decoder_first_pipeline_num_layers is not None or config.decoder_last_pipeline_num_layers is not None:
        return _from_counts([2 * count for count in _given_ends(config, ranks, chunks)])
    return _from_counts(_balanced(config, ranks * chunks, costs, cuttable))


def _from_counts(counts: Sequence[int]) -> list[StageContents]:
    """From the number of half layers of each stage."""
    stages, first = [], 0
    for stage, count in enumerate(counts):
        stages.append(StageContents(stage, range(first, first + count), stage == 0, stage == len(counts) - 1))
        first += count
    return stages


def _given_ends(config: PipelineShape, ranks: int, chunks: int) -> list[int]:
    """Layers per stage where the first or the last rank's number is given; the other ranks share the rest."""
    first, last = config.decoder_first_pipeline_num_layers, config.decoder_last_pipeline_num_layers
    rest = config.num_layers - (first or 0) - (last or 0)
    others = ranks - (first is not None) - (last is not None)
    if others < 0 or rest < others * chunks or (others == 0 and rest):
        raise LayoutError(f"{rest} layers remain for {others} pipeline ranks beside the ones whose layers are given")
    per_rank = shared_out(rest, others) if others else []
    per_rank = ([] if first is None else [first]) + per_rank + ([] if last is None else [last])
    per_chunk = [shared_out(count, chunks) for count in per_rank]
    return [per_chunk[rank][chunk] for chunk in range(chunks) for rank in range(ranks)]


WORTH_A_CUT = 0.01
"""Layers are cut where the slowest stage gets faster by more than this part."""


def _balanced(config: PipelineShape, num_stages: int, costs: ModelCosts | None, cuttable: bool) -> list[int]:
    """Half layers per stage."""
    if num_stages > config.num_layers + 2:  # said before anything as long as that number is built
        raise LayoutError(f"{config.num_layers} layers cannot fill {num_stages} pipeline stages")
    front = float(config.account_for_embedding_in_pipeline_split)
    back = float(config.account_for_loss_in_pipeline_split)
    smallest = [1] * num_stages
    smallest[0] -= config.account_for_embedding_in_pipeline_split
    smallest[-1] -= config.account_for_loss_in_pipeline_split
    if front or back or costs is None or num_stages == 1:
        return [2 * count for count in balanced_counts([1.0] * config.num_layers, smallest, front, back)]
    layers, back = [sum(branches) for branches in costs.layers], costs.head
    whole = balanced_counts(layers, smallest, front, back)
    if cuttable and not config.whole_layers_in_pipeline_split:
        halves = costs.branches
        cut = balanced_counts(halves, smallest, front, back)
        if slowest(halves, cut, front, back) < (1 - WORTH_A_CUT) * slowest(layers, whole, front, back):
            return cut
    return [2 * count for count in whole]
