"""Files of conversions: what is durable when a folder appears, how tensors share files, plain safetensors."""

import gc
import json
import os
import time

import pytest
import torch
from safetensors.torch import save_file

from megatron.core.dist_checkpointing.files import TRACKER, read_tracker
from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.export.files import Target, in_files, read_safetensors, read_shards
from megatron.export.interchange import Interchange
from megatron.export.megatron_lm import load_megatron_torch_dist, save_megatron_torch_dist
from megatron.export.native import load_safetensors
from tests.test_utils.power_loss import PowerLoss


@pytest.fixture
def synced(monkeypatch):
    """Return path and inode (files may be renamed later) -> size at the last sync."""
    sizes, fsync = {}, os.fsync

    def note(descriptor):
        status = os.fstat(descriptor)
        sizes[os.readlink(f"/proc/self/fd/{descriptor}")] = sizes[status.st_ino] = status.st_size
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    return sizes


def test_everything_that_a_target_publishes_was_synced(tmp_path, synced):
    with Target(tmp_path / "out", "a conversion") as target:
        target.write("a/model.safetensors", {"x": LazyTensor.of(torch.ones(5))}, {})
        assert synced[f"{target.folder}/a/model.safetensors"] == (target.folder / "a/model.safetensors").stat().st_size
        assert synced[f"{target.folder}.journal"] > 100, "what is complete is known after a loss of power"
        (target.folder / "other").write_text("by someone else")
        before = len(os.listdir("/proc/self/fd"))
        target.publish()
        assert len(os.listdir("/proc/self/fd")) == before
    assert {f"{target.folder}{name}" for name in ("", "/a", "/other", "/a/model.safetensors")} <= synced.keys()
    assert str(tmp_path) in synced


def test_next_attempt_removes_unfinished_files(tmp_path):
    with pytest.raises(KeyboardInterrupt), Target(tmp_path / "out", "a conversion") as target:
        target.write("whole.safetensors", {"x": LazyTensor.of(torch.ones(5))}, {})
        (target.folder / "part").write_text("of a file")
        raise KeyboardInterrupt
    with Target(tmp_path / "out", "a conversion") as target:
        assert [path.name for path in target.folder.iterdir()] == ["whole.safetensors"] == [*target.finished]


def test_files_of_megatron_lms_format_are_synced_completely(tmp_path, synced):
    weights = {"model.embedding.word_embeddings.weight": LazyTensor.of(torch.ones(4, 2))}
    save_megatron_torch_dist(Interchange({}, weights), tmp_path)
    for path in (tmp_path / "release").iterdir():
        assert synced[path.stat().st_ino] == path.stat().st_size, path.name


def test_loss_of_power_leaves_a_complete_target_or_none(tmp_path, tmp_path_factory):
    tensors = {f"layers.{number}": LazyTensor.of(torch.full((5,), float(number))) for number in range(3)}

    def check(folder, promise):
        """A folder under its final name is complete; a resumed conversion keeps only complete files."""
        if (folder / "a/out").exists():
            result = load_safetensors(folder / "a/out").tensors
            assert {name: tensor.read().tolist() for name, tensor in result.items()} == {
                name: tensor.read().tolist() for name, tensor in tensors.items()
            }
            assert (folder / "a/out/config.json").read_text() == "{}\n"
        else:
            assert promise is None
            with Target(folder / "a/out", "a conversion") as target:
                for path in target.folder.rglob("*.safetensors"):
                    assert path.name in target.finished and read_safetensors(path)

    with PowerLoss(tmp_path, tmp_path_factory.mktemp("states"), check).recording() as power:
        with Target(tmp_path / "a/out", "a conversion") as target:
            target.write_shards(tensors, max_bytes=20)
            target.write_json("config.json", {})
            target.publish()
        power.promise = "published"
    assert power.num_states > 20


