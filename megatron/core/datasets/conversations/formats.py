"""Formats of JSON lines for fine-tuning, recognized by their keys, as messages for chat templates.

- messages: ``{"messages": [{"role", "content", "tool_calls", "reasoning_content", "weight"}], "tools": [...]}``
- ShareGPT: ``{"conversations": [{"from", "value"}], "system", "tools"}``
- Alpaca: ``{"instruction", "input", "output", "system", "history": [[question, answer]]}``
- prompt and completion, each a text or a list of messages
- plain text: ``{"text"}``"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from megatron.core.config.errors import UserError, listed

Message: TypeAlias = dict[str, Any]
Line: TypeAlias = Message
"""A JSON object."""


@dataclass(frozen=True)
class Conversation:
    """Messages of one conversation, in the form that chat templates read."""

    messages: Sequence[Message]
    tools: Sequence[Line] | None = None
    first_answer: int = 0
    """Index of the first message that may have a loss; after a prompt of messages, the completion."""


@dataclass(frozen=True)
class Text:
    """Text without a chat template. The loss covers ``completion`` and the end token."""

    completion: str
    prompt: str = ""


Item: TypeAlias = Conversation | Text


class Pair(NamedTuple):
    """Two completions of one prompt."""

    chosen: Item
    rejected: Item


@dataclass(frozen=True)
class Format:
    """``required`` and ``optional`` keys of a line; ``read`` maps it to its conversations."""

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    read: Callable[[Line], Iterator[Item]]


ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("chatgpt", "assistant", "model", "bot"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    **{name: name for name in ("system", "function_call")},
}
"""The value of ``from`` -> role. ``chat`` may be left out."""


def recognize(line: Line) -> Format:
    """Return the format of a line. Raises UserError if its keys fit none, or several."""
    formats = [form for form in FORMATS if all(key in line for key in form.required)]
    if len(formats) == 1:
        return formats[0]
    keys = listed(sorted(map(str, line)), most=8) or "no keys"
    choices = "; ".join(" with ".join(form.required) for form in FORMATS)
    if formats:
        names = " and ".join(form.name for form in formats)
        raise UserError(f"has the keys of several formats, {names} ({keys}); keep the keys of one")
    if {"chosen", "rejected"} <= line.keys():
        raise UserError("is a preference pair (chosen, rejected), which --sft does not read; give conversations")
    raise UserError(f"has no known keys (it has {keys}); a line has one of: {choices}")


def _messages(line: Line) -> Iterator[Conversation]:
    """A system message after others starts a further conversation, as in Megatron-LM."""
    messages, tools = checked_messages(line["messages"], "messages"), read_tools(line)
    starts = [index for index, message in enumerate(messages) if message["role"] == "system" and index]
    for start, stop in zip([0, *starts], [*starts, len(messages)]):
        yield Conversation(messages[start:stop], tools)


def _sharegpt(line: Line) -> Iterator[Conversation]:
    turns = line["conversations"]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise UserError("conversations: must be a list of objects with from and value")
    messages: list[object] = [] if not line.get("system") else [{"role": "system", "content": line["system"]}]
    for number, turn in enumerate(turns):
        if "from" not in turn or "value" not in turn:
            messages.append(turn)  # some files have role and content; the check names what is missing
            continue
        role = SHAREGPT_ROLES.get(str(turn["from"])) or SHAREGPT_ROLES.get(f"chat{turn['from']}")
        if role is None:
            choices = ", ".join(SHAREGPT_ROLES)
            raise UserError(f"conversations[{number}]: from is {turn['from']!r:.40}; it must be one of {choices}")
        if role == "function_call":
            call = _json(turn["value"], f"conversations[{number}]: value of a function_call")
            messages.append(
                {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
            )
        else:
            messages.append({"role": role, "content": turn["value"]})
    yield Conversation(checked_messages(messages, "conversations"), read_tools(line))


def _alpaca(line: Line) -> Iterator[Conversation]:
    for key in ("instruction", "input", "output", "system"):
        if not isinstance(line.get(key) or "", str):
            raise UserError(f"{key}: must be a text")
    history = line.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise UserError("history: must be a list of pairs of question and answer")
    pairs = [*history, ["\n".join(filter(None, (line["instruction"], line.get("input")))), line["output"]]]
    messages: list[object] = [{"role": "system", "content": line["system"]}] if line.get("system") else []
    for question, answer in pairs:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    yield Conversation(checked_messages(messages, "history"))


def _pair(line: Line) -> Iterator[Item]:
    prompt, completion = line["prompt"], line["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        yield Text(completion, prompt)
        return
    if not isinstance(prompt, list) or not isinstance(completion, list):
        raise UserError("prompt and completion: must be two texts or two lists of messages")
    messages = checked_messages([*prompt, *completion], "prompt and completion")
    yield Conversation(messages, read_tools(line), first_answer=len(prompt))


def _text(line: Line) -> Iterator[Text]:
    if not isinstance(line["text"], str):
        raise UserError("text: must be a text")
    yield Text(line["text"])


FORMATS = (
    Format("messages", ("messages",), ("tools",), _messages),
    Format("ShareGPT", ("conversations",), ("system", "tools"), _sharegpt),
    Format("Alpaca", ("instruction", "output"), ("input", "system", "history"), _alpaca),
    Format("prompt and completion", ("prompt", "completion"), ("tools",), _pair),
    Format("plain text", ("text",), (), _text),
)


def check_conversation(chat: Conversation) -> None:
    """Raise UserError for roles out of order, an answer without a user, or tool calls without tools."""
    before, has_user = "", False
    for number, message in enumerate(chat.messages):
        role = message["role"]
        where = f"messages[{number}]: roles out of order: {role} "
        if role == "assistant":
            if not has_user:
                raise UserError(f"messages[{number}]: an assistant message without a user message before it; add one")
            if before == "assistant":
                raise UserError(f"{where}follows assistant; join the two messages, or put the user's between them")
            if message.get("tool_calls") and not chat.tools:
                raise UserError(f"messages[{number}]: has tool_calls, but the line has no tools; add their list")
        elif role == "tool" and before not in ("assistant", "tool"):
            raise UserError(f"{where}follows {before or 'nothing'}; it must follow the assistant message that calls it")
        elif role in ("system", "developer") and number:
            raise UserError(f"{where}follows {before}; it must be the first message")
        before, has_user = role, has_user or role == "user"


def checked_messages(messages: object, name: str) -> list[Message]:
    """Return copies whose tool calls have parsed arguments. Raises UserError for another form."""
    if not isinstance(messages, list):
        raise UserError(f"{name}: must be a list of messages")
    return [_message(message, f"{name}[{number}]") for number, message in enumerate(messages)]


def _message(message: object, where: str) -> Message:
    if not isinstance(message, dict):
        raise UserError(f"{where}: must be an object with role and content")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise UserError(f"{where}: role is {role!r:.40}; it must be one of {', '.join(ROLES)}")
    if "weight" in message and (role != "assistant" or message["weight"] not in (0, 1)):
        raise UserError(f"{where}: weight is {message['weight']!r:.40}; it must be 0 or 1, in assistant messages")
    calls = message.get("tool_calls")
    if content is None and not (role == "assistant" and calls):
        raise UserError(f"{where}: has no content")
    if not isinstance(content, str | list | None):
        raise UserError(f"{where}: content must be a text or a list of parts")
    if calls:
        if role != "assistant" or not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise UserError(f"{where}: tool_calls must be a list of objects in an assistant message")
        message = {**message, "content": content or "", "tool_calls": [_parsed_call(call, where) for call in calls]}
    return {key: value for key, value in message.items() if value is not None and key != "weight"} | (
        {"weight": 0} if message.get("weight") == 0 else {}
    )


def _parsed_call(call: Line, where: str) -> Message:
    """Templates write arguments as JSON: a text would be written as a JSON string."""
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError(f"{where}: a tool call must have the name of a function")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _json(arguments, f"{where}: arguments of a tool call") if arguments.strip() else {}
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def read_tools(line: Line) -> list[Line] | None:
    """Return the tools of a line, a list or its JSON text; None without tools. Raises UserError for another form."""
    tools = line.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise UserError(f"tools: is no JSON: {error}") from None
    if tools and (not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools)):
        raise UserError("tools: must be a list of objects")
    return tools or None


def _json(text: str, name: str) -> Message:
    try:
        value = json.loads(text)
    except (TypeError, ValueError) as error:
        raise UserError(f"{name} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{name} must be a JSON object")
    return value
