"""The tags of TensorBoard and wandb, the names that dashboards of Megatron-LM runs are built on."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.training.hooks.console import perplexity
from megatron.training.observe.metrics import EvalResult, StepMetrics


@dataclass(frozen=True, kw_only=True)
class Tags:
    """Which optional tags a run writes."""

    loss_scale: bool = True
    validation_perplexity: bool = False
    throughput: bool = False
    timers: bool = False
    memory: bool = False
    world_size: int | None = None
    """None leaves the tag out."""

    def of_step(self, metrics: StepMetrics) -> dict[str, float]:
        """Values of one iteration; ``metrics`` must have been materialized."""
        values = {
            "learning-rate": metrics.learning_rate,
            "batch-size": metrics.global_batch_size,
            **metrics.losses,
            **metrics.statistics,
            "loss-scale": metrics.loss_scale if self.loss_scale else None,
            "world-size": self.world_size,
            "grad-norm": metrics.grad_norm,
            "num-zeros": metrics.num_zeros,
            "params-norm": metrics.params_norm,
            "weight-decay": metrics.weight_decay,
        }
        return {tag: float(value) for tag, value in values.items() if value is not None}

    def of_evaluation(self, result: EvalResult) -> dict[str, float]:
        """Values of one evaluated data set. Test sets have tags of their own, so that no validation point is lost."""
        suffix = f"-{result.dataset}" if result.dataset else ""
        values = {}
        for name, value in result.losses.items():
            tag = f"{name} {result.name}{suffix}"
            values[tag] = float(value)
            if self.validation_perplexity:
                values[f"{tag} ppl"] = perplexity(value)
        return values

    def of_timing(self, record: Mapping[str, Any]) -> dict[str, float]:
        """Values of one ``timing.jsonl`` record."""
        values = {"iteration-time": record["seconds_per_iteration"]}
        if self.throughput:
            values["tokens-per-second"] = record["tokens_per_second"]
            rates = {"throughput": record["tflops_per_device"], "mfu": record["mfu"]}
            values |= {tag: value for tag, value in rates.items() if value is not None}
        if self.memory:
            values |= record["memory"]
        if self.timers:
            values |= {f"{name}-time": ms / 1000.0 for name, ms in record.get("timers_ms", {}).items()}
        return values
