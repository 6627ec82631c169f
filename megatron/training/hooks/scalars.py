"""Tags of TensorBoard and wandb; dashboards of Megatron-LM runs depend on these names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.training.hooks.console import perplexity
from megatron.training.observe.metrics import record_losses


@dataclass(frozen=True, kw_only=True)
class Tags:
    """Selection of the optional tags."""

    loss_scale: bool = True
    validation_perplexity: bool = False
    throughput: bool = False
    timers: bool = False
    memory: bool = False
    world_size: int | None = None
    """None omits the tag."""

    def of(self, record: Mapping[str, Any]) -> dict[str, float]:
        """Return tag -> value for one record of ``metrics.jsonl`` or ``timing.jsonl``."""
        kinds = {"train": self._step_scalars, "timing": self._timing_scalars, "save": self._save_scalars}
        return kinds.get(record["kind"], self._evaluation_scalars)(record)

    def _step_scalars(self, record: Mapping[str, Any]) -> dict[str, float]:
        """Return the tags of one iteration: learning-rate, batch-size, each loss and module statistic under its name,
        loss-scale and world-size if selected, grad-norm, num-zeros, params-norm and weight-decay. Omits absent
        values."""
        values = {
            "learning-rate": record["learning_rate"],
            "batch-size": record["global_batch_size"],
            **record_losses(record),
            **record.get("statistics", {}),
            "loss-scale": record["loss_scale"] if self.loss_scale else None,
            "world-size": self.world_size,
            "grad-norm": record.get("grad_norm"),
            "num-zeros": record.get("num_zeros"),
            "params-norm": record.get("params_norm"),
            "weight-decay": record.get("weight_decay"),
        }
        return {tag: float(value) for tag, value in values.items() if value is not None}

    def _evaluation_scalars(self, record: Mapping[str, Any]) -> dict[str, float]:
        """Return ``LOSS validation`` or ``LOSS test`` per loss, with ``-DATASET`` appended for named data sets, and the
        same tag plus `` ppl`` if perplexity is selected. Test sets use separate tags, so that they do not overwrite
        validation points."""
        suffix = f"-{record['dataset']}" if "dataset" in record else ""
        values = {}
        for name, value in record_losses(record).items():
            tag = f"{name} {'validation' if record['kind'] == 'valid' else 'test'}{suffix}"
            values[tag] = float(value)
            if self.validation_perplexity:
                values[f"{tag} ppl"] = perplexity(value)
        return values

    def _save_scalars(self, record: Mapping[str, Any]) -> dict[str, float]:
        names = {"time": "seconds", "stall-time": "stall_seconds", "gb-per-second": "gb_per_second"}
        return {f"save-checkpoint-{tag}": float(record[name]) for tag, name in names.items()}

    def _timing_scalars(self, record: Mapping[str, Any]) -> dict[str, float]:
        """Return ``iteration-time`` (s); with ``throughput`` also tokens-per-second, throughput (TFLOP/s per device)
        and mfu, the last two only if known; with ``memory`` the values of `memory_bytes`; with ``timers`` NAME-time (s)
        per timer."""
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
