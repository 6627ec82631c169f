"""Print the samples of a global batch of a run: data set, documents, text.

    python tools/inspect_batch.py --load RUN/checkpoints --iteration 1200 --samples 4
    python tools/inspect_batch.py --load RUN/checkpoints --iteration 1200 --json > batch.json

Settings and counters come from the checkpoints; sampler and data sets are the trainer's, so that the samples are those
that the run read. No model is built. The iteration after the checkpoint is the one that a continued run reads next.
Ranges of tokens are [first:end]. In BERT's text {fox|[MASK]} is a masked token and the model's input in its place; T5's
target follows its input. --json prints all arrays of each sample, too."""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

import numpy as np

from megatron.core.config.commands import tool_parser
from megatron.core.config.errors import UserError, printable
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.masked_dataset import MaskedWordPieceDataset
from megatron.core.datasets.sft_dataset import SFTDataset
from megatron.core.dist_checkpointing.manifest import MANIFEST
from megatron.core.models.registry import get_family
from megatron.core.tokenizers import build_tokenizer
from megatron.core.tokenizers.base import Tokenizer
from megatron.data.blend import get_blend_and_blend_per_split, get_blend_from_list
from megatron.data.index_format import get_bin_path, get_idx_path
from megatron.data.indexed_dataset import MissingDatasetError
from megatron.tools.checkpoint.run_history import Saved, at_iteration
from megatron.tools.engine_flags import add_tokenizer_flags, tokenizer_settings
from megatron.training.checkpoint.run_tokenizer import find_run_tokenizer
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.datasets import batch_size_at, samples_per_split
from megatron.training.data.loader import DataSource, KeyedDataset, Shard, train_sampler
from megatron.training.data.packed_rows import PackedSource, balance
from megatron.training.hooks.data_files import opened_files
from megatron.training.tasks.language_model import task_class

Part = tuple[int, int, int]
"""Document, first token, last token + 1."""


