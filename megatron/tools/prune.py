"""Prune a GPT to a smaller one: keep its most important channels, heads, experts and layers (Minitron).

    megatron prune --load RUN --save SMALL --data-path DATA_text_document \\
        --prune-export-config '{"hidden_size": 2048, "ffn_hidden_size": 5632, "num_layers": 24}'

RUN is the --save folder of a run, or a Hugging Face folder. Importance is measured on samples of the training split, on
one process. SMALL is a checkpoint of weights with its own settings: train or distill it next, because pruning raises
the loss. Sizes that are not named stay; the number of channels per head always stays."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from megatron.core.config.commands import tool_parser
from megatron.core.config.errors import UserError
from megatron.tools.engine_flags import add_tokenizer_flags, check_new_folder, tokenizer_settings
from megatron.training.config.launcher import launched_world_size

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.training.trained_model import TrainedModel

MAX_SEQ_LENGTH = 4096
MAX_BYTES = 4 * 10**9


def parser() -> argparse.ArgumentParser:
    """Build the argument parser of this tool."""
    arguments = tool_parser(__doc__)
    arguments.add_argument(
        "--load", required=True, metavar="DIR", help="--save folder of a run, or Hugging Face folder"
    )
    arguments.add_argument("--save", required=True, metavar="DIR", help="the folder to create")
    arguments.add_argument(
        "--prune-export-config",
        required=True,
        metavar="JSON",
        help='sizes after pruning, such as {"hidden_size": 2048}',
    )
    arguments.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to read; default: the latest")
    arguments.add_argument("--data-path", nargs="+", metavar="PREFIX", help="tokenized data, as in training")
    arguments.add_argument("--mock-data", action="store_true", help="random tokens in place of data")
    arguments.add_argument("--split", default="969,30,1", help="split of the data, as in training")
    arguments.add_argument("--calib-size", type=int, default=1024, metavar="N", help="samples that are measured")
    arguments.add_argument(
        "--seq-length",
        type=int,
        metavar="N",
        help=f"tokens of a sample; default: the model's, at most {MAX_SEQ_LENGTH}",
    )
    add_tokenizer_flags(arguments)
    return arguments


def calibration_samples(trained: TrainedModel, args: argparse.Namespace) -> Iterator[Tensor]:
    """Yield --calib-size samples of token ids int64 [s] on the model's device. Raises UserError for unusable data."""
    import torch

    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.training.data.datasets import check_data_tokenizer, select_data_set
    from megatron.training.initialize import training_device

    length = args.seq_length or min(trained.cfg.data.seq_length or MAX_SEQ_LENGTH, MAX_SEQ_LENGTH)
    positions = trained.cfg.embeddings.max_position_embeddings
    if trained.cfg.embeddings.position_embedding_type == "learned_absolute" and positions and length > positions:
        raise UserError(f"--seq-length {length}: the model has {positions} positions; give at most that")
    cfg = trained.cfg.with_settings(
        data_path=args.data_path, mock_data=args.mock_data, split=args.split, seq_length=length
    )
    kind, config = select_data_set(cfg, trained.tokenizer)
    check_data_tokenizer(config, trained.tokenizer)
    train, _, _ = BlendedMegatronDatasetBuilder(kind, [args.calib_size, 0, 0], lambda: True, config).build()
    if train is None:
        raise UserError(f"--split {args.split}: the training split is empty; change it")
    for index in range(args.calib_size):
        yield torch.as_tensor(train[index]["tokens"], device=training_device())


def check_arguments(args: argparse.Namespace) -> None:
    """Raise UserError for flags that are invalid for every model."""
    for name in ("calib_size", "seq_length"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    if args.mock_data is bool(args.data_path):
        raise UserError("--data-path: give the data to measure importance on, or --mock-data; exactly one of them")
    if (launched_world_size() or 1) > 1:
        raise UserError("megatron prune: runs on one process; start it without torchrun")
    check_new_folder("--save", args.save)


def main(argv: Sequence[str] | None = None) -> int:
    """Prune --load to --save; return 0. Raises UserError if model, sizes or data cannot be used."""
    args = parser().parse_args(argv)
    check_arguments(args)
    from megatron.core.models.gpt.model import GPTModel
    from megatron.export.files import Target
    from megatron.post_training.importance import measure
    from megatron.post_training.pruning import check_prunable, prune, target_sizes, top
    from megatron.tools.checkpoint import formats
    from megatron.tools.checkpoint.convert import completed, how_to_load, write
    from megatron.tools.checkpoint.formats import say
    from megatron.training.trained_model import load_trained_model

    loader, source = formats.open_checkpoint(args.load, "auto", args.ckpt_step)
    where = f"--load {args.load}"
    if "base" in source.objects:
        raise UserError(f"{where}: contains adapters only; merge them with megatron lora merge")
    source.tensors = {name: tensor for name, tensor in source.tensors.items() if name.startswith("model.")}
    cfg = completed(source, [], loader, args.load)
    check_prunable(cfg.model, where)
    sizes = target_sizes(args.prune_export_config, cfg.model)
    trained = load_trained_model(args.load, args.ckpt_step, "tools/generate.py", tokenizer=tokenizer_settings(args))
    if type(trained.model) is not GPTModel:
        raise UserError(f"{where}: is no GPT, the only model that can be pruned")
    importance = measure(trained.model, calibration_samples(trained, args), cfg.model.num_attention_heads)
    say(f"importance: measured on {args.calib_size} samples")
    layers = top(importance["layers"], sizes["num_layers"])
    if len(layers) < cfg.model.num_layers:
        say(f"layers that stay (from 1): {', '.join(str(layer + 1) for layer in layers.tolist())}")
    pruned = prune(source, cfg.model, importance, sizes)
    smaller = completed(pruned, [], "native", args.save)
    for note in pruned.notes:
        say(f"note: {note}")
    with Target(args.save) as target:
        write(pruned, "native", target, formats.total_bytes(pruned.tensors), MAX_BYTES, allow_non_finite=False)
    counts = [_count(part, model) for part, model in ((cfg, source), (smaller, pruned))]
    say(f"{args.save}: complete, {counts[1]:,} of {counts[0]:,} parameters")
    say(how_to_load(args.save, pruned))
    return 0


def _count(cfg: Any, model: Any) -> int:
    return cfg.describe(model.settings["vocab_size"]).num_parameters
