"""Tensor parallelism: split linears and embeddings, vocabulary-parallel loss, and the collectives between them."""

from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.data import broadcast_data
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    StackedSize,
    VocabParallelEmbedding,
    VocabParallelOutput,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.tensor_parallel.vocabulary import padded_vocab_size

__all__ = [
    "ColumnParallelLinear", "RowParallelLinear", "StackedSize", "VocabParallelEmbedding", "VocabParallelOutput",
    "broadcast_data", "model_parallel_cuda_manual_seed", "padded_vocab_size", "vocab_parallel_cross_entropy",
]  # fmt: skip
