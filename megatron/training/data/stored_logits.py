"""Largest log-probabilities of a teacher, stored by sample: independent of layout, micro-batch and order of reading.

A folder has ``logits.json`` (sizes), ``values.bin`` (log-probabilities over the full vocabulary) and ``ids.bin``
(int32), both [samples, s, k], and ``digests.bin`` (int64 [samples]) of the tokens of each sample. The position in the
training stream names a sample.

Legend: b samples of a micro-batch, s sequence, k entries of a token."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.config.errors import UserError
from megatron.core.dist_checkpointing.files import read_json
from megatron.core.safe_files import fsync_path
from megatron.training.data.batch import Batch

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
VALUES, IDS = "teacher_values", "teacher_ids"
"""Names of both tensors in a batch."""


def digests(tokens: Tensor) -> Tensor:
    """Return a checksum of each row of ``tokens`` [b, s], int64 [b]."""
    return torch.tensor([zlib.crc32(row.numpy().tobytes()) for row in tokens.to(torch.int64)])


class StoredLogits:
    """Folder of stored log-probabilities, mapped into memory.

    Args:
        folder: existing folder; raises UserError if it has other files, or not all.
        shared: whether to write: changes of the tensors change the files."""

    def __init__(self, folder: str | os.PathLike, *, shared: bool = False) -> None:
        self.folder, place = folder, Path(folder)
        try:
            self.sizes = read_json(place / "logits.json")
            samples, length, number = (self.sizes[name] for name in ("samples", "length", "top_k"))
            self.vocab_size = self.sizes["vocab_size"]
            shapes = {
                "values": (DTYPES[self.sizes["dtype"]], (samples, length, number)),
                "ids": (torch.int32, (samples, length, number)),
                "digests": (torch.int64, (samples,)),
            }
            self.values, self.ids, self.digests = (
                _mapped(place / f"{name}.bin", dtype, shape, shared) for name, (dtype, shape) in shapes.items()
            )
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            reason = f"holds no complete stored logits ({error})"
            raise UserError(f"{folder}: {reason}; write them with --logits-save-dir") from None

    @classmethod
    def create(cls, folder: str, dtype: str, vocab_size: int, shape: tuple[int, int, int]) -> StoredLogits:
        """Create a folder for ``shape`` [samples, s, k], to be renamed by :meth:`finish`."""
        partial = Path(f"{Path(folder)}.partial")  # next to the folder, also with a slash at its end
        sizes = dict(zip(("samples", "length", "top_k"), shape), dtype=dtype, vocab_size=vocab_size)
        try:
            if os.path.lexists(folder):
                raise FileExistsError("it exists")
            partial.mkdir(parents=True, exist_ok=True)
            (partial / "logits.json").write_text(json.dumps(sizes))
            width = shape[0] * shape[1] * shape[2]
            files = {"values": width * DTYPES[dtype].itemsize, "ids": width * 4, "digests": shape[0] * 8}
            for name, size in files.items():
                with open(partial / f"{name}.bin", "wb") as file:
                    os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            raise UserError(f"--logits-save-dir {folder}: {error}; choose another folder") from None
        return cls(partial, shared=True)

    def write(self, samples: Tensor, places: Tensor, values: Tensor, ids: Tensor, checksums: Tensor) -> None:
        """Store the entries [b, s, k] of ``samples`` [b] at ``places`` [b, s] of their rows. On the host."""
        rows = samples[:, None].expand_as(places)
        self.values[rows, places] = values.to(self.values.dtype)
        self.ids[rows, places] = ids.to(torch.int32)
        self.digests[samples] = checksums

    def finish(self, folder: str) -> None:
        """Sync the files and give the folder its name, durably."""
        for path in Path(self.folder).iterdir():
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
        os.rename(self.folder, folder)
        fsync_path(Path(folder).absolute().parent)

    def read(self, samples: Tensor, tokens: Tensor) -> Batch:
        """Return values and ids [b, s, k] of ``samples`` [b], whose full rows are ``tokens`` [b, s]. Raises UserError
        for samples that are not stored or were stored with other tokens."""
        number = len(self.digests)
        last = int(samples.max())
        if last >= number or tokens.shape[1] != self.values.shape[1]:
            raise UserError(
                f"--logits-load-dir {self.folder}: has {number} samples of {self.values.shape[1]} tokens, not sample "
                f"{last} of {tokens.shape[1]}; store more samples, or train less"
            )
        for sample, digest in zip(samples.tolist(), digests(tokens).tolist()):
            if digest != int(self.digests[sample]):
                raise UserError(
                    f"--logits-load-dir {self.folder}: sample {sample} has other tokens than were stored; use the data,"
                    " --seed, --seq-length and loader of the run that stored them"
                )
        return {VALUES: self.values[samples], IDS: self.ids[samples].to(torch.int64)}


def _mapped(path: Path, dtype: torch.dtype, shape: tuple[int, ...], shared: bool) -> Tensor:
    size = int(torch.Size(shape).numel())
    if path.stat().st_size != size * dtype.itemsize:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes, not {size * dtype.itemsize}")
    return torch.from_file(str(path), shared=shared, size=size, dtype=dtype).view(shape)
