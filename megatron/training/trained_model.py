"""The model of a checkpoint, whole on one process: to be asked, not to be trained."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from megatron.core.config.errors import UserError
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.tokenizers import build_tokenizer
from megatron.training.arguments import parse_args, validate_args
from megatron.training.checkpoint.checkpointer import Checkpointer
from megatron.training.checkpoint.settings import apply_checkpoint_args, load_checkpoint_args
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.initialize import training_device
from megatron.training.tasks.language_model import task_class

TOOLS = {"gpt": "tools/generate.py", "t5": "tools/generate.py", "bert": "tools/fill_mask.py"}
"""What asks a model of each family."""

CHOICE_OF_EXPERTS = ("moe_router_load_balancing_type", "moe_aux_loss_coeff")
"""What a run that goes on may change, but a model that is asked has to have as it was trained: some kinds of balancing
choose experts in their own way. The second is as long as the first."""


@dataclass(frozen=True)
class TrainedModel:
    """A model in evaluation mode, its settings and its tokenizer."""

    cfg: PretrainConfig
    tokenizer: Any
    model: nn.Module


def load_trained_model(folder: str, step: int | None, tool: str) -> TrainedModel:
    """The model, settings and tokenizer that the --save directory ``folder`` holds, of iteration ``step`` or the
    latest.

    Raises:
        UserError: ``tool`` is not for models of its family.
        ValueError, OSError: there is no checkpoint, or it or its tokenizer cannot be read.
    """
    stored = load_checkpoint_args(folder, step)
    family = stored.get("model_family", "gpt")
    if TOOLS.get(family) != tool:
        raise UserError(f"--load {folder} holds a model of the family {family!r}, for which {TOOLS.get(family)} is")
    argv = ["--load", folder, "--use-checkpoint-args", "--exit-on-missing-checkpoint", "--finetune"]
    argv += ["--skip-train", "--micro-batch-size", "1", "--eval-iters", "0"]
    argv += [] if step is None else ["--ckpt-step", str(step)]
    parsed = apply_checkpoint_args(parse_args(argv, needs_data=False, model_family=family))
    balancing = {name: stored[name] for name in CHOICE_OF_EXPERTS if name in stored}
    cfg = validate_args(replace(parsed, **balancing), 1, announce=False)
    tokenizer = build_tokenizer(cfg)
    model = task_class(family)(cfg, tokenizer).model_provider().to(training_device()).eval()
    Checkpointer(cfg, [model], None, None, groups=SINGLE_PROCESS, tokenizer=tokenizer).load()
    return TrainedModel(cfg, tokenizer, model)
