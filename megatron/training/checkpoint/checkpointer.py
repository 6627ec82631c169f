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
from megatron.core.dist_checkpointing.exchange import from_first_rank
from megatron.core.dist_checkpointing.files import get_checkpoint_name, read_tracker
from megatron.core.dist_checkpointing.manifest import ASSET_NAME, FORMAT
from megatron.core.dist_checkpointing.writer import Blocks, Fault, host_blocks, no_fault, remove_leftovers
from megatron.core.distributed import unwrapped
from megatron.core.groups.process_groups import Group, ProcessGroups
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.schedules.learning_rate import OptimizerParamScheduler
from megatron.training.checkpoint.background import BackgroundWriter
from megatron.training.checkpoint.files import alternative, delete_checkpoint, saved_iterations, write_tracker
from megatron.training.checkpoint.history import fast_folder, identity, set_aside
from megatron.training.checkpoint.live_state import LiveState
from megatron.training.checkpoint.loading import Loading, find_start
from megatron.training.checkpoint.lock import SaveLock
from megatron.training.checkpoint.settings import ARCHITECTURE
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.train_state import TrainState

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
        fingerprint = None if tokenizer is None else tokenizer.fingerprint
        self.live = LiveState(cfg, self.chunks, optimizer, scheduler, groups, fingerprint)
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
        self.unlock()

    def unlock(self) -> None:
        """Ends a start that was refused: nothing was written, and no save is under way. Not collective."""
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
        optimizer = None if self.live.optimizer is None or cfg.no_save_optim else self.live.optimizer.state_dict()
        part = writer.plan(self.live.tensors(optimizer=optimizer, rng=not cfg.no_save_rng, rounded=True), world)
        objects, files = self.live.objects(state, optimizer), part
        if self._identity is not None:
            objects["folder"] = self._identity
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
            iteration, folder, *self.live.coordinates,
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

    def load(self) -> TrainState | None:
        """Restore what --load (or --pretrained-checkpoint) holds; None to start from scratch.

        Raises:
            CheckpointError: on all ranks: damage, another architecture or tokenizer, missing or unused names, or
                nothing there with --exit-on-missing-checkpoint.
        """
        start = find_start(self.cfg, self.groups.world)
        if start is None:
            return None
        found, self._continued_from = start.found, start.continued_from
        logger.info(" loading checkpoint from %s at iteration %d", Path(found.directory).parent, found.iteration)
        try:
            loading = Loading(self.live, start, self.architecture)
            state, self.left_alone = loading.restore(), loading.left_alone
        except CheckpointDamagedError as error:
            earlier = "" if found.release else alternative(Path(found.directory).parent, found.iteration)
            raise CheckpointDamagedError(f"{error}{earlier}") from None
        return state


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
