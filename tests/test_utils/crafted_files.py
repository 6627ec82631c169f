"""Every kind of file that a program reads: a writer of a small valid one, its reader, and ways to damage it.

A reader must end within seconds: with the value, or with one error for the user that is no traceback. ``KINDS`` is the
table; ``changes`` damages a file at random, ``planted`` puts a pipe, device or folder in its place.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import zipfile
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.test_utils import tiny_tokenizers
from tests.test_utils.hf_folders import random_model

LIMIT = 10.0
"""Seconds for a reader, on a machine that does other things too."""
LONGEST = 5000
"""Characters of a message, which may list many problems."""
FLAGS = [
    "--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "2", "--ffn-hidden-size", "16",
    "--max-position-embeddings", "32", "--position-embedding-type", "rope", "--normalization", "RMSNorm",
    "--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights",
]  # fmt: skip
TEXT = "The quick brown fox; naïve 中文 🙂 <unk>\n"


@dataclass(frozen=True)
class Kind:
    """A kind of input.

    Attributes:
        write: makes a valid one in an empty folder.
        read: reads it as a program does; what it computes from it.
        checksums: whether a changed byte must be noticed, or change nothing.
        optional: names of files without which the others are read.
        may_be_empty: names of files for which no bytes are a content.
    """

    write: Callable[[Path], Any]
    read: Callable[[Path], Any]
    checksums: bool = False
    optional: tuple[str, ...] = ()
    may_be_empty: tuple[str, ...] = ()


# ---- checkpoints


def write_native(folder: Path) -> None:
    from megatron.export.files import Target
    from megatron.tools.checkpoint.convert import completed, write

    source = random_model(FLAGS, 24)
    completed(source, [], "safetensors", "here")
    with Target(folder / "a") as target:
        write(source, "native", target, 0, 10**6, allow_non_finite=False)


def write_hf(folder: Path, form: str = "safetensors") -> None:
    """A tiny LLaMA; ``form``: safetensors, index, bin or old (the ``.bin`` of torch before 1.6)."""
    from safetensors.torch import load_file

    from megatron.export.hf import save_hf

    save_hf(random_model(FLAGS, 24), folder / "a", max_shard_bytes=3000 if form == "index" else 10**9)
    tiny_tokenizers.byte_level_bpe(folder / "a" / "tokenizer.json", 300)
    if form in ("bin", "old"):
        weights = load_file(folder / "a" / "model.safetensors")
        torch.save(weights, folder / "a" / "pytorch_model.bin", _use_new_zipfile_serialization=form == "bin")
        (folder / "a" / "model.safetensors").unlink()


def write_safetensors(folder: Path) -> None:
    from megatron.export.files import Target
    from megatron.export.native import save_safetensors

    with Target(folder / "a") as target:
        save_safetensors(random_model(FLAGS, 24), target)
        target.publish()


def write_megatron(folder: Path, form: str = "torch_dist") -> None:
    """A checkpoint of Megatron-LM's; ``form``: torch_dist, or torch."""
    from megatron.export.megatron_lm import save_megatron_torch_dist, writer

    model = random_model(FLAGS, 24)
    save_megatron_torch_dist(model, folder / "a")
    if form == "torch_dist":
        return
    shutil.rmtree(folder / "a" / "release")
    weights = {}
    for name, pieces in writer._stacked(model).items():
        for piece in pieces:
            layered = piece.layer is not None
            key = name.replace("decoder.layers.", f"decoder.layers.{piece.layer}.") if layered else name
            weights[key] = piece.read()[0].clone() if layered else piece.read()
    path = folder / "a" / "release" / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    torch.save({**writer._common(model), "model": weights}, path)


def write_ranks(folder: Path, **layout: Any) -> None:
    """A checkpoint of Megatron-LM's ``torch`` format of several ranks, with the state of Adam."""
    from tests.test_utils.megatron_torch import write_torch

    (folder / "a").mkdir()
    write_torch(folder / "a", **layout)


