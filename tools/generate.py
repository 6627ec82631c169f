"""Text from a checkpoint of a GPT or T5 model.

    python tools/generate.py --load RUN/checkpoints --prompt "def main():" --prompt "import" --max-new-tokens 80
    python tools/generate.py --load T5/checkpoints --prompt "The <extra_id_0> sat on <extra_id_1> mat" --temperature 0

GPT continues each prompt, T5 writes what its sentinels stand for. Texts of several prompts are divided by a line of
dashes; none depends on the others. Model, tokenizer and lengths come from the checkpoint. Greedy with --temperature 0.
tools/fill_mask.py is for BERT.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.core.inference.sampling import Sampling
    from megatron.training.trained_model import TrainedModel


def parse_command_line() -> argparse.Namespace:
    """The flags of this tool."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--load", required=True, metavar="DIR", help="the --save directory of a training run")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to load; default: the latest")
    parser.add_argument("--prompt", action="append", default=[],
                        help="text to continue (GPT; default: a new document), or to fill (T5)")  # fmt: skip
    parser.add_argument("--prompt-file", type=Path, metavar="FILE", help="further prompts, one a line")
    parser.add_argument("--max-new-tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token")
    parser.add_argument("--top-k", type=int, default=0, help="draw from the K likeliest tokens; 0: from all")
    parser.add_argument("--top-p", type=float, default=0.9, help="draw from the likeliest tokens of this mass; 0: all")
    parser.add_argument("--seed", type=int, default=1234, help="of the draws")
    return parser.parse_args()


def prompts_of(args: argparse.Namespace) -> list[str]:
    """Those of the command line, then those of the file; one empty prompt, a new document, where there is none."""
    lines = args.prompt_file.read_text(encoding="utf-8").splitlines() if args.prompt_file else []
    return [*args.prompt, *lines] or [""]


def continued(trained: TrainedModel, prompt: str, max_new_tokens: int, sampling: Sampling) -> str:
    """``prompt`` with what a GPT writes behind it."""
    from megatron.core.inference.sampling import generate

    tokenizer = trained.tokenizer
    tokens = generate(
        trained.model, tokenizer.tokenize(prompt) or [tokenizer.eod], max_new_tokens=max_new_tokens,
        max_sequence_length=trained.cfg.seq_length, stop_token=tokenizer.eod, sampling=sampling,
    )  # fmt: skip
    return prompt + tokenizer.detokenize(list(tokens))


def filled(trained: TrainedModel, prompt: str, max_new_tokens: int, sampling: Sampling) -> str:
    """``prompt``, and behind an arrow what a T5 answers: sentinels, each with the span that it stands for."""
    from megatron.core.inference.sampling import generate_answer

    tokenizer = trained.tokenizer
    tokens = generate_answer(
        trained.model, tokenizer.tokenize(prompt), start=_start(trained.tokenizer),
        max_new_tokens=max_new_tokens, max_sequence_length=trained.cfg.max_position_embeddings,
        stop_token=tokenizer.eos, sampling=sampling,
    )  # fmt: skip
    return f"{prompt}\n-> {tokenizer.detokenize(list(tokens))}"


def _start(tokenizer: Any) -> int:
    """The token that decoder inputs begin with, as in the data set."""
    return tokenizer.special_ids["bos"] if "bos" in tokenizer.special_ids else tokenizer.pad  # noqa: SIM401  (raises)


def texts(args: argparse.Namespace) -> Iterator[str]:
    """The text of each prompt."""
    from megatron.core.inference.sampling import Sampling
    from megatron.training.trained_model import load_trained_model

    prompts = prompts_of(args)
    trained = load_trained_model(args.load, args.ckpt_step, "tools/generate.py")
    write = filled if trained.cfg.model_family == "t5" else continued
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    for prompt in prompts:
        yield write(trained, prompt, args.max_new_tokens, sampling)


def main() -> int:
    """Command line."""
    args = parse_command_line()
    try:
        for number, text in enumerate(texts(args)):
            print("-" * 40 + "\n" if number else "", text, sep="", flush=True)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
