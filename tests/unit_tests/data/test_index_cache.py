"""Built once, shared by all, believed only if complete; nothing pickled."""

import errno
import json
import logging
import multiprocessing
import os
import pickle
import signal
from pathlib import Path

import numpy as np
import pytest

from megatron.data import index_cache
from megatron.data.index_cache import IndexCache

LAYOUT = {"first": ((4,), "int32"), "second": ((2, 2), "int64")}
NAMES = ["description.txt", "first.npy", "second.npy"]


def arrays():
    return {"first": np.arange(4, dtype=np.int32), "second": np.arange(4, dtype=np.int64).reshape(2, 2)}


def cache_in(folder, **identity):
    return IndexCache(str(folder), "GPTDataset-train", {"seed": 1234} | identity, LAYOUT)


def refuse():
    raise AssertionError("built although cached")


def test_files_have_the_known_names_and_no_pickle(tmp_path):
    cache = cache_in(tmp_path / "made" / "on" / "demand")
    built = cache.get(arrays)
    assert sorted(path.name for path in Path(cache.folder).iterdir() if path.suffix != ".lock") == sorted(
        f"{cache.key}-GPTDataset-train-{name}" for name in NAMES
    )
    description, checksums, _ = Path(f"{cache.base}-description.txt").read_text().rsplit("\n", 2)
    assert json.loads(description) == {"seed": 1234} and json.loads(checksums).keys() == LAYOUT.keys()
    repeated = cache_in(cache.folder).get(refuse)
    for name, (shape, dtype) in LAYOUT.items():
        assert built[name].tobytes() == repeated[name].tobytes() == arrays()[name].tobytes()
        assert repeated[name].shape == shape and repeated[name].dtype == dtype and not repeated[name].flags.writeable
        np.load(f"{cache.base}-{name}.npy", allow_pickle=False)


def test_another_identity_is_another_key(tmp_path):
    assert cache_in(tmp_path).key != cache_in(tmp_path, seed=1).key


@pytest.mark.parametrize("victim", NAMES)
@pytest.mark.parametrize("damage", ["truncated", "empty", "missing", "longer", "garbage"])
def test_a_damaged_cache_is_rebuilt(tmp_path, victim, damage, caplog):
    cache = cache_in(tmp_path)
    cache.get(arrays)
    path = Path(f"{cache.base}-{victim}")
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        new = {"truncated": content[:-3], "empty": b"", "longer": None, "garbage": b"\x93NUMPY\x01\x00\xff\xff{"}[
            damage
        ]
        if damage == "longer":
            if victim.endswith("npy"):
                np.save(path, np.zeros(999, dtype=np.int32))
            else:
                path.write_bytes(content + b" ")
        else:
            path.write_bytes(new)
    with caplog.at_level(logging.WARNING):
        result = cache_in(tmp_path).get(arrays)
    assert result["first"].tobytes() == arrays()["first"].tobytes()
    unfinished = damage == "missing" and victim == "description.txt"  # as a kill leaves it: nothing to warn of
    assert len(caplog.records) == (0 if unfinished else 1) and (unfinished or str(path) in caplog.text)
    cache_in(tmp_path).get(refuse)


def test_no_flipped_bit_gives_another_array(tmp_path, caplog):
    """Every bit of every file: the arrays that were written, and a warning that names the file."""
    cache = cache_in(tmp_path)
    cache.get(arrays)
    for name in NAMES:
        path = Path(f"{cache.base}-{name}")
        content = path.read_bytes()
        for position in range(len(content)):
            flipped = bytearray(content)
            flipped[position] ^= 1 << position % 8
            path.write_bytes(flipped)
            caplog.clear()
            result = cache_in(tmp_path).get(arrays)
            assert all(result[key].tobytes() == array.tobytes() for key, array in arrays().items()), (name, position)
            same = path.read_bytes() == bytes(flipped)  # padding of a header: nothing was rebuilt
            assert same != (str(path) in caplog.text), (name, position)
            path.write_bytes(content)


def test_index_cache_with_values_out_of_bounds_is_rebuilt(tmp_path, caplog):
    """A broken writer can store wrong numbers with a valid checksum."""
    bounds = {"first": [(0, 3)], "second": [(0, 2), (1, 3)]}
    IndexCache(str(tmp_path), "GPTDataset-train", {"seed": 1234}, LAYOUT, bounds).get(arrays)
    for wrong in ({"first": [(0, 2)]}, {"first": [(1, 3)]}, {"second": [(0, 2), (1, 2)]}):
        caplog.clear()
        IndexCache(str(tmp_path), "GPTDataset-train", {"seed": 1234}, LAYOUT, wrong).get(arrays)
        assert "holds numbers outside" in caplog.text
    IndexCache(str(tmp_path), "GPTDataset-train", {"seed": 1234}, LAYOUT, bounds).get(refuse)


