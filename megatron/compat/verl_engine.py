"""Training engine for verl: its workers train and score with this library under the strategy ``megatron``.

verl loads this module through the entry point ``verl.plugins``. It prefers this class to its engine of that strategy,
because this one is registered for vendors. Settings come from ``McoreEngineConfig`` and ``McoreOptimizerConfig``; the
``override_*`` dicts hold other fields of this library by name. Written for verl 0.9 (``verl/workers/engine/base.py``).
Not available, each a UserError: value models, LoRA, fused kernels, routing replay, distillation by top-k logits.

Legend: b sequences of a micro-batch, s tokens of this rank's part of its row, v this rank's slice of the vocabulary."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn
from verl.utils import tensordict_utils as tu
from verl.utils.megatron.optimizer import get_megatron_last_lr, get_megatron_optimizer_param_scheduler
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry
from verl.workers.engine.utils import detach_tree, postprocess_batch_func, prepare_micro_batches

from megatron.core import parallel_state
from megatron.core.config.errors import UserError
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.pipeline_parallel.stage_model import unwrapped
from megatron.core.rl.host_copy import HostCopy
from megatron.core.rl.log_probabilities import Row, vocab_parallel_entropies
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_losses
from megatron.core.tokenizers import build_tokenizer
from megatron.export.hf import load_hf_settings
from megatron.training.arguments import parse_args, validate_args
from megatron.training.checkpoint.checkpointer import Checkpointer
from megatron.training.checkpoint.other_formats import apply_hf_settings, load_hf_weights
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.initialize import initialize_megatron, training_device
from megatron.training.live_weights import hf_weights
from megatron.training.start.parallelize import build_model, parallelize
from megatron.training.stored_settings import stored_family
from megatron.training.tasks.language_model import task_class
from megatron.training.train_state import TrainState

SAME_NAMES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "sequence_parallel", "use_distributed_optimizer", "seed",
)  # fmt: skip
"""Fields of ``McoreEngineConfig`` with the same meaning here."""
OVERRIDES = ("override_ddp_config", "override_transformer_config", "override_mcore_model_config")
AUX_LOSSES = {"aux_loss", "seq_aux_loss", "global_aux_loss"}


def training_settings(path: str, engine: Any, optimizer: Any, world_size: int) -> PretrainConfig:
    """Return the resolved settings of a run on ``world_size`` ranks for the Hugging Face folder ``path`` and verl's two
    configurations (``optimizer`` may be None). Auxiliary losses of experts are left out, as in verl's engine. Raises
    UserError for an unknown field in an ``override_*`` dict."""
    settings: dict[str, Any] = {name: getattr(engine, name) for name in SAME_NAMES}
    settings |= {"bf16": engine.dtype == "bfloat16", "fp16": engine.dtype == "float16", "micro_batch_size": 1}
    settings |= {"num_virtual_stages_per_pipeline_rank": engine.virtual_pipeline_model_parallel_size}
    settings |= {"accumulate_allreduce_grads_in_fp32": True, "attention_dropout": 0.0, "hidden_dropout": 0.0}
    settings |= {"train_iters": 1, "lr": 0.0, "lr_decay_style": "constant"}  # verl counts steps
    overrides = {name: getattr(engine, name) or {} for name in OVERRIDES}
    if optimizer is not None:
        beta1, beta2 = optimizer.betas
        settings |= {"optimizer": optimizer.optimizer, "lr": optimizer.lr, "min_lr": optimizer.min_lr}
        settings |= {"adam_beta1": beta1, "adam_beta2": beta2, "weight_decay": optimizer.weight_decay}
        settings |= {"clip_grad": optimizer.clip_grad}
        overrides["override_optimizer_config"] = optimizer.override_optimizer_config or {}
    family = stored_family(load_hf_settings(path, None), path)
    cfg = parse_args(["--load-hf", path, "--eval-iters", "0"], needs_data=False, model_family=family.name)
    fields = cfg.flat.values().keys()
    for place, values in overrides.items():
        if unknown := sorted(values.keys() - fields):
            raise UserError(f"{place}.{unknown[0]}: is no setting of this library; remove it")
        settings |= values
    if settings.get("recompute_granularity") != "selective":  # verl's defaults name modules in any case
        settings["recompute_modules"] = None
    settings = {name: value for name, value in settings.items() if value is not None}
    cfg = apply_hf_settings(cfg.with_settings(**settings, explicit=cfg.explicit | settings.keys()))
    later: dict[str, Any] = {"seq_length": cfg.embeddings.max_position_embeddings}
    if cfg.tokenizer.tokenizer_type is None:
        later["tokenizer_type"] = "NullTokenizer"
    if cfg.model.num_moe_experts and AUX_LOSSES & {*cfg.model.moe_router_load_balancing_type}:
        later |= {"moe_router_load_balancing_type": ["none"], "moe_aux_loss_coeff": [0.0]}
    return validate_args(cfg.with_settings(**later), world_size, announce=False)


class _Mode(BaseEngineCtx):
    """Training or evaluation mode: memory is on the device inside, where verl's offloading is on."""

    def __enter__(self) -> None:
        super().__enter__()
        for chunk in self.engine.module:
            chunk.train(self.mode == "train")

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self.mode == "train" and (self.zero_grad_on_exit or kind is not None):
            self.engine.optimizer_zero_grad()
        super().__exit__(kind, error, trace)


