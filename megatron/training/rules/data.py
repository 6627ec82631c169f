"""Rules about data sources, splits and tokenizers."""

from __future__ import annotations

import os
from contextlib import suppress

from megatron.core.config.problems import Problems, flag_names, missing, problem
from megatron.core.config.tokenizer import TOKENIZER_FILES, WITHOUT_SENTINELS
from megatron.core.schedules.batch_size import ScheduleError, samples_from_iters
from megatron.training.config.data import parse_split
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.validation import eval_samples, num_evaluations

PER_SPLIT = ("train_data_path", "valid_data_path", "test_data_path")


def one_data_source(cfg: PretrainConfig) -> Problems:
    """Require exactly one data source; the flags per split together are one. External loaders need none."""
    single = [
        field for field in ("data_path", "data_args_path", "per_split_data_args_path") if getattr(cfg.flat, field)
    ]
    sources = single + (["train_data_path"] if any(getattr(cfg.flat, field) for field in PER_SPLIT) else [])
    sources += ["mock_data"] if cfg.data.mock_data else []
    if not sources and cfg.data.dataloader_type != "external":
        yield missing(
            cfg, "data_path", "a source of data is required", "or --train-data-path, --data-args-path, --mock-data"
        )
    for field in sources[1:]:
        yield problem(cfg, field, f"contradicts {flag_names(cfg, sources[0])}", "give one source of data")


def split_with_separate_paths(cfg: PretrainConfig) -> Problems:
    sources = [field for field in (*PER_SPLIT, "per_split_data_args_path") if getattr(cfg.flat, field)]
    if sources and "split" in cfg.explicit:
        yield problem(cfg, "split", f"contradicts {flag_names(cfg, sources[0])}", "remove one")
    if (
        any(getattr(cfg.flat, field) for field in PER_SPLIT)
        and not cfg.data.train_data_path
        and not cfg.validation.skip_train
    ):
        yield missing(cfg, "train_data_path", f"is required with {flag_names(cfg, sources[0])}")


def split_parts_used(cfg: PretrainConfig) -> Problems:
    """Reject a --split without the training or validation data that the run uses."""
    if cfg.data.split is None:
        return
    train, valid, _ = parse_split(cfg.data.split)
    if not train and not cfg.validation.skip_train:
        yield problem(cfg, "split", "leaves no training data")
    if not valid and cfg.validation.eval_interval and cfg.validation.eval_iters:
        yield problem(cfg, "split", "leaves no validation data", "--eval-iters 0 turns evaluation off")


MOST_SAMPLES = 2**35
"""Maximum samples of one split: their order takes 8 bytes each, 256 GiB in total."""


def sample_counts(cfg: PretrainConfig) -> Problems:
    """``resolve`` has filled in --train-iters where --train-samples was given."""
    training = cfg.training
    train = training.train_samples or 0
    if not train:
        with suppress(ScheduleError, ZeroDivisionError):  # other rules report wrong batch sizes
            train = samples_from_iters(cfg.flat, training.train_iters or 0, cfg.data_parallel_size)
    evaluated = (
        0
        if cfg.validation.full_validation
        else num_evaluations(cfg.validation, training.train_iters) * eval_samples(cfg.validation)
    )
    for field, count in (
        ("train_samples" if training.train_samples else "train_iters", train),
        ("eval_iters", evaluated),
    ):
        if count > MOST_SAMPLES and cfg.data.dataloader_type != "external":
            reason = f"is {count:,} samples; their order would need {count * 8 / 2**30:,.0f} GiB of memory"
            yield problem(cfg, field, reason)


def tokenizer_files_given(cfg: PretrainConfig) -> Problems:
    """Require --tokenizer-type, also with --mock-data, and the flags that the type needs (``TOKENIZER_FILES``)."""
    if cfg.tokenizer.tokenizer_type is None:
        yield missing(cfg, "tokenizer_type", "is required", "for example HuggingFaceTokenizer with --tokenizer-model")
        return
    for field in TOKENIZER_FILES.get(cfg.tokenizer.tokenizer_type, ("tokenizer_model",)):
        if getattr(cfg.flat, field) is None:
            other = "" if cfg.tokenizer.tokenizer_type == "NullTokenizer" else "or choose another --tokenizer-type"
            yield missing(cfg, field, f"is required by --tokenizer-type {cfg.tokenizer.tokenizer_type}", other)


def tokenizer_files_exist(cfg: PretrainConfig) -> Problems:
    """Reject irregular files, and folders whose path cannot be accessed (missing ones pass); nothing in a dry run."""
    if cfg.program.dry_run:
        return
    for field in ("vocab_file", "merge_file", "data_args_path", "per_split_data_args_path"):
        path = getattr(cfg.flat, field)
        if path is not None and not os.path.isfile(path):
            exists = os.path.exists(path)
            yield problem(cfg, field, "is not a file" if exists else "there is no such file", "give a file" * exists)
    fast = ("non_persistent_global_ckpt_dir", "non_persistent_local_ckpt_dir")
    for field in ("load", "save", "pretrained_checkpoint", *fast):
        try:
            os.stat(getattr(cfg.flat, field) or ".")
        except FileNotFoundError:
            pass  # a folder that is made, or missed, later
        except (OSError, ValueError) as error:
            yield problem(cfg, field, f"cannot be opened ({getattr(error, 'strerror', None) or error})")


def encoder_seq_length_agrees(cfg: PretrainConfig) -> Problems:
    length = cfg.data.seq_length
    if length is not None and cfg.data.encoder_seq_length not in (None, length):
        yield problem(cfg, "encoder_seq_length", f"contradicts --seq-length {length}", "give one of the two")


def tokenizer_supports_sentinels(cfg: PretrainConfig) -> Problems:
    """Reject --vocab-extra-ids with tokenizer types to which no sentinels can be added."""
    if cfg.tokenizer.vocab_extra_ids and cfg.tokenizer.tokenizer_type in WITHOUT_SENTINELS:
        reason = f"--tokenizer-type {cfg.tokenizer.tokenizer_type} does not support sentinels"
        yield problem(cfg, "vocab_extra_ids", reason, "remove it")
