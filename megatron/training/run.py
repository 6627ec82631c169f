"""Run: every step from a parsed configuration to a trained model, in order."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from megatron.core import parallel_state
from megatron.core.config.cli import ConfigError
from megatron.core.config.errors import UserError, call_all
from megatron.core.config.mup import width_multiplier
from megatron.core.dist_checkpointing.exchange import from_first_rank, together
from megatron.core.groups.process_groups import Group, ProcessGroups
from megatron.core.optimizer import get_megatron_optimizer, get_mup_config_overrides, get_standard_config_overrides
from megatron.core.schedules.learning_rate import get_optimizer_param_scheduler
from megatron.core.tokenizers.base import Tokenizer
from megatron.training import initialize
from megatron.training.arguments import changed_settings, log_arguments, validate_args
from megatron.training.checkpoint.base_weights import load_base
from megatron.training.checkpoint.checkpointer import Checkpointer
from megatron.training.checkpoint.companion_settings import files_of_models
from megatron.training.checkpoint.environment import environment
from megatron.training.checkpoint.history import check_save_folder
from megatron.training.checkpoint.other_formats import apply_hf_settings, load_hf_weights
from megatron.training.checkpoint.settings import apply_checkpoint_args
from megatron.training.checks.rank_agreement import check_data, check_settings
from megatron.training.checks.self_checks import check_build, replica_checks
from megatron.training.components import Components
from megatron.training.config.launcher import check_launch, is_first_rank, launched_rank, launched_world_size
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.settings_file import write_settings
from megatron.training.data.datasets import data_sources, samples_per_split
from megatron.training.data.loader import BatchReader, train_sampler
from megatron.training.data.samples import check_first_sample
from megatron.training.evaluate import EvalName, EvalSet, eval_sets
from megatron.training.exits.conditions import ExitConditions, ExitReason, is_complete, last_iteration, used_up
from megatron.training.exits.endings import error_message, notify_launcher, say
from megatron.training.hooks.base import Hook, check_methods
from megatron.training.hooks.build import build_hooks, plain
from megatron.training.hooks.data_files import data_file_hooks, truncated_file
from megatron.training.observe.kinds.process import END
from megatron.training.observe.records import RunInfo
from megatron.training.report.dry_run import dry_run_report
from megatron.training.report.out_of_memory import (
    HeldMemory,
    OutOfMemory,
    is_out_of_memory,
    measure,
    measure_device,
    out_of_memory,
)
from megatron.training.report.plan.summary import predict_run
from megatron.training.rules.inputs import check_inputs
from megatron.training.start.companions import build_companions
from megatron.training.start.parallelize import build_model, parallelize, report_choices, report_parameters
from megatron.training.start.store_logits import store_logits
from megatron.training.start.stored_reference import store_reference
from megatron.training.start.weight_edits import build_weight_edits
from megatron.training.stored_settings import weight_settings
from megatron.training.tasks.base import Task
from megatron.training.tasks.gpt import GPTTask
from megatron.training.tasks.language_model import LanguageModelTask
from megatron.training.train_state import TrainState
from megatron.training.trainer import Trainer
from megatron.training.watchdog import Watchdog
from megatron.version import version_text

logger = logging.getLogger(__name__)
NO_FINAL_EVALUATION = "the final evaluation is not complete: the run was interrupted; %s"

UNSAVED_EXIT_CODE = 75
"""sysexits' EX_TEMPFAIL: the last checkpoint could not be written; earlier ones are intact and can be resumed."""

TaskFactory = Callable[[PretrainConfig, Tokenizer | None], Task]


