"""Live weights of a sharded model are the exported folder's, byte for byte; one bucket is gathered at a time."""

from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from tests.test_utils.layouts import VOCAB_SIZE, configure

BASE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    " --micro-batch-size 1 --global-batch-size 4 --train-iters 3 --num-workers 0 --lr 1e-2 --eval-iters 0"
    " --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --ffn-hidden-size 64"
    " --group-query-attention --num-query-groups 2 --make-vocab-size-divisible-by 8 --bf16"
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --untie-embeddings-and-output-weights"
FP8_GATHERS = "--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
CASES = {
    "experts, tp2 pp2 ep2": (f"{EXPERTS} {TP2} --pipeline-model-parallel-size 2 --expert-model-parallel-size 2"
                             " --expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall", 4, 3000),
    "tied, tp2 pp2": (f"{TP2} --pipeline-model-parallel-size 2", 4, 3000),
    "fsdp 2": ("--use-torch-fsdp2 --no-gradient-accumulation-fusion --untie-embeddings-and-output-weights", 2, 1 << 20),
    "fp8 gathers": (f"{FP8_GATHERS} --use-distributed-optimizer", 2, 3000),
    "fp8 gathers, fsdp 2": (f"{FP8_GATHERS} --use-torch-fsdp2", 2, 3000),
    "one rank": (EXPERTS, 1, 1),
}  # fmt: skip


def export(rank, world_size, flags, bucket_bytes, folder):
    """Save a checkpoint, convert it on rank 0; return this rank's live weights and the sizes of its buckets."""
    from megatron.training.hooks.hugging_face import convert_to_hf
    from megatron.training.initialize import initialize_megatron
    from megatron.training.live_weights import hf_weights
    from megatron.training.run import build_components
    from megatron.training.tasks.language_model import task_class
    from megatron.training.verify.layout_trace import with_synthetic_data

    cfg = configure([*BASE.split(), *flags.split(), "--save", f"{folder}/run"], world_size, "bf16")
    groups = initialize_megatron(cfg)
    task = with_synthetic_data(task_class("gpt"), VOCAB_SIZE)(cfg)
    parts = build_components(cfg, task, groups)
    parts.state.iteration = 1
    assert parts.checkpointer.save(parts.state)
    if rank == 0:
        convert_to_hf(f"{folder}/run/iter_0000001", f"{folder}/hf")
    for chunk in parts.model:
        chunk.zero_grad_buffer()  # as in training: gathered weights that only the save needed are freed
    sizes, reduce = [], torch.distributed.all_reduce

    def noting(tensor, **options):
        sizes.append(tensor.nbytes)
        return reduce(tensor, **options)

    with mock.patch("torch.distributed.all_reduce", noting):
        result = dict(
            hf_weights(cfg, parts.model, vocab_size=VOCAB_SIZE, groups=groups, bucket_bytes=bucket_bytes)
        )
    parts.checkpointer.close()
    return result, sizes


@pytest.mark.parametrize("case", CASES)
def test_live_weights_equal_the_exported_folder(gloo_pool, case, tmp_path):
    flags, world_size, bucket_bytes = CASES[case]
    results = gloo_pool.run(export, world_size, flags, bucket_bytes, str(tmp_path))
    expected = load_file(tmp_path / "hf" / "model.safetensors")
    for actual, sizes in results:
        assert list(actual) == list(results[0][0]) and actual.keys() == expected.keys()
        for name, tensor in expected.items():
            assert actual[name].dtype == tensor.dtype and torch.equal(actual[name], tensor), name
        assert world_size == 1 or (len(sizes) > 1 or bucket_bytes > 1 << 16)
        largest = max(x.nbytes for x in expected.values()) * 2  # gate and up, query, key and value are one tensor
        assert all(size <= max(bucket_bytes, largest) for size in sizes)
