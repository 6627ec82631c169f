"""Convert checkpoints between formats, without a GPU, a model or a network.

    python tools/checkpoint/convert.py --loader hf --saver native --load-dir LLAMA --save-dir OUT
    python pretrain_gpt.py --load OUT --use-checkpoint-args --finetune …

Loaders: hf, megatron_torch, megatron_torch_dist, native, safetensors; savers: the same without megatron_torch. One
tensor is in memory at a time. The target is renamed to its name only when it is complete; to resume an interrupted
conversion, repeat the command. All names and shapes are checked before data is copied. Settings that the source format
does not store (safetensors without settings.json: all of them) must be given as training flags."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from megatron.core.config.errors import UserError
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.files import RELEASE, TRACKER, checkpoint_directory, read_json
from megatron.core.dist_checkpointing.writer import write_file
from megatron.core.models.registry import default_family, families
from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.export.branches import split_layers
from megatron.export.files import Target
from megatron.export.hf import save_hf
from megatron.export.hf.quantization import Form
from megatron.export.interchange import COUNTER, Interchange, with_counters
from megatron.export.megatron_lm import save_megatron_torch_dist
from megatron.export.native import save_native, save_safetensors
from megatron.tools.checkpoint import formats
from megatron.tools.checkpoint.finite import FiniteCheck
from megatron.tools.checkpoint.formats import say
from megatron.training.arguments import parse_args, validate_args
from megatron.training.checkpoint.environment import software_versions
from megatron.training.checkpoint.other_formats import (
    MODEL,
    check_tensors,
    embedding_rows,
    expected_tensors,
    with_settings,
)
from megatron.training.checkpoint.schema import malformed
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.stored_settings import config_to_dict, stored_family

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
LAYOUT = (
    "--target-tensor-parallel-size",
    "--target-pipeline-parallel-size",
    "--target-expert-parallel-size",
    "--max-queue-size",
    "--megatron-path",
    "--loader-transformer-impl",
    "--saver-transformer-impl",
    "--checkpoint-type",
    "--model-size",
)
"""Flags of Megatron-LM's tool that are accepted and ignored: checkpoints load into any layout."""


def parser() -> argparse.ArgumentParser:
    """Build the argument parser of this tool; unknown flags are passed to the model's parser."""
    arguments = formats.parser(__doc__)
    arguments.add_argument(
        "--saver",
        required=True,
        choices=(*formats.SAVERS, *formats.SAVER_ALIASES),
        metavar="FORMAT",
        help=f"format of the result: {', '.join(formats.SAVERS)}",
    )
    arguments.add_argument("--load-dir", required=True, metavar="DIR", help="the checkpoint to convert")
    arguments.add_argument("--save-dir", required=True, metavar="DIR", help="the folder to create")
    arguments.add_argument(
        "--model-type",
        default=default_family().upper(),
        choices=[name.upper() for name in families()],
        help="model type, if the folder does not contain it",
    )
    arguments.add_argument("--dtype", choices=DTYPES, help="dtype of the converted weights; default: unchanged")
    arguments.add_argument("--max-shard-size", type=float, default=4.0, metavar="GB", help="maximum size of a file")
    arguments.add_argument(
        "--keep-vocab-padding",
        action="store_true",
        help="keep the padding rows of a Megatron-LM vocabulary, part of its softmax",
    )
    arguments.add_argument("--no-optimizer", action="store_true", help="omit the optimizer state")
    arguments.add_argument(
        "--no-checking", action="store_true", help="do not compare logits with transformers at the end"
    )
    arguments.add_argument("--allow-non-finite", action="store_true", help="also convert NaN and infinite values")
    arguments.add_argument("--check-logits", action="store_true", help="compare logits for models of any size")
    arguments.add_argument(
        "--original-dir", metavar="DIR", help="saver hf: folder to copy with the weights of the model replaced"
    )
    arguments.add_argument(
        "--hf-family",
        metavar="TYPE",
        help="saver hf: model_type to write, such as mistral; default: the source folder's, else llama if it fits, else"
        " the first that fits",
    )
    arguments.add_argument(
        "--quantize",
        choices=get_args(Form),
        help="saver hf: linear layers in fp8, with a scale per 128 x 128 block (fp8-blocks), or per layer and, at run "
        "time, per token (fp8-dynamic); static scales of inputs: megatron quantize",
    )
    arguments.add_argument("--true-vocab-size", type=int, metavar="N", help="alias of --vocab-size")
    for name in LAYOUT:
        arguments.add_argument(name, help="accepted for scripts, no effect: any layout loads the result")
    return arguments


