"""Saving and loading rectangles: any cut onto any other, damage found, nothing outside the folder touched."""

import json
import random
import shutil

import pytest
import torch
from safetensors import safe_open

from megatron.core import parallel_state
from megatron.core.dist_checkpointing import CheckpointError, CheckpointReader, CheckpointWriteError, ShardedTensor
from megatron.core.dist_checkpointing import load as load_state
from megatron.core.dist_checkpointing import manifest as manifest_module
from megatron.core.dist_checkpointing import reader as reader_module
from megatron.core.dist_checkpointing import save as save_state
from megatron.core.dist_checkpointing import writer as writer_module
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.sharding import sharded_tensor
from megatron.core.sharding.sharded_tensor import module_tensors

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool,
]  # fmt: skip


def values(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 50).abs().to(dtype)


def replicated(name, tensor):
    """A tensor that is whole on every rank that has it."""
    return ShardedTensor(name, tensor, tuple(tensor.shape), (0,) * tensor.ndim)


def small_state():
    state = {f"model.{str(dtype)[6:]}": values((7, 3), dtype) for dtype in DTYPES}
    state |= {"model.scalar": torch.tensor(3.5), "optimizer.moment": values((40, 9), torch.float32, 1)}
    state |= {"model.empty": torch.zeros(0, 4), "rng.torch": torch.get_rng_state()}
    return {name: replicated(name, tensor) for name, tensor in state.items()}


