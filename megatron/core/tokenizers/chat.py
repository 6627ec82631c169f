"""Chat templates: a conversation as the text that a model was trained on, by the Jinja template of its tokenizer.

Templates see the variables, filters and tags that ``apply_chat_template`` of ``transformers`` gives them, and run in
Jinja's sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core.config.errors import UserError
from megatron.core.safe_files import MAX_TEXT_BYTES, read_file
from megatron.core.tokenizers.libraries import require

if TYPE_CHECKING:
    from jinja2 import Environment, Template

Message = Mapping[str, Any]
"""``role``, and ``content`` (a text or a list of parts), ``tool_calls`` or other keys that the template reads."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning; templates read the first, some the second."""
TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of the message to continue; the blank shows whether the template strips it."""
PROBE = "one text part"


@dataclass(frozen=True)
class ChatTemplates:
    """The templates of a tokenizer by name, and the texts of its special tokens."""

    templates: Mapping[str, str]
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Such as ``bos_token``: variables of the templates."""

    def source(self, has_tools: bool) -> str:
        """Return the template: ``tool_use`` if there is one and tools are given, else ``default``, else UserError."""
        for name in (["tool_use"] if has_tools else []) + ["default"]:
            if name in self.templates:
                return self.templates[name]
        raise UserError(f"the tokenizer has no default chat template; it has {', '.join(sorted(self.templates))}")

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Return the text of ``messages``, as ``apply_chat_template`` of ``transformers`` does. Lists of text parts are
        joined for templates that expect texts.

        Args:
            add_generation_prompt: add the beginning of the assistant's answer.
            continue_final_message: leave the last message open, without its end; excludes ``add_generation_prompt``.
            variables: further variables of the template, such as ``enable_thinking``.

        Raises:
            UserError: no message or template, exclusive options, or the template fails or rejects the messages."""
        if not messages:
            raise UserError("messages: must have at least one message")
        if "messages" in variables:
            raise UserError("messages: must not be a variable of the chat template")
        if continue_final_message and add_generation_prompt:
            raise UserError(
                "continue_final_message: must not be combined with add_generation_prompt; set that to false"
            )
        source = self.source(tools is not None)
        chat = [
            _with_reasoning({key: value for key, value in message.items() if value is not None}) for message in messages
        ]
        if any(isinstance(message.get("content"), list) for message in chat) and not self.takes_parts(source):
            chat = [_with_text(message) for message in chat]
        end = _mark_end(chat[-1]) if continue_final_message else None
        options = {"tools": tools, "documents": documents, "add_generation_prompt": add_generation_prompt}
        text = self._run(source, {"messages": chat, **options, **variables})
        return text if end is None else _cut(text, end)

    def takes_parts(self, source: str) -> bool:
        """Whether the template ``source`` writes the texts of a list of parts, not the list itself."""
        parts = [{"type": "text", "text": PROBE}]
        messages = [{"role": "user", "content": parts}]
        options = {"tools": None, "documents": None, "add_generation_prompt": True}
        try:
            text = self._run(source, {"messages": messages, **options})
        except UserError:
            return False
        return PROBE in text and not any(written in text for written in (repr(parts), json.dumps(parts)))

    def _run(self, source: str, variables: Mapping[str, Any]) -> str:
        try:
            return _compiled(source).render({**self.special_tokens, **variables})
        except UserError:
            raise
        except Exception as error:  # templates are programs: they fail in every way
            raise UserError(f"the tokenizer's chat template failed: {type(error).__name__}: {error!s:.200}") from error


def read_chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return {name: template} of a Hugging Face ``folder`` with the parsed tokenizer_config.json ``config``: its
    chat_template.jinja ("default") and additional_chat_templates/NAME.jinja, else the key ``chat_template`` (a text, or
    a list of named ones); empty without a template."""
    paths = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        paths["default"] = folder / "chat_template.jinja"
    if paths:
        return {name: read_file(path, MAX_TEXT_BYTES).decode() for name, path in paths.items()}
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
    else:
        named = value if isinstance(value, dict) else {"default": value}
    return {name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Under the names that templates read."""
    reasoning = next((message[name] for name in REASONING if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    texts = [text for text in parts if isinstance(text, str)]
    if len(texts) < len(parts):
        raise UserError("messages: this model's chat template takes only parts of type text")
    return {**message, "content": "".join(texts)}


def _mark_end(message: dict[str, Any]) -> str:
    """Append ``TAG`` to the text of ``message`` (in place; its list of parts is replaced); return that text."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + TAG
        return content
    parts = [dict(part) for part in content] if isinstance(content, list) else []
    last = next((part for part in reversed(parts) if "text" in part), None)
    if last is None:
        raise UserError("continue_final_message: the last message has no text to continue")
    text, last["text"], message["content"] = last["text"], last["text"] + TAG, parts
    return text


def _cut(text: str, end: str) -> str:
    """``end`` is the text of the last message."""
    place = text.rfind(TAG.strip())
    if place < 0 or end.strip() not in text:
        raise UserError("continue_final_message: the chat template changes or leaves out the last message")
    kept_blanks = text[place:].startswith(TAG)
    return text[:place] if kept_blanks else text[:place].rstrip()


@cache
def _compiled(source: str) -> Template:
    return _environment().from_string(source)


@cache
def _environment() -> Environment:
    """With the globals, filters and tags of ``transformers``."""
    jinja2, sandbox, ext = (require(name, "a chat template") for name in ("jinja2", "jinja2.sandbox", "jinja2.ext"))

    class Generation(ext.Extension):  # type: ignore[name-defined] # imported above
        """The tag ``{% generation %}`` around an assistant's answer: writes its body."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    class Namespace(jinja2.utils.Namespace):  # type: ignore[name-defined] # imported above
        """Without names that begin with an underscore, which lead to Python's internals."""

        def __init__(*args: Any, **values: Any) -> None:
            names = dict(*args[1:], **values)
            jinja2.utils.Namespace.__init__(args[0], {})
            for name, value in names.items():
                args[0][name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise sandbox.SecurityError(f"a namespace must not have the name {name!r}")
            super().__setitem__(name, value)

    def fail(message: str) -> None:
        raise UserError(f"the tokenizer's chat template rejects the messages: {message}")

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {
        "raise_exception": fail,
        "strftime_now": lambda pattern: datetime.now().strftime(pattern),
        "namespace": Namespace,
    }
    return environment
