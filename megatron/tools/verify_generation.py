"""Compare trainer and generator: ``python tools/verify_generation.py <flags of pretrain_gpt.py> [--generator-tp N]``.

Computes the log-probabilities of random sequences twice and compares all bits of the full rows (every entry of the
vocabulary at every position): by forward passes of the training model in the layout of the flags, and by the generation
engine on --generator-tp tensor-parallel ranks, with prompts in chunks of --chunk-tokens (several numbers: one
comparison each). Add --batch-invariant-mode for equal bits.

The model is shrunk as by tools/verify_layout.py, has random weights in the precision of the flags, and runs in local
gloo processes on the CPU, or with --gpus one process per GPU. With --full-size it has its own size and, with --load,
the weights of a checkpoint.

Exit code 0: equal; 1: different, with the largest difference; 2: the flags contradict each other."""

from __future__ import annotations

import logging
import math
import os
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

from megatron.core.config.commands import tool_parser
from megatron.core.config.errors import UserError, counted
from megatron.tools.verify_layout import VOCAB_SIZE, launch, one_rank, shrink
from megatron.training.arguments import parse_args, smallest_world_size, validate_args
from megatron.training.checkpoint.settings import apply_checkpoint_args
from megatron.training.config.pretrain_config import PretrainConfig

if TYPE_CHECKING:
    from torch import Tensor


class Difference(NamedTuple):
    """Comparison of rows of log-probabilities."""

    largest: float
    """Largest absolute difference."""
    different_rows: int
    rows: int


def compare(trained: Sequence[Tensor], generated: Sequence[Tensor]) -> Difference:
    """Return the difference of the rows [tokens, v] of each sequence."""
    largest, different, rows = 0.0, 0, 0
    for left, right in zip(trained, generated, strict=True):
        distance = (left.double() - right.double()).abs().amax(1)
        if not distance.isfinite().all():
            raise UserError("the log-probabilities are not finite: the weights are damaged, or training diverged")
        largest = max(largest, float(distance.amax()))
        different, rows = different + int((distance != 0).sum()), rows + len(distance)
    return Difference(largest, different, rows)


MIN_LENGTH = 96
"""Tokens of the longest sequence: several blocks of keys of the batch-invariant attention."""


