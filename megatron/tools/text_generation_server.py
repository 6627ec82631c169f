"""Megatron-LM's command line of the server, ``tools/run_text_generation_server.py``, for ``megatron serve``.

Flags of ``serve`` apply. The checkpoint has the model's settings and the tokenizer, and requests have the sampling:
other flags of Megatron-LM are listed and not used."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron.core.config import absent, cli
from megatron.core.config.errors import UserError
from megatron.tools.serve import build_parser
from megatron.training.arguments import flag_specs

RENAMED = {"--inference-max-requests": "--max-sequences", "--inference-max-batch-size": "--max-sequences"}
REQUESTS = frozenset({"--temperature", "--top-k", "--top-p", "--out-seq-length"})
PORT = "5000"
"""Default of Megatron-LM."""


def serve_arguments(argv: Sequence[str]) -> list[str]:
    """Return the command line of ``megatron serve``. Raises UserError for flags that neither program has."""
    segments, problems = cli.segments(argv)
    if problems:
        raise UserError("; ".join(map(str, problems)))
    accepted = {name for action in build_parser()._actions for name in action.option_strings}
    ignored = REQUESTS | set(cli.flag_table(flag_specs())) | set(absent.by_name())
    words, unused = ["--port", PORT], []
    for segment in segments:
        name = RENAMED.get(segment.name, segment.name)
        if name in accepted:
            words += [name, *segment.operands]
        elif name in ignored:
            unused.append(segment.typed)
        else:
            raise UserError(f"{segment.typed}: unknown flag; {cli.suggestion(name, accepted | ignored)}")
    if unused:
        sys.stderr.write(f"not used, because the checkpoint or each request has these settings: {' '.join(unused)}\n")
    return words
