"""The calls of slime's Megatron actor in its order: flags, validation, pickled settings, groups, model, named weights,
log-probabilities of packed responses, policy-gradient steps, checkpoints. Log-probabilities equal the library's; the KL
divergence of the first step is 0, and so is that of the reference model. On CPUs, and on one and two GPUs.
``SLIME_CHECKOUT=FOLDER`` also runs the modules of a checkout."""

import dataclasses
import json
import os
import pickle
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron.core import mpu, tensor_parallel
from megatron.core.distributed import DistributedDataParallel as DDP
from megatron.core.distributed import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.num_microbatches_calculator import (
    init_num_microbatches_calculator,
    unset_num_microbatches_calculator,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.rl.log_probabilities import token_log_probabilities
from megatron.core.tokenizers.utils.build_tokenizer import vocab_size_with_padding
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import get_model_config
from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args
from megatron.training.checkpointing import load_checkpoint, save_checkpoint
from megatron.training.global_vars import _build_tokenizer, get_args, set_args, unset_global_variables
from megatron.training.training import get_model

FLAGS = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --group-query-attention"
    " --num-query-groups 2 --qk-layernorm --swiglu --normalization RMSNorm --disable-bias-linear --vocab-size 60"
    " --position-embedding-type rope --untie-embeddings-and-output-weights"
    " --attention-dropout 0 --hidden-dropout 0 --no-rope-fusion --seq-length 32 --max-position-embeddings 64"
    " --tokenizer-type NullTokenizer --distributed-backend gloo --lr 1e-3 --lr-decay-style constant"
    " --micro-batch-size 1 --global-batch-size 4 --weight-decay 0.1 --adam-beta1 0.9 --sglang-mem-fraction-static 0.7"
    " --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 --no-gradient-accumulation-fusion"
)
EXPERTS = (
    " --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 --moe-grouped-gemm"
    " --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none --moe-router-dtype fp32"
)
CASES = {
    "dense, bf16": (1, "", True),
    "experts": (1, EXPERTS, False),
    "TP 2": (2, " --tensor-model-parallel-size 2 --sequence-parallel", False),
    "experts EP 2, bf16": (2, EXPERTS + " --expert-model-parallel-size 2", True),
}
"""Ranks, flags, and whether weights are bf16, as slime sets them; fp32 shows that log-probabilities are the same."""
GPU_SIZES = " --hidden-size 256 --ffn-hidden-size 512 --moe-ffn-hidden-size 128 --distributed-backend nccl"
"""Heads of 64 channels, which the attention kernels of GPUs take."""
GPU_CASES = {
    "bf16": (1, "", True),
    "fp32": (1, "", False),
    "experts, bf16": (1, EXPERTS, True),
    "TP 2, bf16": (2, " --tensor-model-parallel-size 2 --sequence-parallel", True),
    "TP 2, fp32": (2, " --tensor-model-parallel-size 2 --sequence-parallel", False),
    "experts EP 2, bf16": (2, EXPERTS + " --expert-model-parallel-size 2", True),
}
RESPONSES = [[3, 9, 4, 4, 20, 7, 31], [5, 1, 2, 8, 50], [11, 12, 13, 14, 15, 16, 17, 18, 19], [40, 2, 40, 3]]
PROMPT, MULTIPLE = 2, 16


def device():
    """The device of this process's models; workers over gloo see no GPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def settings(folder, world_size, bf16):
    """The driver process: settings as slime's ``parse_args`` makes them, sent to the actors as bytes."""

    def add_arguments(parser):
        parser.add_argument("--rollout-batch-size", type=int, default=4)
        next(action for action in parser._actions if "--seed" in action.option_strings).default = 1234
        return parser

    args = parse_args(extra_args_provider=add_arguments, ignore_unknown_args=True)
    args.rank, args.world_size = 0, world_size
    args.use_distributed_optimizer, args.bf16 = True, bf16
    args.use_persistent_ckpt_worker = args.ckpt_assume_constant_structure = args.ckpt_fully_parallel_load = True
    args.dist_ckpt_save_pre_mcore_014 = True
    args.save = args.load = str(folder)
    args.padded_vocab_size = vocab_size_with_padding(args.vocab_size, args)
    validate_args(args)
    args.variable_seq_lengths = True
    return pickle.dumps(args)