@EngineRegistry.register(
    model_type="language_model", backend="megatron", device=["cuda", "cpu"], vendor=["nvidia", "amd"]
)
class PretrainingEngine(BaseEngine):
    """Language model of a Hugging Face folder in any layout of this library; see ``BaseEngine`` for the calls."""

    module: list[Any]
    optimizer: Any = None
    lr_scheduler: Any = None

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        """Read the settings and create all process groups. Collective over the world. Raises UserError for a feature
        that is not available and for settings that contradict each other."""
        super().__init__()
        self.engine_config, self.optimizer_config = engine_config, optimizer_config
        self.checkpoint_config, self.mode = checkpoint_config, None
        unavailable = {
            "lora_rank": model_config.lora_rank or model_config.lora.get("rank", 0),
            "use_fused_kernels": engine_config.use_fused_kernels,
            "router_replay": engine_config.router_replay.mode != "disabled",
            "dynamic_context_parallel": engine_config.dynamic_context_parallel,
            "save_contents": "hf_model" in checkpoint_config.save_contents,
        }
        if wrong := [name for name, value in unavailable.items() if value]:
            raise UserError(f"{wrong[0]}: is not available in this engine; leave it at its default")
        self.path = str(model_config.local_path or model_config.path)
        self.cfg = training_settings(self.path, engine_config, optimizer_config, dist.get_world_size())
        self.groups = initialize_megatron(self.cfg)
        self._saved: list[Path] = []

    def initialize(self) -> None:
        """Build the model, its optimizer and schedule, and load the folder's weights. Collective."""
        cfg = self.cfg
        self.task = task_class(cfg.model_family)(cfg, build_tokenizer(cfg.tokenizer))
        self.module = list(parallelize(build_model(self.task, training_device()), cfg, self.groups))
        if not self.engine_config.forward_only:
            self.optimizer = get_megatron_optimizer(cfg.optimizer, self.module, groups=self.groups)
            self.lr_scheduler = get_megatron_optimizer_param_scheduler(self.optimizer, self.optimizer_config)
        load_hf_weights(self.path, self.module, self.optimizer, self.groups, model_family=cfg.model_family)
        self.memory = HostCopy(self.module, self.optimizer)
        self.to("cpu", model=self.is_param_offload_enabled, optimizer=self.is_optimizer_offload_enabled, grad=False)

    @property
    def is_param_offload_enabled(self) -> bool:
        return self.engine_config.param_offload

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return self.engine_config.optimizer_offload

    def is_mp_src_rank_with_outputs(self) -> bool:
        return self.groups.tp.rank == 0 and self.groups.pp.is_last and self.groups.cp.rank == 0

    def get_data_parallel_rank(self) -> int:
        return self.groups.dp.rank

    def get_data_parallel_size(self) -> int:
        return self.groups.dp.size

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return parallel_state.get_data_parallel_group()

    def train_mode(self, **kwargs: Any) -> _Mode:
        return _Mode(self, "train", **kwargs)

    def eval_mode(self, **kwargs: Any) -> _Mode:
        return _Mode(self, "eval", **kwargs)

    def optimizer_zero_grad(self) -> None:
        self.optimizer.zero_grad()
        for chunk in self.module:
            chunk.zero_grad_buffer()

    def optimizer_step(self) -> float:
        """Update the weights; return the gradient norm before clipping."""
        _, norm, _ = self.optimizer.step()
        return float(norm)

    def lr_scheduler_step(self) -> float:
        """Advance the schedule by one step; return the learning rate."""
        self.lr_scheduler.step(1)
        return get_megatron_last_lr(self.optimizer)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move optimizer state and, with ``model``, weights to the host (``device`` "cpu"), or all back. Gradients are
        zero afterwards. No effect without ``model`` and ``optimizer``, or if the memory is there already."""
        if device != "cpu" and self.memory.is_offloaded:
            self.memory.reload()
        elif device == "cpu" and (model or optimizer) and not self.memory.is_offloaded:
            self.memory.offload(weights=model)

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Run this data-parallel rank's ``data`` in micro-batches; return verl's outputs, {} before the last pipeline
        stage. ``log_probs[i]`` belongs to token i + 1 of a sequence; the last one has no meaning."""
        if tu.get_non_tensor_data(data, key="distillation_use_topk", default=False):
            raise UserError("distillation_use_topk: is not available in this engine; remove it")
        device, mask = training_device(), data["loss_mask"]
        num_tokens = (mask.values() if mask.is_nested else mask).sum().to(device)
        dist.all_reduce(num_tokens, group=self.get_data_parallel_group())
        size = self.get_data_parallel_size()
        tu.assign_non_tensor(data, sp_size=self.groups.cp.size, batch_num_tokens=num_tokens.item(), dp_size=size)
        micro_batches, indices = prepare_micro_batches(
            data=data,
            dp_group=self.get_data_parallel_group(),
            num_batches_divided_by=self.groups.pp.size if len(self.module) > 1 else None,
        )
        rows = self._rows(micro_batches, device)
        results: list[Any] = get_forward_backward_func()(
            forward_step_func=partial(self._forward_step, loss_function, len(rows)),
            data_iterator=[iter(rows) for _ in self.module],
            model=self.module,
            num_microbatches=len(rows),
            seq_length=rows[0][1]["tokens"].shape[1] * self.groups.cp.size,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        if not forward_only:
            finalize_model_grads(self.module, None)
        if not self.groups.pp.is_last:
            return {}
        return postprocess_batch_func(output_lst=results, indices=indices, data=data)

    def _rows(self, micro_batches: list[TensorDict], device: torch.device) -> list[tuple[TensorDict, dict[str, Any]]]:
        """Return each micro-batch on ``device`` and its model inputs: sequences end to end in one row, then padding.
        All rows have the length of the longest row, a multiple of the parts into which ranks split it."""
        sequences = [[row.tolist() for row in batch["input_ids"].unbind()] for batch in micro_batches]
        parts = 2 * self.groups.cp.size if self.groups.cp.size > 1 else 1
        parts *= self.groups.tp.size
        length = max(sum(map(len, batch)) for batch in sequences)
        length += -length % parts
        if self.groups.dp.size > 1:  # expert-parallel ranks exchange equally many tokens
            max_length = torch.tensor(length, device=device)
            dist.all_reduce(max_length, op=dist.ReduceOp.MAX, group=self.groups.dp.handle)
            length = int(max_length)
        model: Any = unwrapped(self.module[-1])
        layout, rows = model.layout, []
        for micro_batch, batch in zip(micro_batches, sequences):
            starts = accumulate(map(len, batch), initial=0)
            row = Row(length, [*zip(range(len(batch)), starts)], [token for tokens in batch for token in tokens])
            inputs = row.batch(batch, device)
            split = {name: layout.local(x, 1) for name, x in inputs.items() if name != "documents"}
            rows.append((micro_batch.to(device), inputs | split))
        return rows

    def _forward_step(
        self, loss_function: Callable | None, num_rows: int, rows: Iterator, chunk: nn.Module
    ) -> tuple[Tensor, Callable]:
        micro_batch, inputs = next(rows)
        names = ("tokens", "position_ids")
        output = chunk(
            *(inputs[name] for name in names),
            packed_seq_params=inputs["documents"],
            sample_index=inputs["sample_index"],
        )

        def loss(logits: Tensor) -> tuple[Tensor, dict[str, Any]]:
            outputs = self._outputs(unwrapped(chunk), logits[0], inputs["labels"][0], micro_batch)
            value, metrics = torch.ones((), device=logits.device), {}
            if loss_function is not None:
                group = self.get_data_parallel_group()
                value, metrics = loss_function(model_output=outputs, data=micro_batch, dp_group=group)
            result = {"model_output": detach_tree(outputs), "loss": value.detach().item(), "metrics": metrics}
            # the schedule takes means over micro-batches; context-parallel ranks add equal gradients of the full loss
            if loss_function is not None and torch.is_grad_enabled():
                value = self.optimizer.scale_loss(value)
            return value * num_rows / self.groups.cp.size, result

        return output, loss

    def _outputs(self, inner: Any, logits_sv: Tensor, labels_s: Tensor, batch: TensorDict) -> dict[str, Tensor]:
        """Return nested [b, tokens] ``log_probs`` and, if ``calculate_entropy`` of ``batch``, ``entropy`` of the logits
        divided by its ``temperature`` (a number, or one per sequence)."""
        head, group = inner.output_layer, inner.groups.tp
        offsets = batch["input_ids"].offsets()
        dtype = torch.promote_types(logits_sv.dtype, torch.float32)
        temperatures = torch.as_tensor(batch["temperature"], dtype=dtype, device=logits_sv.device).flatten()
        lengths = torch.cat((offsets.diff(), inner.layout.full_length(len(labels_s)) - offsets[-1:]))
        values = torch.cat((temperatures.expand(len(lengths) - 1), temperatures.new_ones(1)))  # padding: 1
        divisors = inner.layout.local(values.repeat_interleave(lengths), 0)
        scaled = logits_sv.to(dtype) / divisors[:, None]
        losses = vocab_parallel_losses(
            scaled,
            labels_s,
            group=group,
            vocab_size=head.vocab_size,
            divisible_by=head.divisible_by,
            batch_invariant=head.batch_invariant,
        )
        outputs = {"log_probs": -losses}
        if tu.get_non_tensor_data(batch, key="calculate_entropy", default=False):
            outputs["entropy"] = vocab_parallel_entropies(scaled, group)
        count = int(offsets[-1])
        return {
            name: torch.nested.nested_tensor_from_jagged(inner.layout.full(x, 0)[:count], offsets)
            for name, x in outputs.items()
        }

    def get_per_tensor_param(self, **ignored: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """Return the weights under Hugging Face names, full tensors in the same order on all ranks, which must all read
        to the end (``hf_weights``); None: no adapter."""
        self.to("device")
        return hf_weights(self.cfg, self.module, vocab_size=self.task.vocab_size, groups=self.groups), None

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **ignored: Any,
    ) -> None:
        """Write ``local_path/iter_…`` in this library's format. Deletes the oldest folders that this engine saved,
        beyond ``max_ckpt_to_keep``. Collective. Raises UserError for ``hdfs_path``, CheckpointError if it failed."""
        if hdfs_path is not None:
            raise UserError("hdfs_path: is not available in this engine; leave it None")
        self.to("device")
        checkpointer = self._checkpointer(save=str(local_path))
        try:
            if not checkpointer.save(TrainState(iteration=global_step)):
                raise CheckpointError(checkpointer.last_failure)
        finally:
            checkpointer.close()
        self._saved.append(Path(local_path))
        while max_ckpt_to_keep and len(self._saved) > max_ckpt_to_keep:
            oldest = self._saved.pop(0)
            if self.groups.world.is_first and oldest not in self._saved:
                shutil.rmtree(oldest, ignore_errors=True)

    def load_checkpoint(
        self, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = False, **ignored: Any
    ) -> None:
        """Restore weights, optimizer and schedule from ``local_path``, which stays; None: no effect. Collective. Raises
        UserError for ``hdfs_path``, CheckpointError for a missing or damaged checkpoint."""
        if hdfs_path is not None:
            raise UserError("hdfs_path: is not available in this engine; leave it None")
        if local_path is not None:
            self.to("device")
            self._checkpointer(load=str(local_path), exit_on_missing_checkpoint=True).load()

    def _checkpointer(self, **settings: Any) -> Checkpointer:
        cfg = self.cfg.with_settings(**settings)
        return Checkpointer(
            cfg, self.module, self.optimizer, self.lr_scheduler, groups=self.groups, tokenizer=self.task.tokenizer
        )
