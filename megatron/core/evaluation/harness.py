"""lm-evaluation-harness on the generation engine: its model interface, and scores of tasks.

The package is imported when it is used; it downloads the data of its tasks, except of local ones."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.config.errors import UserError
from megatron.core.evaluation.scoring import score
from megatron.core.evaluation.tasks import check_package
from megatron.core.inference.engine import Engine
from megatron.core.inference.requests import Request
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.text import TextStream
from megatron.core.tokenizers.base import Tokenizer

logger = logging.getLogger(__name__)


def build_adapter(engine: Engine, tokenizer: Tokenizer) -> Any:
    """Return the harness's model (``TemplateLM``) of ``engine``. UserError without the package."""
    check_package("evaluation")
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
            return tokenizer.prefix_id

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
            begins = string.startswith(tokenizer.detokenize([self.prefix_token_id]) or "\0")
            if add_special_tokens is False or (add_special_tokens is None and begins):
                return tokenizer.tokenize_sentences([string], False)[0].tolist()
            return tokenizer.tokenize(string)

        def chat_template(self, chat_template: bool | str = False) -> str:
            return (tokenizer.chat_template or "") if chat_template else ""

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return _chat_text(tokenizer, chat_history, add_generation_prompt)

        def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
            context_ids, continuation_ids = super()._encode_pair(context, continuation)
            if not continuation_ids:  # merged into the last token of the context
                spaces = context[len(context.rstrip()) :]
                continuation_ids = self.tok_encode(spaces + continuation, add_special_tokens=False)
            return context_ids, continuation_ids

        def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            _check_continuations(self, requests)
            return super().loglikelihood(requests, disable_tqdm)

        def _loglikelihood_tokens(self, requests: Any, **_: object) -> list[tuple[float, bool]]:
            likelihoods = score(engine, [(context, continuation) for _, context, continuation in requests])
            results = [(likelihood.logprob, likelihood.is_greedy) for likelihood in likelihoods]
            for (key, _, _), result in zip(requests, results):
                if key is not None:
                    self.cache_hook.add_partial("loglikelihood", key, result)
            return results

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            pairs: list[tuple[list[int], list[int]]] = []
            owners: list[int] = []
            for number, (text,) in enumerate(request.args for request in requests):
                ids = self.tok_encode(text)
                windows = utils.get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)
                pairs += list(map(utils.make_disjoint_window, windows))
                owners += [number] * (len(pairs) - len(owners))
            results = [0.0] * len(requests)
            for number, likelihood in zip(owners, score(engine, pairs)):
                results[number] += likelihood.logprob
            for request, result in zip(requests, results):
                self.cache_hook.add_partial("loglikelihood_rolling", request.args, result)
            return results

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            texts = generate_texts(engine, tokenizer, [request.args for request in requests], self)
            for request, text in zip(requests, texts):
                self.cache_hook.add_partial("generate_until", request.args, text)
            return texts

    return Adapter()


def _check_continuations(adapter: Any, requests: Any) -> None:
    """UserError for a continuation without tokens after an empty context, which the harness cannot split."""
    for context, continuation in (request.args for request in requests):
        if not context and not adapter.tok_encode(continuation, add_special_tokens=False):
            raise UserError(f"the continuation {continuation!r} has no tokens; repair the task")


def _chat_text(tokenizer: Tokenizer, messages: Sequence[dict[str, str]], add_generation_prompt: bool) -> str:
    """As in the harness, a system message that the template rejects is left out."""
    options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
    try:
        return tokenizer.render_chat(messages, **options)
    except UserError:
        without_system = [message for message in messages if message["role"] != "system"]
        if len(without_system) == len(messages):
            raise
        logger.warning("the chat template rejects the system message; it is left out")
        return tokenizer.render_chat(without_system, **options)


