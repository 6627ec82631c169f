"""Observers of the training loop: metrics files, console, TensorBoard, wandb, progress, profilers."""

from megatron.training.hooks.build import build_hooks

__all__ = ["build_hooks"]