def start(args, rank):
    args.rank = rank
    set_args(args)
    mpu.initialize_model_parallel(
        args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size,
        pipeline_model_parallel_comm_backend=args.pipeline_model_parallel_comm_backend,
        context_parallel_size=args.context_parallel_size,
        hierarchical_context_parallel_sizes=args.hierarchical_context_parallel_sizes,
        expert_model_parallel_size=args.expert_model_parallel_size,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
        nccl_communicator_config_path=args.nccl_communicator_config_path,
        order="tp-cp-ep-dp-pp" if not args.use_tp_pp_dp_mapping else "tp-cp-ep-pp-dp", get_embedding_ranks=None,
        get_position_embedding_ranks=None, create_gloo_process_groups=args.enable_gloo_process_groups,
    )  # fmt: skip
    tensor_parallel.model_parallel_cuda_manual_seed(
        args.seed + 100 * mpu.get_pipeline_model_parallel_rank(), args.te_rng_tracker, args.inference_rng_tracker, False
    )
    _build_tokenizer(args)
    unset_num_microbatches_calculator()  # a worker of the pool has run other programs
    init_num_microbatches_calculator(
        args.rank, args.rampup_batch_size, args.global_batch_size, args.micro_batch_size, args.data_parallel_size,
        args.decrease_batch_size_if_needed,
    )  # fmt: skip


def model_provider(pre_process=True, post_process=True, vp_stage=None):
    args = get_args()
    use_te = args.transformer_impl == "transformer_engine"
    config = core_transformer_config_from_args(args)
    if args.num_experts:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=use_te)
    else:
        assert use_te  # Megatron-LM's default
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=args.num_experts, moe_grouped_gemm=args.moe_grouped_gemm, qk_layernorm=args.qk_layernorm,
            multi_latent_attention=args.multi_latent_attention,
            moe_use_legacy_grouped_gemm=args.moe_use_legacy_grouped_gemm,
        )  # fmt: skip
    return GPTModel(
        config=config, transformer_layer_spec=spec, vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings, pre_process=pre_process, post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy, parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type, rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base, rope_scaling=args.use_rope_scaling,
    )  # fmt: skip


def set_up(args):
    model = get_model(model_provider, ModelType.encoder_or_decoder)
    names = [field.name for field in dataclasses.fields(OptimizerConfig) if hasattr(args, field.name)]
    config = OptimizerConfig(**{name: getattr(args, name) for name in names})
    config.timers = None
    optimizer = get_megatron_optimizer(
        config=config, model_chunks=model, use_gloo_process_groups=args.enable_gloo_process_groups
    )
    args.train_iters = args.lr_decay_iters = 8
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=args.lr_warmup_init, max_lr=args.lr, min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_iters * args.global_batch_size, lr_decay_steps=8 * args.global_batch_size,
        lr_decay_style=args.lr_decay_style, start_wd=args.start_weight_decay, end_wd=args.end_weight_decay,
        wd_incr_steps=8 * args.global_batch_size, wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=args.override_opt_param_scheduler, wsd_decay_steps=None,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )  # fmt: skip
    return model, optimizer, scheduler


