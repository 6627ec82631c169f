"""Quantize the linear layers of a trained GPT model to fp8, calibrated on texts, as a Hugging Face folder.

    python tools/quantize.py --load RUN/checkpoints --save-hf OUT --format fp8 --data texts.jsonl
    python tools/quantize.py --load Qwen3-0.6B --save-hf OUT --format fp8-blocks --data-path data/text

fp8: one scale per weight and a static one per layer's inputs, their largest magnitude on the texts (or a percentile).
fp8-dynamic: the scales of inputs are computed per token at run time. fp8-blocks: a scale per 128 x 128 block of
weights and per 128 features of a token. Prints the perplexity of further texts before and after. On the ranks of
torchrun, the folder must be visible to all ranks."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from megatron.core.config.commands import tool_parser
from megatron.core.config.errors import UserError
from megatron.core.dist_checkpointing.files import read_json
from megatron.core.safe_files import read_text
from megatron.export.hf.quantization import KEY, Form
from megatron.tools.engine_flags import add_engine_flags, check_new_folder, load_gpt

if TYPE_CHECKING:
    from torch import nn

    from megatron.core.groups.process_groups import ProcessGroups
    from megatron.training.trained_model import TrainedModel

MAX_COUNT = 10**9
FOREIGN = {
    "--weight-only": "--format fp8-dynamic has no static scales of inputs",
    "--compress": "weights are always stored in fp8",
    "--disable-qkv-quant": "all linear layers of attention are quantized",
    "--recipe": "give --format",
    "--sync-expert-weight-amax": "each expert has a scale of its weights",
    **dict.fromkeys(("--auto-quantize-bits", "--auto-quantize-formats"), "all layers have one format"),
}
"""Flags of ModelOpt's program that this tool does not have -> reason."""


def parse_command_line(argv: Sequence[str]) -> argparse.Namespace:
    """Exits with code 2 for malformed flags; raises UserError for values that cannot be used."""
    words = [word.partition("=")[0] for word in argv]
    if refused := next((word for word in words if word in FOREIGN), None):
        raise UserError(f"{refused}: is a flag of NVIDIA ModelOpt; {FOREIGN[refused]}: remove it")
    parser = tool_parser(__doc__)
    sources = ("--load", "--load-hf")
    parser.add_argument(*sources, required=True, metavar="DIR", help="--save folder of a run, or a Hugging Face folder")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to load; default: the latest")
    parser.add_argument("--family", metavar="MODULE", help="module of a model family outside of megatron")
    add_engine_flags(parser)
    parser.add_argument("--save-hf", "--export-dir", required=True, metavar="DIR", help="the folder to create")
    parser.add_argument(
        "--format", "--export-quant-cfg", choices=("fp8", *get_args(Form)), default="fp8", help="default: fp8"
    )
    data = parser.add_mutually_exclusive_group(required=True)
    names = ("--data", "--calib-dataset-path-or-name")
    data.add_argument(*names, metavar="FILE", help='texts: JSON lines with "text", or one text')
    data.add_argument("--data-path", metavar="PREFIX", help="tokenized texts: PREFIX.bin and PREFIX.idx")
    parser.add_argument("--calib-size", type=int, default=512, metavar="N", help="rows to calibrate on")
    parser.add_argument("--calib-max-sequence-length", type=int, metavar="N", help="tokens of a row; default: 2048")
    parser.add_argument("--calib-batch-size", type=int, default=1, metavar="N", help="rows of a forward pass")
    text = "fp8: share of inputs in %% that are not clipped; default: 100, the largest magnitude"
    parser.add_argument("--calib-percentile", type=float, default=100.0, metavar="P", help=text)
    parser.add_argument("--eval-size", type=int, default=64, metavar="N", help="further rows for the perplexities")
    args = parser.parse_args(argv)
    for name in ("calib_size", "calib_batch_size", "eval_size", "calib_max_sequence_length"):
        if (value := getattr(args, name)) is not None and not 1 <= value <= MAX_COUNT:
            raise UserError(f"--{name.replace('_', '-')} {value}: must be from 1 to {MAX_COUNT}")
    if not 0 < args.calib_percentile <= 100:
        raise UserError(f"--calib-percentile {args.calib_percentile}: must be above 0 and at most 100")
    check_new_folder("--save-hf", args.save_hf)
    config = Path(args.load) / "config.json"
    if config.is_file() and KEY in read_json(config):
        raise UserError(f"--load {args.load}: is quantized already; quantize the folder of the model in bf16")
    return args


def documents(args: argparse.Namespace, tokenize: Callable[[str], Sequence[int]], end: int) -> Iterator[Sequence[int]]:
    """Yield the tokens of each text. Raises UserError: the texts cannot be read."""
    from megatron.core.datasets.conversations.prepare import json_object, read_lines

    if args.data_path is not None:
        from megatron.data.indexed_dataset import IndexedDataset

        try:
            dataset = IndexedDataset(args.data_path)
        except (OSError, ValueError) as error:
            raise UserError(f"--data-path {args.data_path}: {error}") from None
        yield from (dataset[number].tolist() for number in range(len(dataset)))
        return
    try:
        if not args.data.endswith((".jsonl", ".json")):
            yield [*tokenize(read_text(args.data)), end]
            return
        for number, line in read_lines(args.data):
            if line.strip():
                text = json_object(line).get("text")
                if not isinstance(text, str):
                    raise UserError(f"line {number}: 'text' is missing or no text; conversations are not read")
                yield [*tokenize(text), end]
    except (OSError, ValueError) as error:
        raise UserError(f"--data {args.data}: cannot be read as texts ({error})") from None