def test_a_loss_of_power_leaves_the_old_or_the_new_checkpoint_of_megatron_lms_format(tmp_path, tmp_path_factory):
    def interchange(iteration):
        names = ("embedding.word_embeddings.weight", "decoder.layers.0.mlp.linear_fc2.weight")
        weights = {f"model.{name}": LazyTensor.of(torch.full((4, 2), float(iteration))) for name in names}
        counters = {"iteration": iteration, "train_state": {"consumed_train_samples": 8}}
        return Interchange({"num_layers": 1, "vocab_size": 4, "make_vocab_size_divisible_by": 1}, weights, counters)

    def check(folder, promise):
        """The tracker's checkpoint is complete, and so is every folder with ``.metadata``, which is written last."""
        for marker in folder.glob("a/iter_*/.metadata"):
            tensors = load_megatron_torch_dist(marker.parent).tensors.values()
            assert [x.read().tolist() for x in tensors] == [[[float(marker.parent.name[-1])] * 2] * 4] * 2
        if not (folder / "a" / TRACKER).exists():
            assert promise is None
            return
        which = read_tracker(folder / "a")
        assert promise is None or which >= promise
        tensors = load_megatron_torch_dist(folder / "a").tensors.values()
        assert [x.read().tolist() for x in tensors] == [[[float(which)] * 2] * 4] * 2

    with PowerLoss(tmp_path, tmp_path_factory.mktemp("states"), check).recording() as power:
        for iteration in (1, 2):
            save_megatron_torch_dist(interchange(iteration), tmp_path / "a")
            power.promise = iteration
    assert power.num_states > 20


def test_tensors_share_files_up_to_the_bound_wide_elements_first():
    tensors = {name: LazyTensor.of(torch.zeros(size, dtype=kind)) for name, size, kind in (
        ("a", 1, torch.float32), ("b", 2, torch.bfloat16), ("c", 2, torch.bfloat16), ("d", 1, torch.float32),
        ("e", 9, torch.uint8), ("f", 1, torch.uint8),
    )}  # fmt: skip
    assert [list(group) for group in in_files(tensors, 8)] == [["a", "b"], ["d", "c"], ["e"], ["f"]]
    assert in_files({}, 8) == []


def test_tensors_begin_where_a_mapping_can_take_them(tmp_path):
    for length in range(8):
        with Target(tmp_path / str(length)) as target:
            entry = target.write("x.safetensors", {"x" * (length + 1): LazyTensor.of(torch.ones(2))}, {})
        assert entry["header_bytes"] % 8 == 0 and entry["tensors"]["x" * (length + 1)][0] == entry["header_bytes"]


def test_a_folder_of_plain_safetensors_is_all_of_its_files_or_those_of_its_index(tmp_path):
    for name in "ab":
        save_file({name: torch.ones(2)}, tmp_path / f"{name}.safetensors")
    assert load_safetensors(tmp_path).tensors.keys() == {"a", "b"}
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "a.safetensors"}}')
    assert load_safetensors(tmp_path).tensors.keys() == {"a"}


def test_reading_many_names_collects_no_garbage(tmp_path):
    """Collections scan all objects that were made before: 300,000 names took three times as long."""
    save_file({f"name.{number}": torch.zeros(1) for number in range(20_000)}, tmp_path / "x.safetensors")
    collections = []

    def note(phase, info):
        collections.append(info["generation"])

    gc.callbacks.append(note)
    try:
        assert len(read_safetensors(tmp_path / "x.safetensors")) == 20_000
        assert len(collections) <= 2 and 2 not in collections  # after it, of young objects only
    finally:
        gc.callbacks.remove(note)
    assert gc.isenabled()


def test_time_to_assign_names_to_shards_is_linear(tmp_path):
    files = {f"model-{number}.safetensors": {f"{number}.{part}" for part in range(50)} for number in range(4_000)}
    names = {name: file for file, members in files.items() for name in members}
    (tmp_path / "index.json").write_text(json.dumps({"weight_map": names}))
    for file in files:
        (tmp_path / file).touch()
    start = time.process_time()
    result = read_shards(tmp_path / "index.json", lambda path: dict.fromkeys(files[path.name], None))
    assert result.keys() == names.keys()
    assert time.process_time() - start < 20  # comparing every name with every file takes 40 s
