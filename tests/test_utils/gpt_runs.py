"""Full training runs of a tiny model inside a test: the program of ``pretrain_gpt.py`` (or another family's entry
script) without a new interpreter."""

import contextlib
import io
import json
from pathlib import Path

import numpy as np

VOCAB_SIZE = 64

MODEL_FLAGS = [
    "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32",
    "--max-position-embeddings", "32", "--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCAB_SIZE),
    "--micro-batch-size", "2", "--global-batch-size", "8", "--lr", "1e-2", "--lr-warmup-iters", "2",
    "--train-iters", "8", "--eval-iters", "2", "--num-workers", "0", "--log-interval", "2",
]  # fmt: skip


def write_dataset(prefix: Path, num_documents: int = 60, seed: int = 0) -> Path:
    """Documents that count upwards modulo the vocabulary, of 20 to 90 tokens: something to learn."""
    from megatron.data.indexed_dataset import IndexedDatasetBuilder

    generator = np.random.default_rng(seed)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for _ in range(num_documents):
        length, start = generator.integers(20, 90), generator.integers(0, VOCAB_SIZE - 1)
        document = (start + np.arange(length)) % (VOCAB_SIZE - 1)
        builder.add_document(np.append(document, VOCAB_SIZE - 1), [length + 1])
    builder.finalize(f"{prefix}.idx")
    return prefix


def train(
    rank: int, world_size: int, argv: list[str], fp64: bool = False, model_family: str = "gpt", left_out: tuple = ()
) -> int:
    """``pretrain_gpt.py`` with ``argv`` (and everything in float64) on one rank of the pool; the exit code.
    ``left_out``: names of ``MODEL_FLAGS`` that are not passed."""

    from megatron.training.arguments import parse_args
    from megatron.training.run import run
    from megatron.training.tasks.language_model import task_class

    pairs = zip(MODEL_FLAGS[::2], MODEL_FLAGS[1::2])
    flags = [word for pair in pairs if pair[0] not in left_out for word in pair]
    cfg = parse_args(flags + argv, model_family=model_family)
    return run(cfg.with_settings(fp64=fp64), task_class(model_family))


def train_resolved(cfg, make_task) -> None:
    """Train ``make_task(cfg, tokenizer)`` as ``run`` does, but raise its errors."""
    from megatron.training.exits.conditions import ExitConditions
    from megatron.training.run import build, training
    from megatron.training.watchdog import Watchdog

    watchdog = Watchdog(cfg)
    with ExitConditions(cfg) as exits, training(cfg, build(cfg, make_task, watchdog), exits, watchdog) as trainer:
        trainer.train()


def train_with_errors(
    rank: int, world_size: int, argv: list[str], fp64: bool = False, model_family: str = "gpt"
) -> tuple[int, str]:
    """Run :func:`train`; return the exit code and the rank's stderr."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        code = train(rank, world_size, argv, fp64, model_family)
    return code, errors.getvalue()


def read_records(path: Path) -> list[dict]:
    """The records of a metrics file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    """The training losses of a run saved in ``folder``."""
    return [record["lm loss"] for record in read_records(folder / "metrics.jsonl") if record["kind"] == "train"]
