"""The call of third-party entry scripts: ``pretrain(datasets_provider, model_provider, model_type, forward_step)``.

The functions become a :class:`Task`; the loop is the same. Scripts read their settings through ``get_args()``: a plain
namespace with every setting, the script's own flags, and the names that older scripts expect beside them. The objects
of the running program live in a context variable.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from inspect import signature
from typing import Any

from torch import nn

from megatron.compat.num_microbatches_calculator import follow_batch_schedule, update_num_microbatches
from megatron.core import parallel_state
from megatron.core.config import absent
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel.stages import virtual_pipeline_size
from megatron.core.tensor_parallel.vocabulary import padded_vocab_size
from megatron.core.timers import Timers
from megatron.training import initialize
from megatron.training.arguments import parse_args, validate_args
from megatron.training.config.launcher import launched_rank, launched_world_size, local_rank
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.batch import get_batch_on_this_cp_rank, to_device
from megatron.training.data.datasets import NumSamples
from megatron.training.hooks.base import Hook, RunInfo
from megatron.training.observe.metrics import StepMetrics
from megatron.training.run import run
from megatron.training.start.parallelize import build_model, parallelize
from megatron.training.tasks.base import Task
from megatron.training.train_state import TrainState


@dataclass
class _Program:
    args: Namespace
    tokenizer: Any
    timers: Timers
    cfg: PretrainConfig


RETIRED_ARGS: dict[str, Any] = {
    "use_mcore_models": True,
    "renormalize_blend_weights": True,
    "s3_cache_path": None,
}
"""Names that older scripts read."""


class _Current:
    """Seen by every thread: autograd's, in which layers are recomputed on GPUs, have contexts of their own."""

    program: _Program | None = None


def _program() -> _Program:
    if _Current.program is None:
        raise RuntimeError("no program is running: call pretrain() or initialize_megatron() first")
    return _Current.program


def get_args() -> Namespace:
    """Every setting of the running program, and the flags its script added."""
    return _program().args


def get_tokenizer() -> Any:
    """The tokenizer of the running program."""
    return _program().tokenizer


def get_timers() -> Timers:
    """The timers of the running program."""
    return _program().timers


def as_namespace(cfg: PretrainConfig, tokenizer: Any) -> Namespace:
    """A resolved configuration under the names that entry scripts read."""
    values = {**RETIRED_ARGS, **absent.defaults(), **{field.name: getattr(cfg, field.name) for field in fields(cfg)}}
    values.update(cfg.extra)
    values.update(
        rank=launched_rank(),
        local_rank=local_rank(),
        params_dtype=cfg.params_dtype,
        num_experts=cfg.num_moe_experts,
        iteration=0,
        consumed_train_samples=0,
        consumed_valid_samples=0,
        virtual_pipeline_model_parallel_size=chunks if (chunks := virtual_pipeline_size(cfg)) > 1 else None,
    )
    if tokenizer is not None:
        values["vocab_size"] = tokenizer.vocab_size
        padded = padded_vocab_size(tokenizer.vocab_size, cfg.make_vocab_size_divisible_by)
        values["padded_vocab_size"] = values["padded_vocab_size"] or padded
    return Namespace(**values)


class BatchPositionHook(Hook):
    """``get_num_microbatches()``, which scripts ask, is that of the batch being trained."""

    def __init__(self, cfg: PretrainConfig) -> None:
        self.cfg = cfg

    def on_train_start(self, run: RunInfo) -> None:
        follow_batch_schedule(self.cfg, self.cfg.data_parallel_size, run.state.consumed_train_samples)

    def on_step(self, state: TrainState, metrics: StepMetrics) -> None:
        update_num_microbatches(state.consumed_train_samples)


_PASSED_ON = ("sample_index", "loss_mask")


