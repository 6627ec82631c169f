"""lm-evaluation-harness on the generation engine: its model interface, and scores of tasks.

The package is imported when it is used; it downloads the data of its tasks, except of local ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron.core.config.errors import UserError
from megatron.core.evaluation.scoring import score
from megatron.core.extensions.installed import is_installed
from megatron.core.inference.engine import Engine
from megatron.core.inference.requests import Request
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.text import TextStream
from megatron.core.tokenizers.base import Tokenizer

if TYPE_CHECKING:
    from os import PathLike


def _check_package(user: str) -> None:
    if not is_installed("lm_eval"):
        raise UserError(f"{user}: needs the package lm_eval, which is not installed; pip install lm-eval")


def build_adapter(engine: Engine, tokenizer: Tokenizer) -> Any:
    """Return the harness's model (``lm_eval.api.model.TemplateLM``) that scores and generates with ``engine``. Raises
    UserError without the package."""
    _check_package("evaluation")
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM

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
            output.completion.check()
            index, stream = streams[output.request]
            if output.token is not None:
                texts[index] += stream.push(output.token)
            if output.completion.finish_reason is not None:
                texts[index] += stream.finish()
            elif stream.stopped:
                engine.cancel(output.request)
    return texts


def find_tasks(flag: str, names: Sequence[str], include_path: str | PathLike | None) -> Any:
    """Return the harness's ``TaskManager`` for ``names``. Raises UserError, naming ``flag``, without the package, and
    for unknown tasks or none."""
    _check_package(flag)
    from lm_eval.tasks import TaskManager

    folder = None if include_path is None else str(include_path)
    if folder and names:  # the package's own 14,000 tasks take 6 s to list; groups and tags may contain them
        manager = TaskManager(include_path=folder, include_defaults=False)
        if set(names) <= set(manager.all_subtasks):
            return manager
    manager = TaskManager(include_path=folder)
    if unknown := [name for name in names if not manager.match_tasks([name])] or (not names and ["(empty)"]):
        raise UserError(f"{flag} {unknown[0]}: lm-evaluation-harness and the folder of tasks have no such task")
    return manager


def evaluate_tasks(
    engine: Engine, tokenizer: Tokenizer, names: Sequence[str], manager: Any, **settings: Any
) -> dict[str, Any]:
    """Return the harness's results for the tasks ``names`` of ``manager`` (:func:`find_tasks`). ``settings``: further
    arguments of ``simple_evaluate``, such as ``limit`` and ``num_fewshot``. Call it on rank 0 of ``engine``; other
    ranks call ``engine.follow``."""
    from lm_eval import simple_evaluate

    adapter = build_adapter(engine, tokenizer)
    return simple_evaluate(model=adapter, tasks=list(names), task_manager=manager, **settings)
