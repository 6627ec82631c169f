"""Selection of the pipeline schedule from the configuration. Torch-free."""

from __future__ import annotations

from functools import lru_cache

from megatron.core.config.errors import UserError
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.pipeline_parallel.actions import Schedule
from megatron.core.pipeline_parallel.schedule_interleaved import interleaved
from megatron.core.pipeline_parallel.schedule_plain import one_forward_one_backward, without_pipeline
from megatron.core.pipeline_parallel.schedule_zero_bubble import zero_bubble, zero_bubble_h2


def build_schedule(config: TransformerConfig, num_ranks: int, num_chunks: int, num_microbatches: int) -> Schedule:
    """Return the training schedule for ``config`` (--pipeline-schedule; --delay-wgrad-compute gives zero-bubble).
    Raises UserError if the schedule does not support ``num_chunks``."""
    name = config.pipeline_schedule or ("zero-bubble" if config.delay_wgrad_compute else None)
    group_size = config.microbatch_group_size_per_virtual_pipeline_stage
    return choose_schedule(name, num_ranks, num_chunks, num_microbatches, group_size)


@lru_cache(maxsize=64)
def choose_schedule(
    name: str | None, num_ranks: int, num_chunks: int, num_microbatches: int, group_size: int | None = None
) -> Schedule:
    """Return the training schedule ``name`` (1f1b, interleaved, zero-bubble, zero-bubble-h2). None: ``interleaved`` for
    several chunks per rank, else ``1f1b``, which for one rank alternates forward and backward. ``group_size`` is used
    with several chunks only. Cached. Raises UserError if it cannot run ``num_chunks``."""
    if name == "zero-bubble":
        return zero_bubble(num_ranks, num_microbatches, num_chunks, group_size)
    if name == "zero-bubble-h2" and num_chunks == 1:
        return zero_bubble_h2(num_ranks, num_microbatches)
    if num_chunks > 1 and name in (None, "interleaved"):
        return interleaved(num_ranks, num_chunks, num_microbatches, group_size)
    if num_chunks == 1 and name in (None, "1f1b"):
        return (
            without_pipeline(num_microbatches)
            if num_ranks == 1
            else one_forward_one_backward(num_ranks, num_microbatches)
        )
    raise UserError(f"--pipeline-schedule {name} does not fit {num_chunks} model chunks per rank")
