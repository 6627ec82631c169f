#!/usr/bin/env bash
# Qwen3-30B-A3B on 2 nodes of 8 GPUs with 80 GB. README.md beside it: what it needs and costs, how to start it.
#SBATCH --job-name=qwen3-30b-a3b --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --signal=B:USR1@600 --requeue --open-mode=append
set -euo pipefail
root=$(dirname "$0")/../..
[ -f "$root/examples/launch.sh" ] || root=$SLURM_SUBMIT_DIR  # sbatch runs a copy: submit from the top of the repository
. "$root/examples/launch.sh"

NNODES=${NNODES:-2} TP=${TP:-1} PP=${PP:-2} EP=${EP:-8}
TOKENIZER_TYPE=HuggingFaceTokenizer VOCAB_SIZE=151936

MODEL=(
    --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --kv-channels 128
    --group-query-attention --num-query-groups 4 --qk-layernorm --seq-length 4096 --max-position-embeddings 40960
    --position-embedding-type rope --rotary-base 1000000 --normalization RMSNorm --norm-epsilon 1e-6 --swiglu
    --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --init-method-std 0.02 --bf16
)
EXPERTS=(
    --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-router-dtype fp32
    --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-3 --moe-token-dispatcher-type alltoall
)
TRAINING=(  # 1 T tokens
    --micro-batch-size "${MBS:-1}" --global-batch-size "${GBS:-512}" --train-iters 476837
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
)
launch pretrain_gpt.py "${MODEL[@]}" "${EXPERTS[@]}" "${TRAINING[@]}" "$@"
