"""The optimizer step: unscale, check, clip, update, copy back. The update itself is torch's own AdamW, Adam or SGD, on
*main parameters*: the model's own where they are fp32 (or fp64), fp32 copies of them where the model computes in half
precision. Gradients are read from ``parameter.main_grad`` (see ``core/distributed``), or ``parameter.grad`` without it.

Where data-parallel ranks share out the update (a distributed optimizer, fully sharded data parallelism), there is a
main parameter for what this rank updates of each parameter: ``ParameterShard`` says what, nothing else differs.

State is known by global parameter names, so that it can be saved, compared and loaded without knowing any order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.dist_checkpointing.sharded_tensor import ShardedTensor, stretch_tensors
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.distributed.parameter_shard import ParameterShard, whole
from megatron.core.distributed.replicas import Replica
from megatron.core.optimizer.clip_grads import UNSHARDED, clip_coefficient, count_zeros, is_counted_here, l2_norm
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.process_groups import SINGLE_PROCESS, ProcessGroups

GradScaler = ConstantGradScaler | DynamicGradScaler
HALF = (torch.bfloat16, torch.float16)


class MegatronOptimizer:
    """Steps over every parameter of this rank's model chunks.

    Args:
        config: optimizer kind, clipping, loss scale.
        param_groups: as from ``parameter_groups``; their ``params`` are model parameters.
        model_chunks: whose gradient buffers ``zero_grad`` clears; wrapped for data parallelism, they say what this rank
            updates.
        grad_scaler: of fp16 training, else None.
        groups: this rank's process groups.
    """

    def __init__(
        self, config: OptimizerConfig, param_groups: Sequence[dict[str, Any]], model_chunks: Sequence[nn.Module],
        *, grad_scaler: GradScaler | None = None, groups: ProcessGroups = SINGLE_PROCESS,
    ) -> None:  # fmt: skip
        self.config = config
        self.model_chunks = list(model_chunks)
        self.grad_scaler = grad_scaler
        self.groups = groups
        self.model_params: dict[str, nn.Parameter] = {}
        self.shards: dict[str, ParameterShard] = {}
        """What this rank updates, by name of the parameter; one of which it updates nothing is absent."""
        self.main_params: dict[str, nn.Parameter] = {}
        parallel = [chunk for chunk in self.model_chunks if isinstance(chunk, DataParallel)]
        self.shard_group = parallel[0].shard_group if parallel else UNSHARDED
        """Ranks that together update every parameter."""
        cut = [shards for chunk in parallel if (shards := chunk.parameter_shards()) is not None]
        shards = {key: shard for each in cut for key, shard in each.items()} if cut else None
        main_groups = [{**group, **self._adopt(group, shards)} for group in param_groups]
        if not self.model_params:
            raise ValueError("the model has no parameter to train")
        self.optimizer = build_torch_optimizer(config, main_groups)
        self._initialize_state()
        self.found_nonfinite = False
        """Whether the last step met a NaN or an infinity, and therefore changed nothing."""

    def _adopt(self, group: dict[str, Any], shards: dict[nn.Parameter, ParameterShard] | None) -> dict[str, Any]:
        """The names and main parameters of what this rank updates of a group."""
        names, mains = [], []
        for name, parameter in zip(group["names"], group["params"]):
            if name in self.model_params:
                raise ValueError(f"two parameters are called {name}: state is kept by name")
            self.model_params[name] = parameter
            shard = whole(parameter) if shards is None else shards.get(parameter)
            if shard is None:
                continue
            main: Any = parameter
            if shard.values.dtype in HALF:
                main = nn.Parameter(shard.values.detach().float())
            elif shard.values is not parameter:
                main = nn.Parameter(shard.values.detach())
            self.shards[name], self.main_params[name] = shard, main
            names.append(name)
            mains.append(main)
        return {"names": names, "params": mains}

    def _initialize_state(self) -> None:
        """Allocates moments now, so that memory use and state names do not depend on the first step."""
        for group in self.optimizer.param_groups:
            for main in group["params"]:
                state = self.optimizer.state[main]
                for key in self.moment_names:
                    state[key] = torch.zeros_like(main, memory_format=torch.preserve_format)
                if self.config.optimizer != "sgd":
                    device = main.device if group["fused"] else "cpu"
                    state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        self.step_count = 0
        """Updates made."""

    @property
    def moment_names(self) -> tuple[str, ...]:
        """State tensors per parameter."""
        if self.config.optimizer == "sgd":
            return ("momentum_buffer",) if self.config.sgd_momentum else ()
        return ("exp_avg", "exp_avg_sq")

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Live groups of the torch optimizer; a scheduler writes ``lr`` and ``weight_decay`` here."""
        return self.optimizer.param_groups

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(iter(self.model_params.values())).device

    def get_parameters(self) -> list[nn.Parameter]:
        """The main parameters."""
        return list(self.main_params.values())

    def get_loss_scale(self) -> float:
        """1.0 without a scaler."""
        return self.grad_scaler.scale if self.grad_scaler else 1.0

    def scale_loss(self, loss: Tensor) -> Tensor:
        """What to call backward on."""
        return loss * self.grad_scaler.scale if self.grad_scaler else loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradient buffers, and ``grad`` of every parameter (kept as zeros unless ``set_to_none``)."""
        for chunk in self.model_chunks:
            if isinstance(chunk, DataParallel):
                chunk.zero_grad_buffer()
        for parameter in self.model_params.values():
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.zero_()

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, int | None]:
        """(whether weights changed, gradient norm before clipping, zeros in the gradients if asked for).

        A NaN or infinite gradient anywhere changes nothing on any rank: the loss scale backs off, ``found_nonfinite``
        is set, and the result is (False, None, None).
        """
        for chunk in self._parallel_chunks():
            chunk.finish_param_sync()  # what is about to be written may still be on its way from the last step
        grads = self._gradients()
        if grads and self.grad_scaler and self.grad_scaler.scale != 1.0:  # a rank may have no shard to update
            torch._foreach_mul_(grads, 1.0 / self.grad_scaler.scale)
        norm = self._norm(grads)
        self.found_nonfinite = not math.isfinite(norm)
        if self.grad_scaler:
            self.grad_scaler.update(self.found_nonfinite)
        if self.found_nonfinite:
            self._release_gradients()
            return False, None, None
        num_zeros = self._count_zeros() if self.config.log_num_zeros_in_grad else None
        if self.config.clip_grad > 0.0 and (factor := clip_coefficient(norm, self.config.clip_grad)) < 1.0 and grads:
            torch._foreach_mul_(grads, factor)
        self.optimizer.step()
        self.step_count += 1
        self._release_gradients()
        self._copy_main_to_model()
        return True, norm, num_zeros

    def _parallel_chunks(self) -> list[DataParallel]:
        return [chunk for chunk in self.model_chunks if isinstance(chunk, DataParallel)]

    def _gradients(self) -> list[Tensor]:
        """Points every main parameter's ``grad`` to its gradient (in the main parameter's dtype) and lists them."""
        grads = []
        for name, main in self.main_params.items():
            source = self.shards[name].gradient()
            main.grad = None if source is None else source.to(main.dtype)
            if main.grad is not None:
                grads.append(main.grad)
        return grads

    def gradient_shards(self) -> Iterator[ShardedTensor]:
        """What this rank uses of the gradients, as rectangles under global names; live views.

        After ``finalize_model_grads``: the gradients of the global batch (times the loss scale, if there is one). After
        ``step`` they may have been clipped, and unscaled, in place. Copies of one element (over tensor-parallel ranks
        that replicate a parameter, data-parallel ranks without sharding) come from each of their ranks.
        """
        for name, shard in self.shards.items():
            gradient = shard.gradient()
            if gradient is not None:
                stretch = (shard.start, shard.stop)
                yield from stretch_tensors(name, gradient, shard.parameter, stretch, groups=self.groups).values()

    def _release_gradients(self) -> None:
        """Cuts ``grad`` loose from the buffers, else the next backward pass would add to them twice."""
        for name, main in self.main_params.items():
            parameter = self.model_params[name]
            if main is not parameter or hasattr(parameter, "main_grad"):
                main.grad = None

    def _counted(self) -> list[str]:
        """What this rank contributes to sums over the model: every unique element exactly once."""
        return [name for name in self.main_params if is_counted_here(self.model_params[name], self.groups)]

    def _norm(self, grads: list[Tensor]) -> float:
        """Global L2 norm of the gradients; padding has none."""
        counted = self._counted()
        if len(counted) != len(self.main_params):
            grads = [grad for name in counted if (grad := self.main_params[name].grad) is not None]
        return l2_norm(grads, self.device, self.groups, self.shard_group).item()

    def _count_zeros(self) -> int:
        """Zeros among the gradients, without those of padding."""
        tensors = []
        for name in self._counted():
            grad, shard = self.main_params[name].grad, self.shards[name]
            if grad is not None:
                stretch = (shard.start, shard.stop)
                pieces = stretch_tensors(name, grad, shard.parameter, stretch, groups=self.groups)
                tensors += [piece.local for piece in pieces.values()]
        return count_zeros(tensors, self.device, self.groups, self.shard_group)

    @torch.no_grad()
    def params_norm(self) -> float:
        """Global L2 norm of the main parameters."""
        tensors = [self.main_params[name].detach() for name in self._counted()]
        return l2_norm(tensors, self.device, self.groups, self.shard_group).item()

    def _copied_names(self) -> list[str]:
        """Those whose main parameter has memory of its own."""
        return [name for name, main in self.main_params.items() if main.dtype != self.shards[name].values.dtype]

    @torch.no_grad()
    def _copy_main_to_model(self) -> None:
        names = self._copied_names()
        if names:
            values = [self.shards[name].values for name in names]
            torch._foreach_copy_(values, [self.main_params[name] for name in names])
        for chunk in self._parallel_chunks():
            chunk.start_param_sync()

    @torch.no_grad()
    def reload_model_params(self) -> None:
        """After the model's weights changed from outside (a checkpoint without optimizer state): main := model."""
        for name in self._copied_names():
            self.main_params[name].copy_(self.shards[name].values)

    def state_dict(self) -> dict[str, Any]:
        """``{"exp_avg": {name: tensor}, "exp_avg_sq": {…}, "main_param": {…}, "step": int, "grad_scaler": {…}}``.

        The tensors are the live ones, not copies, of what this rank updates (``shards``). SGD has ``momentum_buffer``
        in place of the moments. ``main_param`` holds only parameters that the model computes with in half precision.
        """
        state = self.optimizer.state
        named = self.main_params.items()
        moments = {key: {name: state[main][key] for name, main in named} for key in self.moment_names}
        mains = {name: main.detach() for name, main in named if self.shards[name].compute_dtype in HALF}
        scaler = self.grad_scaler.state_dict() if self.grad_scaler else {}
        return {**moments, "main_param": mains, "step": self.step_count, "grad_scaler": scaler}

    def replicas(self) -> Iterator[Replica]:
        """Moments and main parameters, for ``check_replicas``: ``exp_avg:`` + parameter name …"""
        for key, named in self.state_dict().items():
            for name, tensor in named.items() if key not in ("step", "grad_scaler") else ():
                spec = getattr(self.model_params[name], "spec", None)
                yield Replica(f"{key}:{name}", tensor, spec, self.shard_group.size > 1)

    def sharded_tensors(self, prefix: str = "optimizer.") -> dict[str, ShardedTensor]:
        """The tensors of :meth:`state_dict` as rectangles called prefix + ``exp_avg.`` + global parameter name."""
        tensors: dict[str, ShardedTensor] = {}
        for key, named in self.state_dict().items():
            for name, tensor in named.items() if key not in ("step", "grad_scaler") else ():
                shard = self.shards[name]
                tensors |= stretch_tensors(
                    name, tensor, shard.parameter, (shard.start, shard.stop), prefix=f"{prefix}{key}.",
                    groups=self.groups,
                )  # fmt: skip
        return tensors

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`; ``ValueError`` lists all missing and unknown names before anything changes."""
        live = self.state_dict()
        check_names(live, state_dict)
        for key, tensors in live.items():
            if key in ("step", "grad_scaler"):
                continue
            for name, tensor in tensors.items():
                if tensor is not state_dict[key][name]:
                    tensor.copy_(state_dict[key][name])
        self.load_scalars(state_dict)
        self._copy_main_to_model()

    def load_scalars(self, state_dict: dict[str, Any]) -> None:
        """Only ``step`` and ``grad_scaler``, for a loader that filled the tensors of :meth:`state_dict` in place."""
        self.step_count = int(state_dict["step"])
        if self.config.optimizer != "sgd":
            for main in self.main_params.values():
                self.optimizer.state[main]["step"].fill_(int(state_dict["step"]))
        if self.grad_scaler and state_dict["grad_scaler"]:
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])


def check_names(live: dict[str, Any], stored: dict[str, Any]) -> None:
    """``ValueError`` naming every entry that only one of two optimizer states has."""
    problems = []
    for key in sorted(set(live) | set(stored)):
        if key not in stored or key not in live:
            problems.append(f"{key} is {'missing' if key not in stored else 'unknown'}")
        elif key not in ("step", "grad_scaler"):
            problems += [f"{key}.{name} is missing" for name in sorted(set(live[key]) - set(stored[key]))]
            problems += [f"{key}.{name} is unknown" for name in sorted(set(stored[key]) - set(live[key]))]
    if problems:
        raise ValueError(f"the optimizer state does not fit this model and optimizer: {'; '.join(problems)}")


def build_torch_optimizer(config: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """torch's AdamW (Adam with L2 decay without ``decoupled_weight_decay``) or SGD, fused."""
    rate = 0.0 if config.lr is None else config.lr
    if config.optimizer == "sgd":
        return torch.optim.SGD(
            groups, lr=rate, weight_decay=config.weight_decay, momentum=config.sgd_momentum, fused=True
        )
    if config.optimizer != "adam":
        raise ValueError(f"--optimizer {config.optimizer}: not available yet; choose adam or sgd")
    kind = torch.optim.AdamW if config.decoupled_weight_decay else torch.optim.Adam
    return kind(
        groups, lr=rate, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps,
        weight_decay=config.weight_decay, fused=True,
    )  # fmt: skip
