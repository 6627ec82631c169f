"""Memory saved for backward shrinks with the number of context-parallel ranks in every form."""

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.attention.context_parallel import zigzag
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

LENGTH, BATCH, VOCAB = 512, 2, 64


def kept_bytes(rank, size, form, levels, attention_dropout=0.0):
    """Bytes of all tensors that the forward pass of a model saves, weights excluded."""
    groups = parallel_state.initialize_model_parallel(
        context_parallel_size=size, hierarchical_context_parallel_sizes=levels
    )
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=8, num_query_groups=4, context_parallel_size=size,
        cp_comm_type=[form], hidden_dropout=0.1, attention_dropout=attention_dropout, swiglu=True,
        normalization="RMSNorm",
    )  # fmt: skip
    spec = get_gpt_decoder_block_spec(config)
    model = GPTModel(config, spec, VOCAB, LENGTH, position_embedding_type="rope", groups=groups)
    weights = {param.untyped_storage().data_ptr() for param in model.parameters()}
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % VOCAB
    local = zigzag.local_part(tokens, rank, size)
    positions = zigzag.positions(LENGTH, rank, size).expand_as(local)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(local, positions, labels=local).sum()
    total = sum(storages.values())
    loss.backward()
    return total


@pytest.mark.parametrize("form, size, levels", [
    ("p2p", 2, None), ("p2p", 4, None), ("allgather", 4, None), ("a2a", 4, None), ("a2a+p2p", 4, [2, 2]),
])  # fmt: skip
def test_saved_bytes_per_rank_fall_with_context_parallelism(gloo_pool, form, size, levels):
    (single,) = gloo_pool.run(kept_bytes, 1, "p2p", None)
    for saved in gloo_pool.run(kept_bytes, size, form, levels):
        assert saved * size < 1.05 * single, f"{saved} bytes on one of {size} ranks, {single} on one rank"


@pytest.mark.parametrize("form, size, levels", [("allgather", 2, None), ("a2a", 2, None), ("a2a+p2p", 2, [2, 1])])
def test_no_form_keeps_the_weights_that_dropout_drops(gloo_pool, form, size, levels):
    ring = max(gloo_pool.run(kept_bytes, size, "p2p", None, 0.1))
    for saved in gloo_pool.run(kept_bytes, size, form, levels, 0.1):
        assert saved < 1.1 * ring, f"{saved} bytes, {ring} in a ring"
