"""Chat templates: a conversation as the text that a model was trained on, by the Jinja template of its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.config.errors import UserError
from megatron.core.safe_files import MAX_TEXT_BYTES, read_file
from megatron.core.tokenizers.libraries import require

Message = Mapping[str, Any]
"""``role`` (system, user, assistant) and ``content``."""


def read_chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the template of a Hugging Face ``folder`` with the parsed tokenizer_config.json ``config``: its
    chat_template.jinja, or the key ``chat_template`` (a text, or a list of named ones with "default"). None: it has
    no template."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return read_file(path, MAX_TEXT_BYTES).decode()
    found = config.get("chat_template")
    if isinstance(found, list):
        found = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}.get("default")
    return found if isinstance(found, str) else None


def render_chat(template: str, messages: Sequence[Message], special_tokens: Mapping[str, str | None]) -> str:
    """Return the text of ``messages``, with the beginning of the assistant's answer. ``special_tokens``: text of the
    tokens that templates may use, such as ``bos_token``. Templates run in Jinja's sandbox; UserError if one fails."""
    sandbox = require("jinja2.sandbox", "--chat")

    def fail(message: str) -> None:
        raise UserError(f"the tokenizer's chat template rejects the messages: {message}")

    environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda x, indent=None: json.dumps(x, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = fail
    try:
        return environment.from_string(template).render(
            messages=list(messages), add_generation_prompt=True, **special_tokens
        )
    except UserError:
        raise
    except Exception as error:  # templates are programs: they fail in every way
        raise UserError(f"the tokenizer's chat template failed: {type(error).__name__}: {error!s:.200}") from error
