"""Settings of the pipeline layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.core.config.cli import flag
from megatron.core.config.groups import FlagGroup
from megatron.core.config.ranges import Layers


@dataclass(kw_only=True)
class PipelineConfig(FlagGroup):
    """Pipeline layout"""

    num_layers_per_virtual_pipeline_stage: Layers | None = None
    """Layers per model chunk of an interleaved schedule."""

    num_virtual_stages_per_pipeline_rank: Layers | None = None
    """Model chunks per rank of an interleaved schedule; alternative to --num-layers-per-virtual-pipeline-stage."""

    decoder_first_pipeline_num_layers: Layers | None = None
    """Layers of the first pipeline rank, if different."""

    decoder_last_pipeline_num_layers: Layers | None = None
    """Layers of the last pipeline rank, if different."""

    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as one layer when layers are divided into stages, instead of by its FLOPs."""

    account_for_loss_in_pipeline_split: bool = False
    """Count the output layer and loss as one layer when layers are divided into stages, instead of by their FLOPs."""

    whole_layers_in_pipeline_split: bool = False
    """Place stage boundaries between layers only. By default, stages without an explicit layout may also end between
    two branches of a layer (attention and feed-forward network) if that makes the slowest stage more than 1% faster."""

    pipeline_model_parallel_layout: str | None = None
    """Exact contents of every stage: E embedding, t layer, L loss, m multi-token head, | stage boundary, x*n
    repetition, such as Et*3|(tt|)*29,m|L. To split a layer, f is its last branch (feed-forward network) and a each
    branch before it (attention), such as Etta|ftL."""

    pipeline_schedule: Literal["1f1b", "interleaved", "zero-bubble", "zero-bubble-h2"] | None = flag(
        "--pipeline-schedule"
    )
    """Pipeline schedule; default: interleaved with virtual stages, else 1f1b. zero-bubble computes weight gradients
    separately and fills waiting time with them; zero-bubble-h2 waits even less and keeps up to twice the number of
    micro-batches in memory."""
