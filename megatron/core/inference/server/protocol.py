"""OpenAI's completions and chat completions, and Megatron-LM's ``PUT /api``: JSON to engine requests. Torch-free."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.core.config.errors import UserError
from megatron.core.inference.requests import Request
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.server.fields import Fields, RequestError, checked_type, strings
from megatron.core.inference.server.image_parts import ImageParts
from megatron.core.inference.server.request_fields import MAX_STOPS, MAX_TOP_LOGPROBS, MEGATRON, PATHS
from megatron.core.safe_files import parse_json
from megatron.core.tokenizers.base import Tokenizer

MAX_PROMPT_SCORES = 2**21
"""Largest number of log-probabilities of all prompts of a request, most likely tokens included."""
SEED_RANGE = -(2**63), 2**63 - 1
DEVELOPER = "developer"
"""OpenAI's name of the role ``system``; few chat templates know it, and the others would leave its messages out."""
REFUSED_IN_MESSAGES = ("audio", "function_call", "refusal")
"""Keys of OpenAI's messages that may only be null."""


@dataclass(frozen=True)
class Model:
    """A model's name and tokenizer, and the limits of requests."""

    name: str
    tokenizer: Tokenizer
    max_length: int
    max_prompts: int
    images: ImageParts | None = None
    """Reader of image parts; None: the model reads text only."""
    fingerprint: str = field(default_factory=lambda: f"fp_{secrets.token_hex(5)}")
    """OpenAI's ``system_fingerprint``: answers to a request with a seed are equal while it does not change."""

    def prompt_ids(self, text: str) -> list[int]:
        """Return the tokens of a prompt; an empty one starts a document."""
        try:
            return self.tokenizer.tokenize(text) or [self.tokenizer.eod]
        except UserError as error:
            raise RequestError(f"prompt: {error}", "prompt") from error


@dataclass(frozen=True)
class Job:
    """A request of a client: generates ``count`` choices for each prompt."""

    prompts: list[list[int]]
    texts: list[str]
    """Text of each prompt; used with ``echo``."""
    template: Request
    """Request of every choice, without its prompt and seed."""
    count: int = 1
    num_best: int | None = None
    """Number of choices to return for each prompt, those of the highest log-probability per token; None: all."""
    stops: Sequence[str] = ()
    echo: bool = False
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False
    is_chat: bool = False

    def check_size(self) -> None:
        """Raise RequestError if the answer would have too many log-probabilities of prompts."""
        count = self.num_prompt_tokens * self.count * (1 + self.template.top_logprobs)
        if self.template.prompt_logprobs and count > MAX_PROMPT_SCORES:
            raise RequestError(
                f"logprobs: the answer has {count} log-probabilities of prompts, at most {MAX_PROMPT_SCORES} are "
                "allowed; send fewer prompts",
                "logprobs",
            )

    def requests(self) -> list[Request]:
        """Return the requests of all choices, in the order of their index. Seeds count up from the given one."""
        seed = self.template.sampling.seed
        first = secrets.randbits(62) if seed is None else seed
        return [
            replace(
                self.template, prompt=prompt, sampling=replace(self.template.sampling, seed=(first + number) % 2**63)
            )
            for prompt in self.prompts
            for number in range(self.count)
        ]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


def read_completion(fields: Fields, info: Model) -> Job:
    """Return the job of ``POST /v1/completions``."""
    check_model(fields, info)
    prompts, texts = _prompts(fields.raw("prompt"), info)
    _check_text(prompts, info, "prompt")
    top = fields.optional("logprobs", int, high=MAX_TOP_LOGPROBS)
    echo = fields.get("echo", bool, False)
    template = _template(fields, info, fields.get("max_tokens", int, 16, 0), 1)
    template = replace(template, top_logprobs=top or 0, prompt_logprobs=echo and top is not None)
    if not template.max_new_tokens and not echo:
        raise RequestError("max_tokens 0: requires echo", "max_tokens")
    best_of = fields.optional("best_of", int, 1)
    return _finish(fields, Job(prompts, texts, template, echo=echo, logprobs=top is not None), info, best_of)


def read_chat(fields: Fields, info: Model) -> Job:
    """Return the job of ``POST /v1/chat/completions``."""
    check_model(fields, info)
    if info.tokenizer.chat is None:
        raise RequestError("this model's tokenizer has no chat template; use /v1/completions", "messages")
    messages = [_message(message, info) for message in checked_type("messages", fields.raw("messages"), list)]
    if not messages:
        raise RequestError("messages: must have at least one message", "messages")
    if not any(DEVELOPER in template for template in info.tokenizer.chat.templates.values()):
        messages = [{**message, "role": "system"} if message["role"] == DEVELOPER else message for message in messages]
    messages, sources = (messages, []) if info.images is None else info.images.split(messages)
    text = info.tokenizer.render_chat(messages, **_chat_options(fields, info.tokenizer))
    logprobs, top = fields.get("logprobs", bool, False), fields.optional("top_logprobs", int, high=MAX_TOP_LOGPROBS)
    if top and not logprobs:
        raise RequestError("top_logprobs: requires logprobs", "top_logprobs")
    limits = [fields.optional(name, int, 1) for name in ("max_completion_tokens", "max_tokens")]
    max_new_tokens = next((limit for limit in limits if limit is not None), info.max_length)
    ids = info.tokenizer.tokenize_chat(text) or [info.tokenizer.eod]
    template = replace(_template(fields, info, max_new_tokens, 1), top_logprobs=top or 0)
    if info.images is None:
        return _finish(fields, Job([ids], [text], template, logprobs=logprobs, is_chat=True), info)
    ids, sizes = info.images.expanded(ids, sources)
    job = _finish(fields, Job([ids], [text], template, logprobs=logprobs, is_chat=True), info)
    return replace(job, template=replace(job.template, images=info.images.load(sources, sizes)))


