"""--sample-prompts: texts that the model under training writes."""

from __future__ import annotations

import time

from megatron.core.config.errors import UserError
from megatron.core.inference.engine import Engine
from megatron.core.inference.requests import Request
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.scheduler import Limits
from megatron.core.inference.text import TextStream
from megatron.core.tokenizers.base import Tokenizer
from megatron.training.components import Components
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.exits.conditions import every
from megatron.training.generation.live_engine import LiveEngine
from megatron.training.observe.kinds.sample import GENERATION, SAMPLE
from megatron.training.observe.records import Record, RecordKind
from megatron.training.rules.inputs import read_sample_prompts

FLAG = "--sample-prompts"
_SEQUENCES = 16
"""Prompts that are continued at the same time."""


class TextSamples:
    """Continuations of --sample-prompts. A text depends on the weights, its prompt and --seed only, up to rounding."""

    def __init__(self, cfg: PretrainConfig, parts: Components, tokenizer: Tokenizer | None) -> None:
        """Read and tokenize the prompts. Raises UserError, equal on all ranks, for unusable ones."""
        if tokenizer is None:
            raise UserError(f"{FLAG}: requires a tokenizer; add --tokenizer-type")
        settings, length = cfg.validation, cfg.data.seq_length
        assert length is not None, "required for training"
        self._tokenizer, self._tokens, self._interval = tokenizer, settings.sample_tokens, settings.sample_interval
        self._state = parts.state
        self._last: int | None = None
        """Iteration of the last texts."""
        prompts = read_sample_prompts(settings.sample_prompts or [], tokenizer, length)
        self._prompts, self._ids = zip(*prompts)
        self._samplings = [
            Sampling(settings.sample_temperature, seed=cfg.model.seed + place) for place in range(len(self._ids))
        ]
        max_length = min(max(map(len, self._ids)) + settings.sample_tokens, length)
        limits = Limits(max_length, max_sequences=min(len(self._ids), _SEQUENCES))
        # no CUDA graphs: recording them takes longer than a few short texts
        self._engine = LiveEngine(FLAG, parts, limits, cuda_graphs=False)

    def is_due(self, iteration: int, evaluates: bool) -> bool:
        return evaluates if self._interval is None else every(self._interval, iteration)

    def __call__(self, final: bool = False) -> list[tuple[RecordKind, Record]]:
        """Return one record per prompt and their duration, equal on all ranks; none for the iteration of the last ones.
        Collective; raises UserError if generation fails."""
        if self._last == self._state.iteration:
            return []
        begin = time.perf_counter()
        texts = self._engine.run(self._texts)
        records: list[tuple[RecordKind, Record]] = []
        for number, (prompt, (text, cut)) in enumerate(zip(self._prompts, texts), start=1):
            marks = ({"cut": True} if cut else {}) | ({"final": True} if final else {})
            records.append((SAMPLE, marks | {"number": number, "prompt": prompt, "text": text}))
        self._last = self._state.iteration
        return [*records, (GENERATION, {"seconds": time.perf_counter() - begin})]

    def _texts(self, engine: Engine) -> list[tuple[str, bool]]:
        """Return each continuation, and whether it was cut at its maximum length."""
        requests = [
            Request(prompt=ids, max_new_tokens=self._tokens, sampling=sampling, stop_tokens=self._tokenizer.end_ids)
            for ids, sampling in zip(self._ids, self._samplings)
        ]
        texts = []
        for ids, completion in zip(self._ids, engine.completions(requests)):
            stream = TextStream(self._tokenizer, ids)
            text = "".join(map(stream.push, completion.tokens)) + stream.finish()
            texts.append((text, completion.finish_reason == "length"))
        return texts
