"""Command lines of Megatron-LM's users: they pass a dry run on a machine without GPUs, Transformer Engine or the named
files, and one notice reports each flag that is overridden or has no effect."""

import logging

import pytest

from megatron.core.config.mup import width_multiplier
from megatron.training.arguments import parse_args, validate_args
from megatron.training.report.dry_run import dry_run_report

SIZES = "--num-layers 12 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024"
BATCHES = "--micro-batch-size 4 --global-batch-size 32 --train-iters 50 --lr 1.5e-4 --lr-decay-style cosine --bf16"
FILES = "--data-path /data/my_text --vocab-file /data/vocab.json --merge-file /data/merges.txt --split 949,50,1"
SAVING = "--save /out --load /out --ckpt-format torch_dist --dist-ckpt-strictness log_all --save-interval 50"
ENGINE = "--transformer-impl transformer_engine --use-mcore-models --distributed-backend nccl"
BASE = f"{SIZES} {BATCHES} {FILES} {SAVING} {ENGINE} --deterministic-mode --attention-softmax-in-fp32 --log-interval 1"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
EXPERTS = (
    "--num-experts 8 --expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --moe-grouped-gemm --swiglu "
    "--tensor-model-parallel-size 2 --sequence-parallel --disable-bias-linear --moe-router-topk 2 "
)
SIDE_LOSS = "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
LATENTS = "--multi-latent-attention --q-lora-rank 192 --kv-lora-rank 64 --qk-head-dim 16 --qk-pos-emb-head-dim 8"
EIGHT_BITS = "--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather"
OFFLOAD = "--fine-grained-activation-offloading --offload-modules"
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"