def read_megatron(fields: Fields, info: Model) -> Job:
    """Return the job of Megatron-LM's ``PUT /api``."""
    texts = [checked_type("prompts", text, str) for text in checked_type("prompts", fields.raw("prompts"), list)]
    _check_count(len(texts), info, "prompts")
    starts = [info.tokenizer.bos] if fields.get("add_BOS", bool, False) else []
    prompts = [starts + (info.tokenizer.tokenize(text) if text else []) for text in texts]
    if not all(prompts):
        raise RequestError("prompts: an empty prompt requires add_BOS", "prompts")
    _check_text(prompts, info, "prompts")
    logprobs = fields.get("logprobs", bool, False)
    max_new_tokens = fields.get("tokens_to_generate", int, 64, 0)
    if not max_new_tokens and not logprobs:
        raise RequestError("tokens_to_generate 0: requires logprobs", "tokens_to_generate")
    if (seed := fields.raw("random_seed")) is not None:
        seed = checked_type("random_seed", seed, int)
    template = replace(_template(fields, info, max_new_tokens, 0, seed), prompt_logprobs=logprobs)
    if template.sampling.top_k and template.sampling.top_p:
        raise RequestError("top_k: must not be given with top_p", "top_k")
    if (stop := fields.optional("stop_token", int)) is not None:
        template = replace(template, stop_tokens=[stop])
    fields.finish(MEGATRON)
    return Job(prompts, texts, template, echo=True, logprobs=logprobs)


def check_model(fields: Fields, info: Model) -> None:
    """Raise the 404 of OpenAI for another model than the served one."""
    name = fields.get("model", str, info.name)
    if name != info.name:
        message = f"the model {name!r:.100} does not exist; this server has {info.name!r}"
        raise RequestError(message, "model", status=404, code="model_not_found")


def _template(fields: Fields, info: Model, max_new_tokens: int, all_tokens: int, seed: int | None = None) -> Request:
    """Return a request without prompt. ``all_tokens``: default of ``top_p``, where 1 and 0 both mean every token."""
    if all_tokens and (seed := fields.optional("seed", int, *SEED_RANGE)) is not None:
        seed %= 2**63
    top_p = fields.get("top_p", float, float(all_tokens), 0, 1)
    if all_tokens and not top_p:
        raise RequestError("top_p 0.0: must be above 0", "top_p")
    try:
        sampling = Sampling(
            temperature=fields.get("temperature", float, 1.0),
            top_k=max(fields.get("top_k", int, 0, -1), 0),
            top_p=top_p,
            seed=seed,
        )
    except RequestError:
        raise
    except UserError as error:
        raise RequestError(str(error), str(error).partition(" ")[0]) from error
    stops = () if fields.get("ignore_eos", bool, False) else info.tokenizer.end_ids
    return Request(prompt=(), max_new_tokens=min(max_new_tokens, info.max_length), sampling=sampling, stop_tokens=stops)


def _finish(fields: Fields, job: Job, info: Model, best_of: int | None = None) -> Job:
    """Read the fields that both of OpenAI's requests have; reject all others."""
    count = fields.get("n", int, 1, 1)
    num_generated = count if best_of is None else best_of
    if num_generated < count:
        raise RequestError(f"best_of {best_of}: must be at least n, which is {count}", "best_of")
    _check_count(num_generated * len(job.prompts), info, "n" if best_of is None else "best_of")
    stops = strings("stop", fields.raw("stop"), MAX_STOPS)
    stream = fields.get("stream", bool, False)
    if stream and num_generated > count:
        raise RequestError(f"best_of {best_of}: must not be above n, which is {count}, with stream", "best_of")
    options = fields.get("stream_options", dict, {})
    if options and not stream:
        raise RequestError("stream_options: requires stream", "stream_options")
    for name, value in options.items():
        if name not in ("include_usage", "include_obfuscation"):
            raise RequestError(f"stream_options.{name}: is not supported; remove it", "stream_options")
        checked_type(f"stream_options.{name}", value, bool)
    fields.finish(*PATHS["POST /v1/chat/completions" if job.is_chat else "POST /v1/completions"])
    if (num_tokens := max(map(len, job.prompts))) > info.max_length:
        message = f"the prompt has {num_tokens} tokens, the model takes {info.max_length}: give a shorter one"
        raise RequestError(message, "messages" if job.is_chat else "prompt", code="context_length_exceeded")
    num_best = count if num_generated > count else None
    usage = options.get("include_usage", False)
    job = replace(job, count=num_generated, num_best=num_best, stops=stops, stream=stream, include_usage=usage)
    job.check_size()
    return job


