"""A recorded micro-batch gives the bits of plain execution: losses and gradients, over changing data and loss factors.

On a CPU the replay calls the recorded function again, which proves all but the recording itself.
"""

from functools import partial

import pytest
import torch

from megatron.compat.training_utils import to_device
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.training.start.cuda_graphs import GraphedForwardBackward

VOCAB, LENGTH, BATCH, MICRO_BATCHES = 50, 16, 2, 3


def make_model(**overrides):
    config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, **overrides)
    model = GPTModel(
        config, get_gpt_decoder_block_spec(config), vocab_size=VOCAB, max_sequence_length=LENGTH,
        share_embeddings_and_output_weights=True, groups=SINGLE_PROCESS,
    )  # fmt: skip
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return DistributedDataParallel(None, ddp, model, groups=SINGLE_PROCESS)


def batches(step):
    generator = torch.Generator().manual_seed(step)
    for index in range(MICRO_BATCHES):
        tokens = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=generator)
        yield {
            "tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous(),
            "loss_mask": (tokens[:, 1:] > 3).float(), "position_ids": torch.arange(LENGTH).repeat(BATCH, 1),
            "sample_index": torch.arange(BATCH) + (step * MICRO_BATCHES + index) * BATCH,
        }  # fmt: skip


def forward_step(data_iterator, model, device):
    batch = to_device(next(data_iterator), device)
    output = model(
        batch["tokens"], batch["position_ids"], labels=batch["labels"], sample_index=batch["sample_index"]
    )

    def loss_func(output):
        loss, count = (output * batch["loss_mask"]).sum(), batch["loss_mask"].sum()
        return loss, count, {"lm loss": torch.stack([loss.detach().double(), count.double()])}

    return output, loss_func


def train(model, forward_backward, device, steps=6):
    """Everything that came out: logged values and gradients of each step, the weights after it."""
    outcome = []
    for step in range(steps):
        model.zero_grad_buffer()
        results = forward_backward(
            forward_step_func=partial(forward_step, device=device), data_iterator=batches(step), model=[model],
            num_microbatches=MICRO_BATCHES, loss_transform=lambda loss, step=step: loss / (7.0 + step),
            seq_length=LENGTH, micro_batch_size=BATCH,
        )  # fmt: skip
        model.finish_grad_sync()
        for result in results:
            outcome += [result.num_tokens, result.logged["lm loss"]]
        with torch.no_grad():
            for param in model.parameters():
                outcome.append(param.main_grad.clone())
                param.sub_(0.1 * param.main_grad)
    return outcome


def assert_equal_bits(found, expected):
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected))


def test_replays_equal_plain_execution():
    device, recorded = torch.device("cpu"), []
    expected = train(make_model(), forward_backward_no_pipelining, device)
    graphed = GraphedForwardBackward(
        forward_backward_no_pipelining, device, warmup_steps=2, record=lambda run, stream: recorded.append(run) or run
    )
    assert_equal_bits(train(make_model(), graphed, device), expected)
    assert len(recorded) == 1


def test_other_shapes_are_refused():
    device, model = torch.device("cpu"), make_model()
    graphed = GraphedForwardBackward(
        forward_backward_no_pipelining, device, warmup_steps=0, record=lambda run, stream: run
    )
    train(model, graphed, device, steps=1)
    short = [{name: value[:1] for name, value in batch.items()} for batch in batches(1)]
    with pytest.raises(ValueError, match="tokens .1, 16. .*the recorded one .*tokens .2, 16.*leave the flag"):
        graphed(
            forward_step_func=partial(forward_step, device=device), data_iterator=iter(short), model=[model],
            num_microbatches=1,
        )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [{"params_dtype": torch.float32}, {"bf16": True}])
def test_cuda_graphs_equal_plain_execution_bit_for_bit(precision):
    """With dropout on; unfused attention, since cuDNN's backward pass does not repeat its own bits."""
    device = torch.device("cuda", torch.cuda.current_device())
    choices = {**precision, "attention_backend": "unfused"}
    expected = train(make_model(**choices), forward_backward_no_pipelining, device)
    graphed = GraphedForwardBackward(
        forward_backward_no_pipelining, device, warmup_steps=3, stream=torch.cuda.Stream(device)
    )
    assert_equal_bits(train(make_model(**choices), graphed, device), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [LENGTH, 128], ids=["flash", "cuDNN"])
def test_cuda_graphs_with_fused_attention_agree(length, monkeypatch):
    monkeypatch.setitem(globals(), "LENGTH", length)
    device = torch.device("cuda", torch.cuda.current_device())
    choices = {"bf16": True, "attention_dropout": 0.0}
    expected = train(make_model(**choices), forward_backward_no_pipelining, device)
    graphed = GraphedForwardBackward(
        forward_backward_no_pipelining, device, warmup_steps=3, stream=torch.cuda.Stream(device)
    )
    for found, wanted in zip(train(make_model(**choices), graphed, device), expected):
        torch.testing.assert_close(found, wanted, rtol=3e-2, atol=3e-3)