def read_checkpoint(folder: Path) -> Any:
    """Every value, and the settings, as conversions read them."""
    from megatron.tools.checkpoint import formats
    from megatron.tools.checkpoint.convert import completed

    path = folder / "a"
    loader, source = formats.open_checkpoint(str(path), "auto")
    source.settings.setdefault("model_family", "gpt")
    completed(source, [] if source.settings.get("num_layers") else FLAGS, loader, str(path))
    for asset in source.assets.values():
        asset.read_bytes()
    return {name: tensor.read().view(torch.uint8).numpy().tobytes() for name, tensor in source.tensors.items()}


# ---- tokenizers


def read_tokenizer(kind: str, **files: str) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        from megatron.core.config.tokenizer import TokenizerConfig
        from megatron.core.tokenizers import build_tokenizer

        paths = {name: str(folder / file) for name, file in files.items()}
        tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type=kind, **paths))
        ids = tokenizer.tokenize(TEXT)
        return ids, tokenizer.detokenize(ids), tokenizer.eod, tokenizer.vocab_size

    return read


def write_hf_tokenizer(folder: Path) -> None:
    tiny_tokenizers.byte_level_bpe(folder / "tokenizer.json", 300)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<|endoftext|>"}}))


def write_tiktoken(folder: Path) -> None:
    import base64

    rows = [bytes([byte]) for byte in range(256)] + [b"th", b"the"]
    lines = (base64.b64encode(piece) + b" %d\n" % rank for rank, piece in enumerate(rows))
    (folder / "a.tiktoken").write_bytes(b"".join(lines))


# ---- data


def write_dataset(folder: Path) -> None:
    from megatron.data.indexed_writer import IndexedDatasetBuilder
    from megatron.data.sidecar import SidecarInfo, write_sidecar

    with IndexedDatasetBuilder(str(folder / "a.bin"), dtype=np.uint16) as builder:
        for length in (3, 0, 7):
            builder.add_document(np.arange(length), [length])
        builder.finalize(str(folder / "a.idx"))
    write_sidecar(str(folder / "a"), SidecarInfo("NullTokenizer", "0", 20))


def read_dataset(folder: Path) -> Any:
    from megatron.core.config.errors import UserError
    from megatron.data.indexed_dataset import IndexedDataset
    from megatron.data.sidecar import read_sidecar
    from megatron.tools import check_dataset

    for mapped in (True, False):
        data = IndexedDataset(str(folder / "a"), mmap=mapped)
        values = [data[index].tolist() for index in range(len(data))]
    try:
        check_dataset.check(str(folder / "a"), None)
    except UserError:
        read_sidecar(str(folder / "a"))  # what it reports may be a token that was changed
    return values


def cache_of(folder: Path) -> Any:
    from megatron.data.index_cache import IndexCache

    return IndexCache(str(folder), "kind", {"a": 1}, {"x": ((None, 2), "int32")}, {"x": [(0, 9), (0, 9)]})


def built() -> dict[str, np.ndarray]:
    return {"x": np.arange(6, dtype=np.int32).reshape(3, 2)}


def read_lines(folder: Path) -> Any:
    from megatron.core.datasets.preprocessing.inputs import find_inputs, part_bytes, split_file
    from megatron.core.datasets.preprocessing.lines import read_rows

    files = find_inputs([str(folder / "a.jsonl")])
    parts = (part for index, file in enumerate(files) for part in split_file(index, file, part_bytes(files), 10**6))
    return [str(row) for part in parts for row in read_rows(part, ["text"], 10**6)]


def read_blend(**names: str) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        from types import SimpleNamespace

        from megatron.data.blend import get_blend_and_blend_per_split

        paths = ("data_path", "train_data_path", "valid_data_path", "test_data_path", "data_args_path",
                 "per_split_data_args_path", "mock_data")  # fmt: skip
        inputs = {name: str(folder / file) for name, file in names.items()}
        return get_blend_and_blend_per_split(SimpleNamespace(**{**dict.fromkeys(paths), **inputs}))

    return read


# ---- records and settings


