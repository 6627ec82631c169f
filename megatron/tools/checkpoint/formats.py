"""Checkpoint formats of the tools in this package: format detection, opening, common flags and progress output."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.core.config.commands import tool_parser
from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.files import read_regular_file
from megatron.core.dist_checkpointing.manifest import FORMAT, MANIFEST, MAX_MANIFEST_BYTES
from megatron.core.dist_checkpointing.reader import CheckpointReader
from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.export.files import HIDDEN, tensor_bytes
from megatron.export.hf import load_hf
from megatron.export.interchange import Interchange
from megatron.export.megatron_lm import load_megatron_torch, load_megatron_torch_dist
from megatron.export.native import load_native, load_safetensors
from megatron.training.checkpoint.files import find_checkpoint

LOADERS = ("hf", "megatron_torch", "megatron_torch_dist", "native", "safetensors")
SAVERS = ("hf", "megatron_torch_dist", "native", "safetensors")
LOADER_ALIASES = {"core": "auto", "mcore": "auto", "megatron": "auto", "mixtral_hf": "hf", "llama_mistral": "hf"}
SAVER_ALIASES = {"core": "native", "mcore": "native", "megatron": "native"}


def parser(description: str | None) -> argparse.ArgumentParser:
    """Build a parser with the input flags that all tools share: --loader and --ckpt-step."""
    arguments = tool_parser(description)
    choices = (*LOADERS, "auto", *LOADER_ALIASES)
    help_text = f"format of the input: {', '.join(LOADERS)}; default: detected from the folder"
    arguments.add_argument("--loader", default="auto", choices=choices, metavar="FORMAT", help=help_text)
    arguments.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to read; default: the latest")
    return arguments


def detect_format(folder: Path) -> str:
    """Return the checkpoint format (one of ``LOADERS``) of a folder or file from the files present, in ``folder`` or in
    its ``iter_…`` and ``release`` folders, before the folder's own config.json or safetensors. Raises CheckpointError
    if it does not exist, is an unfinished conversion or PEFT's, or matches no format."""
    if folder.name.endswith(HIDDEN) and folder.name.startswith("."):
        raise CheckpointError(f"{folder}: an unfinished conversion; repeat its command to complete it")
    if not os.path.lexists(folder):
        raise CheckpointError(f"{folder}: there is no such folder")
    if folder.is_file() and folder.suffix == ".safetensors":
        return "safetensors"
    inner = [folder, *sorted(path for path in folder.glob("*") if path.name.startswith(("iter_", "release")))]
    for candidate in reversed(inner):
        manifest = candidate / MANIFEST
        if manifest.is_file() and FORMAT.encode() in read_regular_file(manifest, MAX_MANIFEST_BYTES, follow=True):
            return "native"
        if (candidate / ".metadata").is_file():
            return "megatron_torch_dist"
        if any(candidate.glob("mp_rank_*")):
            return "megatron_torch"
    if (folder / "config.json").is_file():
        return "hf"
    if (folder / "adapter_config.json").is_file():
        raise CheckpointError(f"{folder}: contains adapters of PEFT only; import them with megatron lora import")
    if any(folder.glob("*.safetensors")):
        return "safetensors"
    if len(inner) > 1:  # a --save folder without a complete checkpoint: the native loader reports the reason
        return "native"
    raise CheckpointError(f"{folder}: matches none of the formats {', '.join(LOADERS)}; give --loader FORMAT")


def open_checkpoint(
    folder: str,
    loader: str,
    step: int | None = None,
    *,
    padded_vocabulary: bool = False,
    model_family: str | None = None,
) -> tuple[str, Interchange]:
    """Open a checkpoint; return its format and its contents, whose tensors are read lazily. ``padded_vocabulary`` keeps
    the padding rows of a Megatron-LM vocabulary; ``model_family`` reads a HF folder that several families read. Raises
    CheckpointError for an unknown format, or ``step`` for one without iterations."""
    path, loader = Path(folder), LOADER_ALIASES.get(loader, loader)
    loader = detect_format(path) if loader == "auto" else loader
    if not os.path.lexists(path):
        raise CheckpointError(f"{folder}: there is no such folder")
    if loader == "native":
        return loader, load_native(native_folder(path, step))
    if loader in ("megatron_torch", "megatron_torch_dist"):
        load = load_megatron_torch if loader == "megatron_torch" else load_megatron_torch_dist
        return loader, load(folder, step, padded_vocabulary=padded_vocabulary)
    if step is not None:
        raise CheckpointError(f"--ckpt-step {step}: a folder of format {loader} holds only one state")
    return loader, load_hf(folder, model_family) if loader == "hf" else load_safetensors(path)


