"""Loss of knowledge distillation, and the vocabulary of the teacher."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from megatron.core import parallel_state
from megatron.core.config.cli import ConfigError, Problem
from megatron.core.config.distillation import TEACHER, DistillationConfig
from megatron.core.config.errors import UserError
from megatron.core.config.tokenizer import TokenizerConfig
from megatron.core.pipeline_parallel.loss_weights import LossPairs
from megatron.core.pipeline_parallel.paired_stage import PairedOutput
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_losses
from megatron.core.tensor_parallel.distillation import Divergence, slice_of_entries
from megatron.core.tensor_parallel.vocabulary import num_true_entries
from megatron.core.tokenizers import build_tokenizer
from megatron.core.tokenizers.base import Tokenizer
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.batch import Batch
from megatron.training.data.stored_logits import IDS, VALUES, StoredLogits

LOSS = "distillation loss"
SAME = "use a teacher with the same tokenizer"


def distillation_losses(
    settings: DistillationConfig, batch: Batch, output: PairedOutput | Tensor, vocab_size: int, divisible_by: int
) -> LossPairs:
    """Return the loss of a micro-batch, its divergence and language-model loss, summed over the tokens in the loss,
    with their number; only the latter if a batch of validation has no stored distributions. All-gathers statistics of
    each token over tensor-parallel ranks.

    Args:
        settings: divergence and weights.
        batch: this rank's part of a batch, with labels and loss_mask [b, s].
        output: logits [b, s, v] of both models, this rank's slice of the vocabulary; of the student if ``batch`` has
            stored distributions.
        vocab_size: size without padding, padded to a multiple of ``divisible_by``."""
    tp, student = parallel_state.get_process_groups().tp, output if isinstance(output, Tensor) else output.trained
    num_true = num_true_entries(vocab_size, student.shape[-1], tp)
    with torch.set_grad_enabled(settings.kd_lm_loss_weight > 0 and torch.is_grad_enabled()):
        losses = vocab_parallel_losses(
            student, batch["labels"], group=tp, vocab_size=vocab_size, divisible_by=divisible_by
        )
    mask = batch["loss_mask"].to(losses.dtype)
    lm, count = (losses * mask).sum(), mask.sum()
    if isinstance(output, PairedOutput):
        teacher = output.frozen[TEACHER]
    elif VALUES in batch:
        teacher = slice_of_entries(batch[VALUES], batch[IDS], student.shape[-1], tp)
    else:
        return {"lm loss": (lm, count)}
    kind = Divergence(num_true, tp, settings.kd_temperature, settings.kd_loss == "reverse-kl")
    kd = (kind(student, teacher) * mask).sum()
    total = settings.kd_loss_scale * kd + settings.kd_lm_loss_weight * lm
    return {LOSS: (total, count), "kd loss": (kd.detach(), count), "lm loss": (lm.detach(), count)}


def open_stored(settings: DistillationConfig, vocab_size: int) -> StoredLogits | None:
    """Return the stored distributions that --logits-load-dir names; None without it. Raises ConfigError for another
    vocabulary than the student's ``vocab_size``, UserError for a folder without them."""
    folder = settings.logits_load_dir
    if folder is None:
        return None
    stored = StoredLogits(folder)
    if stored.vocab_size != vocab_size:
        reason = f"has a vocabulary of {stored.vocab_size}, the student {vocab_size}"
        raise ConfigError([Problem("--logits-load-dir", reason, folder, SAME)])
    return stored


def check_vocabulary(cfg: PretrainConfig, vocab_size: int, tokenizer: Tokenizer | None) -> None:
    """Raise ConfigError if the teacher's vocabulary differs from the student's, which has ``vocab_size`` entries:
    another size, or a ``tokenizer.json`` with another token at the same id."""
    teacher, folder = cfg.companions[TEACHER], str(cfg.group(DistillationConfig).export_kd_teacher_load)
    size = max(teacher.tokenizer.vocab_size or 0, 0 if tokenizer is None else tokenizer.vocab_size)
    if size != vocab_size:
        reason = f"has a vocabulary of {size}, the student {vocab_size}"
        raise _problem(folder, reason, "--vocab-size pads a new student" if size > vocab_size else SAME)
    if tokenizer is None or not Path(folder, "tokenizer.json").is_file():
        return
    settings = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=folder)
    try:
        names = tokenizer.vocab
        teacher_names = {index: name for name, index in build_tokenizer(settings).vocab.items()}
    except UserError:  # a tokenizer without a vocabulary of strings
        return
    for name, index in names.items():
        if teacher_names.get(index, name) != name:
            raise _problem(folder, f"its token {index} is {teacher_names[index]!r}, the student's {name!r}", SAME)


def _problem(folder: str, reason: str, fix: str) -> ConfigError:
    return ConfigError([Problem("--export-kd-teacher-load", reason, folder, fix)])