def run(given: PretrainConfig, make_task: TaskFactory, hooks: Sequence[Hook] = ()) -> int:
    """Train ``make_task(cfg, tokenizer)`` with ``given`` (parsed, not resolved); return the exit code. ``hooks``
    observe the loop on every rank, after the hooks that flags request. A process may call this repeatedly. A
    ``UserError`` is reported as one message and a non-zero code; MEGATRON_LOGGING_LEVEL=DEBUG adds the traceback. Any
    other exception is a bug and propagates. Afterwards waits for all ranks and destroys the process groups, also those
    of torch.distributed."""
    initialize.configure_logging(given.logging.logging_level)
    initialize.show_crashes()
    try:
        check_methods(hooks)
        cfg = validate_args(apply_hf_settings(apply_checkpoint_args(given)), launched_world_size() or 1)
        if cfg.program.dry_run:
            if is_first_rank():
                sys.stdout.write(dry_run_report(cfg))
            return 0
        if not torch.distributed.is_initialized():
            check_launch()
        with Watchdog(cfg) as watchdog:
            with ExitConditions(cfg) as exits:  # a signal during startup stops the run before its first iteration
                parts = build(cfg, make_task, watchdog)
                if isinstance(parts.task, GPTTask) and parts.task.distillation.logits_save_dir is not None:
                    code = _store_logits(parts.task, parts)
                else:
                    with training(cfg, parts, exits, watchdog, hooks) as trainer:
                        reason = None if cfg.validation.skip_train else trainer.train()
                        code = _final_evaluation(trainer, reason)
            code = code or _report_failures(parts)
            watchdog.finish()
            initialize.shut_down()
    except UserError as error:
        return _refuse(error)
    except Exception as error:
        notify_launcher(error_message(error), error)
        raise
    finally:
        parallel_state.destroy_model_parallel()
    if code == UNSAVED_EXIT_CODE:
        notify_launcher(f"the last checkpoint could not be written (exit code {code}); earlier ones are intact")
    return code


def _refuse(error: UserError) -> int:
    """Report an error that the user must fix to the launcher and, unless it was reported, on stderr; return its exit
    code. Configuration errors, equal on all ranks, are printed by rank 0 only."""
    if os.environ.get("MEGATRON_LOGGING_LEVEL", "").upper() == "DEBUG":
        traceback.print_exc()
    notify_launcher(error_message(error))
    configuration, rank = isinstance(error, ConfigError), launched_rank()
    if not error.reported and (rank == 0 or not configuration):  # configuration problems are equal on all ranks
        say(error_message(error), rank)
    return error.exit_code


def build(cfg: PretrainConfig, make_task: TaskFactory, watchdog: Watchdog) -> Components:
    """Initialize the process, check the inputs and build the run. Collective. May raise an OutOfMemory report."""
    initialize.start_process(cfg, watchdog.store)
    check_settings(cfg.flat)  # first, because ranks of different layouts cannot create process groups
    groups = initialize.initialize_megatron(cfg)
    tokenizer = _checked_inputs(cfg, groups.world)
    log_environment()
    log_arguments(cfg)
    if cfg.checkpoint.save:
        from_first_rank(partial(write_settings, cfg.flat, cfg.checkpoint.save), groups.world)
    task = make_task(cfg, tokenizer)
    try:
        parts = build_components(cfg, task, groups)
    except Exception as error:
        if is_out_of_memory(error):
            raise _out_of_memory(error, cfg, task, groups, measure_device(), "while the model was built") from None
        raise
    check_build(parts, cfg)
    return parts


def _store_logits(task: GPTTask, parts: Components) -> int:
    """Store the log-probabilities of the training samples (--logits-save-dir) in place of training."""
    try:
        batches = train_iterator(task, parts.datasets[0], TrainState(), parts.groups)
        store_logits(task, parts.model, batches, parts.groups)
    except UserError as error:
        error.reported = not parts.groups.world.is_first  # the first rank reports for all
        raise
    finally:
        parts.checkpointer.close()
        if parts.reader is not None:
            parts.reader.close()
    return 0