NEUTRAL: dict[str, Sequence[object]] = {
    **dict.fromkeys(("num_beams", "num_return_sequences", "repetition_penalty", "length_penalty", "typical_p"), (1,)),
    **dict.fromkeys(("min_p", "min_new_tokens", "min_length", "no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("use_cache", "early_stopping"), (False, True)),
}
"""Settings of other engines, with the values that do not change the text."""


def build_request(
    tokenizer: Tokenizer, adapter: Any, context: str, settings: Mapping[str, Any], seed: int
) -> tuple[Request, list[str]]:
    """Return the request and stop strings of ``generation_kwargs`` by the harness's rules. Raises UserError for
    settings that the engine does not have.

    - ``do_sample: false`` is greedy at every temperature; without ``do_sample`` a temperature above 0 samples.
    - The first of ``max_gen_toks``, ``max_new_tokens``, ``max_tokens`` and ``max_completion_tokens`` counts;
      ``max_length`` includes the context."""
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

    values: dict[str, Any] = {**normalize_gen_kwargs(dict(settings), adapter.max_gen_toks)}
    until = handle_stop_sequences(values.pop("until"), eos=tokenizer.detokenize([tokenizer.eod]))
    num_new, max_length = values.pop("max_gen_toks"), values.pop("max_length", None)
    if not 0 < num_new < adapter.max_length:
        raise UserError(f"max_gen_toks {num_new}: must be above 0 and below the model's length {adapter.max_length}")
    prompt = (adapter.tok_encode(context) or [adapter.prefix_token_id])[num_new - adapter.max_length :]
    if max_length is not None:
        num_new = int(max_length) - len(prompt)
        if num_new < 1:
            raise UserError(f"max_length {max_length}: the context has {len(prompt)} tokens; use max_gen_toks")
    temperature, is_random = float(values.pop("temperature", 1.0)), values.pop("do_sample")
    sampling = Sampling(
        temperature=temperature if is_random else 0.0,
        top_k=int(values.pop("top_k", None) or 0),
        top_p=float(values.pop("top_p", None) or 0),
        seed=seed,
    )
    for name, value in values.items():
        if value is not None and value not in NEUTRAL.get(name, ()):
            raise UserError(f"generation_kwargs {name} {value}: is not supported; remove it from the task")
    request = Request(prompt=prompt, max_new_tokens=num_new, sampling=sampling, stop_tokens=tokenizer.end_ids)
    return request, [stop for stop in until if stop]


def generate_texts(
    engine: Engine, tokenizer: Tokenizer, jobs: Sequence[tuple[str, dict[str, Any]]], adapter: Any
) -> list[str]:
    """Return the text after each context, cut at its stop strings as in the harness, without special tokens."""
    running: dict[int, tuple[int, TextStream, list[str]]] = {}
    texts = [""] * len(jobs)
    for index, (context, settings) in enumerate(jobs):
        request, stops = build_request(tokenizer, adapter, context, settings, seed=1234 + index)
        # the harness decodes a text without its context
        running[engine.add(request)] = index, TextStream(tokenizer, stops=stops), stops
    while engine.has_work:
        for output in engine.step():
            output.completion.check()
            index, stream, stops = running[output.request]
            if output.token is not None:
                stream.push(output.token)
            if output.completion.finish_reason is not None or stream.stopped:
                texts[index] = _answer(tokenizer, output.completion.tokens, stops)
                engine.cancel(output.request)
    return texts


def _answer(tokenizer: Tokenizer, tokens: Sequence[int], stops: Sequence[str]) -> str:
    from lm_eval.models.utils import postprocess_generated_text

    special_ids = tokenizer.all_special_ids
    text = tokenizer.detokenize([token for token in tokens if token not in special_ids])
    return postprocess_generated_text(text, [*stops], None)  # cuts at one stop string after the other


def evaluate_tasks(
    engine: Engine, tokenizer: Tokenizer, names: Sequence[str], manager: Any, **settings: Any
) -> dict[str, Any]:
    """Return the harness's results for the tasks ``names`` of ``manager`` (``tasks.find_tasks``). ``settings``:
    arguments of ``simple_evaluate``. Call it on rank 0 of ``engine``; other ranks call ``engine.follow``. Raises
    UserError if logits are NaN or infinite, and for a perplexity that is too large for a float."""
    from lm_eval import simple_evaluate

    adapter = build_adapter(engine, tokenizer)
    try:
        return simple_evaluate(model=adapter, tasks=list(names), task_manager=manager, **settings)
    except OverflowError as error:  # math.exp in its perplexities
        raise UserError(
            f"a score of {', '.join(names)} is larger than any float ({error}): the texts are too unlikely for a "
            "perplexity; use tasks with bits_per_byte"
        ) from error