def _check_count(count: int, info: Model, name: str) -> None:
    if not 0 < count <= info.max_prompts:
        message = f"{name}: the request has {count} texts to generate, between 1 and {info.max_prompts} are allowed"
        raise RequestError(message, name)


def _prompts(value: Any, info: Model) -> tuple[list[list[int]], list[str]]:
    """Return tokens and texts of a prompt: a string, strings, tokens, or lists of tokens."""
    if value is None:
        raise RequestError("prompt: is required", "prompt")
    if isinstance(value, str):
        value = [value]
    values = checked_type("prompt", value, list)
    if values and all(type(prompt) is int for prompt in values):
        values = [values]
    _check_count(len(values), info, "prompt")
    if all(isinstance(prompt, str) for prompt in values):
        return [info.prompt_ids(prompt) for prompt in values], values
    if not all(isinstance(prompt, list) for prompt in values):
        kinds = "must be text, tokens, a list of texts, or a list of lists of tokens"
        raise RequestError(f"prompt: {kinds}; do not mix them", "prompt")
    prompts = [[checked_type("prompt", token, int) for token in prompt] for prompt in values]
    for token in {token for prompt in prompts for token in prompt}:
        if not 0 <= token < info.tokenizer.vocab_size:
            raise RequestError(f"prompt: token {token} is outside of the tokenizer's vocabulary", "prompt")
    return prompts, [info.tokenizer.detokenize(prompt) for prompt in prompts]


def _check_text(prompts: Sequence[Sequence[int]], info: Model, name: str) -> None:
    """Reject image tokens in a prompt without images."""
    if info.images is not None and any(info.images.loader.token in prompt for prompt in prompts):
        reason = f"has image token {info.images.loader.token}, and no image"
        raise RequestError(f"{name}: {reason}; send images to /v1/chat/completions", name)


def _message(value: object, info: Model) -> dict[str, Any]:
    """Return a chat message whose content is text, or a list of text parts and images. Only one with tool calls may
    lack it. Arguments of tool calls become objects, which templates write in their own form."""
    message = checked_type("messages", value, dict)
    # clients send a message of an answer again with null for the keys that it lacks
    message = {key: part for key, part in message.items() if part is not None or key == "content"}
    checked_type("messages.role", message.get("role"), str)
    for key in REFUSED_IN_MESSAGES:
        if key in message:
            raise RequestError(f"messages.{key}: is not supported; remove it", "messages")
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list):
        for part in content:
            kind = checked_type("messages.content", part, dict).get("type")
            if kind == "text":
                checked_type("messages.content", part.get("text"), str)
            elif kind != "image_url" or info.images is None:
                kinds = "text is" if info.images is None else "text or image_url are"
                raise RequestError(f"messages.content: only parts of type {kinds} supported", "messages")
    elif content is not None or not calls:
        checked_type("messages.content", content, str)
    if calls is not None:
        calls = checked_type("messages.tool_calls", calls, list)
        message["tool_calls"] = [_tool_call(dict(checked_type("messages.tool_calls", call, dict))) for call in calls]
    return message


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(checked_type("messages.tool_calls.function", call.get("function"), dict))
    checked_type("messages.tool_calls.function.name", function.get("name"), str)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            value = parse_json(arguments or "{}")
        except ValueError as error:
            message = f"messages.tool_calls.function.arguments: must be JSON ({error})"
            raise RequestError(message, "messages") from error
        function["arguments"] = value if isinstance(value, dict) else arguments
    return {**call, "function": function}


def _chat_options(fields: Fields, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the options of the chat template: tools, documents, prompt of the answer, and its other variables."""
    options: dict[str, Any] = dict(fields.get("chat_template_kwargs", dict, {}))
    assert tokenizer.chat is not None, "checked by the caller"
    choice = fields.raw("tool_choice")
    if choice not in (None, "none", "auto"):
        raise RequestError("tool_choice: must be none or auto; the model decides by itself", "tool_choice")
    tools = [checked_type("tools", tool, dict) for tool in fields.get("tools", list, [])]
    if tools and choice != "none":
        if "tools" not in tokenizer.chat.source(has_tools=True):
            raise RequestError("tools: this model's chat template does not take tools; remove them", "tools")
        options["tools"] = tools
    effort = fields.optional("reasoning_effort", str)
    if effort is not None:
        if "reasoning_effort" not in tokenizer.chat.source(has_tools="tools" in options):
            message = "reasoning_effort: this model's chat template does not take it; remove it"
            raise RequestError(message, "reasoning_effort")
        options["reasoning_effort"] = effort
    if documents := fields.get("documents", list, []):
        options["documents"] = [checked_type("documents", document, dict) for document in documents]
    for name, default in (("add_generation_prompt", True), ("continue_final_message", False)):
        options[name] = fields.get(name, bool, options.get(name, default))
    return options
