"""Errors that the user can mend: one class, below every other module."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Result = TypeVar("Result")


class UserError(ValueError):
    """A flag, a file or an environment that the user can mend; the message is all there is to say.

    It names the flag or file, the value, the reason and the fix, and a program ends with it alone, without a
    traceback. Everything else is a bug of ours or of the user's own code and keeps its traceback.
    """

    elsewhere: bool = False
    """Another rank has the cause and says more about it."""
    reported: bool = False
    """The message has been written, by this process or by one that speaks for it."""


def counted(number: int, noun: str) -> str:
    """Such as "1 span" and "2 spans"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def all_of(calls: Iterable[Callable[[], Result]]) -> list[Result]:
    """The results of ``calls``, every one of which is made.

    Raises:
        UserError: what was wrong in any of them, each line once; of their own class where that is one.
    """
    results: list[Result] = []
    found: dict[str, UserError] = {}
    for call in calls:
        try:
            results.append(call())
        except UserError as error:
            found |= dict.fromkeys(str(error).splitlines(), error)
    if found:
        kinds = {type(error) for error in found.values()}
        raise (kinds.pop() if len(kinds) == 1 else UserError)("\n".join(found))
    return results


def listed(items: Iterable[Any], between: str = ", ", most: int = 20) -> str:
    """The first of ``items`` for a message, with an ellipsis where there are more."""
    found = list(map(str, items))
    return between.join(found[:most]) + (f"{between}…" if len(found) > most else "")
