"""Only derived settings are filled in."""

import pytest

from megatron.core.schedules import learning_rate as schedules
from megatron.training.arguments import parse_args
from megatron.training.config.resolve import resolve

TINY = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 100"
)


def resolved(text="", world_size=1, **options):
    return resolve(parse_args((TINY + " " + text).split()), world_size, **options)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("", {"ffn_hidden_size": 256, "kv_channels": 16, "num_query_groups": 4, "embedding_init_method_std": 0.02}),
        ("--swiglu", {"ffn_hidden_size": 128}),
        ("--swiglu --hidden-size 4096", {"ffn_hidden_size": 10880}),
        ("--group-query-attention", {"num_query_groups": 1}),
        ("--group-query-attention --num-query-groups 2", {"num_query_groups": 2}),
        ("", {"global_batch_size": 2, "eval_global_batch_size": 2, "eval_micro_batch_size": 2}),
        ("--global-batch-size 8", {"global_batch_size": 8, "eval_global_batch_size": 8}),
        ("--global-batch-size 8 --eval-global-batch-size 4", {"eval_global_batch_size": 4}),
        ("--train-iters 10", {"lr_decay_iters": 10, "train_samples": None, "lr_decay_samples": None}),
        ("--train-samples 21", {"lr_decay_samples": 21, "train_iters": 10, "lr_decay_iters": None}),
        ("--train-samples 40 --global-batch-size 4 --rampup-batch-size 2 2 8", {"train_iters": 12}),
        ("--step-batch-size-schedule 0:2,320:4", {"global_batch_size": 4}),
        ("--bf16", {"accumulate_allreduce_grads_in_fp32": True}),
        ("--bf16 --grad-reduce-in-bf16", {"accumulate_allreduce_grads_in_fp32": False}),
        ("--fp16", {"check_for_nan_in_loss_and_grad": False}),
        ("--fp16 --loss-scale 8", {"check_for_nan_in_loss_and_grad": True}),
        ("--apply-query-key-layer-scaling", {"attention_softmax_in_fp32": True}),
        ("", {"transformer_impl": "local", "dataloader_type": "single", "split": "1,1,1", "encoder_seq_length": 32}),
        ("--transformer-impl transformer_engine", {"transformer_impl": "transformer_engine"}),
        ("", {"start_weight_decay": 0.01, "end_weight_decay": 0.01, "eval_interval": None, "save_interval": None}),
        ("--weight-decay-incr-style linear", {"start_weight_decay": None}),
        ("--no-pad-vocab-size", {"make_vocab_size_divisible_by": 1}),
        ("--recompute-activations", {"recompute_granularity": "selective"}),
        ("--skip-train", {"train_iters": 0}),
        ("--profile-ranks 1 2", {"profile_ranks": [1, 2]}),
        ("", {"profile_ranks": [0]}),
    ],
)
def test_setting_follows(text, values):
    cfg = resolved(text)
    assert {name: getattr(cfg.flat, name) for name in values} == values


@pytest.mark.parametrize(("gpus", "text", "backend"), [
    (True, "", "nccl"), (False, "", "gloo"), (False, "--distributed-backend nccl", "nccl"),
])  # fmt: skip
def test_backend_follows_the_machine_unless_given(gpus, text, backend):
    assert resolved(text, gpus=gpus).distributed.distributed_backend == backend


def test_data_parallel_size_is_world_size_over_model_ranks():
    cfg = resolved("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 16)
    assert cfg.data_parallel_size == 4 and cfg.training.global_batch_size == 8 and cfg.world_size == 16


def test_data_prefix_gets_the_default_split():
    cfg = parse_args(TINY.split()).with_settings(mock_data=False, data_path=["x"])
    assert resolve(cfg, 1).data.split == "969,30,1"


def test_resolving_changes_nothing_that_was_given_and_is_idempotent():
    text = "--global-batch-size 8 --ffn-hidden-size 100 --train-iters 7 --lr-decay-iters 5 --dataloader-type cyclic"
    parsed = parse_args((TINY + " " + text).split())
    once = resolve(parsed, 2)
    assert all(getattr(once.flat, name) == getattr(parsed.flat, name) for name in parsed.explicit)
    assert resolve(once, 2) == once and not parsed.flat.resolved


def test_schedules_by_samples_and_by_iterations_agree():
    by_iterations = resolved("--train-iters 10 --lr-warmup-iters 2")
    by_samples = resolved("--train-samples 20 --lr-warmup-samples 4")
    assert schedules.schedule_plan(by_iterations.flat) == schedules.schedule_plan(by_samples.flat)


def test_half_read_settings_resolve():
    assert resolve(parse_args([]), 3).data_parallel_size == 3
