"""Tokenize JSON lines or parquet into the .bin/.idx files that training reads.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix corpus \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer/ --append-eod --workers 8

writes corpus_text_document.bin, .idx and .tokenizer.json. Repeat the command to resume a killed run. Needs no torch."""

import dataclasses
import logging
import os
import sys
from collections.abc import Sequence

from megatron.core.config.cli import ConfigError, Problem, group_flags, make_parser, read_segments, segments
from megatron.core.config.tokenizer import TokenizerConfig
from megatron.core.datasets.preprocessing.pipeline import preprocess
from megatron.core.datasets.preprocessing.search import find_optimal_workers
from megatron.core.datasets.preprocessing.settings import PreprocessConfig
from megatron.core.tokenizers import build_tokenizer

logger = logging.getLogger("preprocess_data")
REQUIRED = ("input", "output_prefix", "tokenizer_type")


def parse(argv: Sequence[str]) -> tuple[PreprocessConfig, TokenizerConfig]:
    """Raises ConfigError with all problems: unknown, missing, malformed or contradictory flags. Opens no input."""
    specs = group_flags(PreprocessConfig, TokenizerConfig)
    if {"-h", "--help"} & set(argv):
        make_parser(specs, description=__doc__ or "").parse_args(["--help"])
    typed, problems = segments(argv)
    values, more = read_segments(specs, typed)
    mine = {field.name for field in dataclasses.fields(PreprocessConfig)}
    cfg = PreprocessConfig(**{name: value for name, value in values.items() if name in mine})
    tokenizer_cfg = TokenizerConfig(**{name: value for name, value in values.items() if name not in mine})
    problems = [*problems, *more]
    if tokenizer_cfg.tokenizer_type is None:
        problems.append(Problem("--tokenizer-type", "is missing"))
    problems += [Problem(text.partition(" ")[0], text.partition(" ")[2]) for text in cfg.problems()]
    if problems:
        raise ConfigError(problems)
    return cfg, tokenizer_cfg


def main(argv: Sequence[str]) -> int:
    """Configures logging to stdout; with --find-optimal-num-workers only measures. Raises UserError or OSError."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    cfg, tokenizer_cfg = parse(argv)
    for name in ("partitions", "keep_sequential_samples", "dataset_impl"):
        default = next(field.default for field in dataclasses.fields(cfg) if field.name == name)
        if getattr(cfg, name) != default:
            logger.info(
                "--%s has no effect here: order and bytes never depend on how the work is cut", name.replace("_", "-")
            )
    if cfg.find_optimal_num_workers:
        find_optimal_workers(cfg, tokenizer_cfg, build_tokenizer)
        return 0
    logger.info("workers: %d", cfg.workers or os.cpu_count() or 1)
    totals = preprocess(cfg, tokenizer_cfg, build_tokenizer)
    for prefix in totals.outputs:
        logger.info("wrote %s.bin and .idx", prefix)
    if totals.bad_lines:
        logger.warning("%d unusable lines were skipped: see %s.bad_lines.jsonl", totals.bad_lines, cfg.output_prefix)
    return 0
