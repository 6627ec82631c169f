"""Fields of requests and the server's treatment of each: OpenAI's completions and chat completions, and Megatron-LM's
``PUT /api``. The page docs/reference/server_fields.md is generated from these tables. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20


class FieldRule(NamedTuple):
    """Treatment of a field. ``null`` is the same as a missing field."""

    kind: Literal["used", "ignored", "limited"]
    """Used; without effect on the answer; or only accepted with the values ``neutral``, which change nothing."""
    about: str = ""
    """Range, default and effect, or the reason of no effect."""
    neutral: Sequence[object] = ()


Rules = Mapping[str, FieldRule]


def _used(about: str) -> FieldRule:
    return FieldRule("used", about)


def _ignored(about: str) -> FieldRule:
    return FieldRule("ignored", about)


def _only(*neutral: object) -> FieldRule:
    return FieldRule("limited", neutral=neutral)


COMMON: Rules = {
    "model": _used("the served name; default: that name"),
    "n": _used("at least 1, at most `--max-prompts` texts per request; default 1"),
    "seed": _used("any 64-bit integer; choice k of a request has seed + k; default: random"),
    "temperature": _used("0 (greedy) to 1000; default 1"),
    "top_p": _used("above 0, at most 1; default 1"),
    "stop": _used(f"a string or up to {MAX_STOPS}; the text ends before the first; empty ones are ignored"),
    "stream": _used("server-sent events; default false"),
    "stream_options": _used("`include_usage`; `include_obfuscation` has no effect; requires `stream`"),
    "frequency_penalty": _only(0),
    "presence_penalty": _only(0),
    "logit_bias": _only({}),
    "user": _ignored("names the caller"),
}
COMPLETION: Rules = {
    **COMMON,
    "prompt": _used("a string, strings, token ids, or lists of token ids; required"),
    "max_tokens": _used("at least 0, which requires `echo`; ends at the model's length; default 16"),
    "best_of": _used("at least `n`: returns the `n` texts of the highest log-probability per token; not with `stream`"),
    "echo": _used("also with `stream` and `logprobs`; default false"),
    "logprobs": _used(f"0 to {MAX_TOP_LOGPROBS} likeliest tokens"),
    "suffix": _only(""),
}
CHAT: Rules = {
    **COMMON,
    "messages": _used(
        "text, or parts of type text, and `image_url` if the model reads images; role `developer` is `system` for a "
        "template without it; required"
    ),
    "max_completion_tokens": _used("at least 1; default: the model's length"),
    "max_tokens": _used("the same, without `max_completion_tokens`"),
    "logprobs": _used("true or false; default false"),
    "top_logprobs": _used(f"0 to {MAX_TOP_LOGPROBS}; requires `logprobs`"),
    "tools": _used("passed to the chat template; an error if it does not read them"),
    "tool_choice": _used("`none`, or `auto`; calls stay in the text, as the model writes them"),
    "reasoning_effort": _used("passed to the chat template; an error if it does not read it"),
    "parallel_tool_calls": _only(True),
    "response_format": _only({"type": "text"}),
    "modalities": _only(["text"]),
    "verbosity": _only("medium"),
    "functions": _only([]),
    "function_call": _only("none"),
    "audio": _only(),
    "moderation": _only(),
    "web_search_options": _only(),
    "prediction": _ignored("speeds up OpenAI's servers"),
    "metadata": _ignored("labels of stored answers"),
    "store": _ignored("no answer is stored"),
    "service_tier": _ignored("there is one tier"),
    "safety_identifier": _ignored("names the caller"),
    "prompt_cache_key": _ignored("equal prefixes of all prompts share the cache"),
    "prompt_cache_options": _ignored("equal prefixes of all prompts share the cache"),
    "prompt_cache_retention": _ignored("equal prefixes of all prompts share the cache"),
}
OTHER_FIELDS: Rules = {
    "top_k": _used("the k likeliest tokens; 0 or -1 (default): all"),
    "ignore_eos": _used("true: end tokens do not end the text"),
    "min_p": _only(0),
    "repetition_penalty": _only(1),
    "length_penalty": _only(1),
    "skip_special_tokens": _only(False),
}
"""Fields of vLLM's requests."""
TEMPLATE: Rules = {
    "chat_template_kwargs": _used("variables of the chat template"),
    "documents": _used("passed to the chat template"),
    "add_generation_prompt": _used("false: the prompt ends after the last message; default true"),
    "continue_final_message": _used("true: the text continues the last message"),
}
"""Further fields of vLLM's chat requests."""
MEGATRON: Rules = {
    "prompts": _used("strings; required"),
    "tokens_to_generate": _used("at least 0, which requires `logprobs`; default 64"),
    "logprobs": _used("true or false; default false"),
    "temperature": COMMON["temperature"],
    "top_k": _used("the k likeliest tokens; not with `top_p`"),
    "top_p": _used("0 (all tokens) to 1; default 0"),
    "add_BOS": _used("true: prompts begin with bos"),
    "random_seed": _used("at least 0; default: random"),
    "stop_token": _used("id that ends a text in place of the end tokens"),
    "ignore_eos": OTHER_FIELDS["ignore_eos"],
    "top_p_decay": _only(0),
    "top_p_bound": _only(0),
    "length_penalty": _only(1),
    "stop_on_eol": _only(False),
    "stop_on_double_eol": _only(False),
    "prevent_newline_after_colon": _only(False),
    "no_log": _ignored("requests are not logged"),
}
PATHS: Mapping[str, tuple[Rules, Rules]] = {
    "POST /v1/completions": (COMPLETION, OTHER_FIELDS),
    "POST /v1/chat/completions": (CHAT, {**OTHER_FIELDS, **TEMPLATE}),
    "PUT /api": (MEGATRON, {}),
}
"""Path -> fields of its interface, and further ones."""
