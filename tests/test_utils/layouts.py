"""Runs a layout of a tiny model on a pool of ranks and compares it with one rank (``training/verify/layout_trace.py``).

Everything of a layout happens inside one task of the pool: build, train, compare. The one-rank reference of each model
is computed once per session and kept in a file, which the workers load once.
"""

import contextlib
import dataclasses
import functools
import hashlib
import logging
import pickle
import pkgutil
import tempfile
from pathlib import Path
from unittest import mock

from tests.test_utils.gloo_pool import dump

VOCAB_SIZE = 61  # not divisible by anything
STEPS, MORE_STEPS, FEW_STEPS = 10, 3, 2

MODEL = [
    "--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32",
    "--max-position-embeddings", "32", "--global-batch-size", "8", "--train-iters", "100", "--eval-iters", "0",
    "--num-workers", "0", "--lr", "1e-2", "--lr-decay-style", "cosine", "--lr-warmup-iters", "3",
    "--lr-warmup-init", "3e-3", "--weight-decay", "0.1", "--make-vocab-size-divisible-by", "8", "--adam-eps", "1e-5",
]  # fmt: skip
"""lr-warmup-init: the first step changes weights, and the second computes with them. eps: an entry of the gradient that
is zero in exact arithmetic (the bias of keys) is rounding noise, which Adam with a smaller eps would blow up."""


BANDS = {"bf16": 0.2, "fp16": 0.02}
"""Sums in another order are rounded to 8 and 11 bits in every layer: these tolerances detect only wrong factors."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """One row of the table: a model (flags that change the numbers) and a layout (flags that must not)."""

    model: str
    """Flags of the model, optimizer and data."""
    layout: str
    """Flags of the layout."""
    world_size: int
    precision: str = "fp64"
    steps: int = STEPS
    family: str = "gpt"
    """Model family whose program parses the flags."""
    wrap: str = ""
    """``module:function`` that returns a subclass of the task class; default: the task class itself."""

    @property
    def argv(self):
        return [*MODEL, *self.model.split(), *self.layout.split()]

    @property
    def reference(self):
        """Row of the same model on one rank, with the full batch in one micro-batch if the model names no size. It runs
        at least FEW_STEPS; shorter rows use its first steps."""
        layout = "" if "--micro-batch-size" in self.model else "--micro-batch-size 8"
        return dataclasses.replace(self, layout=layout, world_size=1, steps=max(self.steps, FEW_STEPS))


def narrow_fp8_experts():
    """Compute experts in fp8 from a width of 96 instead of 6144, whose rows take ten times as long. The real width is
    that of ``test_fp8_recipe.py`` and ``test_fp8_training.py``."""
    return mock.patch("megatron.core.config.fp8.EXPERT_WIDTH", 96)


def configure(argv, world_size, precision, family="gpt"):
    """The resolved settings of a row."""
    from megatron.training.arguments import parse_args, validate_args

    cfg = parse_args(argv, needs_data=False, model_family=family)
    with narrow_fp8_experts():
        return validate_args(cfg.with_settings(fp64=precision == "fp64"), world_size)


@contextlib.contextmanager
def running(row, world_size):
    """The traces of a row, on this rank of the pool."""
    from megatron.training.initialize import initialize_megatron
    from megatron.training.tasks.language_model import task_class
    from megatron.training.verify.layout_trace import trace, with_synthetic_data

    logging.getLogger("megatron").setLevel(logging.WARNING)
    cfg = configure(row.argv, world_size, row.precision, row.family)
    kind = task_class(row.family)
    if row.wrap:
        kind = pkgutil.resolve_name(row.wrap)(kind)
    make_task = with_synthetic_data(kind, VOCAB_SIZE)
    with narrow_fp8_experts():
        yield trace(cfg, make_task, initialize_megatron(cfg), row.steps)


def write_reference(rank, world_size, row, path):
    """A task of the pool: trains on one rank and keeps everything."""
    from megatron.training.verify.layout_trace import build_reference

    with running(row, world_size) as traces, open(path, "wb") as file:
        dump(build_reference(traces), file)


@functools.lru_cache(maxsize=64)
def read_reference(path):
    """The reference of a file; workers keep it."""
    with open(path, "rb") as file:
        return pickle.load(file)


def compare_with_reference(rank, world_size, row, path, fault=None):
    """A task of the pool: trains on this layout, under a planted ``fault`` (or something harmless in its place); this
    rank's report of every step."""
    from megatron.training.verify.layout_trace import compare
    from tests.test_utils import layout_faults

    planted = contextlib.nullcontext() if fault is None else getattr(layout_faults, fault)(rank)
    with planted, running(row, world_size) as traces:
        return [compare(one, expected) for one, expected in zip(traces, read_reference(path))]


class Matrix:
    """Layouts against their references. References and verdicts are kept: tests may ask for the same again."""

    def __init__(self, pool):
        self.pool = pool
        self.folder = tempfile.TemporaryDirectory(prefix="layouts")
        self.paths = {}
        self.verdicts = {}

    def reference_of(self, row):
        """The file of the row's reference."""
        reference = row.reference
        key = hashlib.sha256(repr(reference).encode()).hexdigest()[:16]
        if key not in self.paths:
            path = str(Path(self.folder.name) / f"{key}.pt")
            self.pool.run(write_reference, 1, reference, path)
            self.paths[key] = path
        return self.paths[key]

    def verdict(self, row, fault=None):
        """Comparison of the row with its reference."""
        from megatron.training.verify.layout_trace import TOLERANCE, judge

        tolerance = {**TOLERANCE, **BANDS}[row.precision]

        if (row, fault) not in self.verdicts:
            path = self.reference_of(row)
            reports = self.pool.run(compare_with_reference, row.world_size, row, path, fault)
            reference = read_reference(path)[: row.steps + 1]  # the first is the state before training
            self.verdicts[row, fault] = judge(reference, reports, tolerance)
        return self.verdicts[row, fault]

    def close(self):
        self.folder.cleanup()
