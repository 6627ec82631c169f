"""The training step of a reinforcement-learning actor with Megatron-LM's calls, on several layouts: for equal data, in
rows and packed, its losses equal this library's program, and its log-probabilities equal the losses."""

from functools import partial

import numpy as np
import pytest
import torch

from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel as DDP
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel, ModelType
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model, get_model_config, unwrap_model
from tests.test_utils.gpt_runs import MODEL_FLAGS, losses, train

STEPS, ROWS, LENGTH, VOCAB = 4, 8, 32, 64
FLAGS = [
    "--mock-data", "--train-iters", str(STEPS), "--hidden-dropout", "0", "--attention-dropout", "0", "--swiglu",
    "--normalization", "RMSNorm", "--disable-bias-linear", "--position-embedding-type", "rope",
    "--untie-embeddings-and-output-weights", "--clip-grad", "0.5", "--ffn-hidden-size", "64",
    "--eval-iters", "0", "--log-interval", "1",
]  # fmt: skip


@pytest.fixture(scope="module")
def expected(gloo_pool, tmp_path_factory):
    """Losses of the program, by iteration."""
    folder = tmp_path_factory.mktemp("program")
    assert gloo_pool.run(train, 1, [*FLAGS, "--save", str(folder)]) == [0]
    return losses(folder)


def global_batches():
    """The program's data, [rows, tokens] by name for each iteration."""
    from megatron.core.tokenizers.simple import NullTokenizer
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.tasks.gpt import GPTTask

    task = GPTTask(validate_args(parse_args(MODEL_FLAGS + FLAGS), 1), NullTokenizer(VOCAB))
    train_set, *_ = task.train_valid_test_datasets_provider((STEPS * ROWS, 0, 0))
    samples = [train_set[index] for index in range(STEPS * ROWS)]
    for first in range(0, len(samples), ROWS):
        rows = samples[first : first + ROWS]
        yield {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}


def packed(rows):
    """Rows end to end, [1, tokens], and their boundaries."""
    bounds = torch.arange(len(rows["tokens"]) + 1, dtype=torch.int32) * LENGTH
    params = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=LENGTH, max_seqlen_kv=LENGTH,
        cu_seqlens_q_padded=bounds, cu_seqlens_kv_padded=bounds,
    )  # fmt: skip
    return {**{name: value.reshape(1, -1) for name, value in rows.items()}, "packed_seq_params": params}


def micro_batches(batch, packs):
    """Return micro-batches of two rows each; packed ones differ in length."""
    sizes = [1, 3, 2, 2] if packs else [2] * 4
    parts = [dict(zip(batch, values)) for values in zip(*(value.split(sizes) for value in batch.values()))]
    return [packed(part) for part in parts] if packs else parts


def log_probabilities(logits, labels):
    return -tensor_parallel.vocab_parallel_cross_entropy(logits.clone(), labels)


