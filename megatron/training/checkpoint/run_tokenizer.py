"""The tokenizer of a run: at the path of its settings, else the copy in its checkpoint."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from megatron.core.config.errors import UserError
from megatron.core.config.tokenizer import TokenizerConfig
from megatron.core.tokenizers import build_tokenizer
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import is_unnamed, with_copies
from megatron.data.sidecar import same_tokenizer

logger = logging.getLogger(__name__)


def find_run_tokenizer(
    cfg: TokenizerConfig, directory: str | os.PathLike, fingerprint: str | None
) -> tuple[TokenizerConfig, Tokenizer]:
    """Return settings and tokenizer of the run whose checkpoint is ``directory``: of ``cfg``, or if these files are
    missing or do not match ``fingerprint`` (None: unknown), of the copies in the checkpoint."""
    folder = Path(directory) / "tokenizer"
    copies = {f"tokenizer/{path.name}": path for path in folder.iterdir()} if folder.is_dir() else {}
    copied = with_copies(cfg, copies)
    candidates = [copied] if is_unnamed(cfg) or copied == cfg else [cfg, copied]
    problems = []
    for candidate in candidates:
        try:
            tokenizer = build_tokenizer(candidate)
        except UserError as error:
            problems.append(str(error))
            continue
        if fingerprint is None or same_tokenizer(fingerprint, tokenizer.fingerprint):
            if problems:
                logger.warning("%s. Taking the copy in %s", problems[0], folder)
            return candidate, tokenizer
        path = next(filter(None, (candidate.tokenizer_model, candidate.vocab_file)), candidate.tokenizer_type)
        problems.append(f"{path}: is not the tokenizer of {directory}; restore it, or add --tokenizer-model")
    raise UserError("; ".join(dict.fromkeys(problems)))
