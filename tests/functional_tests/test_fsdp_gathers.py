"""What FSDP2 gathers: layers for every forward and backward pass, the embedding and the output layer once per step."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist


def gathered_elements(rank, world_size, reshard):
    """Return (elements of a layer, of the rest, those gathered in three micro-batches and in one of the next step)."""
    from megatron.core import parallel_state
    from megatron.core.config.transformer_config import TransformerConfig
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.torch_fully_sharded_data_parallel import TorchFullyShardedDataParallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.training.start.parallelize import output_layer, transformer_layers

    groups = parallel_state.initialize_model_parallel()
    config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, bf16=True)
    model = GPTModel(
        config, get_gpt_decoder_block_spec(config), vocab_size=128, max_sequence_length=16, groups=groups,
        position_embedding_type="rope",
    )  # fmt: skip
    layers = transformer_layers(model)
    per_layer = sum(parameter.numel() for parameter in layers[0].parameters())
    rest = sum(parameter.numel() for parameter in model.parameters()) - 2 * per_layer
    wrapped = TorchFullyShardedDataParallel(
        DistributedDataParallelConfig(), model, layers, groups, reshard_after_forward=reshard, last=output_layer(model)
    )
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # of fully_shard
    gather, sizes = getattr(dist, name), []

    def counting(*arguments, **settings):
        sizes.append(settings.get("output_tensor", arguments[0] if arguments else None).numel())
        return gather(*arguments, **settings)

    tokens, counts = torch.arange(32).view(2, 16), []
    with mock.patch.object(dist, name, counting):
        for step in ("three", "one"):
            for _ in range(3 if step == "three" else 1):
                wrapped(tokens, torch.arange(16).repeat(2, 1), labels=tokens).sum().backward()
                counts.append(sum(sizes))
                sizes.clear()
            wrapped.finish_grad_sync()
            wrapped.zero_grad_buffer()
    return per_layer, rest, counts


@pytest.mark.parametrize("reshard", [True, False])
def test_embedding_and_output_layer_are_gathered_once_per_step(gloo_pool, reshard):
    for layer, rest, counts in gloo_pool.run(gathered_elements, 2, reshard):
        layers = 2 * layer * (1 + reshard)  # two layers, in forward, and in backward if they were freed
        assert counts == [layers + rest, layers, layers, layers + rest]
