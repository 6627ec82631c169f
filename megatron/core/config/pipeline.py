"""Settings of the pipeline layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.core.config.cli import flag
from megatron.core.config.ranges import Layers


@dataclass(kw_only=True)
class PipelineConfig:
    """Pipeline layout"""

    num_layers_per_virtual_pipeline_stage: Layers | None = None
    """Layers per chunk of an interleaved schedule."""

    num_virtual_stages_per_pipeline_rank: Layers | None = None
    """Chunks per rank of an interleaved schedule; instead of the flag above."""

    decoder_first_pipeline_num_layers: Layers | None = None
    """Layers of the first pipeline rank, where it differs."""

    decoder_last_pipeline_num_layers: Layers | None = None
    """Layers of the last pipeline rank, where it differs."""

    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as one layer when layers are split over stages, instead of by its FLOPs."""

    account_for_loss_in_pipeline_split: bool = False
    """Count the output layer and loss as one layer when layers are split over stages, instead of by their FLOPs."""

    whole_layers_in_pipeline_split: bool = False
    """Cut stages between layers only. Otherwise stages whose contents are not given may also end between two branches
    of a layer, attention and feed-forward network, where that makes the slowest one more than 1% faster."""

    pipeline_model_parallel_layout: str | None = None
    """Exact contents of every stage: E embedding, t layer, L loss, m multi-token head, | between stages, x*n for
    repetition, such as Et*3|(tt|)*29,m|L. A layer may be cut: f is its last branch (the feed-forward network), a each
    one before it (attention), such as Etta|ftL."""

    pipeline_schedule: Literal["1f1b", "interleaved", "zero-bubble", "zero-bubble-h2"] | None = flag(
        "--pipeline-schedule"
    )
    """Order of forward and backward passes; default: interleaved with virtual stages, else 1f1b. zero-bubble computes
    weight gradients apart from input gradients and fills waiting time with them; zero-bubble-h2 waits less still, with
    up to twice as many micro-batches in memory."""
