"""The call of third-party entry scripts: ``pretrain(datasets_provider, model_provider, model_type, forward_step)``.

The functions become a :class:`Task`; the loop is the same. Scripts read their settings through ``get_args()``
(``program.py``)."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from inspect import signature
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from megatron.compat.model_functions import convert_floats, set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.compat.num_microbatches_calculator import follow_batch_schedule, update_num_microbatches
from megatron.compat.program import (
    Current,
    Program,
    current_program,
    current_settings,
    get_args,
    get_timers,
    get_tokenizer,
    parse_and_validate_args,
    parse_script_args,
)
from megatron.compat.script_data import MicroBatches, ScriptData
from megatron.core import parallel_state
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.config.errors import UserError
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel.loss_weights import MainLoss
from megatron.core.pipeline_parallel.program_losses import MainLossInput, split_loss, takes_main_loss
from megatron.core.pipeline_parallel.results import as_sum_and_count
from megatron.core.tokenizers import build_tokenizer
from megatron.core.tokenizers.base import Tokenizer
from megatron.training import initialize
from megatron.training.arguments import exit_on_config_error, validate_args
from megatron.training.config.launcher import launched_world_size
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.batch import get_batch_on_this_cp_rank, to_device
from megatron.training.data.batches import Batches
from megatron.training.data.datasets import NumSamples
from megatron.training.data.loader import BatchReader
from megatron.training.hooks.base import Hook
from megatron.training.observe.loss_sums import LossSums
from megatron.training.observe.metrics import StepMetrics
from megatron.training.observe.records import RunInfo
from megatron.training.run import run
from megatron.training.start.parallelize import build_model, parallelize
from megatron.training.tasks.base import Task
from megatron.training.tasks.language_model import task_class
from megatron.training.train_state import TrainState

__all__ = [
    "ClassicTask",
    "PretrainConfigContainer",
    "get_args",
    "get_model",
    "get_timers",
    "get_tokenizer",
    "initialize_megatron",
    "parse_and_validate_args",
    "pretrain",
    "pretrain_from_flags",
    "current_settings",
]


class BatchPositionHook(Hook):
    """``get_num_microbatches()``, which scripts call, returns the count of the batch being trained."""

    def __init__(self, cfg: PretrainConfig) -> None:
        self.cfg = cfg

    def on_start(self, run: RunInfo) -> None:
        follow_batch_schedule(self.cfg.flat, self.cfg.data_parallel_size, run.state.consumed_train_samples)

    def on_step(self, state: TrainState, metrics: StepMetrics) -> None:
        update_num_microbatches(state.consumed_train_samples)


MAIN_LOSS = "main loss"
"""Name of the loss that a script's ``loss_func`` returns first, next to the values that it logs."""


class ScriptBatches(Batches):
    """Batches that a script reads itself: tokens are known after the forward pass."""

    def __init__(self, task: ClassicTask) -> None:
        super().__init__(task.cfg)
        self.task = task

    def read(self, reader: BatchReader, number: int, num_next: int = 0) -> tuple[Iterator[dict], Tensor]:
        """Return the training iterator, which the script reads itself, and the tokens of ``number`` micro-batches."""
        tokens = number * self.cfg.training.micro_batch_size * self.cfg.data.seq_length
        return reader.batches, torch.tensor([tokens], dtype=torch.float64)

    def split(self, batches: Iterator[dict], number: int, size: int) -> dict[str, object]:
        """Return the batches of the base class, broadcast to ranks whose data sets the script did not build."""
        self.task.start_batch()
        return super().split(self.task.data.share(batches, number), number, size)

    def expected(self, losses: Sequence[str], counts: Tensor) -> dict[str, Tensor]:
        """Return nothing: the true counts are not known yet."""
        return {}

    def final_counts(self, sums: LossSums, counts: Tensor, model: Sequence[nn.Module]) -> Tensor:
        """Scale the gradients from ``counts`` to the tokens that ``loss_func`` returned, in place. Returns these, and
        the counts of the logged values."""
        total = sums.pairs.pop(MAIN_LOSS)[1]
        for chunk in model:
            chunk.scale_gradients(counts[0] / total.clamp(min=1.0))  # type: ignore[operator]
        return torch.stack([total, sums.count()])