def check_copied_files(folder: str, step: int | None) -> None:
    """Raise CheckpointDamagedError if a copied tokenizer file is missing or has another CRC-32."""
    if damaged := CheckpointReader(native_folder(Path(folder), step)).verify_assets():
        raise CheckpointDamagedError("\n".join(damaged))


def native_folder(path: Path, step: int | None) -> Path:
    """Return the directory of iteration ``step`` (None: latest) in a --save folder, or ``path`` if it is a checkpoint.
    Raises CheckpointError: there is no such checkpoint."""
    if (path / MANIFEST).is_file() and step is None:
        return path
    checkpoint = find_checkpoint(path, step)
    if checkpoint is None:
        raise CheckpointError(f"{path}: holds no checkpoint; give the --save folder of a run")
    return Path(checkpoint.directory)


def total_bytes(tensors: dict[str, LazyTensor]) -> int:
    """Return the total size of all tensors in bytes."""
    return sum(map(tensor_bytes, tensors.values()))


def stamp(folder: str) -> list[list[object]]:
    """Return [path, size, mtime in ns] of every file, to detect whether a folder has changed."""
    path = Path(folder)
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]


class CopyProgress:
    """Progress on stderr with rate and remaining time: a bar on a terminal, else one line every ten seconds."""

    def __init__(self, verb: str, total: int) -> None:
        self.verb, self.total, self.copied, self.skipped = verb, max(total, 1), 0, 0
        self.start = time.monotonic()
        self.last = self.start if sys.stderr.isatty() else self.start + 5
        self.counted: set[str] = set()

    def skip(self, count: int) -> None:
        """Count ``count`` bytes as done by an earlier attempt; they do not contribute to the rate."""
        self.skipped = min(count, self.total)

    def count(self, name: str, size: int) -> None:
        """Count a name once. Refreshes the display at intervals: 0.2 s on a terminal, else 10 s."""
        if name in self.counted:
            return
        self.counted.add(name)
        self.copied += size
        now = time.monotonic()
        if now - self.last >= (0.2 if sys.stderr.isatty() else 10):
            self.last = now
            self._show(now)

    def _show(self, now: float) -> None:
        """Over the same line on a terminal, else as a new line."""
        completed, seconds = min(self.copied + self.skipped, self.total), now - self.start
        rate, share = self.copied / seconds, completed / self.total
        left = int((self.total - completed) / rate) if rate else 0
        bar = "#" * int(30 * share)
        text = (
            f"{self.verb} [{bar:30}] {share:4.0%} {completed / 1e9:.2f}/{self.total / 1e9:.2f} GB "
            f"{rate / 1e6:.0f} MB/s time left {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"
        )
        print(f"\r{text}", end="", file=sys.stderr, flush=True) if sys.stderr.isatty() else say(text)

    def finish(self) -> None:
        """Clear the bar and print the total size, time and rate."""
        if sys.stderr.isatty():
            print("\r" + " " * 118 + "\r", end="", file=sys.stderr)
        seconds = max(time.monotonic() - self.start, 1e-3)
        rate = f"{self.copied / 1e9:.3f} GB in {seconds:.1f} s, {self.copied / seconds / 1e9:.2f} GB/s"
        reused = f"; {self.skipped / 1e9:.3f} GB were complete already" if self.skipped else ""
        say(f"{self.verb} {rate}{reused}")

    def watch(self, tensors: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
        """Wrap ``tensors`` so that every read (full tensor or range of rows) is counted."""
        return {name: self._counted(name, tensor) for name, tensor in tensors.items()}

    def _counted(self, name: str, tensor: LazyTensor) -> LazyTensor:
        def read() -> Any:
            values = tensor.read()
            self.count(name, tensor_bytes(tensor))
            return values

        def rows(start: int, stop: int) -> Any:
            self.count(f"{name} {start}", tensor_bytes(tensor) * (stop - start) // max(tensor.shape[0], 1))
            return tensor.rows(start, stop)

        return dataclasses.replace(tensor, read=read, read_rows=rows if tensor.read_rows else None)


def say(text: str) -> None:
    """Print a message to stderr; stdout is reserved for results."""
    print(text, file=sys.stderr, flush=True)


def as_json(value: object) -> str:
    """Format ``value`` as JSON, indented by two spaces, with keys in insertion order."""
    return json.dumps(value, indent=2)


def in_order(tensors: dict[str, LazyTensor]) -> Iterator[tuple[str, LazyTensor]]:
    """Iterate over (name, tensor) sorted by dotted name; numeric components (layer indices) sort as numbers."""

    def key(name: str) -> list[object]:
        return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]

    return iter(sorted(tensors.items(), key=lambda item: key(item[0])))
