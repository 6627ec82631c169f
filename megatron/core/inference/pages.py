"""Pages of the key/value cache: allocation, references, and reuse of equal prefixes. Torch-free.

A sequence owns a list of pages of ``page_size`` tokens. Full pages are published under a hash chain of their tokens
(BLAKE2b of the previous page's key and the token ids), so that another sequence with the same beginning takes a
reference instead of computing. Token ids are compared as well. Pages without references keep their content until they
are allocated again, least recently released first."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

FIRST = b""
"""Key before the first page."""


def page_key(previous: bytes, tokens: Sequence[int]) -> bytes:
    """Return the key of a full page with ``tokens`` after the page with the key ``previous``."""
    return blake2b(previous + array("q", tokens).tobytes(), digest_size=16).digest()


class PagePool:
    """Pages 1 to ``num_pages`` - 1; page 0 is reserved for padding rows."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_pages))
        """Pages without references, in the order of reuse."""
        self._references = [0] * num_pages
        self._pages: dict[bytes, int] = {}
        self._contents: dict[int, tuple[bytes, bytes, tuple[int, ...]]] = {}
        """Published page -> (its key, the previous key, its tokens)."""

    @property
    def num_usable(self) -> int:
        """Number of pages that sequences may hold."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """Number of pages without references."""
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages of ``num_tokens`` tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self) -> int | None:
        """Return a page with one reference, whose old content is lost; None if every page is referenced."""
        if not self._free:
            return None
        page, _ = self._free.popitem(last=False)
        if page in self._contents:
            del self._pages[self._contents.pop(page)[0]]
        self._references[page] = 1
        return page

    def release(self, pages: Sequence[int]) -> None:
        """Drop one reference of each of the consecutive ``pages`` of a sequence. Its last page is reused first, because
        a prefix is useless without the pages before it; unpublished pages are reused before all published ones."""
        for page in reversed(pages):
            assert self._references[page] > 0, "released twice"
            self._references[page] -= 1
            if not self._references[page]:
                self._free[page] = None
                self._free.move_to_end(page, last=page in self._contents)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Return the published pages of the longest prefix of ``tokens`` in full pages, with one more reference each.
        At least one token is left to compute."""
        pages, previous = [], FIRST
        for start in range(0, len(tokens) - self.page_size, self.page_size):
            ids = tuple(tokens[start : start + self.page_size])
            key = page_key(previous, ids)
            page = self._pages.get(key)
            if page is None or self._contents[page][1:] != (previous, ids):
                break
            if not self._references[page]:
                del self._free[page]
            self._references[page] += 1
            pages.append(page)
            previous = key
        return pages

    def unpublish(self) -> None:
        """Forget the contents of all pages."""
        self._pages.clear()
        self._contents.clear()

    def withdraw(self, keys: Sequence[bytes]) -> None:
        """Forget the contents of the pages published under ``keys``; sequences that hold these pages keep them."""
        for key in keys:
            page = self._pages.pop(key, None)
            if page is not None:
                del self._contents[page]

    def stored_key(self, page: int) -> bytes:
        """Return the key of a published page."""
        return self._contents[page][0]

    def publish(self, page: int, previous: bytes, tokens: Sequence[int]) -> bytes:
        """Make the full ``page`` available to other sequences unless an equal one is; return its key."""
        key = page_key(previous, tokens)
        if key not in self._pages and page not in self._contents:
            self._pages[key], self._contents[page] = page, (key, previous, tuple(tokens))
        return key
