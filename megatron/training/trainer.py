"""Training loop. :meth:`Trainer.train` is the outline; each method that it calls is one step of it."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch

from megatron.training.checkpoint.checkpointer import SaveReport
from megatron.training.components import Components
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.evaluate import EvalName, EvalSet, Evaluator
from megatron.training.exits import conditions
from megatron.training.generation.periodic import build_periodic_work
from megatron.training.hooks.base import Hooks
from megatron.training.observe.kinds.evaluation import EvalResult, evaluation_records
from megatron.training.observe.kinds.process import END
from megatron.training.observe.kinds.save import SAVE, SAVE_WAIT, SAVING, save_values
from megatron.training.observe.records import RecordKind
from megatron.training.step import TrainStep, return_memory

logger = logging.getLogger(__name__)


class Trainer:
    """Trains ``parts.model`` until an exit condition holds."""

    def __init__(self, cfg: PretrainConfig, parts: Components, exits: conditions.ExitConditions) -> None:
        self.cfg, self.parts, self.exits = cfg, parts, exits
        self.state = parts.state
        self.hooks = Hooks(cfg.logging.log_interval, parts.hooks)
        self.last_mark = time.perf_counter()
        self.evaluator = Evaluator(cfg, parts.task, parts.stages, parts.groups, parts.on_forward)
        self.periodic_work = build_periodic_work(cfg, parts)
        self.step = TrainStep(cfg, parts)
        self.check = self.step.check
        self.first_iteration = parts.state.iteration + 1
        self.last_validation: tuple[int, list[EvalResult]] | None = None
        """Iteration and results of the last evaluation of the validation sets."""

    def train(self) -> conditions.ExitReason:
        """Run iterations, evaluations and saves until the first reason to stop, which may hold before the first
        iteration; log and return it. Collective; hooks are called, but not started or closed."""
        validation, checkpoint = self.cfg.validation, self.cfg.checkpoint
        reason = self.exits.check(self.state) or self.step.used_up(self.state.consumed_train_samples)
        self.collect_garbage(force=True)
        self.restart_timer()
        while reason is None:
            metrics = self.step.run()
            metrics.elapsed = self.restart_timer()
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
            reason = self.exits.check(self.state) or self.step.used_up(self.state.consumed_train_samples)
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

    def read_checks(self, keep: int = 0) -> None:
        """Raise if any loss or gradient so far, without the last ``keep`` iterations, was not finite. Waits for the
        device. Collective, because an iteration with such gradients runs again to name the ranks."""
        self.check.read(keep)

    def restart_timer(self) -> float:
        """Return the seconds since the last call: the iteration time, as evaluation and saving also end with a call."""
        before, self.last_mark = self.last_mark, time.perf_counter()
        return self.last_mark - before

    def evaluate(self, sets: list[EvalSet] | None = None, name: EvalName = "validation", final: bool = False) -> None:
        """Evaluate ``sets`` (None: the validation sets) and report the results; does nothing without sets. First raises
        for non-finite losses so far. A final validation reuses results of this iteration. Collective."""
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
        """Return copies, marked as final, of the validation results of this iteration; None if another evaluation is
        needed, also for external data, whose iterators have advanced."""
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
        if conditions.every(cfg.training.train_sync_interval, iteration) and self.step.device.type == "cuda":
            torch.cuda.synchronize()
        return_memory(cfg, self.step.device, 2)
        self.collect_garbage(force=False)

    def collect_garbage(self, force: bool) -> None:
        """With --manual-gc, run Python's garbage collection every --manual-gc-interval iterations, or now with
        ``force``, which also disables automatic collection for the process. Does nothing without --manual-gc."""
        if not self.cfg.training.manual_gc:
            return
        if force:
            gc.disable()
        if force or conditions.every(self.cfg.training.manual_gc_interval, self.state.iteration):
            gc.collect()
