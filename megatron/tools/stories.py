"""Short stories from a grammar (``stories.txt``): text that a small model learns in minutes, without a download."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files

SLOT = re.compile(r"\{(\w+)\}")
PRONOUNS = {
    "girl": {"she": "she", "her": "her", "them": "her", "self": "herself"},
    "boy": {"she": "he", "her": "his", "them": "him", "self": "himself"},
}
"""Child -> slot -> pronoun: subject, possessive, object, reflexive."""

Plot = list[list[str]]
"""Alternatives of each part of a story, in order."""


@cache
def grammar() -> tuple[dict[str, list[str]], list[Plot]]:
    """Return the values of each slot, and the plots."""
    slots: dict[str, list[str]] = {}
    plots: list[Plot] = []
    text = files("megatron.tools").joinpath("stories.txt").read_text(encoding="utf-8")
    for line in text.splitlines():
        if line.startswith("plot "):
            plots.append([])
        elif plots and line:
            plots[-1].append(line.split(" | "))
        elif line and not line.startswith("#"):
            name, _, values = line.partition(": ")
            slots[name] = values.split(" | ")
    return slots, plots


def story(rng: random.Random) -> str:
    """Return one story. Draws every slot, the plot, and an alternative of each part from ``rng``."""
    slots, plots = grammar()
    values = {name: rng.choice(choices) for name, choices in slots.items()}
    child = rng.choice(sorted(PRONOUNS))
    values |= {"hero": values[child], "child": child, **PRONOUNS[child]}
    sentences = [rng.choice(alternatives) for alternatives in rng.choice(plots)]
    return SLOT.sub(lambda slot: _filled(slot[1], values), " ".join(sentences))


def _filled(slot: str, values: dict[str, str]) -> str:
    """With a capital first letter if the name of the slot has one."""
    return values[slot] if slot in values else values[slot.lower()].capitalize()


def stories(seed: int) -> Iterator[dict[str, str]]:
    """Yield stories without end as {"text", "path"}, the same for every ``seed`` on every machine."""
    rng, number = random.Random(seed), 0
    while True:
        yield {"text": story(rng), "path": f"story:{number}"}
        number += 1
