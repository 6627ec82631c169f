"""Errors that the user can fix: one class, which every other module may import."""

import re
from collections.abc import Callable, Iterable
from typing import TypeVar

Result = TypeVar("Result")

EXIT_BAD_INPUT = 2
"""Exit code of every program after an error in its input: flags, files, data, checkpoints, environment."""
EXIT_FAILED = 1
"""Exit code after an error while running, such as a NaN loss; a bug, which shows a traceback, has it too."""


class UserError(ValueError):
    """Problem of a flag, a file or the environment that the user can fix. The message names it, the value, the reason
    and the fix; programs print it without a traceback. Every other exception is a bug and keeps its traceback."""

    elsewhere: bool = False
    """Another rank has the cause and says more about it."""
    reported: bool = False
    """The message has been written, by this process or by one that speaks for it."""
    exit_code: int = EXIT_BAD_INPUT
    """Exit code of a program that ends with this error."""

    def __str__(self) -> str:
        return printable(super().__str__())


def printable(text: str) -> str:
    """``text`` with escapes for control characters, except line ends and tabs, which change terminals."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in "\n\t" else character.encode("unicode_escape").decode()
        for character in text
    )


def folder_fix(name: str) -> str:
    """Return the fix for a folder that does not exist; ``name`` may be one of the Hugging Face hub."""
    if not re.fullmatch(r"[\w.-]*\w[\w.-]*/[\w.-]+", name):
        return "check the path"
    folder = name.partition("/")[2]
    return f"nothing is downloaded: run `hf download {name} --local-dir {folder}`, then give {folder} instead"


class MissingModule(UserError, ImportError):
    """Import of a Megatron-LM module that this library lacks: an ``ImportError``, so that programs may continue."""

    def __init__(self, module: str, reason: str) -> None:
        super().__init__(f"{module}: {reason}")


def counted(number: int, noun: str) -> str:
    """Such as "1 span" and "2 spans"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def call_all(calls: Iterable[Callable[[], Result]]) -> list[Result]:
    """Call all ``calls``, also after a UserError, and return their results. The UserError then has each line once, in
    the class of all problems if they have the same. Other errors propagate at once."""
    results: list[Result] = []
    messages: dict[str, UserError] = {}
    for call in calls:
        try:
            results.append(call())
        except UserError as error:
            messages |= dict.fromkeys(str(error).splitlines(), error)
    if messages:
        kinds = {type(error) for error in messages.values()}
        raise (kinds.pop() if len(kinds) == 1 else UserError)("\n".join(messages))
    return results


def listed(items: Iterable[object], between: str = ", ", most: int = 20) -> str:
    """The first of ``items`` for a message, with an ellipsis where there are more."""
    texts = list(map(str, items))
    return between.join(texts[:most]) + (f"{between}…" if len(texts) > most else "")
