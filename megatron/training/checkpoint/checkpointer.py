"""Saves and restores a run: weights, optimizer, schedule, counters, random states, settings, tokenizer.

What is on disk is described in ``core/dist_checkpointing`` (one checkpoint) and ``files.py`` (the folder of them). A
save that fails leaves every earlier checkpoint as it was and is reported, not raised; a load that cannot be
exact is refused.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from megatron.core.dist_checkpointing import writer
from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.exchange import from_first_rank, together
from megatron.core.dist_checkpointing.manifest import ASSET_NAME, FORMAT, MANIFEST, read_manifest
from megatron.core.dist_checkpointing.reader import CheckpointReader, Source, load_from, together_reader
from megatron.core.dist_checkpointing.writer import Blocks, Fault, host_blocks, no_fault, remove_leftovers
from megatron.core.distributed import unwrapped
from megatron.core.groups.process_groups import Group, ProcessGroups
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.schedules.learning_rate import OptimizerParamScheduler
from megatron.core.sharding.sharded_tensor import ShardedTensor, module_tensors
from megatron.training.arguments import config_to_dict
from megatron.training.checkpoint.background import BackgroundWriter
from megatron.training.checkpoint.files import (
    Found,
    alternative,
    delete_checkpoint,
    find_checkpoint,
    get_checkpoint_name,
    read_tracker,
    saved_iterations,
    write_tracker,
)
from megatron.training.checkpoint.history import (
    continues,
    fast_folder,
    find_resumable,
    identity,
    same_folder,
    set_aside,
)
from megatron.training.checkpoint.lock import SaveLock
from megatron.training.checkpoint.random_states import rng_tensors, set_rng_state
from megatron.training.checkpoint.schema import malformed
from megatron.training.checkpoint.settings import (
    ARCHITECTURE,
    apply_checkpoint_args,
    check_args,
    in_a_box,
    load_checkpoint_args,
    software_versions,
)
from megatron.training.checkpoint.upcycling import DenseCheckpoint, check_width, is_dense, settings_to_compare
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.train_state import TrainState

__all__ = ["Checkpointer", "apply_checkpoint_args", "load_checkpoint_args"]

logger = logging.getLogger(__name__)

SHARE_OF_COLLECTIVE_TIMEOUT = 0.8
"""Files that hang behind training are named before the watchdog names the rank that waits for them."""


@dataclass(frozen=True)
class SaveReport:
    """A save that is over."""

    state: TrainState
    """The counters that it holds."""
    folder: str
    saved: bool
    background: bool
    seconds: float = 0.0
    """From its beginning until its tracker was written."""
    stall: float = 0.0
    """The part of them for which training stood still on this rank."""
    num_bytes: int = 0
    """The bytes of all ranks' tensors."""