class ClassicTask(Task):
    """A task made of the functions that an entry script passes."""

    def __init__(self, cfg: PretrainConfig, tokenizer: Any, functions: dict[str, Callable]) -> None:
        super().__init__(cfg, tokenizer)
        self.functions = functions
        self._of_batch: dict[str, Any] = {}
        _Current.program = _Program(as_namespace(cfg, tokenizer), tokenizer, self.timers, cfg)
        follow_batch_schedule(cfg, cfg.data_parallel_size)

    def model_provider(
        self, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
    ) -> nn.Module:
        """The script's model. What ours take that such scripts do not pass on, they get: ``sample_index`` makes dropout
        masks functions of the data, and by ``loss_mask`` losses of experts know the tokens that count."""
        provider = self.functions["model_provider"]
        stage = {"vp_stage": vp_stage} if vp_stage is not None and "vp_stage" in signature(provider).parameters else {}
        model = provider(pre_process=pre_process, post_process=post_process, **stage)
        model.register_forward_pre_hook(self._pass_on, with_kwargs=True)
        return model

    def hooks(self) -> Sequence[Hook]:
        return [BatchPositionHook(self.cfg)]

    def _pass_on(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        given = signature(model.forward)
        missing = given.parameters.keys() - given.bind_partial(*args, **kwargs).arguments.keys()
        if not hasattr(model, "check_loss"):  # whatever a mask is to another model
            missing -= {"loss_mask"}
        more = {name: value for name, value in self._of_batch.items() if name in missing}
        return args, {**kwargs, **to_device(more, initialize.training_device())}

    def _remembering(self, data_iterator: Iterator[Any]) -> Iterator[Any]:
        """The same batches; what of the current one the model gets is kept for it."""
        while (batch := next(data_iterator, None)) is not None:
            known = batch if isinstance(batch, Mapping) else {}
            self._of_batch = get_batch_on_this_cp_rank({name: known[name] for name in _PASSED_ON if name in known})
            yield batch

    def train_valid_test_datasets_provider(self, num_samples: NumSamples) -> tuple[Any, Any, Any]:
        """The script's data sets."""
        return self.functions["datasets_provider"](list(num_samples))

    def forward_step(self, data_iterator: Any, model: nn.Module) -> tuple[Any, Callable]:
        """The script's forward step."""
        self._of_batch = {}
        batches = None if data_iterator is None else self._remembering(data_iterator)
        return self.functions["forward_step"](batches, model)


_NEEDS_NOTHING = {"get_embedding_ranks", "get_position_embedding_ranks", "store", "inprocess_call_wrapper"}


def pretrain(
    train_valid_test_dataset_provider: Callable,
    model_provider: Callable,
    model_type: ModelType,
    forward_step_func: Callable,
    process_non_loss_data_func: Callable | None = None,
    extra_args_provider: Callable[[ArgumentParser], Any] | None = None,
    args_defaults: dict[str, Any] | None = None,
    hooks: Sequence[Hook] = (),
    **optional: Any,
) -> None:
    """Parses ``sys.argv`` and trains what the four functions describe; leaves the process with the exit code if not 0.

    Args:
        train_valid_test_dataset_provider: ``[train, valid, test sample counts] -> (train, valid, test)``.
        model_provider: ``(pre_process, post_process) -> nn.Module``.
        model_type: kept for the signature; one loop trains every type.
        forward_step_func: ``(data_iterator, model) -> (output, loss_func)``.
        process_non_loss_data_func: not available yet; anything but None is refused.
        extra_args_provider: adds the script's own flags to the parser.
        args_defaults: defaults that this script changes.
        hooks: observers of the loop (``megatron.training.hooks.Hook``), on every rank.
        optional: what releases added behind these: ``get_embedding_ranks``, ``get_position_embedding_ranks``,
            ``store`` and ``inprocess_call_wrapper`` are accepted, as embeddings and restarts need no help;
            ``non_loss_data_func`` must be None.
    """
    process_non_loss_data_func = process_non_loss_data_func or optional.pop("non_loss_data_func", None)
    if strange := sorted(set(optional) - _NEEDS_NOTHING):
        raise TypeError(f"pretrain() has no argument {', '.join(strange)}")
    if process_non_loss_data_func is not None:
        raise ValueError("pretrain(process_non_loss_data_func=...): not available yet; pass None")
    if not callable(train_valid_test_dataset_provider) or not callable(model_provider):
        raise ValueError("pretrain(): the first two arguments are the data set provider and the model provider")
    cfg = parse_args(args_defaults=args_defaults, extra_args_provider=extra_args_provider, needs_data=False)
    functions = {
        "datasets_provider": train_valid_test_dataset_provider,
        "model_provider": model_provider,
        "forward_step": _two_arguments(forward_step_func),
    }
    if not cfg.dry_run:
        parallel_state.start_alone()
    code = run(cfg, lambda resolved, tokenizer: ClassicTask(resolved, tokenizer, functions), hooks)
    if code:
        sys.exit(code)


def _two_arguments(forward_step: Callable) -> Callable:
    """``forward_step`` as (iterator, model), whatever optional parameters it has beside them."""
    required = [
        each for each in signature(forward_step).parameters.values()
        if each.default is each.empty and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]  # fmt: skip
    if len(required) > 2:
        raise ValueError(f"forward_step takes {[each.name for each in required]}; expected (data_iterator, model)")
    return forward_step


def initialize_megatron(
    extra_args_provider: Callable[[ArgumentParser], Any] | None = None,
    args_defaults: dict[str, Any] | None = None,
    **unused: Any,
) -> None:
    """Parses ``sys.argv`` and brings this process up, for programs with a loop of their own."""
    from megatron.core.tokenizers import build_tokenizer

    cfg = validate_args(
        parse_args(args_defaults=args_defaults, extra_args_provider=extra_args_provider, needs_data=False),
        launched_world_size() or 1,
    )
    initialize.configure_logging(cfg.logging_level)
    parallel_state.start_alone()
    initialize.initialize_megatron(cfg)
    tokenizer = build_tokenizer(cfg) if cfg.tokenizer_type is not None else None
    timers = Timers(cfg.timing_log_level, cfg.timing_log_option, cfg.barrier_with_L1_time)
    _Current.program = _Program(as_namespace(cfg, tokenizer), tokenizer, timers, cfg)
    follow_batch_schedule(cfg, cfg.data_parallel_size)


def get_model(
    model_provider_func: Callable[..., nn.Module], model_type: Any = None, wrap_with_ddp: bool = True, **unused: Any
) -> list[nn.Module]:
    """The model chunks of this rank as ``model_provider_func`` builds them, for programs with a loop of their own."""
    program = _program()
    task = ClassicTask(program.cfg, program.tokenizer, {"model_provider": model_provider_func})
    _Current.program = program  # the task took its place
    chunks = build_model(task, initialize.training_device())
    return [*parallelize(chunks, program.cfg, parallel_state.get_process_groups())] if wrap_with_ddp else chunks