@contextmanager
def training(
    cfg: PretrainConfig, parts: Components, exits: ExitConditions, watchdog: Watchdog, hooks: Sequence[Hook] = ()
) -> Iterator[Trainer]:
    """Context of the trainer of ``parts``: starts the hooks; afterwards closes them, the checkpointer (waits for a
    background save) and the data loader in any case. A failure reaches the watchdog before anything is closed, and is
    replaced by the error that explains it (`_cause`) if there is one. The process groups stay."""
    info = run_info(cfg, parts)
    parts.hooks = [
        *watchdog.watch(parts),
        *parts.task.hooks(),
        *replica_checks(cfg, parts),
        *data_file_hooks(parts.datasets, cfg.logging.log_interval),
        *build_hooks(cfg, info, parts.task.timers),
        *parts.hooks,
        *hooks,
    ]
    trainer = Trainer(cfg, parts, exits)
    trainer.hooks.on_start(info)
    try:
        try:
            yield trainer
        except BaseException as error:
            cause: BaseException = _cause(error, cfg, parts) or error
            watchdog.failed(cause)
            trainer.hooks.emit(END, {"ending": "failed", "reason": error_message(cause)})
            if cause is error:
                raise
            raise cause from None
        finally:
            trainer.hooks.on_end()
            parts.checkpointer.close()
            if parts.reader is not None and cfg.data.dataloader_type != "external":
                parts.reader.close()
    except UserError:
        raise
    except Exception as error:  # torch reports a dead loader worker in the main thread at any time, also in closing
        explanation = _cause(error, cfg, parts)
        if explanation is None:
            raise
        raise explanation from None


def _report_failures(parts: Components) -> int:
    failures = [hook.failure for hook in parts.hooks if hook.failure]
    for failure in failures:
        notify_launcher(failure)
        say(failure, parts.groups.world.rank)
    return int(bool(failures))


def _cause(error: BaseException, cfg: PretrainConfig, parts: Components) -> UserError | None:
    """Return the error that explains ``error`` to a user: a memory report for a failed allocation, or a truncated data
    file (it kills a DataLoader worker, whose exit names no file). None if ``error`` explains itself."""
    if not isinstance(error, Exception):
        return None
    if is_out_of_memory(error):
        where = f"in iteration {parts.state.iteration + 1}"
        frozen = (chunk for companion in parts.companions for chunk in companion.model)
        held = measure([*parts.model, *frozen], parts.optimizer)
        return _out_of_memory(error, cfg, parts.task, parts.groups, held, where)
    return truncated_file(parts.datasets)


def _out_of_memory(
    error: Exception, cfg: PretrainConfig, task: Task, groups: ProcessGroups, held: HeldMemory, where: str
) -> OutOfMemory:
    size = _vocab_size(cfg, task)
    return out_of_memory(error, cfg, held, vocab_size=size, pipeline_rank=groups.pp.rank, where=where)


def _vocab_size(cfg: PretrainConfig, task: Task) -> int:
    return getattr(task.tokenizer, "vocab_size", None) or cfg.tokenizer.vocab_size or 0


def log_environment() -> None:
    """Log version, git commit, host, versions of Python, torch and CUDA, and the GPUs that rank 0 sees."""
    facts = environment()
    gpus = f"CUDA {facts['cuda']}, {facts['gpus']}" if facts["gpus"] else "no GPU"
    logger.info(
        "%s on host %s: Python %s, torch %s, %s", version_text(), facts["host"], facts["python"], facts["torch"], gpus
    )


def _checked_inputs(cfg: PretrainConfig, world: Group) -> Tokenizer | None:
    """Return the tokenizer. Before anything is built or written, raise a UserError with all problems of tokenizer, data
    and --save, or with data or tokenizers that differ between ranks. Collective over ``world``."""
    built: list[Tokenizer | None] = []

    def check() -> None:
        inputs = partial(check_inputs, cfg, samples_per_split(cfg), files=world.is_first)
        calls: list[Callable[[], object]] = [lambda: built.append(inputs())]
        call_all(calls + [partial(check_save_folder, cfg)] * world.is_first)

    try:
        together(check, world, UserError)
    except UserError as error:
        error.reported = not world.is_first  # the first rank reports for all
        raise
    tokenizer = built[0]
    prefixes, weights = data_sources(cfg)
    prefixes += files_of_models(cfg) if world.size > 1 else []
    check_data(prefixes, weights, None if tokenizer is None else tokenizer.fingerprint, world)
    return tokenizer


