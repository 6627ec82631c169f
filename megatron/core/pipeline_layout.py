"""Which stage of a pipeline holds what: a pure function of the configuration, read by models, rules, self-checks and
``--dry-run`` alike. Torch-free.

A pipeline of P ranks with V model chunks on each has P x V *stages*. A micro-batch visits them in order; stage ``s`` is
chunk ``s // P`` of rank ``s % P``. Every stage holds a run of consecutive layers, the first one also the embedding and
the last one the output layer and the loss.

Unless the user lays the stages out, the slowest stage is made as fast as possible: costs are forward FLOPs, so that the
output layer weighs as much as the layers that take as long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron.core.cli import flag


@dataclass(kw_only=True)
class PipelineConfig:
    """Pipeline layout"""

    num_layers_per_virtual_pipeline_stage: int | None = None
    """Layers per chunk of an interleaved schedule."""

    num_virtual_stages_per_pipeline_rank: int | None = None
    """Chunks per rank of an interleaved schedule; instead of the flag above."""

    decoder_first_pipeline_num_layers: int | None = None
    """Layers of the first pipeline rank, where it differs."""

    decoder_last_pipeline_num_layers: int | None = None
    """Layers of the last pipeline rank, where it differs."""

    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as one layer when layers are split over stages, instead of by its FLOPs."""

    account_for_loss_in_pipeline_split: bool = False
    """Count the output layer and loss as one layer when layers are split over stages, instead of by their FLOPs."""

    pipeline_model_parallel_layout: str | None = None
    """Exact contents of every stage: E embedding, t layer, L loss, m multi-token head, | between stages, x*n for
    repetition, such as Et*3|(tt|)*29,m|L."""

    pipeline_schedule: Literal["1f1b", "interleaved", "zero-bubble"] | None = flag("--pipeline-schedule")
    """Order of forward and backward passes; default: interleaved with virtual stages, else 1f1b. zero-bubble computes
    weight gradients apart from input gradients and fills waiting time with them."""


PipelineShape = Any
"""Any configuration with the fields above, ``pipeline_model_parallel_size`` and the sizes of the network, resolved."""


@dataclass(frozen=True)
class StageContents:
    """What one stage holds."""

    stage: int
    layers: range
    """Global layer indices, from 0."""
    embedding: bool = False
    loss: bool = False
    num_mtp: int = 0
    """Multi-token prediction layers."""

    def __str__(self) -> str:
        names = ["embedding"] if self.embedding else []
        if len(self.layers) == 1:
            names.append(f"layer {self.layers[0] + 1}")
        elif self.layers:
            names.append(f"layers {self.layers[0] + 1}-{self.layers[-1] + 1}")
        return " + ".join(names + (["loss"] if self.loss else [])) or "nothing"


# ---- layout strings


class LayoutError(ValueError):
    """What is wrong with a layout string, and where (a position counted from 1)."""