def forward_step(iterator, model, forward_only=False):
    batch = next(iterator)
    output = model(
        input_ids=batch["tokens"], position_ids=None, attention_mask=None, labels=None,
        packed_seq_params=batch.get("packed_seq_params"), loss_mask=batch["loss_mask"],
    )  # fmt: skip

    def loss_func(logits):
        log_probs = log_probabilities(logits, batch["labels"])
        loss = -(log_probs * batch["loss_mask"]).sum()
        retained = {"log_probs": log_probs.detach(), "lengths": [LENGTH] * (log_probs.numel() // LENGTH)}
        if forward_only:
            return loss, retained
        count = batch["loss_mask"].sum().int()
        return loss, count, {"loss": loss.detach().clone(), "count": count, **retained}

    return output, loss_func


def build(layout):
    """initialize_model_parallel ... scheduler, with the words that verl, slime and mbridge pass."""
    tp, pp = layout
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=None,
        use_sharp=False, context_parallel_size=1, expert_model_parallel_size=1, expert_tensor_parallel_size=None,
        nccl_communicator_config_path=None, create_gloo_process_groups=True,
    )  # fmt: skip
    tensor_parallel.model_parallel_cuda_manual_seed(1234, False, False, False)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64, normalization="RMSNorm",
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False, hidden_dropout=0.0,
        attention_dropout=0.0, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
        sequence_parallel=tp > 1, pipeline_dtype=torch.float32, params_dtype=torch.float32, use_cpu_initialization=True,
        variable_seq_lengths=True, moe_token_dispatcher_type="alltoall", moe_router_load_balancing_type="none",
        masked_softmax_fusion=True, bias_activation_fusion=True, persist_layer_norm=True, timers=None, bf16=False,
    )  # fmt: skip
    module = GPTModel(
        config=config, transformer_layer_spec=get_gpt_decoder_block_spec(config, use_transformer_engine=False),
        vocab_size=VOCAB, max_sequence_length=LENGTH, pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(), share_embeddings_and_output_weights=False,
        position_embedding_type="rope", rotary_base=10000,
    )  # fmt: skip
    assert ModelType.encoder_or_decoder and unwrap_model([module])[0] is module
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    model = DDP(config=config, ddp_config=ddp, module=module, disable_bucketing=False)
    model.broadcast_params()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1e-2, min_lr=0.0, clip_grad=0.5, weight_decay=0.01, params_dtype=torch.float32,
            use_distributed_optimizer=True,
        ),
        [model], config_overrides=None, use_gloo_process_groups=True,
    )  # fmt: skip
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=1e-2, min_lr=0.0, lr_warmup_steps=2 * ROWS, lr_decay_steps=STEPS * ROWS,
        lr_decay_style="linear", start_wd=0.01, end_wd=0.01, wd_incr_steps=STEPS * ROWS, wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False, override_opt_param_scheduler=True, wsd_decay_steps=None,
        lr_wsd_decay_style=None,
    )  # fmt: skip
    config = get_model_config(model)
    config.grad_scale_func, config.finalize_model_grads_func = optimizer.scale_loss, finalize_model_grads
    config.no_sync_func, config.timers = model.no_sync, None
    return model, optimizer, scheduler


def actor(rank, world_size, layout, packs, per_token):
    """Losses of the micro-batches of every step, and the largest difference between log-probabilities computed forward
    only and in training; nothing on stages without the loss."""
    model, optimizer, scheduler = build(layout)
    get_attr_wrapped_model(model, "config").calculate_per_token_loss = per_token
    run = get_forward_backward_func()
    call = {"model": [model], "num_microbatches": 4, "seq_length": LENGTH, "micro_batch_size": 2}
    actual, difference = [], 0.0
    for batch in global_batches():
        parts = micro_batches(batch, packs)
        model.eval()
        with torch.no_grad():
            before = run(
                forward_step_func=partial(forward_step, forward_only=True), data_iterator=iter(parts),
                forward_only=True, decoder_seq_length=None, **call,
            )  # fmt: skip
        model.train()
        model.zero_grad_buffer()
        optimizer.zero_grad()
        results = run(forward_step_func=forward_step, data_iterator=iter(parts), forward_only=False, **call)
        assert not optimizer.prepare_grads()
        updated, norm, _ = optimizer.step()
        assert updated and norm > 0
        scheduler.step(increment=ROWS)
        assert bool(results) == mpu.is_pipeline_last_stage(ignore_virtual=True)
        for one, other, part in zip(before, results, parts):
            assert one["lengths"] == other["lengths"] and other["log_probs"].shape == part["labels"].shape
            difference = max(difference, (one["log_probs"] - other["log_probs"]).abs().max().item())
        if results:
            total, count = (sum(float(result[name]) for result in results) for name in ("loss", "count"))
            actual.append(total / count)
    return actual, difference


@pytest.mark.parametrize("packs", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("layout", [(1, 1), (2, 1), (1, 2)], ids=["one rank", "TP 2", "PP 2"])
def test_the_losses_of_an_actor_are_those_of_the_program(gloo_pool, expected, layout, packs):
    ranks = gloo_pool.run(actor, layout[0] * layout[1], layout, packs, True)
    with_losses = [with_loss for with_loss, _ in ranks if with_loss]
    assert len(with_losses) == layout[0] and len(expected) == STEPS
    for with_loss in with_losses:
        np.testing.assert_allclose(with_loss, expected, rtol=3e-5)
    assert max(difference for _, difference in ranks) < 1e-5
