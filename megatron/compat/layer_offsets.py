"""Layers of a pipeline stage, counted as programs ask: how many there are, and how many stages before hold."""

from __future__ import annotations

from megatron.core import parallel_state
from megatron.core.config.errors import UserError
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.pipeline_parallel.stages import StageContents, pipeline_stages, virtual_pipeline_size


def get_num_layers_to_build(config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None) -> int:
    """Number of layers of a stage: of pipeline rank ``pp_rank`` (this rank's) and its chunk ``vp_stage``."""
    return len(_layers(config, vp_stage, pp_rank))


def get_transformer_layer_offset(
    config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None
) -> int:
    """Return the number of layers on the stages before the one of :func:`get_num_layers_to_build`."""
    return _layers(config, vp_stage, pp_rank).start


def _layers(config: TransformerConfig, vp_stage: int | None, pp_rank: int | None) -> range:
    """Layers are numbered from 0. Raises UserError for stages balanced by FLOPs, or a layout that cuts a layer."""
    ranks = config.pipeline_model_parallel_size
    if ranks == 1 and virtual_pipeline_size(config) == 1:
        return range(config.num_layers)
    names = ("pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    is_given = any(getattr(config, name) is not None for name in names)
    accounts = config.account_for_embedding_in_pipeline_split or config.account_for_loss_in_pipeline_split
    if not is_given and not accounts:
        raise UserError(
            "get_transformer_layer_offset: cannot compute layer offsets, because stages are balanced by the model's "
            "FLOPs; set pipeline_model_parallel_layout, or read layer numbers from parameter names, which are global"
        )
    stages = pipeline_stages(config)
    rank = parallel_state.get_process_groups().pp.rank if pp_rank is None else pp_rank
    stage: StageContents = stages[rank + (vp_stage or 0) * ranks]
    if stage.cuts_layers:
        raise UserError("get_transformer_layer_offset: the layout cuts a layer; end every stage with a full one")
    before = sum(round(stage.num_layers) for stage in stages[: stage.stage])
    return range(before, before + round(stage.num_layers))