OUR_ATTENTION = "--attention-dropout 0.1: built-in attention is used, because Transformer Engine's"
LINES = [
    ("", OUR_ATTENTION),
    ("--rerun-mode validate_results --error-injection-rate 100 --error-injection-type transient_error",
     OUR_ATTENTION),
    ("--fim-data --fim-rate 0.5 --fim-spm-rate 0.5", OUR_ATTENTION),
    ("--async-save --use-persistent-ckpt-worker --no-ckpt-fully-parallel-save", OUR_ATTENTION),
    ("--tensor-model-parallel-size 4 --qk-layernorm --test-mode", "--test-mode accepted without effect"),
    ("--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1"
     " --overlap-p2p-communication-warmup-flush --microbatch-group-size-per-virtual-pipeline-stage 4",
     "--overlap-p2p-communication-warmup-flush accepted without effect"),
    (f"--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 3 {SHARDED} --ckpt-format torch"
     " --overlap-param-gather-with-optimizer-step --check-weight-hash-across-dp-replicas-interval 10",
     "--overlap-param-gather-with-optimizer-step accepted without effect"),
    ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --defer-embedding-wgrad-compute"
     " --wgrad-deferral-limit 2 --dist-ckpt-save-pre-mcore-014", "--dist-ckpt-save-pre-mcore-014 accepted without"),
    (f"--tensor-model-parallel-size 2 --context-parallel-size 2 --sequence-parallel {NO_DROPOUT} --attention-backend"
     " flash --use-tp-pp-dp-mapping --expert-tensor-parallel-size 4", "expert_tensor_parallel_size: no effect"),
    ("--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap --tp-comm-overlap-cfg /data/overlap.yaml"
     " --disable-tp-comm-bulk-dgrad", "built-in layers are used instead, because --tp-comm-overlap requires them"),
    (f"--tensor-model-parallel-size 2 {LATENTS} --v-head-dim 16 --untie-embeddings-and-output-weights",
     "built-in layers are used instead, because --multi-latent-attention requires them"),
    (f"--use-torch-fsdp2 {SHARDED} --no-async-tensor-model-parallel-allreduce",
     "--use-distributed-optimizer: no effect with --use-torch-fsdp2"),
    ("--use-megatron-fsdp --data-parallel-sharding-strategy optim --ckpt-format fsdp_dtensor --fsdp-double-buffer",
     "--use-megatron-fsdp means --use-torch-fsdp2"),
    ("--distributed-backend nccl2", "--distributed-backend nccl2 means --distributed-backend nccl"),
    ("--recompute-granularity selective --recompute-modules layernorm core_attn --recompute-num-layers 1",
     "--recompute-num-layers 1: no effect without --recompute-granularity full"),
    (f"--te-rng-tracker --enable-experimental --high-priority-stream-groups tp_cp --log-energy {NO_DROPOUT}",
     "--te-rng-tracker accepted without effect"),
    ("--position-embedding-type rope --rope-scaling-factor 8", "--rope-scaling-factor 8: no effect without"),
    ("--cuda-graph-impl transformer_engine --cuda-graph-modules attn mlp --use-transformer-engine-op-fuser",
     "--cuda-graph-impl transformer_engine accepted without effect"),
    ("--cuda-graph-impl full_iteration --nvtx-ranges --log-straggler", "--cuda-graph-impl full_iteration accepted"),
    ("--wandb-project runs --wandb-exp-name first --use-legacy-models", "--use-legacy-models accepted without effect"),
    (f"{EXPERTS} {SIDE_LOSS} --moe-permute-fusion --moe-router-fusion", "--moe-permute-fusion accepted without effect"),
    (f"{EXPERTS} {SIDE_LOSS} --overlap-moe-expert-parallel-comm --delay-wgrad-compute --pipeline-model-parallel-size 2"
     " --expert-model-parallel-size 2", "--overlap-moe-expert-parallel-comm: off, as capacity, sinkhorn, quantiles"),
    (f"{EXPERTS} {SIDE_LOSS} --overlap-moe-expert-parallel-comm --delay-wgrad-compute",
     "--delay-wgrad-compute: no effect, as --pipeline-model-parallel-size is 1"),
    ("--use-megatron-fsdp --megatron-fsdp-main-params-dtype fp32 --megatron-fsdp-main-grads-dtype fp32 "
     "--megatron-fsdp-grad-comm-dtype fp32", "--megatron-fsdp-main-grads-dtype fp32 accepted without effect: master"),
    (f"{EIGHT_BITS} {SHARDED}", "built-in layers are used instead, because --fp8-param-gather requires them"),
    (f"--optimizer muon --no-use-layer-wise-param-layout {SHARDED}", "--no-use-layer-wise-param-layout accepted"),
    (f"{OFFLOAD} attn_norm core_attn attn_proj --recompute-modules layernorm mlp --recompute-granularity selective",
     "--offload-modules attn_norm: no effect, as --recompute-modules saves less"),
    (f"{EXPERTS} {SIDE_LOSS} {OFFLOAD} expert_fc1 moe_act attn_norm mlp_norm qkv_linear core_attn attn_proj "
     "--recompute-granularity selective --recompute-modules layernorm mla_up_proj mlp moe_act --kv-lora-rank 16 "
     "--multi-latent-attention --qk-head-dim 16 --qk-pos-emb-head-dim 16 --v-head-dim 16",
     "--offload-modules attn_norm attn_proj core_attn expert_fc1 mlp_norm moe_act qkv_linear: no effect"),
    (f"{EXPERTS} {SIDE_LOSS} --moe-token-dispatcher-type flex --moe-enable-deepep --moe-deepep-num-sms 20",
     "--moe-token-dispatcher-type flex: uses the alltoall dispatcher"),
]  # fmt: skip


MASKED = (
    "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --max-position-embeddings 512 --micro-batch-size 4 "
    "--global-batch-size 32 --train-iters 2000000 --lr 1e-4 --min-lr 1e-5 --lr-decay-style linear --lr-decay-iters "
    "990000 --weight-decay 1e-2 --clip-grad 1.0 --data-path /data/my_text_sentence --vocab-file /data/vocab.txt "
    "--split 949,50,1 --save /out --load /out --log-interval 100 --save-interval 10000 --eval-interval 1000 "
    "--eval-iters 10 --fp16 --data-impl mmap "
)
SPANS = "--encoder-seq-length 512 --decoder-seq-length 128 --kv-channels 64 --ffn-hidden-size 3072 "
MASKED_LINES = [
    ("bert", "--seq-length 512 --lr-warmup-fraction .01 --tensor-model-parallel-size 2", "--data-impl accepted"),
    ("bert", "--seq-length 512 --activations-checkpoint-method uniform", "--activations-checkpoint-method means"),
    ("bert", "--seq-length 512 --recompute-method uniform", "--recompute-method uniform: no effect without"),
    ("bert", "--seq-length 512 --merge-file /data/merges.txt", "--merge-file: no effect with --tokenizer-type "
     "BertWordPieceLowerCase, which reads --vocab-file"),
    ("bert", "--seq-length 512 --warmup .01 --checkpoint-activations", "--warmup means --lr-warmup-fraction"),
    ("t5", f"{SPANS} --vocab-extra-ids 100 --pipeline-model-parallel-size 4 --pipeline-model-parallel-split-rank 2",
     "--pipeline-model-parallel-split-rank accepted without effect: encoder and decoder share one pipeline"),
    ("t5", f"{SPANS} --tokenizer-type BertWordPieceCase --split 99982,9,9 --calculate-per-token-loss",
     "--calculate-per-token-loss accepted without effect"),
]  # fmt: skip


