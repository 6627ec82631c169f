"""Tokens that the files next to a tokenizer.json add to its vocabulary, as ``AutoTokenizer`` of ``transformers`` does.

In this order: ``added_tokens_decoder`` of tokenizer_config.json by id (without that key added_tokens.json, and the
roles of special_tokens_map.json), tokens with a role (``eos_token``), other special tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core.config.errors import UserError
from megatron.core.tokenizers.libraries import require

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as HFTokenizer

CONFIG, ROLES_FILE, ADDED_FILE = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
ROLES = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
EXTRA = ("extra_special_tokens", "additional_special_tokens")
SPECIFIC = "model_specific_special_tokens"
"""Tokens by any name, as transformers 5 writes them; it reads them only without texts of keys such as image_token."""


@dataclass
class FolderTokens:
    """Tokens that the files of a folder name."""

    by_id: dict[int, AddedToken] = field(default_factory=dict)
    """Tokens with an id."""
    roles: dict[str, AddedToken | str] = field(default_factory=dict)
    """Tokens by key, such as ``eos_token``; keys of models, such as ``image_token``, follow."""
    extra: list[AddedToken | str] = field(default_factory=list)
    """Further special tokens."""


def read_folder_tokens(folder: Path, read: Callable[[Path], dict[str, Any]]) -> FolderTokens:
    """Return the tokens that the files of ``folder`` name. ``read`` returns a JSON object, empty for a missing file.
    Raises UserError, with the file and key, for a value that is no token."""
    settings, path = dict(read(folder / CONFIG)), folder / CONFIG
    tokens = FolderTokens()
    texts = [key for key, value in settings.items() if _is_specific(key) and isinstance(value, str)]
    specific = {key: settings.pop(key) for key in texts} or settings.get(SPECIFIC) or {}
    if not isinstance(specific, dict):
        raise UserError(f"{path}: {SPECIFIC} is {specific!r:.80}; it must be a table of tokens by name")
    extra, other = (settings.get(key) for key in EXTRA)
    if not extra and other is not None:
        extra, other = other, None
    if isinstance(extra, dict):
        specific, extra = ({**specific, **extra} if texts or not extra else extra), None
    if "added_tokens_decoder" in settings:
        entries = settings["added_tokens_decoder"]
        tokens.by_id = {_id(index, path): _token(value, path, index) for index, value in _items(entries, path)}
    else:
        path = folder / ROLES_FILE
        roles = read(path)
        extra, other = extra or roles.get(EXTRA[0], extra), roles.get(EXTRA[1]) or other
        settings = {**settings, **roles}
    keys = [*ROLES, *filter(_is_specific, settings)]
    named = {key: settings[key] for key in keys if isinstance(settings.get(key), str | dict)} | specific
    if wrong := [key for key in ROLES if not isinstance(settings.get(key), str | dict | None)]:
        raise UserError(f"{path}: {wrong[0]} is {settings[wrong[0]]!r:.80}; it must be a token")
    extra = (other or []) if extra is None else extra
    if not isinstance(extra, list):
        raise UserError(f"{path}: {EXTRA[0]} is {extra!r:.80}; it must be a list of tokens")
    tokens.roles = {key: _text_or_token(value, path, key) for key, value in named.items()}
    tokens.extra = [_text_or_token(value, path, EXTRA[0]) for value in extra]
    if "added_tokens_decoder" not in settings:
        common = [token for key, token in tokens.roles.items() if key in ROLES]
        special = {token_text(token) for token in (*common, *tokens.extra)}
        library, path = _library(), folder / ADDED_FILE
        for text, index in read(path).items():
            is_special = _token(text, path, text).content in special
            added = library.AddedToken(text, normalized=not is_special, special=is_special)
            tokens.by_id[_id(index, path)] = added
    return tokens


def _is_specific(key: str) -> bool:
    return key.endswith("_token") and key not in ROLES


def add_folder_tokens(backend: HFTokenizer, tokens: FolderTokens, where: Path) -> None:
    """Add ``tokens`` to ``backend``, in place. Raises UserError, naming ``where``, if a token does not get its id."""
    added = [tokens.by_id[index] for index in sorted(tokens.by_id)]
    existing = {token_text(token) for token in (*backend.get_added_tokens_decoder().values(), *added)}
    named = {token_text(token) for token in tokens.roles.values()}
    values: list[AddedToken | str] = [*added]
    for token in (*tokens.roles.values(), *tokens.extra):
        if (
            token_text(token) not in existing and token not in values
        ):  # a text with other fields replaces an earlier one
            values.append(token)
    added = [_token(value, where, "") if isinstance(value, str) else value for value in values]
    for token in added:
        token.special = token.special or token.content in named
    backend.add_tokens(added)
    for index, token in sorted(tokens.by_id.items()):
        if (actual := backend.token_to_id(token.content)) != index:
            raise UserError(
                f"{where}: the added token {token.content!r:.80} claims id {index}, which is not the id it gets "
                f"({actual}); repair added_tokens_decoder or {ADDED_FILE} next to it"
            )


def token_text(token: AddedToken | str) -> str:
    """Return the text of a token, which may be given as such."""
    return token if isinstance(token, str) else token.content


def describe_added(backend: HFTokenizer) -> dict[int, dict[str, Any]]:
    """Return {id: fields} of the added tokens of ``backend``."""
    return {index: token.__getstate__() for index, token in backend.get_added_tokens_decoder().items()}


def _library() -> Any:
    return require("tokenizers", "--tokenizer-type HuggingFaceTokenizer")


def _items(value: object, path: Path) -> Any:
    if not isinstance(value, dict):
        raise UserError(f"{path}: added_tokens_decoder is {value!r:.80}; it must be a table of tokens by id")
    return value.items()


def _id(index: object, path: Path) -> int:
    text = str(index)
    if isinstance(index, bool) or not (text.isascii() and text.isdigit()):
        raise UserError(f"{path}: the id {index!r:.80} of an added token is not a number")
    return int(text)


def _text_or_token(value: object, path: Path, key: object) -> AddedToken | str:
    token = _token(value, path, key)
    return value if isinstance(value, str) else token


def _token(value: object, path: Path, key: object) -> AddedToken:
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str) or not text or text != text.encode(errors="replace").decode():
        raise UserError(f"{path}: {key} is {value!r:.80}; it must be a token")
    fields = {name: value[name] for name in FLAGS if name in value} if isinstance(value, dict) else {}
    if not all(isinstance(flag, bool) for flag in fields.values()):
        raise UserError(f"{path}: {key} is {value!r:.80}; {', '.join(FLAGS)} must be true or false")
    # transformers reads only the special tokens of the legacy file as such
    default = not isinstance(value, dict) or path.name == ROLES_FILE
    return _library().AddedToken(text, **{"special": default, **fields})
