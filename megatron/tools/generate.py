"""Generate text with a GPT or T5 checkpoint.

    python tools/generate.py --load RUN/checkpoints --prompt "def main():" --prompt "import" --max-new-tokens 80
    torchrun --nproc-per-node 2 -m megatron generate --load RUN/checkpoints --prompt "def main():"
    python tools/generate.py --load T5/checkpoints --prompt "The <extra_id_0> sat on <extra_id_1> mat" --temperature 0

GPT continues each prompt, all in one batch; T5 generates the spans of the prompt's sentinels. A line of dashes
separates the outputs; each is independent of the other prompts. Model, tokenizer and lengths come from the checkpoint.
Decoding is greedy with --temperature 0. For BERT use tools/fill_mask.py."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.core.config.commands import tool_parser
from megatron.core.config.errors import UserError
from megatron.core.safe_files import parse_json, read_text
from megatron.tools.engine_flags import add_engine_flags, layout_flags, tokenizer_settings


def parse_command_line(argv: Sequence[str]) -> argparse.Namespace:
    """Exits with code 2 for malformed flags. Ranges are left to `check_ranges`, prompts to `load_prompts`."""
    parser = tool_parser(__doc__)
    parser.add_argument("--load", required=True, metavar="DIR", help="--save folder of a run, or a Hugging Face folder")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to load; default: the latest")
    parser.add_argument("--family", metavar="MODULE", help="module of a model family outside of megatron")
    parser.add_argument(
        "--prompt", action="append", default=[], help="text to continue (GPT; default: a new document), or to fill (T5)"
    )
    parser.add_argument("--prompt-file", type=Path, metavar="FILE", help="file with more prompts, one per line")
    parser.add_argument(
        "--chat", action="store_true", help="send each prompt as a user's message, by the tokenizer's chat template"
    )
    parser.add_argument(
        "--chat-template-kwargs",
        type=json_object,
        metavar="JSON",
        help="variables of the chat template, such as '{\"enable_thinking\": false}'",
    )
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="image before the text of each prompt, for models that read images; may be repeated; requires --chat",
    )
    parser.add_argument("--max-new-tokens", type=int, default=100, help="maximum length of each text, in tokens")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the most likely token")
    parser.add_argument("--top-k", type=int, default=0, help="sample from the K most likely tokens; 0: all tokens")
    parser.add_argument(
        "--top-p",
        type=float,
        default=0.9,
        help="sample from the most likely tokens of this total probability; 0: all tokens",
    )
    parser.add_argument("--seed", type=int, default=1234, help="of the draws")
    add_engine_flags(parser)
    return parser.parse_args(argv)


def json_object(text: str) -> dict[str, Any]:
    """Return the JSON object in ``text``, for argparse."""
    try:
        value = parse_json(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text}: must be a JSON object")
    return value


def load_prompts(args: argparse.Namespace) -> list[str]:
    """Return the prompts of --prompt, then the lines of --prompt-file; without any, one empty prompt (a new document).
    Raises UserError: the file cannot be read or is not UTF-8."""
    lines = []
    if args.prompt_file:
        try:
            lines = read_text(args.prompt_file).removeprefix("\ufeff").splitlines()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise UserError(f"--prompt-file {args.prompt_file}: cannot be read ({reason}); give a text file") from error
    return [*args.prompt, *lines] or [""]


def check_ranges(args: argparse.Namespace) -> None:
    """Raise ``UserError`` that lists all sampling flags and --ckpt-step whose values are out of range, one per line."""
    from megatron.core.inference.sampling import sampling_problems

    problems = sampling_problems(vars(args))
    lines = [f"--{name.replace('_', '-')} {value}: {problem}" for name, (value, problem) in problems.items()]
    if args.chat_template_kwargs is not None and not args.chat:
        lines.append("--chat-template-kwargs: requires --chat; add it")
    if args.image and not args.chat:
        lines.append(f"--image {args.image[0]}: requires --chat; add it")
    if args.ckpt_step is not None and args.ckpt_step < 0:
        lines.append(f"--ckpt-step {args.ckpt_step}: must not be negative")
    if lines:
        raise UserError("\n".join(lines))


def texts(args: argparse.Namespace) -> Iterator[str]:
    """Check flags and prompts, load the model, and yield the generated text of each prompt, with the same seed. Raises
    UserError: a flag is out of range, the prompt file is unreadable, or the checkpoint cannot be used."""
    from megatron.core.inference.sampling import Sampling
    from megatron.training.trained_model import load_trained_model

    check_ranges(args)
    prompts = load_prompts(args)
    layout, tokenizer = layout_flags(args), tokenizer_settings(args)
    trained = load_trained_model(
        args.load, args.ckpt_step, "tools/generate.py", args.family, layout, tokenizer, images=bool(args.image)
    )
    trained = replace(trained, cuda_graphs=args.cuda_graph_impl == "local", is_chat=args.chat)
    generate = trained.cfg.family.generate
    assert generate is not None, "only families with generate name this tool"
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    if args.image:
        trained = trained.with_images(args.image)
    if args.chat:
        render, variables = trained.tokenizer.render_chat, args.chat_template_kwargs or {}
        prompts = [render([user_message(prompt, len(args.image))], **variables) for prompt in prompts]
    yield from generate(trained, prompts, args.max_new_tokens, sampling)


def user_message(prompt: str, num_images: int) -> dict[str, Any]:
    """Return the message of a user: images, then ``prompt``."""
    parts = [{"type": "image"}] * num_images + [{"type": "text", "text": prompt}]
    return {"role": "user", "content": parts if num_images else prompt}


def main(argv: Sequence[str]) -> int:
    """Print the generated texts of the command line ``argv``; return the exit code."""
    args = parse_command_line(argv)
    for number, text in enumerate(texts(args)):
        print("-" * 40 + "\n" if number else "", text, sep="", flush=True)
    if layout_flags(args):
        from megatron.training.initialize import shut_down

        shut_down()
    return 0