def dry_run(line, family="gpt"):
    """Dry-run the line like ``pretrain_gpt.py``, ``pretrain_bert.py`` or ``pretrain_t5.py`` on one of 8 ranks."""
    kind = "GPT2BPETokenizer" if family == "gpt" else "BertWordPieceLowerCase"
    inputs = parse_args(f"{line} --dry-run".split(), args_defaults={"tokenizer_type": kind}, model_family=family)
    return validate_args(inputs, 8)


@pytest.mark.parametrize(("family", "text", "notice"), MASKED_LINES)
def test_bert_and_t5_lines_pass_with_notices_of_differences(family, text, notice, caplog):
    with caplog.at_level(logging.INFO):
        cfg = dry_run(MASKED + text, family)
    assert sum(notice in record.message for record in caplog.records) == 1
    assert "the settings are consistent" in dry_run_report(cfg)


@pytest.mark.parametrize(("text", "notice"), LINES)
def test_line_passes_with_notices_of_differences(text, notice, caplog):
    with caplog.at_level(logging.INFO):
        cfg = dry_run(f"{BASE} {text}")
    messages = [record.message for record in caplog.records]
    assert sum(notice in item for item in messages) == 1, messages
    assert len(messages) == len(set(messages))
    assert "the settings are consistent" in dry_run_report(cfg)


def test_fp8_gathers_of_fp32_weights_are_off(caplog):
    with caplog.at_level(logging.INFO):
        cfg = dry_run(f"{BASE.replace('--bf16', '')} {EIGHT_BITS} {SHARDED} --transformer-impl local")
    assert not cfg.model.fp8_param_gather and cfg.model.fp8 == "hybrid"
    assert any(record.message.startswith("--fp8-param-gather: no effect without --bf16") for record in caplog.records)


def test_modules_that_are_recomputed_are_not_offloaded():
    line = f"{BASE} {OFFLOAD} attn_norm core_attn attn_proj --recompute-granularity selective"
    cfg = dry_run(f"{line} --recompute-modules layernorm")
    assert cfg.model.offload_modules == ["core_attn", "attn_proj"] and cfg.model.fine_grained_activation_offloading
    cfg = dry_run(f"{line} --recompute-modules layernorm --offload-modules attn_norm")
    assert cfg.model.offload_modules is None and not cfg.model.fine_grained_activation_offloading


def test_saving_intervals_without_a_folder_are_taken(caplog):
    with caplog.at_level(logging.INFO):
        dry_run(BASE.replace("--save /out", ""))
    assert any(record.message.startswith("--save-interval 50: no effect without --save") for record in caplog.records)


def test_dry_run_lists_missing_packages_and_devices(monkeypatch):
    monkeypatch.setattr("megatron.training.rules.training.is_installed", lambda package: False)
    report = dry_run_report(dry_run(f"{BASE} --wandb-project runs --wandb-exp-name first"))
    missing = report[report.index("missing on this machine") :]
    assert "pip install wandb" in missing and "/data/vocab.json" in missing and "/data/merges.txt" in missing


def test_line_with_mup_passes():
    width = int(BASE.split("--hidden-size ")[1].split()[0])
    cfg = dry_run(f"{BASE} --use-mup --mup-base-hidden-size {width // 2} --mup-width-mult 1")
    assert cfg.model.softmax_scale == 1 / cfg.model.kv_channels and width_multiplier(cfg.model) == 2.0


@pytest.mark.parametrize("text", ["--enable-mhc-connections", "--moe-latent-size 8"])
def test_unavailable_flag_that_changes_results_is_rejected(text):
    with pytest.raises(ValueError, match="is not available (here|yet)"):
        parse_args(f"{BASE} {text}".split())
