"""Train a Hugging Face model on the next-token distributions of a larger one (knowledge distillation).

    python tools/distill.py --teacher FOLDER --load-hf STUDENT --data texts.jsonl --save RUN
    python tools/distill.py --teacher FOLDER --load-hf STUDENT --data texts.jsonl --inspect 2

Short form of pretrain_gpt.py --sft --export-kd-teacher-load: one pass over conversations or texts at a learning rate of
1e-4. --teacher is a --save directory or a Hugging Face folder with the student's tokenizer. Accepts all flags of that
program, which replace the defaults, and --nproc N for N processes on this machine. The same command continues a run
from its --save folder. For data in .bin and .idx files use pretrain_gpt.py itself."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.tools import sft

DEFAULTS = {**sft.DEFAULTS, "lr": "1e-4", "min-lr": "1e-5"}


def main(argv: Sequence[str]) -> int:
    """Train, or print samples; return the exit code. Raises UserError: wrong flags, data or models."""
    return sft.fine_tune(argv, __doc__ or "", "--sft", DEFAULTS, teacher=True)
