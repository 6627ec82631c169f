"""Observers of the training loop: metrics files, console, TensorBoard, wandb, progress, profilers."""

from megatron.training.hooks.base import Hook
from megatron.training.hooks.build import build_hooks
from megatron.training.observe.records import RunInfo

__all__ = ["Hook", "RunInfo", "build_hooks"]
