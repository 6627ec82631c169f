"""Files in shared folders: reading never hangs or follows a link where it must not, writing never leaves its folder."""

import json
import os
import socket

import numpy as np
import pytest
import torch

from megatron.core import safe_files
from megatron.core.config.errors import UserError
from megatron.core.dist_checkpointing import ShardedTensor, save
from megatron.core.dist_checkpointing.writer import recover, remove_leftovers
from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.core.tokenizers.training import _replace
from megatron.data.index_cache import IndexCache
from megatron.data.indexed_writer import IndexedDatasetBuilder
from megatron.data.sidecar import SidecarInfo, write_sidecar
from megatron.export.files import Target
from megatron.export.interchange import Interchange
from megatron.export.megatron_lm import save_megatron_torch_dist
from megatron.training.checkpoint.files import delete_checkpoint
from megatron.training.exits.endings import notify_launcher
from megatron.training.hooks.profiler import ProfilerHook
from megatron.training.hooks.progress import ProgressHook
from megatron.training.observe.metrics import MetricsFile
from megatron.training.watchdog.stacks import write_stacks


def test_only_regular_files_are_opened_for_reading(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "pipe_link").symlink_to("pipe")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "socket"))
        for name in ("pipe", "folder", "pipe_link", "socket", "/dev/zero", "/dev/null"):
            with pytest.raises(OSError, match="not a regular file but a"):
                safe_files.open_regular(tmp_path / name)
    with safe_files.open_regular(tmp_path / "link") as file:
        assert file.read() == b"abc"
    with pytest.raises(OSError, match="symbolic link"):
        safe_files.open_regular(tmp_path / "link", follow=False)
    for name, kind in (("link", "a symbolic link"), ("pipe", "a named pipe")):
        for open_file in (safe_files.open_to_append, safe_files.open_private):
            with pytest.raises(OSError, match=f"not a regular file but {kind}"):
                open_file(tmp_path / name)
    assert safe_files.read_file(tmp_path / "file", 3) == b"abc"
    with pytest.raises(OSError, match="has 3 bytes, at most 2"):
        safe_files.read_file(tmp_path / "file", 2)
    with pytest.raises(FileNotFoundError):
        safe_files.read_file(tmp_path / "nothing", 2)


def test_deeply_nested_json_is_a_value_error():
    assert safe_files.parse_json(b'{"a": [1]}') == {"a": [1]}
    for text in ("[" * 10**6, '{"a":' * 10**6, b"\xff"):
        with pytest.raises(ValueError):
            safe_files.parse_json(text)


def convert(folder, identity="a conversion"):
    with Target(folder / "out", identity) as target:
        target.write("a.safetensors", {"x": LazyTensor.of(torch.ones(2))}, {})
        target.publish()


def save_checkpoint(folder):
    save({"x": ShardedTensor("model.x", torch.ones(2), (2,), (0,))}, folder / "iter_0000001")


def write_dataset(folder):
    with IndexedDatasetBuilder(str(folder / "data.bin")) as builder:
        builder.add_document([1, 2], [2])
        builder.finalize(str(folder / "data.idx"))


def write_metrics(folder):
    file = MetricsFile(folder / "metrics.jsonl")
    file.append({"iteration": 1})
    file.flush()


