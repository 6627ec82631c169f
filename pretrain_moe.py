"""Pretrain mixtures of experts: ``torchrun --nproc_per_node=N pretrain_moe.py --num-experts E --num-layers …``.

``pretrain_gpt.py`` with --num-experts is the same; here that flag is required.
"""

import sys

from megatron.core.config.cli import ConfigError, Problem
from megatron.training import entry
from megatron.training.config.pretrain_config import PretrainConfig


def experts_are_given(cfg: PretrainConfig) -> None:
    """Refuses a dense model."""
    if cfg.num_moe_experts is None:
        raise ConfigError([Problem("--num-experts", "is required", fix="for example --num-experts 8")])


if __name__ == "__main__":
    sys.exit(entry.main("pretrain_moe.py", "gpt", tokenizer_type="GPT2BPETokenizer", check=experts_are_given))
