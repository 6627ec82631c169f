"""Text generation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class InferenceConfig:
    """Inference"""

    inference_batch_times_seqlen_threshold: int = -1
    """Split batches over pipeline stages when batch size x length exceeds this; -1: never."""

    max_tokens_to_oom: int = 12000
    """Refuse requests whose batch size x length exceeds this."""

    inference_max_requests: int = 8
    """Requests served at the same time."""

    inference_max_seq_length: int = 2560
    """Longest prompt and answer together, in tokens."""
