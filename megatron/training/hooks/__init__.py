"""Observers of the training loop: metrics files, console, TensorBoard, wandb, progress, profilers."""

from megatron.training.hooks.base import Hook, RunInfo
from megatron.training.hooks.build import build_hooks

__all__ = ["Hook", "RunInfo", "build_hooks"]
