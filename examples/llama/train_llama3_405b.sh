#!/usr/bin/env bash
# LLaMA-3 405B on 64 nodes of 8 GPUs with 80 GB. README.md beside it: what it needs and costs, how to start it.
#SBATCH --job-name=llama3-405b --nodes=64 --ntasks-per-node=8 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --signal=B:USR1@600 --requeue --open-mode=append
set -euo pipefail
root=$(dirname "$0")/../..
[ -f "$root/examples/launch.sh" ] || root=$SLURM_SUBMIT_DIR  # sbatch runs a copy: submit from the top of the repository
. "$root/examples/launch.sh"

NNODES=${NNODES:-64} TP=${TP:-8} PP=${PP:-16}
TOKENIZER_TYPE=HuggingFaceTokenizer VOCAB_SIZE=128256

MODEL=(--model llama3-405b --seq-length 8192 --bf16 --recompute-granularity selective --recompute-modules layernorm mlp_act)
TRAINING=(  # 1 T tokens
    --micro-batch-size "${MBS:-1}" --global-batch-size "${GBS:-2048}" --train-iters 59605
    --lr 8e-5 --min-lr 8e-7 --lr-decay-style cosine --lr-warmup-iters 8000
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
)
launch pretrain_gpt.py "${MODEL[@]}" "${TRAINING[@]}" "$@"