def named_params(args, model):
    """Global names and tensors, by slime's patterns."""
    offset = (
        mpu.get_expert_model_parallel_rank() * (args.num_experts or 0) // mpu.get_expert_model_parallel_world_size()
    )
    for module in model:
        first = get_transformer_layer_offset(module.config)
        for name, param in module.named_parameters():
            name = name if name.startswith("module.module.") else "module." + name
            match = re.match(r"module\.module\.decoder\.layers\.(\d+)\.(.+)", name)
            if match is None:
                yield name, param
                continue
            layer, rest = int(match[1]) + first, match[2]
            expert = re.match(r"mlp\.experts\.(.+)\.(weight|bias)(\d+)", rest)
            rest = f"mlp.experts.{expert[1]}.{expert[2]}{int(expert[3]) + offset}" if expert else rest
            yield f"module.module.decoder.layers.{layer}.{rest}", param


UNDERSTOOD = re.compile(
    r"module\.module\.(embedding\.word_embeddings\.weight|output_layer\.weight|decoder\.final_layernorm\.weight|"
    r"decoder\.layers\.\d+\.(self_attention\.(linear_(proj|qkv)\.weight|linear_qkv\.layer_norm_weight|[qk]_layernorm\.weight)"
    r"|mlp\.(linear_fc[12]\.weight|linear_fc1\.layer_norm_weight|router\.weight|experts\.linear_fc[12]\.weight\d+)"
    r"|pre_mlp_layernorm\.weight))"
)
"""Names that slime's converters of Qwen3 and Qwen3-MoE take."""