def test_a_cache_is_not_synced(tmp_path, monkeypatch):
    """It can be rebuilt, and thousands of small syncs make a start slow."""
    monkeypatch.setattr(os, "fsync", refuse)
    cache_in(tmp_path).get(arrays)
    cache_in(tmp_path).get(refuse)


def test_a_cache_of_a_version_without_checksums_is_rebuilt_silently(tmp_path, caplog):
    cache = cache_in(tmp_path)
    cache.get(arrays)
    Path(f"{cache.base}-description.txt").write_text(cache.description)
    cache_in(tmp_path).get(arrays)
    assert not caplog.records
    cache_in(tmp_path).get(refuse)


class Malicious:
    def __reduce__(self):
        return (os.system, ("touch pwned",))


def test_a_pickle_in_the_cache_is_never_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cache = cache_in(tmp_path)
    cache.get(arrays)
    np.save(f"{cache.base}-first.npy", np.array([Malicious()] * 4, dtype=object), allow_pickle=True)
    assert cache_in(tmp_path).get(arrays)["first"].tolist() == [0, 1, 2, 3]
    Path(f"{cache.base}-second.npy").write_bytes(pickle.dumps(Malicious()))
    assert cache_in(tmp_path).get(arrays)["second"].tolist() == [[0, 1], [2, 3]]
    assert not (tmp_path / "pwned").exists()


def test_a_folder_that_cannot_be_made_costs_one_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        result = cache_in(tmp_path / "file" / "cache").get(arrays)
    assert result["first"].tolist() == [0, 1, 2, 3]
    assert len(caplog.records) == 1 and "--data-cache-path" in caplog.text


def test_a_full_disk_costs_a_warning_and_leaves_no_partial_file(tmp_path, caplog, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(index_cache.np.lib.format, "write_array", fail)
    result = cache_in(tmp_path).get(arrays)
    assert result["first"].tolist() == [0, 1, 2, 3]
    assert "No space left" in caplog.text
    assert not [name for name in os.listdir(tmp_path) if "partial" in name]
    monkeypatch.undo()
    cache_in(tmp_path).get(arrays)
    cache_in(tmp_path).get(refuse)


def test_a_cache_that_can_be_rebuilt_is_not_synced(tmp_path, monkeypatch):
    monkeypatch.setattr(index_cache.os, "fsync", lambda _: pytest.fail("a sync costs more than the files are worth"))
    cache_in(tmp_path).get(arrays)
    cache_in(tmp_path).get(refuse)


def build_and_die(folder, at):
    """Killed before file number ``at`` is renamed."""
    renames = []
    rename = os.replace

    def maybe_die(source, target):
        if len(renames) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        renames.append(target)
        rename(source, target)

    index_cache.os.replace = maybe_die
    cache_in(folder).get(arrays)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_build_killed_at_any_point_is_repeated(tmp_path, at):
    process = multiprocessing.get_context("fork").Process(target=build_and_die, args=(tmp_path, at))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert cache_in(tmp_path).load() is None
    assert cache_in(tmp_path).get(arrays)["second"].tolist() == [[0, 1], [2, 3]]
    assert not [name for name in os.listdir(tmp_path) if "partial" in name]


def race(arguments):
    folder, number = arguments
    built = []

    def build():
        built.append(number)
        return arrays()

    return len(built), cache_in(folder).get(build)["first"].tobytes(), len(built)


def test_of_many_processes_one_builds(tmp_path):
    with multiprocessing.get_context("fork").Pool(8) as pool:
        results = pool.map(race, [(tmp_path, number) for number in range(32)], chunksize=1)
    assert sum(count for _, _, count in results) == 1
    assert {data for _, data, _ in results} == {arrays()["first"].tobytes()}


def hold_lock(folder, started, release):
    def build():
        started.set()
        release.wait()
        return arrays()

    cache_in(folder).get(build)


def test_waiting_says_so(tmp_path, caplog, monkeypatch):
    context = multiprocessing.get_context("fork")
    started, release = context.Event(), context.Event()
    process = context.Process(target=hold_lock, args=(tmp_path, started, release))
    process.start()
    started.wait()
    monkeypatch.setattr(index_cache, "PROGRESS_SECONDS", 0.0)

    def nap(_):
        if "waiting for another process" in caplog.text:
            release.set()

    monkeypatch.setattr(index_cache.time, "sleep", nap)
    with caplog.at_level(logging.INFO):
        cache_in(tmp_path).get(refuse)
    process.join()
    assert "waiting for another process" in caplog.text
