"""Pretrain mixtures of experts: ``torchrun --nproc_per_node=N pretrain_moe.py --num-experts E --num-layers …``.

``pretrain_gpt.py`` with --num-experts is the same; here that flag is required.
"""

import sys

from megatron.core.config.cli import ConfigError, Problem
from megatron.training.arguments import exit_on_config_error, parse_args
from megatron.training.report.dry_run import preflight


def main() -> int:
    """Parse first: ``--help`` and bad flags answer before torch is loaded."""
    with exit_on_config_error("pretrain_moe.py"):
        cfg = parse_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
        if cfg.num_moe_experts is None:
            raise ConfigError([Problem("--num-experts", "is required", fix="for example --num-experts 8")])
        if preflight(cfg):
            return 0

    from megatron.training.run import run
    from megatron.training.tasks.gpt import GPTTask

    return run(cfg, GPTTask)


if __name__ == "__main__":
    sys.exit(main())
