"""Lower bounds on the time and memory of layouts, far cheaper than their predictions. Torch-free.

Layouts that differ only in schedule and sharding share a description and the time of its pieces. The bound of the
time divides this time equally over the pipeline ranks and adds the idle time of the schedule. The bound of the memory
is the weights and gradients of an average pipeline rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron.core.config.moe import expert_tensor_ranks
from megatron.core.description.model import ModelDescription, Piece
from megatron.core.description.parts import activation_bytes
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.report.memory import gradient_bytes
from megatron.training.report.pipeline import count_microbatches
from megatron.training.report.plan.cluster import Cluster
from megatron.training.report.plan.step_time import calibration, calibration_factor, summed_times

Values = Mapping[str, object]
SCHEDULE, CHUNKS = "pipeline_schedule", "num_virtual_stages_per_pipeline_rank"
NOT_DESCRIBED = {
    SCHEDULE, CHUNKS, "use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "use_torch_fsdp2",
    "eval_micro_batch_size",
}  # fmt: skip
"""Fields of a layout on which neither the description of its model nor the time of a piece depends."""


@dataclass(frozen=True)
class _Common:
    """Quantities of layouts that differ only in :data:`NOT_DESCRIBED`."""

    work: float = 0.0
    """Seconds of one micro-batch on an average pipeline rank."""
    microbatches: int = 0
    ranks: int = 1


class Bounds:
    """Descriptions and bounds of the layouts of a model. ``apply`` returns the settings with the values of a layout, or
    the message of a rule that rejects it; a bound of a rejected layout is 0."""

    def __init__(
        self, base: PretrainConfig, cluster: Cluster, vocab_size: int, apply: Callable[[Values], PretrainConfig | str]
    ) -> None:
        self.cluster, self.vocab_size, self.apply = cluster, vocab_size, apply
        self.has_chunks = base.model.virtual_pipeline_model_parallel_size is not None or bool(
            base.explicit & {SCHEDULE, "delay_wgrad_compute"}
        )
        described = base.describe(vocab_size)
        self._base, self._params = base, [param for piece in _pieces(described) for param in piece.params]
        self._descriptions: dict[object, ModelDescription] = {}
        self._common: dict[object, _Common] = {}
        self._elements: dict[tuple[int, int, int], int] = {}

    def describe(self, cfg: PretrainConfig, values: Values) -> ModelDescription:
        """Return the description of ``cfg``, the settings with ``values``."""
        key = _key(values)
        if key not in self._descriptions:
            self._descriptions[key] = cfg.describe(self.vocab_size)
        return self._descriptions[key]

    def seconds(self, values: Values) -> float:
        """Return a time that the step of a layout is not faster than."""
        key = _key(values)
        if key not in self._common:
            self._common[key] = self._measure({name: values[name] for name in values if name not in NOT_DESCRIBED})
        common, idle = self._common[key], 0.0
        if not self.has_chunks:
            idle = (common.ranks - 1) / int(str(values.get(CHUNKS, 1))) / (3 if SCHEDULE in values else 1)
        return common.work * (common.microbatches + idle)

    def _measure(self, values: Values) -> _Common:
        cfg = self.apply(values)
        if isinstance(cfg, str):
            return _Common()
        model, ranks = self.describe(cfg, values), cfg.model.pipeline_model_parallel_size
        seconds = sum(summed_times(cfg, model, _pieces(model), self.cluster).values())
        factor = calibration_factor(cfg, self.cluster.gpu, calibration())
        return _Common(seconds * factor / ranks, count_microbatches(cfg), ranks)

    def bytes(self, values: Values) -> int:
        """Return bytes of weights and gradients on the fullest rank that a layout does not go below."""
        if "use_torch_fsdp2" in values or self._base.distributed.use_torch_fsdp2:
            return 0
        tp, ep = (int(str(values[f"{axis}_parallel_size"])) for axis in ("tensor_model", "expert_model"))
        etp = int(str(values.get("expert_tensor_parallel_size", expert_tensor_ranks(self._base.model))))
        if (tp, ep, etp) not in self._elements:
            axes = {"tp": tp, "ep": ep, "etp": etp}
            shapes = [shape for param in self._params if not param.tied_to for shape in param.local_shapes(axes)]
            self._elements[tp, ep, etp] = sum(map(math.prod, shapes))
        width = activation_bytes(self._base.model) + gradient_bytes(self._base)
        return self._elements[tp, ep, etp] * width // int(str(values["pipeline_model_parallel_size"]))


def _key(values: Values) -> object:
    return tuple((name, str(value)) for name, value in values.items() if name not in NOT_DESCRIBED)


def _pieces(model: ModelDescription) -> list[Piece]:
    return [model.embedding, *(branch for layer in model.layers for branch in layer), model.head, *model.predictions]
