"""Pipeline stages of the layers that distillation compares (--kd-layer-pairs). Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from megatron.core.config.cli import ConfigError, Problem
from megatron.core.config.distillation import TEACHER, DistillationConfig, LayerPair
from megatron.core.pipeline_parallel.stages import pipeline_stages
from megatron.training.config.pretrain_config import PretrainConfig

FLAG = "--kd-layer-pairs"


def stages_of_pairs(cfg: PretrainConfig, vocab_size: int) -> Mapping[LayerPair, int]:
    """Return the pipeline stage of each pair of layers. Raises ConfigError for other widths than the student's, layers
    that do not exist, and pairs on two stages, with the nearest pairs on one."""
    pairs = cfg.group(DistillationConfig).layer_pairs
    if not pairs:
        return {}
    teacher = cfg.companions[TEACHER]
    widths = cfg.model.hidden_size, teacher.model.hidden_size
    if widths[0] != widths[1]:
        reason = f"compares layers of one width; --hidden-size is {widths[0]}, the teacher's {widths[1]}"
        raise _problem(pairs[0], reason, "remove it, or use a teacher of the student's width")
    of_student, of_teacher = (_stages_of_layers(model, vocab_size) for model in (cfg, teacher))
    for pair in pairs:
        for role, number, stages in (("student", pair.student, of_student), ("teacher", pair.teacher, of_teacher)):
            if number not in stages:
                raise _problem(pair, f"the {role} has layers 1 to {len(stages) - 1}, not {number}", "use one of these")
        if of_student[pair.student] != of_teacher[pair.teacher]:
            reason = f"is on pipeline stages {of_student[pair.student]} and {of_teacher[pair.teacher]}"
            raise _problem(pair, reason, f"use a pair on one stage, such as {_nearest(pair, of_student, of_teacher)}")
    return {pair: of_student[pair.student] for pair in pairs}


def _stages_of_layers(cfg: PretrainConfig, vocab_size: int) -> dict[int | None, int]:
    """Return the stage on which each layer (from 1) ends; None: the final norm."""
    stages = pipeline_stages(cfg.model, cfg.describe(vocab_size).costs)
    ends: dict[int | None, int] = {None: len(stages) - 1}
    for stage in stages:
        ends |= {part.layer + 1: stage.stage for part in stage.parts if part.branches.stop == len(part.names)}
    return ends


def _nearest(pair: LayerPair, student: Mapping[int | None, int], teacher: Mapping[int | None, int]) -> str:
    """Return up to three pairs on one stage, nearest first."""

    def distance(other: tuple[int, int]) -> int:
        return abs(other[0] - (pair.student or len(student))) + abs(other[1] - (pair.teacher or len(teacher)))

    numbers = [(i, j) for i, j in product(student, teacher) if i and j and student[i] == teacher[j]]
    return ", ".join(str(LayerPair(*layers, pair.loss)) for layers in sorted(numbers, key=distance)[:3])


def _problem(pair: LayerPair, reason: str, fix: str) -> ConfigError:
    return ConfigError([Problem(FLAG, reason, str(pair), fix)])
