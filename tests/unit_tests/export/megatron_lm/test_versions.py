"""``torch_dist`` as several versions of Megatron-LM lay it out, written here piece by piece."""

import argparse
import itertools
import pickle

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.export.megatron_lm import load_megatron_torch_dist
from tests.test_utils.megatron_torch import (
    ARGS,
    HIDDEN,
    LAYERS,
    PADDED,
    flat_state,
    names_of,
)
from tests.unit_tests.export.megatron_lm.test_checkpoints import expect, write_torch_dist


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_torch_dist(tmp_path_factory.mktemp("dist"))


def rewritten(written, target, change):
    """Copy ``written`` and apply ``change`` to its tensors (name -> pieces by offsets; objects by None), ``common.pt``
    and the metadata."""
    source, directory = written / "iter_0000007", target / "iter_0000007"
    directory.mkdir(parents=True)
    with open(source / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    full = {name: torch.empty(entry.size) for name, entry in metadata.state_dict_metadata.items()}
    dcp.load(full, checkpoint_id=source, no_dist=True)
    common = torch.load(source / "common.pt", weights_only=False)
    pieces = {name: {(0,) * tensor.ndim: tensor} for name, tensor in full.items()}
    metadata = Metadata({}, None, {})
    change(pieces, common, metadata)
    with open(directory / "__0_0.distcp", "wb") as file:
        for name, piece in pieces.items():
            chunks = []
            for offsets, value in piece.items():
                start = file.tell()
                torch.save(value, file)
                index = MetadataIndex(name, None if offsets is None else torch.Size(offsets))
                metadata.storage_data[index] = _StorageInfo("__0_0.distcp", start, file.tell() - start)
                chunks.append((offsets, value))
            metadata.state_dict_metadata[name] = BytesStorageMetadata()
            if None not in piece:
                size = torch.Size(max(o[dim] + v.shape[dim] for o, v in chunks) for dim in range(chunks[0][1].ndim))
                listed = [ChunkStorageMetadata(torch.Size(offsets), value.shape) for offsets, value in chunks]
                metadata.state_dict_metadata[name] = TensorStorageMetadata(TensorProperties(), size, listed)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    if common:
        torch.save(common, directory / "common.pt")
    (target / "latest_checkpointed_iteration.txt").write_text("7")
    return target


def flat_pieces(name, tensor, tp=2):
    """The state of a parameter as ``fully_sharded_model_space`` lays it out: parts of two tensor-parallel ranks, of a
    gated layer the gates' parts before the values', each flat and cut unevenly between two data-parallel ranks."""
    counts = [1] * tensor.ndim
    dim = 1 if "linear_proj" in name or "linear_fc2" in name else 0
    if "norm" not in name:
        counts[tensor.ndim - 2 + dim] = 2 * tp if "linear_fc1" in name else tp
    if "decoder.layers" in name:
        counts[0] = LAYERS
    result = {}
    for index in itertools.product(*map(range, counts)):
        local = tensor
        for axis, (i, count) in enumerate(zip(index, counts)):
            local = local.chunk(count, axis)[i]
        flat, cut = local.flatten(), local.numel() // 3
        leading = (1,) * tensor.ndim
        result[(*index, 0)] = flat[:cut].reshape(*leading, -1).clone()
        result[(*index, cut)] = flat[cut:].reshape(*leading, -1).clone()
    return result


def test_fully_sharded_model_space_states_equal_full_ones(written, tmp_path):
    """Versions 0.12 to 0.15: flat ranges of every rank's part, with one more dimension than the parameter."""

    def change(pieces, common, metadata):
        metadata.mcore_data = {}
        for name in [name for name in pieces if name.startswith("optimizer.")]:
            (tensor,) = pieces[name].values()
            if tensor.ndim > 1:  # 1-D tensors, below, are split into ranges
                pieces[name] = flat_pieces(name, tensor)
                metadata.mcore_data[name] = {"nd_reformulated_orig_global_shape": tuple(tensor.shape)}
            else:
                pieces[name] = {(0,): tensor[:5].clone(), (5,): tensor[5:].clone()}
        common["optimizer"] = {"optimizer": {"param_groups": [{"step": 7}]},
                               "param_state_sharding_type": "fully_sharded_model_space"}  # fmt: skip

    folder = rewritten(written, tmp_path, change)
    expect(load_megatron_torch_dist(folder))
    expect(load_megatron_torch_dist(folder, padded_vocabulary=True), rows=PADDED)


def flat_buckets(pieces, common, metadata):
    """``dp_reshardable`` of two tensor-parallel ranks and two stages: buffers that do not say what they hold."""
    for name in [name for name in pieces if name.startswith("optimizer.")]:
        del pieces[name]
    common["args"] = argparse.Namespace(**ARGS, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    for stage, rank in itertools.product(range(2), range(2)):
        (buffer,) = flat_state([*names_of(stage, 2).values()], rank, 2)[0].values()
        group = f"optimizer.distributed.dp_group_idx_{2 * stage + rank}.gbuf_idx_0"
        for kind in ("param", "exp_avg", "exp_avg_sq"):
            pieces[f"{group}.dtype_(torch.float32, torch.float32).bucket_idx_0.{kind}"] = {(0,): buffer[kind]}
    pieces["optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1"] = {None: [{"param_groups": [{"step": 7}]}]}


def test_flat_buckets_of_the_distributed_optimizer_are_full_states(written, tmp_path):
    expect(load_megatron_torch_dist(rewritten(written, tmp_path, flat_buckets)))


@pytest.mark.parametrize(("harm", "message"), [
    (lambda pieces, common: setattr(common["args"], "tensor_model_parallel_size", 1), "of 4 ranks: save it again"),
    (lambda pieces, common: [piece[(0,)].neg_() for name, piece in pieces.items() if "idx_1." in name
                             and name.endswith(".param")], "the flat state of rank 1 is in no known order"),
    (lambda pieces, common: pieces.update({
        "optimizer.distributed.dp_group_idx_0.gbuf_idx_1.dtype_x.bucket_idx_0.param": {(0,): torch.ones(2)},
    }), "of several buffers"),
])  # fmt: skip
def test_flat_buckets_that_cannot_be_cut_are_rejected_with_advice(harm, message, written, tmp_path):
    def change(pieces, common, metadata):
        flat_buckets(pieces, common, metadata)
        harm(pieces, common)

    with pytest.raises(CheckpointError, match=message) as caught:
        load_megatron_torch_dist(rewritten(written, tmp_path, change))
    assert "--dist-ckpt-optim-fully-reshardable" in str(caught.value)


def test_a_flat_state_that_is_not_its_parameters_is_rejected(written, tmp_path):
    def change(pieces, common, metadata):
        name = "optimizer.state.exp_avg.output_layer.weight"
        (tensor,) = pieces[name].values()
        pieces[name] = flat_pieces(name, tensor)
        metadata.mcore_data = {name: {"nd_reformulated_orig_global_shape": (PADDED, HIDDEN + 1)}}

    with pytest.raises(CheckpointError, match=r"output_layer.weight of shape \[64, 17\] is not \[2, 1, 512\] of flat"):
        load_megatron_torch_dist(rewritten(written, tmp_path, change))


@pytest.mark.parametrize("name", ["common_state", "common_state/shard_0_1"])
def test_common_state_next_to_the_tensors_is_read(name, written, tmp_path):
    """Since July 2026 there is no ``common.pt``."""

    def change(pieces, common, metadata):
        pieces[name] = {None: [dict(common)] if "/" in name else dict(common)}
        common.clear()

    folder = rewritten(written, tmp_path, change)
    assert not (folder / "iter_0000007" / "common.pt").exists()
    expect(load_megatron_torch_dist(folder))
