"""One optimizer step on one global batch. :meth:`TrainStep.run` is the outline."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer.layer_norms import LayerNorms
from megatron.core.schedules import batch_size as batch_sizes
from megatron.core.statistics import StatisticsSum, Totals, invalid_values, summaries, total_losses
from megatron.training.checks.error_injection import with_injected_errors
from megatron.training.checks.finite import named_by_origin
from megatron.training.checks.gradient_origin import GlobalBatch, nonfinite_ranks
from megatron.training.checks.step_check import StepValues, choose_check
from megatron.training.components import Components
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.exits import conditions
from megatron.training.initialize import training_device
from megatron.training.observe.loss_sums import LossSums, global_counts
from megatron.training.observe.metrics import StepMetrics
from megatron.training.observe.step_parts import Mark, StepMarks, mark
from megatron.training.start.cuda_graphs import make_forward_backward
from megatron.training.start.main_loss import supply_main_loss


class TrainStep:
    """Steps of a run. ``parts`` holds the model, the data and the counters."""

    def __init__(self, cfg: PretrainConfig, parts: Components) -> None:
        self.cfg, self.parts, self.state, self.timers = cfg, parts, parts.state, parts.task.timers
        self.device = training_device()
        self.mark = partial(mark, self.device.type == "cuda")
        self.forward_backward = with_injected_errors(make_forward_backward(cfg, self.device), cfg, parts)
        self.check = choose_check(cfg, parts.groups.world, self._nonfinite_ranks)
        self.flops_per_sample = parts.task.flops_per_sample()
        self.statistics = StatisticsSum(parts.model, parts.groups)
        has_norms = cfg.logging.log_layer_statistics_interval is not None
        self.layer_norms = LayerNorms(parts.optimizer) if has_norms and not cfg.validation.skip_train else None
        supply_main_loss(parts.model, parts.task.loss_weights[parts.task.losses[0]])
        self.loss_names: list[str] | None = None
        """Loss names in the order of the last pipeline stage; known after the first iteration."""

    def run(self) -> StepMetrics:
        """Set the learning rate, step the optimizer on one global batch and update the counters; return measurements,
        which may still be device tensors. Collective."""
        size = self._batch_size(self.state.consumed_train_samples)
        for edit in self.parts.optimizer.weight_edits:
            edit.prepare(self._measures_layers())
        assert self.parts.scheduler is not None, "only --skip-train has none"
        self.parts.scheduler.set_samples(self.state.consumed_train_samples)
        groups = self.parts.optimizer.param_groups
        scheduled = [group["lr"] for group in groups if group.get("max_lr") is None]  # neither decoupled nor muP's
        rate = max(scheduled or [group["lr"] for group in groups])
        if self.state.iteration + 1 in self.cfg.training.iterations_to_skip:
            metrics = self._skip_batch(size)
        else:
            with self.timers("forward-backward", log_level=1):
                inputs, counts = self._prepare(size)
                forward = self.mark()
                local = LossSums(self.device).add(self.forward_backward(**inputs)).pairs
            metrics = self._update(size, local, counts, forward)
        metrics.learning_rate = rate
        if self.cfg.schedule.weight_decay_incr_style != "constant":
            metrics.weight_decay = self.parts.scheduler.get_wd()
        self._count(size, metrics)
        return metrics

    def _prepare(self, size: int) -> tuple[dict[str, object], Tensor]:
        """Zero gradients, read micro-batches and weigh the losses. Return the arguments of ``forward_backward`` and the
        counts of valid tokens over all ranks, fp64 [losses]. Collective over ``dp_cp``."""
        for chunk in self.parts.model:
            chunk.zero_grad_buffer()
        batches, counts = self._read(size)
        counts = global_counts(counts, self.parts.groups, self.device, self.parts.task.batches.are_shared)
        batches = self.check.save(self.state.iteration + 1, size, counts, batches)
        return self._inputs(size, batches, counts), counts

    def _inputs(self, size: int, batches: Iterator[dict], counts: Tensor) -> dict[str, object]:
        """Weigh the losses by ``counts`` and return the arguments of ``forward_backward``."""
        parts, cfg, task = self.parts, self.cfg, self.parts.task
        task.loss_weights.set(parts.optimizer.scale_loss(1.0 / counts[: len(task.losses)].clamp(min=1.0)))
        return {
            "forward_step_func": task.forward_step,
            "model": parts.stages,
            "loss_weights": task.loss_weights,
            "on_forward": parts.on_forward,
            **task.batches.split(batches, self._num_microbatches(size), cfg.training.micro_batch_size),
        }

    def _update(self, size: int, local: dict[str, Tensor], counts: Tensor, forward: Mark) -> StepMetrics:
        """Reduce the gradients and step the optimizer, from this rank's loss sums and the counts over all ranks. Waits
        for the device, or, with a delayed check, only for the values of the previous iteration, for which it raises
        NonFiniteError. Raises UserError if no token contributes to the loss."""
        parts, optimizer, start = self.parts, self.parts.optimizer, self.mark()
        sums, counts, statistics = self._reduce(local, counts)
        return_memory(self.cfg, self.device, 1)
        values = self._values(local, sums, counts, statistics)
        norms = self.layer_norms if self._measures_layers() else None
        if norms is not None:
            norms.start()
        with self.timers("optimizer", log_level=1):
            result = self.check.update(optimizer, values)
        waits = time.perf_counter()
        self.check.read(keep=1)
        device_wait = time.perf_counter() - waits
        measured = summaries(statistics) | (norms.finish() if norms is not None else {})
        for edit in optimizer.weight_edits:
            measured |= edit.logged
        assert parts.reader is not None, "only --skip-train has none"
        marks = StepMarks(forward, start, self.mark(), parts.reader.take_waited(), device_wait)
        num_tokens = parts.task.batches.num_tokens(counts)
        metrics = StepMetrics(
            losses=sums.means(), num_tokens=num_tokens, learning_rate=0.0, global_batch_size=size, **result._asdict()
        )
        metrics.statistics, metrics.plan, metrics.step_marks = measured, parts.task.batches.figures, marks
        metrics.loss_scale = optimizer.get_loss_scale()
        if self.cfg.logging.log_params_norm:
            metrics.params_norm = optimizer.params_norm_on_device()
        return metrics

    def _reduce(self, local: Mapping[str, Tensor], counts: Tensor) -> tuple[LossSums, Tensor, Totals]:
        """Return the loss sums, counts and statistics of the global batch, and complete the gradients: collective over
        the world. In the first iteration checks the counts, which waits for the device."""
        parts, is_first = self.parts, self.loss_names is None
        finalize_model_grads(parts.model, groups=parts.groups, sum_statistics=False)
        sums = LossSums(self.device, local).share(parts.groups.pp, self.loss_names).all_reduce(parts.groups.dp_cp)
        self.loss_names = list(sums.pairs)
        if is_first:
            sums.check_counts(parts.task.batches.expected(parts.task.losses, counts))
        counts = parts.task.batches.final_counts(sums, counts, parts.model)
        statistics = self.statistics(self.device)
        sums.pairs |= total_losses(statistics)
        return sums, counts, statistics

    def _values(self, local: Mapping[str, Tensor], sums: LossSums, counts: Tensor, statistics: Totals) -> StepValues:
        invalid = invalid_values(statistics)
        losses = invalid | named_by_origin(local, sums.pairs)  # layers first: they locate a NaN better than the loss
        before = self.state.iteration + 1, self.state.consumed_train_samples
        return StepValues(*before, losses, sums.pairs | invalid, counts.sum())

    def _nonfinite_ranks(self, batch: GlobalBatch) -> str:
        return nonfinite_ranks(
            self.parts.model,
            self.parts.groups.world,
            lambda: self.forward_backward(**self._inputs(batch.size, iter(batch.batches), batch.counts)),
        )

    def _measures_layers(self) -> bool:
        return conditions.every(self.cfg.logging.log_layer_statistics_interval, self.state.iteration + 1)

    def _num_microbatches(self, size: int) -> int:
        return self.parts.task.batches.number(size // (self.cfg.training.micro_batch_size * self.parts.groups.dp.size))

    def _batch_size(self, consumed: int) -> int:
        return batch_sizes.running_global_batch_size(self.cfg.flat, consumed, self.parts.groups.dp.size)

    def used_up(self, consumed: int) -> conditions.ExitReason | None:
        """Return the reason to stop if the training data holds no global batch after ``consumed`` samples, or None."""
        if (num_samples := self.parts.num_samples) is None:
            return None
        return conditions.after_last_batch(num_samples, consumed, self._batch_size(consumed))

    def _read(self, size: int) -> tuple[Iterator[dict], Tensor]:
        """Return this rank's micro-batches of a global batch, and their counts. Reads the next ones too."""
        if self.parts.on_forward is not None:
            self.parts.on_forward("reads", True)
        num_ahead, consumed = 0, self.state.consumed_train_samples + size
        if not conditions.is_complete(self.cfg, self.state.iteration + 1, consumed) and self.used_up(consumed) is None:
            num_ahead = self._num_microbatches(self._batch_size(consumed))
        assert self.parts.reader is not None, "only --skip-train has none"
        return self.parts.task.batches.read(self.parts.reader, self._num_microbatches(size), num_ahead)

    def _skip_batch(self, size: int) -> StepMetrics:
        """Read the micro-batches of a global batch without an update (--iterations-to-skip)."""
        batches, _ = self._read(size)
        for _ in range(self._num_microbatches(size)):
            next(batches)
        self.state.skipped_train_samples += size
        scale = self.parts.optimizer.get_loss_scale()
        return StepMetrics(
            losses={}, num_tokens=0, learning_rate=0.0, global_batch_size=size, loss_scale=scale, skipped=True
        )

    def _count(self, size: int, metrics: StepMetrics) -> None:
        state = self.state
        state.iteration += 1
        state.consumed_train_samples += size
        if metrics.skipped and metrics.losses:  # an overflow in fp16, not --iterations-to-skip
            state.skipped_iterations += 1
        if self.flops_per_sample is not None:
            flops = None if metrics.plan is None else metrics.plan.flops
            state.floating_point_operations += self.flops_per_sample * size if flops is None else flops


def return_memory(cfg: PretrainConfig, device: torch.device, level: int) -> None:
    """Free cached device memory (--empty-unused-memory-level): level 1 before the optimizer step, 2 after it too."""
    if cfg.training.empty_unused_memory_level >= level and device.type == "cuda":
        torch.cuda.empty_cache()
