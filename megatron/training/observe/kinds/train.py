"""Records of iterations and log intervals."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from megatron.training.observe.metrics import METRICS_FILE, StepMetrics, record_losses
from megatron.training.observe.page.charts import Chart, Line, Section, evenly, slug
from megatron.training.observe.records import Record, RecordKind, RunInfo
from megatron.training.observe.run_folder import HEAD, Event, Run, Series, is_number, number, table

MOST_LAYERS = 8
"""Layers that a chart shows, evenly spaced."""


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


def _read_train(run: Run, record: Record) -> None:
    iteration, samples = record["iteration"], record.get("consumed_samples")
    for key, value in record.items():
        if is_number(value) and key not in HEAD:
            run.train.setdefault(key, Series()).add(iteration, value)
    for key, value in table(record, "statistics").items():
        if is_number(value):
            run.statistics.setdefault(key, Series()).add(iteration, value)  # type: ignore[arg-type]
    run.iteration, run.samples = iteration, int(number(record, "consumed_samples"))
    if is_number(samples):
        run.consumed[iteration] = run.samples
    run.tokens += number(record, "num_tokens")
    if not run.losses:
        run.losses = [name for name, value in record_losses(record).items() if is_number(value)]
    if record.get("skipped") is True:
        run.num_skipped += 1
        run.events.append(Event(iteration, "skipped", "the weights were not updated"))
    if record.get("nan") is True:
        run.num_nan += 1
        run.events.append(Event(iteration, "NaN", "a loss is NaN"))


def _train_sections(run: Run) -> list[Section]:
    return [
        Section("losses", "Losses and learning", learning_charts(run), position=0),
        Section("experts", "Load of experts", expert_charts(run), position=50),
        Section("layers", "Layers", layer_charts(run), position=60),
    ]


def learning_charts(run: Run) -> list[Chart]:
    """Return one chart per loss, training and evaluation together, then learning rate, norms and the like."""
    charts = []
    for loss in dict.fromkeys([*run.losses, *(loss for loss, _ in run.evaluation)]):
        lines = [Line("training", run.train[loss])] if loss in run.train else []
        lines += [Line(data, series, "dots") for (name, data), series in run.evaluation.items() if name == loss]
        charts.append(Chart(f"chart-{slug(loss)}", f"{loss} (mean per token)", lines))
    further_charts = {
        "learning_rate": "learning rate",
        "grad_norm": "gradient norm",
        "params_norm": "parameter norm",
        "num_zeros": "zero gradient elements",
        "loss_scale": "loss scale",
        "global_batch_size": "global batch size",
        "weight_decay": "weight decay",
    }
    for key, title in further_charts.items():
        series = run.train.get(key, Series())
        is_constant = key in ("loss_scale", "global_batch_size") and len(set(series.y)) == 1
        if series.x and not is_constant:
            zero = key == "learning_rate"
            charts.append(Chart(f"chart-{slug(key)}", title, [Line(title, series)], zero, key.endswith("norm")))
    return charts


def by_layer(run: Run, name: str) -> list[tuple[str, Series]]:
    """Return (layer, series) of a statistic, at most ``MOST_LAYERS`` evenly spaced ones."""
    layers = [(key[: -len(name) - 1], series) for key, series in run.statistics.items() if key.endswith(f"/{name}")]
    return [layers[place] for place in evenly(len(layers), MOST_LAYERS)]


def layer_charts(run: Run) -> list[Chart]:
    """Return one chart per statistic of layers, without statistics of experts."""
    names = dict.fromkeys(key.partition("/")[2] for key in run.statistics)
    return [
        Chart(
            f"chart-layers-{slug(name)}",
            name.replace("_", " "),
            [Line(*pair) for pair in by_layer(run, name)],
            False,
            True,
        )
        for name in names
        if not name.startswith("tokens_per_expert")
    ]


def expert_charts(run: Run) -> list[Chart]:
    """Return the distribution of tokens over experts, by layer."""
    titles = {
        "entropy": "entropy of the load (1: equal)",
        "max": "tokens of the busiest expert",
        "min": "tokens of the least busy expert",
    }
    charts = []
    for key, title in titles.items():
        lines = [Line(*pair) for pair in by_layer(run, f"tokens_per_expert {key}")]
        charts.append(Chart(f"chart-experts-{key}", title, lines, from_zero=key != "entropy"))
    return charts


TRAIN = RecordKind(
    name="train",
    fields={
        "NAME loss": "mean of each loss per valid token of the global batch; with --dpo per pair",
        "rewards/NAME": "with --dpo, mean per pair: chosen, rejected, accuracies, margins, as TRL names them",
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
    read=_read_train,
    page=_train_sections,
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


RATES = {
    "tokens_per_second": "tokens that the loss counts, of all devices",
    "tflops_per_device": "model TFLOP/s per device; null for a task that does not count FLOPs",
    "mfu": "model TFLOP/s over the dense peak; null for unknown devices",
}
INTERVAL = RecordKind(
    name="interval",
    fields={
        "iterations": "iterations since the last log point, of which num_skipped, num_nan",
        "seconds": "their seconds, without evaluation and saving; per iteration by part: parts_seconds",
        **RATES,
        "losses": "mean of each loss over iterations that were not skipped",
        "learning_rate": "of the last iteration, like global_batch_size, loss_scale, grad_norm, num_zeros, params_norm",
        "skipped_samples": "samples skipped since the start of the run",
    },
    file=None,
    flush="write",
    console=_interval_lines,
)
KINDS = (TRAIN, INTERVAL)