def _final_evaluation(trainer: Trainer, reason: ExitReason | None) -> int:
    """Run the final validation and test, then write samples, after training, which ended for ``reason`` (None:
    --skip-train); return the exit code, UNSAVED_EXIT_CODE if the last save failed. A run that stopped before its end
    skips them, and a signal skips the remaining ones. Collective."""
    cfg, parts, exits = trainer.cfg, trainer.parts, trainer.exits
    code, fix = 0, "the same command completes it" if cfg.checkpoint.save else "and nothing is saved without --save"
    if reason is not None:
        code = UNSAVED_EXIT_CODE if parts.checkpointer.failed_saves else reason.exit_code
        if not reason.finished:
            # a signal arrived in the last iteration
            if is_complete(cfg, parts.state.iteration, parts.state.consumed_train_samples):
                logger.warning(NO_FINAL_EVALUATION, fix)
            return code
    finals: tuple[tuple[list[EvalSet], EvalName], ...] = (parts.valid_sets, "validation"), (parts.test_sets, "test")
    for sets, name in [(sets, name) for sets, name in finals if sets]:
        if exits.interrupted():
            logger.warning(NO_FINAL_EVALUATION, fix)
            break
        trainer.evaluate(sets, name, final=True)
    else:
        for work in trainer.periodic_work:
            trainer.measure(partial(work, final=True))
    return code


def build_components(cfg: PretrainConfig, task: Task, groups: ProcessGroups) -> Components:
    """Build the components, and load the initial checkpoint or Hugging Face weights. Collective."""
    model = parallelize(build_model(task, initialize.training_device()), cfg, groups)
    report_choices(model, cfg.model.fp8)
    report_parameters(model, groups)
    overrides = get_mup_config_overrides(cfg.optimizer, width_multiplier(cfg.model), cfg.optimizer.optimizer)
    if overrides:  # they replace the default rules
        overrides = {**get_standard_config_overrides(cfg.optimizer), **overrides}
    optimizer = get_megatron_optimizer(cfg.optimizer, model, groups=groups, config_overrides=overrides or None)
    optimizer.weight_edits += build_weight_edits(model, cfg, groups)
    scheduler = None if cfg.validation.skip_train else get_optimizer_param_scheduler(cfg.flat, optimizer)
    described = task.description()
    checkpointer = Checkpointer(
        cfg,
        model,
        optimizer,
        scheduler,
        groups=groups,
        tokenizer=task.tokenizer,
        architecture=None if described is None else weight_settings(described),
    )
    parts = Components(task, groups, model, optimizer, scheduler, TrainState(), checkpointer)
    try:
        if (base := load_base(model, cfg, groups)) is not None:
            checkpointer.name_base(base)
            optimizer.reload_model_params()
        parts.companions = build_companions(task, model, groups)
        return _load(parts, cfg)
    except BaseException:
        checkpointer.unlock()
        raise


