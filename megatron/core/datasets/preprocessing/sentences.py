"""Sentence splitting for --split-sentences: NLTK's Punkt where its data is installed, else a rule.

The rule ends a sentence at ``.``, ``!``, ``?`` or ``…`` (and their closing quotes and brackets) before white space and
an upper-case letter, digit, quote or bracket, unless the word before the full stop is an initial or a usual
abbreviation; at the full-width stops of Chinese and Japanese; and at blank lines. It needs no data and knows no
language."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron.core.tokenizers.libraries import is_installed, require

if TYPE_CHECKING:
    from nltk.tokenize.punkt import PunktSentenceTokenizer

Splitter = Callable[[str], "list[str]"]

ABBREVIATIONS = {
    "mr", "mrs", "ms", "dr", "prof", "st", "jr", "sr", "vs", "etc", "e.g", "i.e", "fig", "eq", "vol", "pp", "inc",
    "ltd", "co", "corp", "dept", "est", "approx", "al", "cf", "resp", "jan", "feb", "mar", "apr", "jun", "jul", "aug",
    "sep", "sept", "oct", "nov", "dec",
}  # fmt: skip
_OPENING, _CLOSING = r"""["'“‘(\[]*""", r"""["'”’)\]]*"""
_CAPITAL = r"[A-Z\u00C0-\u00DE\u0391-\u03A9\u0410-\u042F0-9]"
_CANDIDATE = re.compile(rf"(?:[.!?…]+{_CLOSING}(?=\s+{_OPENING}{_CAPITAL})|[。！？][\"'”’」』）]*)\s*|\n\s*\n\s*")
_LAST_WORD = re.compile(r"([^\s(\[\"'“‘]+)$")


def make_splitter(lang: str, keep_newlines: bool) -> tuple[Splitter, str]:
    """Return (function from a text to its sentences, its name for the log): NLTK's Punkt for ``lang`` if installed,
    else the built-in rules. Sentences lack the white space around them; with ``keep_newlines`` each keeps the line ends
    that follow it. Never raises for a missing language."""
    punkt = _punkt(lang)
    if punkt is not None:
        spans: Callable[[str], list[tuple[int, int]]] = lambda text: list(punkt.span_tokenize(text))  # noqa: E731
        name = f"NLTK Punkt, {lang}"
    else:
        spans, name = rule_spans, "built-in rules (no NLTK Punkt data for this language found; see NLTK_DATA)"

    def split(text: str) -> list[str]:
        ranges = spans(text)
        if not keep_newlines:
            return [text[start:stop] for start, stop in ranges if start < stop]
        starts = [start for start, _ in ranges[1:]] + [len(text)]
        sentences = []
        for (start, stop), next_start in zip(ranges, starts):
            newlines = "".join(character for character in text[stop:next_start] if character == "\n")
            if start < stop:
                sentences.append(text[start:stop] + newlines)
        return sentences

    return split, name


def _punkt(lang: str) -> PunktSentenceTokenizer:
    """None if NLTK or the language's data is not installed."""
    if not is_installed("nltk"):
        return None
    punkt = require("nltk.tokenize.punkt", "--split-sentences")
    try:
        return punkt.PunktTokenizer(lang)
    except (LookupError, AttributeError, ValueError):  # no data, no such name; nltk before 3.9 has only pickled data
        return None


def rule_spans(text: str) -> list[tuple[int, int]]:
    """Return (start, end) of each sentence by the built-in rules, without the white space around it and never empty. A
    blank line always ends a sentence; a full stop after an abbreviation or initial does not."""
    spans, start = [], 0
    for match in _CANDIDATE.finditer(text):
        mark = match.group().rstrip()
        blank_line = match.group().count("\n") > 1
        if mark.startswith(".") and not blank_line and _is_abbreviation(text[start : match.start()]):
            continue
        spans.append((start, match.start() + len(mark)))
        start = match.end()
    spans.append((start, len(text)))
    trimmed = []
    for first, last in spans:
        piece = text[first:last]
        first += len(piece) - len(piece.lstrip())
        last -= len(piece) - len(piece.rstrip())
        if first < last:
            trimmed.append((first, last))
    return trimmed


def _is_abbreviation(before: str) -> bool:
    word = _LAST_WORD.search(before[-40:])
    if word is None:
        return False
    return (len(word[1]) == 1 and word[1].isupper()) or word[1].lower() in ABBREVIATIONS