def small_settings(cfg: PretrainConfig, world_size: int, generator_tp: int) -> PretrainConfig:
    """Return ``cfg`` with a small model (:func:`shrink`) whose heads the generator's ranks can divide."""
    small = shrink(cfg, world_size)
    wider = generator_tp // math.gcd(small.model.num_query_groups or small.model.num_attention_heads or 1, generator_tp)
    names = ("num_attention_heads", "num_query_groups", "hidden_size", "ffn_hidden_size")
    sizes = {name: value for name in names if (value := getattr(small.flat, name)) is not None}
    small = small.with_settings(**{name: wider * value for name, value in sizes.items()})
    assert small.data.seq_length is not None
    length = -(-MIN_LENGTH // small.data.seq_length) * small.data.seq_length
    return small.with_settings(
        fp64=False, bf16=cfg.model.bf16, fp16=cfg.model.fp16, seq_length=length, max_position_embeddings=length
    )


def generator_settings(cfg: PretrainConfig, tensor_parallel: int) -> PretrainConfig:
    """Return ``cfg`` with the generator's layout: tensor parallelism only."""
    values: dict[str, Any] = {"tensor_model_parallel_size": tensor_parallel}
    if cfg.model.num_moe_experts is not None:
        values |= {"expert_tensor_parallel_size": 1, "sequence_parallel": tensor_parallel > 1}
        values["moe_token_dispatcher_type"] = "alltoall"
    return one_rank(cfg).with_settings(micro_batch_size=1, global_batch_size=tensor_parallel, **values)


def run_rank(
    rank: int, cfg: PretrainConfig, world_size: int, place: dict[str, str], vocab_size: int, sequences: list[list[int]],
    chunk_tokens: int | None, prepare: Callable[[], None] | None,
) -> None:  # fmt: skip
    """Build the model in one process and compute the rows of ``sequences``, by the engine with prompts in chunks of
    ``chunk_tokens`` or, if None, by the trainer; rank 0 saves them in ``place["FOLDER"]``. ``prepare`` is called first:
    tests inject faults with it."""
    os.environ.update(place, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    if cfg.distributed.distributed_backend == "gloo":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    from megatron.core.pipeline_parallel.stage_model import unwrapped
    from megatron.core.rl.log_probabilities import full_log_probabilities
    from megatron.training.initialize import initialize_megatron, shut_down
    from megatron.training.run import build_components
    from megatron.training.tasks.language_model import task_class
    from megatron.training.verify.layout_trace import with_synthetic_data

    if prepare is not None:
        prepare()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    logging.getLogger("megatron").setLevel(logging.WARNING)
    resolved = validate_args(cfg, world_size)
    task = with_synthetic_data(task_class(cfg.model_family), vocab_size)(resolved)
    parts = build_components(resolved, task, initialize_megatron(resolved))
    parts.checkpointer.close()
    if chunk_tokens is not None:
        rows = generated_rows(unwrapped(parts.model[0]), sequences, chunk_tokens)
    else:
        rows = full_log_probabilities(parts.model, sequences, row_length=resolved.data.seq_length)
    if rank == 0:
        torch.save([row.cpu() for row in rows], f"{place['FOLDER']}/rows.pt")
    shut_down()


def generated_rows(model: Any, sequences: Sequence[Sequence[int]], chunk_tokens: int) -> list[Tensor]:
    """Return the rows [tokens - 1, v] that the engine reports for the tokens of ``sequences`` in steps of at most
    ``chunk_tokens``; empty on ranks other than 0. Collective."""
    import torch

    from megatron.core.inference.engine import Engine
    from megatron.core.inference.requests import Request
    from megatron.core.inference.scheduler import Limits

    length = max(map(len, sequences))
    limits = Limits(max_length=length + 1, max_tokens=chunk_tokens, max_sequences=min(len(sequences), chunk_tokens))
    engine = Engine(model, limits, page_size=4)  # pages end in the middle of prompts
    requests = [
        Request(prompt=ids, max_new_tokens=0, prompt_logprobs=True, top_logprobs=model.vocab_size) for ids in sequences
    ]
    all_rows = []
    for completion in engine.generate(requests):
        rows = torch.empty(len(completion.prompt_scores) - 1, model.vocab_size, dtype=torch.float64)
        for row, score in zip(rows, completion.prompt_scores[1:]):
            assert score is not None, "the first token only has no score"
            row[[token for token, _ in score.top]] = torch.tensor([x for _, x in score.top], dtype=torch.float64)
        all_rows.append(rows)
    return all_rows


def verify(
    trainer: PretrainConfig, world_size: int, generator: PretrainConfig, generator_ranks: int, vocab_size: int,
    num_sequences: int, chunk_tokens: Sequence[int] = (), *, prepare: Callable[[], None] | None = None,
) -> dict[int, Difference]:  # fmt: skip
    """Run both sides in new processes, the generator once per number of ``chunk_tokens`` (default: two thirds of the
    longest sequence), and print the time of each; return the difference of their rows by this number. ``prepare`` is
    called in the generator's processes."""
    import torch

    length = validate_args(trainer, world_size).data.seq_length
    rng = random.Random(trainer.model.seed)
    sequences = [
        [rng.randrange(vocab_size) for _ in range(rng.randint(2, length) if index else length)]
        for index in range(num_sequences)
    ]

    def rows(name: str, cfg: PretrainConfig, ranks: int, chunk: int | None) -> list[Tensor]:
        print(f"{name} … ", end="", flush=True)
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            hook = None if chunk is None else prepare
            launch(cfg, ranks, folder, vocab_size, sequences, chunk, hook, target=run_rank)
            result: list[Tensor] = torch.load(f"{folder}/rows.pt", weights_only=True)
        print(f"{time.perf_counter() - began:.0f} s", flush=True)
        return result

    # the engine scores every token but the first
    trained = [row[:-1] for row in rows("trainer", trainer, world_size, None)]
    return {
        chunk: compare(
            trained, rows(f"generator, chunks of {counted(chunk, 'token')}", generator, generator_ranks, chunk)
        )
        for chunk in chunk_tokens or [max(length * 2 // 3, 1)]
    }


def _require_gpus(number: int) -> None:
    import torch

    if (available := torch.cuda.device_count()) < number:
        raise UserError(
            f"--gpus: {counted(number, 'rank')} of one side, but {counted(available, 'GPU')} here; remove it"
        )


def main(argv: Sequence[str]) -> int:
    """Compare both sides for the flags ``argv``; print the verdict and return the exit code: 0 equal, 1 different.
    Raises UserError for flags that are invalid there."""
    parser = tool_parser(__doc__)
    parser.add_argument("--world-size", type=int, help="trainer's ranks; default: the smallest number of the layout")
    parser.add_argument(
        "--generator-tp", type=int, default=1, metavar="N", help="tensor-parallel ranks of the generator"
    )
    parser.add_argument("--num-sequences", type=int, default=5, metavar="N", help="random sequences to score")
    parser.add_argument(
        "--chunk-tokens", type=int, nargs="+", default=[], metavar="N",
        help="tokens of the generator's steps, one comparison each (two thirds of the sequence length)",
    )  # fmt: skip
    parser.add_argument("--full-size", action="store_true", help="keep the model's size; --load loads its weights")
    parser.add_argument("--gpus", action="store_true", help="run on GPUs over NCCL")
    options, flags = parser.parse_known_args(argv)
    for name in ("generator_tp", "num_sequences", "chunk_tokens"):
        value = getattr(options, name)
        if min(value if isinstance(value, list) else [value], default=1) < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    cfg = parse_args(flags, needs_data=False)
    if options.gpus:
        _require_gpus(max(options.generator_tp, options.world_size or smallest_world_size(cfg)))
    world_size, vocab_size = options.world_size or smallest_world_size(cfg), VOCAB_SIZE
    if options.full_size:
        cfg = apply_checkpoint_args(cfg)
        vocab_size = cfg.tokenizer.vocab_size or 0
        if not vocab_size:
            raise UserError("--full-size: requires the vocabulary's size; add --vocab-size")
        # weights only: other settings of the run, such as its learning-rate schedule, do not matter here
        trainer = cfg.with_settings(save=None, finetune=cfg.checkpoint.load is not None)
    else:
        trainer = small_settings(cfg, world_size, options.generator_tp)
    backend = "nccl" if options.gpus else "gloo"
    trainer = trainer.with_settings(distributed_backend=backend, explicit=trainer.explicit | {"distributed_backend"})
    generator = generator_settings(trainer, options.generator_tp)
    resolved = validate_args(trainer, world_size)
    validate_args(generator, options.generator_tp)
    model = resolved.model
    print(
        f"trainer: {counted(world_size, 'rank')} = tensor {model.tensor_model_parallel_size} x context"
        f" {model.context_parallel_size} x pipeline {model.pipeline_model_parallel_size} x data"
        f" {resolved.data_parallel_size}; generator: tensor {options.generator_tp};"
        f" {str(model.params_dtype).removeprefix('torch.')}; {len(resolved.describe(vocab_size).layers)} layers, width"
        f" {model.hidden_size}",
        flush=True,
    )
    differences = verify(
        trainer, world_size, generator, options.generator_tp, vocab_size, options.num_sequences, options.chunk_tokens
    )
    for chunk, difference in differences.items():
        if difference.different_rows:
            print(
                f"DIFFERENT in {difference.different_rows} of {difference.rows} rows with chunks of"
                f" {counted(chunk, 'token')}; largest difference {difference.largest:.3g}"
                + ("" if model.batch_invariant_mode else "; add --batch-invariant-mode")
            )
        else:
            rows = f"{difference.rows} rows of {vocab_size} log-probabilities"
            print(f"equal: all bits of {rows}, chunks of {counted(chunk, 'token')}")
    return int(any(difference.different_rows for difference in differences.values()))