def main(argv: Sequence[str], input_scales: Mapping[str, float] | None = None) -> int:
    """Convert --load-dir to --save-dir in the format --saver, published only when complete; then compare logits with
    transformers if one side is HF, unless --no-checking. Other flags are settings of the model. ``input_scales``
    replaces --quantize (see ``save_hf``). Return the exit code (1: the logits differ)."""
    args, flags = parser().parse_known_args([word for word in argv if word != "--"])
    if args.true_vocab_size is not None:
        flags += ["--vocab-size", str(args.true_vocab_size)]
    for name in LAYOUT:
        if getattr(args, name[2:].replace("-", "_")) is not None:
            say(f"{name}: no effect, any layout loads the result")
    saver = formats.SAVER_ALIASES.get(args.saver, args.saver)
    if args.original_dir and (saver != "hf" or args.dtype):
        conflict = f"--saver {saver}" if saver != "hf" else f"--dtype {args.dtype}"
        reason = f"is a Hugging Face folder, whose dtypes apply; remove {conflict}"
        raise UserError(f"--original-dir {args.original_dir}: {reason}")
    if args.hf_family and (saver != "hf" or args.original_dir):
        fix = "remove --original-dir, which keeps its own" if args.original_dir else "use --saver hf"
        raise UserError(f"--hf-family {args.hf_family}: is the type of a new Hugging Face folder; {fix}")
    if args.quantize and (saver != "hf" or args.original_dir):
        fix = "remove --original-dir" if args.original_dir else "use --saver hf"
        raise UserError(f"--quantize {args.quantize}: is written to a new Hugging Face folder only; {fix}")
    loader, source = formats.open_checkpoint(
        args.load_dir,
        args.loader,
        args.ckpt_step,
        padded_vocabulary=args.keep_vocab_padding,
        model_family=args.model_type.lower(),
    )
    if "base" in source.objects:
        raise CheckpointError(f"{args.load_dir}: contains adapters only; merge or export them with tools/lora.py")
    if loader == "native":
        formats.check_copied_files(args.load_dir, args.ckpt_step)
    source.settings.setdefault("model_family", args.model_type.lower())
    cfg = completed(source, flags, loader, args.load_dir)
    trained = "optimizer" in source.objects or source.objects.get("iteration")
    if args.no_optimizer or not trained or saver == "hf":
        source.tensors = {name: tensor for name, tensor in source.tensors.items() if not name.startswith("optimizer.")}
        source.objects = {}
    source.tensors = {name: cast(name, tensor, args.dtype) for name, tensor in source.tensors.items()}
    quantize = args.quantize if input_scales is None else input_scales
    size = formats.total_bytes(source.tensors)
    say(f"{args.load_dir}: format {loader}, {len(source.tensors)} tensors, {size / 1e9:.3f} GB, as the settings say")
    for note in source.notes:
        say(f"note: {note}")
    identity = {
        "load": formats.stamp(args.load_dir),
        "saver": saver,
        "dtype": args.dtype,
        "flags": flags,
        "step": args.ckpt_step,
        "optimizer": not args.no_optimizer,
        "shard": args.max_shard_size,
        "padding": args.keep_vocab_padding,
        "original": args.original_dir and formats.stamp(args.original_dir),
        "quantize": quantize,
        "family": args.hf_family,
    }
    with Target(args.save_dir, identity) as target:
        hf = {"original": args.original_dir, "quantize": quantize, "family": args.hf_family}
        write(source, saver, target, size, int(args.max_shard_size * 1e9), allow_non_finite=args.allow_non_finite, **hf)
    kind = f", model_type {read_json(Path(args.save_dir, 'config.json'))['model_type']}" if saver == "hf" else ""
    say(f"{args.save_dir}: complete, format {saver}{kind}")
    if saver == "native":
        say(how_to_load(args.save_dir, source))
    if "hf" in (loader, saver) and not args.no_checking and args.quantize != "fp8-dynamic":
        from megatron.tools.checkpoint.compare_logits import compare_with_transformers

        # quantization changes the logits: compare the result with itself, as both implementations read it
        folder = args.load_dir if loader == "hf" and not args.quantize else args.save_dir
        written = formats.open_checkpoint(args.save_dir, saver)[1] if loader == "hf" or args.quantize else source
        code = compare_with_transformers(folder, written, cfg, always=args.check_logits)
        if code:
            say(f"{args.save_dir}: renamed to {set_aside(Path(args.save_dir))}, because its logits differ")
        return code
    return 0