def read_rows(args: argparse.Namespace, trained: TrainedModel) -> list[list[int]]:
    """Return --calib-size rows, then --eval-size rows of consecutive tokens, one more than a row's length each. Raises
    UserError if there are fewer tokens."""
    model_length = trained.cfg.data.seq_length or 2048
    length = args.calib_max_sequence_length or min(model_length, 2048)
    if length > model_length:
        raise UserError(f"--calib-max-sequence-length {length}: the model takes {model_length} tokens")
    if length % (split := trained.cfg.model.tensor_model_parallel_size or 1):  # steps without rows of padding
        raise UserError(f"--calib-max-sequence-length {length}: must be a multiple of the {split} ranks of a layer")
    needed = args.calib_size + args.eval_size
    ids = (token for text in documents(args, trained.tokenizer.tokenize, trained.tokenizer.eod) for token in text)
    tokens = list(islice(ids, needed * length + 1))
    if len(tokens) <= needed * length:
        have = max(len(tokens) - 1, 0) // length
        reason = f"{have} rows of {length} tokens, {needed} are needed"
        raise UserError(f"{'--data' if args.data else '--data-path'}: {reason}; lower --calib-size or --eval-size")
    return [tokens[start : start + length + 1] for start in range(0, needed * length, length)]


def perplexity(
    trained: TrainedModel, rows: Sequence[Sequence[int]], batch: int, install: Callable[[nn.Module], None] | None = None
) -> float:
    """Return the perplexity of ``rows`` on rank 0, else NaN; ``install`` changes the model just before. Collective."""
    from megatron.core.evaluation.scoring import score
    from megatron.core.inference.engine import Engine
    from megatron.core.inference.scheduler import Limits

    length = len(rows[0]) - 1
    engine = Engine(trained.model, Limits(length, max_tokens=batch * length), cuda_graphs=False)
    engine.runner.pads_prompts = False  # rows of padding would be recorded
    if install is not None:  # after the engine has measured a step of zeros
        install(trained.model)
    if not engine.is_first_rank:
        engine.follow()
        return math.nan
    try:
        scores = score(engine, [(row[:1], row[1:]) for row in rows])
    finally:
        engine.stop()
    return math.exp(-sum(entry.logprob for entry in scores) / (len(rows) * length))


def main(argv: Sequence[str]) -> int:
    """Calibrate, write the folder and print perplexities; return the exit code."""
    args = parse_command_line(argv)
    import torch.distributed as dist

    from megatron.core.tensor_parallel import calibration
    from megatron.core.tensor_parallel.fake_quantization import TokenRounding
    from megatron.export.hf.writer import check_quantizable
    from megatron.tools.checkpoint import convert, formats
    from megatron.training.checkpoint.other_formats import load_hf_weights
    from megatron.training.initialize import shut_down

    _, source = formats.open_checkpoint(args.load, "auto", args.ckpt_step)
    if "base" in source.objects:
        raise UserError(f"--load {args.load}: contains adapters only; merge them first with megatron lora merge")
    check_quantizable(source, args.format)  # before it calibrates
    trained = load_gpt(args)
    groups: ProcessGroups = trained.model.groups  # type: ignore[assignment]
    world, batch = groups.world, args.calib_batch_size
    rows = read_rows(args, trained)
    measured = rows[args.calib_size :]
    before = perplexity(trained, measured, batch)
    magnitudes: dict[str, calibration.Magnitudes] = {}

    def record(name: str) -> calibration.Inputs:
        return magnitudes.setdefault(name, calibration.Magnitudes(counts=args.calib_percentile < 100))

    if args.format == "fp8":  # other formats have no static scales
        install = partial(calibration.replace_inputs, inputs=record, records=True)
        perplexity(trained, rows[: args.calib_size], batch, install)
    input_scales = calibration.gather_scales(magnitudes, args.calib_percentile, world)
    if world.is_first:
        step = [] if args.ckpt_step is None else ["--ckpt-step", str(args.ckpt_step)]
        words = ["--saver", "hf", "--load-dir", args.load, "--save-dir", args.save_hf, "--no-checking"]
        if args.format == "fp8":
            convert.main([*words, *step], input_scales)
        else:
            convert.main([*words, "--quantize", args.format, *step])
    if world.size > 1:
        dist.barrier(world.handle)
    # the weights of the folder itself: the second perplexity describes what was written
    load_hf_weights(args.save_hf, [trained.model], None, groups, model_family=trained.cfg.model_family)

    def rounding(name: str) -> calibration.Inputs:
        if args.format == "fp8":
            return calibration.static_rounding(input_scales[name])
        return TokenRounding() if args.format == "fp8-dynamic" else calibration.group_rounding

    after = perplexity(trained, measured, batch, partial(calibration.replace_inputs, inputs=rounding))
    if world.is_first:
        tokens = len(measured) * (len(measured[0]) - 1)
        print(f"perplexity of {tokens} tokens: {before:.4f} before, {after:.4f} after ({after / before - 1:+.2%})")
    if world.size > 1:
        shut_down()
    return 0
