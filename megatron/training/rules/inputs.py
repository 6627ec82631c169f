"""Problems of the tokenizer, the data files and the checkpoint to load, found after the flags are checked.

They are reported together with the problems that the rules find; without such problems, before a model is built and
anything is written. No index is built for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.core.config.cli import Problem, flags_of
from megatron.core.config.errors import UserError, call_all, counted
from megatron.core.config.tokenizer import TokenizerConfig
from megatron.core.safe_files import read_text
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.stored_settings import misfits

if TYPE_CHECKING:
    from megatron.core.tokenizers.base import Tokenizer

DATA_FLAGS = {
    "--data-path",
    "--data-args-path",
    "--per-split-data-args-path",
    "--train-data-path",
    "--split",
    "--mock-data",
}
"""A problem with one of them leaves open which files are meant."""


class Line(Problem):
    """A problem whose ``reason`` is the whole text; ``flag`` is its first word."""

    def __str__(self) -> str:
        return self.reason


def input_problems(cfg: PretrainConfig, problems: Sequence[Problem]) -> list[Problem]:
    """Build the tokenizer, look into the data files and compare stored settings; return one problem per line of their
    errors, without those whose flags are in ``problems``. Returns nothing in a dry run."""
    if cfg.program.dry_run:  # asks about flags, not about the machine that it runs on
        return []
    flags = {problem.flag for problem in problems}
    tokenizer_flags = {name for spec in flags_of(TokenizerConfig) for name in spec.names}
    # no length is better than a guess, but every sample has one: the shortest has the fewest spans
    guess = cfg.with_settings(
        seq_length=cfg.data.seq_length or 8, decoder_seq_length=cfg.flat.decoder_seq_length or cfg.data.seq_length or 8
    )
    num_samples = (
        0 if cfg.validation.skip_train else 1,
        None if cfg.validation.full_validation else int(cfg.validation.eval_iters > 0),
        0,
    )
    tokenizer, lines = None, []
    try:
        tokenizer = check_inputs(
            guess, num_samples, tokenizer=not flags & tokenizer_flags, files=not flags & DATA_FLAGS
        )
    except UserError as error:
        lines = str(error).splitlines()
    lines += misfits(cfg, tokenizer, consistent=not problems)
    matches = [Line(line.split()[0].rstrip(":,"), line) for line in lines]
    return [line for line in matches if line.flag not in flags]


def reads_data_files(cfg: PretrainConfig) -> bool:
    """Whether the training data are files that flags name."""
    is_named = cfg.needs_data and not cfg.data.mock_data and cfg.data.dataloader_type != "external"
    return is_named and cfg.family.data_set is not None


def samples_of_epochs(cfg: PretrainConfig) -> int:
    """Return the training samples of --num-epochs passes. UserError for several or unreadable data sets."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.tokenizers import build_tokenizer
    from megatron.training.data.datasets import select_data_set

    kind, config = select_data_set(cfg, None)
    if getattr(kind, "size_needs_tokenizer", True):
        kind, config = select_data_set(cfg, build_tokenizer(cfg.tokenizer))
    assert cfg.training.num_epochs is not None
    return BlendedMegatronDatasetBuilder(kind, (1, 0, 0), lambda: True, config).samples_of_epochs(
        cfg.training.num_epochs
    )


def check_inputs(
    cfg: PretrainConfig, num_samples: Sequence[int | None], *, tokenizer: bool = True, files: bool = True
) -> Tokenizer | None:
    """Build the ``tokenizer``, look into the data ``files``, and check that ``num_samples`` (train, valid, test) can be
    made; return the tokenizer, if built. Runs all checks; UserError has one line per problem. Builds no index."""
    # here: --help does without numpy and the libraries of tokenizers
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.tokenizers import build_tokenizer
    from megatron.export.hf.side_files import TOKENIZER, side_files
    from megatron.training.data.datasets import select_data_set, sources_without_record

    built: list[Tokenizer] = []
    reads_files = reads_data_files(cfg)

    def build() -> None:
        built.append(build_tokenizer(cfg.tokenizer))
        if (
            cfg.checkpoint.save and cfg.tokenizer.tokenizer_model and os.path.isdir(cfg.tokenizer.tokenizer_model)
        ):  # checkpoints hold copies
            side_files(Path(cfg.tokenizer.tokenizer_model), TOKENIZER)

    def check_samples() -> None:
        if built and reads_files:
            select_data_set(cfg, built[0])

    def check_prompts() -> None:
        if built and files and cfg.validation.sample_prompts is not None:
            read_sample_prompts(cfg.validation.sample_prompts, built[0], cfg.data.seq_length or 0)

    def check_files() -> None:
        kind, config = select_data_set(cfg, built[0] if built else None)
        if config.reads_text and not built:
            return
        calls: list[Callable[[], object]] = [
            BlendedMegatronDatasetBuilder(kind, num_samples, lambda: True, config).check
        ]
        call_all(calls + [partial(sources_without_record, config, source) for source in built])

    calls = [build, check_samples, check_prompts] if tokenizer and cfg.tokenizer.tokenizer_type is not None else []
    call_all([*calls, check_files] if files and reads_files else calls)
    return built[0] if built else None


def read_sample_prompts(values: Sequence[str], tokenizer: Tokenizer, length: int) -> list[tuple[str, list[int]]]:
    """Return the prompts of --sample-prompts with their tokens: texts, and the lines of @FILE that are not blank.
    UserError for unreadable or empty files and prompts over ``length`` tokens, the generated ones included."""
    prompts: list[str] = []
    for value in values:
        if not value.startswith("@"):
            prompts.append(value)
            continue
        try:
            lines = [line for line in read_text(Path(value[1:])).splitlines() if line.strip()]
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise UserError(f"--sample-prompts {value}: cannot be read ({reason}); give a text file") from error
        if not lines:
            raise UserError(f"--sample-prompts {value}: the file has no prompt; give one per line")
        prompts += lines
    return [(prompt, _prompt_ids(prompt, tokenizer, length)) for prompt in prompts]


def _prompt_ids(prompt: str, tokenizer: Tokenizer, length: int) -> list[int]:
    quoted = repr(prompt if len(prompt) <= 40 else f"{prompt[:40]}…")
    try:
        ids = tokenizer.tokenize(prompt) or [tokenizer.eod]
        tokenizer.detokenize(ids)
    except (UserError, NotImplementedError) as error:
        raise UserError(f"--sample-prompts {quoted}: {error or 'the tokenizer has no detokenize'}") from error
    if len(ids) >= length:
        raise UserError(
            f"--sample-prompts {quoted}: has {counted(len(ids), 'token')} and leaves no room for text in --seq-length "
            f"{length}; give a shorter one"
        )
    return ids
