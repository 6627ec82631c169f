"""The sidecar ``<prefix>.tokenizer.json`` of ``<prefix>.bin`` and ``.idx`` names the tokenizer of the ids.

Megatron-LM's readers ignore it; data sets made elsewhere have none. Training compares it with its own tokenizer, so
that ids of one vocabulary are never read as ids of another."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from megatron.core.config.errors import UserError
from megatron.core.safe_files import create_file, parse_json, read_text

FORMAT_VERSION = 1


class FingerprintedTokenizer(Protocol):
    """A tokenizer as the sidecar sees it."""

    tokenizer_type: str
    vocab_size: int
    special_ids: dict[str, int]

    @property
    def fingerprint(self) -> str: ...


@dataclass(frozen=True)
class SidecarInfo:
    """The content of a sidecar."""

    tokenizer_type: str
    fingerprint: str  # of the tokenizer: sha256 of files and options, "+", sha256 of ids
    vocab_size: int  # largest id + 1
    special_ids: Mapping[str, int] = field(default_factory=dict)
    append_eod: bool = False  # whether every document ends with the id special_ids["eod"]
    version: int = FORMAT_VERSION


def same_tokenizer(first: str, second: str) -> bool:
    """Whether two fingerprints name tokenizers with equal files, or with equal ids: programs rewrite tokenizer.json.
    Older records hold the sha256 of the files only."""
    return not set(first.split("+")).isdisjoint(second.split("+"))


def sidecar_path(prefix: str) -> str:
    """The sidecar of the data set ``prefix``.bin/.idx."""
    return f"{prefix}.tokenizer.json"


def sidecar_info(tokenizer: FingerprintedTokenizer, append_eod: bool) -> SidecarInfo:
    """The record of ``tokenizer``."""
    special_ids = dict(sorted(tokenizer.special_ids.items()))
    return SidecarInfo(tokenizer.tokenizer_type, tokenizer.fingerprint, tokenizer.vocab_size, special_ids, append_eod)


def write_sidecar(prefix: str, info: SidecarInfo) -> None:
    """Write the sidecar of ``prefix`` to a temporary file, sync it and rename it, replacing an older one."""
    path = sidecar_path(prefix)
    partial = f"{path}.partial-{os.getpid()}"
    with create_file(partial) as file:
        file.write(json.dumps(asdict(info), indent=2).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def read_sidecar(prefix: str) -> SidecarInfo | None:
    """Return None if there is none. Raises UserError, with the fix, if it is damaged or of another version."""
    path = sidecar_path(prefix)
    try:
        values: dict[str, Any] = parse_json(read_text(path))
        version = values["version"]
        if version != FORMAT_VERSION:
            raise ValueError(f"it has format version {version!r:.40}, this program reads {FORMAT_VERSION}")
        return _checked(SidecarInfo(**{key: values[key] for key in SidecarInfo.__dataclass_fields__}))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read as a tokenizer sidecar ({error}); run tools/preprocess_data.py again, or remove "
            "the file to train without the check"
        ) from error


def _checked(info: SidecarInfo) -> SidecarInfo:
    """Raises ValueError if a value has another type than the writer's."""
    texts = isinstance(info.tokenizer_type, str) and isinstance(info.fingerprint, str)
    if not texts or type(info.vocab_size) is not int or not isinstance(info.append_eod, bool):
        raise ValueError("a value has another type than the writer's")
    ids = info.special_ids
    if not isinstance(ids, dict) or not all(type(index) is int for index in ids.values()):
        raise ValueError("special_ids is not a table of ids")
    return info


def check_sidecar(prefix: str, tokenizer: FingerprintedTokenizer) -> SidecarInfo | None:
    """Return the sidecar of ``prefix`` if it names the same tokenizer; None, without a warning, if it does
    not exist. Raises UserError if the data set was made with another tokenizer, or if the sidecar is damaged."""
    info = read_sidecar(prefix)
    if info is None or same_tokenizer(info.fingerprint, tokenizer.fingerprint):
        return info
    raise UserError(
        f"{prefix} was made with another tokenizer: {info.tokenizer_type} with {info.vocab_size} ids, sha256 "
        f"{info.fingerprint[:12]}; the flags give {tokenizer.tokenizer_type} with {tokenizer.vocab_size} ids, sha256 "
        f"{tokenizer.fingerprint[:12]}. Give the tokenizer flags that made the data, or preprocess it again; if the "
        f"two are known to agree, remove {sidecar_path(prefix)} to train without the check"
    )
