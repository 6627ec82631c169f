"""Train a Hugging Face model on preference pairs (DPO).

    python tools/dpo.py --data pairs.jsonl --load-hf FOLDER --save RUN
    python tools/dpo.py --data pairs.jsonl --load-hf FOLDER --lora-rank 16 --save RUN
    python tools/dpo.py --data pairs.jsonl --load-hf FOLDER --inspect 2

Short form of pretrain_gpt.py --dpo: one pass over the pairs at a learning rate of 1e-6; the reference is the model of
--load-hf. Accepts all flags of that program, which replace the defaults, and --nproc N for N processes on this machine.
The same command continues a run from its --save folder."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.tools import sft

DEFAULTS = {**sft.DEFAULTS, "lr": "1e-6", "min-lr": "1e-7"}


def main(argv: Sequence[str]) -> int:
    """Train, or print samples; return the exit code. Raises UserError: wrong flags, data or model."""
    return sft.fine_tune(argv, __doc__ or "", "--dpo", DEFAULTS)
