"""Image parts of chat messages: data URLs, and files below an allowed folder. Torch-free."""

from __future__ import annotations

import os
import weakref
from base64 import b64decode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any
from urllib.parse import unquote, urlsplit

from megatron.core.config.errors import UserError
from megatron.core.datasets.image_files import Source
from megatron.core.inference.image_prompts import ImageLoader, Size
from megatron.core.inference.images import PromptImages
from megatron.core.inference.server.fields import RequestError, checked_type
from megatron.core.inference.server.service import Overloaded

MAX_BYTES = 2**32
"""Most bytes of the patches of all unfinished requests."""
FIELD = "messages.content.image_url"


class ImageParts:
    """Reads the images of requests. ``folder``: file URLs below it are read; None: no file is."""

    def __init__(self, loader: ImageLoader, folder: str | None = None) -> None:
        self.loader, self.folder = loader, None if folder is None else os.path.realpath(folder)
        self._lock, self._num_bytes = Lock(), 0

    def split(self, messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Source]]:
        """Return ``messages`` with parts that chat templates know, and the images in their order."""
        sources: list[Source] = []

        def part(value: dict[str, Any]) -> dict[str, Any]:
            if value["type"] != "image_url":
                return value
            sources.append(self._source(value.get("image_url")))
            return {"type": "image"}

        def content(value: object) -> object:
            return [part(item) for item in value] if isinstance(value, list) else value

        return [{**message, "content": content(message.get("content"))} for message in messages], sources

    def _source(self, value: object) -> Source:
        values = {"url": value} if isinstance(value, str) else checked_type(FIELD, value, dict)
        if values.get("detail") not in (None, "auto"):
            raise RequestError(f"{FIELD}.detail: is not supported; remove it, or send auto", "messages")
        url = checked_type(f"{FIELD}.url", values.get("url"), str)
        scheme, _, data = url.partition(":")
        if scheme.lower() == "data":
            return _decoded(data)
        if scheme.lower() != "file":
            raise RequestError(f"{FIELD}: {url[:60]!r} is not loaded; send a data URL with base64", "messages")
        return self._file(url)

    def _file(self, url: str) -> str:
        """Return the path of a file URL. Links out of the folder are rejected as other files outside of it."""
        if self.folder is None:
            raise RequestError(
                f"{FIELD}: file URLs are not allowed; send a data URL, or start the server with --allowed-image-folder",
                "messages",
            )
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise RequestError(f"{FIELD}: {url[:60]!r} is no URL ({error})", "messages") from error
        path = os.path.realpath(unquote(parts.path).replace("\0", ""))
        if parts.netloc not in ("", "localhost") or os.path.commonpath((path, self.folder)) != self.folder:
            raise RequestError(f"{FIELD}: {url[:200]!r} is not below --allowed-image-folder", "messages")
        return path

    def expanded(self, ids: Sequence[int], sources: Sequence[Source]) -> tuple[list[int], list[Size]]:
        """Return ``ids`` with all tokens of the images, and the sizes of these in patches. Raises RequestError."""
        with _rejected():
            sizes = self.loader.sizes(sources)
            return self.loader.expanded(ids, sizes), sizes

    def load(self, sources: Sequence[Source], sizes: Sequence[Size]) -> PromptImages | None:
        """Return the images; None without any. Raises RequestError, and Overloaded if the images of unfinished requests
        would have more than :data:`MAX_BYTES`."""
        if not sources:
            return None
        needed = sum(rows * columns for rows, columns in sizes) * self.loader.settings.blank((1, 1)).nbytes
        self._reserve(needed)
        try:
            with _rejected():
                images = self.loader.load(sources, sizes)
        except BaseException:
            self._reserve(-needed)
            raise
        weakref.finalize(images, self._reserve, -needed)
        return images

    def _reserve(self, num_bytes: int) -> None:
        with self._lock:
            if num_bytes > 0 and self._num_bytes + num_bytes > MAX_BYTES:
                raise Overloaded(f"the images of unfinished requests have {self._num_bytes} bytes: try again later")
            self._num_bytes += num_bytes


@contextmanager
def _rejected() -> Iterator[None]:
    """Turn a UserError into a RequestError of the messages."""
    try:
        yield
    except UserError as error:
        raise RequestError(str(error), "messages") from error


def _decoded(data: str) -> bytes:
    header, comma, text = data.partition(",")
    if not comma or not header.lower().endswith(";base64"):
        raise RequestError(f"{FIELD}: a data URL must be data:image/...;base64,...", "messages")
    try:
        return b64decode(text, validate=True)
    except ValueError as error:
        raise RequestError(f"{FIELD}: the data URL is not base64 ({error})", "messages") from error
