"""Conversations with images: where the images are, and how many tokens they take.

- messages: parts ``{"type": "image", "image": PATH}`` (also ``url``, ``path``, or ``image_url``) of a content
- ShareGPT (LLaVA): ``"image": PATH`` or a list, at the marks ``<image>`` in the values

Paths are relative to the folder of the file. Token ids follow the chat template; each id of an image is repeated as
often as the image has squares of patches."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

import numpy as np

from megatron.core.config.errors import UserError, counted
from megatron.core.datasets.conversations.formats import Conversation, Item, Line
from megatron.core.datasets.conversations.masks import Tokens
from megatron.core.datasets.conversations.prepare import CONVERSATIONS, Reader, Report
from megatron.core.datasets.image_files import ImageError
from megatron.core.datasets.images import Images
from megatron.core.tokenizers.base import Tokenizer

MARK = "<image>"


class ImageReader:
    """Reads lines of conversations with images.

    Args:
        images: how images become patches.
        token: id of an image token.
        folder: where relative paths begin.
        skips: leave out conversations with unreadable images, and count them, in place of an error."""

    def __init__(self, images: Images, token: int, folder: str, skips: bool) -> None:
        self.images, self.token, self.folder, self.skips = images, token, folder, skips

    @property
    def reader(self) -> Reader:
        """This reader as a kind of file."""
        return Reader(f"images-{self.images.name}-{self.token}-{int(self.skips)}", self.read, self.sequences)

    def read(self, line: Line, report: Report, number: int) -> Iterator[Item]:
        """Yield the conversations of a line; the marks of ShareGPT values become parts of contents."""
        for item in CONVERSATIONS.read(with_parts(line), report, number):
            yield as_image_part(item)

    def sequences(self, tokenizer: Tokenizer, item: Item, report: Report, number: int) -> list[Tokens]:
        """Return the sequences of a conversation; each id of an image is repeated for its squares."""
        paths = item_paths(item)
        if not paths:
            return CONVERSATIONS.sequences(tokenizer, item, report, number)
        assert isinstance(item, Conversation)
        check_texts(item, tokenizer.detokenize([self.token]))
        try:
            squares = [self.images.tokens(self.size(path)) for path in paths]
        except UserError:
            if not self.skips:
                raise
            report.count("unreadable_image", number)
            return []
        counts = np.array([rows * columns for rows, columns in squares])
        sequences = CONVERSATIONS.sequences(tokenizer, item, report, number)
        most = max((int((tokens.ids == self.token).sum()) for tokens in sequences), default=len(paths))
        if most < (needed := len(item_paths(_until_last_answer(item)))):
            self._raise_other_number(most, needed)
        return [self._repeated(tokens, counts) for tokens in sequences]

    def size(self, path: str) -> tuple[int, int]:
        """Return the height and width of an image, in patches. Raises UserError with its path."""
        try:
            return self.images.file_size(self.place(path))
        except ImageError as error:
            raise UserError(f"image {path}: {error}") from error

    def place(self, path: str) -> str:
        """Return the path of the file ``path`` of a line."""
        return os.path.join(self.folder, path)

    def _repeated(self, tokens: Tokens, counts: np.ndarray) -> Tokens:
        places = np.flatnonzero(tokens.ids == self.token)
        if len(places) > len(counts):
            self._raise_other_number(len(places), len(counts))
        repeats = np.ones(len(tokens.ids), dtype=np.int64)
        repeats[places] = counts[: len(places)]  # a sequence that ends before the last answer has the first images
        trained = tokens.trained & (tokens.ids != self.token)
        return Tokens(tokens.ids.repeat(repeats), trained.repeat(repeats))

    def _raise_other_number(self, tokens: int, images: int) -> NoReturn:
        raise UserError(
            f"the chat template writes {counted(tokens, 'image token')} for {counted(images, 'image')}; "
            "check --image-token-id and --chat-template"
        )


def _until_last_answer(item: Conversation) -> Conversation:
    """Return the messages before the last answer with a loss: later images are in no sequence."""
    answers = [
        index
        for index, message in enumerate(item.messages)
        if message["role"] == "assistant" and message.get("weight") != 0
    ]
    return replace(item, messages=item.messages[: max(answers, default=0)])


def with_parts(line: Line) -> Line:
    """Return ``line`` without the key image or images, its marks replaced by parts of contents."""
    paths = line.get("image", line.get("images"))
    if paths is None or not isinstance(turns := line.get("conversations"), list):
        return line
    remaining = iter([paths] if isinstance(paths, str) else paths)
    parts = [_turn(turn, remaining) for turn in turns]
    if next(remaining, None) is not None:
        raise UserError(f"has fewer marks {MARK} than images; put a mark at the place of each image")
    return {key: value for key, value in line.items() if key not in ("image", "images")} | {"conversations": parts}


def _turn(turn: object, paths: Iterator[object]) -> object:
    if not isinstance(turn, dict) or not isinstance(value := turn.get("value"), str) or MARK not in value:
        return turn
    parts: list[dict[str, str]] = []
    for piece in re.split(f"({MARK})", value):
        if piece == MARK:
            path = next(paths, None)
            if not isinstance(path, str):
                raise UserError(f"has more marks {MARK} than images, or an image without a path")
            parts.append({"type": "image", "image": path})
        elif piece.strip():
            parts.append({"type": "text", "text": piece.strip()})
    return {**turn, "value": parts}


def item_paths(item: Item) -> list[str]:
    """Return the paths of the images of a conversation, in order. Raises UserError for an image without a path, and for
    a video."""
    if not isinstance(item, Conversation):
        return []
    contents = (message.get("content") for message in item.messages)
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    if any(part.get("type") in ("video", "video_url") for part in parts):
        raise UserError("has a video, which is not supported; give some of its frames as images")
    return [_path(part) for part in parts if part.get("type") in ("image", "image_url")]


def _path(part: Mapping[str, object]) -> str:
    value = next((part[key] for key in ("image", "path", "url", "image_url") if part.get(key)), None)
    value = value.get("url") if isinstance(value, dict) else value
    if not isinstance(value, str):
        raise UserError("an image part has no path; give it as image")
    if "://" in value.removeprefix("file://") or value.startswith("data:"):
        raise UserError(f"image {value[:60]}: is no file; download it, and give its path")
    return value.removeprefix("file://")


def check_texts(item: Conversation, token: str) -> None:
    """Raise UserError if a text writes the image token itself, which would take the place of an image."""
    for number, message in enumerate(item.messages):
        content = message.get("content")
        texts = [part.get("text") for part in content] if isinstance(content, list) else [content]
        if any(token in text for text in texts if isinstance(text, str)):
            raise UserError(f"messages[{number}]: the text has the image token {token}; remove it")


def as_image_part(item: Item) -> Item:
    """Return the conversation with parts of the type image_url as parts of the type image, which templates know."""
    if not isinstance(item, Conversation):
        return item
    messages: Sequence[Line] = [
        {**message, "content": [_as_image(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in item.messages
    ]
    return replace(item, messages=messages)


def _as_image(part: object) -> object:
    if isinstance(part, dict) and part.get("type") == "image_url":
        return {"type": "image", "image": _path(part)}
    return part
