"""Text from a checkpoint of a GPT model.

    python tools/generate.py --load RUN/checkpoints --prompt "def main():" --prompt "import" --max-new-tokens 80

Texts of several prompts are divided by a line of dashes; none depends on the others. Model, tokenizer and context
length come from the checkpoint. Greedy with --temperature 0.
"""

import argparse
import sys
from pathlib import Path

from megatron.training.arguments import parse_args, validate_args


def parse_command_line() -> argparse.Namespace:
    """The flags of this tool."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--load", required=True, metavar="DIR", help="the --save directory of a training run")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to load; default: the latest")
    parser.add_argument("--prompt", action="append", default=[], help="text to continue; default: a new document")
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


def main() -> int:
    """Command line."""
    args = parse_command_line()
    import torch

    from megatron.core.groups.process_groups import SINGLE_PROCESS
    from megatron.core.inference.sampling import generate
    from megatron.core.tokenizers import build_tokenizer
    from megatron.training.checkpoint.checkpointer import Checkpointer
    from megatron.training.checkpoint.settings import apply_checkpoint_args
    from megatron.training.initialize import training_device
    from megatron.training.tasks.gpt import GPTTask

    argv = ["--load", args.load, "--use-checkpoint-args", "--exit-on-missing-checkpoint", "--finetune"]
    argv += ["--skip-train", "--micro-batch-size", "1", "--eval-iters", "0"]
    argv += [] if args.ckpt_step is None else ["--ckpt-step", str(args.ckpt_step)]
    try:
        prompts = prompts_of(args)
        cfg = validate_args(apply_checkpoint_args(parse_args(argv, needs_data=False)), world_size=1)
        tokenizer = build_tokenizer(cfg)
        model = GPTTask(cfg, tokenizer).model_provider().to(training_device())
        Checkpointer(cfg, [model], None, None, groups=SINGLE_PROCESS, tokenizer=tokenizer).load()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for number, prompt in enumerate(prompts):
        tokens = generate(
            model,
            tokenizer.tokenize(prompt) or [tokenizer.eod],
            max_new_tokens=args.max_new_tokens,
            max_sequence_length=cfg.seq_length,
            stop_token=tokenizer.eod,
            greedy=args.temperature == 0,
            generator=torch.Generator().manual_seed(args.seed),
            filters={"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p},
        )
        print("-" * 40 + "\n" if number else "", prompt, tokenizer.detokenize(list(tokens)), sep="", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
