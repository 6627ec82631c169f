"""Score a GPT checkpoint on tasks of lm-evaluation-harness, without converting it.

    python tools/evaluate.py --load RUN/checkpoints --tasks hellaswag,arc_easy --num-fewshot 5 --output scores.json
    python tools/evaluate.py --load Qwen3-0.6B --tasks my_task --include-path my_tasks

The harness downloads the data of its tasks; tasks of --include-path may read local files. Requires: pip install lm-eval
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core.config.commands import tool_parser
from megatron.core.config.errors import UserError
from megatron.core.evaluation.tasks import find_tasks
from megatron.tools.engine_flags import add_engine_flags, load_gpt, on_first_rank

if TYPE_CHECKING:
    from megatron.core.inference.engine import Engine
    from megatron.core.tokenizers.base import Tokenizer


def parse_command_line(argv: Sequence[str]) -> argparse.Namespace:
    """Exits with code 2 for malformed flags; raises UserError for values out of range."""
    parser = tool_parser(__doc__)
    parser.add_argument("--load", required=True, metavar="DIR", help="--save folder of a run, or a Hugging Face folder")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to load; default: the latest")
    parser.add_argument("--family", metavar="MODULE", help="module of a model family outside of megatron")
    add_engine_flags(parser)
    parser.add_argument("--tasks", required=True, metavar="NAME,...", help="tasks of the harness")
    parser.add_argument("--include-path", type=Path, metavar="DIR", help="folder with the YAML files of more tasks")
    parser.add_argument(
        "--num-fewshot", type=int, metavar="N", help="examples before each question; default: the task's"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="documents per task; default: all")
    parser.add_argument("--apply-chat-template", action="store_true", help="send questions as a user's messages")
    parser.add_argument("--max-tokens", type=int, default=8192, metavar="N", help="tokens of a forward pass")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON file for the results")
    args = parser.parse_args(argv)
    for name, least in (("num_fewshot", 0), ("limit", 1), ("max_tokens", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} {value}: must be at least {least}")
    if args.include_path is not None and not args.include_path.is_dir():
        raise UserError(f"--include-path {args.include_path}: is not a folder")
    if not os.path.exists(args.load):
        raise UserError(f"--load {args.load}: no such folder; give that of a run's --save, or a Hugging Face folder")
    if args.output is not None:
        check_output(args.output)
    return args


def check_output(path: Path) -> None:
    """Raise UserError if ``path`` cannot be written. Does not create it: ranks check it at the same time."""
    try:
        if path.exists():
            path.open("a").close()
        else:
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise UserError(f"--output {path}: cannot be written ({error.strerror}); choose another file") from error


def task_names(args: argparse.Namespace) -> list[str]:
    """Return the names of --tasks."""
    return [name.strip() for name in args.tasks.split(",") if name.strip()]


def evaluate(engine: Engine, tokenizer: Tokenizer, args: argparse.Namespace, manager: Any) -> dict[str, Any]:
    """Return the harness's results for the tasks of ``args``, which ``manager`` (:func:`find_tasks`) knows."""
    from megatron.core.evaluation.harness import evaluate_tasks

    return evaluate_tasks(
        engine,
        tokenizer,
        task_names(args),
        manager,
        num_fewshot=args.num_fewshot,
        limit=args.limit,
        apply_chat_template=args.apply_chat_template,
    )


def check_scores(results: dict[str, dict[str, Any]]) -> None:
    """Raise UserError if a score is NaN or infinite. Standard errors that are become the harness's "N/A"."""
    for task, scores in results.items():
        wrong = [name for name, value in scores.items() if isinstance(value, float) and not math.isfinite(value)]
        for name in wrong:
            metric = name.partition(",")[0]
            if not metric.endswith("_stderr"):
                raise UserError(
                    f"--tasks {task}: {metric} is {scores[name]}, so no results are written: the model gives a text "
                    "the probability 0, or the task has nothing to score"
                )
            scores[name] = "N/A"


def main(argv: Sequence[str]) -> int:
    """Print the scores of the command line ``argv`` as the harness's table; return the exit code."""
    args = parse_command_line(argv)
    manager = find_tasks("--tasks", task_names(args), args.include_path)
    from megatron.core.inference.engine import Engine
    from megatron.core.inference.scheduler import Limits

    trained = load_gpt(args)
    limits = Limits(trained.cfg.data.seq_length, max_tokens=args.max_tokens)
    engine = Engine(trained.model, limits, cuda_graphs=args.cuda_graph_impl == "local")
    results = on_first_rank(engine, lambda: evaluate(engine, trained.tokenizer, args, manager))
    if results is None:
        return 0
    from lm_eval.utils import make_table

    print(make_table(results))
    for kind in ("results", "groups"):
        check_scores(results.get(kind) or {})
    if args.output is not None:
        selected = {name: results[name] for name in ("results", "n-samples", "versions") if name in results}
        args.output.write_text(json.dumps(selected, indent=1, default=str, allow_nan=False) + "\n", encoding="utf-8")
    return 0
