"""Text generation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatron.core.config.ranges import Batch, Dim, Range


@dataclass(kw_only=True)
class InferenceConfig:
    """Inference"""

    inference_batch_times_seqlen_threshold: Annotated[int, Range(-1, 2**31 - 1)] = -1
    """Split batches over pipeline stages when batch size x length exceeds this; -1: never."""

    max_tokens_to_oom: Dim = 12000
    """Refuse requests whose batch size x length exceeds this."""

    inference_max_requests: Batch = 8
    """Requests served at the same time."""

    inference_max_seq_length: Dim = 2560
    """Longest prompt and answer together, in tokens."""