class _LayoutParser:
    """Recursive descent over ``item*``, item = (char | "(" items ")") ["*" number]; commas and blanks mean nothing."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

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
                item = self.items(")")
            elif symbol and symbol in "EtmL|":
                self.at += 1
                item = [(symbol, begin)]
            elif not symbol:
                raise self.fail("a parenthesis is not closed")
            else:
                raise self.fail(f"{symbol!r} means nothing; E, t, m, L, | and parentheses do")
            result += item * self.repetitions()
            if len(result) > 100_000:
                raise self.fail("more than 100000 entries", begin)
        self.at += 1
        return result

    def repetitions(self) -> int:
        if self.peek() != "*":
            return 1
        self.at += 1
        self.peek()
        begin = self.at
        while self.at < len(self.text) and self.text[self.at].isdecimal():
            self.at += 1
        if begin == self.at:
            raise self.fail("a number must follow *")
        return int(self.text[begin : self.at])


def parse_layout(text: str) -> list[StageContents]:
    """The stages of a layout string such as ``Et*3|(tt|)*29,m|L``.

    Raises:
        LayoutError: on anything but exactly one E, before every layer, and exactly one L, after every layer.
    """
    parser = _LayoutParser(text)
    entries = parser.items("")
    stages: list[StageContents] = []
    pending: list[tuple[str, int]] = []
    seen: dict[str, int] = {}
    for symbol, at in [*entries, ("|", len(text))]:
        if symbol != "|":
            _check_order(parser, seen, symbol, at)
            seen[symbol] = seen.get(symbol, 0) + 1
            pending.append((symbol, at))
            continue
        count = [each for each, _ in pending].count
        first = seen.get("t", 0) - count("t")
        stages.append(
            StageContents(len(stages), range(first, seen.get("t", 0)), count("E") > 0, count("L") > 0, count("m"))
        )
        pending = []
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
    if symbol == "t" and "m" in seen:
        raise parser.fail("'t' comes after m", at)


# ---- sizes and costs


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


def output_layer_cost(config: PipelineShape, vocab_size: int, seq_length: int) -> float:
    """Forward FLOPs of the output layer over those of one transformer layer (causal attention counted as half)."""
    hidden, channels, heads = config.hidden_size, config.kv_channels, config.num_attention_heads
    gated = 2 if config.swiglu or config.quick_geglu else 1
    matrices = hidden * channels * (2 * heads + 2 * config.num_query_groups)
    matrices += hidden * config.ffn_hidden_size * (1 + gated)
    return hidden * vocab_size / (matrices + seq_length * heads * channels)


def pipeline_stages(
    config: PipelineShape, *, vocab_size: int | None = None, seq_length: int | None = None
) -> list[StageContents]:
    """The contents of every stage, in the order in which a micro-batch visits them.

    ``vocab_size`` and ``seq_length`` give the weight of the output layer; without them it counts nothing. All callers
    of one run must pass the same.

    Raises:
        ValueError: where the settings cannot be met; the rules refuse those before anything starts.
    """
    ranks, chunks = config.pipeline_model_parallel_size, virtual_pipeline_size(config)
    if config.pipeline_model_parallel_layout is not None:
        stages = parse_layout(config.pipeline_model_parallel_layout)
        if len(stages) % ranks:
            raise ValueError(f"the layout has {len(stages)} stages, not a multiple of {ranks} pipeline ranks")
        if (num := sum(len(stage.layers) for stage in stages)) != config.num_layers:
            raise ValueError(f"the layout has {num} layers, the model {config.num_layers}")
        return stages
    if config.decoder_first_pipeline_num_layers is not None or config.decoder_last_pipeline_num_layers is not None:
        counts = _given_ends(config, ranks, chunks)
    else:
        counts = _balanced(config, ranks * chunks, vocab_size, seq_length)
    return _from_counts(counts)


def _from_counts(counts: Sequence[int]) -> list[StageContents]:
    stages, first = [], 0
    for stage, count in enumerate(counts):
        stages.append(StageContents(stage, range(first, first + count), stage == 0, stage == len(counts) - 1))
        first += count
    return stages


def _shared_out(total: int, parts: int) -> list[int]:
    """``total`` in ``parts`` counts that differ by one at most, the larger ones first."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def _given_ends(config: PipelineShape, ranks: int, chunks: int) -> list[int]:
    """Layers per stage where the first or the last rank's number is given; the other ranks share the rest."""
    first, last = config.decoder_first_pipeline_num_layers, config.decoder_last_pipeline_num_layers
    rest = config.num_layers - (first or 0) - (last or 0)
    others = ranks - (first is not None) - (last is not None)
    if rest < others * chunks or (others <= 0 and rest):
        raise ValueError(f"{rest} layers remain for {others} pipeline ranks beside the ones whose layers are given")
    per_rank = _shared_out(rest, others) if others else []
    per_rank = ([] if first is None else [first]) + per_rank + ([] if last is None else [last])
    per_chunk = [_shared_out(count, chunks) for count in per_rank]
    return [per_chunk[rank][chunk] for chunk in range(chunks) for rank in range(ranks)]


def _balanced(config: PipelineShape, num_stages: int, vocab_size: int | None, seq_length: int | None) -> list[int]:
    by_count = config.account_for_embedding_in_pipeline_split or config.account_for_loss_in_pipeline_split
    front = float(config.account_for_embedding_in_pipeline_split)
    back = float(config.account_for_loss_in_pipeline_split)
    if not by_count and vocab_size is not None and seq_length is not None and num_stages > 1:
        back = output_layer_cost(config, vocab_size, seq_length)
    smallest = [1] * num_stages
    smallest[0] -= config.account_for_embedding_in_pipeline_split
    smallest[-1] -= config.account_for_loss_in_pipeline_split
    return balanced_counts(config.num_layers, smallest, front, back)


_SHARPNESS = 8  # the 8-norm of the stages' costs: nearly their maximum, but among equal maxima the evener split wins


def balanced_counts(num_layers: int, smallest: Sequence[int], front: float, back: float) -> list[int]:
    """Layers per stage such that the costliest stage is as cheap as possible.

    Args:
        num_layers: to be shared out, each of cost 1.
        smallest: least number of layers of each stage.
        front: cost that the first stage has besides its layers.
        back: the same for the last stage.
    """
    num_stages = len(smallest)
    if num_layers < sum(smallest):
        raise ValueError(f"{num_layers} layers cannot fill {num_stages} pipeline stages")
    mean = (num_layers + front + back) / num_stages
    largest = math.ceil(num_layers / max(num_stages - 1, 1)) + math.ceil(mean)
    # best[n] = (sum of costs^8 so far, counts) for n layers on the stages so far
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(num_stages):
        extra = (front if stage == 0 else 0.0) + (back if stage == num_stages - 1 else 0.0)
        later = sum(smallest[stage + 1 :])
        longer: dict[int, tuple[float, tuple[int, ...]]] = {}
        for used, (cost, counts) in best.items():
            most = min(num_layers - used - later, num_layers if stage == num_stages - 1 else largest)
            for count in range(smallest[stage], most + 1):
                total = cost + ((count + extra) / mean) ** _SHARPNESS
                known = longer.get(used + count)
                if known is None or total < known[0] * (1 - 1e-12):
                    longer[used + count] = (total, (*counts, count))
        best = longer
    return list(best[num_layers][1])