def write_metrics(folder: Path) -> None:
    lines = [{"kind": "train", "iteration": i, "consumed_samples": i, "lm loss": 1 / i, "statistics": {"a": 1.0}}
             for i in range(1, 6)]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    lines = ["2026-01-01 00:00:00\tJob ID: 1\t# GPUs: 2\tStarting job", "x\tFloating-point operations: 5.00e+12\tx"]
    (folder / "progress.txt").write_text("\n".join(lines) + "\n")


def read_metrics(folder: Path) -> Any:
    from megatron.tools.plot_metrics import load
    from megatron.training.hooks.progress import ProgressHook
    from megatron.training.observe.metrics import MetricsFile
    from megatron.training.observe.page.page import build_page
    from megatron.training.observe.run_folder import read_run

    hook = ProgressHook(str(folder), 1)
    hook._append("Starting job")
    hook._first_job()
    cut = MetricsFile(folder / "metrics.jsonl").resume(3)
    load(folder, "run")
    build_page(read_run(folder, 0.0))
    return cut


def read_yaml(folder: Path) -> Any:
    from megatron.core.groups.nccl_options import read_nccl_settings
    from megatron.training.arguments import parse_args

    cfg = parse_args(["--yaml-cfg", str(folder / "a.yaml")], needs_data=False)
    return cfg.model.num_layers, read_nccl_settings(str(folder / "nccl.yaml"), ["tp", "dp"])


def write_yaml(folder: Path) -> None:
    (folder / "a.yaml").write_text("num_layers: 2\nhidden_size: 16\nbf16: true\n")
    (folder / "nccl.yaml").write_text("tp: {max_ctas: 8}\ndp: {min_ctas: 1}\n")


def read_prompts(folder: Path) -> Any:
    from megatron.tools.generate import load_prompts, parse_command_line

    return load_prompts(parse_command_line(["--load", "x", "--prompt-file", str(folder / "prompts")]))