def blank(state):
    return {k: ShardedTensor(t.name, torch.zeros_like(t.local), t.global_shape, t.offsets) for k, t in state.items()}


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 64 bytes, so that small tensors have several."""
    for module in (manifest_module, reader_module, writer_module):
        monkeypatch.setattr(module, "BLOCK_BYTES", 64)


@pytest.fixture
def saved(tmp_path, small_blocks):
    save_state(small_state(), tmp_path / "iter_0000001", objects={"answer": [42]})
    return tmp_path / "iter_0000001"


def test_every_dtype_comes_back_bit_for_bit(saved):
    state = small_state()
    loaded = load_state(blank(state), saved)
    for name, tensor in state.items():
        assert torch.equal(loaded[name], tensor.local) and loaded[name].dtype == tensor.local.dtype
    assert CheckpointReader(saved).objects == {"answer": [42]}
    CheckpointReader(saved).verify()
    assert not list(saved.parent.glob(".*")), "no leftovers"


def test_manifests_know_the_size_of_every_storable_dtype():
    assert {name: dtype.itemsize for name, dtype in sharded_tensor.DTYPES.items()} == manifest_module.ITEM_BYTES


def test_the_complete_file_is_synced(tmp_path, small_blocks, monkeypatch):
    """Bytes that Python still buffers while the file is synced would be lost with the power."""
    synced, fsync = {}, writer_module.os.fsync

    def note(descriptor):
        status = writer_module.os.fstat(descriptor)
        synced[status.st_ino] = status.st_size
        fsync(descriptor)

    monkeypatch.setattr(writer_module.os, "fsync", note)
    save_state(small_state(), tmp_path / "iter_0000001", objects={"answer": [42]})
    for path in (tmp_path / "iter_0000001").iterdir():
        assert synced[path.stat().st_ino] == path.stat().st_size, path.name


def test_the_files_are_plain_safetensors(saved):
    with safe_open(saved / "model_00000.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("model.bfloat16"), small_state()["model.bfloat16"].local)
    for path in saved.glob("*.safetensors"):
        assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0, "so that tensors can be mapped"
    for path in saved.iterdir():
        data = path.read_bytes()
        assert data[:2] not in (b"\x80\x02", b"\x80\x04", b"PK"), "neither pickle nor zip"


def cut(rank, world, dim, shape=(12, 10)):
    """Return this rank's uneven slice along ``dim`` of a global tensor, and a replicated tensor."""
    full = values(shape, torch.float32)
    bounds = [0] + [shape[dim] * (r + 1) // world - (1 if r + 1 < world else 0) for r in range(world)]
    local = full.narrow(dim, bounds[rank], bounds[rank + 1] - bounds[rank]).contiguous()
    offsets = [0, 0]
    offsets[dim] = bounds[rank]
    return {
        "cut": ShardedTensor("model.cut", local, shape, tuple(offsets)),
        "whole": replicated("model.whole", values((5, 5), torch.float32, 7)),
        "more": replicated("model.more", values((5, 5), torch.float32, 8)),
        "row": ShardedTensor("rng.row", torch.full((1, 4), rank), (world, 4), (rank, 0)),
    }


def save_cut(rank, world, folder, dim):
    parallel_state.initialize_model_parallel()
    save_state(cut(rank, world, dim), folder, objects={"rank": rank})


def load_cut(rank, world, folder, dim):
    parallel_state.initialize_model_parallel()
    expected = cut(rank, world, dim)
    del expected["row"]
    loaded = load_state(blank(expected), folder, allow_unused=["rng."])
    return all(torch.equal(loaded[key], tensor.local) for key, tensor in expected.items())


@pytest.mark.parametrize("before, after", [((1, 0), (3, 1)), ((3, 0), (2, 1)), ((2, 1), (1, 0)), ((3, 1), (2, 0))])
def test_any_cut_loads_as_any_other(gloo_pool, tmp_path, before, after):
    folder = tmp_path / "iter_0000007"
    gloo_pool.run(save_cut, before[0], folder, before[1])
    assert all(gloo_pool.run(load_cut, after[0], folder, after[1]))
    manifest = CheckpointReader(folder).manifest
    assert manifest["objects"] == {"rank": 0} and manifest["world_size"] == before[0]
    assert len(manifest["tensors"]["model.whole"]["chunks"]) == 1, "copies are written once"
    assert len(manifest["tensors"]["rng.row"]["chunks"]) == before[0]
    if before == (3, 0):  # with equal cuts the copies decide
        writers = {manifest["tensors"][f"model.{name}"]["chunks"][0]["file"] for name in ("whole", "more")}
        assert len(writers) == 2, "copies are spread over the ranks"


def test_every_flipped_bit_is_found(saved):
    """Each file, random bits: opening, or verifying, must fail and name the file."""
    random.seed(0)
    for path in sorted(saved.iterdir()):
        data = path.read_bytes()
        for _ in range(60):
            position, bit = random.randrange(len(data)), random.randrange(8)
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            path.write_bytes(flipped)
            with pytest.raises(CheckpointError, match=path.name):
                CheckpointReader(saved).verify()
        path.write_bytes(data)
    CheckpointReader(saved).verify()


def test_damaged_tensors_are_named_at_load(saved):
    path = saved / "optimizer_00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    state = small_state()
    with pytest.raises(CheckpointError, match="optimizer_00000.safetensors.*optimizer.moment"):
        load_state(blank(state), saved)
    weights = {name: tensor for name, tensor in blank(state).items() if not name.startswith("optimizer")}
    load_state(weights, saved, allow_unused=["optimizer."])  # what is not read does not matter


@pytest.mark.parametrize("harm, words", [
    (lambda d: (d / "model_00000.safetensors").unlink(), "model_00000.safetensors is missing"),
    (lambda d: (d / "model_00000.safetensors").write_bytes(b""), "has 0 bytes instead of"),
    (lambda d: shutil.copy(d / "model_00000.safetensors", d / "x.safetensors"), "x.safetensors does not belong"),
    (lambda d: (d / "metadata.json").unlink(), "metadata.json is missing"),
    (lambda d: (d / "metadata.json").write_bytes((d / "metadata.json").read_bytes()[:-9]), "damaged or incomplete"),
    (lambda d: (d / "metadata.json").write_text("{}"), "damaged or incomplete"),
    (lambda d: shutil.rmtree(d), "no checkpoint"),
])  # fmt: skip
def test_missing_foreign_and_truncated_files_are_named(saved, harm, words):
    harm(saved)
    with pytest.raises(CheckpointError, match=words):
        CheckpointReader(saved)


def rewrite(saved, change):
    """An attacker's manifest: changed, with a valid checksum."""
    path = saved / "metadata.json"
    content = json.loads(path.read_text())
    del content["sha256"]
    change(content)
    path.write_bytes(manifest_module.encode(content))


BAD_NAMES = ["../secret.safetensors", "/etc/x.safetensors", "a/b.safetensors", ".safetensors", "x.bin"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_paths_in_the_manifest_are_rejected(saved, name):
    def change(content):
        content["files"][name] = content["files"].pop("model_00000.safetensors")

    rewrite(saved, change)
    with pytest.raises(CheckpointError, match="file name .* is rejected"):
        CheckpointReader(saved)


def test_links_are_rejected(saved, tmp_path):
    path = saved / "model_00000.safetensors"
    outside = tmp_path / "outside.safetensors"
    path.rename(outside)
    path.symlink_to(outside)
    with pytest.raises(CheckpointError, match="not a regular file"):
        CheckpointReader(saved)


@pytest.mark.parametrize("change", [
    lambda c: c.update(files=[]), lambda c: c["tensors"]["model.scalar"].update(dtype="F128"),
    lambda c: c["tensors"]["model.scalar"].update(shape=[-1]), lambda c: c["tensors"].update(x=None),
    lambda c: c["tensors"]["model.float32"]["chunks"][0].update(start=10**9),
    lambda c: c["tensors"]["model.float32"]["chunks"][0].update(start="8"),
    lambda c: c["tensors"]["model.float32"]["chunks"][0].update(shape=[7, 4]),
    lambda c: c["tensors"]["model.float32"]["chunks"][0].update(file="none.safetensors"),
    lambda c: c["tensors"]["model.float32"]["chunks"][0].update(crc32=[]),
    lambda c: c["files"]["model_00000.safetensors"].update(header_bytes="8"),
    lambda c: c.update(format="other"), lambda c: c.update(format_version=99), lambda c: c.update(assets={"../x": {}}),
])  # fmt: skip
def test_malformed_manifests_are_rejected(saved, change):
    rewrite(saved, change)
    with pytest.raises(CheckpointError, match=r"metadata\.json"):
        CheckpointReader(saved)


def test_missing_unused_and_misshapen_names_are_all_listed(saved):
    state = blank(small_state())
    del state["model.int32"], state["model.scalar"]
    state["new"] = replicated("model.new", torch.zeros(2))
    state["model.float32"] = replicated("model.float32", torch.zeros(3, 7))
    state["model.int64"] = replicated("model.int64", torch.zeros(7, 3))
    with pytest.raises(CheckpointError) as caught:
        load_state(state, saved)
    for words in (
        "model.int32 is stored but not used", "model.scalar is stored", "model.new is missing",
        "model.float32 has shape [7, 3], expected [3, 7]", "model.int64 holds I64, expected torch.float32",
    ):  # fmt: skip
        assert words in str(caught.value)


def test_of_many_problems_the_first_are_listed(saved):
    more = {f"x{number:03d}": replicated(f"x{number:03d}", torch.zeros(2)) for number in range(60)}
    with pytest.raises(CheckpointError, match=r"\(60 problems\): x000 is missing; .*x039 is missing; …$"):
        load_state({**blank(small_state()), **more}, saved)


def test_saving_again_replaces_and_a_failure_keeps_the_old_one(saved, monkeypatch):
    new = {"a": replicated("model.a", torch.ones(3))}

    def no_space(path, data):
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(writer_module, "write_file", no_space)
        with pytest.raises(CheckpointWriteError, match="No space left"):
            save_state(new, saved)
    CheckpointReader(saved).verify()
    assert CheckpointReader(saved).objects == {"answer": [42]} and not list(saved.parent.glob(".*"))
    save_state(new, saved)
    assert CheckpointReader(saved).names == ["model.a"] and not list(saved.parent.glob(".*"))


def save_with_gap(rank, world, folder):
    parallel_state.initialize_model_parallel()
    save_state({"x": ShardedTensor("model.x", torch.ones(2), (5,), (2 * rank,))}, folder)


def save_failing_on_rank_1(rank, world, folder):
    parallel_state.initialize_model_parallel()

    def fault(phase):
        if phase == "mid_shard" and rank == 1:
            raise OSError(28, "No space left on device")

    try:
        save_state(cut(rank, world, 0), folder, fault=fault)
    except CheckpointWriteError as error:
        return str(error)


def test_a_hole_in_a_tensor_is_rejected_before_anything_appears(gloo_pool, tmp_path):
    with pytest.raises(AssertionError, match="model.x of shape .* is not covered exactly once"):
        gloo_pool.run(save_with_gap, 2, tmp_path / "c")
    assert not list(tmp_path.iterdir())


def test_one_ranks_full_disk_is_everyones_failure(gloo_pool, tmp_path):
    messages = gloo_pool.run(save_failing_on_rank_1, 2, tmp_path / "c")
    assert all("rank 1" in message and "No space left" in message for message in messages)
    assert not list(tmp_path.iterdir())


def test_assets_travel_along_and_are_checked(tmp_path):
    source = tmp_path / "tokenizer.json"
    source.write_text("{}")
    directory = tmp_path / "iter_0000001"
    save_state({"a": replicated("model.a", torch.ones(3))}, directory, assets={"tokenizer/tokenizer.json": source})
    assert (directory / "tokenizer" / "tokenizer.json").read_text() == "{}"
    (directory / "tokenizer" / "tokenizer.json").write_text("[]")
    with pytest.raises(CheckpointError, match="tokenizer.json is damaged"):
        CheckpointReader(directory).verify()


def test_a_module_is_stored_under_its_names():
    module = torch.nn.BatchNorm1d(3)
    assert set(module_tensors(module, prefix="model.", groups=SINGLE_PROCESS)) == {
        "model.weight", "model.bias", "model.running_mean", "model.running_var", "model.num_batches_tracked",
    }  # fmt: skip


def test_impossible_rectangles_are_rejected():
    with pytest.raises(ValueError, match="does not lie in"):
        ShardedTensor("x", torch.ones(3), (4,), (2,))
    with pytest.raises(ValueError, match="cannot be stored"):
        replicated("x", torch.ones(3, dtype=torch.complex64))
