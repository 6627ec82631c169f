"""Answers of the server: text, log-probabilities and usage of each choice as OpenAI's JSON. Torch-free."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron.core.inference.requests import TokenScore
from megatron.core.inference.server.json_text import json_bytes
from megatron.core.inference.server.protocol import Job, Model
from megatron.core.inference.server.service import Event
from megatron.core.inference.text import Detokenizer, TextStream
from megatron.core.tokenizers.base import Tokenizer

LEAST_LOGPROB = -9999.0
"""Log-probability that OpenAI and vLLM write for impossible tokens: JSON has no infinity."""


def prompt_offsets(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> list[int]:
    """Return the index of each token's first character in ``text``, whose tokens are ``ids``. A token that the
    tokenizer added to the text, such as BOS, has no characters."""
    offsets, index, detokenizer, special_ids = [], 0, Detokenizer(tokenizer), tokenizer.all_special_ids
    for token in ids:
        offsets.append(min(index, len(text)))
        is_added = token in special_ids and not text.startswith(tokenizer.detokenize([token]), index)
        index += 0 if is_added else len(detokenizer.push(token))
    return offsets


def finite_score(score: TokenScore) -> TokenScore:
    """Return ``score`` with log-probabilities of at least :data:`LEAST_LOGPROB`."""
    top = tuple((token, max(logprob, LEAST_LOGPROB)) for token, logprob in score.top)
    return TokenScore(score.token, max(score.logprob, LEAST_LOGPROB), top)


class ScoredToken(NamedTuple):
    """A token of an answer with its score (None: the first token of a prompt)."""

    token: int
    score: TokenScore | None
    offset: int
    """Index of its first character in prompt and text."""


class Choice:
    """One text of a job, as it is generated."""

    def __init__(self, job: Job, index: int, info: Model) -> None:
        self.job, self.index, self._info = job, index, info
        prompt = index // job.count
        self.prompt = job.prompts[prompt]
        self._stream = TextStream(info.tokenizer, self.prompt, job.stops)
        self._prompt_text = job.texts[prompt]
        self._echo = self._prompt_text if job.echo else None
        self._scores: list[ScoredToken] = []
        self.num_tokens = 0
        """Number of sampled tokens, stop tokens included."""
        self._sum_logprobs = 0.0
        self.tokens: list[int] = []
        self.finish_reason: str | None = None

    def advance(self, event: Event) -> str:
        """Return the new text of ``event``. A stop string sets ``finish_reason`` although the engine continues."""
        piece = ""
        if self._echo is not None:
            piece, self._echo = self._echo, None
            if self.job.logprobs:
                offsets = prompt_offsets(self._info.tokenizer, self.prompt, self._prompt_text)
                scores = [score and finite_score(score) for score in event.prompt_scores]
                self._scores += map(ScoredToken, self.prompt, scores, offsets)
        num_before = self._stream.num_characters
        if event.token is not None:
            self.tokens.append(event.token)
            piece += self._stream.push(event.token)
        if event.finish_reason is not None:
            piece += self._stream.finish()
        if event.score is not None:
            self.num_tokens += 1
            self._sum_logprobs += event.score.logprob
            # a stop token follows an incomplete character, which the end completes
            offset = self._stream.num_characters if event.token is None else num_before
            score = finite_score(event.score)
            self._scores.append(ScoredToken(score.token, score, len(self._prompt_text) + offset))
        self.finish_reason = "stop" if self._stream.stopped else event.finish_reason
        return piece

    @property
    def mean_logprob(self) -> float:
        """Log-probability per sampled token."""
        return self._sum_logprobs / max(self.num_tokens, 1)

    @property
    def num_unreported(self) -> int:
        """Number of log-probabilities that :meth:`logprobs` returns."""
        return len(self._scores) if self.job.logprobs else 0

    def logprobs(self) -> dict[str, object] | None:
        """Return the log-probabilities of the tokens since the last call; None if they are not requested."""
        if not self.job.logprobs:
            return None
        scores, self._scores = self._scores, []
        return self._chat_logprobs(scores) if self.job.is_chat else self._logprobs(scores)

    def values(self) -> list[float]:
        """Return the log-probabilities without their tokens."""
        return [scored_token.score.logprob for scored_token in self._scores if scored_token.score is not None]

    def _logprobs(self, scores: Sequence[ScoredToken]) -> dict[str, object]:
        def name(token: int) -> str:
            return token_name(self._info.tokenizer.token_bytes(token), "bytes:")

        top = []
        for _, score, _ in scores:
            likeliest: dict[str, float] = {}
            for token, logprob in () if score is None else (*score.top, (score.token, score.logprob)):
                likeliest.setdefault(name(token), logprob)  # tokens may have equal texts: keep the best
            top.append(None if score is None else likeliest)
        # tokens of a stop string are after the end of the text
        end = len(self._prompt_text) + self._stream.num_released if self._stream.stopped else None
        return {
            "tokens": [name(x.token) for x in scores],
            "token_logprobs": [None if x.score is None else x.score.logprob for x in scores],
            "top_logprobs": top,
            "text_offset": [x.offset if end is None else min(x.offset, end) for x in scores],
        }

    def _chat_logprobs(self, scores: Sequence[ScoredToken]) -> dict[str, object]:
        def entry(token: int, logprob: float) -> dict[str, object]:
            raw = self._info.tokenizer.token_bytes(token)
            return {"token": token_name(raw), "logprob": logprob, "bytes": list(raw)}

        content = [
            {**entry(x.token, x.logprob), "top_logprobs": [entry(*pair) for pair in x.top]}
            for _, x, _ in scores
            if x is not None
        ]
        return {"content": content, "refusal": None}


def token_name(raw: bytes, prefix: str = "") -> str:
    """Return a token's text as OpenAI writes it: with bytes that are a part of a character, after ``prefix``, those as
    ``\\xf0``."""
    text = raw.decode(errors="backslashreplace")
    return text if text.encode() == raw else prefix + text


class Answer:
    """Builds the JSON of one job's answer."""

    def __init__(self, job: Job, info: Model) -> None:
        self.job, self._info = job, info
        self.choices = [Choice(job, index, info) for index in range(len(job.prompts) * job.count)]
        prefix, kind = ("chatcmpl", "chat.completion") if job.is_chat else ("cmpl", "text_completion")
        self._kind = kind
        self._head = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": info.name}
        self._head["system_fingerprint"] = info.fingerprint

    def usage(self) -> dict[str, int]:
        """Return the number of tokens of prompts and texts."""
        prompt, new = self.job.num_prompt_tokens, sum(choice.num_tokens for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def encode(self, choice: Choice, text: str) -> bytes:
        """Return a complete choice without its index as JSON; its log-probabilities are then released."""
        message = {"message": {"role": "assistant", "content": text, "refusal": None}}
        values = self._choice(choice, message if self.job.is_chat else {"text": text})
        del values["index"]
        return json_bytes(values)

    def full(self, encoded: Sequence[bytes]) -> bytes:
        """Return the answer without streaming as JSON, from :meth:`encode`'s bytes of all choices."""
        head = json_bytes({**self._head, "object": self._kind, "usage": self.usage()})
        order = [choice.index for choice in self._best_choices()]
        choices = [b'{"index":%d,%b' % (number, encoded[index][1:]) for number, index in enumerate(order)]
        return b'%b,"choices":[%b]}' % (head[:-1], b",".join(choices))

    def _best_choices(self) -> list[Choice]:
        """Return the choices to return, those of each prompt together and the likeliest first with ``best_of``."""
        count = self.job.count
        if self.job.num_best is None:
            return self.choices
        groups = [self.choices[first : first + count] for first in range(0, len(self.choices), count)]
        ranked = [sorted(group, key=lambda choice: -choice.mean_logprob) for group in groups]
        return [choice for group in ranked for choice in group[: self.job.num_best]]

    def first_chunks(self) -> list[dict[str, object]]:
        """Return the chunks before any text: in a chat, those with the role."""
        if not self.job.is_chat:
            return []
        role = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [self._chunk([{"index": choice.index, **role}]) for choice in self.choices]

    def chunk(self, choice: Choice, text: str) -> dict[str, object]:
        """Return the chunk with a choice's new text."""
        delta = {"delta": {"content": text} if text else {}}
        return self._chunk([self._choice(choice, delta if self.job.is_chat else {"text": text})])

    def usage_chunk(self) -> dict[str, object]:
        """Return the last chunk with ``include_usage``."""
        return {**self._chunk([]), "usage": self.usage()}

    def _chunk(self, choices: list[dict[str, object]]) -> dict[str, object]:
        kind = f"{self._kind}.chunk" if self.job.is_chat else self._kind
        usage = {"usage": None} if self.job.include_usage else {}
        return {**self._head, "object": kind, "choices": choices, **usage}

    def _choice(self, choice: Choice, content: Mapping[str, object]) -> dict[str, object]:
        end = {"logprobs": choice.logprobs(), "finish_reason": choice.finish_reason}
        return {"index": choice.index, **content, **end}

    def megatron(self, texts: Sequence[str]) -> dict[str, object]:
        """Return Megatron-LM's answer: texts with prompts, their tokens, log-probabilities after the first token."""
        segments, logprobs = [], []
        for choice in self.choices:
            tokens = choice.prompt + choice.tokens
            segments.append([self._info.tokenizer.token_bytes(token).decode(errors="replace") for token in tokens])
            logprobs.append(choice.values()[: len(tokens) - 1])
        return {"text": list(texts), "segments": segments, "logprobs": logprobs if self.job.logprobs else None}
