"""Load the initial state of a run: find the checkpoint, check that it fits, and fill the live state."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.config.muon import MUON_OPTIMIZERS
from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.exchange import all_gather_json, from_first_rank, together
from megatron.core.dist_checkpointing.manifest import MANIFEST, read_manifest
from megatron.core.dist_checkpointing.reader import Source, load_from, together_reader
from megatron.core.fp8.recipe import PREFIX, scales_loaded
from megatron.core.groups.process_groups import Group
from megatron.training.checkpoint.base_weights import other_base
from megatron.training.checkpoint.files import Found, find_checkpoint
from megatron.training.checkpoint.history import continues, fast_folder, find_resumable, same_folder
from megatron.training.checkpoint.live_state import LiveState
from megatron.training.checkpoint.random_states import rng_tensors, set_rng_state
from megatron.training.checkpoint.schema import malformed
from megatron.training.checkpoint.settings import check_args, in_a_box
from megatron.training.checkpoint.upcycling import DenseCheckpoint
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.stored_settings import (
    check_width,
    config_to_dict,
    is_dense,
    other_tokenizer,
    settings_to_compare,
)
from megatron.training.train_state import TrainState

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """Checkpoint from which a run starts."""

    source: Found
    weights_only: bool
    continued_from: int | None
    """Its iteration if this run continues its history in --save, else None."""


def find_start(cfg: PretrainConfig, world: Group) -> Start | None:
    """Return the checkpoint of --load, else of --pretrained-checkpoint (weights only), or None. Collective: the first
    rank searches, and restores checkpoints whose replacement was interrupted. CheckpointError without a required
    checkpoint, or if --save holds the dense model that --moe-use-upcycling starts from."""
    checkpoint = cfg.checkpoint
    base = None if cfg.reads_base else checkpoint.pretrained_checkpoint  # base weights are loaded before

    def search() -> list | None:
        for find, finetune in (
            (lambda: find_resumable(cfg.checkpoint, repair=True), checkpoint.finetune),
            *[(lambda: find_checkpoint(base, repair=True), True)] * (base is not None),
        ):
            match = find()
            if match is not None:
                weights_only = finetune or _is_upcycled(cfg, match)
                continued_from = _continuation(cfg, match, weights_only)
                return [match.directory, match.iteration, match.release, weights_only or match.release, continued_from]
        if checkpoint.exit_on_missing_checkpoint and checkpoint.load_hf is None:
            raise CheckpointError(f"--exit-on-missing-checkpoint: {checkpoint.load} holds no checkpoint")
        if base is not None:
            raise CheckpointError(f"--pretrained-checkpoint {base}: holds no checkpoint to start from")
        if checkpoint.load is not None and checkpoint.load_hf is None:
            logger.warning("WARNING: could not find a checkpoint in %s: starting from scratch", checkpoint.load)
        return None

    answer = from_first_rank(search, world)
    return None if answer is None else Start(Found(*answer[:3]), *answer[3:])


def _is_upcycled(cfg: PretrainConfig, dense: Found) -> bool:
    """Raises CheckpointError if the dense model to upcycle is in --save, unless --start-over is set."""
    if not cfg.upcycling.moe_use_upcycling or not is_dense(read_manifest(dense.directory)["objects"].get("args")):
        return False
    folder = str(Path(dense.directory).parent)
    if same_folder(folder, cfg.checkpoint.save) and not cfg.checkpoint.start_over:
        raise CheckpointError(f"--save {folder}: holds the dense model to start from; choose another folder")
    return True


def _continuation(cfg: PretrainConfig, match: Found, finetune: bool) -> int | None:
    """Return the iteration of ``match`` if saves to --save continue its history: it is in --save or the fast folder, or
    --save has its original or copy. Weights only: of releases."""
    if cfg.checkpoint.save is None or cfg.checkpoint.start_over or (finetune and not match.release):
        return None
    is_fast = same_folder(str(Path(match.directory).parent), fast_folder(cfg.checkpoint))
    return match.iteration if is_fast or continues(cfg.checkpoint.save, match) else None


class Loading:
    """Load of the checkpoint ``start`` into the live run ``live``. Construction and :meth:`restore` are collective over
    all ranks. ``architecture``: settings that define the meaning of weights. CheckpointError if it cannot be opened."""

    def __init__(self, live: LiveState, start: Start, architecture: Sequence[str]) -> None:
        self.live, self.architecture = live, architecture
        self.cfg, self.world = live.cfg, live.groups.world
        self.source, self.weights_only = start.source, start.weights_only
        self.reader = together_reader(self.source.directory, self.world)
        # evaluation: weights and counters only
        self.goes_on = not self.weights_only and not self.cfg.validation.skip_train
        self.wants_optimizer = live.optimizer is not None and self.goes_on and not self.cfg.checkpoint.no_load_optim
        self.wants_rng = self.goes_on and not self.cfg.checkpoint.no_load_rng
        saves_masters = live.optimizer is not None and live.optimizer.saves_masters
        # all ranks: the first rank's stage may have none of the parameters whose storage is declared
        self.saves_masters = any(all_gather_json(saves_masters, self.world))
        self.left_alone: list[str] = []
        """Stored names that :meth:`restore` skipped on request, such as with --no-load-optim."""

    def restore(self) -> TrainState:
        """Fill the model in place and, unless flags exclude them, optimizer, scheduler and random states (if ranks and
        generators match; else logs a warning); return the counters, new ones for weights only. Without optimizer state
        sets the main parameters from the weights. Errors as ``Checkpointer.load``."""
        cfg, world, reader, live = self.cfg, self.world, self.reader, self.live
        changes = from_first_rank(self._check_objects, world)
        wants_rng = self.wants_rng and self._same_world()
        state = live.optimizer.state_dict() if live.optimizer is not None and self.wants_optimizer else None
        wants_scales = self._has_scales()
        if self._wants_scales() and not wants_scales:
            logger.info("the checkpoint holds no fp8 scales: they start from the magnitudes of the first step")
        tensors = live.tensors(optimizer=state, rng=wants_rng, scales=wants_scales)
        source: Source = reader
        if cfg.upcycling.moe_use_upcycling and is_dense(reader.objects["args"]):
            source = dense = DenseCheckpoint(reader, live.chunks, cfg)
            tensors = dense.tensors_to_read(tensors)
        parts = (("optimizer.", self.wants_optimizer), ("rng.", wants_rng), (PREFIX, wants_scales))
        ignored = tuple(prefix for prefix, is_read in parts if not is_read)
        load_from(source, tensors, allow_unused=ignored, group=world)
        self.left_alone = [name for name in reader.names if name.startswith(ignored)]
        if cfg.checkpoint.dist_ckpt_strictness.startswith("log_"):
            total, left = len(reader.names), self.left_alone
            logger.info(
                "--dist-ckpt-strictness %s: %d of %d stored names are loaded, none is missing%s",
                cfg.checkpoint.dist_ckpt_strictness,
                total - len(left),
                total,
                f"; not loaded, as flags request: {', '.join(left)}" if left else "",
            )
        if live.optimizer is not None and state is not None:
            live.optimizer.load_state_dict({**state, **reader.objects["optimizer"]})
            if live.scheduler is not None and "scheduler" in reader.objects:
                consumed = reader.objects["train_state"]["consumed_train_samples"]
                live.scheduler.load_state_dict(reader.objects["scheduler"], consumed)
        elif live.optimizer is not None:
            live.optimizer.reload_model_params()
        if wants_scales:
            scales_loaded(live.chunks)
        if wants_rng:
            states = {name[len("rng.") :]: t.local[0] for name, t in tensors.items() if name.startswith("rng.")}
            together(lambda: set_rng_state(states), world)
        logger.info(
            "  successfully loaded checkpoint from %s [ t %d/%d, p %d/%d ] at iteration %d",
            Path(self.source.directory).parent,
            *live.coordinates,
            self.source.iteration,
        )
        if changes and world.is_first:
            logger.warning("%s", in_a_box(changes))  # logged last, to stay visible on the screen
        return TrainState() if self.weights_only else TrainState.from_dict(reader.objects["train_state"])

    def _check_objects(self) -> list[str]:
        """Raise CheckpointError if the checkpoint must not be loaded; return allowed changes that affect results."""
        reader, source, cfg, objects = self.reader, self.source, self.cfg, self.reader.objects
        where = reader.directory / MANIFEST
        if wrong := malformed(objects, release=source.release):
            raise CheckpointDamagedError(f"{where}: not as training writes it: {'; '.join(wrong)}")
        if damaged := reader.verify_assets():
            raise CheckpointDamagedError("; ".join(damaged))
        problems = []
        if not source.release and objects["iteration"] != source.iteration:
            problems.append(f"{source.directory} is of iteration {objects['iteration']}: it was renamed")
        if not self.weights_only:
            problems += other_tokenizer(objects["tokenizer"], self.live.tokenizer, source.directory)
        if self.wants_optimizer and "optimizer" not in objects:
            problems.append(f"{source.directory} was saved with --no-save-optim: add --no-load-optim or --finetune")
        elif self.wants_optimizer:
            problems += self._other_optimizer() + self._other_precision()
            if (
                cfg.model.fp16
                and cfg.optimizer.loss_scale is None
                and objects["optimizer"]["grad_scaler"].keys() == {"scale"}
            ):
                fix = "give its --loss-scale, or add --no-load-optim"
                problems.append(f"{source.directory} was trained with a constant loss scale: {fix}")
        problems += other_base(objects.get("base"), self.live.base, source.directory)
        problems += self._other_history()
        if self.wants_rng and not any(name.startswith("rng.") for name in reader.names):
            problems.append(f"{source.directory} was saved with --no-save-rng: add --no-load-rng or --finetune")
        if problems:
            raise CheckpointError("; ".join(problems))
        architecture = self.architecture
        if cfg.upcycling.moe_use_upcycling and is_dense(objects["args"]):
            architecture = settings_to_compare(architecture)
            check_width(objects["args"], cfg, source.directory)
        return self._changed_precision() + check_args(
            objects,
            config_to_dict(cfg.flat),
            source.directory,
            architecture=architecture,
            weights_only=not self.goes_on,
        )

    def _has_scales(self) -> bool:
        stored = any(name.startswith(PREFIX) for name in self.reader.names)
        return stored and self._wants_scales()

    def _wants_scales(self) -> bool:
        model = self.cfg.model
        return not self.weights_only and model.fp8 is not None and model.fp8_recipe == "delayed"

    def _other_history(self) -> list[str]:
        """Compare format and length of the history of delayed scales."""
        stored, model, folder = self.reader.objects["args"], self.cfg.model, self.source.directory
        pairs = ("format", "fp8", model.fp8), ("amax-history-len", "fp8_amax_history_len", model.fp8_amax_history_len)
        return [
            f"{folder} was trained with --fp8-{flag} {stored.get(field)}, not {value}: give its value"
            for flag, field, value in pairs
            if self._has_scales() and stored.get(field) != value
        ]

    def _other_optimizer(self) -> list[str]:
        """With Muon or Lion the states have other tensors, or tensors of the same name with another meaning."""
        stored, config = self.reader.objects["args"], self.cfg.optimizer
        trained_with, rule = str(stored.get("optimizer")), str(config.optimizer)
        if trained_with == rule and rule in MUON_OPTIMIZERS:
            scalars = stored.get("muon_scalar_optimizer", "adam"), config.muon_scalar_optimizer
            trained_with, rule = (f"{rule} --muon-scalar-optimizer {scalar}" for scalar in scalars)
        if trained_with == rule or not {*MUON_OPTIMIZERS, "lion"} & {*trained_with.split(), *rule.split()}:
            return []
        return [
            f"{self.source.directory} holds optimizer state of --optimizer {trained_with}, this run has --optimizer "
            f"{rule}: use {trained_with}, or add --no-load-optim to continue from its weights with fresh optimizer "
            "state"
        ]

    def _other_precision(self) -> list[str]:
        """Only half precision and some declared storages have main parameters."""
        stored = any(name.startswith("optimizer.main_param.") for name in self.reader.names)
        if stored == (self.cfg.model.bf16 or self.cfg.model.fp16 or self.saves_masters):
            return []
        trained_in, precision = self._precisions()
        return [
            f"{self.source.directory} holds optimizer state of a run in {trained_in}, this run is in {precision}: "
            f"train in {trained_in}, or add --no-load-optim to go on from its weights with fresh optimizer state"
        ]

    def _precisions(self) -> tuple[str, str]:
        """Return the precisions of the stored run and this run, by their flags."""
        model = self.cfg.model
        now = {"bf16": model.bf16, "fp16": model.fp16, "fp8": model.fp8}
        trained_in, precision = (
            ("bf16" if args.get("bf16") else "fp16" if args.get("fp16") else "fp32")
            + (f" with fp8 ({args['fp8']})" if args.get("fp8") else "")
            for args in (self.reader.objects["args"], now)
        )
        return trained_in, precision

    def _changed_precision(self) -> list[str]:
        trained_in, precision = self._precisions()
        has_flags = {"bf16", "fp16"} <= self.reader.objects["args"].keys()  # other programs name none
        if trained_in == precision or not has_flags:
            return []
        masters = "are loaded unchanged" if self.wants_optimizer else "start from the loaded weights"
        notice = f"the checkpoint's run was in {trained_in}, this run is in {precision}: weights are converted"
        return [f"{notice}, main parameters {masters}"]

    def _same_world(self) -> bool:
        mine = rng_tensors(self.world.rank, self.world.size)
        stored = {name: self.reader.shape(name) for name in self.reader.names if name.startswith("rng.")}
        if stored == {name: tuple(tensor.global_shape) for name, tensor in mine.items()}:
            return True
        logger.warning("random states are not restored: the checkpoint is from another number or type of devices")
        return False
