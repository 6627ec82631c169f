"""Score a GPT checkpoint on tasks of lm-evaluation-harness, without converting it.

    python tools/evaluate.py --load RUN/checkpoints --tasks hellaswag,arc_easy --num-fewshot 5 --output scores.json
    python tools/evaluate.py --load Qwen3-0.6B --tasks my_task --include-path my_tasks

The harness downloads the data of its tasks; tasks of --include-path may read local files. Requires: pip install lm-eval
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core.config.commands import as_typed
from megatron.core.config.errors import UserError
from megatron.tools.engine_flags import add_engine_flags, load_gpt, on_first_rank

if TYPE_CHECKING:
    from megatron.core.inference.engine import Engine
    from megatron.core.tokenizers.base import Tokenizer


def parse_command_line(argv: Sequence[str]) -> argparse.Namespace:
    """Return the flags of this tool (--load and --tasks are required). Exits with code 2 for unknown, abbreviated or
    malformed flags; raises UserError for values out of range."""
    parser = argparse.ArgumentParser(
        description=as_typed(__doc__ or ""), formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
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
    return args


def build_adapter(engine: Engine, tokenizer: Tokenizer) -> Any:
    """Return the harness's model (``lm_eval.api.model.TemplateLM``) that scores and generates with ``engine``. Raises
    UserError without the package."""
    try:
        from lm_eval import utils
        from lm_eval.api.model import TemplateLM
    except ImportError as error:
        raise UserError(f"evaluation needs lm_eval, which cannot be imported ({error}); pip install lm-eval") from error
    from megatron.core.inference.scoring import score

    class Adapter(TemplateLM):
        """The harness's contract: log-likelihoods of continuations and documents, and greedy or sampled text."""

        def __init__(self) -> None:
            super().__init__()
            self.max_length = engine.scheduler.limits.max_length
            self.max_gen_toks = 256

        @property
        def tokenizer_name(self) -> str:
            return f"{tokenizer.tokenizer_type}-{tokenizer.fingerprint}"

        @property
        def eot_token_id(self) -> int:
            return tokenizer.eod

        @property
        def prefix_token_id(self) -> int:
            return tokenizer.special_ids.get("bos", tokenizer.eod)

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
            begins = string.startswith(tokenizer.detokenize([self.prefix_token_id]) or "\0")
            if add_special_tokens is False or (add_special_tokens is None and begins):
                return tokenizer.tokenize_sentences([string], False)[0].tolist()
            return tokenizer.tokenize(string)

        def chat_template(self, chat_template: bool | str = False) -> str:
            return (tokenizer.chat_template or "") if chat_template else ""

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            if not add_generation_prompt:
                raise UserError("--apply-chat-template: this task continues the assistant's answer; remove the flag")
            return tokenizer.chat_prompt(chat_history)

        def _loglikelihood_tokens(self, requests: Any, **_: object) -> list[tuple[float, bool]]:
            found = score(engine, [(context, continuation) for _, context, continuation in requests])
            results = [(each.logprob, each.is_greedy) for each in found]
            for (key, _, _), result in zip(requests, results):
                if key is not None:
                    self.cache_hook.add_partial("loglikelihood", key, result)
            return results

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            pairs: list[tuple[list[int], list[int]]] = []
            owners: list[int] = []
            for number, (text,) in enumerate(each.args for each in requests):
                windows = utils.get_rolling_token_windows(
                    self.tok_encode(text), self.prefix_token_id, self.max_length, 1
                )
                pairs += list(map(utils.make_disjoint_window, windows))
                owners += [number] * (len(pairs) - len(owners))
            results = [0.0] * len(requests)
            for number, each in zip(owners, score(engine, pairs)):
                results[number] += each.logprob
            for each, result in zip(requests, results):
                self.cache_hook.add_partial("loglikelihood_rolling", each.args, result)
            return results

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            texts = generate_texts(engine, tokenizer, [each.args for each in requests], self)
            for each, text in zip(requests, texts):
                self.cache_hook.add_partial("generate_until", each.args, text)
            return texts

    return Adapter()


def generate_texts(
    engine: Engine, tokenizer: Tokenizer, jobs: Sequence[tuple[str, dict[str, Any]]], adapter: Any
) -> list[str]:
    """Return the text generated after each context with the harness's settings, before the first stop string."""
    from megatron.core.inference.requests import Request
    from megatron.core.inference.sampling import Sampling
    from megatron.core.inference.text import TextStream

    streams: dict[int, tuple[int, TextStream]] = {}
    texts = [""] * len(jobs)
    for index, (context, settings) in enumerate(jobs):
        until = settings.get("until") or []
        longest = int(settings.get("max_gen_toks", adapter.max_gen_toks))
        if longest >= adapter.max_length:
            raise UserError(f"max_gen_toks {longest}: must be below the model's length {adapter.max_length}")
        draws = settings.get("do_sample") or settings.get("temperature")
        sampling = Sampling(
            temperature=float(settings.get("temperature", 1.0)) if draws else 0.0,
            top_k=int(settings.get("top_k", 0)),
            top_p=float(settings.get("top_p", 0)),
            seed=1234 + index,
        )
        prompt = (adapter.tok_encode(context) or [tokenizer.eod])[longest - adapter.max_length :]
        request = Request(prompt=prompt, max_new_tokens=longest, sampling=sampling, stop_tokens=[tokenizer.eod])
        stops = [each for each in ([until] if isinstance(until, str) else until) if each]
        streams[engine.add(request)] = index, TextStream(tokenizer, prompt, stops)
    while engine.has_work:
        for output in engine.step():
            index, stream = streams[output.request]
            if output.token is not None:
                texts[index] += stream.push(output.token)
            if output.completion.finish_reason is not None:
                texts[index] += stream.finish()
            elif stream.stopped:
                engine.cancel(output.request)
    return texts


def evaluate(engine: Engine, tokenizer: Tokenizer, args: argparse.Namespace) -> dict[str, Any]:
    """Return the harness's results for the tasks of ``args``. Raises UserError for unknown tasks."""
    adapter = build_adapter(engine, tokenizer)
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if args.include_path is None else str(args.include_path))
    tasks = [name.strip() for name in args.tasks.split(",") if name.strip()]
    if unknown := [name for name in tasks if not manager.match_tasks([name])] or (not tasks and ["(empty)"]):
        raise UserError(f"--tasks {unknown[0]}: is no task of lm-evaluation-harness or of --include-path")
    return simple_evaluate(
        model=adapter,
        tasks=tasks,
        num_fewshot=args.num_fewshot,
        limit=args.limit,
        apply_chat_template=args.apply_chat_template,
        task_manager=manager,
    )


def main(argv: Sequence[str]) -> int:
    """Print the scores of the command line ``argv`` as the harness's table; return the exit code."""
    args = parse_command_line(argv)
    from megatron.core.inference.engine import Engine
    from megatron.core.inference.scheduler import Limits

    trained = load_gpt(args)
    limits = Limits(trained.cfg.data.seq_length, max_tokens=args.max_tokens)
    engine = Engine(trained.model, limits, cuda_graphs=args.cuda_graph_impl == "local")
    results = on_first_rank(engine, lambda: evaluate(engine, trained.tokenizer, args))
    if results is None:
        return 0
    from lm_eval.utils import make_table

    print(make_table(results))
    if args.output is not None:
        kept = {name: results[name] for name in ("results", "n-samples", "versions") if name in results}
        args.output.write_text(json.dumps(kept, indent=1, default=str) + "\n", encoding="utf-8")
    return 0