class Checkpointer:
    """The checkpoints of one run. Every method is collective over all ranks.

    Args:
        cfg: resolved settings.
        model_chunks: of this rank, wrapped for data parallelism or not.
        optimizer: None to save and load weights only.
        scheduler: of ``optimizer``.
        groups: this rank's process groups.
        tokenizer: its fingerprint is stored and compared.
        fault: see ``dist_checkpointing.writer.Fault``.

    Raises:
        CheckpointError: another job writes to --save.
    """

    def __init__(
        self, cfg: PretrainConfig, model_chunks: Sequence[nn.Module], optimizer: MegatronOptimizer | None,
        scheduler: OptimizerParamScheduler | None, *, groups: ProcessGroups, tokenizer: Any = None,
        architecture: Sequence[str] | None = None, fault: Fault = no_fault,
    ) -> None:  # fmt: skip
        self.architecture = ARCHITECTURE if architecture is None else architecture
        self.cfg, self.groups, self.fault = cfg, groups, fault
        self.chunks = [unwrapped(chunk) for chunk in model_chunks]
        self.optimizer, self.scheduler = optimizer, scheduler
        self.tokenizer = None if tokenizer is None else tokenizer.fingerprint
        self._failures: dict[str, int] = {}
        """Saves in a row that failed, of each folder."""
        self.last_failure = ""
        """Why the last of them did."""
        self._continued_from: int | None = None
        """The iteration in --save that this run goes on from; None: it does not continue what is there."""
        self._locks: list[SaveLock] = []
        self._written: dict[str, set[int]] = {}
        """Iterations in each folder that retention may delete: this run's, and those that it went on from."""
        self.fast = fast_folder(cfg) if cfg.non_persistent_save_interval is not None else None
        self._identity: str | None = None
        self._is_clear = False
        """Checkpoints of another history are out of the way of this run's."""
        self._pending: tuple[SaveReport, float] | None = None
        """A save in the background, and when it began."""
        self._background: BackgroundWriter | None = None
        self.left_alone: list[str] = []
        """Names that the checkpoint holds and :meth:`load` was not to load, as with --no-load-optim."""
        if cfg.save is not None:
            from_first_rank(self._take_locks, groups.world)
        if cfg.save is not None and cfg.async_save:
            device = next((each.device.type for chunk in self.chunks for each in chunk.parameters()), "cpu")
            limit = None if cfg.async_save_staging_gb is None else 1e9 * cfg.async_save_staging_gb
            patience = SHARE_OF_COLLECTIVE_TIMEOUT * 60.0 * cfg.distributed_timeout_minutes
            self._background = BackgroundWriter(groups.world, device, limit, patience)

    def _take_locks(self) -> None:
        assert self.cfg.save is not None
        self._locks.append(SaveLock(self.cfg.save))
        if self.fast is not None:
            if self.cfg.non_persistent_ckpt_type == "local" and not _one_host(self.groups.world.size):
                flags = "--non-persistent-ckpt-type local --non-persistent-local-ckpt-dir"
                raise CheckpointError(f"{flags} {self.fast}: ranks run on several hosts, which do not share it; give"
                                      " --non-persistent-ckpt-type global with a folder that they share")  # fmt: skip
            self._locks.append(SaveLock(self.fast, "the folder of --non-persistent-save-interval"))
            self._identity = identity(self.cfg.save, make=True)

    @property
    def failed_saves(self) -> int:
        """Saves to one folder in a row that failed, the most of any."""
        return max(self._failures.values(), default=0)

    def close(self) -> None:
        """Lets another job write to --save (the end of the process does so too)."""
        if self._background is not None:
            self._background.close()
        for lock in self._locks:
            lock.release()

    # ---- saving

    def save(self, state: TrainState) -> bool:
        """Write ``<save>/iter_…`` and move the tracker; whether that worked."""
        report = self.start_save(state)
        return report is not None and report.saved

    def start_save(self, state: TrainState, *, background: bool = False, fast: bool = False) -> SaveReport | None:
        """Write a checkpoint of ``state``; None with ``background``, where :meth:`finish_save` tells what became of it.

        Then this returns as soon as training may change what is saved. One save at a time is under way. ``fast``: to
        the folder of --non-persistent-save-interval, which keeps one.
        """
        cfg, world, began = self.cfg, self.groups.world, time.perf_counter()
        assert cfg.save is not None and self._pending is None, "save() without --save, or during another one"
        folder, iteration = self.fast if fast and self.fast is not None else cfg.save, state.iteration
        # Megatron-LM's line up to the name of the format, which scripts look for
        logger.info("saving checkpoint at iteration %7d to %s in %s format", iteration, folder, FORMAT)
        live = None if self.optimizer is None or cfg.no_save_optim else self.optimizer.state_dict()
        part = writer.plan(self._tensors(optimizer=live, rng=not cfg.no_save_rng, rounded=True), world)
        objects, files = self._objects(state, live), part
        report = SaveReport(dataclasses.replace(state), folder, False, background)

        def work(group: Group, blocks: Blocks, fault: Fault) -> int:
            from_first_rank(lambda: self._prepare(folder), group)
            num_bytes = writer.write(
                files, get_checkpoint_name(folder, iteration), blocks,
                objects=objects, assets=tokenizer_files(cfg), group=group, fault=fault,
            )  # fmt: skip
            fault("before_tracker")
            from_first_rank(lambda: self._finish(folder, iteration, fault), group)
            return num_bytes

        if not background:
            return self._end(report, began, lambda: (work(world, host_blocks, self.fault), time.perf_counter()))
        assert self._background is not None, "start_save(background=True) without --async-save"
        files = part.without_data()
        self._background.start(part, work, self.fault, f"the background save of iteration {iteration}")
        self._pending = dataclasses.replace(report, stall=time.perf_counter() - began), began
        logger.info("  scheduled an async checkpoint save at iteration %7d to %s", iteration, folder)
        return None

    @property
    def saving(self) -> int | None:
        """The iteration of the save that is under way in the background."""
        return None if self._pending is None else self._pending[0].state.iteration

    def finish_save(self, wait: bool) -> SaveReport | None:
        """The save that was under way in the background, once it is over on every rank; ``wait`` until it is.

        Raises:
            CheckpointError: on the rank whose file system hangs.
        """
        if self._pending is None or self._background is None:
            return None
        began = time.perf_counter()
        if not self._background.done(wait):
            return None
        (report, started), self._pending = self._pending, None
        report = dataclasses.replace(report, stall=report.stall + time.perf_counter() - began)
        return self._end(report, started, self._background.take)

    def _end(self, report: SaveReport, began: float, outcome: Callable[[], tuple[int, float]]) -> SaveReport:
        """Count and log what became of a save."""
        folder, iteration = report.folder, report.state.iteration
        try:
            num_bytes, ended = outcome()
        except CheckpointError as error:
            self._failures[folder] = self._failures.get(folder, 0) + 1
            self.last_failure = str(error)
            logger.error(
                "saving checkpoint at iteration %d to %s failed, earlier checkpoints are untouched: %s",
                iteration, folder, error,
            )  # fmt: skip
            return report
        self._failures = {} if folder == self.cfg.save else {**self._failures, folder: 0}
        logger.info(
            "  successfully saved checkpoint from iteration %7d to %s [ t %d/%d, p %d/%d ]",
            iteration, folder, *self._coordinates(),
        )  # fmt: skip
        seconds = ended - began
        stall = report.stall if report.background else seconds
        return dataclasses.replace(report, saved=True, seconds=seconds, stall=stall, num_bytes=num_bytes)

    def _prepare(self, folder: str) -> None:
        """Clear away what is in the way of a save, on the first rank."""
        remove_leftovers(folder)
        if not self._is_clear:
            for each in filter(None, (self.cfg.save, fast_folder(self.cfg))):
                set_aside(each, self._continued_from)
            self._is_clear = True

    def _coordinates(self) -> tuple[int, int, int, int]:
        """Tensor rank and size, pipeline rank and size, counted from 1."""
        tp, pp = self.groups.tp, self.groups.pp
        return tp.rank + 1, tp.size, pp.rank + 1, pp.size

    def _finish(self, folder: str, iteration: int, fault: Fault) -> None:
        """Tracker, then retention, on the first rank."""
        fast = folder == self.fast
        keep = 1 if fast else self.cfg.keep_last_checkpoints
        retain = None if fast else self.cfg.save_retain_interval
        previous, written = _previous(folder), self._written.setdefault(folder, set())
        if previous is not None:  # of an earlier job, which kept as many
            written.update([each for each in saved_iterations(folder) if each <= previous][: keep or 1])
        write_tracker(folder, iteration, fault)
        fault("after_tracker")
        older = [each for each in saved_iterations(folder) if each in written and each < iteration]
        written.add(iteration)
        if keep is not None or retain is not None:
            for old in reversed(older[(keep or 1) - 1 :]):
                if retain is None or old % retain:
                    delete_checkpoint(folder, old, fault)

    def _tensors(
        self, *, optimizer: dict[str, Any] | None, rng: bool, rounded: bool = False
    ) -> dict[str, ShardedTensor]:
        """Everything that is stored as tensors, under global names; ``rounded`` as it is stored, else as it lives.

        Weights come before the main parameters, of which they may be roundings in the same memory. ``optimizer``: its
        state, if wanted.
        """
        tensors: dict[str, ShardedTensor] = {}
        for chunk in self.chunks:
            tensors |= module_tensors(chunk, prefix="model.", groups=self.groups, rounded=rounded)
        if optimizer is not None and self.optimizer is not None:
            tensors |= self.optimizer.sharded_tensors("optimizer.", optimizer)
        if rng:
            tensors |= rng_tensors(self.groups.world.rank, self.groups.world.size)
        return tensors

    def _objects(self, state: TrainState, optimizer: dict[str, Any] | None) -> dict[str, Any]:
        """Everything that is stored as JSON."""
        objects: dict[str, Any] = {
            "iteration": state.iteration,
            "train_state": state.to_dict(),
            "args": config_to_dict(self.cfg),
            "tokenizer": self.tokenizer,
            "versions": software_versions(),
        }
        if optimizer is not None:
            objects["optimizer"] = {key: optimizer[key] for key in ("step", "grad_scaler")}
        if self.scheduler is not None:
            objects["scheduler"] = self.scheduler.state_dict()
        return objects if self._identity is None else {**objects, "folder": self._identity}

    # ---- loading

    def load(self) -> TrainState | None:
        """Restore what --load (or --pretrained-checkpoint) holds; None to start from scratch.

        Raises:
            CheckpointError: on all ranks: damage, another architecture or tokenizer, missing or unused names, or
                nothing there with --exit-on-missing-checkpoint.
        """
        found, weights_only = self._find()
        if found is None:
            return None
        logger.info(" loading checkpoint from %s at iteration %d", Path(found.directory).parent, found.iteration)
        try:
            return self._restore(found, weights_only)
        except CheckpointDamagedError as error:
            earlier = "" if found.release else alternative(Path(found.directory).parent, found.iteration)
            raise CheckpointDamagedError(f"{error}{earlier}") from None

    def _find(self) -> tuple[Found | None, bool]:
        """The checkpoint to load, as the first rank sees it, and whether only its weights are wanted."""
        cfg = self.cfg

        def search() -> list | None:
            for find, finetune in (
                (lambda: find_resumable(cfg, repair=True), cfg.finetune),
                (lambda: find_checkpoint(cfg.pretrained_checkpoint, repair=True), True),
            ):  # fmt: skip
                found = find()
                if found is not None:
                    weights_only = finetune or self._is_upcycled(found)
                    self._continued_from = self._continuation(found, weights_only)
                    return [found.directory, found.iteration, found.release, weights_only or found.release]
            if cfg.exit_on_missing_checkpoint and cfg.load_hf is None:
                raise CheckpointError(f"--exit-on-missing-checkpoint: {cfg.load} holds no checkpoint")
            if cfg.load is not None and cfg.load_hf is None:
                logger.warning("WARNING: could not find a checkpoint in %s: starting from scratch", cfg.load)
            return None

        answer = from_first_rank(search, self.groups.world)
        return (None, False) if answer is None else (Found(*answer[:3]), answer[3])

    def _is_upcycled(self, found: Found) -> bool:
        """Whether ``found`` is the dense model that --moe-use-upcycling starts from; one with experts goes on."""
        if not self.cfg.moe_use_upcycling or not is_dense(read_manifest(found.directory)["objects"].get("args")):
            return False
        folder = str(Path(found.directory).parent)
        if same_folder(folder, self.cfg.save) and not self.cfg.start_over:
            raise CheckpointError(f"--save {folder}: holds the dense model to start from; choose another folder")
        return True

    def _continuation(self, found: Found, finetune: bool) -> int | None:
        """The iteration that what is saved will follow on in --save; None if it belongs to another history."""
        folder = self.cfg.save
        if folder is None or self.cfg.start_over or (finetune and not found.release):
            return None
        is_fast = same_folder(str(Path(found.directory).parent), fast_folder(self.cfg))
        return found.iteration if is_fast or continues(folder, found) else None

    def _restore(self, found: Found, weights_only: bool) -> TrainState:
        cfg, world = self.cfg, self.groups.world
        reader = together_reader(found.directory, world)
        changes = from_first_rank(lambda: self._check_objects(reader, found, weights_only), world)
        wants_optimizer = self.optimizer is not None and not weights_only and not cfg.no_load_optim
        wants_rng = not weights_only and not cfg.no_load_rng and self._same_world(reader)
        live = self.optimizer.state_dict() if self.optimizer is not None and wants_optimizer else None
        tensors = self._tensors(optimizer=live, rng=wants_rng)
        source: Source = reader
        if cfg.moe_use_upcycling and is_dense(reader.objects["args"]):
            source = dense = DenseCheckpoint(reader, self.chunks, cfg)
            tensors = dense.tensors_to_read(tensors)
        ignored = [prefix for prefix, wanted in (("optimizer.", wants_optimizer), ("rng.", wants_rng)) if not wanted]
        load_from(source, tensors, allow_unused=ignored, group=world)
        self.left_alone = [name for name in reader.names if name.startswith(tuple(ignored))]
        if cfg.dist_ckpt_strictness.startswith("log_"):
            total, left = len(reader.names), self.left_alone
            logger.info(
                "--dist-ckpt-strictness %s: %d of %d stored names are loaded, none is missing%s",
                cfg.dist_ckpt_strictness, total - len(left), total,
                f"; left alone, as flags ask: {', '.join(left)}" if left else "",
            )  # fmt: skip
        if self.optimizer is not None and live is not None:
            self.optimizer.load_state_dict({**live, **reader.objects["optimizer"]})
            if self.scheduler is not None and "scheduler" in reader.objects:
                self.scheduler.load_state_dict(reader.objects["scheduler"])
        elif self.optimizer is not None:
            self.optimizer.reload_model_params()
        if wants_rng:
            states = {name[len("rng.") :]: t.local[0] for name, t in tensors.items() if name.startswith("rng.")}
            together(lambda: set_rng_state(states), world)
        logger.info(
            "  successfully loaded checkpoint from %s [ t %d/%d, p %d/%d ] at iteration %d",
            Path(found.directory).parent, *self._coordinates(), found.iteration,
        )  # fmt: skip
        if changes and world.is_first:
            logger.warning("%s", in_a_box(changes))  # last, so that no other line of the start pushes it off the screen
        return TrainState() if weights_only else TrainState.from_dict(reader.objects["train_state"])

    def _check_objects(self, reader: CheckpointReader, found: Found, weights_only: bool) -> list[str]:
        """Refuse what is there but must not be loaded; what changes results and is allowed, in words."""
        objects, cfg = reader.objects, self.cfg
        where = reader.directory / MANIFEST
        if wrong := malformed(objects, release=found.release):
            raise CheckpointDamagedError(f"{where}: not as training writes it: {'; '.join(wrong)}")
        if damaged := reader.verify_assets():
            raise CheckpointDamagedError("; ".join(damaged))
        problems = []
        if not found.release and objects["iteration"] != found.iteration:
            problems.append(f"{found.directory} is of iteration {objects['iteration']}: it was renamed")
        known = None not in (self.tokenizer, objects["tokenizer"])
        if known and not weights_only and self.tokenizer != objects["tokenizer"]:
            problems.append(f"{found.directory} was trained with another tokenizer: use its own, or --finetune")
        if not weights_only and self.optimizer is not None and not cfg.no_load_optim and "optimizer" not in objects:
            problems.append(f"{found.directory} was saved with --no-save-optim: add --no-load-optim or --finetune")
        if not weights_only and self.optimizer is not None and not cfg.no_load_optim and "optimizer" in objects:
            problems += self._other_precision(reader, found)
            if cfg.fp16 and cfg.loss_scale is None and objects["optimizer"]["grad_scaler"].keys() == {"scale"}:
                fix = "give its --loss-scale, or add --no-load-optim"
                problems.append(f"{found.directory} was trained with a constant loss scale: {fix}")
        if not weights_only and not cfg.no_load_rng and not any(name.startswith("rng.") for name in reader.names):
            problems.append(f"{found.directory} was saved with --no-save-rng: add --no-load-rng or --finetune")
        if problems:
            raise CheckpointError("; ".join(problems))
        architecture = self.architecture
        if cfg.moe_use_upcycling and is_dense(objects["args"]):
            architecture = settings_to_compare(architecture)
            check_width(objects["args"], cfg, found.directory)
        return check_args(
            objects, config_to_dict(cfg), found.directory, architecture=architecture, weights_only=weights_only
        )

    def _other_precision(self, reader: CheckpointReader, found: Found) -> list[str]:
        """Optimizer state of half precision has fp32 main parameters; that of full precision has none."""
        stored = any(name.startswith("optimizer.main_param.") for name in reader.names)
        if stored == (self.cfg.bf16 or self.cfg.fp16):
            return []
        precisions = ("half precision (--bf16 or --fp16)", "full precision")
        theirs, ours = precisions if stored else reversed(precisions)
        return [
            f"{found.directory} holds optimizer state of a run in {theirs}, this run is in {ours}: train in the same"
            " precision, or add --no-load-optim to go on from its weights with fresh optimizer state"
        ]

    def _same_world(self, reader: CheckpointReader) -> bool:
        """Random states belong to ranks: they are restored only on as many ranks, with the same kinds of generators."""
        mine = rng_tensors(self.groups.world.rank, self.groups.world.size)
        stored = {name: reader.shape(name) for name in reader.names if name.startswith("rng.")}
        if stored == {name: tuple(tensor.global_shape) for name, tensor in mine.items()}:
            return True
        logger.warning("random states are not restored: the checkpoint is of another number or kind of devices")
        return False


def _one_host(world_size: int) -> bool:
    return int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size))) == world_size


def _previous(folder: str) -> int | None:
    """The iteration that the tracker names now, if any."""
    try:
        latest = read_tracker(folder)
    except (OSError, CheckpointError):
        return None
    return latest if isinstance(latest, int) else None


def tokenizer_files(cfg: PretrainConfig) -> dict[str, Path]:
    """Files of the tokenizer that are copied along: ``tokenizer/<name>`` -> path."""
    files: list[Path] = []
    for value in (cfg.tokenizer_model, cfg.vocab_file, cfg.merge_file):
        # not Path's own questions, which raise where a name is too long for a file
        if value and os.path.isdir(value):
            files += [p for p in sorted(Path(value).iterdir()) if p.suffix in (".json", ".model", ".txt", ".tiktoken")]
        elif value and os.path.isfile(value):
            files.append(Path(value))
    return {name: path for path in files if ASSET_NAME.fullmatch(name := f"tokenizer/{path.name}")}
