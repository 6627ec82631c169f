"""Containers between parsing and :func:`pretrain` in entry scripts since 2026: the settings of a command line, and the
model that they describe."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from megatron.compat.classic import PretrainConfigContainer
from megatron.compat.program import current_settings
from megatron.core.config.errors import UserError


@dataclass(frozen=True)
class GPTModelConfig:
    """The GPT model of a command line, which the training program builds."""


def gpt_config_from_args(
    args: Namespace, config: object = None, model_config_cls: object = GPTModelConfig
) -> GPTModelConfig:
    """The model that ``args`` describes. Raises UserError: another configuration or class, which would be ignored."""
    if config is not None or model_config_cls is not GPTModelConfig:
        raise UserError("gpt_config_from_args: the model follows from args only; pass a model_provider to pretrain()")
    return GPTModelConfig()


def pretrain_cfg_container_from_args(args: Namespace, model_cfg: object = None) -> PretrainConfigContainer:
    """Return the settings for :func:`pretrain`: the command line's, updated by the script's changes to ``args``.
    ``model_cfg``: of :func:`gpt_config_from_args`; None: :func:`pretrain` gets a ``model_provider``."""
    return PretrainConfigContainer(current_settings(args), model_cfg)