def micro_batches(args):
    """Pairs of responses end to end, and a document of padding, as ``get_batch``."""
    rank, ranks = mpu.get_data_parallel_rank(with_context_parallel=False), mpu.get_data_parallel_world_size()
    for first in range(rank * 4 // ranks, (rank + 1) * 4 // ranks, 2):
        rows = [torch.tensor(row, device=device()) for row in RESPONSES[first : first + 2]]
        tokens, bounds = torch.cat(rows), [0, *torch.tensor([len(row) for row in rows]).cumsum(0).tolist()]
        if pad := -len(tokens) % (mpu.get_tensor_model_parallel_world_size() * MULTIPLE):
            tokens, bounds = torch.nn.functional.pad(tokens, (0, pad)), [*bounds, len(tokens) + pad]
        bounds = torch.tensor(bounds, dtype=torch.int, device=device())
        longest = (bounds[1:] - bounds[:-1]).max().item()
        packed = PackedSeqParams(
            cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest, qkv_format="thd"
        )
        mask = (torch.arange(len(tokens), device=device()) < len(tokens) - pad).int()
        yield {"tokens": tokens[None], "packed_seq_params": packed, "full_loss_masks": mask[None], "rows": rows}


def response_log_probs(logits, rows):
    """Log-probabilities of the response tokens of each row, from logits [1, T, V / TP] fp32."""
    assert logits.dtype == torch.float32 and logits.size(0) == 1
    logits, ends = logits.squeeze(0), torch.tensor([len(row) for row in rows]).cumsum(0).tolist()
    for row, end in zip(rows, ends):
        piece = logits[end - len(row) + PROMPT - 1 : end - 1].contiguous()
        yield -tensor_parallel.vocab_parallel_cross_entropy(piece, row[PROMPT:])


def forward_step(loss_func, iterator, model, return_schedule_plan=False):
    assert not return_schedule_plan
    batch = next(iterator)
    output = model(
        input_ids=batch["tokens"], position_ids=None, attention_mask=None, labels=None,
        packed_seq_params=batch["packed_seq_params"], loss_mask=batch["full_loss_masks"],
    )  # fmt: skip
    return output, partial(loss_func, batch)


def forward_only(args, model):
    for module in model:
        module.eval()
    get_model_config(model[0]).timers = None

    def collect(batch, logits, non_loss_data=True):
        return logits.new_zeros(()), {
            "log_probs": [part.detach() for part in response_log_probs(logits, batch["rows"])]
        }

    batches = list(micro_batches(args))
    with torch.no_grad():
        stored = get_forward_backward_func()(
            forward_step_func=partial(forward_step, collect), data_iterator=[iter(batches)], model=model,
            num_microbatches=len(batches), seq_length=args.seq_length, micro_batch_size=args.micro_batch_size,
            forward_only=True,
        )  # fmt: skip
    for module in model:
        module.train()
    return [part for result in stored for part in result["log_probs"]]


def train_step(args, model, optimizer, scheduler, old_log_probs):
    """Return (KL divergence of old and new log-probabilities, gradient norm)."""
    config = get_model_config(model[0])
    config.grad_scale_func, config.timers, config.finalize_model_grads_func = (
        optimizer.scale_loss,
        None,
        finalize_model_grads,
    )
    for chunk in model:
        assert isinstance(chunk, DDP)
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    old, batches = iter(old_log_probs), list(micro_batches(args))

    def policy_loss(batch, logits):
        new = list(response_log_probs(logits, batch["rows"]))
        kl = torch.cat([next(old) - part for part in new])
        loss = -torch.exp(-kl).mul(torch.cat([torch.full_like(part, 1.0 - len(part)) for part in new])).mean()
        loss = (
            loss * len(batches) / args.global_batch_size * mpu.get_data_parallel_world_size(with_context_parallel=True)
        )
        return (
            loss,
            torch.tensor(1, device=logits.device),
            {"keys": ["ppo_kl"], "values": torch.stack([logits.new_zeros(()), kl.detach().abs().max()])},
        )

    results = get_forward_backward_func()(
        forward_step_func=partial(forward_step, policy_loss), data_iterator=[iter(batches)], model=model,
        num_microbatches=len(batches), seq_length=args.seq_length, micro_batch_size=args.micro_batch_size,
        decoder_seq_length=args.decoder_seq_length, forward_only=False,
    )  # fmt: skip
    updated, norm, _ = optimizer.step()
    assert updated
    scheduler.step(increment=args.global_batch_size)
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    return max(result["values"][1].item() for result in results), norm


def actor(rank, world_size, pickled):
    """Return what the claims of this file are about, as plain values."""
    try:
        args = pickle.loads(pickled)
        start(args, rank)
        model, optimizer, scheduler = set_up(args)
        params = dict(named_params(args, model))
        result = {"names": sorted(params), "sizes": {name: tuple(param.shape) for name, param in params.items()}}
        assert all(hasattr(param, "tensor_model_parallel") for param in params.values())
        with torch.no_grad():
            for param in params.values():  # as a loader of Hugging Face weights and the copy of a reference model do
                param.copy_(torch.empty_like(param, device="cpu").copy_(param.detach()))
        optimizer.reload_model_params()
        old = forward_only(args, model)
        expected = token_log_probabilities(model, RESPONSES, row_length=32)
        first = mpu.get_data_parallel_rank() * len(RESPONSES) // mpu.get_data_parallel_world_size()
        pairs = zip(old, expected[first:])
        result["difference"] = max((a - b[PROMPT - 1 :]).abs().max().item() for a, b in pairs)
        result["kl"], result["norm"] = train_step(args, model, optimizer, scheduler, old)
        result["second"], _ = train_step(args, model, optimizer, scheduler, old)
        trained = forward_only(args, model)
        backup = {name: param.detach().clone() for name, param in named_params(args, model)}
        save_checkpoint(
            1, model, optimizer, scheduler, num_floating_point_operations_so_far=0, checkpointing_context=None,
            train_data_iterator=None, preprocess_common_state_dict_fn=None,
        )  # fmt: skip
        for param in model[0].parameters():
            param.data.zero_()
        args.no_load_optim = args.no_load_rng = args.finetune = True  # a reference model
        load_checkpoint(
            ddp_model=model, optimizer=None, opt_param_scheduler=None, checkpointing_context={},
            skip_load_to_model_and_opt=False,
        )  # fmt: skip
        result["reference kl"] = max((a - b).abs().max().item() for a, b in zip(trained, forward_only(args, model)))
        result["restored"] = all(torch.equal(param, backup[name]) for name, param in named_params(args, model))
        return result
    finally:
        unset_global_variables()
        unset_num_microbatches_calculator()


def check(pool, folder, monkeypatch, case, flags, tolerance):
    """Run the actor on all ranks of ``case``; ``tolerance`` of log-probabilities against the library's."""
    ranks, case_flags, bf16 = case
    monkeypatch.setattr(sys, "argv", ["train.py", *(FLAGS + case_flags + flags).split()])
    results = pool.run(actor, ranks, settings(folder, ranks, bf16))
    names = {name for result in results for name in result["names"]}
    assert [name for name in names if not UNDERSTOOD.fullmatch(name)] == []
    if EXPERTS in case_flags:
        assert {name.rpartition(".")[2] for name in names if ".experts." in name} == {f"weight{i}" for i in range(4)}
    for result in results:
        assert result["difference"] < tolerance
        assert result["kl"] == result["reference kl"] == 0.0 and result["restored"]
        assert result["norm"] > 0 and result["second"] > 1e-4


@pytest.mark.parametrize("case", CASES)
def test_calls_of_an_actor(gloo_pool, tmp_path, monkeypatch, case):
    tolerance = 3e-3 if CASES[case][2] else 1e-5  # rows of other lengths round differently
    check(gloo_pool, tmp_path, monkeypatch, CASES[case], "", tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.gpus(GPU_CASES[case][0]), id=case) for case in GPU_CASES]
)
def test_calls_of_an_actor_on_gpus(nccl_pool, tmp_path, monkeypatch, case):
    # GEMMs of rows of other lengths sum in another order: one step of a bf16 logit from 1 to 2 (2^-7) for the token's
    # logit, and as much for the logarithm of the sum
    tolerance = 2**-6 if GPU_CASES[case][2] else 1e-5
    check(nccl_pool, tmp_path, monkeypatch, GPU_CASES[case], GPU_SIZES, tolerance)


