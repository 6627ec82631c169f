"""Models of several families in small: a run on a GPU, through its kernels, has the losses of the run on a CPU."""

import os
import subprocess
import sys

import numpy as np
import pytest

from tests.test_utils.gpt_runs import read_records, write_dataset

pytestmark = pytest.mark.gpu

COMMON = (
    "--num-layers 3 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256"
    " --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --ffn-hidden-size 512"
    " --micro-batch-size 2 --global-batch-size 4 --train-iters 8 --lr 3e-4 --seed 5 --log-interval 1 --split 100,0,0"
    " --tokenizer-type NullTokenizer --vocab-size 128 --eval-iters 0 --hidden-dropout 0 --attention-dropout 0"
)
FAMILIES = {
    "deepseek-v3": (
        "--swiglu --multi-latent-attention --q-lora-rank 96 --kv-lora-rank 64 --qk-head-dim 64 --qk-pos-emb-head-dim 32"
        " --v-head-dim 64 --qk-layernorm --position-embedding-type rope --mtp-num-layers 1 --num-experts 8"
        " --moe-router-topk 2 --moe-layer-freq [0,1,1] --moe-ffn-hidden-size 256 --moe-router-score-function sigmoid"
        " --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-enable-expert-bias --moe-grouped-gemm"
        " --moe-router-topk-scaling-factor 2.5 --moe-shared-expert-intermediate-size 256 --moe-shared-expert-overlap"
        " --moe-token-dispatcher-type alltoall --moe-router-dtype fp32 --moe-router-load-balancing-type seq_aux_loss"
    ),
    "gpt-oss": (
        "--quick-geglu --activation-func-clamp-value 7 --glu-linear-offset 1 --group-query-attention"
        " --num-query-groups 2 --num-experts 8 --moe-router-topk 4 --softmax-type learnable --window-size 63,0"
        " --window-attn-skip-freq 2 --position-embedding-type yarn --rotary-scaling-factor 8 --moe-grouped-gemm"
        " --yarn-original-max-position-embeddings 32 --no-yarn-correction-range-round-to-int"
        " --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 1e-3"
    ),
    "qwen3-moe": (
        "--swiglu --qk-layernorm --kv-channels 64 --position-embedding-type rope --group-query-attention"
        " --num-query-groups 2 --num-experts 16 --moe-router-topk 8 --moe-ffn-hidden-size 128 --moe-grouped-gemm"
        " --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.01 --moe-permute-fusion"
    ),
    "recomputed delta nets": (
        "--swiglu --position-embedding-type rope --experimental-attention-variant gated_delta_net"
        " --linear-attention-freq 3 --linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 64"
        " --linear-value-head-dim 64 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    ),
}

ENCODERS = {
    "bert": ("pretrain_bert.py", ""),
    "modern-bert": (
        "pretrain_bert.py",
        "--bert-no-binary-head --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
        " --window-size 31,31 --window-attn-skip-freq 3",
    ),
    "packed-bert": (
        "pretrain_bert.py", "--use-packed-sequence --window-size 31,31 --window-attn-skip-freq 3 --hidden-dropout 0.1"
    ),
    "t5": ("pretrain_t5.py", "--decoder-seq-length 128 --relu --normalization RMSNorm --disable-bias-linear"),
    "t5-rotary": ("pretrain_t5.py", "--decoder-seq-length 128 --swiglu --position-embedding-type rope"),
    "t5-relative": ("pretrain_t5.py", "--decoder-seq-length 128 --position-embedding-type relative"),
}
"""They train on random samples; half are short, so that variable lengths matter."""


def run(data, folder, family, *flags, gpu):
    program, local = ENCODERS.get(family) or ("pretrain_gpt.py", FAMILIES[family])
    source = ["--data-path", str(data)] if family in FAMILIES else ["--mock-data", "--short-seq-prob", "0.5"]
    argv = [*COMMON.split(), *local.split(), *source, "--save", str(folder), *flags]
    environment = os.environ if gpu else {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    finished = subprocess.run(
        [sys.executable, program, *argv], env=environment, capture_output=True, text=True, timeout=300
    )
    assert finished.returncode == 0, finished.stdout[-1500:] + finished.stderr[-3000:]
    records = [read_record for read_record in read_records(folder / "metrics.jsonl") if read_record["kind"] == "train"]
    return [np.array([read_record[name] for read_record in records]) for name in ("lm loss", "grad_norm")]


@pytest.mark.parametrize("family", [*FAMILIES, *ENCODERS])
def test_a_gpu_has_the_losses_of_a_cpu(tmp_path, family):
    data = write_dataset(tmp_path / "numbers")
    expected, norms = run(data, tmp_path / "cpu", family, gpu=False)
    if family in FAMILIES:
        assert expected[-1] < expected[0] - 0.1  # it learns, so that wrong gradients would show
    for flags, rtol in ([], 2e-4), (["--bf16"], 2e-2):
        actual, found_norms = run(data, tmp_path / f"gpu{len(flags)}", family, *flags, gpu=True)
        np.testing.assert_allclose(actual, expected, rtol=rtol)
        np.testing.assert_allclose(found_norms, norms, rtol=5 * rtol)
