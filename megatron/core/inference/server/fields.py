"""Typed reading of a JSON request; every problem is a `RequestError` that names the field."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from megatron.core.config.errors import UserError
from megatron.core.inference.server.request_fields import Rules
from megatron.core.safe_files import parse_json

Value = TypeVar("Value")
KINDS = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


class RequestError(UserError):
    """A request that cannot be served: HTTP status, message, field (``param``) and code of OpenAI's error object."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, object]:
        """Return the JSON answer."""
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class Fields:
    """The fields of a JSON object; :meth:`finish` rejects fields that were not read."""

    def __init__(self, data: bytes) -> None:
        try:
            values = parse_json(data, unique=True)
        except ValueError as error:  # JSON and UTF-8 errors
            raise RequestError(f"the body must be JSON: {error!s:.200}") from error
        if not isinstance(values, dict):
            raise RequestError("the body must be a JSON object")
        self._values: dict[str, Any] = values
        self._read: set[str] = set()

    def raw(self, name: str) -> Any:
        """Return a field as it is; None if it is missing or null."""
        self._read.add(name)
        return self._values.get(name)

    def get(
        self, name: str, kind: type[Value], default: Value, low: float | None = None, high: float | None = None
    ) -> Value:
        """Return a field of type ``kind`` between ``low`` and ``high``; ``default`` if it is missing or null."""
        value = self.raw(name)
        if value is None:
            return default
        checked: Any = checked_type(name, value, kind)
        if (low is not None and checked < low) or (high is not None and checked > high):
            bounds = f"at least {low}" if high is None else f"between {low} and {high}"
            raise RequestError(f"{name} {checked}: must be {bounds}", name)
        return checked

    def optional(self, name: str, kind: type[Value], low: float = 0, high: float | None = None) -> Value | None:
        """Return a field of type ``kind``; None if it is missing or null."""
        if self.raw(name) is None:
            return None
        return self.get(name, kind, kind(), low, high) if kind in (int, float) else self.get(name, kind, kind())

    def finish(self, *rules: Rules) -> None:
        """Reject fields that were not read, except ignored ones and limited ones with a neutral value."""
        rules_by_name = {name: rule for table in rules for name, rule in table.items()}
        for name, value in self._values.items():
            rule = rules_by_name.get(name)
            if value is None or name in self._read or (rule is not None and rule.kind == "ignored"):
                continue
            if rule is None:
                raise RequestError(f"{name}: is not a field of this request; remove it", name)
            if not any(value == neutral and _is_bool(value) == _is_bool(neutral) for neutral in rule.neutral):
                values = " or ".join(json.dumps(neutral) for neutral in rule.neutral)
                raise RequestError(
                    f"{name}: is not supported; remove it" + (f", or send {values}" * bool(values)), name
                )


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)  # 1 == True in Python, not in JSON


def checked_type(name: str, value: object, kind: type[Value]) -> Value:
    """Return ``value`` as ``kind``. Integers are numbers; booleans are not integers."""
    if kind is float and type(value) is int and abs(value) < 2**63:
        value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise RequestError(f"{name}: must be {KINDS[kind]}", name)
    return value


def strings(name: str, value: object, at_most: int) -> list[str]:
    """Return a string, or list of strings, as a list without empty strings; empty for None."""
    if value is None:
        return []
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list):
        raise RequestError(f"{name}: must be a string or a list of strings", name)
    if len(entries) > at_most:
        raise RequestError(f"{name}: has {len(entries)} entries, at most {at_most} are allowed", name)
    return [text for entry in entries if (text := checked_type(name, entry, str))]