def text_file(name: str, text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_text(text, encoding="utf-8")


TRACKER, ASSETS = "latest_checkpointed_iteration.txt", ("tokenizer.json", "generation_config.json")
KINDS = {
    "native": Kind(write_native, read_checkpoint, checksums=True, optional=(TRACKER,)),
    "safetensors": Kind(write_safetensors, read_checkpoint, optional=("settings.json",)),
    "hf": Kind(write_hf, read_checkpoint, optional=ASSETS),
    "hf index": Kind(lambda folder: write_hf(folder, "index"), read_checkpoint, optional=ASSETS),
    "hf bin": Kind(lambda folder: write_hf(folder, "bin"), read_checkpoint, optional=ASSETS),
    "hf old bin": Kind(lambda folder: write_hf(folder, "old"), read_checkpoint, optional=ASSETS),
    "megatron torch": Kind(lambda folder: write_megatron(folder, "torch"), read_checkpoint),
    "megatron torch ranks": Kind(
        lambda folder: write_ranks(folder, tp=2, pp=2), read_checkpoint, optional=(TRACKER,)
    ),
    "megatron torch buffers": Kind(
        lambda folder: write_ranks(folder, tp=2, distributed=True), read_checkpoint, optional=(TRACKER,)
    ),
    "megatron torch_dist": Kind(write_megatron, read_checkpoint, optional=("metadata.json",)),
    "gpt2": Kind(
        tiny_tokenizers.gpt2_files,
        read_tokenizer("GPT2BPETokenizer", vocab_file="vocab.json", merge_file="merges.txt"),
        may_be_empty=("merges.txt",),
    ),
    "bert": Kind(
        lambda folder: tiny_tokenizers.bert_vocab(folder / "vocab.txt"),
        read_tokenizer("BertWordPieceCase", vocab_file="vocab.txt"),
    ),
    "hf tokenizer": Kind(
        write_hf_tokenizer, read_tokenizer("HuggingFaceTokenizer", tokenizer_model=""),
        optional=("tokenizer_config.json", "special_tokens_map.json"),
    ),
    "tiktoken": Kind(write_tiktoken, read_tokenizer("TikTokenizer", tokenizer_model="a.tiktoken")),
    "tiktoken json": Kind(
        lambda folder: tiny_tokenizers.tiktoken_json(folder / "a.json"),
        read_tokenizer("TikTokenizer", tokenizer_model="a.json"),
    ),
    "sentencepiece": Kind(
        lambda folder: tiny_tokenizers.sentence_piece_model(folder / "a.model"),
        read_tokenizer("GPTSentencePieceTokenizer", tokenizer_model="a.model"),
    ),
    "data set": Kind(write_dataset, read_dataset, optional=("a.tokenizer.json",)),
    "index cache": Kind(
        lambda folder: cache_of(folder).get(built), lambda folder: cache_of(folder).get(built)["x"].tolist(),
        checksums=True,
    ),
    "json lines": Kind(
        text_file("a.jsonl", '{"text": "a b"}\n{"text": "c", "n": [1, {"b": null}]}\n'), read_lines,
        may_be_empty=("a.jsonl",),
    ),
    "data args": Kind(text_file("a.txt", "0.3 a 0.7 b"), read_blend(data_args_path="a.txt"),
                      may_be_empty=("a.txt",)),
    "data args by split": Kind(
        text_file("a.json", '{"train": [0.5, "a", 0.5, "b"], "valid": ["c"]}'),
        read_blend(per_split_data_args_path="a.json"),
    ),
    "metrics": Kind(write_metrics, read_metrics, optional=("progress.txt",)),
    "yaml": Kind(write_yaml, read_yaml),
    "prompts": Kind(text_file("prompts", "a\nb\n"), read_prompts, may_be_empty=("prompts",)),
}  # fmt: skip
"""Data sets, pickles before 1.6 and safetensors have no checksums."""


# ---- damage


@contextmanager
def time_limit(seconds: float | None = None):
    """Raise ``RuntimeError`` in the main thread after ``seconds`` (``LIMIT``), within a call that waits too."""

    def stop(*_: Any) -> None:
        raise RuntimeError("no end after the time limit")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT if seconds is None else seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def outcome(kind: Kind, folder: Path) -> tuple[str, Any]:
    """``("value", …)`` or ``("error", message)`` of reading; any other exception is a bug and is raised."""
    from megatron.core.config.errors import UserError

    kind_of_error = ""
    with time_limit():
        try:
            return "value", kind.read(folder)
        except (UserError, OSError) as error:
            message, kind_of_error = str(error), type(error).__name__
    assert message and len(message) < LONGEST, f"{kind_of_error}: {message[:200]}"
    assert all(item.isprintable() or item in "\n\t" for item in message), f"control characters: {message[:200]!r}"
    return "error", message


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


PLANTS: dict[str, Callable[[Path], Any]] = {
    "pipe": os.mkfifo,
    "link to a pipe": lambda path: [os.mkfifo(path.with_name("pipe")), path.symlink_to("pipe")],
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": os.mkdir,
    "nothing": lambda path: None,
    "empty file": lambda path: path.write_bytes(b""),
    "link to itself": lambda path: path.symlink_to(path.name),
}


ODD_VALUES = [
    None, True, -1, 0, 5, 2**31, 2**62, 2**70, -(2**63), 1.5, float("inf"), float("nan"), "", "x", "\x1b[31m", "\ud800",
    [], {}, [1], ["x"], [[]], {"a": 1}, [None] * 3, "a" * 10**5,
]  # fmt: skip


def change_json(data: bytes, random: Any) -> bytes:
    """One value of a JSON text replaced, removed, doubled or nested deeply."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):  # text that only looks like JSON, or was changed before
        return change_bytes(data, random)
    places: list[tuple[Any, Any]] = []

    def collect(holder: Any) -> None:
        for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
            places.append((holder, key))
            if isinstance(holder[key], dict | list):
                collect(holder[key])

    if not isinstance(value, dict | list) or not value:
        return b"[]"
    collect(value)
    top = [place for place in places if place[0] is value]
    holder, key = random.choice(random.choice([places, top]))
    how = random.randrange(8)
    if how == 0:
        del holder[key]
    elif how == 1:
        return b'{"a":' * 10**5 if random.random() < 0.3 else b"[" * 10**5
    elif how == 2 and isinstance(holder, dict):
        holder[random.choice(["", "a b", "\x1b[2J", "__proto__", "model.layers.0.x"])] = holder.pop(key)
    elif how == 3:
        holder[key] = [holder[key]] * 2
    else:
        holder[key] = random.choice(ODD_VALUES)
    return json.dumps(value).encode()


def change_bytes(data: bytes, random: Any) -> bytes:
    """A bit flipped, bytes set, cut off, removed, doubled or inserted."""
    if not data:
        return b"x"
    at = random.randrange(len(data)) if random.random() < 0.5 else random.randrange(min(len(data), 400))
    size = random.choice([1, 1, 2, 8, 64])
    noise = random.choice([b"\xff" * size, bytes(size), random.randbytes(size), b"9" * size, data[:size]])
    how = random.randrange(6)
    if how == 0:
        return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]
    if how == 1:
        return data[:at] + noise + data[at + size :]
    if how == 2:
        return data[:at]
    if how == 3:
        return data[:at] + data[at + size :]
    return data[:at] + noise + data[at:] if how == 4 else data + noise


def change_line(data: bytes, random: Any) -> bytes:
    """A line of text replaced, or its JSON changed."""
    lines = data.splitlines(keepends=True) or [b""]
    at = random.randrange(len(lines))
    if random.random() < 0.5 and lines[at][:1] in b"{[" and lines[at].strip():
        lines[at] = change_json(lines[at], random) + b"\n"
    else:
        odd = [b"\n", b"\xff\n", b"a" * 10**5 + b"\n", lines[0], b"x y z\n", b"9" * 5000 + b"\n", b"-1 nan 1e999\n"]
        lines[at] = random.choice([*odd, b"*a\n", b"a: &a [*a, *a]\n", b'{"iteration": 1, "statistics": 5}\n'])
    return b"".join(lines)


def change_header(data: bytes, random: Any) -> bytes:
    """The JSON header of a safetensors file."""
    length = int.from_bytes(data[:8], "little")
    header = change_json(data[8 : 8 + length], random)
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def change_pickle(data: bytes, random: Any) -> bytes:
    """The pickle in a zip file of torch.save, with right checksums."""
    import io

    result = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(result, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, change_opcodes(content, random) if name.endswith("data.pkl") else content)
    return result.getvalue()


def change_opcodes(data: bytes, random: Any) -> bytes:
    """A pickle with an instruction replaced or inserted."""
    at = random.randrange(len(data))
    codes = [b"0", b"(", b"]", b"}", b")", b"t", b"R", b"b", b"h\0", b"q\0", b"Q", b"N", b"s", b"u", b"a", b"e", b".",
             b"\x85", b"\x86", b"J\xff\xff\xff\x7f", b"K\x05", b"cos\nsystem\n", b"X\xff\xff\xff\x00", b"\x8a\xff",
             b"\x96\xff\xff\xff\xff\xff\0\0\0", b"2"]  # fmt: skip
    return data[:at] + random.choice(codes) + data[at + random.randrange(2) :]


def change(path: Path, random: Any) -> None:
    """Damage one file in a way that suits it."""
    data = path.read_bytes()
    ways = [change_bytes]
    if path.suffix == ".json":
        ways += [change_json] * 5
    elif path.suffix == ".safetensors":
        ways += [change_header] * 3
    elif data[:2] == b"PK":
        ways += [change_pickle] * 3
    elif data[:1] == b"\x80":
        ways += [change_opcodes] * 3
    elif path.suffix in (".jsonl", ".txt", ".yaml", ".tiktoken") or path.name in ("prompts", "latest"):
        ways += [change_line] * 3
    way = random.choice(ways)
    with suppress(Exception):  # of a file that was changed before
        data = way(data, random)
    if path.name == "metadata.json" and way is change_json:  # anybody can make a valid checksum
        data = with_checksum(data)
    path.write_bytes(data)


def with_checksum(data: bytes) -> bytes:
    """Return a native checkpoint's manifest with the checksum of its current content; other bytes unchanged."""
    from megatron.core.dist_checkpointing.manifest import encode

    with suppress(ValueError, RecursionError):
        value = json.loads(data)
        if isinstance(value, dict) and value.pop("sha256", None) is not None:
            return encode(value)
    return data