CHECKOUT = os.environ.get("SLIME_CHECKOUT", "")
SIZES = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
CHECKOUT_FLAGS = (
    FLAGS.replace("--vocab-size 60", "--vocab-size 128").replace("--global-batch-size 4", "--global-batch-size 2")
    + " --kv-channels 8 --norm-epsilon 1e-6 --num-rollout 4 --rollout-batch-size 2 --n-samples-per-prompt 1"
    " --actor-num-nodes 1 --actor-num-gpus-per-node 1 --advantage-estimator grpo --data-pad-size-multiplier 16"
    " --prompt-data none --input-key prompt"
)


@pytest.mark.skipif(not CHECKOUT, reason="SLIME_CHECKOUT names no checkout of slime")
@pytest.mark.parametrize("family", ["Qwen3", "Qwen3Moe"])
def test_modules_of_a_checkout_run_unchanged(tmp_path, family):
    import transformers

    sizes = SIZES | (SPARSE if family == "Qwen3Moe" else {})
    config = getattr(transformers, f"{family}Config")(**sizes, tie_word_embeddings=False)
    model = transformers.AutoModelForCausalLM.from_config(config).bfloat16()
    model.save_pretrained(tmp_path)
    flags = CHECKOUT_FLAGS + (EXPERTS if family == "Qwen3Moe" else "")
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.test_utils.slime_run", CHECKOUT, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": ""}
    finished = subprocess.run(
        command, cwd=root, env=environment, input=json.dumps(flags.split()), capture_output=True, text=True, timeout=300
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    result = json.loads(finished.stdout.splitlines()[-1])
    assert result["ppo_kl"] == 0.0 and result["norm"] > 0
    for row, actual in zip(([3, 9, 4, 4, 20, 7, 31], [5, 1, 2, 8, 50]), result["log_probs"]):
        tokens = torch.tensor([row])
        logits = model(tokens).logits.float().log_softmax(-1)[0, :-1]
        expected = logits.gather(-1, tokens[0, 1:, None])[PROMPT - 1 :, 0]
        torch.testing.assert_close(torch.tensor(actual), expected, rtol=0, atol=1e-2)