def cut_metrics(folder):
    lines = [json.dumps({"iteration": number}) + "\n" for number in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    MetricsFile(folder / "metrics.jsonl").resume(1)


def write_cache(folder):
    cache = IndexCache(str(folder), "kind", {"a": 1}, {"x": ((3,), "int32")})
    assert np.array_equal(cache.get(lambda: {"x": np.arange(3, dtype=np.int32)})["x"], np.arange(3))


CACHE = IndexCache("", "kind", {"a": 1}, {}).key + "-kind"


def preprocess(folder):
    from megatron.core.config.tokenizer import TokenizerConfig
    from megatron.core.datasets.preprocessing.pipeline import preprocess
    from megatron.core.datasets.preprocessing.settings import PreprocessConfig
    from megatron.core.tokenizers import build_tokenizer

    (folder / "in.jsonl").write_text('{"text": "a b"}\n')
    tokens = TokenizerConfig(tokenizer_type="ByteLevelTokenizer")
    cfg = PreprocessConfig(input=[str(folder / "in.jsonl")], output_prefix=str(folder / "out"), workers=1)
    preprocess(cfg, tokens, build_tokenizer)


def tell(folder):
    notify_launcher("why")


def write_trace(folder):
    hook = ProfilerHook(0, 1, folder / "torch_profile")
    hook.running = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    hook.running.start()
    hook.on_end()


def info():
    return SidecarInfo("NullTokenizer", "0", 5)


# name of the planted link -> action in that folder
WRITERS = {
    ".out.converting": convert,
    ".out.converting.journal": convert,
    "out": convert,
    ".iter_0000001.old": lambda folder: [save_checkpoint(folder), save_checkpoint(folder)],
    ".iter_0000001.tmp-deleted": lambda folder: [save_checkpoint(folder), delete_checkpoint(folder, 1)],
    ".iter_0000002.tmp-0": remove_leftovers,
    ".iter_0000003.old": remove_leftovers,
    "iter_0000004": lambda folder: [(folder / ".iter_0000004.old").mkdir(), recover(folder)],
    "release/__0_0.distcp": lambda folder: save_megatron_torch_dist(
        Interchange({}, {"model.embedding.word_embeddings.weight": LazyTensor.of(torch.ones(4, 2))}), folder
    ),
    "data.bin.partial-PID-tokens": write_dataset,
    "data.bin.partial-PID-index": write_dataset,
    "data.bin.partial-PID-lengths": write_dataset,
    "data.tokenizer.json.partial-PID": lambda folder: write_sidecar(str(folder / "data"), info()),
    f"{CACHE}.lock": write_cache,
    f"{CACHE}-x.npy.partial": write_cache,
    f"{CACHE}-description.txt.partial": write_cache,
    "out.partial": preprocess,
    "out.partial/lock": preprocess,
    "out.partial/plan.json.partial": preprocess,
    "out.bad_lines.jsonl": preprocess,
    "metrics.jsonl": write_metrics,
    "metrics.jsonl.new": cut_metrics,
    "metrics.jsonl.cut-1": cut_metrics,
    "progress.txt": lambda folder: ProgressHook(str(folder), 1)._append("a line"),
    "stacks": lambda folder: write_stacks("head", folder / "stacks" / "rank-0.txt", also_stderr=False),
    "stacks/rank-0.txt": lambda folder: write_stacks("head", folder / "stacks" / "rank-0.txt", also_stderr=False),
    "torch_profile": write_trace,
    "torch_profile/rank-0.json.gz": write_trace,
    "launcher": tell,
    "vocab.txt.partial": lambda folder: _replace(folder / "vocab.txt", "text"),
}  # fmt: skip


def listing(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("target", ["folder", "file", "new file", "pipe"])
@pytest.mark.parametrize("name", WRITERS)
def test_nothing_is_written_or_removed_through_a_planted_name(name, target, tmp_path, monkeypatch):
    shared, home = tmp_path / "shared", tmp_path / "home"
    link = shared / name.replace("PID", str(os.getpid()))
    link.parent.mkdir(parents=True)
    home.mkdir()
    (home / "rank-0.txt").write_text("mine")
    (home / "lock").write_text("mine")
    (home / "000000-00000000.text.bin").write_text("mine")
    (home / "sub").mkdir()
    (home / "sub" / "a.safetensors").write_text("mine")
    before = listing(home)
    if target == "pipe":
        os.mkfifo(link)
    else:
        link.symlink_to({"folder": home, "file": home / "lock", "new file": home / "new"}[target])
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(shared / "launcher"))
    try:
        WRITERS[name](shared)
    except (UserError, OSError) as error:
        assert str(error), "one message"
    assert listing(home) == before
    assert sorted(path.name for path in home.iterdir()) == ["000000-00000000.text.bin", "lock", "rank-0.txt", "sub"]


def test_preprocessing_does_not_clean_the_target_of_a_link(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    for name in ("000000-00000000.text.bin", "000001.count", "mine.partial-1"):
        (home / name).write_text("mine")
    (tmp_path / "out.partial").symlink_to(home)
    with pytest.raises(UserError, match="out.partial: not a folder but a symbolic link; remove it"):
        preprocess(tmp_path)
    assert len(listing(home)) == 3


@pytest.mark.parametrize("name", [".out.converting", ".out.converting.journal", "out"])
def test_a_conversion_names_the_planted_link(name, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / name).symlink_to(tmp_path / "home")
    with pytest.raises(UserError, match=f"{tmp_path}/{name}: .*(link|exists|symbolic)") as error:
        convert(tmp_path)
    assert "\n" not in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["home", name]), "nothing is left behind"


def test_a_conversion_rejects_work_files_of_another_user(tmp_path, monkeypatch):
    with pytest.raises(KeyboardInterrupt), Target(tmp_path / "out", "a conversion"):
        raise KeyboardInterrupt
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(UserError, match="journal: a file of another user"):
        convert(tmp_path)
    (tmp_path / ".out.converting.journal").unlink()
    with pytest.raises(OSError, match="a folder of another user"):
        safe_files.make_folder(tmp_path / ".out.converting", private=True)


@pytest.mark.parametrize("umask, mode", [(0o002, 0o755), (0o022, 0o755), (0o077, 0o700), (0, 0o755)])
def test_only_this_user_may_write_to_a_private_folder(tmp_path, umask, mode):
    old = os.umask(umask)
    try:
        safe_files.make_folder(tmp_path / "private", private=True)
        safe_files.make_folder(tmp_path / "shared")
    finally:
        os.umask(old)
    assert (tmp_path / "private").stat().st_mode & 0o777 == mode
    assert (tmp_path / "shared").stat().st_mode & 0o777 == 0o777 & ~umask


def test_a_journal_with_a_second_name_is_unchanged(tmp_path):
    (tmp_path / "mine").write_text("[1]\n")
    os.link(tmp_path / "mine", tmp_path / ".out.converting.journal")
    with pytest.raises(UserError, match="second name"):
        convert(tmp_path)
    assert (tmp_path / "mine").read_text() == "[1]\n"


def test_links_within_an_unfinished_conversion_are_removed_not_followed(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (home / "a.safetensors").write_text("mine")
    with pytest.raises(KeyboardInterrupt), Target(tmp_path / "out", "a conversion") as target:
        target.write("iter/a.safetensors", {"x": LazyTensor.of(torch.ones(2))}, {})
        raise KeyboardInterrupt
    work = tmp_path / ".out.converting"
    (work / "sub").symlink_to(home)
    (work / "a.safetensors").symlink_to(home / "a.safetensors")
    (work / "iter").rename(tmp_path / "moved")
    (work / "iter").symlink_to(tmp_path / "moved")
    convert(tmp_path)
    assert (home / "a.safetensors").read_text() == "mine" and list(home.iterdir())
    assert [path.name for path in (tmp_path / "moved").iterdir()] == ["a.safetensors"]
    assert sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*")) == [
        "a.safetensors"
    ]


@pytest.mark.parametrize("line", ["[" * 10**5, "5", "[]", '["../moved", {}]', '["a", 5]', '["a", {}]', '["/etc", {}]',
                                  '["a", {"bytes": "x", "header_bytes": null, "header_crc32": 1}]'])  # fmt: skip
def test_damaged_journal_loses_its_records_only(line, tmp_path):
    with pytest.raises(KeyboardInterrupt), Target(tmp_path / "out", "a conversion") as target:
        (target.folder / "a").write_text("x")
        raise KeyboardInterrupt
    journal = tmp_path / ".out.converting.journal"
    journal.write_text(f"{journal.read_text()}{line}\n")
    convert(tmp_path)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a.safetensors"]
