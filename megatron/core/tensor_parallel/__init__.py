"""Tensor parallelism: split linears and embeddings, vocabulary-parallel loss, and the collectives between them."""

from megatron import serve_other_names
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.data import broadcast_data
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    StackedSize,
    VocabParallelEmbedding,
    VocabParallelOutput,
)
from megatron.core.tensor_parallel.mappings import (
    all_gather_last_dim_from_tensor_parallel_region,
    all_to_all,
    all_to_all_hp2sp,
    all_to_all_sp2hp,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_last_dim_to_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.tensor_parallel.utils import (
    gather_split_1d_tensor,
    split_tensor_along_last_dim,
    split_tensor_into_1d_equal_chunks,
)
from megatron.core.tensor_parallel.vocabulary import padded_vocab_size

__all__ = [
    "ColumnParallelLinear", "RowParallelLinear", "StackedSize", "VocabParallelEmbedding", "VocabParallelOutput",
    "all_gather_last_dim_from_tensor_parallel_region", "all_to_all", "all_to_all_hp2sp", "all_to_all_sp2hp",
    "broadcast_data", "copy_to_tensor_model_parallel_region", "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region", "gather_split_1d_tensor", "model_parallel_cuda_manual_seed",
    "padded_vocab_size", "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_last_dim_to_tensor_parallel_region", "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region", "scatter_to_tensor_model_parallel_region", "split_tensor_along_last_dim",
    "split_tensor_into_1d_equal_chunks", "vocab_parallel_cross_entropy",
]  # fmt: skip

serve_other_names(__name__)
