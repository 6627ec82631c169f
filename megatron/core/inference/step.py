"""Inputs of one step of generation: the plan of rank 0, and its tensors.

All integers and numbers of a step are one int64 array, copied to the device at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron.core.attention.cached_layout import PADDING, Chunk, StepIndices, index_arrays
from megatron.core.attention.sequence_states import StateSlots
from megatron.core.fusions.paged_attention import SPLIT
from megatron.core.inference.images import StepImages
from megatron.core.inference.sampling import Draws, Form, Sampling, draw_arrays

GREEDY = Sampling(temperature=0, seed=0)
MAX_SHORT_ROWS, MAX_SHORT_SPLITS = 512, 2048
"""A row that reads pages directly reads them again for each row of its prompt."""


class OutputRow(NamedTuple):
    """Row whose logits are needed: to sample the next token, or to score a known one."""

    row: int
    target: int | None = None
    """Token to score; None: sample."""
    sampling: Sampling | None = None
    """Set, with a seed, if ``target`` is None."""
    position: int = 0
    """Position of the token to sample."""
    divisor: float = 1.0
    """Number that divides the logits of the reported log-probabilities."""


@dataclass(frozen=True)
class StepPlan:
    """Inputs of a step."""

    tokens: list[int]
    chunks: list[Chunk]
    outputs: list[OutputRow]
    num_top: int = 0
    """Number of most likely tokens to report for each output row."""
    has_routes: bool = False
    """Whether to report the experts of each row."""
    images: StepImages | None = None
    """Images and rotary positions; None without images in any sequence."""

    def encode(self) -> dict[str, Any]:
        """Return the plan as JSON values, for a broadcast."""
        outputs = [
            [x.row, x.target, None if x.sampling is None else [*vars(x.sampling).values()], *x[3:]]
            for x in self.outputs
        ]
        images = self.images and self.images.encode()
        return {field.name: getattr(self, field.name) for field in fields(self)} | {
            "outputs": outputs,
            "images": images,
        }

    @classmethod
    def decode(cls, values: dict[str, Any]) -> StepPlan:
        """Return the plan of :meth:`encode`'s values."""
        outputs = [
            OutputRow(row, target, None if sampling is None else Sampling(*sampling), *rest)
            for row, target, sampling, *rest in values["outputs"]
        ]
        chunks = [
            Chunk(start, num_new, tuple(pages), StateSlots(*states))
            for start, num_new, pages, states in values["chunks"]
        ]
        images = values["images"] and StepImages.decode(values["images"])
        return cls(**{**values, "chunks": chunks, "outputs": outputs, "images": images})

    @cached_property
    def is_decode(self) -> bool:
        """Whether the step computes one token of each sequence and samples the next one."""
        return len(self.outputs) == len(self.chunks) == len(self.tokens) and all(
            output.row == row and output.target is None for row, output in enumerate(self.outputs)
        )

    @cached_property
    def is_short(self) -> bool:
        """Whether a step with prompts is so short that all its rows read pages directly."""
        splits = sum(x.num_new * (x.stop // SPLIT + 1) for x in self.chunks if x.num_new > 1)
        return len(self.tokens) <= MAX_SHORT_ROWS and splits <= MAX_SHORT_SPLITS

    @cached_property
    def only_samples(self) -> bool:
        """Whether no row scores a known token."""
        return all(output.target is None for output in self.outputs)

    def padded(self, multiple: int, *, short: bool) -> StepPlan:
        """Return a plan with a multiple of ``multiple`` rows (``short`` steps: one of few numbers)."""
        rows, outputs = len(self.tokens), len(self.outputs)
        if self.is_decode:
            rows = decode_size(rows)
        elif short:
            rows = max(64, power_of_two(rows))
        missing = -(-rows // multiple) * multiple - len(self.tokens)
        rows = len(self.tokens) + missing
        if self.is_decode:
            outputs = rows
        elif short and self.only_samples:
            outputs = next(size for size in (8, 64, rows) if size >= outputs)
        return StepPlan(
            self.tokens + [0] * missing,
            self.chunks + [PADDING] * missing,
            self.outputs + [OutputRow(row, sampling=GREEDY) for row in range(len(self.outputs), outputs)],
            self.num_top,
            self.has_routes,
            self.images,
        )


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least ``number``."""
    return 1 << (number - 1).bit_length()


def decode_size(num_sequences: int) -> int:
    """Return the number of rows of a decode step: a power of two up to 8, then a multiple of 8, 16 above 128, 32 above
    256 and so on."""
    power = power_of_two(num_sequences)
    multiple = power if power <= 8 else max(8, power // 16)
    return -(-num_sequences // multiple) * multiple


def common_plans(max_sequences: int, max_tokens: int, page_size: int) -> Iterator[StepPlan]:
    """Yield a plan of padding for each size of a decode step or short prompt, greedy and sampled from all tokens;
    largest first, so that later graphs fit into its memory."""
    decoded = sorted({decode_size(count) for count in range(1, max_sequences + 1)}, reverse=True)
    prompts = [size for size in (512, 256, 128, 64) if size <= min(MAX_SHORT_ROWS, max_tokens)]
    for sampling in (GREEDY, Sampling(seed=0)):
        for size in prompts:
            chunk = Chunk(0, size, PADDING.pages * -(-size // page_size))
            yield StepPlan([0] * size, [chunk], [OutputRow(size - 1, sampling=sampling)])
        for size in decoded:
            yield StepPlan([0] * size, [PADDING] * size, [OutputRow(row, sampling=sampling) for row in range(size)])


class StepForm(NamedTuple):
    """Operations of a step."""

    num_top: int
    num_sampled: int
    draws: Form
    has_divisors: bool
    has_routes: bool


class StepTensors(NamedTuple):
    """Inputs of a step on the device."""

    ids: Tensor
    """Token ids [1, n]."""
    indices: StepIndices
    targets: Tensor
    """Token to score in each row with logits, [r]; -1: sample."""
    divisors: Tensor
    """``OutputRow.divisor``, fp64 [r]."""
    sampled: Tensor
    """Rows with logits that sample, [k]."""
    draws: Draws


def step_arrays(plan: StepPlan, page_size: int, **settings: Any) -> tuple[dict[str, np.ndarray], StepForm]:
    """Return the fields of all tuples of :class:`StepTensors`, int64 or fp64, and the step's operations. ``settings``
    are those of :func:`index_arrays`."""
    outputs = plan.outputs
    sampled = [(number, x.sampling, x.position) for number, x in enumerate(outputs) if x.sampling is not None]
    draws, form = draw_arrays([item[1] for item in sampled], [item[2] for item in sampled])
    arrays = {
        "ids": np.array([plan.tokens], np.int64),
        "targets": np.array([-1 if x.target is None else x.target for x in outputs], np.int64),
        "divisors": np.array([x.divisor for x in outputs], np.float64),
        "sampled": np.array([item[0] for item in sampled], np.int64),
        **index_arrays(plan.chunks, [x.row for x in outputs], page_size, **settings),
    }
    arrays |= {f"draw_{name}": x for name, x in draws.items()}
    scaled = bool((arrays["divisors"] != 1).any())
    return arrays, StepForm(plan.num_top, len(sampled), form, scaled, plan.has_routes)


def pack(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return all ``arrays`` as one int64 array; fp64 numbers keep their bits."""
    return np.concatenate([np.ascontiguousarray(x).view(np.int64).ravel() for x in arrays.values()])


def unpack(values: Tensor, arrays: Mapping[str, np.ndarray]) -> StepTensors:
    """Return views of ``values``, int64 on the device, with the shapes of the packed ``arrays`` (not read)."""
    parts = values.split([x.size for x in arrays.values()])
    tensors = {
        name: (part.view(torch.float64) if x.dtype == np.float64 else part).view(x.shape)
        for (name, x), part in zip(arrays.items(), parts)
    }
    indices = StepIndices(**{name: tensors[name] for name in StepIndices._fields})
    draws = Draws(**{name: tensors[f"draw_{name}"] for name in Draws._fields})
    return StepTensors(tensors["ids"], indices, tensors["targets"], tensors["divisors"], tensors["sampled"], draws)