def _load(parts: Components, cfg: PretrainConfig) -> Components:
    """Load the checkpoint, or without one --load-hf weights; build the data sets and, unless --skip-train, the reader
    of training batches from the checkpoint's position. Sets ``state``, ``reader``, ``datasets``, ``valid_sets`` and
    ``test_sets`` of ``parts``; returns it. Collective. Raises UserError for bad custom samples or no training data."""
    task, groups = parts.task, parts.groups
    state = parts.checkpointer.load()
    if state is None and cfg.checkpoint.load_hf and not cfg.reads_base:
        load_hf_weights(cfg.checkpoint.load_hf, parts.model, parts.optimizer, groups, model_family=cfg.model_family)
    parts.state = state or parts.state
    train, valid, test = task.train_valid_test_datasets_provider(samples_per_split(cfg))
    if task.stores_reference:
        store_reference(task, [train, valid, test], groups)
    _check_custom_data(task, {"train": train, "validation": valid, "test": test})
    if not cfg.validation.skip_train:
        batches = train_iterator(task, train, parts.state, groups)
        parts.reader = BatchReader(batches, task.batches.counts, reads_ahead=cfg.data.dataloader_type != "external")
    parts.valid_sets, parts.test_sets = eval_sets(valid, cfg.validation.validation_set_names), eval_sets(test)
    parts.datasets = (train, valid, test)
    return parts


def _check_custom_data(task: Task, datasets: dict[str, Any]) -> None:
    """Check the first sample of each data set from a task with a custom data set provider, unless its batches are
    custom too, or the loader external. Raises UserError for missing keys, shapes or dtypes."""
    cls = type(task)
    methods = [getattr(cls, name, None) for name in ("train_valid_test_datasets_provider", "get_batch", "make_batches")]
    provider, *batches = (getattr(method, "__module__", "").startswith("megatron.") for method in methods)
    is_external = task.cfg.data.dataloader_type == "external"
    if provider or not all(batches) or is_external or not isinstance(task, LanguageModelTask):
        return
    expected = task.random_sample(np.random.default_rng(0))
    for name, dataset in datasets.items():
        if name == "train" or not isinstance(dataset, list | tuple):  # lists are several validation sets
            check_first_sample(dataset, expected, f"{cls.__name__}.train_valid_test_datasets_provider, {name} data")


def run_info(cfg: PretrainConfig, parts: Components) -> RunInfo:
    """Return the description of the run and this process that hooks receive in ``on_start``. ``state`` is the
    live object, not a copy; unset --train-iters gives 0. Names the GPU, or "CPU"."""
    device = initialize.training_device()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    logs = launched_rank() == cfg.world_size - 1  # only this rank uses the prediction
    is_planned = logs and device.type == "cuda" and parts.task.description() is not None
    return RunInfo(
        state=parts.state,
        train_iters=last_iteration(cfg, parts.state.iteration, parts.state.consumed_train_samples) or 0,
        rank=launched_rank(),
        world_size=cfg.world_size,
        data_parallel_rank=parts.groups.dp.rank,
        device=device.type,
        device_name=name,
        trains=not cfg.validation.skip_train,
        logging=cfg.logging,
        settings={key: plain(value) for key, value in changed_settings(cfg.flat).items()},
        environment=environment(),
        prediction=predict_run(cfg, name, _vocab_size(cfg, parts.task)) if is_planned else None,
    )


def train_iterator(task: Task, dataset: Any, state: TrainState, groups: ProcessGroups) -> Iterator[dict]:
    """Return an iterator over this rank's micro-batches, from the checkpoint's position on. ``single`` raises UserError
    when the samples are used up; ``cyclic`` reshuffles each epoch; ``external`` iterates ``dataset`` from its start."""
    cfg = task.cfg
    if cfg.data.dataloader_type == "external":
        return iter(dataset)
    if dataset is None:
        raise UserError("there is no training data: give --data-path, --train-data-path or --mock-data")
    if cfg.variable_lengths.use_varlen_dataset and not task.batches.takes_variable_lengths:
        raise UserError("--use-varlen-dataset: this program has its own batches; remove it")
    shard = task.batches.shard(cfg.training.micro_batch_size, groups)
    sampler = train_sampler(cfg, shard, len(dataset), state.consumed_train_samples)
    return until_exhausted(task.batches.loader(dataset, sampler, groups), len(dataset))


def until_exhausted(loader: Iterable[dict], num_samples: int) -> Iterator[dict]:
    """Yield the batches of ``loader``; raise UserError when they are used up."""
    yield from loader
    raise UserError(used_up(num_samples))
