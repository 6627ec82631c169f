"""Rules about how model and work are split over ranks, and what is recomputed. Fixes name the nearest sizes."""

from __future__ import annotations

import os

from megatron.core.config.cli import Problem
from megatron.core.config.problems import Problems, nearest_multiples, problem
from megatron.training.config.launcher import launched_world_size
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.resolve import smallest_world_size
from megatron.training.rules.common import sequence_lengths

MOST_LOCAL_RANKS = 16
"""More ranks are usually on several machines, which need another command."""


def world_size_divides(cfg: PretrainConfig) -> Problems:
    model = cfg.model
    tp, pp, cp = model.tensor_model_parallel_size, model.pipeline_model_parallel_size, model.context_parallel_size
    if min(tp, pp, cp) >= 1 and (cfg.world_size % (tp * pp * cp) or cfg.world_size < tp * pp * cp):
        ranks = tp * pp * cp
        reason = f"TP {tp} x PP {pp} x CP {cp} = {ranks} ranks per replica do not divide the world size"
        yield Problem("world size", reason, cfg.world_size, how_to_start(cfg))


def how_to_start(cfg: PretrainConfig) -> str:
    """Fix for a world size that the layout cannot use: without a launcher, the command that starts enough ranks."""
    ranks = smallest_world_size(cfg)
    if launched_world_size() is not None or ranks > MOST_LOCAL_RANKS:
        return f"start a multiple of {ranks} ranks"
    program = cfg.family.programs[0].script
    return f"start {ranks} ranks, or a multiple: torchrun --nproc_per_node={ranks} {program} ..."


def sequence_parallel_length(cfg: PretrainConfig) -> Problems:
    """With --sequence-parallel, require each sequence length to be a multiple of TP x CP."""
    tp, cp = cfg.model.tensor_model_parallel_size, cfg.model.context_parallel_size
    for field, length in sequence_lengths(cfg):
        if cfg.model.sequence_parallel and min(tp, cp) >= 1 and length % (tp * cp):
            ranks = f"--tensor-model-parallel-size {tp}" + (f" x --context-parallel-size {cp}" if cp > 1 else "")
            reason = f"is not a multiple of {ranks}, which --sequence-parallel requires"
            yield problem(cfg, field, reason, nearest_multiples(length, tp * cp))


def nccl_config_file_exists(cfg: PretrainConfig) -> Problems:
    path = cfg.distributed.nccl_communicator_config_path
    if path is not None and not cfg.program.dry_run and not os.path.isfile(path):
        yield problem(cfg, "nccl_communicator_config_path", "is not a file")
