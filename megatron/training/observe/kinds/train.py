"""Records of iterations and log intervals."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from megatron.training.observe.metrics import METRICS_FILE, Record, StepMetrics, record_losses
from megatron.training.observe.records import RecordKind, RunInfo


def train_values(metrics: StepMetrics) -> Record:
    """Return the fields of a train record: losses by name, then the measurements that are not None, then statistics.
    ``metrics`` must have been materialized. Contains no wall-clock value."""
    values: Record = dict(metrics.losses)
    excluded = ("losses", "statistics", "plan", "invalid", "elapsed", "step_marks")
    values.update({name: value for name, value in vars(metrics).items() if name not in excluded and value is not None})
    if metrics.plan is not None:
        values["plan"] = {name: getattr(metrics.plan, name) for name in ("imbalance", "tokens", "cp_sizes")}
    if metrics.statistics:
        values["statistics"] = metrics.statistics
    return values


def _train_tags(record: Record, run: RunInfo) -> Mapping[str, float | None]:
    values = {
        "learning-rate": record["learning_rate"],
        "batch-size": record["global_batch_size"],
        "loss-scale": record["loss_scale"] if run.logging.log_loss_scale_to_tensorboard else None,
        "grad-norm": record.get("grad_norm"),
        "num-zeros": record.get("num_zeros"),
        "params-norm": record.get("params_norm"),
        "weight-decay": record.get("weight_decay"),
        "world-size": run.world_size if run.logging.log_world_size_to_tensorboard else None,
    }
    return values | record_losses(record) | record.get("statistics", {})


TRAIN = RecordKind(
    name="train",
    fields={
        "NAME loss": "mean of each loss per valid token of the global batch",
        "learning_rate": "learning rate",
        "weight_decay": "weight decay, if it is scheduled",
        "global_batch_size": "samples",
        "num_tokens": "valid tokens of the global batch",
        "plan": "plan of samples of different lengths: imbalance, tokens, micro-batches by context-parallel size",
        "loss_scale": "loss scale",
        "grad_norm": "L2 norm of all gradients before clipping",
        "num_zeros": "zero gradient elements",
        "params_norm": "L2 norm of all weights",
        "skipped": "whether the weights were not updated",
        "nan": "whether a loss is NaN",
        "statistics": "statistics of modules by MODULE/NAME",
    },
    file=METRICS_FILE,
    tags=_train_tags,
)


def training_line(record: Record, train_iters: int, with_tflops: bool) -> str:
    """Return the iteration line of an interval in Megatron-LM's format. Omits absent norms and rates."""
    tflops = record["tflops_per_device"] if with_tflops else None
    fields = [
        f" [{datetime.fromtimestamp(record['time']):%Y-%m-%d %H:%M:%S.%f}]"
        f" iteration {record['iteration']:8d}/{train_iters:8d}",
        f"consumed samples: {record['consumed_samples']:12d}",
        f"skipped samples: {record['skipped_samples']:12d}" if record["skipped_samples"] > 0 else "",
        f"elapsed time per iteration (ms): {record['seconds'] / record['iterations'] * 1000.0:.1f}",
        "" if tflops is None else f"throughput per GPU (TFLOP/s/GPU): {tflops:.1f}",
        f"learning rate: {record['learning_rate']:.6E}",
        f"global batch size: {record['global_batch_size']:5d}",
        *(f"{name}: {value:.6E}" for name, value in record["losses"].items()),
        f"loss scale: {record['loss_scale']:.1f}",
        "" if record["grad_norm"] is None else f"grad norm: {record['grad_norm']:.3f}",
        "" if record["num_zeros"] is None else f"num zeros: {int(record['num_zeros'])}",
        "" if record["params_norm"] is None else f"params norm: {record['params_norm']:.3f}",
        f"number of skipped iterations: {record['num_skipped']:3d}",
        f"number of nan iterations: {record['num_nan']:3d}",
    ]
    return " | ".join(filter(None, fields)) + " |"


def rate_line(record: Record, world_size: int) -> str:
    """Return the line with the rates of an interval, which follows the iteration line."""
    rate, mfu = record["tokens_per_second"], record["mfu"]
    share = "n/a" if mfu is None else f"{mfu:.1%}"
    return f"     tokens/s: {rate:.1f} | tokens/s/GPU: {rate / world_size:.1f} | MFU: {share}"


def _interval_lines(record: Record, run: RunInfo) -> list[str]:
    with_rates = run.logging.log_throughput
    lines = [training_line(record, run.train_iters, with_rates)]
    return [*lines, rate_line(record, run.world_size)] if with_rates else lines


INTERVAL = RecordKind(
    name="interval",
    fields={
        "iterations": "iterations since the last log point",
        "seconds": "their seconds, without evaluation and saving",
        "tokens_per_second": "tokens that the loss counts, of all devices",
        "tflops_per_device": "model TFLOP/s per device; null for a task that does not count FLOPs",
        "mfu": "model TFLOP/s over the dense peak; null for unknown devices",
        "parts_seconds": "seconds per iteration by part: mean_parts",
        "losses": "mean of each loss over iterations that were not skipped",
        "learning_rate": "of the last iteration, like global_batch_size, loss_scale, grad_norm, num_zeros, params_norm",
        "num_skipped": "iterations that did not update the weights",
        "num_nan": "iterations with a loss that is NaN",
        "skipped_samples": "samples skipped since the start of the run",
    },
    file=None,
    flush="write",
    console=_interval_lines,
)
KINDS = (TRAIN, INTERVAL)
