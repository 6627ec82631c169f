"""A tiny training run that saves and loads everything a checkpoint holds."""

from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import nn

from megatron.core.dist_checkpointing import writer
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.schedules.learning_rate import get_optimizer_param_scheduler
from megatron.training.checkpoint.checkpointer import Checkpointer
from megatron.training.config.flat import FlatConfig
from megatron.training.config.pretrain_config import compose
from megatron.training.train_state import TrainState

TRACKER = "latest_checkpointed_iteration.txt"


def settings(folder=None, **changes):
    """The run's flags; it saves to ``folder`` and loads from it."""
    values = {
        "num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 4, "max_position_embeddings": 4,
        "micro_batch_size": 1, "global_batch_size": 6, "lr": 0.01, "train_iters": 100, "bf16": True, "save_interval": 1,
    }  # fmt: skip
    folders = {} if folder is None else {"save": str(folder), "load": str(folder)}
    return compose(FlatConfig(**{**values, **folders, **changes}))


class Run:
    """A tiny training run with all state that a checkpoint holds."""

    device = "cpu"

    def __init__(self, cfg, groups=SINGLE_PROCESS, fault=writer.no_fault, tokenizer="abc", dtype=torch.bfloat16):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)).to(self.device, dtype)
        self.groups = groups
        config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self.model = DistributedDataParallel(None, config, self.net, groups=groups)
        optimizer_config = OptimizerConfig(
            lr=cfg.schedule.lr, fp16=cfg.model.fp16, initial_loss_scale=64.0, loss_scale=cfg.optimizer.loss_scale
        )
        self.optimizer = get_megatron_optimizer(optimizer_config, [self.model], groups=groups)
        self.scheduler = get_optimizer_param_scheduler(cfg.flat, self.optimizer)
        named = None if tokenizer is None else SimpleNamespace(fingerprint=tokenizer)
        self.checkpointer = Checkpointer(
            cfg, [self.model], self.optimizer, self.scheduler, groups=groups, tokenizer=named, fault=fault
        )
        self.state = TrainState()

    def train(self, iterations):
        """Six samples per iteration, split over the ranks; the data is a function of the counter."""
        dp = self.groups.dp
        for _ in range(iterations):
            self.scheduler.set_samples(self.state.consumed_train_samples)
            generator = torch.Generator().manual_seed(self.state.consumed_train_samples)
            batch = torch.randn(6, 8, generator=generator)[dp.rank :: dp.size]
            self.optimizer.zero_grad()
            loss = self.model(batch.to(self.net[0].weight)).float().square().sum() / 6
            self.optimizer.scale_loss(loss).backward()
            self.model.finish_grad_sync()
            self.optimizer.step()
            self.state.iteration += 1
            self.state.consumed_train_samples += 6
        return self

    def save(self):
        return self.checkpointer.save(self.state)

    def load(self):
        state = self.checkpointer.load()
        self.state = state or TrainState()
        return state

    def bits(self):
        """Return all state that determines the following steps, bit for bit."""
        state = self.optimizer.state_dict()
        tensors = {**self.net.state_dict()}
        tensors |= {f"{k}.{n}": t for k in ("exp_avg", "exp_avg_sq", "main_param") for n, t in state[k].items()}
        return (
            {name: tensor.detach().double().cpu().numpy().copy().tobytes() for name, tensor in tensors.items()},
            state["step"], state["grad_scaler"], self.scheduler.state_dict(), replace(self.state),
        )  # fmt: skip