def set_aside(folder: Path) -> Path:
    """Rename the result ``folder`` of a conversion that failed its check; return the new path."""
    names = (folder.with_name(f"{folder.name}.different{number or ''}") for number in itertools.count())
    target = next(path for path in names if not path.exists())
    folder.rename(target)
    return target


def completed(source: Interchange, flags: list[str], loader: str, where: str) -> PretrainConfig:
    """Merge ``source.settings`` with training ``flags``, validate both, and return the config. Writes the completed
    settings back to ``source.settings``. Raises CheckpointError if settings or tensors contradict the flags."""
    tensors = source.tensors
    rows = embedding_rows(tensors, where)
    # native: the tensors' size replaces the stored flag, which a tokenizer may have overridden in training
    if loader == "native" or source.settings.get("vocab_size") is None:
        source.settings["vocab_size"] = rows
    defaults = {"micro_batch_size": 1, "skip_train": True, "eval_iters": 0}
    family = stored_family(source.settings, where)
    cfg = parse_args(flags, args_defaults=defaults, needs_data=False, model_family=family.name)
    pattern = cfg.model.hybrid_layer_pattern
    if pattern and not source.settings.get("hybrid_layer_pattern"):
        split_layers(source, pattern)
        tensors = source.tensors
    cfg = with_settings(cfg, source.settings, where)
    limit = cfg.embeddings.max_position_embeddings or cfg.data.seq_length
    missing: dict[str, Any] = dict.fromkeys(("seq_length", *family.lengths), cfg.data.seq_length or limit)
    missing["tokenizer_type"] = "NullTokenizer"
    if cfg.tokenizer.tokenizer_type is None and "tokenizer/tokenizer.json" in source.assets:
        missing |= {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": where}
    missing = {name: getattr(cfg.flat, name) or value for name, value in missing.items()}
    resolved = validate_args(cfg.with_settings(**missing, max_position_embeddings=limit), 1, announce=False)
    check_tensors(tensors, expected_tensors(resolved, cfg.tokenizer.vocab_size or rows), where)
    model = {name: value for name, value in config_to_dict(resolved.flat).items() if name in MODEL}
    source.settings = {**source.settings, **model, "model_family": family.name}
    return resolved


def cast(name: str, tensor: LazyTensor, dtype: str | None) -> LazyTensor:
    """Cast on read to ``dtype``. Unchanged: optimizer state, counters, and the expert bias (fp32)."""
    import torch

    if dtype is None or not name.startswith("model.") or name.endswith((COUNTER, "expert_bias")):
        return tensor
    kind = getattr(torch, DTYPES[dtype])
    return LazyTensor(tensor.shape, kind, lambda: tensor.read().to(kind))


def write(
    source: Interchange,
    saver: str,
    target: Target,
    size: int,
    max_bytes: int,
    *,
    allow_non_finite: bool,
    **hf: Any,
) -> None:
    """Write ``source`` in the format ``saver`` to ``target`` and publish it under its final name, with progress on
    stderr. ``size``: bytes to write; ``max_bytes``: of one file; ``hf``: options of ``save_hf``.

    Raises:
        CheckpointError: not enough disk space, or NaN and infinite values without ``allow_non_finite``; completed files
            are kept for the next attempt.
        OSError: any other failure to write."""
    reused = sum(entry["bytes"] for entry in target.finished.values())
    free = shutil.disk_usage(target.folder).free
    if size - reused > free:
        raise CheckpointError(
            f"{target.final}: needs {(size - reused) / 1e9:.2f} GB, {free / 1e9:.2f} GB are free there"
        )
    progress = formats.CopyProgress("converted", size)
    progress.skip(reused)
    finite = FiniteCheck()
    watched = dataclasses.replace(source, tensors=finite.watch(progress.watch(source.tensors)))
    try:
        if saver == "native":
            write_native(dataclasses.replace(watched, tensors=with_counters(watched.tensors)), target, max_bytes)
        elif saver == "safetensors":
            save_safetensors(watched, target, max_file_bytes=max_bytes)
        elif saver == "hf":
            save_hf(watched, target, max_shard_bytes=max_bytes, **hf)
        else:
            save_megatron_torch_dist(watched, target.folder)
        finite.read_others(source.tensors)
        if problem := finite.problem():
            if not allow_non_finite:
                raise CheckpointError(f"{target.final}: not written, {problem}; --allow-non-finite converts them")
            say(f"note: {problem}")
        target.publish()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise CheckpointError(
                f"{target.final}: no space ({error.strerror}). Nothing appears under that name; {target.folder} keeps"
                " what is complete: make room and repeat the command, or delete it"
            ) from error
        raise
    progress.finish()


def write_native(source: Interchange, target: Target, max_bytes: int) -> None:
    """Write a native checkpoint and its tracker file below ``target``, not published: ``iter_…`` with training state,
    else ``release``. Adds the settings, software versions and tokenizer files to its objects."""
    objects: dict[str, Any] = {"tokenizer": None, "versions": software_versions(), **source.objects}
    which = objects["iteration"] if "train_state" in objects else RELEASE
    name = Path(checkpoint_directory(target.final, which)).name
    settings = {**source.settings, **copied_tokenizer(source, target.final / name)}
    run = [name for name in settings if name not in MODEL]
    objects["args"] = {**settings, "explicit": settings.get("explicit", sorted(run))}
    objects["args"] = json.loads(json.dumps(objects["args"]))
    if wrong := malformed(objects, release=which == RELEASE):
        raise CheckpointError(f"cannot be continued from: {'; '.join(wrong)}; --no-optimizer converts only the weights")
    save_native(source, target, name, objects, max_file_bytes=max_bytes)
    write_file(target.folder / TRACKER, str(which).encode())


def copied_tokenizer(source: Interchange, folder: Path) -> dict[str, str]:
    """Return the settings of tokenizer paths, changed to the copies below ``folder``; empty without copied files."""
    files = {Path(asset).name for asset in source.assets if asset.startswith("tokenizer/")}
    named = {key: source.settings.get(key) for key in ("tokenizer_model", "vocab_file", "merge_file")}
    places = {key: Path(value).name for key, value in named.items() if value and files}
    return {
        key: str(folder / "tokenizer" / file) if file in files else str(folder / "tokenizer")
        for key, file in places.items()
    }


def how_to_load(folder: str, source: Interchange) -> str:
    """Return a line with the flags that continue training from ``folder``, or that start from it."""
    if "train_state" in source.objects:
        fresh = "" if "optimizer" in source.objects else " --no-load-optim"
        flags = f"--load {folder} --use-checkpoint-args --no-load-rng{fresh}"
        return f"continue training with: {flags}, and the run's other flags"
    lengths = [f"--{field.replace('_', '-')} N" for field in stored_family(source.settings, folder).lengths[1:]]
    needed = " and ".join([*lengths, "a --save"])
    return f"start training with: --pretrained-checkpoint {folder} --use-checkpoint-args, and {needed} of your own"
