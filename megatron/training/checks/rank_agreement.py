"""Check, before anything is built, that all ranks have the same settings, software, code, tokenizer and data.

Hosts may hold different files at the same path: an older data set, another checkout, other versions. The ranks would
train on different things without a message. Every rank digests the files that it reads, and one all-gather compares the
digests; only if they differ, a second one gathers the items, to name them. Data files are compared by their sizes, the
bytes of their indices and sampled blocks of their tokens: another tokenization or order is found, a single changed
token of a large file need not be."""

from __future__ import annotations

import functools
import json
import os
import platform
import socket
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron.core.config.errors import UserError, listed
from megatron.core.dist_checkpointing.exchange import all_gather_json, all_ranks
from megatron.core.groups.process_groups import Group
from megatron.training.config.flat import FlatConfig
from megatron.version import ROOT, __version__

LOCAL_SETTINGS = frozenset(
    (
        "data_cache_path",
        "explicit",
        "extra",
        "local_rank",
        "logging_level",
        "memory_snapshot_path",
        "non_persistent_local_ckpt_dir",
        "rank",
        "tensorboard_dir",
        "wandb_save_dir",
    )
)
"""Settings that ranks may have for themselves: local folders, what they log, and their number."""

PACKAGES = ("torch", "numpy", "triton", "transformer-engine", "flash-attn", "tokenizers", "transformers")
VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "NCCL_ALGO",
    "NCCL_NVLS_ENABLE",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_TUNABLEOP_ENABLED",
    "TORCHDYNAMO_DISABLE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "TORCH_COMPILE_DISABLE",
    "TRITON_F32_DEFAULT",
    "TRITON_INTERPRET",
)
VARIABLE_PREFIXES = ("NVTE_", "TORCHINDUCTOR_")
"""Environment variables that select kernels, roundings or collectives."""

BLOCK = 4096
BLOCKS_PER_FILE = 256
TOTAL_BLOCKS = 16384
"""Blocks of tokens that a rank reads of all files together, but at least ``FEWEST_BLOCKS`` of each."""
FEWEST_BLOCKS = 16
FULL_INDEX_BYTES = 2**24
"""Indices up to this size are compared byte by byte, larger ones by sampled blocks of this total size."""
READERS = 16

Items = Mapping[str, str]
"""Value or digest of each item, by a name that is equal on all ranks."""


class RanksDiffer(UserError):
    """Ranks that would not run the same training."""


def check_settings(cfg: FlatConfig) -> None:
    """Raise :class:`RanksDiffer` on every rank unless all have the same settings, software and code. Collective over
    all ranks; does nothing for one rank. Needs torch.distributed, but no process groups, which depend on settings."""
    fixes = {
        "": "start every rank with the same settings",
        "software": "use the same environment on every host",
        "code": "use the same code on every host",
    }
    with _world() as world:
        if world.size > 1:
            digests = {f"{name}\0code": value for name, value in code().items()}
            require_equal({**settings(cfg), **software(), **digests}, world, fixes)


@contextmanager
def _world() -> Iterator[Group]:
    """Context with all ranks, connected by gloo: NCCL would keep device memory for a communicator."""
    world = all_ranks()
    if world.size == 1 or dist.get_backend() == "gloo":
        yield world
        return
    handle = dist.new_group(backend="gloo")
    yield replace(world, host_handle=handle)
    dist.destroy_process_group(handle)


def check_data(prefixes: Sequence[str], weights: object, fingerprint: str | None, world: Group) -> None:
    """Raise :class:`RanksDiffer` on every rank unless all read the same data with the same tokenizer. Collective over
    ``world``; does nothing for one rank.

    Args:
        prefixes: paths of the data sets, without .bin or .idx; empty if this program reads none.
        weights: weights of the data sets by split, as JSON types.
        fingerprint: of the tokenizer, if there is one.
        world: all ranks."""
    if world.size == 1:
        return
    ids_hash = str(fingerprint).rpartition("+")[2]  # the files may differ
    items = {"data weights": json.dumps(weights), "tokenizer": ids_hash, "data sources": str(len(prefixes))}
    digests = data_digests(prefixes)
    items |= {f"{index}{suffix}\0data": digest for (index, suffix), digest in digests.items()}
    names = {f"{index}{suffix}": f"{prefixes[index]}{suffix}" for index, suffix in digests}
    fixes = {"": "give every rank the same files of data and tokenizer", "data": "copy the same file to every host"}
    require_equal(items, world, fixes, names)


