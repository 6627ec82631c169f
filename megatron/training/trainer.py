"""Training loop. :meth:`Trainer.train` is the outline; each method that it calls is one step of it."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer.layer_norms import LayerNorms
from megatron.core.schedules import batch_size as batch_sizes
from megatron.core.statistics import StatisticsSum, invalid_values, summaries, total_losses
from megatron.training.checkpoint.checkpointer import SaveReport
from megatron.training.checks.error_injection import ErrorInjection
from megatron.training.checks.finite import named_by_origin
from megatron.training.checks.gradient_origin import GlobalBatch, nonfinite_ranks
from megatron.training.checks.step_check import StepValues, choose_check
from megatron.training.components import Components
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.evaluate import EvalName, EvalSet, Evaluator
from megatron.training.exits import conditions
from megatron.training.generation.periodic import build_periodic_work
from megatron.training.hooks.base import Hooks
from megatron.training.initialize import training_device
from megatron.training.observe.kinds.evaluation import EvalResult, evaluation_records
from megatron.training.observe.kinds.process import END
from megatron.training.observe.kinds.save import SAVE, SAVE_WAIT, SAVING, save_values
from megatron.training.observe.loss_sums import LossSums, global_counts
from megatron.training.observe.metrics import StepMetrics
from megatron.training.observe.records import RecordKind
from megatron.training.observe.step_parts import Mark, StepMarks, mark
from megatron.training.start.cuda_graphs import make_forward_backward
from megatron.training.start.main_loss import supply_main_loss

logger = logging.getLogger(__name__)


class Trainer:
    """Trains ``parts.model`` until an exit condition holds."""

    injection: ErrorInjection | None = None

    def __init__(self, cfg: PretrainConfig, parts: Components, exits: conditions.ExitConditions) -> None:
        self.cfg, self.parts, self.exits = cfg, parts, exits
        self.state, self.timers = parts.state, parts.task.timers
        self.hooks = Hooks(cfg.logging.log_interval, parts.hooks)
        self.last_mark = time.perf_counter()
        self.evaluator = Evaluator(cfg, parts.task, parts.stages, parts.groups, parts.on_forward)
        self.periodic_work = build_periodic_work(cfg, parts)
        self.device = training_device()
        self.forward_backward = make_forward_backward(cfg, self.device)
        if cfg.training.error_injection_rate:
            rank = parts.groups.dp_cp.rank
            self.injection = ErrorInjection(cfg.training, cfg.model.seed, rank, parts.state.iteration + 1)
        self.check = choose_check(cfg, global_rank(), self._nonfinite_ranks)
        self.flops_per_sample = parts.task.flops_per_sample()
        self.first_iteration = parts.state.iteration + 1
        self.statistics = StatisticsSum(parts.model, parts.groups)
        has_norms = cfg.logging.log_layer_statistics_interval is not None
        self.layer_norms = LayerNorms(parts.optimizer) if has_norms and not cfg.validation.skip_train else None
        supply_main_loss(parts.model, parts.task.loss_weights[parts.task.losses[0]])
        self.loss_names: list[str] | None = None
        """Loss names in the order of the last pipeline stage; known after the first iteration."""
        self.counted = torch.zeros((), dtype=torch.float64)
        """Sum of the valid tokens and the counts of all losses of the last global batch, over all ranks: 0 if no token
        contributes to a loss."""
        self.last_validation: tuple[int, list[EvalResult]] | None = None
        """Iteration and results of the last evaluation of the validation sets."""

    def train(self) -> conditions.ExitReason:
        """Run iterations, evaluations and saves until the first reason to stop; log and return that reason. Checks
        before the first iteration, so that a complete run makes none. An exit condition saves before it stops, if
        --save is set. Collective; hooks are called, but not started or closed."""
        validation, checkpoint = self.cfg.validation, self.cfg.checkpoint
        reason = self.exits.check(self.state)
        self.collect_garbage(force=True)
        self.restart_timer()
        while reason is None:
            metrics = self.train_step()
            if conditions.is_log_iteration(self.cfg.logging.log_interval, self.state.iteration, self.first_iteration):
                self.read_checks()
            self.hooks.on_step(self.state, metrics)
            evaluates = conditions.is_eval_iteration(
                validation.eval_interval, self.state.iteration, validation.start_eval_at_iter
            )
            if evaluates:
                self.evaluate()
            for work in self.periodic_work:
                if work.is_due(self.state.iteration, evaluates):
                    self.measure(work)
            reason = self.exits.check(self.state)
            if conditions.is_save_iteration(checkpoint.save_interval, self.state.iteration, reason):
                self.save(last=reason is not None)
            elif conditions.every(checkpoint.non_persistent_save_interval, self.state.iteration):
                self.save(fast=True)
            self.finish_save()
            reason = reason or self.unsaved()
            self.between_steps()
        logger.info("%s", reason.message)
        self.hooks.emit(END, {"ending": "finished" if reason.finished else "stopped", "reason": reason.message})
        return reason

    def train_step(self) -> StepMetrics:
        """Run one optimizer step on one global batch, set the learning rate before it, and update the counters; return
        its measurements, which may still be device tensors. Batches of --iterations-to-skip are only read.
        Collective."""
        size = self._batch_size(self.state.consumed_train_samples)
        for edit in self.parts.optimizer.weight_edits:
            edit.prepare(self._wants_layers())
        assert self.parts.scheduler is not None, "only --skip-train has none"
        self.parts.scheduler.set_samples(self.state.consumed_train_samples)
        rate = max(group["lr"] for group in self.parts.optimizer.param_groups if not group["is_decoupled_lr"])
        if self.state.iteration + 1 in self.cfg.training.iterations_to_skip:
            metrics = self._skip_batch(size)
        else:
            with self.timers("forward-backward", log_level=1):
                inputs, counts = self._prepare(size)
                forward = self._mark()
                local = LossSums(self.device).add(self.forward_backward(**inputs)).pairs
            if self.injection is not None:
                local = self.injection(local, self.state.iteration + 1)
            metrics = self._update(size, local, counts, forward)
        metrics.learning_rate = rate
        if self.cfg.schedule.weight_decay_incr_style != "constant":
            metrics.weight_decay = self.parts.scheduler.get_wd()
        self._count(size, metrics)
        metrics.elapsed = self.restart_timer()
        return metrics

    def read_checks(self, keep: int = 0) -> None:
        """Raise if any loss or gradient so far, without the last ``keep`` iterations, was not finite. Waits for the
        device; call before a log, evaluation or save. Collective if a gradient was not finite: that iteration then runs
        again, so that the message can name the ranks."""
        self.check.read(keep)

    def _nonfinite_ranks(self, batch: GlobalBatch) -> str:
        """Return a sentence with the ranks whose gradients of ``batch`` are not finite. Collective."""

        def forward_backward() -> None:
            self.forward_backward(**self._inputs(batch.size, iter(batch.batches), batch.counts))

        return nonfinite_ranks(self.parts.model, self.parts.groups.world, forward_backward)

    def restart_timer(self) -> float:
        """Return the seconds since the last call: the iteration time, as evaluation and saving also end with a call."""
        before, self.last_mark = self.last_mark, time.perf_counter()
        return self.last_mark - before

    def _wants_layers(self) -> bool:
        """Whether the iteration in progress measures each layer."""
        return conditions.every(self.cfg.logging.log_layer_statistics_interval, self.state.iteration + 1)

    def _mark(self) -> Mark:
        return mark(self.device.type == "cuda")

    def _update(self, size: int, local: dict[str, Tensor], counts: Tensor, forward: Mark) -> StepMetrics:
        """Reduce the gradients and step the optimizer, from this rank's loss sums and the counts over all ranks; return
        the measurements, with a learning rate of 0. With fp16 or --no-check-for-nan-in-loss-and-grad waits for the
        device. Otherwise waits only for the values of the previous iteration, and raises NonFiniteError for that
        iteration; a step with invalid values leaves the weights unchanged. Raises UserError if no token contributes to
        the loss."""
        optimizer, state = self.parts.optimizer, self.state
        update_start = self._mark()
        sums, counts = self._reduce(local, counts)
        statistics = self.statistics(self.device)
        sums.pairs |= total_losses(statistics)
        self.return_memory(1)
        invalid, measured = invalid_values(statistics), summaries(statistics)
        losses = invalid | named_by_origin(local, sums.pairs)  # layers first: they locate a NaN better than the loss
        values = StepValues(
            state.iteration + 1, state.consumed_train_samples, losses, sums.pairs | invalid, counts.sum()
        )
        layer_norms = self.layer_norms if self._wants_layers() else None
        if layer_norms is not None:
            layer_norms.start()
        with self.timers("optimizer", log_level=1):
            result = self.check.update(optimizer, values)
        waits = time.perf_counter()
        self.read_checks(keep=1)
        device_wait = time.perf_counter() - waits
        if layer_norms is not None:
            measured = {**measured, **layer_norms.finish()}
        for edit in optimizer.weight_edits:
            measured = {**measured, **edit.logged}
        assert self.parts.reader is not None, "only --skip-train has none"
        marks = StepMarks(forward, update_start, self._mark(), self.parts.reader.take_waited(), device_wait)
        return StepMetrics(
            losses=sums.means(),
            num_tokens=counts[0],
            learning_rate=0.0,
            global_batch_size=size,
            statistics=measured,
            plan=self.parts.task.batches.figures,
            loss_scale=optimizer.get_loss_scale(),
            params_norm=optimizer.params_norm_on_device() if self.cfg.logging.log_params_norm else None,
            step_marks=marks,
            **result._asdict(),
        )

    def _prepare(self, size: int) -> tuple[dict[str, object], Tensor]:
        """Zero ``main_grad``, read the micro-batches of the global batch and weigh the losses by its valid tokens.
        Collective: counts are all-reduced over ``dp_cp``. Returns the arguments of ``forward_backward``, and the counts
        over all ranks, fp64 [losses]."""
        for chunk in self.parts.model:
            chunk.zero_grad_buffer()
        batches, counts = self._read(size)
        counts = global_counts(counts, self.parts.groups, self.device, self.parts.task.batches.are_shared)
        batches = self.check.save(self.state.iteration + 1, size, counts, batches)
        return self._inputs(size, batches, counts), counts

    def _inputs(self, size: int, batches: Iterator[dict], counts: Tensor) -> dict[str, object]:
        """Weigh the losses by ``counts`` and return the arguments of ``forward_backward``."""
        parts, cfg, task = self.parts, self.cfg, self.parts.task
        task.loss_weights.set(parts.optimizer.scale_loss(1.0 / counts.clamp(min=1.0)))
        return {
            "forward_step_func": task.forward_step,
            "model": parts.stages,
            "loss_weights": task.loss_weights,
            "on_forward": parts.on_forward,
            **task.batches.split(batches, self._num_microbatches(size), cfg.training.micro_batch_size),
        }

    def _reduce(self, local: dict[str, Tensor], counts: Tensor) -> tuple[LossSums, Tensor]:
        """Complete the gradients, and the loss sums over all ranks: collective over data-parallel ranks and the
        pipeline. Returns the sums and the counts of the global batch. In the first iteration checks the counts, which
        waits for the device."""
        parts, is_first = self.parts, self.loss_names is None
        finalize_model_grads(parts.model, groups=parts.groups, sum_statistics=False)
        sums = LossSums(self.device, local).share(parts.groups.pp, self.loss_names).all_reduce(parts.groups.dp_cp)
        self.loss_names = list(sums.pairs)
        if is_first:
            sums.check_counts(parts.task.batches.expected(parts.task.losses, counts))
        return sums, parts.task.batches.final_counts(sums, counts, parts.model)

    def _num_microbatches(self, size: int) -> int:
        return self.parts.task.batches.number(size // (self.cfg.training.micro_batch_size * self.parts.groups.dp.size))

    def _batch_size(self, consumed: int) -> int:
        return batch_sizes.running_global_batch_size(self.cfg.flat, consumed, self.cfg.data_parallel_size)

    def _read(self, size: int) -> tuple[Iterator[dict], Tensor]:
        """Return an iterator over this rank's micro-batches of a global batch of ``size`` samples, and their counts.
        The iterator reads the next global batch too, unless this one is the last."""
        if self.parts.on_forward is not None:
            self.parts.on_forward("reads", True)
        following = 0
        if self.state.iteration + 1 < self.cfg.training.train_iters:
            following = self._num_microbatches(self._batch_size(self.state.consumed_train_samples + size))
        assert self.parts.reader is not None, "only --skip-train has none"
        return self.parts.task.batches.read(self.parts.reader, self._num_microbatches(size), following)

    def _skip_batch(self, size: int) -> StepMetrics:
        """Read this rank's micro-batches of a global batch without computing or updating anything
        (--iterations-to-skip). Counts the samples as skipped and returns metrics with ``skipped`` set and without
        losses."""
        batches, _ = self._read(size)
        for _ in range(self._num_microbatches(size)):
            next(batches)
        self.state.skipped_train_samples += size
        return StepMetrics(
            losses={},
            num_tokens=0,
            learning_rate=0.0,
            global_batch_size=size,
            loss_scale=self.parts.optimizer.get_loss_scale(),
            skipped=True,
        )

    def _count(self, size: int, metrics: StepMetrics) -> None:
        """Advance ``state`` by one iteration of ``size`` samples and, if the task counts them, its FLOPs. A skipped
        update counts in ``skipped_iterations`` only if it computed losses, as with fp16 overflows."""
        state = self.state
        state.iteration += 1
        state.consumed_train_samples += size
        if metrics.skipped and metrics.losses:
            state.skipped_iterations += 1
        if self.flops_per_sample is not None:
            flops = None if metrics.plan is None else metrics.plan.flops
            state.floating_point_operations += self.flops_per_sample * size if flops is None else flops

    def evaluate(self, sets: list[EvalSet] | None = None, name: EvalName = "validation", final: bool = False) -> None:
        """Evaluate ``sets`` (None: the validation sets) and report the results; does nothing without sets. First raises
        for non-finite losses so far. A final validation reuses results of this iteration. Collective; waits for the
        device."""
        sets = self.parts.valid_sets if sets is None else sets
        if sets:
            self.measure(lambda: evaluation_records(self._evaluate(sets, name, final)))

    def _evaluate(self, sets: list[EvalSet], name: EvalName, final: bool) -> list[EvalResult]:
        results = self._known_results(name, final)
        if results is None:
            if self.cfg.training.manual_gc and self.cfg.training.manual_gc_eval:
                gc.collect()
            results = self.evaluator.evaluate(sets, name, final)
        if name == "validation":
            self.last_validation = self.state.iteration, results
        return results

    def measure(self, work: Callable[[], Iterable[tuple[RecordKind, Mapping[str, object]]]]) -> None:
        """Report the records (kind, values) that ``work`` returns; its time is no part of an iteration. First raises
        for non-finite losses so far. Collective; waits for the device."""
        self.read_checks()
        for kind, values in work():
            self.hooks.emit(kind, values)
        self.restart_timer()

    def _known_results(self, name: str, final: bool) -> list[EvalResult] | None:
        """Return copies, marked as final, of the validation results of this same iteration: same weights and samples.
        Returns None if another evaluation is needed: not final, not validation, none at this iteration, or external
        data, whose iterators have advanced."""
        if not final or name != "validation" or self.last_validation is None:
            return None
        iteration, results = self.last_validation
        if iteration != self.state.iteration or self.cfg.data.dataloader_type == "external":  # iterators advanced
            return None
        return [replace(result, final=True, seconds=0.0) for result in results]

    def save(self, last: bool = False, fast: bool = False) -> None:
        """Write a checkpoint of the current state if --save is set, after a save in progress; the ``last`` one of the
        process never in the background. ``fast``: to the folder of --non-persistent-save-interval. Collective. First
        waits for the device and raises for non-finite losses so far. A failed save is reported, not raised."""
        self.read_checks()
        if self.cfg.checkpoint.save is None:
            return
        self.finish_save(wait=True)
        self.hooks.emit(SAVING, {})
        background = self.cfg.checkpoint.async_save and not last
        self.report_save(self.parts.checkpointer.start_save(self.state, background=background, fast=fast))
        self.restart_timer()

    def finish_save(self, wait: bool = False) -> None:
        """Report a finished background save; ``wait=True`` blocks until it is finished. Collective: one small host
        all-reduce while a save is in progress, else none."""
        checkpointer = self.parts.checkpointer
        if wait and checkpointer.saving is not None:
            self.hooks.emit(SAVE_WAIT, {"saved_iteration": checkpointer.saving})
        self.report_save(checkpointer.finish_save(wait))

    def report_save(self, report: SaveReport | None) -> None:
        """Report a finished save that succeeded. Does nothing for None or a failed save. Not collective."""
        if report is not None and report.saved:
            times = {"seconds": report.seconds, "stall": report.stall}
            values = save_values(**times, num_bytes=report.num_bytes, background=report.background)
            self.hooks.emit(SAVE, values, report.state)

    def unsaved(self) -> conditions.ExitReason | None:
        """Return the reason to stop after too many failed saves, or None."""
        checkpointer, cfg = self.parts.checkpointer, self.cfg
        failed, why = checkpointer.failed_saves, checkpointer.last_failure
        return conditions.after_failed_saves(failed, cfg.checkpoint.max_failed_saves, cfg.checkpoint.save, why)

    def between_steps(self) -> None:
        """Synchronize the device, free cached memory and collect garbage at the intervals that flags set, at the same
        iteration on every rank: a pause of one rank delays all of them."""
        cfg, iteration = self.cfg, self.state.iteration
        if conditions.every(cfg.training.train_sync_interval, iteration) and self.device.type == "cuda":
            torch.cuda.synchronize()
        self.return_memory(2)
        self.collect_garbage(force=False)

    def return_memory(self, level: int) -> None:
        """Free cached device memory (--empty-unused-memory-level): level 1 before the optimizer step, 2 after it
        too."""
        if self.cfg.training.empty_unused_memory_level >= level and self.device.type == "cuda":
            torch.cuda.empty_cache()

    def collect_garbage(self, force: bool) -> None:
        """With --manual-gc, run Python's garbage collection every --manual-gc-interval iterations, or now with
        ``force``, which also disables automatic collection for the process. Does nothing without --manual-gc."""
        if not self.cfg.training.manual_gc:
            return
        if force:
            gc.disable()
        if force or conditions.every(self.cfg.training.manual_gc_interval, self.state.iteration):
            gc.collect()


def global_rank() -> int:
    """Return the global rank of this process; 0 without torch.distributed."""
    return dist.get_rank() if dist.is_initialized() else 0