class ClassicTask(Task):
    """A task made of the functions that an entry script passes.

    Only the script knows how many tokens its loss sums over, and only after the forward pass. Until then the tokens of
    full sequences are the count; the gradients are corrected when the true count is known."""

    losses = (MAIN_LOSS,)

    def __init__(self, cfg: PretrainConfig, tokenizer: Tokenizer | None, functions: dict[str, Callable]) -> None:
        super().__init__(cfg, tokenizer)
        self.functions, self.data = functions, ScriptData()
        self._batch: Mapping[str, Any] = {}
        self._num_values: int | None = None
        """Number of values that ``loss_func`` returned for the first micro-batch of this run."""
        Current.program = Program.of(cfg, tokenizer, self.timers)
        follow_batch_schedule(cfg.flat, cfg.data_parallel_size)

    def model_provider(
        self, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
    ) -> nn.Module:
        """Return the script's model (without a model provider, the model of the settings' family), with ``vp_stage`` if
        its provider takes it. Registers a forward pre-hook that adds what our models take of a micro-batch and the
        script does not pass (:meth:`_add_known_facts`)."""
        provider = self.functions.get("model_provider")
        if provider is None:
            provider = task_class(self.cfg.model_family)(self.cfg, self.tokenizer).model_provider
        stage = {"vp_stage": vp_stage} if vp_stage is not None and "vp_stage" in signature(provider).parameters else {}
        model = provider(pre_process=pre_process, post_process=post_process, **stage)
        model.register_forward_pre_hook(self._add_known_facts, with_kwargs=True)
        return model

    def hooks(self) -> Sequence[Hook]:
        return [BatchPositionHook(self.cfg)]

    def train_valid_test_datasets_provider(self, num_samples: NumSamples) -> tuple[Any, ...]:
        """The script's data sets; see :class:`ScriptData`."""
        return self.data.build(self.functions["datasets_provider"], num_samples)

    def make_batches(self) -> Batches:
        return ScriptBatches(self)

    def start_batch(self) -> None:
        """Forget what ``loss_func`` returned for the previous global batch."""
        self._num_values = None

    def forward_step(self, data_iterator: Any, model: nn.Module) -> tuple[Any, Callable]:
        """Every rank first draws its micro-batch, also where the script does not, except with external data loaders."""
        self._batch = {}
        batches = None
        if data_iterator is not None:
            if self.cfg.data.dataloader_type != "external":
                first = next(data_iterator)
                self._note(first)
                data_iterator = chain([first], data_iterator)
            batches = MicroBatches(data_iterator, self._note)
        output, loss_func = self.functions["forward_step"](batches, model)
        return output, partial(self._losses, loss_func)

    def _losses(self, loss_func: Callable, output: Any) -> dict[str, object]:
        """Return the values that the script logs, and the main loss with its number of tokens (1 for a mean)."""
        returned = loss_func(output)
        loss, num_tokens, logged = split_loss(returned, self._num_values)
        self._num_values = len(returned)
        pairs: dict[str, object] = {name: as_sum_and_count(value) for name, value in logged.items()}
        if torch.is_grad_enabled():
            self._main_loss.check(num_tokens if len(returned) == 3 else None)
            pairs[MAIN_LOSS] = loss, num_tokens
        return pairs

    def _note(self, batch: object) -> None:
        self._batch = batch if isinstance(batch, Mapping) else {}

    def _add_known_facts(
        self, model: nn.Module, args: tuple, kwargs: dict[str, object]
    ) -> tuple[tuple, dict[str, object]]:
        """Return (args, kwargs) of the model's forward pass plus the arguments that it takes and the script did not
        give.

        ``sample_index`` makes dropout masks functions of the data; ``loss_mask`` marks the tokens that auxiliary losses
        count. On pipeline stages where the script reads nothing (its first argument is None), a keyword that is None is
        taken as not given, and document boundaries are added. Tensors are this context-parallel rank's, on its
        device."""
        forward = signature(model.forward)
        passed: Mapping[str, object] = forward.bind_partial(*args, **kwargs).arguments
        facts: dict[str, object] = {}
        names = ["sample_index"]
        if takes_main_loss(model):  # other models may mean something else by a mask
            names.append("loss_mask")
        if next(iter(passed.values()), True) is None:
            passed = {name: value for name, value in passed.items() if value is not None or name not in kwargs}
            if "cu_seqlens" in self._batch:
                bounds = self._batch["cu_seqlens"].to(initialize.training_device())
                facts["packed_seq_params"] = PackedSeqParams(cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
        tensors = get_batch_on_this_cp_rank({name: self._batch[name] for name in names if name in self._batch})
        facts |= to_device(tensors, initialize.training_device())
        missing = forward.parameters.keys() - passed.keys()
        kwargs = {**kwargs, **{name: value for name, value in facts.items() if name in missing}}
        return self._main_loss(model, args, kwargs) if takes_main_loss(model) else (args, kwargs)

    @cached_property
    def _main_loss(self) -> MainLossInput:
        return MainLossInput(MainLoss(self.loss_weights[MAIN_LOSS]))


_NEEDS_NOTHING = {"get_embedding_ranks", "get_position_embedding_ranks", "store", "inprocess_call_wrapper"}


@dataclass(frozen=True)
class PretrainConfigContainer:
    """The settings of a run and, unless :func:`pretrain` gets a model provider, the model that they describe."""

    settings: PretrainConfig
    model: object = None


def pretrain(*arguments: Any, **named: Any) -> None:
    """Train what the functions of an entry script describe; leave the process with the exit code if it is not 0.

    The first argument decides how the others are read:

    - ``pretrain(train_valid_test_dataset_provider, model_provider, model_type, forward_step_func, ...)`` parses
      ``sys.argv``: see :func:`pretrain_from_flags`.
    - ``pretrain(cfg_container, train_valid_test_dataset_provider, [model_provider,] model_type, forward_step_func,
      ...)`` takes the settings of ``pretrain_cfg_container_from_args``; without a model provider it trains the GPT
      model of these settings."""
    if "cfg_container" not in named and not (arguments and isinstance(arguments[0], PretrainConfigContainer)):
        return pretrain_from_flags(*arguments, **named)
    order = ["cfg_container", "train_valid_test_dataset_provider", "model_provider", "model_type", "forward_step_func"]
    if len(arguments) > 2 and isinstance(arguments[2], ModelType):
        order.append(order.pop(2))
    options = {**dict(zip(order, arguments)), **named}
    container = options.pop("cfg_container")
    functions = _functions(options.pop("train_valid_test_dataset_provider"), options.pop("forward_step_func"))
    if (model_provider := options.pop("model_provider", None)) is not None:
        functions["model_provider"] = model_provider
    elif container.model is None:
        raise UserError("pretrain(): no model; give a model_provider, or pretrain_cfg_container_from_args(args, model)")
    options.pop("model_type", None)
    _train(container.settings, functions, options.pop("hooks", ()), options)


def pretrain_from_flags(
    train_valid_test_dataset_provider: Callable,
    model_provider: Callable,
    model_type: ModelType,
    forward_step_func: Callable,
    process_non_loss_data_func: Callable | None = None,
    extra_args_provider: Callable[[ArgumentParser], object] | None = None,
    args_defaults: dict[str, object] | None = None,
    hooks: Sequence[Hook] = (),
    **optional: object,
) -> None:
    """Parse ``sys.argv`` and train what the four functions describe; see :func:`pretrain`. Wrong flags end the process
    with one message.

    Args:
        train_valid_test_dataset_provider: ``[train, valid, test sample counts] -> (train, valid, test)``.
        model_provider: ``(pre_process, post_process) -> nn.Module``.
        model_type: kept for the signature; one loop trains every type.
        forward_step_func: ``(data_iterator, model) -> (output, loss_func)``.
        process_non_loss_data_func: not available; must be None.
        extra_args_provider: adds the script's own flags to the parser.
        args_defaults: defaults that this script changes.
        hooks: observers of the loop (``megatron.training.hooks.Hook``), on every rank.
        optional: ``get_embedding_ranks``, ``get_position_embedding_ranks``, ``store`` and ``inprocess_call_wrapper``
            are accepted, as embeddings and restarts need no help; other arguments of Megatron-LM must be None or False
            (ValueError), unknown ones are a TypeError."""
    if not callable(train_valid_test_dataset_provider) or not callable(model_provider):
        raise ValueError("pretrain(): the first two arguments are the data set provider and the model provider")
    with exit_on_config_error():
        cfg = parse_script_args(args_defaults, extra_args_provider)
    functions = _functions(train_valid_test_dataset_provider, forward_step_func) | {"model_provider": model_provider}
    _train(cfg, functions, hooks, {**optional, "process_non_loss_data_func": process_non_loss_data_func})


_NEEDS_NOTHING = {"get_embedding_ranks", "get_position_embedding_ranks", "store", "inprocess_call_wrapper"}
_NONE_ONLY = {"process_non_loss_data_func", "non_loss_data_func", "p2p_communicator", "pg_collection"}


def _train(
    cfg: PretrainConfig, functions: dict[str, Callable], hooks: Sequence[Hook], options: dict[str, object]
) -> None:
    """Leave the process with its exit code if that is not 0. Raises TypeError for unknown ``options``, ValueError for
    values that are not available."""
    if unknown := sorted(options.keys() - _NEEDS_NOTHING - _NONE_ONLY - {"skip_model_parallel_init"}):
        raise TypeError(f"pretrain() has no argument {', '.join(unknown)}")
    for name in sorted(options.keys() - _NEEDS_NOTHING):
        if options[name]:
            raise ValueError(f"pretrain({name}=...): not available; pass {None if name in _NONE_ONLY else False}")
    if not cfg.program.dry_run:
        parallel_state.start_single_process_group()
    code = run(cfg, lambda resolved, tokenizer: ClassicTask(resolved, tokenizer, functions), hooks)
    if code:
        sys.exit(code)


def _functions(datasets_provider: Callable, forward_step: Callable) -> dict[str, Callable]:
    return {"datasets_provider": datasets_provider, "forward_step": _checked_forward_step(forward_step)}


def _checked_forward_step(forward_step: Callable) -> Callable:
    """Raise ValueError if more than (iterator, model) are required."""
    required = [
        parameter
        for parameter in signature(forward_step).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if len(required) > 2:
        raise ValueError(
            f"forward_step takes {[parameter.name for parameter in required]}; expected (data_iterator, model)"
        )
    return forward_step


def initialize_megatron(
    extra_args_provider: Callable[[ArgumentParser], object] | None = None,
    args_defaults: dict[str, object] | None = None,
    **unused: object,
) -> None:
    """Parse ``sys.argv`` and initialize this process for programs with their own training loop. Raises errors of wrong
    flags; ``unused`` arguments are ignored. Collective."""
    cfg = validate_args(parse_script_args(args_defaults, extra_args_provider), launched_world_size() or 1)
    initialize.configure_logging(cfg.logging.logging_level)
    parallel_state.start_single_process_group()
    initialize.initialize_megatron(cfg)
    Current.program = Program.of(
        cfg, build_tokenizer(cfg.tokenizer) if cfg.tokenizer.tokenizer_type is not None else None
    )
    follow_batch_schedule(cfg.flat, cfg.data_parallel_size)


def get_model(
    model_provider_func: Callable[..., nn.Module],
    model_type: object = None,
    wrap_with_ddp: bool = True,
    **unused: object,
) -> list[nn.Module]:
    """Return this rank's model chunks, built by ``model_provider_func``, for programs with their own training loop. The
    outputs of the last stage are fp32, also under --bf16 and --fp16."""
    program = current_program()
    task = ClassicTask(program.cfg, program.tokenizer, {"model_provider": model_provider_func})
    Current.program = program  # the task took its place
    chunks = build_model(task, initialize.training_device())
    for chunk in chunks:
        for parameter in chunk.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        if getattr(chunk, "post_process", True):
            chunk.register_forward_hook(lambda module, inputs, output: convert_floats(output, torch.float32))
    return [*parallelize(chunks, program.cfg, parallel_state.get_process_groups())] if wrap_with_ddp else chunks