def require_equal(items: Items, world: Group, fixes: Mapping[str, str], names: Mapping[str, str] | None = None) -> None:
    """Raise :class:`RanksDiffer` on every rank if an item that all ranks have differs. Collective over ``world``: one
    all-gather, and a second one if the digests of all items differ.

    Args:
        items: a name may end in a NUL and the kind of the item: its value is then a digest, which is not shown.
        world: all ranks.
        fixes: advice by kind, "" for items without one.
        names: shown names of items, where they are other than the keys."""
    if len(set(all_gather_json(digest(json.dumps(items, sort_keys=True)), world))) == 1:
        return
    replies = all_gather_json([socket.gethostname(), dict(items)], world)
    ranks = [f"rank {rank} ({host})" for rank, (host, _) in zip(world.ranks, replies)]
    problems = []
    for key in dict.fromkeys(key for _, reply in replies for key in reply):
        name, _, kind = key.partition("\0")
        values = [reply.get(key, "unset" if kind == "software" else None) for _, reply in replies]
        if None not in values and len(set(values)) > 1:
            difference = _difference(values, ranks, is_digest=kind in ("code", "data"))
            problems.append(f"{(names or {}).get(name, name)}: {difference}; {fixes[kind]}")
    if problems:
        further = f"\nand {len(problems) - 8} more differences" if len(problems) > 8 else ""
        error = RanksDiffer("\n".join(problems[:8]) + further)
        error.reported = not world.is_first  # the first rank reports for all
        raise error


def _difference(values: Sequence[str], ranks: Sequence[str], is_digest: bool) -> str:
    """Return which of ``ranks`` have which of ``values``, for a message."""
    holders = {value: [rank for rank, own in zip(ranks, values) if own == value] for value in dict.fromkeys(values)}
    if is_digest and not any(" " in value for value in holders):
        first, *others = holders.values()
        return f"{listed((rank for group in others for rank in group), most=8)} and {first[0]} have different content"
    texts = (
        f"{value if ' ' in value or not is_digest else 'readable'} on {listed(group, most=8)}"
        for value, group in holders.items()
    )
    return "; ".join(texts) if is_digest else ", ".join(texts)


def digest(text: str | bytes) -> str:
    """Return 16 hexadecimal digits of ``text``."""
    return blake2b(text.encode() if isinstance(text, str) else text, digest_size=8).hexdigest()


def settings(cfg: FlatConfig) -> dict[str, str]:
    """Return the settings that must agree, by flag. Paths count by their last part."""
    flags = {name: spec.names[0] for name, spec in cfg.flags.items()}
    values = {**cfg.values(), **cfg.extra}
    return {
        flags.get(name, f"--{name.replace('_', '-')}"): str(_portable(value))
        for name, value in values.items()
        if name not in LOCAL_SETTINGS
    }


def _portable(value: object) -> object:
    """Return ``value`` without folders and addresses of objects."""
    if isinstance(value, str):
        return os.path.basename(os.path.normpath(value)) if os.sep in value else value
    if isinstance(value, list | tuple):
        return [_portable(item) for item in value]
    if isinstance(value, dict):
        return {key: _portable(item) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float):
        return value
    return getattr(value, "__qualname__", None) or type(value).__qualname__


def software() -> dict[str, str]:
    """Return versions and environment variables that change results, with the kind "software"."""
    versions = {"megatron": __version__, **_versions()}
    names = {*VARIABLES, *(name for name in os.environ if name.startswith(VARIABLE_PREFIXES))}
    versions |= {f"environment variable {name}": os.environ.get(name, "unset") for name in sorted(names)}
    return {f"{name}\0software": value for name, value in versions.items()}


@functools.cache  # reading the metadata of all packages takes as long as building a small model
def _versions() -> dict[str, str]:
    versions = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def code() -> dict[str, str]:
    """Return digests of every source file of this package, the program's modules, and the functions in the loaded
    modules of this package, which a program may have replaced."""
    digests = dict(_sources())
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if name.partition(".")[0] == "megatron":
            digests[f"functions of {name}"] = _functions_digest(module)
        elif path and _is_of_program(path):
            digests[f"module {name}"] = digest(Path(path).read_bytes())
    return digests


