"""Tokenizes JSON lines or parquet into the .bin/.idx files that training reads.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix corpus \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer/ --append-eod --workers 8

writes corpus_text_document.bin, .idx and .tokenizer.json. Killed, it continues when run again. Needs no torch.
"""

import dataclasses
import logging
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.core.config.cli import (
    ConfigError,
    Problem,
    flags_of,
    make_parser,
    read_segments,
    report_and_exit,
    segments,
)
from megatron.core.config.tokenizer import TokenizerConfig
from megatron.core.datasets.preprocessing.pipeline import preprocess
from megatron.core.datasets.preprocessing.search import find_optimal_workers
from megatron.core.datasets.preprocessing.settings import PreprocessConfig
from megatron.core.tokenizers import build_tokenizer

logger = logging.getLogger("preprocess_data")
REQUIRED = ("input", "output_prefix", "tokenizer_type")


def parse(argv: list[str]) -> tuple[PreprocessConfig, TokenizerConfig]:
    """The settings of a command line; all that is wrong with it at once.

    Raises:
        ConfigError: unknown, missing or malformed flags.
    """
    specs = flags_of(PreprocessConfig, TokenizerConfig)
    if {"-h", "--help"} & set(argv):
        make_parser(specs, "preprocess_data.py", __doc__ or "").parse_args(["--help"])
    found, problems = segments(argv)
    values, more = read_segments(specs, found)
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


def main(argv: list[str]) -> int:
    """Exit status: 0 done, 1 failed, 2 wrong flags."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    try:
        cfg, tokenizer_cfg = parse(argv)
    except ConfigError as error:
        report_and_exit(error, "preprocess_data.py")
        raise
    for name in ("partitions", "keep_sequential_samples", "dataset_impl"):
        default = next(field.default for field in dataclasses.fields(cfg) if field.name == name)
        if getattr(cfg, name) != default:
            logger.info(
                "--%s has no effect here: order and bytes never depend on how the work is cut", name.replace("_", "-")
            )
    try:
        if cfg.find_optimal_num_workers:
            find_optimal_workers(cfg, tokenizer_cfg, build_tokenizer)
            return 0
        logger.info("workers: %d", cfg.workers or os.cpu_count() or 1)
        totals = preprocess(cfg, tokenizer_cfg, build_tokenizer)
    except (ValueError, OSError) as error:
        print(f"preprocess_data.py: error: {error}", file=sys.stderr)
        return 1
    for prefix in totals.outputs:
        logger.info("wrote %s.bin and .idx", prefix)
    if totals.bad_lines:
        logger.warning("%d unusable lines were skipped: see %s.bad_lines.jsonl", totals.bad_lines, cfg.output_prefix)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
