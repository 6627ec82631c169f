"""Checkpoints of a run: weights, optimizer, schedule, counters, random states, settings, tokenizer.

The format of one checkpoint is described in ``core/dist_checkpointing``, the checkpoint folder in ``files.py``. A
failed save leaves earlier checkpoints intact and is reported, not raised; a load that cannot be exact raises
CheckpointError."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from megatron.core.dist_checkpointing import writer
from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.exchange import from_first_rank
from megatron.core.dist_checkpointing.files import get_checkpoint_name, read_tracker
from megatron.core.dist_checkpointing.manifest import ASSET_NAME, FORMAT
from megatron.core.dist_checkpointing.writer import Blocks, Fault, host_blocks, no_fault, remove_leftovers
from megatron.core.distributed import unwrapped
from megatron.core.groups.process_groups import Group, ProcessGroups
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.schedules.learning_rate import OptimizerParamScheduler
from megatron.core.tokenizers.base import Tokenizer
from megatron.export.hf.side_files import GENERATION, OF_DEFINITION, TOKENIZER, side_files
from megatron.training.checkpoint.background import BackgroundWriter
from megatron.training.checkpoint.files import alternative, delete_checkpoint, saved_iterations, write_tracker
from megatron.training.checkpoint.history import fast_folder, identity, set_aside
from megatron.training.checkpoint.live_state import LiveState
from megatron.training.checkpoint.loading import Loading, find_start
from megatron.training.checkpoint.lock import SaveLock
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.stored_settings import ARCHITECTURE
from megatron.training.train_state import TrainState

logger = logging.getLogger(__name__)

SHARE_OF_COLLECTIVE_TIMEOUT = 0.8
"""A hanging background save is reported before the watchdog reports the rank that waits for it."""


@dataclass(frozen=True)
class SaveReport:
    """Outcome of one save."""

    state: TrainState
    """Saved counters."""
    folder: str
    saved: bool
    background: bool
    seconds: float = 0.0
    """From the start of the save until the tracker was written."""
    stall: float = 0.0
    """Seconds of it during which training was blocked on this rank."""
    num_bytes: int = 0
    """Tensor bytes of all ranks."""


class Checkpointer:
    """Saves and loads the checkpoints of one run. Every method is collective over all ranks unless it says otherwise.
    ``optimizer`` None: weights only. ``architecture``: settings that a checkpoint to load must share; default:
    ``ARCHITECTURE``. The tokenizer is compared by its fingerprint. CheckpointError if another job writes to --save."""

    def __init__(
        self,
        cfg: PretrainConfig,
        model_chunks: Sequence[nn.Module],
        optimizer: MegatronOptimizer | None,
        scheduler: OptimizerParamScheduler | None,
        *,
        groups: ProcessGroups,
        tokenizer: Tokenizer | None = None,
        architecture: Sequence[str] | None = None,
        fault: Fault = no_fault,
    ) -> None:
        checkpoint = cfg.checkpoint
        self.architecture = ARCHITECTURE if architecture is None else architecture
        self.cfg, self.groups, self.fault = cfg, groups, fault
        self.chunks = [unwrapped(chunk) for chunk in model_chunks]
        fingerprint = None if tokenizer is None else tokenizer.fingerprint
        self.live = LiveState(cfg, self.chunks, optimizer, scheduler, groups, fingerprint)
        self._failures: dict[str, int] = {}
        """Consecutive failed saves, by folder."""
        self.last_failure = ""
        """Message of the last failed save."""
        self._continued_from: int | None = None
        """Iteration in --save from which this run continues; None if it does not continue from --save."""
        self._locks: list[SaveLock] = []
        self._written: dict[str, set[int]] = {}
        """Iterations that retention may delete, by folder: written by this run or by the run that it continues."""
        self.fast = fast_folder(cfg.checkpoint) if checkpoint.non_persistent_save_interval is not None else None
        self._identity: str | None = None
        self._is_clear = False
        """Whether checkpoints of another history have been moved aside."""
        self._pending: tuple[SaveReport, float] | None = None
        """Background save in progress, and its start time."""
        self._background: BackgroundWriter | None = None
        self.left_alone: list[str] = []
        """Stored names that :meth:`load` skipped on request, such as with --no-load-optim."""
        if checkpoint.save is not None:
            from_first_rank(self._take_locks, groups.world)
        if checkpoint.save is not None and checkpoint.async_save:
            device = next((parameter.device.type for chunk in self.chunks for parameter in chunk.parameters()), "cpu")
            limit = None if checkpoint.async_save_staging_gb is None else 1e9 * checkpoint.async_save_staging_gb
            patience = SHARE_OF_COLLECTIVE_TIMEOUT * 60.0 * cfg.distributed.distributed_timeout_minutes
            self._background = BackgroundWriter(groups.world, device, limit, patience)

    def _take_locks(self) -> None:
        """Lock --save and, if used, the fast folder; first rank only. Raises CheckpointError if another job holds a
        lock, or for a local fast folder with ranks on several hosts."""
        assert self.cfg.checkpoint.save is not None
        self._locks.append(SaveLock(self.cfg.checkpoint.save))
        if self.fast is not None:
            if self.cfg.checkpoint.non_persistent_ckpt_type == "local" and not _one_host(self.groups.world.size):
                flags = "--non-persistent-ckpt-type local --non-persistent-local-ckpt-dir"
                raise CheckpointError(
                    f"{flags} {self.fast}: ranks run on several hosts that do not share it; give"
                    " --non-persistent-ckpt-type global with a folder that they share"
                )
            self._locks.append(SaveLock(self.fast, "the folder of --non-persistent-save-interval"))
            self._identity = identity(self.cfg.checkpoint.save, make=True)

    def name_base(self, base: Mapping[str, str]) -> None:
        """Let checkpoints name ``base``, the folder and identity of the frozen weights that they do not contain."""
        self.live = dataclasses.replace(self.live, base=base)

    @property
    def failed_saves(self) -> int:
        """Consecutive failed saves, maximum over folders."""
        return max(self._failures.values(), default=0)

    def close(self) -> None:
        """Wait for a background save (limited time) and release the locks. Not collective."""
        if self._background is not None:
            self._background.close()
        self.unlock()

    def unlock(self) -> None:
        """Release the locks after a rejected start, before anything was written. Not collective."""
        for lock in self._locks:
            lock.release()

    # ---- saving

    def save(self, state: TrainState) -> bool:
        """Write ``<save>/iter_…`` and update the tracker; return whether it succeeded."""
        report = self.start_save(state)
        return report is not None and report.saved

    def start_save(self, state: TrainState, *, background: bool = False, fast: bool = False) -> SaveReport | None:
        """Write a checkpoint of ``state`` and return its report, with ``saved`` False after a failure (logged, not
        raised). With ``background``, copy the state to the host, return None as soon as training may modify it, and let
        :meth:`finish_save` report the outcome; one save at a time. ``fast`` selects the folder of
        --non-persistent-save-interval, which keeps one checkpoint."""
        cfg, world, began = self.cfg, self.groups.world, time.perf_counter()
        assert cfg.checkpoint.save is not None and self._pending is None, "save() without --save, or during another one"
        folder, iteration = self.fast if fast and self.fast is not None else cfg.checkpoint.save, state.iteration
        # scripts match this line: identical to Megatron-LM's up to the name of the format
        logger.info("saving checkpoint at iteration %7d to %s in %s format", iteration, folder, FORMAT)
        if self.live.optimizer is not None:
            self.live.optimizer.gather_exact_weights()
        optimizer = (
            None if self.live.optimizer is None or cfg.checkpoint.no_save_optim else self.live.optimizer.state_dict()
        )
        part = writer.plan(
            self.live.tensors(optimizer=optimizer, rng=not cfg.checkpoint.no_save_rng, rounded=True), world
        )
        objects, files = self.live.objects(state, optimizer), part
        if self._identity is not None:
            objects["folder"] = self._identity
        report = SaveReport(dataclasses.replace(state), folder, False, background)

        def work(group: Group, blocks: Blocks, fault: Fault) -> int:
            from_first_rank(lambda: self._prepare(folder), group)
            num_bytes = writer.write(
                files,
                get_checkpoint_name(folder, iteration),
                blocks,
                objects=objects,
                assets=tokenizer_files(cfg),
                group=group,
                fault=fault,
            )
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
        """Iteration of the background save in progress, or None."""
        return None if self._pending is None else self._pending[0].state.iteration

    def finish_save(self, wait: bool) -> SaveReport | None:
        """Return the report of the background save once it has finished on every rank, else None; ``wait`` blocks until
        then. CheckpointError on the rank whose file system hangs."""
        if self._pending is None or self._background is None:
            return None
        began = time.perf_counter()
        if not self._background.has_finished(wait):
            return None
        (report, started), self._pending = self._pending, None
        report = dataclasses.replace(report, stall=report.stall + time.perf_counter() - began)
        return self._end(report, started, self._background.take)

    def _end(self, report: SaveReport, began: float, outcome: Callable[[], tuple[int, float]]) -> SaveReport:
        """Call ``outcome``, which returns (bytes, end time) or raises CheckpointError for a failed save; log and count
        it. Failures count per folder: success in --save resets all counts, in the fast folder only its own."""
        folder, iteration = report.folder, report.state.iteration
        try:
            num_bytes, ended = outcome()
        except CheckpointError as error:
            self._failures[folder] = self._failures.get(folder, 0) + 1
            self.last_failure = str(error)
            logger.error(
                "saving checkpoint at iteration %d to %s failed, earlier checkpoints are untouched: %s",
                iteration,
                folder,
                error,
            )
            return report
        self._failures = {} if folder == self.cfg.checkpoint.save else {**self._failures, folder: 0}
        logger.info(
            "  successfully saved checkpoint from iteration %7d to %s [ t %d/%d, p %d/%d ]",
            iteration,
            folder,
            *self.live.coordinates,
        )
        seconds = ended - began
        stall = report.stall if report.background else seconds
        return dataclasses.replace(report, saved=True, seconds=seconds, stall=stall, num_bytes=num_bytes)

    def _prepare(self, folder: str) -> None:
        remove_leftovers(folder)
        if not self._is_clear:
            for root in filter(None, (self.cfg.checkpoint.save, fast_folder(self.cfg.checkpoint))):
                set_aside(root, self._continued_from)
            self._is_clear = True

    def _finish(self, folder: str, iteration: int, fault: Fault) -> None:
        """Update the tracker, then delete old checkpoints, oldest first, as the retention flags say (the fast folder
        keeps one). Deletes only what this run or the run that it continues wrote. First rank, in the writer thread."""
        fast = folder == self.fast
        keep = 1 if fast else self.cfg.checkpoint.keep_last_checkpoints
        retain = None if fast else self.cfg.checkpoint.save_retain_interval
        previous, written = _previous(folder), self._written.setdefault(folder, set())
        if previous is not None:  # written by an earlier job with the same retention
            written.update([iteration for iteration in saved_iterations(folder) if iteration <= previous][: keep or 1])
        write_tracker(folder, iteration, fault)
        fault("after_tracker")
        older = [
            older_iteration
            for older_iteration in saved_iterations(folder)
            if older_iteration in written and older_iteration < iteration
        ]
        written.add(iteration)
        if keep is not None or retain is not None:
            for old in reversed(older[(keep or 1) - 1 :]):
                if retain is None or old % retain:
                    try:
                        delete_checkpoint(folder, old, fault)
                    except OSError as error:  # the new checkpoint is complete
                        logger.warning("%s: checkpoint of iteration %d is not deleted: %s", folder, old, error)

    def load(self) -> TrainState | None:
        """Restore the checkpoint to load; None to start from scratch. CheckpointError on all ranks for damage, another
        architecture or tokenizer, missing or unused names, or --exit-on-missing-checkpoint without one."""
        start = find_start(self.cfg, self.groups.world)
        if start is None:
            return None
        checkpoint, self._continued_from = start.source, start.continued_from
        logger.info(
            " loading checkpoint from %s at iteration %d", Path(checkpoint.directory).parent, checkpoint.iteration
        )
        try:
            loading = Loading(self.live, start, self.architecture)
            state, self.left_alone = loading.restore(), loading.left_alone
        except CheckpointDamagedError as error:
            earlier = "" if checkpoint.release else alternative(Path(checkpoint.directory).parent, checkpoint.iteration)
            raise CheckpointDamagedError(f"{error}{earlier}") from None
        return state


def _one_host(world_size: int) -> bool:
    return int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size))) == world_size


def _previous(folder: str) -> int | None:
    try:
        latest = read_tracker(folder)
    except (OSError, CheckpointError):
        return None
    return latest if isinstance(latest, int) else None


def tokenizer_files(cfg: PretrainConfig) -> dict[str, Path]:
    """Map ``tokenizer/<name>`` to each tokenizer file that is copied into the checkpoint. From a folder only tokenizer
    and sampling files, by name: it may hold weights. A tokenizer.json brings its config files."""
    files: dict[str, Path] = {}
    for value in (cfg.tokenizer.tokenizer_model, cfg.tokenizer.vocab_file, cfg.tokenizer.merge_file):
        # os.path, not Path: Path.is_dir raises if the name is too long
        if value and os.path.isdir(value):
            files |= side_files(Path(value), (*TOKENIZER, GENERATION))
        elif value and os.path.isfile(value):
            files[Path(value).name] = Path(value)
            if cfg.tokenizer.tokenizer_type in ("HuggingFaceTokenizer", "SFTTokenizer"):
                files |= side_files(Path(value).parent, OF_DEFINITION)
    if cfg.tokenizer.chat_template:
        files["chat_template.jinja"] = Path(cfg.tokenizer.chat_template)
    return {name: path for file, path in files.items() if ASSET_NAME.fullmatch(name := f"tokenizer/{file}")}
