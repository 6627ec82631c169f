"""Data and rules of families that train on masked words. Torch-free."""

from __future__ import annotations

import math
from typing import Any

from megatron.core.config.errors import counted
from megatron.core.config.problems import Problems, Settings, problem


def reads_text(cfg: Settings) -> bool:
    """Whether the run makes samples of text files."""
    return cfg.needs_data and not cfg.data.mock_data


def masking_options(cfg: Settings, longest_ngram: int) -> dict[str, Any]:
    """Return the options of the data set's configuration; at most ``longest_ngram`` words are masked together."""
    return {
        "masking_probability": cfg.masked_data.mask_prob,
        "short_sequence_probability": cfg.masked_data.short_seq_prob,
        "masking_max_ngram": longest_ngram,
        "masking_do_full_word": True,
    }


def maskable_tokens(cfg: Settings, special: int) -> Problems:
    """Without --mock-data, require --seq-length to leave at least 2 tokens besides the ``special`` ones of a sample,
    and --mask-prob times these tokens to be at least 1."""
    if not reads_text(cfg) or cfg.data.seq_length is None:
        return
    words = cfg.data.seq_length - special
    if words < 2:
        reason = f"leaves {counted(max(words, 0), 'token')} for text, because {special} tokens are special"
        yield problem(cfg, "seq_length", reason, f"at least {special + 2}")
    elif cfg.masked_data.mask_prob * words < 1:
        fix = f"at least {math.ceil(1000 / words) / 1000:g}"
        yield problem(cfg, "mask_prob", f"masks none of the {words} tokens of a sample", fix)


def sinks_exclude_cuda_graphs(cfg: Settings) -> Problems:
    """Reject --cuda-graph-impl local with attention sinks: their kernels depend on padding lengths."""
    if cfg.training.cuda_graph_impl == "local" and cfg.model.softmax_type != "vanilla":
        reason = (
            "records one micro-batch as a CUDA graph, which here depends on padding lengths (--softmax-type, computed "
            "in blocks that the host plans)"
        )
        yield problem(cfg, "cuda_graph_impl", reason, "leave one of the two out")