def parse_command_line(argv: Sequence[str]) -> argparse.Namespace:
    """Return the flags of this tool. Exits with code 2 for wrong ones. Raises UserError for a number below 1."""
    parser = tool_parser(__doc__)
    parser.add_argument("--load", required=True, metavar="DIR", help="--save folder of a run")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="checkpoint to start from; default: the latest")
    parser.add_argument("--iteration", type=int, required=True, metavar="N", help="iteration that reads the batch")
    parser.add_argument("--samples", type=int, metavar="K", help="only the first K samples of the batch")
    parser.add_argument(
        "--data-path", nargs="+", metavar="PREFIX", help="training data sets that were moved, in the order of the run"
    )
    add_tokenizer_flags(parser)
    parser.add_argument("--family", metavar="MODULE", help="module of a model family outside of megatron")
    parser.add_argument("--width", type=int, default=100, metavar="N", help="characters to print of each text")
    parser.add_argument("--full", action="store_true", help="print full texts")
    parser.add_argument("--json", action="store_true", help="print JSON, with all arrays and full texts")
    args = parser.parse_args(argv)
    for name in ("iteration", "samples", "width"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise UserError(f"--{name} {value}: must be at least 1")
    return args


def moved(cfg: PretrainConfig, paths: Sequence[str]) -> PretrainConfig:
    """Return ``cfg`` with training data at ``paths`` and the stored weights. Raises UserError for another blend."""
    (single, per_split), new = get_blend_and_blend_per_split(cfg.data), get_blend_from_list(paths)
    old = single or (per_split and per_split[0])
    if not old or new is None or len(old[0]) != len(new[0]) or new[1] not in (None, old[1]):
        expected = " ".join(old[0]) if old else "no data set"
        raise UserError(f"--data-path {' '.join(paths)}: must name the run's data sets in its order ({expected})")
    words = [word for pair in zip(map(str, old[1]), new[0]) for word in pair] if old[1] else new[0]
    if single:
        return cfg.with_settings(data_path=words, data_args_path=None)
    cleared = dict.fromkeys(("valid_data_path", "test_data_path", "per_split_data_args_path"))
    return cfg.with_settings(train_data_path=words, **cleared)


def build(
    saved: Saved, paths: Sequence[str] | None, other: Mapping[str, str]
) -> tuple[PretrainConfig, Tokenizer, DataSource]:
    """Return settings, tokenizer and training data of a run; ``paths`` replace its data sets, settings in ``other`` its
    tokenizer. Raises UserError: another tokenizer; data that is missing, written after the checkpoint."""
    cfg = saved.cfg if paths is None else moved(saved.cfg, paths)
    if cfg.data.dataloader_type == "external" or not cfg.needs_data:
        raise UserError(f"{saved.directory}: its training program makes the data itself; only that program can read it")
    if other:
        cfg = cfg.with_settings(**other)
        tokenizer = build_tokenizer(cfg.tokenizer)
    else:
        settings, tokenizer = find_run_tokenizer(cfg.tokenizer, saved.directory, saved.tokenizer)
        cfg = cfg.with_settings(**asdict(settings))
    task = task_class(cfg.model_family)(cfg, tokenizer)
    try:
        train, _, _ = task.train_valid_test_datasets_provider((samples_per_split(cfg)[0], 0, 0))
    except MissingDatasetError as error:
        raise UserError(f"{error} If the data was moved, add --data-path") from None
    if train is None:
        raise UserError(f"{saved.directory}: its settings name no training data")
    written = os.stat(os.path.join(saved.directory, MANIFEST)).st_mtime_ns
    for prefix in [data.path_prefix for data in opened_files([train])] if paths is None else []:
        for path in (get_idx_path(prefix), get_bin_path(prefix)):
            if os.stat(path).st_mtime_ns > written:
                raise UserError(
                    f"{path}: was written after {saved.directory}, so that its samples may differ; restore it, or add"
                    " --data-path if it is an equal copy"
                )
    return cfg, tokenizer, train


def parts_of_sample(dataset: object, number: int) -> list[Part]:
    """Return (document, first token, last token + 1) for each document of sample ``number``; empty for other data sets
    than those of GPT, BERT and T5, such as blends. BERT and T5 count tokens from the first sentence of the document,
    and drop some of the range if the sample is ``truncated``."""
    if isinstance(dataset, GPTDataset):
        row = int(dataset.shuffle_index[number])
        (first, offset), (last, _) = dataset.sample_index[row : row + 2].tolist()
        parts, remaining = [], dataset.config.sequence_length + dataset.extra_token
        for document in dataset.document_index[first : last + 1].tolist():
            count = min(int(dataset.dataset.sequence_lengths[document]) - offset, remaining)
            parts += [(document, offset, offset + count)] if count else []
            offset, remaining = 0, remaining - count
        return parts
    if isinstance(dataset, MaskedWordPieceDataset):
        first, end, _ = dataset.sample_index[number].tolist()
        document = int(np.searchsorted(dataset.dataset.document_indices, first, side="right")) - 1
        lengths, base = dataset.dataset.sequence_lengths, int(dataset.dataset.document_indices[document])
        start = int(lengths[base:first].sum(dtype=np.int64))
        return [(document, start, start + int(lengths[first:end].sum(dtype=np.int64)))]
    return []


def texts(sample: Mapping[str, Any], parts: Sequence[Part], tokenizer: Tokenizer) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of each document (GPT), of each segment with masked tokens marked (BERT), or of input and
    target (T5); nothing for samples of other families."""
    spell = tokenizer.detokenize
    if "text_enc" in sample:
        yield "input", spell(sample["text_enc"][sample["enc_mask"] > 0])
        yield "target", spell(sample["labels"][sample["loss_mask"] > 0])
    elif "text" in sample:
        ids, labels, used = sample["text"], sample["labels"], np.flatnonzero(sample["padding_mask"]).tolist()
        for kind, segment in itertools.groupby(used, key=lambda place: sample["types"][place]):
            words = []
            # a group per masked token, and one per run of other tokens
            for masked, run in itertools.groupby(segment, key=lambda place: (labels[place] >= 0) * (place + 1)):
                places = list(run)
                words.append(f"{{{spell(labels[places])}|{spell(ids[places])}}}" if masked else spell(ids[places]))
            yield ("first", "second")[int(kind)], " ".join(words)
    elif "tokens" in sample:
        text = np.append(sample["tokens"], sample["labels"][-1:])
        for document, first, end in parts or [(-1, 0, len(text))]:
            piece, text = np.split(text, [end - first])
            yield f"document {document}[{first}:{end}]" if parts else "tokens", spell(piece.tolist())


def describe_samples(
    cfg: PretrainConfig, tokenizer: Tokenizer, train: DataSource, consumed: int, most: int | None
) -> Iterator[dict[str, Any]]:
    """Yield a description of each of the first ``most`` samples of the global batch after ``consumed`` samples."""
    size, micro, ranks = batch_size_at(cfg)(consumed), cfg.training.micro_batch_size, cfg.data_parallel_size
    order = iter(train_sampler(cfg, Shard(1, 0, 1), len(train), consumed))
    keys = [key for (key,) in itertools.islice(order, size)]
    sources = train.datasets if isinstance(train, BlendedDataset) else [train]
    owners = {row: (row // micro % ranks, row // (micro * ranks)) for row in range(size)}
    if isinstance(sources[0], SFTDataset):
        costs = cast(PackedSource, train).attention_costs(np.array([index for _, index in keys]))
        shares = enumerate(balance(costs.tolist(), micro, ranks))
        owners = {row: (rank, step) for rank, share in shares for step, rows in enumerate(share) for row in rows}
    owned = [(key, *owners[row]) for row, key in enumerate(keys)]
    for (position, index), rank, micro_batch in owned[:most]:
        source, number, weight = train, index, 1.0
        if isinstance(train, BlendedDataset):
            which, number = int(train.dataset_index[index]), int(train.dataset_sample_index[index])
            source, weight = train.datasets[which], train.weights[which] / sum(train.weights)
        sample = KeyedDataset(train)[position, index]
        parts = parts_of_sample(source, number)
        yield {
            "sample": position,
            "rank": rank,
            "micro_batch": micro_batch,
            "data_set": getattr(source, "dataset_path", None) or "random data",
            "weight": weight,
            "documents": [{"document": document, "tokens": [first, end]} for document, first, end in parts],
            "texts": [("sequence", text) for text in source.describe(number)]
            if isinstance(source, SFTDataset)
            else list(texts(sample, parts, tokenizer)),
            "arrays": {name: np.asarray(value).tolist() for name, value in sample.items()},
        }


def print_sample(row: Mapping[str, Any], width: int | None) -> None:
    """Print a sample: one line about its origin, then its texts, each on one line and cut to ``width`` characters."""
    words = [f"{row['data_set']}, weight {row['weight']:.4g}"]
    if "tokens" not in row["arrays"]:
        words += ["document {}[{}:{}]".format(part["document"], *part["tokens"]) for part in row["documents"]]
    words += [name for key, name in (("is_random", "swapped"), ("truncated", "truncated")) if row["arrays"].get(key)]
    words += [f"rank {row['rank']}, micro-batch {row['micro_batch']}"]
    print(printable(f"sample {row['sample']}: {', '.join(words)}"))
    for name, text in row["texts"]:
        short = text if width is None or len(text) <= width else f"{text[:width]}…"
        print(printable(f"  {name}: {json.dumps(short, ensure_ascii=False)}"))


def main(argv: Sequence[str]) -> int:
    """Print the samples of --iteration of the run whose checkpoints are in --load; return 0. Raises UserError: no
    checkpoint, data or tokenizer as the run had it, or an iteration whose settings are unknown."""
    args = parse_command_line(argv)
    if args.family is not None:
        get_family(args.family)
    saved, consumed, notes = at_iteration(args.load, args.ckpt_step, args.iteration)
    cfg, tokenizer, train = build(saved, args.data_path, tokenizer_settings(args))
    size = batch_size_at(cfg)(consumed)
    if cfg.data.dataloader_type != "cyclic" and consumed + size > len(train):
        raise UserError(f"--iteration {args.iteration}: the training data is used up; it holds {len(train)} samples")
    samples = describe_samples(cfg, tokenizer, train, consumed, args.samples)
    summary = {"iteration": args.iteration, "first_sample": consumed, "batch_size": size, "settings": saved.directory}
    if args.json:
        print(json.dumps({**summary, "notes": notes, "samples": list(samples)}, ensure_ascii=False))
        return 0
    print(printable(f"iteration {args.iteration}: {size} samples from {consumed} on, settings of {saved.directory}"))
    for note in notes:
        print(printable(f"  {note}"))
    for row in samples:
        print_sample(row, None if args.full else args.width)
    return 0