@functools.cache
def _sources() -> dict[str, str]:
    return {str(path.relative_to(ROOT)): digest(path.read_bytes()) for path in (ROOT / "megatron").rglob("*.py")}


@functools.cache  # a process has thousands of modules
def _is_of_program(path: str) -> bool:
    libraries = tuple(path for name in ("stdlib", "platstdlib", "purelib", "platlib") for path in _spellings(name))
    return path.endswith(".py") and not path.startswith(libraries) and os.path.isfile(path)


@functools.cache
def _spellings(library: str) -> tuple[str, str]:
    path = sysconfig.get_path(library)
    return path, os.path.realpath(path)


ADDED = sys.stdlib_module_names | {"triton"}
WRAPPERS = (staticmethod, classmethod, property)
_known: dict[str, tuple[Any, str]] = {}
"""Module -> names and code of its functions when they were last read, and their digest."""


def _functions_digest(module: ModuleType) -> str:
    """Return a digest of the functions and methods of ``module``, without functions of Triton and the standard library,
    which Triton's interpreter adds."""
    functions: list[Any] = []
    for name, member in vars(module).items():
        if type(member) is FunctionType:
            functions += name, member
        elif isinstance(member, type) and member.__module__ == module.__name__:
            for key, function in vars(member).items():
                if type(function) in WRAPPERS:
                    function = function.fget if isinstance(function, property) else function.__func__
                if type(function) is FunctionType:
                    functions += f"{name}.{key}", function
    content = functions[::2], [function.__code__ for function in functions[1::2]]
    known, result = _known.get(module.__name__, (None, ""))
    if known != content:
        lines = (f"{name}: {_bytecode(function.__code__)}" for name, function in zip(content[0], functions[1::2])
                 if str(function.__module__).partition(".")[0] not in ADDED)  # fmt: skip
        result = digest("".join(sorted(lines)))
        _known[module.__name__] = content, result
    return result


@functools.cache
def _bytecode(code: CodeType) -> str:
    """Return a digest of the instructions, names and constants of ``code``, which do not depend on the process."""
    constants = [
        _bytecode(value) if isinstance(value, CodeType)
        else str(sorted(map(repr, value))) if isinstance(value, frozenset)
        else repr(value)
        for value in code.co_consts
    ]  # fmt: skip
    return digest(f"{code.co_code.hex()} {code.co_names} {constants}")


def data_digests(prefixes: Sequence[str]) -> dict[tuple[int, str], str]:
    """Return a digest of each data file, by (position of its prefix, suffix). An unreadable one has the reason."""
    blocks = min(max(TOTAL_BLOCKS // max(len(prefixes), 1), FEWEST_BLOCKS), BLOCKS_PER_FILE)
    suffixes = [("",) if os.path.isfile(prefix) else (".idx", ".bin") for prefix in prefixes]  # text with --sft
    keys = [(index, suffix) for index in range(len(prefixes)) for suffix in suffixes[index]]

    def read(key: tuple[int, str]) -> str:
        index, suffix = key
        try:
            return file_digest(prefixes[index] + suffix, FULL_INDEX_BYTES // BLOCK if suffix == ".idx" else blocks)
        except OSError as error:
            return f"{error.strerror}"

    with ThreadPoolExecutor(READERS) as readers:
        return dict(zip(keys, readers.map(read, keys)))


def file_digest(path: str, num_blocks: int) -> str:
    """Return a digest of the size of a file, its first and last block, and further blocks at positions that depend on
    the size only; of all bytes if the file has at most ``num_blocks`` blocks."""
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        result, total = blake2b(str(size).encode(), digest_size=8), -(-size // BLOCK)
        if total <= num_blocks:
            while part := file.read(2**20):
                result.update(part)
            return result.hexdigest()
        sample = np.random.default_rng(size).integers(total, size=num_blocks - 2)
        for block in np.unique([0, *sample, total - 1]).tolist():
            result.update(os.pread(file.fileno(), BLOCK, block * BLOCK))
        return result.hexdigest()
