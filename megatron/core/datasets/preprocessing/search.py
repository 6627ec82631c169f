"""--find-optimal-num-workers: the speed of each number of workers on a sample of the input."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import tempfile
from collections.abc import Iterator

from megatron.core.config.errors import UserError
from megatron.core.config.tokenizer import TokenizerConfig
from megatron.core.datasets.preprocessing.inputs import find_inputs, part_bytes, split_file
from megatron.core.datasets.preprocessing.lines import read_rows
from megatron.core.datasets.preprocessing.pipeline import NoDocuments, TokenizerBuilder, preprocess
from megatron.core.datasets.preprocessing.settings import PreprocessConfig

logger = logging.getLogger(__name__)


def find_optimal_workers(cfg: PreprocessConfig, tokenizer_cfg: TokenizerConfig, build: TokenizerBuilder) -> int:
    """Preprocess the first ``cfg.max_documents`` documents with each of ``cfg.workers_to_check`` in a temporary folder,
    log MB/s, and return the fastest number of workers. Writes nothing next to input or output. Raises UserError as
    ``preprocess``, or if no document is usable."""
    if problems := dataclasses.replace(cfg, find_optimal_num_workers=True).problems():
        raise UserError("\n".join(problems))
    with tempfile.TemporaryDirectory() as folder:
        sample = os.path.join(folder, "sample.jsonl")
        count = 0
        with open(sample, "w", encoding="utf-8") as file:
            for texts in _documents(cfg):
                file.write(json.dumps(dict(zip(cfg.json_keys, texts))) + "\n")
                count += 1
                if count >= cfg.max_documents:
                    break
        if count == 0:
            raise UserError(f"--input {' '.join(cfg.input)}: no usable document to measure with")
        speeds: dict[int, float] = {}
        for workers in cfg.workers_to_check:
            prefix = os.path.join(folder, "out")
            trial = dataclasses.replace(
                cfg,
                input=[sample],
                output_prefix=prefix,
                workers=workers,
                overwrite=True,
                find_optimal_num_workers=False,
            )
            try:
                totals = preprocess(trial, tokenizer_cfg, build)
            except NoDocuments as error:  # names the sample, which the user does not know
                raise UserError(f"--input {' '.join(cfg.input)}: no document has tokens to measure with") from error
            speeds[workers] = totals.text_bytes / max(totals.seconds, 1e-9) / 1e6
            logger.info(
                "%d workers: %.2f MB/s, %.1f docs/s", workers, speeds[workers], count / max(totals.seconds, 1e-9)
            )
        best = max(speeds, key=lambda workers: speeds[workers])
        logger.info("the fastest on %d documents: --workers %d (%.2f MB/s)", count, best, speeds[best])
        return best


def _documents(cfg: PreprocessConfig) -> Iterator[list[str]]:
    files = find_inputs(cfg.input, cfg.json_keys, cfg.text_documents)
    size = part_bytes(files)
    for index, file in enumerate(files):
        for part in split_file(index, file, size, cfg.max_line_bytes):
            for row, _ in read_rows(part, cfg.json_keys, cfg.max_line_bytes):
                if isinstance(row, list):
                    yield row
